"""Models in which values of tensors decide what runs: captured or not, they train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.auto_jobs import measuring_briefly
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan
from tests.runtime.untouched import difference, trained_plainly

SAMPLES, WIDTH = 8, 16


class Experts(nn.Module):
    """A mixture as people write it: each expert runs on the tokens that chose it, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(6)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2, -1)
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                output.index_add_(0, rows, expert(hidden[rows]) * weights[rows, places, None])
        shares = nn.functional.one_hot(chosen, 6).float().mean((0, 1))
        self.balance = (shares * self.gate(hidden).softmax(-1).mean(0)).sum()
        return hidden + output


class Deciding(nn.Module):
    """Blocks, and code between them that reads values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.enter = nn.Linear(4, WIDTH)
        blocks = (
            Experts() if kind in ("experts", "balanced") else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in range(4)
        )
        self.blocks = nn.ModuleList(blocks)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, depths: Tensor) -> Tensor:
        hidden = self.enter(features)
        for block in self.blocks[: int(depths.max()) if self.kind == "depth" else 4]:
            if self.kind == "numbers":
                scales = [1 + depth / 10 for depth in depths.tolist()]
                hidden = hidden * torch.tensor(scales)[:, None] + float(hidden.detach().numpy().size > 0)
            hidden = block(hidden) if self.kind != "branch" or hidden.abs().sum() > 0 else 2 * hidden
        balance = sum(block.balance for block in self.blocks) if self.kind == "balanced" else 0.0
        return self.leave(hidden).square().mean() + balance


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 4, generator=generator), torch.tensor([3, 2, 3, 1, 3, 2, 1, 3])


def trained(kind: str, folder: str, **options: Any) -> str:
    batch, model = make_batch(), Deciding(kind)
    with measuring_briefly():
        parallel = auto_parallelize(model, batch, folder=Path(folder), **options)
    return difference(parallel, batch, trained_plainly(Deciding(kind), batch))


@pytest.mark.parametrize("kind", ["depth", "numbers", "experts", "branch"])
def test_auto_parallelize_trains_them(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(2, trained, kind=kind, folder=str(tmp_path)) == [""] * 2


def test_under_every_pin_that_needs_no_graph(pool: WorkerPool, tmp_path: Path) -> None:
    """On four ranks, some of which run no sample through some experts."""
    pins = {"fix": {"zero": 1, "recompute": "full", "microbatches": 2}}
    assert pool.run(4, trained, kind="experts", folder=str(tmp_path), **pins) == [""] * 4


def refused(kind: str, **options: Any) -> str:
    try:
        auto_parallelize(Deciding(kind), make_batch(), **options)
    except InputError as error:
        return str(error)
    return ""


def test_what_needs_the_graph_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(2, refused, kind="experts", fix={"pp": 2}):
        assert "--fix pipeline: 2 cannot be used." in said
        assert "It trains with dp=2" in said


@pytest.mark.parametrize("options", [{}, {"fix": {"dp": 1, "microbatches": 1}}])
def test_a_loss_of_the_batch_as_a_whole_is_refused_by_one_message(pool: WorkerPool, options: dict[str, Any]) -> None:
    """Experts of a list, and a loss that balances them over all tokens: no plan of two ranks trains it."""
    for said in pool.run(2, refused, kind="balanced", **options):
        assert "On 2 devices no plan trains like one process" in said
        assert "model.zoo.moe.Experts" in said
        assert "--fix" not in said


def test_no_stages_where_values_of_layers_decide(pool: WorkerPool) -> None:
    assert "reads values of what" in trace(Deciding("branch"), make_batch()).whole
    assert not trace(Deciding("plain"), make_batch()).whole
    for said in pool.run(2, in_stages):
        assert "reads values of it to decide what runs" in said


def in_stages() -> str:
    model, batch = Deciding("branch"), make_batch()
    layers = discover_layers(model, batch)
    stages = [[layer.name for layer in part] for part in (layers[:3], layers[3:])]
    plan = make_plan(stages, [[Strategy()] * len(stage) for stage in stages], SAMPLES)
    try:
        ParallelModel(model, plan, layers, batch, device="cpu")
    except InputError as error:
        return str(error)
    return ""
