"""Cyclic data parallelism on processes: it equals the reference, without a collective."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from tests.cyclic_reference import Step, train_reference
from tests.parallelism.cyclic.models import split
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
