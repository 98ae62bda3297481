"""The search where tensors skip layers: equal to every plan priced one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import Passed
from galvatron_lite.model.shapes.assemble import with_skips
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.ilp import certify
from tests.factories import random_profile
from tests.search.brute import bound_of
from tests.search.test_unlike import every_plan, request_of

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


def skipping(draw: random.Random) -> Profile:
    """A small random model with one to three tensors that go further than to the next layer."""
    devices = draw.choice([1, 2, 2, 3, 4])
    profile = random_profile(draw, devices=devices, blocks=2 if devices == 4 else 3, tied=draw.random() < 0.3)
    names = [layer.name for layer in profile.graph.layers]
    skips = []
    for _ in range(draw.randint(1, 3)):
        start = draw.randint(0, len(names) - 3)
        readers = [*draw.sample(names[start + 1 :], draw.randint(1, 2)), draw.choice(names[start + 2 :])]
        ordered = tuple(name for name in names if name in readers)
        skips.append(Passed(names[start], ordered, draw.randint(100, 3000), borrowed=draw.random() < 0.5))
    return replace(profile, graph=with_skips(profile.graph, skips))


def check(seed: int, schedule: Schedule, certified: bool = False) -> None:
    draw = random.Random(seed)
    profile = skipping(draw)
    plans = [(s, max(m for _, m in held)) for s, held in every_plan(profile, request_of(profile, seed, schedule, 0))]
    peaks, pricer = [peak for _, peak in plans], LayerPricer(profile)
    if not plans:
        assert search(request_of(profile, seed, schedule, 10**9), pricer) is None
        return
    for budget in sorted({min(peaks), draw.choice(peaks), max(peaks)}):
        asked = request_of(profile, seed, schedule, budget)
        found = search(asked, pricer)
        assert found is not None
        assert found.gap == 0.0
        plan = finished(asked, pricer, found)
        assert plan.prediction is not None
        assert plan.prediction.peak_memory <= budget
        best = min(seconds for seconds, peak in plans if peak <= budget)
        assert bound_of(profile, plan) == pytest.approx(best, rel=1e-9)
        if certified:
            certify(found.problem, found.partition)
    assert search(request_of(profile, seed, schedule, min(peaks) - 1), pricer) is None


@settings(max_examples=20, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]))
def test_equals_every_plan_priced(seed: int, schedule: Schedule) -> None:
    check(seed, schedule)


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_programme_agrees(seed: int) -> None:
    check(seed, Schedule.ONE_F_ONE_B, certified=True)
