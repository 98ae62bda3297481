"""The search finds what brute force finds, on random small models, over every dimension and schedule."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.refusals import least_budget
from galvatron_lite.search.space import Space
from tests.schedules import SIMPLE
from tests.search.brute import Brute, bound_of, brute_of, every_plan
from tests.search.instances import Instance, random_instance, uniform_instance

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
TIMES = int(os.environ.get("EXACT_TIMES", "1"))
"""How many times as many random instances; 12 for 300 of each kind."""


def check(asked: Instance, brute: Brute, budget: int) -> None:
    """The search's plan fits and takes as long as the best there is, all by the evaluator."""
    best, pricer = brute.best(budget), LayerPricer(asked.profile)
    request = asked.request(budget)
    found = search(request, pricer)
    if best is None:
        assert found is None
        return
    assert brute.priced(best) == (pytest.approx(best.seconds, rel=1e-9), best.peak)
    assert found is not None
    assert found.gap == 0.0
    plan = finished(request, pricer, found)
    assert plan.prediction is not None
    assert plan.prediction.peak_memory <= budget
    assert bound_of(asked.profile, plan) == pytest.approx(best.seconds, rel=1e-9)


@settings(max_examples=24 * TIMES, **QUIET)
@given(st.integers(0, 10**9))
def test_equals_brute_force(seed: int) -> None:
    asked, draw = random_instance(seed), random.Random(seed)
    brute = brute_of(asked)
    peaks = brute.peaks()
    if not peaks:
        check(asked, brute, 10**9)
        return
    check(asked, brute, peaks[0] - 1)
    check(asked, brute, draw.choice([peaks[0], peaks[len(peaks) // 8], draw.choice(peaks), peaks[-1]]))


@settings(max_examples=24 * TIMES, **QUIET)
@given(st.integers(0, 10**9))
def test_equals_brute_force_where_groups_run_several_stages(seed: int) -> None:
    asked, draw = uniform_instance(seed), random.Random(seed)
    brute = brute_of(asked)
    peaks = brute.peaks()
    for budget in (peaks[0] - 1, peaks[0], draw.choice(peaks)) if peaks else (10**9,):
        check(asked, brute, budget)


@pytest.mark.parametrize("seed", [1257])
def test_equals_brute_force_where_it_once_did_not(seed: int) -> None:
    asked = random_instance(seed)
    brute = brute_of(asked)
    for budget in brute.peaks()[::50]:
        check(asked, brute, budget)


@settings(max_examples=6, **QUIET)
@given(st.integers(0, 10**9))
def test_the_least_budget_is_the_least_that_any_plan_needs(seed: int) -> None:
    for asked in (random_instance(seed), uniform_instance(seed)):
        peaks = brute_of(asked).peaks()
        least = least_budget(asked.request(0), LayerPricer(asked.profile))
        assert (least.most if least else None) == (peaks[0] if peaks else None)
        for below in (peaks[0], peaks[0] + 1) if peaks else ():
            less = least_budget(asked.request(0), LayerPricer(asked.profile), below=below)
            assert (less is None) == (below == peaks[0])
            assert less in (None, least)


@pytest.mark.parametrize("seed", range(3))
def test_the_planner_names_the_least_that_any_plan_of_the_whole_space_needs(seed: int) -> None:
    asked = random_instance(seed)
    whole = Space(asked.profile.graph, asked.profile.cluster.levels[0].size)
    least = Brute(asked.profile, 2, 4, SIMPLE, asked.fixed, whole).peaks()[0]
    question = {"devices": 2, "global_batch": 4, "fixed": asked.fixed, "schedules": SIMPLE, "runners_up": 0}
    with pytest.raises(InfeasibleError) as error:
        find_plan(asked.profile, budget=least - 1, **question)
    assert error.value.smallest_budget == least


@pytest.mark.parametrize("seed", [0, *range(2, 6)])
def test_brute_force_equals_the_evaluator_plan_by_plan(seed: int) -> None:
    asked = random_instance(seed, most=3)
    brute = brute_of(asked)
    plans = list(every_plan(brute))
    peaks = sorted({peak for _, peak in plans})
    for budget in peaks:
        best = brute.best(budget)
        assert best is not None
        assert best.seconds == pytest.approx(min(seconds for seconds, peak in plans if peak <= budget), rel=1e-9)
    assert brute.peaks()[:1] == peaks[:1]
