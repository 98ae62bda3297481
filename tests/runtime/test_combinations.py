"""What is chosen apart works together: compiled blocks, half precision and draws as in one process, beside switches and
checkpoints.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.rng.modules import same_randomness
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

PAIR, ZERO, HALF = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(tensor=2)
SEED = 5
PLAIN, MIXED = [PAIR] * 5, [PAIR, ZERO, HALF, ZERO, PAIR]
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
Run = tuple[ParallelModel, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(rate), nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.drop(self.up(hidden).relu()))


class Tower(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden) ** 2).mean()


def batch_of(step: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)),)


def layers_of(model: nn.Module) -> Any:
    return discover_layers(model, batch_of(0), blocks=[f"blocks.{number}" for number in range(3)])


def planned(strategies: list[Strategy], precision: str) -> Any:
    names = [layer.name for layer in layers_of(Tower())]
    return make_plan([names], [strategies], 8, precision=precision)


def begun(strategies: list[Strategy], precision: str, seed: int = 0, rate: float = 0.0, **options: Any) -> Run:
    torch.manual_seed(seed)
    model, options = Tower(rate), {"seed": SEED} | options
    plan = planned(strategies, precision)
    parallel = ParallelModel(model, plan, layers_of(model), batch_of(0), device="cpu", **options)
    return parallel, parallel.optimizer(ADAM)


def steps(run: Run, *numbers: int) -> list[float]:
    parallel, optimizer = run
    return [float(parallel.train_step(batch_of(number), optimizer)) for number in numbers]


WAYS: dict[str, dict[str, Any]] = {
    "compile": {"compile": "aot_eager"},
    "fp16": {"precision": "fp16"},
    "same draws": {"randomness": "same", "rate": 0.3},
}


def changed(folder: str) -> dict[str, list[list[float]]]:
    """By way: losses under one plan all along, with switches between, resumed under the same plan, and another."""
    return {name: _changed(f"{folder}/{number}", **way) for number, (name, way) in enumerate(WAYS.items())}


def _changed(place: str, precision: str = "fp32", **way: Any) -> list[list[float]]:
    make = partial(begun, precision=precision, **way)
    whole, live = make(PLAIN), make(PLAIN)
    first = steps(whole, 0, 1)
    whole[0].save(place, whole[1])
    switched = steps(live, 0)
    for number, strategies in enumerate((MIXED, PLAIN, MIXED), start=1):
        live[0].switch(planned(strategies, precision), live[1])
        switched += steps(live, number)
    resumed = []
    for strategies in (PLAIN, MIXED):
        other = make(strategies, seed=5)
        steps(other, 7)
        other[0].load(place, other[1])
        resumed.append(first + steps(other, 2, 3))
    return [first + steps(whole, 2, 3), switched, *resumed]


def alone(rate: float) -> list[float]:
    """What one process computes."""
    torch.manual_seed(0)
    model = Tower(rate)
    optimizer, losses = ADAM(model.parameters()), []
    with same_randomness(model, batch_of(0), SEED):
        for number in range(4):
            optimizer.zero_grad()
            loss = model(*batch_of(number))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def test_switches_and_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    """Beside compiled blocks, half precision, and draws as in one process."""
    for found in pool.run(2, changed, folder=str(tmp_path)):
        for name, (whole, switched, resumed, other) in found.items():
            off = 2e-3 if name == "fp16" else 1e-5
            wanted = alone(WAYS[name].get("rate", 0.0))
            assert whole == pytest.approx(wanted, rel=off), name
            assert switched == pytest.approx(whole, rel=off), name
            assert resumed == whole, name
            assert other == pytest.approx(whole, rel=off), name
