"""Plans within a tolerance of the best: what brute force says of the same questions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.search.alternatives import SLACK, most_runs, simplest
from galvatron_lite.search.best_first import finished, search
from tests.search.brute import bound_of, brute_of
from tests.search.instances import random_instance, uniform_instance
from tests.search.test_exact import QUIET


@settings(max_examples=25, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([0.01, 0.05, 0.2]))
def test_no_plan_of_fewer_runs_is_within_the_tolerance(seed: int, tolerance: float) -> None:
    draw = random.Random(seed)
    asked = draw.choice([random_instance, random_instance, uniform_instance])(seed)
    brute = brute_of(asked)
    peaks = brute.peaks()
    if not peaks:
        return
    budget = draw.choice(peaks)
    best, request, pricer = brute.best(budget), asked.request(budget), LayerPricer(asked.profile)
    quick = search(request, pricer, slack=SLACK * tolerance)
    assert quick is not None
    found = simplest(request, pricer, quick, tolerance)
    plan = finished(request, pricer, found)
    assert plan.prediction.peak_memory <= budget
    seconds = bound_of(asked.profile, plan)
    assert best.seconds * (1 - 1e-9) <= seconds <= best.seconds / (1 - tolerance) * (1 + 1e-9)
    assert found.gap <= tolerance * (1 + 1e-6)
    assert seconds * (1 - found.gap) <= best.seconds * (1 + 1e-9)
    if found.problem.shape.virtual == 1:  # one layout at boundaries, one strategy of layers that share parameters, ...
        strategies = [strategy for stage in found.partition.stages for strategy in stage.strategies]
        assert brute.allowed(found.partition.cuts, strategies)
    # What is not proven of the best is lost to the tolerance.
    limit = seconds * (1 - found.gap) / (1 - tolerance)
    for runs in range(1, most_runs(request, found)):
        simple = replace(brute_of(asked), runs=runs).best(budget)
        assert simple is None or simple.seconds > limit * (1 - 1e-9)


@settings(max_examples=25, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([1, 2]))
def test_the_best_plan_of_few_runs_is_what_brute_force_finds(seed: int, runs: int) -> None:
    asked = random_instance(seed)
    brute = replace(brute_of(asked), runs=runs)
    peaks = brute.peaks()
    for budget in (peaks[0] - 1, peaks[0], random.Random(seed).choice(peaks)) if peaks else (10**9,):
        best, request, pricer = brute.best(budget), asked.request(budget), LayerPricer(asked.profile)
        found = search(replace(request, runs=runs), pricer)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            plan = finished(request, pricer, found)
            assert most_runs(request, found) <= runs
            assert bound_of(asked.profile, plan) == pytest.approx(best.seconds, rel=1e-9)
