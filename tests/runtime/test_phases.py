"""Phases: batches that grow, micro-batches that change, another split; as one process trains them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase, in_order
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.phases import Phases
from tests.pool import WorkerPool

CONFIG = GPTConfig(vocab=32, layers=2, hidden=16, heads=2, sequence=8)
STEPS, BATCHES, SEQUENCES = 2, (4, 8, 8, 4), (8, 8, 4, 8)


def make_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step, of its phase's samples and tokens."""
    phase = step // STEPS
    shape = (BATCHES[phase], SEQUENCES[phase] + 1)
    rows = torch.randint(0, CONFIG.vocab, shape, generator=torch.Generator().manual_seed(step))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _plan(layers: list[Layer], batch: int, microbatches: int, strategy: Strategy, cuts: tuple[int, ...] = ()) -> Plan:
    ends = cuts or (0, len(layers))
    runs = [
        tuple(LayerRun(layer.name, layer.name, 1, strategy) for layer in layers[start:stop])
        for start, stop in pairwise(ends)
    ]
    stages = tuple(Stage(run) for run in runs)
    return Plan(PLAN_VERSION, "gpt", 2, batch, microbatches, Schedule.ONE_F_ONE_B, "fp32", stages)


def train_in_phases() -> tuple[list[float], list[str], str]:
    """The losses of all steps, how the first layer is split in each phase, and what a wrong batch is answered with."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    layers = list(discover_layers(model, make_batch(0)))
    data, shards = Strategy(data=2), Strategy(zero=2, zero_stage=3)
    plans = [
        _plan(layers, BATCHES[0], 1, data), _plan(layers, BATCHES[1], 2, data), _plan(layers, BATCHES[2], 1, shards),
        _plan(layers, BATCHES[3], 2, Strategy(), (0, 2, len(layers))),
    ]  # fmt: skip
    phases = [PlannedPhase(str(place), 0, STEPS, SEQUENCES[place], plan) for place, plan in enumerate(plans)]
    parallel = ParallelModel(model, plans[0], layers, make_batch(0), device="cpu")
    parallel.steering = Phases(parallel, PhasedPlan(1, in_order(phases)))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    refused = ""
    try:
        parallel.train_step(make_batch(STEPS), optimizer)
    except InputError as error:
        refused = str(error)
    losses, splits = [], []
    for step in range(STEPS * len(plans)):
        assert parallel.phase.sequence == SEQUENCES[step // STEPS]
        losses.append(float(parallel.train_step(make_batch(step), optimizer)))
        if step % STEPS == 0:
            splits.append(str(parallel.plan.stages[0].runs[0].strategy))
    return losses, splits, refused


def train_alone() -> list[float]:
    """The losses of plain PyTorch."""
    torch.manual_seed(0)
    model: Any = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS * len(BATCHES)):
        loss = model(**make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_phases_train_as_one_process_does(pool: WorkerPool) -> None:
    losses, splits, refused = pool.run(2, train_in_phases)[0]
    assert losses == pytest.approx(train_alone(), rel=1e-5)
    assert splits == ["data2", "data2", "zero3x2", "unsplit"]
    assert f"give {BATCHES[0]}" in refused
