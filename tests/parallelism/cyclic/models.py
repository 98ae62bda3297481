"""Small models for cyclic data parallelism, their layers, and their plans."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, Cyclic, LayerRun, Plan, Schedule, Stage

WIDTH, ROWS = 3, 2


class Blocks(nn.Module):
    """A line of equal hidden layers and a mean squared error."""

    def __init__(self, count: int, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x, y)


class Mixed(nn.Module):
    """A skip over a stage, a parameter that no layer holds, a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = self.stem(x)
        hidden = skip * self.scale
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return nn.functional.mse_loss(self.head(self.norm(hidden + skip)), y)


class Deep(nn.Module):
    """Equal blocks that keep more than what they are given."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        parts = (nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width), nn.Tanh())
        self.blocks = nn.ModuleList(copy.deepcopy(nn.Sequential(*parts)) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.sum() - y.sum()).abs()


Case = tuple[nn.Module, tuple[Layer, ...], list[list[str]]]
"""A model, its layers, and the stages' layers."""


def blocks_case(count: int) -> Case:
    """As many stages of a block each."""
    return Blocks(count), *_lined(count)


def deep_case(count: int, width: int) -> Case:
    """As many stages of a block each."""
    return Deep(count, width), *_lined(count)


def _lined(count: int) -> tuple[tuple[Layer, ...], list[list[str]]]:
    names = [f"blocks.{place}" for place in range(count)]
    return tuple(Layer(name, "block", Role.BLOCK, (name,)) for name in names), [[name] for name in names]


def mixed_case() -> Case:
    """Three stages; the skip goes around the second one."""
    blocks = [Layer(f"blocks.{place}", f"block{place}", Role.BLOCK, (f"blocks.{place}",)) for place in range(4)]
    before = Layer("before", "before", Role.BEFORE, ("stem",))
    layers = (before, *blocks, Layer("after", "after", Role.AFTER, ("norm", "head")))
    names = [layer.name for layer in layers]
    return Mixed(), layers, [names[:2], names[2:4], names[4:]]


def make_plan(
    stages: Sequence[Sequence[str]],
    rule: CyclicRule | str,
    setting: CyclicSetting | str,
    rows: int = ROWS,
    strategy: Strategy | None = None,
) -> Plan:
    """A plan for these stages, with micro-batches of some samples."""
    count, chosen = len(stages), CyclicSetting(setting)
    made = tuple(Stage(tuple(LayerRun(name, name, 1, strategy or Strategy()) for name in names)) for names in stages)
    return Plan(
        PLAN_VERSION, "test", device_count(chosen, count), rows * count, count, Schedule.CYCLIC, "fp32", made,
        cyclic=Cyclic(CyclicRule(rule), chosen),
    )  # fmt: skip


def make_batches(steps: int, count: int, rows: int = ROWS, width: int = WIDTH) -> list[dict[str, Tensor]]:
    """Global batches of ``count`` micro-batches."""
    return [{"x": torch.randn(rows * count, width), "y": torch.randn(rows * count, width)} for _ in range(steps)]


def split(batch: dict[str, Tensor], count: int) -> list[Any]:
    """The micro-batches of a global batch."""
    rows = len(batch["x"]) // count
    return [
        {key: value[start : start + rows] for key, value in batch.items()} for start in range(0, rows * count, rows)
    ]
