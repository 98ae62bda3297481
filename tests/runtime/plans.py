"""Plans written by hand, and models under them, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from galvatron_lite.model.batch import batch_size, call_model, loss_of
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


def losses_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    after_backward: Callable[[nn.Module], object] = lambda _: None,
) -> list[float]:
    """The losses of a training loop of plain torch, a step for each batch."""
    losses = []
    for batch in batches:
        loss = loss_of(call_model(model, batch), batch)
        loss.backward()
        after_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def clipped(model: nn.Module, largest: float) -> None:
    """Clip the gradient, for ``losses_alone``."""
    nn.utils.clip_grad_norm_(model.parameters(), largest)


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
