"""The search finds what brute force finds, over every dimension and schedule; no bound is above it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from math import log, sqrt

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.shapes.fields import AUXILIARY_LOSS
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.pipeline.schedule import Schedule, schedules
from galvatron_lite.parallelism.strategy import Offload
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.bounds import Glance, averaged_uniform
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.problem import cuts_of
from galvatron_lite.search.refusals import least_budget
from galvatron_lite.search.shapes import Session, average_of, bounds_of, open_problem, shapes_of, with_edges, with_ties
from galvatron_lite.search.space import Fixed, Space
from galvatron_lite.search.uniform import Uniform
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
    assert found.gap == 0.0
    plan = finished(request, pricer, found)
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


@settings(max_examples=10, **QUIET)
@given(st.integers(0, 10**9))
def test_the_least_budget_is_the_least_that_any_plan_needs(seed: int) -> None:
    for asked in (random_instance(seed), uniform_instance(seed)):
        peaks = brute_of(asked).peaks()
        least = least_budget(asked.request(0), LayerPricer(asked.profile))
        assert (least.most if least else None) == (peaks[0] if peaks else None)


@pytest.mark.parametrize("seed", range(4))
def test_the_planner_names_the_least_that_any_plan_of_the_whole_space_needs(seed: int) -> None:
    asked = random_instance(seed)
    whole = Space(asked.profile.graph, asked.profile.cluster.levels[0].size)
    least = Brute(asked.profile, 2, 4, SIMPLE, asked.fixed, whole).peaks()[0]
    question = {"devices": 2, "global_batch": 4, "fixed": asked.fixed, "schedules": SIMPLE}
    with pytest.raises(InfeasibleError) as error:
        find_plan(asked.profile, budget=least - 1, **question)
    assert error.value.smallest_budget == least


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_equals_the_evaluator_plan_by_plan(seed: int) -> None:
    asked = random_instance(seed, most=3)
    brute = brute_of(asked)
    plans = list(every_plan(brute))
    peaks = sorted({peak for _, peak in plans})
    for budget in peaks:
        best = brute.best(budget)
        assert best.seconds == pytest.approx(min(seconds for seconds, peak in plans if peak <= budget), rel=1e-9)
    assert brute.peaks()[:1] == peaks[:1]


ROUNDING = 1 + 1e-9


@pytest.mark.parametrize("seed", range(24))
def test_bounds_are_never_above_the_best_plan(seed: int) -> None:
    asked = random_instance(seed)
    pricer, draw = LayerPricer(asked.profile), random.Random(seed)
    budget = draw.choice([20_000, 60_000, 10**9])
    whole = replace(asked.request(budget), fixed=Fixed(), schedules=schedules())
    for shape in draw.sample(shapes_of(whole), min(len(shapes_of(whole)), 6)):
        pins = Fixed(pipeline=shape.stages, microbatches=shape.microbatches, virtual=shape.virtual)
        request = replace(whole, fixed=pins, schedules=(shape.schedule,))
        found = search(request, pricer)
        if found is None:
            continue
        best = found.partition.time * ROUNDING
        problem = open_problem(request, pricer, shape)
        assert Glance(asked.profile).bound(request.graph, shape) <= best
        assert average_of(problem) <= best
        if shape.virtual > 1:
            ways = cuts_of(asked.profile.graph, shape.stages * shape.virtual)
            assert min(Uniform(problem, cuts).bound() for cuts in ways) <= best
            assert shape.schedule is not Schedule.INTERLEAVED or averaged_uniform([problem])[0] <= best
            continue
        bounds = bounds_of(problem)
        assert bounds.bound <= best
        children = (child for tied in with_ties(problem) for child in with_edges(tied))
        own = next(child for child in children if child.choice == found.problem.choice)
        narrower = bounds_of(own)
        assert narrower.bound <= best


CODE = """
import json, random
from galvatron_lite.files import to_data
from galvatron_lite.search.planner import find_plan
from tests.search.instances import random_instance
for seed in range(6):
    asked = random_instance(seed)
    plan = find_plan(asked.profile, devices=asked.devices, global_batch=asked.batch, budget=10**6, backend="any")
    print(json.dumps(to_data(plan)))
