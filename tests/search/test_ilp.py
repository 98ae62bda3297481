"""The integer programme of a whole shape and the search agree on mid-size models."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import GalvatronError
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import SolvedPlan, finished, search
from galvatron_lite.search.ilp import CBC, HIGHS, SolverVerdict, certify, solve
from galvatron_lite.search.ilp_model import SCALE, IntegerProgramme, ShapeModel, UniformModel, choosable, first_blocks
from galvatron_lite.search.shapes import Request, open_problem
from galvatron_lite.search.space import Fixed
from tests.factories import random_profile
from tests.search.brute import brute_of
from tests.search.instances import FREE, Few, random_instance, uniform_instance, varied


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
@pytest.mark.parametrize("seed", range(12))
def test_certificate_agrees(seed: int) -> None:
    request, profile = mid_size(seed)
    found = tighter(request, LayerPricer(profile), random.Random(seed).choice([0.6, 0.75, 0.9]))
    if found is None:
        return
    certificate = certify(found.problem, found.partition)
    assert certificate.verdict is SolverVerdict.PROVEN
    assert certificate.boundaries
    assert certificate.seconds == pytest.approx(certificate.found, rel=1e-6)
    assert certificate.gap <= 1e-6


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("seed", [*range(6), 16, 17, 41, 50])
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


def test_a_plan_that_is_not_the_best_is_an_error_that_tells_both() -> None:
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
    assert certificate.bound < certificate.found
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
