"""``auto_parallelize`` measures, plans and trains models as their users make them, also where memory is scarce."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from tests.auto_jobs import measuring_briefly
from tests.pool import WorkerPool
from tests.runtime.untouched import automatic, difference, trained_plainly


@pytest.mark.parametrize(
    ("family", "world"),
    [("T5", 1)]
    + [pytest.param("Whisper", 1, marks=pytest.mark.study)]
    + [pytest.param(family, 2, marks=pytest.mark.study) for family in ("T5", "Bart")],
)
def test_encoder_decoders_are_measured(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    assert [wrong for _, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path))] == [""] * world


@pytest.mark.parametrize(
    ("family", "world"),
    [("Adapted", 2)]
    + [pytest.param("OPT", 1, marks=pytest.mark.study)]
    + [
        pytest.param(family, 2, marks=pytest.mark.study) for family in ("Llama", "OPT", "Phi3", "Gemma2", "Qwen3", "T5")
    ],
)
def test_where_memory_is_scarce(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    for recomputed, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path), tight=True):
        assert recomputed != ["none"]
        assert not wrong


class OfTorch(nn.Module):
    """``nn.TransformerEncoder``, which looks into its layers, behind layers that work in place; frozen or not."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.before = nn.Sequential(nn.Linear(4, 16), nn.ReLU(True), nn.Linear(16, 16), nn.ReLU(True))
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 1)
        self.backbone_trains = not frozen
        for part in (self.before, self.encoder):
            part.requires_grad_(not frozen)

    def forward(self, features: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.backbone_trains):
            hidden = self.encoder(self.before(features))
        return self.head(hidden).square().mean()


class Nested(nn.Module):
    """Its blocks are dicts of modules in a list, which no call runs as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = ({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)} for _ in range(3))
        self.stages = nn.ModuleDict({"first": nn.ModuleList(nn.ModuleDict(one) for one in parts)})

    def forward(self, features: Tensor) -> Tensor:
        for part in self.stages["first"]:
            features = features + part["down"](part["up"](features).relu())
        return features.square().mean()


IN_PLACE = [f"before.{number}" for number in range(4)]
KINDS = {"encoder": (False, None), "in place": (False, IN_PLACE), "frozen": (True, None)}


def automatic_of_torch(kind: str, folder: str) -> str:
    frozen, blocks = KINDS.get(kind, (False, None))
    batch = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1))
    model, alone = (Nested() if kind == "nested" else OfTorch(frozen) for _ in range(2))
    with measuring_briefly():
        parallel = auto_parallelize(model, batch, blocks=blocks, folder=Path(folder))
    return difference(parallel, batch, trained_plainly(alone, batch))


@pytest.mark.parametrize("kind", [*KINDS, "nested"])
def test_what_is_made_of_torchs_modules_is_measured(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    world = 2 if kind == "nested" else 1
    assert pool.run(world, automatic_of_torch, kind=kind, folder=str(tmp_path)) == [""] * world
