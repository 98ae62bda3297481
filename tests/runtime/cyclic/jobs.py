"""What the tests of ``CyclicModel`` run on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.parallelism.cyclic.models import Case, blocks_case, make_batches, make_plan, mixed_case

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier", "reduce", "gather", "scatter",
    "all_to_all", "all_to_all_single",
)  # fmt: skip
SENDS = ("isend", "send")
ADAM = partial(torch.optim.Adam, lr=0.01)
STEPS = 5


def case_of(count: int) -> Case:
    """The same on every rank, in double precision: with skips and a norm for three stages."""
    torch.manual_seed(1)
    model, layers, stages = mixed_case() if count == 3 else blocks_case(count)
    return model.double(), layers, stages


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    """The same on every rank."""
    torch.manual_seed(2)
    made = make_batches(STEPS, count, rows=4)
    return [{key: value.double() for key, value in batch.items()} for batch in made]


@contextmanager
def counted(names: tuple[str, ...]) -> Iterator[Counter[str]]:
    """Calls of functions of ``torch.distributed``."""
    calls: Counter[str] = Counter()
    patches = []
    for name in names:
        original = getattr(dist, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        patches.append(patch.object(dist, name, call))
    for one in patches:
        one.start()
    try:
        yield calls
    finally:
        for one in patches:
            one.stop()


def trained(count: int, rule: str, setting: str) -> dict[str, Any]:
    """Train, with a break in the middle: losses by step, the whole state, and what was called in steady state.

    The processes meet after every step.
    """
    (model, layers, stages), batches = case_of(count), batches_of(count)
    plan = make_plan(stages, rule, setting, rows=4)
    cyclic = CyclicModel(model, plan, layers, batches[0], timeout=60)
    optimizer = cyclic.optimizer(ADAM)
    losses, calls = list[float](), Counter[str]()
    for step, batch in enumerate(batches):
        if step == 3:
            cyclic.drain()
        with counted((*COLLECTIVES, *SENDS)) as found:
            losses.append(float(cyclic.train_step(batch, optimizer)))
        if step in (1, 2):
            calls.update(found)
        dist.all_reduce(torch.tensor(losses[-1]))  # the user's own, for a log
    state = cyclic.full_state_dict()
    own = {name: tensor for name, tensor in cyclic.module.state_dict().items() if not tensor.is_meta}
    return {"losses": losses, "state": state, "calls": calls, "own": own}


def loaded(count: int, setting: str) -> dict[str, torch.Tensor]:
    """A state that was set, in the middle of training."""
    (model, layers, stages), batches = case_of(count), batches_of(count)
    cyclic = CyclicModel(model, make_plan(stages, "cdp-v2", setting, rows=4), layers, batches[0], timeout=60)
    optimizer = cyclic.optimizer(ADAM)
    before = cyclic.full_state_dict()
    cyclic.train_step(batches[0], optimizer)
    cyclic.load_full_state_dict({name: value + 1 for name, value in before.items()})
    after = cyclic.full_state_dict()
    assert bool(torch.isfinite(cyclic.train_step(batches[1], optimizer)))
    cyclic.flush()
    return {name: after[name] - before[name] for name in before}
