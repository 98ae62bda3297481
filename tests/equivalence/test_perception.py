"""The perception network under a plan of unlike strategies trains as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, STEPS = 2, 2
ROOTS = {"segmentation": (Strategy(height=2), Strategy(data=2)), "reconstruction": (Strategy(filters=2),)}
"""Strategies of the networks' layers, in turn: odd and even pictures by pixels and samples; channels."""


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """In float64: rounding decides between equal neighbours of a picture of zeros and ones."""
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build(name)).train().double()
    return model, {key: value.double() for key, value in model.example_batch(SAMPLES).items()}


def trained_alone(name: str) -> dict[str, Tensor]:
    model, batch = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(name: str) -> dict[str, Tensor]:
    model, batch = made(name)
    layers = discover_layers(model, batch)
    strategies = []
    for place, layer in enumerate(layers):
        turns = ROOTS[layer.name.partition(".")[0]] if layer.role is Role.BLOCK else (Strategy(data=2),)
        strategies.append(turns[place % len(turns)])
    plan = make_plan([[layer.name for layer in layers]], [strategies], SAMPLES)
    parallel = ParallelModel(model, plan, layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.01)
    for _ in range(STEPS):
        parallel.train_step(batch, optimizer)
    return full_state_dict(parallel)


@pytest.mark.parametrize("name", ["perception-mini", "perception-published-mini"])
def test_weights_are_those_of_one_process(pool: WorkerPool, name: str) -> None:
    wanted = trained_alone(name)
    found = pool.run(2, trained, name=name)[0]
    for path, tensor in wanted.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-7, atol=1e-9, msg=path)
