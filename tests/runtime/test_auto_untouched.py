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


@pytest.mark.parametrize(("family", "world"), [("T5", 2), ("Bart", 1), ("Whisper", 1)])
def test_encoder_decoders_are_measured(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    assert [wrong for _, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path))] == [""] * world


@pytest.mark.parametrize(
    ("family", "world"),
    [("OPT", 1), ("Adapted", 2)]
    + [
        pytest.param(family, 2, marks=pytest.mark.study) for family in ("Llama", "OPT", "Phi3", "Gemma2", "Qwen3", "T5")
    ],
)
def test_where_memory_is_scarce(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    for recomputed, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path), tight=True):
        assert recomputed != ["none"]
        assert not wrong


class OfTorch(nn.Module):
    """``nn.TransformerEncoder``, which looks into its layers, between layers that work in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.before = nn.Sequential(nn.Linear(4, 16), nn.ReLU(True), nn.Linear(16, 16), nn.ReLU(True))
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.encoder(self.before(features)).square().mean()


def automatic_of_torch(blocks: list[str] | None, folder: str) -> str:
    batch = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1))
    with measuring_briefly():
        parallel = auto_parallelize(OfTorch(), batch, blocks=blocks, folder=Path(folder))
    return difference(parallel, batch, trained_plainly(OfTorch(), batch))


@pytest.mark.parametrize("blocks", [None, ["before.0", "before.1", "before.2", "before.3"]])
def test_modules_of_torch_are_measured(pool: WorkerPool, tmp_path: Path, blocks: list[str] | None) -> None:
    assert pool.run(2, automatic_of_torch, blocks=blocks, folder=str(tmp_path)) == [""] * 2
