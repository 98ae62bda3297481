"""Cyclic data parallelism on several processes equals the reference, and uses no collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.cyclic_reference import Step, train_reference
from tests.parallelism.cyclic.models import Case, blocks_case, make_batches, make_plan, mixed_case, split
from tests.pool import WorkerPool

PARAMETERS = {
    2: [["blocks.0"], ["blocks.1"]],
    3: [["stem", "scale", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "norm", "head"]],
}


@cache
def expected(count: int, rule: str) -> list[Step]:
    model, _, _ = case_of(count)
    parts = [split(batch, count) for batch in batches_of(count)]
    return train_reference(model, PARAMETERS[count], parts, optimizer_factory=ADAM, rule=rule)


def check(results: list[dict[str, Any]], steps: list[Step]) -> None:
    last = steps[-1]
    for result in results:
        for name, value in last.parameters.items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-12)
        assert result["state"].keys() == last.parameters.keys() | last.buffers.keys()
        assert not set(COLLECTIVES) & result["calls"].keys()


@pytest.mark.parametrize(("count", "rule"), [(2, "cdp-v1"), (3, "cdp-v2")])
@pytest.mark.parametrize("setting", ["data", "stages"])
def test_equals_the_reference(pool: WorkerPool, setting: str, count: int, rule: str) -> None:
    world = device_count(CyclicSetting(setting), count)
    results = pool.run(world, trained, count=count, rule=rule, setting=setting)
    steps = expected(count, rule)
    check(results, steps)
    if setting != "stages":
        for step in range(STEPS):
            losses = [result["losses"][step] for result in results]
            assert losses == pytest.approx(steps[step].losses, abs=1e-12)
            # a backward message of each stage but the last worker's, and a stage at a time on the forward track
            assert all(0 < result["calls"]["isend"] <= 2 * 2 * count for result in results)


@pytest.mark.parametrize("setting", ["data", "stages"])
def test_a_whole_state_can_be_set(pool: WorkerPool, setting: str) -> None:
    for changed in pool.run(3, loaded, count=2 if setting == "stages" else 3, setting=setting):
        assert all(bool((value == 1).all()) for value in changed.values())


GIVEN_UP_AFTER = 3


def given_up(count: int, rule: str, setting: str, slow: int | None = None) -> list[float]:
    """Losses of a model that is dropped without ``flush``; rank ``slow`` is late in its last training step."""
    (model, layers, stages), batches = case_of(count), batches_of(count)
    cyclic = CyclicModel(model, make_plan(stages, rule, setting, rows=4), layers, batches[0], timeout=20)
    optimizer, losses = cyclic.optimizer(ADAM), list[float]()
    for step, batch in enumerate(batches[:GIVEN_UP_AFTER]):
        if dist.get_rank() == slow and step == GIVEN_UP_AFTER - 1:
            time.sleep(0.3)
        losses.append(float(cyclic.train_step(batch, optimizer)))
    return losses


def one_after_another(count: int, rule: str, setting: str, slow: int) -> list[list[float]]:
    """Train two models, each dropped without ``flush``, and then call a collective."""
    losses = [given_up(count, rule, setting, slow) for _ in range(2)]
    dist.barrier()
    return losses


@pytest.mark.parametrize(("setting", "rule"), [("data", "cdp-v1"), ("stages", "cdp-v2")])
def test_another_model_can_follow(pool: WorkerPool, setting: str, rule: str) -> None:
    world = device_count(CyclicSetting(setting), 2)
    for slow in (0, world - 1):
        for first, second in pool.run(world, one_after_another, count=2, rule=rule, setting=setting, slow=slow):
            assert first == second
            assert len(first) == GIVEN_UP_AFTER


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier", "reduce", "gather", "scatter",
    "all_to_all", "all_to_all_single",
)  # fmt: skip
SENDS = ("isend", "send")
ADAM = partial(torch.optim.Adam, lr=0.01)
STEPS = 5


def case_of(count: int) -> Case:
    """A model in double precision, equal on every rank; for three stages it has skips and a norm."""
    torch.manual_seed(1)
    model, layers, stages = mixed_case() if count == 3 else blocks_case(count)
    return model.double(), layers, stages


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches that are equal on every rank."""
    torch.manual_seed(2)
    made = make_batches(STEPS, count, rows=4)
    return [{key: value.double() for key, value in batch.items()} for batch in made]


@contextmanager
def counted(names: tuple[str, ...]) -> Iterator[Counter[str]]:
    """Count the calls of functions of ``torch.distributed``."""
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
    """Train, with ``drain`` before step 3: losses by step, the full state, and the calls in steps 1 and 2."""
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
        dist.all_reduce(torch.tensor(losses[-1]))  # by the user, for a log
    return {"losses": losses, "state": cyclic.full_state_dict(), "calls": calls}


def loaded(count: int, setting: str) -> dict[str, torch.Tensor]:
    """The change of the state by ``load_full_state_dict`` during training."""
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
