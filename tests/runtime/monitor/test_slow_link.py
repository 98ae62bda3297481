"""Training over a link that becomes slower by a known factor: found, estimated, gone round, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite.runtime.monitor.log import read_log, replay
from galvatron_lite.runtime.monitor.schema import AdaptAction
from tests.pool import WorkerPool
from tests.runtime.monitor.jobs import FACTOR, LESS, SETTINGS, WINDOW, train_over_slow_link, work_alone

QUICK, SLOW = 2 + 3 * WINDOW, 8 * WINDOW


def test_a_slow_link_is_found_and_the_new_plan_is_faster(pool: WorkerPool, tmp_path: Path) -> None:
    course = pool.run(2, train_over_slow_link, timeout=600.0, folder=str(tmp_path), quick=QUICK, slow=SLOW)[0]
    behind = [decision for decision in course.decisions if decision.step > QUICK]
    taken = [decision.action for decision in behind if decision.action is not AdaptAction.KEEP]
    assert taken == [AdaptAction.PLAN, AdaptAction.SWITCH]
    planned = next(decision for decision in behind if decision.action is AdaptAction.PLAN)
    assert planned.step <= QUICK + (SETTINGS.patience + 1) * WINDOW
    for (link,), factor in ((planned.corrections.links, FACTOR), (course.links, LESS)):
        assert link.per_byte == pytest.approx(factor, rel=0.2)
    for slow, after in (course.known, course.really):
        assert after < 0.8 * slow
    assert course.losses == pytest.approx(work_alone(len(course.losses)), rel=1e-4)
    assert all(one.same for one in replay(read_log(tmp_path / "log.jsonl")))
