"""Small training runs that are saved and resumed under various plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.runtime.engine import ParallelModel
from tests.runtime.plans import make_plan

WIDTH, SAMPLES, CLASSES = 6, 16, 5
ADAMW = {"lr": 0.05, "weight_decay": 0.1}


class Block(nn.Module):
    """A block with running statistics, dropout, and a vector that ZeRO shards unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(WIDTH - 1))

    def forward(self, hidden: Tensor) -> Tensor:
        inside = self.drop(functional.gelu(self.norm(self.linear(hidden))))
        return hidden + inside * functional.pad(self.scale, (0, 1), value=1.0)


class Net(nn.Module):
    """Three blocks between an embedding and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, token: Tensor, label: Tensor) -> Tensor:
        hidden = self.enter(token)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.leave(hidden), label)


@dataclass(frozen=True)
class Case:
    """Strategies of the layer before, three blocks and the layer after; ``cuts``: layers at which stages begin."""

    strategies: Sequence[Strategy]
    cuts: Sequence[int] = ()
    microbatches: int = 1
    virtual: int = 1


@dataclass
class Position:
    """The position of a data loader."""

    at: int = 0
    order: list[int] = field(default_factory=lambda: [3, 1, 4, 0, 2])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]

    def next(self) -> dict[str, Tensor]:
        self.at += 1
        generator = torch.Generator().manual_seed(self.order[self.at % len(self.order)])
        token = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        return {"token": token, "label": (token + 1) % CLASSES}


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def make_run(case: Case, seed: int = 0) -> tuple[ParallelModel, torch.optim.Optimizer, Any, Position]:
    """A model, an optimizer with two groups, a scheduler with warm-up, and the data."""
    model, data = make_net(seed), Position()
    batch = Position().next()
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])
    bounds = [0, *case.cuts, len(layers)]
    names = [[layer.name for layer in layers[a:b]] for a, b in pairwise(bounds)]
    strategies = [list(case.strategies[a:b]) for a, b in pairwise(bounds)]
    plan = make_plan(names, strategies, SAMPLES, case.microbatches)
    if case.virtual > 1:
        devices = plan.devices // case.virtual
        plan = replace(plan, virtual_stages=case.virtual, devices=devices, schedule=Schedule.INTERLEAVED)
    parallel = ParallelModel(model, plan, layers, batch, device="cpu")
    optimizer = torch.optim.AdamW(parallel.param_groups(groups_of(parallel)), **ADAMW)  # type: ignore[arg-type]
    return parallel, optimizer, make_scheduler(optimizer), data


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups without weight decay for vectors."""
    flat = [one for one in model.parameters() if one.dim() < 2]
    deep = [one for one in model.parameters() if one.dim() > 1]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": deep, "lr": 0.02}]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[3])


def go_on(run: tuple[ParallelModel, torch.optim.Optimizer, Any, Position], steps: int) -> list[float]:
    """Train some steps; return each loss and a random number of numpy."""
    parallel, optimizer, scheduler, data = run
    losses = []
    for _ in range(steps):
        losses.append(float(parallel.train_step(data.next(), optimizer)))
        losses.append(float(numpy.random.rand()))
        scheduler.step()
    return losses


def save(run: tuple[ParallelModel, torch.optim.Optimizer, Any, Position], folder: Path | str, **options: Any) -> None:
    parallel, optimizer, scheduler, data = run
    parallel.save(folder, optimizer, scheduler=scheduler, data=data, **options)


def load(run: tuple[ParallelModel, torch.optim.Optimizer, Any, Position], folder: Path | str) -> Any:
    parallel, optimizer, scheduler, data = run
    return parallel.load(folder, optimizer, scheduler=scheduler, data=data)


def moments(optimizer: torch.optim.Optimizer, parallel: ParallelModel) -> dict[str, Tensor]:
    """The full states of the optimizer."""
    from galvatron_lite.runtime.parameters.full_state import gather
    from galvatron_lite.runtime.parameters.pieces import held_states

    return gather(held_states(parallel, optimizer.state))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
