"""Cyclic data parallelism on processes: it equals the reference, without a collective."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from galvatron_lite.runtime.cyclic.model import CyclicModel
from tests.cyclic_reference import Step, train_reference
from tests.parallelism.cyclic.models import make_plan, split
from tests.pool import WorkerPool
from tests.runtime.cyclic.jobs import ADAM, COLLECTIVES, STEPS, batches_of, case_of, loaded, trained

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
    """Losses of a model that goes without ``flush``; rank ``slow`` comes late to its last training step."""
    (model, layers, stages), batches = case_of(count), batches_of(count)
    cyclic = CyclicModel(model, make_plan(stages, rule, setting, rows=4), layers, batches[0], timeout=20)
    optimizer, losses = cyclic.optimizer(ADAM), list[float]()
    for step, batch in enumerate(batches[:GIVEN_UP_AFTER]):
        if dist.get_rank() == slow and step == GIVEN_UP_AFTER - 1:
            time.sleep(0.3)
        losses.append(float(cyclic.train_step(batch, optimizer)))
    return losses


def one_after_another(count: int, rule: str, setting: str, slow: int) -> list[list[float]]:
    """Two models, each given up; a meeting of all processes behind them, as the next thing of any kind may be."""
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
