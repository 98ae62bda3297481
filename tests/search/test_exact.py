"""The search finds what brute force finds, on random small models."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.context.cost import ContextDimension
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.schedule import EXECUTABLE
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile
from tests.search.brute import bound_of, every_plan

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


def varied(profile: Profile, draw: random.Random) -> Profile:
    """The profile with nodes, and with all that measured and published software may have besides."""
    cluster, (level,) = profile.cluster, profile.cluster.levels
    node = draw.choice([1, cluster.devices])
    between = replace(level, size=cluster.devices // node, bandwidth=level.bandwidth / draw.choice([1, 10]))
    causes = ("data", "zero", "tensor", "tensor-async", "zero.gather")
    return replace(
        profile,
        cluster=replace(cluster, levels=(replace(level, size=node), between)),
        hidden={cause: draw.choice([0.0, 0.5, 1.0]) for cause in causes if draw.random() < 0.5},
        overhead=replace(profile.overhead, microbatch=draw.choice([0.0, 2e-5])),
        straggling=draw.choice([0.0, 0.05]),
        scattered_sends=draw.random() < 0.5,
        bucket_bytes=draw.choice([0, 2]),
        passing_bytes=draw.choice([0, 4]),
    )


def check(seed: int, devices: int, blocks: int, batch: int, tied: bool, schedule: Schedule, vary: bool = False) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=draw.random() < 0.5, tied=tied)
    profile = varied(profile, draw) if vary else profile
    plans = list(every_plan(profile, devices, batch, schedule))
    peaks = sorted({peak for _, peak in plans})
    space, pricer = Space(profile.graph, profile.cluster.levels[0].size), LayerPricer(profile)
    for budget in {peaks[0], draw.choice(peaks), draw.choice(peaks), peaks[-1]}:
        best = min(seconds for seconds, peak in plans if peak <= budget)
        request = Request(profile.graph, devices, batch, budget, Fixed(), (schedule,), space)
        found = search(request, pricer)
        assert found is not None
        assert found.gap == 0.0
        plan = finished(request, pricer, found)
        assert plan.prediction is not None
        assert plan.prediction.peak_memory <= budget
        assert bound_of(profile, plan) == pytest.approx(best, rel=1e-9)
    with pytest.raises(InfeasibleError) as error:
        find_plan(profile, devices=devices, global_batch=batch, budget=peaks[0] - 1, schedules=[schedule])
    assert error.value.smallest_budget == peaks[0]


@settings(max_examples=60, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([1, 2, 3]), st.integers(1, 3), st.sampled_from([2, 4, 6]), st.booleans())
def test_equals_brute_force_on_few_devices(seed: int, devices: int, blocks: int, batch: int, tied: bool) -> None:
    check(seed, devices, blocks, batch * (3 if devices == 3 else 1), tied, Schedule.ONE_F_ONE_B)


@settings(max_examples=20, **QUIET)
@given(st.integers(0, 10**9), st.booleans())
def test_equals_brute_force_on_four_devices(seed: int, tied: bool) -> None:
    check(seed, 4, 1, 4, tied, Schedule.ONE_F_ONE_B)


@settings(max_examples=30, **QUIET)
@given(st.integers(0, 10**9), st.integers(1, 2), st.booleans())
def test_equals_brute_force_with_gpipe(seed: int, blocks: int, tied: bool) -> None:
    check(seed, 2, blocks, 4, tied, Schedule.GPIPE)


@settings(max_examples=30, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([(2, 1), (2, 2), (4, 1)]), st.booleans(), st.sampled_from(EXECUTABLE))
def test_equals_brute_force_whatever_the_profile_says(
    seed: int, size: tuple[int, int], tied: bool, schedule: Schedule
) -> None:
    check(seed, *size, 4, tied, schedule, vary=True)


def offered(self: ContextDimension, kind: LayerKind, devices: int) -> list[dict[str, object]]:
    return [{"context": degree} for degree in divisors(devices)]


@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force_where_a_dimension_is_added(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextDimension, "choices", offered)
    check(seed, 2, 2, 4, seed % 2 == 0, Schedule.ONE_F_ONE_B)
