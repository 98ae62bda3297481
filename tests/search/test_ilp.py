"""The integer programme and the search agree; so do they where tensors skip layers."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.graph import Passed
from galvatron_lite.model.shapes.tape import with_skips
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import SolvedPlan, finished, search
from galvatron_lite.search.certify.ilp import CBC, HIGHS, SolverVerdict, certify, solve
from galvatron_lite.search.certify.model import (
    SCALE,
    IntegerProgramme,
    ShapeModel,
    UniformModel,
    choosable,
    first_blocks,
)
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request, open_problem
from galvatron_lite.search.space import Fixed
from tests.factories import random_points, random_profile
from tests.search.brute import Brute, bound_of, brute_of
from tests.search.instances import FREE, Few, random_instance, uniform_instance, varied
from tests.search.test_unlike import every_plan, request_of


def mid_size(seed: int) -> tuple[Request, Profile]:
    """8 to 24 layers, up to 40 strategies each, on 4 or 8 devices, 1 to 4 stages."""
    draw = random.Random(seed)
    devices, blocks = draw.choice([4, 8]), draw.choice([6, 10, 14, 22])
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=seed % 2 == 0, tied=seed % 3 == 0)
    profile = varied(profile, draw) if draw.random() < 0.5 else profile
    fixed = Fixed(pipeline=[1, 2, 4][seed % 3 if blocks < (20 if seed % 3 == 1 else 12) else 0])
    most = 40 if fixed.pipeline == 1 or blocks < 8 else 20
    space = Few(profile.graph, profile.cluster.levels[0].size, seed=seed, most=most)
    return Request(profile.graph, devices, 8, 10**9, fixed, (draw.choice(FREE),), space), profile


def tighter(request: Request, pricer: LayerPricer, share: float) -> SolvedPlan | None:
    """What is found where only some of the memory that the fastest plan takes is there."""
    found = search(request, pricer)
    if found is None:
        return None
    prediction = finished(request, pricer, found).prediction
    tight = replace(request, budget=int(prediction.peak_memory * share))
    return search(tight, pricer) or found


@pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="mid-size programmes take CBC minutes")
@pytest.mark.parametrize("seed", range(6))
def test_certificate_agrees(seed: int) -> None:
    request, profile = mid_size(seed)
    found = tighter(request, LayerPricer(profile), random.Random(seed).choice([0.6, 0.75, 0.9]))
    if found is None:
        return
    certificate = certify(found.problem, found.partition)
    assert certificate.verdict is SolverVerdict.PROVEN
    assert certificate.boundaries
    assert certificate.seconds == pytest.approx(certificate.plan_seconds, rel=1e-6)
    assert certificate.gap <= 1e-6


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2, 16, 41, 50])
def test_the_programme_of_every_shape_equals_brute_force(seed: int, virtual: bool) -> None:
    asked = uniform_instance(seed) if virtual else random_instance(seed)
    brute, pricer = brute_of(asked), LayerPricer(asked.profile)
    peaks = brute.peaks()
    if not peaks:
        return
    budget = random.Random(seed).choice(peaks)
    for shape in brute.shapes:
        problem = open_problem(asked.request(budget), pricer, shape)
        best = min(brute.best_of(shape, budget), key=lambda plan: plan.seconds, default=None)
        if best is None or not choosable(problem):
            continue
        if shape.virtual == 1:
            model = ShapeModel(problem, best.seconds / SCALE)
        else:
            first = first_blocks(asked.profile.graph, best.strategies)
            model = UniformModel(problem, best.seconds / SCALE, [0, *accumulate(best.sizes)], first=first)
        answer = solve(model.programme)
        assert answer.verdict is SolverVerdict.PROVEN
        sizes, strategies = model.path(answer.values)
        found = replace(best, sizes=tuple(sizes), strategies=tuple(strategies))
        seconds, peak = brute.priced(found)
        assert seconds == pytest.approx(best.seconds, rel=1e-6)
        assert peak <= budget


@pytest.mark.parametrize("seed", [1, 15])
def test_both_solvers_agree(seed: int) -> None:
    request, profile = mid_size(seed)
    found = tighter(request, LayerPricer(profile), 0.75)
    model = ShapeModel(found.problem, found.partition.time / 1e12 / SCALE)
    answers = [solve(model.programme, solver=name) for name in (HIGHS, CBC[0])]
    assert [answer.verdict for answer in answers] == [SolverVerdict.PROVEN] * 2
    assert answers[0].bound == pytest.approx(answers[1].bound, rel=1e-6)
    assert model.path(answers[0].values)[0] == [b - a for a, b in pairwise(found.partition.cuts)]


def test_a_plan_that_is_not_the_best_is_an_error_with_both_times() -> None:
    request, profile = mid_size(19)
    pricer = LayerPricer(profile)
    best, worse = search(request, pricer), tighter(request, pricer, 0.6)
    assert worse.partition.time > best.partition.time
    wide = replace(worse.problem, budgets=(request.budget,) * worse.problem.shape.stages)
    with pytest.raises(GalvatronError, match=r"search [\d.]+ s, integer programme [\d.]+ s \(proven\)"):
        certify(wide, worse.partition)


def test_a_solver_s_limit_is_no_error_and_says_how_much_is_open() -> None:
    request, profile = mid_size(13)
    found = search(request, LayerPricer(profile))
    certificate = certify(found.problem, found.partition, seconds=0.05)
    assert certificate.verdict in (SolverVerdict.FEASIBLE, SolverVerdict.UNKNOWN)
    assert certificate.bound < certificate.plan_seconds
    assert 0.0 < certificate.gap <= inf
    assert "gap" in str(certificate)


def test_infeasible_programme_has_no_values() -> None:
    programme = IntegerProgramme()
    number = programme.variable(binary=True)
    programme.equal.append(({number: 1.0}, 2.0))
    programme.objective[number] = 1.0
    answer = solve(programme)
    assert answer.verdict is SolverVerdict.INFEASIBLE
    assert not answer.values


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


@settings(max_examples=12, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]))
def test_equals_every_plan_priced(seed: int, schedule: Schedule) -> None:
    check(seed, schedule)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
@pytest.mark.parametrize("seed", range(2))
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
    brute = Brute(profile, 4, 4, (schedule,), asked.fixed, space)
    plans = [plan for shape in brute.shapes for plan in brute.uniform(shape)]
    peaks = [plan.peak for plan in plans]
    for budget in set(draw.sample(peaks, min(3, len(peaks)))):
        found = search(replace(asked, budget=budget), LayerPricer(profile))
        best = min(plan.seconds for plan in plans if plan.peak <= budget)
        assert bound_of(profile, finished(asked, LayerPricer(profile), found)) == pytest.approx(best, rel=1e-9)
        certify(found.problem, found.partition)
    assert plans


@pytest.mark.parametrize("seed", range(3))
def test_the_integer_programme_agrees(seed: int) -> None:
    check(seed, Schedule.ONE_F_ONE_B, certified=True)


def test_the_plan_says_that_tensors_travel_from_stage_to_stage() -> None:
    profile = skipping(random.Random(1))
    plan = find_plan(profile, devices=1, global_batch=2, budget=10**9, runners_up=0)
    assert any("skip layers" in said for said in plan.left_out)
    chain = replace(profile, graph=replace(profile.graph, tensors=()))
    plan = find_plan(chain, devices=1, global_batch=2, budget=10**9, runners_up=0)
    assert not any("skip layers" in said for said in plan.left_out)
