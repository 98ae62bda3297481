"""What the tests of models that are given up run on every rank."""

from __future__ import annotations

import time

import torch.distributed as dist

from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.parallelism.cyclic.models import make_plan
from tests.runtime.cyclic.jobs import ADAM, batches_of, case_of

STEPS = 3


def given_up(count: int, rule: str, setting: str, slow: int | None = None) -> list[float]:
    """Losses of a model that goes without ``flush``; rank ``slow`` comes late to its last training step."""
    (model, layers, stages), batches = case_of(count), batches_of(count)
    cyclic = CyclicModel(model, make_plan(stages, rule, setting, rows=4), layers, batches[0], timeout=20)
    optimizer, losses = cyclic.optimizer(ADAM), list[float]()
    for step, batch in enumerate(batches[:STEPS]):
        if dist.get_rank() == slow and step == STEPS - 1:
            time.sleep(0.3)
        losses.append(float(cyclic.train_step(batch, optimizer)))
    return losses


def one_after_another(count: int, rule: str, setting: str, slow: int) -> list[list[float]]:
    """Two models, each given up; a meeting of all processes behind them, as the next thing of any kind may be."""
    losses = [given_up(count, rule, setting, slow) for _ in range(2)]
    dist.barrier()
    return losses
