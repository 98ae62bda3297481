from __future__ import annotations

import pytest

from galvatron_lite.analysis.sweeps import pareto_front
from galvatron_lite.errors import InfeasibleError, InputError
from tests.analysis.cases import asked, peak_of, seconds_of, small


@pytest.mark.parametrize("seed", [1, 2])
def test_no_budget_has_a_faster_plan(seed: int) -> None:
    """With steps of a byte: at every budget of a grid, and just below every plan, against a search of its own."""
    setting = small(seed, devices=2, budget=200_000)
    front = pareto_front(setting, 4, step=1)
    assert front.complete
    peaks = [point.peak for point in front.points]
    budgets = {*range(peaks[-1], 200_001, 50_000), *peaks, *(peak - 1 for peak in peaks)}
    for budget in sorted(budgets):
        within = [point.seconds for point in front.points if point.peak <= budget]
        plan = asked(setting, 2, 4, budget)
        assert (plan is None) == (not within)
        assert plan is None or min(within) <= seconds_of(plan) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 4])
def test_plans_are_those_of_their_budgets_and_none_is_beaten(seed: int) -> None:
    setting = small(seed, budget=300_000)
    front = pareto_front(setting, 8, step=4000)
    assert front.step == 4000
    for point in front.points:
        plan = asked(setting, 4, 8, point.budget)
        assert plan is not None
        assert (seconds_of(plan), peak_of(plan)) == (point.seconds, point.peak)
        assert point.peak <= point.budget
    times, peaks = [p.seconds for p in front.points], [p.peak for p in front.points]
    assert times == sorted(set(times))
    assert peaks == sorted(set(peaks), reverse=True)
    assert front.least is not None
    assert asked(setting, 4, 8, front.least) is not None


def test_a_wide_step_is_quick_and_says_so() -> None:
    setting = small(2, budget=320_000)
    front = pareto_front(setting, 16)
    assert front.step == 10_000
    searched = [point.budget for point in front.points]
    assert all(left.peak - right.budget >= 10_000 or right.budget == front.least
               for left, right in zip(front.points, front.points[1:], strict=False))  # fmt: skip
    assert searched[0] == 320_000


def test_nothing_fits_and_steps_of_nothing() -> None:
    with pytest.raises(InfeasibleError, match="smallest budget"):
        pareto_front(small(2, budget=100), 16)
    with pytest.raises(InputError, match="step"):
        pareto_front(small(2), 16, step=0)
