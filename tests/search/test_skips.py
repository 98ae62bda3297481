"""The search where tensors skip layers: equal to every plan priced one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import Passed
from galvatron_lite.model.shapes.tape import with_skips
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.ilp import certify
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed
from tests.factories import random_points, random_profile
from tests.search.brute import bound_of
from tests.search.instances import Few
from tests.search.test_uniform import every_uniform
from tests.search.test_unlike import every_plan, request_of

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


def unequal(profile: Profile, draw: random.Random) -> Profile:
    """With a kind of its own for every layer, whose times prefer tensor degrees at random, and other links."""
    layers = [replace(layer, kind=f"{layer.kind}-{layer.name}") for layer in profile.graph.layers]
    kinds = {
        new.kind: replace(profile.graph.kinds[old.kind], name=new.kind, tensor_degrees=4, sequence_parallel=True)
        for new, old in zip(layers, profile.graph.layers, strict=True)
    }
    taste = {(name, degree): draw.choice([0.2, 1.0, 5.0]) for name in kinds for degree in (1, 2, 4)}
    points = [
        replace(p, forward=p.forward * taste[p.kind, p.tensor], backward=p.backward * taste[p.kind, p.tensor])
        for kind in kinds.values()
        for p in random_points(kind, draw)
    ]
    factor = draw.choice([0.3, 1, 10, 100])
    levels = tuple(
        replace(level, latency=level.latency / factor, bandwidth=level.bandwidth * factor)
        for level in profile.cluster.levels
    )
    graph = replace(profile.graph, layers=tuple(layers), kinds=kinds)
    return replace(profile, graph=graph, layers=tuple(points), cluster=replace(profile.cluster, levels=levels))


def skipping(draw: random.Random) -> Profile:
    """A small random model with one to three tensors that go further than to the next layer.

    Layers are unlike and links often quick, so that layouts change on the way.
    """
    devices = draw.choice([1, 2, 2, 2, 3, 4])
    blocks = {2: draw.choice([3, 4, 5]), 4: 2}.get(devices, 3)
    profile = unequal(random_profile(draw, devices=devices, blocks=blocks, tied=draw.random() < 0.2), draw)
    names = [layer.name for layer in profile.graph.layers]
    skips = []
    for _ in range(draw.randint(1, 3)):
        start = draw.randint(0, len(names) - 3)
        readers = [*draw.sample(names[start + 1 :], draw.randint(1, 2)), draw.choice(names[start + 2 :])]
        ordered = tuple(name for name in names if name in readers)
        size = draw.randint(100, 3000) * draw.choice([1, 1, 30])
        skips.append(Passed(names[start], ordered, size, borrowed=draw.random() < 0.5))
    return replace(profile, graph=with_skips(profile.graph, skips))


class UnlikeLayouts(Few):
    """Two or three strategies of each layer, in layouts that differ, not the same for all layers."""

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """Drawn by the seed."""
        draw = random.Random(f"{self.seed} {devices} {kind}")
        found: list[Strategy] = []
        for tensor, shared in draw.sample([(1, False), (2, False), (2, True), (4, False), (4, True)], 5):
            if devices % tensor == 0 and len(found) < self.most:
                degrees = draw.choice([{"data": devices // tensor}, {"zero": devices // tensor, "zero_stage": 3}])
                sizes = {name: value for name, value in degrees.items() if devices > tensor}
                again = draw.choice(list(self.graph.kinds[kind].kept))
                found.append(Strategy(tensor=tensor, sequence_parallel=shared, recompute=again, **sizes))
        return tuple(found)


def question(profile: Profile, seed: int, schedule: Schedule, budget: int) -> Request:
    most = 3 if len(profile.graph.layers) < 6 else 2
    asked = request_of(profile, seed, schedule, budget)
    return replace(asked, space=UnlikeLayouts(profile.graph, profile.cluster.levels[0].size, seed=seed, most=most))


def check(seed: int, schedule: Schedule, certified: bool = False) -> None:
    draw = random.Random(seed)
    profile = skipping(draw)
    plans = [(s, max(m for _, m in held)) for s, held in every_plan(profile, question(profile, seed, schedule, 0))]
    peaks, pricer = [peak for _, peak in plans], LayerPricer(profile)
    if not plans:
        assert search(question(profile, seed, schedule, 10**9), pricer) is None
        return
    for budget in sorted({min(peaks), draw.choice(peaks), max(peaks)}):
        asked = question(profile, seed, schedule, budget)
        found = search(asked, pricer)
        assert found.gap == 0.0
        plan = finished(asked, pricer, found)
        assert plan.prediction.peak_memory <= budget
        best = min(seconds for seconds, peak in plans if peak <= budget)
        assert bound_of(profile, plan) == pytest.approx(best, rel=1e-9)
        if certified:
            certify(found.problem, found.partition)
    assert search(question(profile, seed, schedule, min(peaks) - 1), pricer) is None


@settings(max_examples=30, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]))
def test_equals_every_plan_priced(seed: int, schedule: Schedule) -> None:
    check(seed, schedule)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
@pytest.mark.parametrize("seed", range(4))
def test_uniform_plans_equal_every_one_priced(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    plain = random_profile(draw, devices=4, blocks=draw.randint(4, 6), alike=True)
    names = [layer.name for layer in plain.graph.layers]
    skips = [Passed(names[0], (names[2], names[-1]), 30_000), Passed(names[1], (names[-1],), draw.randint(100, 9000))]
    kinds = {name: replace(kind, tensor_degrees=4) for name, kind in plain.graph.kinds.items()}
    points = tuple(point for kind in kinds.values() for point in random_points(kind, draw))
    profile = replace(plain, graph=with_skips(replace(plain.graph, kinds=kinds), skips), layers=points)
    space = UnlikeLayouts(profile.graph, 4, seed=seed, most=3)
    asked = Request(profile.graph, 4, 4, 10**9, Fixed(pipeline=2, virtual=2), (schedule,), space)
    counts = (2, 4) if schedule is Schedule.INTERLEAVED else (1, 2, 4)
    shapes = [Shape(4, 2, count, 4 // count, schedule, 2) for count in counts]
    plans = [plan for shape in shapes for plan in every_uniform(asked, profile, shape)]
    for budget in {peak for _, peak in plans} if len(plans) < 4 else {*draw.sample([peak for _, peak in plans], 3)}:
        found = search(replace(asked, budget=budget), LayerPricer(profile))
        best = min(seconds for seconds, peak in plans if peak <= budget)
        assert bound_of(profile, finished(asked, LayerPricer(profile), found)) == pytest.approx(best, rel=1e-9)
        certify(found.problem, found.partition)
    assert plans


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_programme_agrees(seed: int) -> None:
    check(seed, Schedule.ONE_F_ONE_B, certified=True)


def test_the_plan_says_that_tensors_travel_from_stage_to_stage() -> None:
    profile = skipping(random.Random(1))
    plan = find_plan(profile, devices=1, global_batch=2, budget=10**9, runners_up=0)
    assert any("skip layers" in said for said in plan.left_out)
    chain = replace(profile, graph=replace(profile.graph, tensors=()))
    plan = find_plan(chain, devices=1, global_batch=2, budget=10**9, runners_up=0)
    assert not any("skip layers" in said for said in plan.left_out)
