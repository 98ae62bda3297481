"""Models train under every plan, and by themselves, as their users make them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from galvatron_lite import auto_parallelize
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from tests.auto_jobs import measuring_briefly
from tests.pool import WorkerPool
from tests.runtime.examined import examined_once
from tests.runtime.plans import make_plan, split_model
from tests.runtime.untouched import (
    DECODERS,
    SAMPLES,
    VOCAB,
    alone,
    automatic,
    batch_for,
    difference,
    trained_plainly,
    unchanged,
    under,
    untouched,
)
from tests.together import Together, together

FAMILIES = [*DECODERS, "Adapted", "T5", "Bart", "Whisper"]
FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
FULL_DATA = Strategy(data=2, recompute=FULL)


def each_recomputed(case: str) -> list[str]:
    return [under(case, Strategy(recompute=choice), Strategy()) for choice in (FULL, SELECTIVE)]


recomputed = together(each_recomputed, {family: family for family in FAMILIES}, lambda _: 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_keep_no_cache(recomputed: Together, family: str) -> None:
    assert recomputed[family] == [["", ""]]


@pytest.mark.parametrize("family", ["Gemma2", "OPT", "Adapted"])
def test_recomputed_layers_keep_no_cache_on_two_ranks(pool: WorkerPool, family: str) -> None:
    """Where the batch asks for one, too."""
    assert pool.run(2, each_split, family=family) == [[""] * 5] * 2


@examined_once()
def each_split(family: str) -> list[str]:
    asked = {} if family == "Adapted" else {"use_cache": True}
    edge, zero = Strategy(data=2), Strategy(zero=2, zero_stage=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no rule.*")
        return [
            under(family, Strategy(tensor=2, recompute=FULL), edge, **asked),
            under(family, Strategy(context=2, recompute=SELECTIVE), Strategy(context=2), **asked),
            under(family, Strategy(zero=2, zero_stage=3, recompute=FULL), zero, **asked),
            under(family, Strategy(data=2, recompute=SELECTIVE), edge, **asked),
            in_stages(family, Strategy(recompute=FULL)),
        ]


def in_stages(family: str, strategy: Strategy) -> str:
    batch, model, expected = batch_for(family), untouched(family), alone(family, unchanged, ())
    return difference(split_model(model, batch, strategy, [-2], microbatches=2), batch, expected)


def test_hooks_of_users_see_what_code_between_layers_sees(pool: WorkerPool) -> None:
    """As those of transformers, PEFT and the like, which make the embedding's output take a gradient."""
    assert pool.run(2, hooked) == [""] * 2


def hooked() -> str:
    def change(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0].reshape(SAMPLES, -1, 32), *args[1:]))
            layer.register_forward_hook(lambda _, __, output: 0.5 * output.reshape(SAMPLES, -1, 32))
        return model

    return under("Llama", Strategy(context=2), Strategy(context=2), change)


class Checkpointed(nn.Module):
    """Calls its layers through checkpoints of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.enter = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.enter(ids)
        for layer in self.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_model_are_left_to_the_plan(pool: WorkerPool, reentrant: bool, tmp_path: Path) -> None:
    assert pool.run(2, checkpointed, reentrant=reentrant, folder=str(tmp_path)) == [[""] * 2] * 2


def checkpointed(reentrant: bool, folder: str) -> list[str]:
    """Measured and planned; under a plan of stages where the model's own checkpoints are reentrant."""
    batch, found = torch.randint(VOCAB, (SAMPLES, 6), generator=torch.Generator().manual_seed(1)), []
    ways: list[dict[str, Any]] = [{"fix": one, "folder": Path(folder)} for one in ("zero=3", "microbatches=2")]
    if reentrant:
        names = [layer.name for layer in discover_layers(Checkpointed(reentrant), batch)]
        stages = [[Strategy(recompute=FULL)] * 3, [Strategy()] * (len(names) - 3)]
        plans = (
            make_plan([names[:3], names[3:]], stages, SAMPLES, 2),
            make_plan([names], [[FULL_DATA] * len(names)], SAMPLES),
        )
        ways = [{"plan": plan} for plan in plans]
    for way in ways:
        with measuring_briefly(max_samples=1, tensor_degrees=[1]):
            parallel = auto_parallelize(Checkpointed(reentrant), batch, **way)
        found.append(difference(parallel, batch, trained_plainly(Checkpointed(reentrant), batch)))
    return found


def test_checkpoints_of_unsplit_models_are_pytorchs() -> None:
    model, ids = Checkpointed(reentrant=False), torch.arange(6)[None]
    calls: list[nn.Module] = []
    model.layers[0].register_forward_pre_hook(lambda module, _: calls.append(module))
    model(ids).backward()
    assert len(calls) == 2


class Reshaping(nn.Module):
    """Pictures whose pixels attention takes as tokens: code between layers reads shapes and reshapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Conv2d(3, 8, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.leave = nn.Conv2d(8, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.enter(pictures)
        for layer in self.layers:
            samples, channels, height, width = hidden.shape
            hidden = layer(hidden.reshape(samples, channels, -1).transpose(1, 2)).transpose(1, 2)
            hidden = hidden.reshape(samples, -1, height, width)
        return self.leave(hidden).square().mean()


def test_shapes_of_what_a_stage_receives_are_those_of_its_samples(pool: WorkerPool) -> None:
    assert pool.run(4, reshaping) == [""] * 4


def reshaping() -> str:
    model, batch = Reshaping(), torch.randn(SAMPLES, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    samples, matmuls = Strategy(data=2), Strategy(tensor=2)
    parallel = split_model(model, batch, [samples, samples, matmuls, matmuls, matmuls, samples], [3], microbatches=2)
    return difference(parallel, batch, trained_plainly(Reshaping(), batch))


def test_outputs_without_gradients_have_the_cache(pool: WorkerPool) -> None:
    assert pool.run(1, cached_tokens) == [[True, False, True]]


def cached_tokens() -> list[bool]:
    """Whether outputs have a cache: without gradients, in training, in evaluation."""
    model, batch = untouched("Llama"), batch_for("Llama")
    parallel = split_model(model, batch, Strategy())
    outputs = [parallel.outputs(batch), model(**batch), model.eval()(**batch)]
    return [output.past_key_values is not None for output in outputs]


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
    [("Adapted", 1)]
    + [pytest.param("OPT", 1, marks=pytest.mark.study)]
    + [
        pytest.param(family, 2, marks=pytest.mark.study)
        for family in ("Adapted", "Llama", "OPT", "Phi3", "Gemma2", "Qwen3", "T5")
    ],
)
def test_plans_of_least_memory_train_like_one_process(
    pool: WorkerPool, tmp_path: Path, family: str, world: int
) -> None:
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
    with measuring_briefly(max_samples=1):
        parallel = auto_parallelize(model, batch, blocks=blocks, folder=Path(folder))
    return difference(parallel, batch, trained_plainly(alone, batch))


@pytest.mark.parametrize("kind", [*KINDS, "nested"])
def test_what_is_made_of_torchs_modules_is_measured(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    world = 2 if kind == "nested" else 1
    assert pool.run(world, automatic_of_torch, kind=kind, folder=str(tmp_path)) == [""] * world
