"""Plans written by hand, and models under them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from galvatron_lite.model.batch import batch_size
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.engine import ParallelModel


def make_plan(
    names: Sequence[Sequence[str]],
    strategies: Sequence[Sequence[Strategy]],
    global_batch: int,
    microbatches: int = 1,
    precision: str = "fp32",
) -> Plan:
    """A plan with one run a layer: names and strategies by stage."""
    stages = tuple(
        Stage(tuple(LayerRun(name, name, 1, strategy) for name, strategy in zip(stage, chosen, strict=True)))
        for stage, chosen in zip(names, strategies, strict=True)
    )
    devices = len(stages) * strategies[0][0].devices
    return Plan(PLAN_VERSION, "test", devices, global_batch, microbatches, Schedule.ONE_F_ONE_B, precision, stages)


def split_model(
    model: nn.Module,
    batch: Any,
    strategies: Strategy | Sequence[Strategy],
    cuts: Sequence[int] = (),
    *,
    microbatches: int = 1,
    precision: str = "fp32",
    blocks: Any = None,
    **options: Any,
) -> ParallelModel:
    """A model whose layers have these strategies, or all one; stages end before the layers at the cuts."""
    layers = discover_layers(model, batch, blocks=blocks)
    chosen = [strategies] * len(layers) if isinstance(strategies, Strategy) else strategies
    assert len(chosen) == len(layers), [layer.name for layer in layers]
    spans = list(pairwise([0, *(cut % len(layers) for cut in cuts), len(layers)]))
    names = [[layer.name for layer in layers[start:stop]] for start, stop in spans]
    plan = make_plan(names, [chosen[start:stop] for start, stop in spans], batch_size(batch), microbatches, precision)
    return ParallelModel(model, plan, layers, batch, device="cpu", **options)
