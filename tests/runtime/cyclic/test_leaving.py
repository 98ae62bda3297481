"""A model that is given up without ``flush``: the others end the training steps that it has run."""

from __future__ import annotations

import pytest

from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, device_count
from tests.pool import WorkerPool
from tests.runtime.cyclic.leaving import STEPS, one_after_another


@pytest.mark.parametrize(("setting", "rule"), [("data", "cdp-v1"), ("stages", "cdp-v2")])
def test_another_model_can_follow(pool: WorkerPool, setting: str, rule: str) -> None:
    world = device_count(CyclicSetting(setting), 2)
    for slow in (0, world - 1):
        for first, second in pool.run(world, one_after_another, count=2, rule=rule, setting=setting, slow=slow):
            assert first == second
            assert len(first) == STEPS
