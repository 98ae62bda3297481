"""Plans beside those of stages in the model's order: which one is taken, and what is told of the others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.errors import InfeasibleError
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.plans.schema import Alternative, BranchPlacement, Plan
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed
from galvatron_lite.search.ways import PlanTask, with_ways
from tests.factories import random_profile

BUDGET = 2**29


def question() -> tuple[PlanTask, Plan]:
    profile = random_profile(random.Random(3), devices=2)
    session = Session(profile)
    request = request_of(session, 2, 8, BUDGET, Fixed(), None, GALVATRON)
    plan = find_plan(profile, devices=2, global_batch=8, budget=BUDGET, runners_up=2)
    return PlanTask(session, request, GALVATRON, BUDGET), plan


def way_of(plan: Plan, name: str, factor: float, memory: int = 1) -> Plan:
    """A plan of another way, so many times as long."""
    stage = replace(plan.stages[0], memory=replace(plan.stages[0].memory, parameters=memory))
    prediction = replace(plan.prediction, step_seconds=plan.prediction.step_seconds * factor)
    return replace(plan, stages=(stage,), branches=(BranchPlacement(name, (), 0, 1, ()),), prediction=prediction)


@pytest.mark.parametrize(("factor", "taken"), [(0.9, True), (1.0, False), (1.1, False)])
def test_the_quickest_plan_counts_and_the_ordinary_one_of_equal_ones(factor: float, taken: bool) -> None:
    asked, plan = question()
    other = way_of(plan, "other", factor)
    found = with_ways(lambda: plan, asked, 3, [lambda _: [other]])
    assert found.branches == (other.branches if taken else ())
    assert any(("other on" in one.summary) is not taken for one in found.alternatives)
    assert len(found.alternatives) <= 3


def test_a_way_is_told_of_the_ordinary_plan_and_its_own_is_told_though_others_are_quicker() -> None:
    asked, plan = question()
    crowd = tuple(Alternative(f"another {number}", 1e-9 * number, 1, True) for number in range(9))
    met: list[Plan | None] = []

    def way(own: PlanTask) -> list[Plan]:
        met.append(own.ordinary)
        return [way_of(plan, "slow", 5.0)]

    found = with_ways(lambda: replace(plan, alternatives=crowd), asked, 3, [way])
    assert met[0] is not None
    assert any("slow on device 0" in one.summary for one in found.alternatives)
    assert len(found.alternatives) == 3


def test_no_way_no_change() -> None:
    asked, plan = question()
    assert with_ways(lambda: plan, asked, 3, [lambda _: []]) is plan


def test_where_nothing_ordinary_fits_another_way_may() -> None:
    asked, plan = question()

    def nothing() -> Plan:
        raise InfeasibleError("too small", 7)

    found = with_ways(nothing, asked, 3, [lambda _: [way_of(plan, "small", 2.0)]])
    assert found.branches[0].name == "small"
    too_large = way_of(plan, "large", 0.1, memory=2**50)
    with pytest.raises(InfeasibleError, match="too small"):
        with_ways(nothing, asked, 3, [lambda _: [too_large]])


def test_a_quicker_plan_that_does_not_fit_is_told_only() -> None:
    asked, plan = question()
    found = with_ways(lambda: plan, asked, 3, [lambda _: [way_of(plan, "large", 0.1, memory=2**50)]])
    assert not found.branches
    assert [one.fits for one in found.alternatives if "large" in one.summary] == [False]
