"""Plans priced under scenarios, and the choice among those within the tolerance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.search.alternatives import Finalist, Range, quickest, ranges_of, scenarios_of
from galvatron_lite.search.planner import find_plan
from tests.factories import random_profile


@pytest.mark.parametrize("seed", range(6))
def test_ranges_are_of_plans_priced_anew_without_a_pipeline(seed: int) -> None:
    profile = random_profile(random.Random(seed), devices=4)
    profile = replace(profile, origin=replace(profile.origin, kind=OriginKind.ESTIMATED))
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, runners_up=0)
    (found,) = ranges_of(LayerPricer(profile), [plan])
    steps = [evaluate(one, plan).prediction for one in (profile, *scenarios_of(profile))]
    seconds = [step.step_seconds for step in steps if step is not None]
    assert len(seconds) == 5
    close = 1e-9 if plan.pipeline == 1 else 0.05
    assert found.least == pytest.approx(min(seconds), rel=close)
    assert found.most == pytest.approx(max(seconds), rel=close)
    assert found.mean == pytest.approx(sum(seconds) / len(seconds), rel=close)


def test_of_plans_within_the_tolerance_the_one_of_least_expected_step_is_chosen() -> None:
    profile = random_profile(random.Random(1), devices=4)
    plan = find_plan(profile, devices=4, global_batch=8, budget=10**9, runners_up=0)

    def finalist(name: str, seconds: float, mean: float) -> Finalist:
        own = replace(plan, prediction=replace(plan.prediction, step_seconds=seconds))
        return Finalist(name, None, own, True, Range(seconds, 2 * mean, mean))  # type: ignore[arg-type]

    options = [finalist("quick", 1.0, 1.5), finalist("sure", 1.009, 1.2), finalist("slow", 1.1, 1.1)]
    assert quickest(options, 0.01).name == "sure"
    assert quickest(options, 0.0).name == "quick"
    assert quickest([options[0], finalist("as sure", 1.0, 1.495)], 0.01).name == "quick"
