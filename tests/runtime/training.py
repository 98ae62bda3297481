"""Jobs that train a tiny model under a plan, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients, full_state_dict
from tests.runtime.examined import Examined
from tests.runtime.plans import clipped, losses_alone, make_plan

SAMPLES, TOKENS, VOCAB, LAYERS = 8, 16, 96, 3
NOISE = 1e-8
ADAMW = {"lr": 1e-2, "eps": 1e-4}
"""Adam divides by the gradient's own size: with a tiny ``eps``, rounding noise in gradients that are zero in theory
(the bias of the keys) would decide the sign of a whole step, in one process as well."""


@dataclass(frozen=True)
class Case:
    """A model and the strategies of before, each of its blocks, after; ``cuts`` are where stages end."""

    strategies: Sequence[Strategy]
    model: str = "gpt-tiny"
    microbatches: int = 1
    cuts: Sequence[int] = ()
    precision: str = "fp32"
    max_grad_norm: float | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual: int = 1

    @property
    def blocks(self) -> int:
        return len(self.strategies) - 2 if self.strategies else LAYERS

    @property
    def world(self) -> int:
        return self.strategies[0].devices * (len(self.cuts) + 1) // self.virtual


@dataclass
class Trained:
    """What a few steps gave."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def make_model(name: str, blocks: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return build(name, vocab=VOCAB, layers=blocks, hidden=32, sequence=TOKENS)


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


@cache
def layers_of(model: str, blocks: int = LAYERS) -> tuple[Layer, ...]:
    return discover_layers(make_model(model, blocks))


def plan_of(case: Case) -> Plan:
    layers = layers_of(case.model, case.blocks)
    bounds = [0, *case.cuts, len(layers)]
    names = [[layer.name for layer in layers[a:b]] for a, b in pairwise(bounds)]
    strategies = [list(case.strategies[a:b]) for a, b in pairwise(bounds)]
    plan = make_plan(names, strategies, SAMPLES, case.microbatches, case.precision)
    return replace(plan, devices=case.world, schedule=case.schedule, virtual_stages=case.virtual)


def make_parallel(case: Case, **options: Any) -> ParallelModel:
    model, layers = make_model(case.model, case.blocks), layers_of(case.model, case.blocks)
    with examined_of(case.model, case.blocks).taken():
        return ParallelModel(model, plan_of(case), layers, make_batch(), device="cpu", **options)


@cache
def examined_of(_model: str, _blocks: int) -> Examined:
    return Examined()


def train(case: Case, steps: int = 2) -> Trained:
    """Gradients of the first step, losses of all, parameters after the last.

    After two steps the parameters tell what the first left in the optimizer.
    """
    parallel = make_parallel(case, max_grad_norm=case.max_grad_norm)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch = make_batch()
    parallel.backward_step(batch)
    gradients = full_gradients(parallel)
    optimizer.zero_grad()
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, full_state_dict(parallel))


def train_alone(case: Case, steps: int = 2) -> Trained:
    """One process, plain torch."""
    return train_plainly(make_model(case.model, case.blocks), make_batch(), case.max_grad_norm, steps)


def train_plainly(model: nn.Module, batch: dict[str, Tensor], max_grad_norm: float | None, steps: int) -> Trained:
    """Gradients of the first step, losses of all, the state after the last, of a model in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(**batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    model.load_state_dict(state)
    optimizer.zero_grad()
    clip = partial(clipped, largest=float("inf") if max_grad_norm is None else max_grad_norm)
    losses = losses_alone(model, optimizer, [batch] * steps, clip)
    return Trained(losses, gradients, dict(model.state_dict()))


def assert_same(found: Trained, wanted: Trained, rtol: float = 1e-5) -> None:
    """Losses, every gradient and every parameter; differences relative to the tensor's norm."""
    # a step tells its loss in float32
    torch.testing.assert_close(found.losses, wanted.losses, rtol=max(rtol, 1e-6), atol=0)
    for mine, theirs in ((found.gradients, wanted.gradients), (found.state, wanted.state)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            difference = float((mine[name] - tensor).double().norm())
            # a gradient that is zero in theory holds only rounding noise
            assert difference <= max(rtol * float(tensor.double().norm()), NOISE), f"{name}: off by {difference}"
