"""Models that fork, and networks of several heads, train under ordinary plans as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import call_model
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.model.forks import MODELS, loss_of
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, STEPS = 2, 2
SECOND_STAGES = {
    "pair": ["", "right.first", "left.last", "right.grow"],
    "heads": ["", "kind", "box.2"],
    "cameras": ["", "encoders.1.2"],
    "perception-mini": [""],
    "perception-published-mini": [""],
}
"""Where the second of two stages begins: between branches, and inside of one; "": samples, or pictures, are shared."""
ROOTS = {"segmentation": (Strategy(height=2), Strategy(data=2)), "reconstruction": (Strategy(filters=2),)}
"""Strategies of the perception networks' layers, in turn: odd and even pictures by pixels and samples; channels."""


def made(name: str) -> tuple[nn.Module, Any, Any, float]:
    """A model, its batch, its loss and a rate.

    Perception networks in float64: rounding decides between equal neighbours of a picture of zeros and ones.
    """
    torch.manual_seed(0)
    if name in MODELS:
        return *MODELS[name](), loss_of, 0.1
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build(name)).train().double()
    return model, {key: value.double() for key, value in model.example_batch(SAMPLES).items()}, None, 0.01


def trained_alone(name: str) -> dict[str, Tensor]:
    model, batch, loss_fn, rate = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = call_model(model, batch)
        (output if loss_fn is None else loss_fn(output)).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(name: str, second: str) -> dict[str, Tensor]:
    model, batch, loss_fn, rate = made(name)
    layers = discover_layers(model, batch)
    names, strategies = [layer.name for layer in layers], []
    for place, layer in enumerate(layers):
        root = layer.name.partition(".")[0] if layer.role is Role.BLOCK else ""
        turns = ROOTS.get(root, (Strategy(data=2),))
        strategies.append(Strategy() if second else turns[place % len(turns)])
    cuts = [slice(None, names.index(second)), slice(names.index(second), None)] if second else [slice(None)]
    plan = make_plan([names[cut] for cut in cuts], [strategies[cut] for cut in cuts], SAMPLES)
    parallel = ParallelModel(model, plan, layers, batch, loss_fn=loss_fn, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=rate)
    for _ in range(STEPS):
        parallel.train_step(batch, optimizer)
    return full_state_dict(parallel)


def each_trained(name: str) -> list[dict[str, Tensor]]:
    return [trained(name, second) for second in SECOND_STAGES[name]]


@pytest.mark.parametrize("name", SECOND_STAGES)
def test_weights_are_those_of_one_process(pool: WorkerPool, name: str) -> None:
    wanted, near = trained_alone(name), {"rtol": 1e-5, "atol": 1e-6} if name in MODELS else {"rtol": 1e-7, "atol": 1e-9}
    for second, found in zip(SECOND_STAGES[name], pool.run(2, each_trained, name=name)[0], strict=True):
        for path, tensor in wanted.items():
            torch.testing.assert_close(found[path], tensor, **near, msg=f"{second}: {path}")