"""


def test_the_same_question_has_the_same_answer_in_every_process() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "4242")
    ]  # fmt: skip
    assert len(said[0].splitlines()) == 6
    assert said[0] == said[1]


DEVICES = 32


@cache
def session(model: str) -> Session:
    graph = load_model(model, sequence=None, precision="bf16")
    return Session(estimate_profile(graph, load_cluster("a100-80gb", DEVICES), precision="bf16", name=model))


MODELS = ["llama3-8b", "mixtral-8x7b", "gpt2", "t5-3b", "vit-huge", "resnet50", "bert-large"]


@pytest.mark.parametrize("model", MODELS)
def test_every_strategy_offered_is_priced(model: str) -> None:
    asked = session(model)
    space, _ = asked.space(ANY)
    for kind in asked.profile.graph.kinds:
        for devices in (1, 8, DEVICES):
            offered = space.strategies(kind, devices, Fixed())
            costs = asked.pricer.price_many(kind, offered, DEVICES, DEVICES // devices)
            assert costs.valid.all()
            for seconds in (costs.forward_seconds, costs.backward_seconds):
                assert np.isfinite(seconds).all()
                assert (seconds > 0).all()
            assert (costs.step_seconds >= 0).all()
            assert all((getattr(costs, name) >= 0).all() for name in ("kept", "returning", "states", "parameters"))


def test_what_is_offered_depends_on_what_a_layer_is() -> None:
    def used(model: str, kind: str) -> set[str]:
        offered = session(model).space(ANY)[0].strategies(kind, DEVICES, Fixed())
        found = {"context": any(one.context > 1 for one in offered), "ulysses": any(one.ulysses for one in offered)}
        found |= {"expert": any(one.expert > 1 for one in offered), "tensor": any(one.tensor > 1 for one in offered)}
        found["offload"] = {one.offload for one in offered} == set(Offload)
        return {name for name, there in found.items() if there}

    assert used("mixtral-8x7b", "block") == {"context", "ulysses", "expert", "tensor", "offload"}
    assert used("llama3-8b", "block") == {"context", "ulysses", "tensor", "offload"}
    assert used("llama3-8b", "before") == {"context", "tensor", "offload"}
    assert used("vit-huge", "block") == {"tensor", "offload"}  # 257 tokens cannot be shared evenly
    assert used("resnet50", "stage0_block") == {"offload"}


def test_experts_that_are_spread_run_as_estimated_for_their_degree() -> None:
    asked = session("mixtral-8x7b")
    points = [point for point in asked.profile.layers if point.kind == "block"]
    assert {point.expert for point in points} == {1, 2, 4, 8}
    assert {point.expert for point in asked.profile.layers if point.kind != "block"} == {1}
    offered = asked.space(ANY)[0].strategies("block", 8, Fixed(strategy=(("tensor", 1), ("context", 1))))
    compute = {one.expert: asked.pricer.price("block", one, 32, 1) for one in offered if one.zero_stage == 2}
    # Fewer experts on a device, each with more tokens: less weight to read, and the same multiplications.
    # Those of the most loaded rank, so beside its excess over the mean.
    excess = {ranks: 1 + AUXILIARY_LOSS * sqrt(log(ranks) / log(8) * ranks / 8) for ranks in (1, 2, 4, 8)}
    times = [cost.forward / excess[ranks] for ranks in excess if (cost := compute.get(ranks)) is not None]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0.5 * times[0]


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2"])
def test_shares_of_a_sample_are_estimated(model: str) -> None:
    profile = session(model).profile
    tokens = profile.graph.sequence
    for kind in profile.graph.kinds:
        least = min(point.samples for point in profile.layers if point.kind == kind and point.tensor == 1)
        assert least * tokens == max(256, tokens / DEVICES)


def test_a_profile_without_spread_experts_prices_them_as_not_spread() -> None:
    asked = session("mixtral-8x7b").profile
    pricer = LayerPricer(replace(asked, layers=tuple(point for point in asked.layers if point.expert == 1)))
    offered = session("mixtral-8x7b").space(ANY)[0].strategies("block", 8, Fixed(strategy=(("expert", 4),)))
    costs = pricer.price_many("block", offered, 32, 1)
    whole = pricer.price_many("block", [replace(one, expert=1, expert_tensor=0) for one in offered], 32, 1)
    assert costs.valid.all()
    assert (costs.forward == whole.forward).all()
    assert (costs.states <= whole.states).all()
    alone = pricer.price("block", offered[0], 32, 1)
    assert alone.forward == costs.forward[0]


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama3-8b"])
def test_every_strategy_is_told_apart_and_read_back(model: str) -> None:
    offered = session(model).space(ANY)[0].strategies("block", DEVICES, Fixed())
    assert [parse_strategy(str(one)) for one in offered] == list(offered)
