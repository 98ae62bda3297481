"""What a model keeps outside of its modules: training begins with what the program has set."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.trial.check import try_model
from galvatron_lite.verify.trial.findings import Findings
from tests.pool import WorkerPool
from tests.runtime.plans import losses_alone, make_plan

STEPS: dict[str, Any] = {"passes": 0, "table": torch.zeros(0)}


@cache
def places(tokens: int) -> Tensor:
    return torch.linspace(0, 1, tokens)[:, None]


class Counting(nn.Module):
    """Weighs its loss by how often it has run, and keeps a table that grows with the length of samples."""

    total = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.passes = iter(range(100))
        length = 0

        def longest(tokens: int) -> int:
            nonlocal length
            length = max(length, tokens)
            return length

        self.longest = longest

    def forward(self, rows: Tensor) -> Tensor:
        if len(STEPS["table"]) < rows.shape[1]:
            STEPS["table"] = torch.arange(rows.shape[1])[:, None] * 0.1
        STEPS["passes"] += 1
        type(self).total += 0.5
        rows = rows + places(rows.shape[1]) + STEPS["table"][: rows.shape[1]]
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        return rows.square().mean() * (min(STEPS["passes"], 3) + self.total + self.longest(rows.shape[1]))


def begin() -> None:
    STEPS.update(passes=0, table=torch.zeros(0))
    Counting.total = 0.0
    places.cache_clear()


def batches() -> list[Tensor]:
    return [torch.randn(8, length, 4, generator=torch.Generator().manual_seed(length)) for length in (3, 5, 4)]


def plan_of(strategy: Strategy, microbatches: int = 1) -> Plan:
    return make_plan([["before", "blocks.0", "blocks.1", "after"]], [[strategy] * 4], 8, microbatches)


def trained() -> tuple[list[float], str]:
    """The losses under data parallelism; and why two micro-batches are refused."""
    begin()
    with pytest.raises(InputError) as refused:
        auto_parallelize(Counting(), batches()[0], plan=plan_of(Strategy(data=2), 2), device="cpu")
    begin()
    parallel = auto_parallelize(Counting(), batches()[0], plan=plan_of(Strategy(data=2)), device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for batch in batches()], str(refused.value)


def test_values_outside_of_modules_are_those_of_one_process(pool: WorkerPool) -> None:
    begin()
    model = Counting()
    losses = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for found, refused in pool.run(2, trained):
        assert found == pytest.approx(losses, rel=1e-5)
        assert "Counting.total" in refused


class Drawing(Counting):
    """Depends on what no plan can follow, or on random numbers of numpy."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.generator = kind, torch.Generator()

    def forward(self, rows: Tensor) -> Tensor:
        import numpy

        draws = {
            "iterator": lambda: next(self.passes),
            "generator": lambda: torch.rand((), generator=self.generator),
            "numpy": lambda: numpy.random.rand(),
        }
        for block in self.blocks:
            rows = block(rows)
        return rows.square().mean() * draws[self.kind]()


@pytest.mark.parametrize("kind", ["iterator", "generator", "numpy"])
def test_losses_that_differ_in_every_pass(kind: str) -> None:
    model = Drawing(kind)
    findings: Findings = try_model(model, torch.randn(8, 3, 4), discover_layers(model))
    assert findings.draws_elsewhere == (kind == "numpy")
    if kind != "numpy":
        with pytest.raises(InputError, match=r"its loss.*in every pass over the same batch"):
            findings.check(plan_of(Strategy(data=2)))
    findings.check(plan_of(Strategy()))
