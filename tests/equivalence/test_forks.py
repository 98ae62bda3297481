"""Models that fork train under ordinary plans as on one process: stages in order, layers of several branches in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.model.forks import MODELS, loss_of
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, STEPS = 2, 2
FIRST_OF_SECOND = {
    "pair": ["right.first", "left.last", "right.grow"],
    "heads": ["kind", "box.2"],
    "cameras": ["encoders.1.2"],
}
"""Where the second of two stages begins: between branches, and inside of one."""


def trained_alone(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(name: str, second: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    layers = discover_layers(model, batch)
    names = [layer.name for layer in layers]
    cut = names.index(second) if second else 0
    stages = [names[:cut], names[cut:]] if second else [names]
    strategy = Strategy() if second else Strategy(data=2)
    plan = make_plan(stages, [[strategy] * len(stage) for stage in stages], SAMPLES)
    parallel = ParallelModel(model, plan, layers, batch, loss_fn=loss_of, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(STEPS):
        parallel.train_step(batch, optimizer)
    return full_state_dict(parallel)


@pytest.mark.parametrize("name", FIRST_OF_SECOND)
def test_weights_are_those_of_one_process(pool: WorkerPool, name: str) -> None:
    wanted = trained_alone(name)
    for second in ("", *FIRST_OF_SECOND[name]):
        found = pool.run(2, trained, name=name, second=second)[0]
        for path, tensor in wanted.items():
            torch.testing.assert_close(found[path], tensor, rtol=1e-5, atol=1e-6, msg=f"{second}: {path}")
