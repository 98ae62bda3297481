"""What binds: the dearest first with and without what-ifs, and no verdict over what was not tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.analysis.explain import WORTH, bounds
from galvatron_lite.analysis.explanation import Bound, Constraint, TimeAccount, TimeClass, TimePart, WhatIf
from galvatron_lite.analysis.step_time import BUBBLE, account, memory_of
from galvatron_lite.analysis.what_ifs import NOT_TRIED
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.search.result import summary
from tests.analysis.test_time import random_plan

PRICED = random_plan(3)


def _time(communication: float, waiting: float) -> TimeAccount:
    """A step of a second of which so much is communication and waiting."""
    parts = (
        TimePart(TimeClass.COMPUTE, "matmul", 1.0 - communication - waiting),
        TimePart(TimeClass.COMMUNICATION, "data", communication),
        TimePart(TimeClass.WAITING, BUBBLE, waiting),
    )
    return replace(account(PRICED), step_seconds=1.0, parts=parts)


def _bounds(time: TimeAccount, *what_ifs: WhatIf) -> tuple[Bound, ...]:
    return bounds(PRICED, time, (), memory_of(PRICED, Budget(10**12)), None, what_ifs)


def _of(found: tuple[Bound, ...], what: Constraint) -> Bound:
    return next(one for one in found if one.constraint is what)


def test_without_what_ifs_the_dearest_comes_first() -> None:
    found = _bounds(_time(0.3, 0.4))
    assert [one.constraint for one in found[:2]] == [Constraint.BATCH, Constraint.LINK]
    assert all(one.binds and "the most that could be saved" in one.said for one in found[:2])
    binding = [one.seconds or 0.0 for one in found if one.binds]
    assert binding == sorted(binding, reverse=True)


def test_what_was_not_tried_is_said_and_compute_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("galvatron_lite.analysis.explain._balance", lambda priced: iter(()))
    untried = (
        WhatIf("links_node", "links twice as fast", 4, 8, why=NOT_TRIED),
        WhatIf("batch_twice", "twice the batch", 4, 16, why=NOT_TRIED),
    )
    time = _time(WORTH / 2, 0.0)
    found = _bounds(time, *untried)
    assert "links twice as fast was not tried" in _of(found, Constraint.LINK).said
    assert not any(one.binds for one in found)
    compute = _of(found, Constraint.COMPUTE)
    assert "not known: more memory, links twice as fast, twice the batch were not tried" in compute.said


@pytest.mark.parametrize("other", [True, False])
def test_a_saving_by_another_plan_is_called_one(other: bool) -> None:
    then = WhatIf(
        "links_node", "links twice as fast", 4, 8, step_seconds=0.8, samples_per_second=10.0, gain=0.25,
        summary="another" if other else summary(PRICED.plan),
    )  # fmt: skip
    said = _of(_bounds(_time(0.05, 0.0), then), Constraint.LINK).said
    assert "saves 200 ms" in said
    assert ("another plan" in said) == other
