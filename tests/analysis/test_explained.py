"""Explanations: parts of a step add up, what-ifs equal planning by hand, prices of memory are what every plan says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import fsum
from pathlib import Path

import pytest

from galvatron_lite import api, api_plans
from galvatron_lite.analysis.explain import WORTH, bounds
from galvatron_lite.analysis.explanation import Bound, Constraint, Explanation, TimeAccount, TimeClass, TimePart, WhatIf
from galvatron_lite.analysis.setting import PlanSetting, ask
from galvatron_lite.analysis.step_time import BUBBLE, SLOWEST, PricedStages, account, memory_of, price_in_parts
from galvatron_lite.analysis.what_ifs import (
    NOT_TRIED,
    Replanner,
    TimeLimit,
    added_bytes,
    price_of_memory,
    with_faster_links,
    with_less,
    with_one_more,
    with_steps,
)
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import price_staged
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.backends import backend_named
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import LayerRun, Plan, Schedule
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.profiler.schema import Overlap, Profile
from galvatron_lite.search.pins import Pins
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.space import UNPINNED, Fixed
from tests.analysis.cases import peak_of, seconds_of, small
from tests.factories import random_profile

STRATEGIES = (
    Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(zero=2, zero_stage=1, recompute=Recompute.FULL),
    Strategy(tensor=2), Strategy(tensor=2, sequence_parallel=True),
)  # fmt: skip


def random_plan(seed: int) -> PricedStages:
    """A random plan of two stages, with all kinds of communication in it, as priced by a random profile."""
    draw = random.Random(seed)
    profile = random_profile(draw, devices=4, blocks=4, tied=seed % 2 == 0)
    profile = replace(profile, straggling=0.02, sharing=0.01, hidden={"pipeline": 0.4} if seed % 3 == 0 else {})
    pricer = LayerPricer(profile)
    covered = [[one for one in STRATEGIES if pricer.covers(layer.kind, one)] for layer in profile.graph.layers]
    strategies = [draw.choice(choices) for choices in covered]
    schedule = draw.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P])
    plan = plan_of(
        profile.graph, devices=4, global_batch=8, microbatches=4, cuts=(0, 3, 6), strategies=strategies,
        schedule=schedule,
    )  # fmt: skip
    return price_in_parts(pricer, plan)


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_are_those_of_the_prediction(seed: int) -> None:
    """``cost.step.breakdown`` adds the same seconds up in another way."""
    priced = random_plan(seed)
    time, breakdown = account(priced), priced.prediction.time
    assert time.step_seconds == priced.prediction.step_seconds
    assert fsum(part.seconds for part in time.parts) == pytest.approx(time.step_seconds, rel=1e-12)
    assert all(part.seconds >= 0 and part.hidden_seconds >= 0 for part in time.parts)
    assert time.seconds_of(TimeClass.COMPUTE) == pytest.approx(breakdown.forward + breakdown.backward, rel=1e-9)
    assert time.seconds_of(TimeClass.RECOMPUTE) == pytest.approx(breakdown.recompute, rel=1e-9)
    assert time.seconds_of(TimeClass.OPTIMIZER) == pytest.approx(breakdown.optimizer, rel=1e-9)
    sends = sum(part.seconds for part in time.parts if part.name == "pipeline")
    assert time.seconds_of(TimeClass.COMMUNICATION) - sends == pytest.approx(breakdown.communication, rel=1e-9)
    names = {part.name for part in time.parts}
    assert SLOWEST in names
    assert BUBBLE in names


def test_hidden_and_exposed_are_all_that_is_sent() -> None:
    """Without mutual slow-down, what compute hides of a communication and what it does not are its seconds alone."""
    draw = random.Random(5)
    profile = replace(random_profile(draw, devices=2, blocks=3), overlap=Overlap(1.0, 1.0))
    pricer = LayerPricer(profile)
    strategies = [Strategy(zero=2, zero_stage=3)] * 5
    priced = price_in_parts(
        pricer, plan_of(profile.graph, devices=2, global_batch=8, microbatches=2, cuts=(0, 5), strategies=strategies)
    )
    parts = {part.name: part for part in account(priced).parts}
    alone = 0.0
    for layer, strategy in zip(profile.graph.layers, strategies, strict=True):
        sent = pricer.work(profile.graph.kinds[layer.kind], strategy, 4).communications
        counts = [1 if one.moment == "step" else 2 for one in sent]
        alone += sum(count * float(each) for count, each in zip(counts, pricer.links.timed(sent), strict=True))
    assert parts["zero"].seconds + parts["zero"].hidden_seconds == pytest.approx(alone, rel=1e-9)
    assert parts["zero"].hidden_seconds > 0


BUDGET = 70_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of two nodes of one device each, so that a node more is three."""
    return small(11, devices=1, nodes=2).profile


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return api.plan(profile, mem=BUDGET, batch=4, margin=0.0, tolerance=0.0)


@pytest.fixture(scope="module")
def explanation(profile: Profile, plan: Plan) -> Explanation:
    return api_plans.explain(plan, profile)


def test_what_ifs_equal_plans_priced_by_hand(profile: Profile, explanation: Explanation) -> None:
    by_name = {one.name: one for one in explanation.what_ifs}
    assert set(by_name) == {
        "memory_less", "memory_more", "links_cluster", "batch_twice", "batch_half", "node_more",
    }  # fmt: skip
    by_hand = {
        "memory_less": api.plan(profile, mem=int(0.9 * BUDGET), batch=4, margin=0.0, tolerance=0.0),
        "memory_more": api.plan(profile, mem=int(1.1 * BUDGET), batch=4, margin=0.0, tolerance=0.0),
        "links_cluster": api.plan(with_faster_links(profile, 1), mem=BUDGET, batch=4, margin=0.0, tolerance=0.0),
        "batch_twice": api.plan(profile, mem=BUDGET, batch=8, margin=0.0, tolerance=0.0),
        "batch_half": api.plan(profile, mem=BUDGET, batch=2, margin=0.0, tolerance=0.0),
    }
    for name, hand in by_hand.items():
        assert by_name[name].step_seconds == pytest.approx(seconds_of(hand), rel=1e-12), name
        assert by_name[name].batch == hand.global_batch
    wider = with_one_more(profile)
    assert (wider.cluster.devices, by_name["node_more"].devices, by_name["node_more"].batch) == (3, 3, 6)
    hand = api.plan(wider, mem=BUDGET, batch=6, margin=0.0, tolerance=0.0)
    assert by_name["node_more"].step_seconds == pytest.approx(seconds_of(hand), rel=1e-12)
    assert by_name["node_more"].gain == pytest.approx(
        hand.prediction.samples_per_second / explanation.samples_per_second - 1.0, rel=1e-9
    )


def test_the_price_of_memory_equals_a_plan_priced_by_hand(profile: Profile, explanation: Explanation) -> None:
    price = explanation.price
    more = api.plan(profile, mem=BUDGET + price.added_bytes, batch=4, margin=0.0, tolerance=0.0)
    saved = price.seconds_per_gib * price.added_bytes / 2**30
    assert saved == pytest.approx(max(explanation.step_seconds - seconds_of(more), 0.0), abs=1e-12)
    memory = next(bound for bound in explanation.bounds if bound.constraint is Constraint.MEMORY)
    assert memory.binds == (saved > 0)


def test_neighbours_are_whole_plans_priced_anew(profile: Profile, plan: Plan, explanation: Explanation) -> None:
    """Every run is exchanged by hand, wherever the plan has it."""
    looked_at = 0
    for run in explanation.runs:
        for other in run.neighbours:
            strategy = parse_strategy(other.strategy)
            changed = replace(
                plan,
                stages=tuple(
                    replace(stage, runs=tuple(_exchanged(own, run.strategy, run.first, run.last, strategy)
                                              for own in stage.runs))
                    for stage in plan.stages
                ),
            )  # fmt: skip
            if sum(str(own.strategy) == run.strategy for stage in plan.stages for own in stage.runs) != 1:
                continue
            priced = evaluate(profile, changed)
            assert other.added_step_seconds == pytest.approx(seconds_of(priced) - seconds_of(plan), abs=1e-12)
            assert other.fits == (priced.prediction is not None and priced.prediction.peak_memory <= BUDGET)
            looked_at += 1
    assert looked_at


def _exchanged(own: LayerRun, strategy: str, first: str, last: str, other: object) -> LayerRun:
    if str(own.strategy) == strategy and (own.first, own.last) == (first, last):
        return replace(own, strategy=other)  # type: ignore[arg-type]
    return own


def test_without_what_ifs_the_price_is_of_the_plans_own_shape(profile: Profile, plan: Plan) -> None:
    quick = api_plans.explain(plan, profile, what_if=False)
    assert quick.what_ifs == quick.runners_up == ()
    assert quick.best_step_seconds is None
    assert quick.price.same_shape
    assert any("--no-what-if" in line for line in quick.left_out)


def test_alternatives_skipped_for_lack_of_time_are_reported(profile: Profile, plan: Plan) -> None:
    hurried = api_plans.explain(plan, profile, seconds=0.0)
    assert hurried.price is None
    assert all("not tried" in one.why and one.step_seconds is None for one in hurried.what_ifs)
    assert sum("not tried" in line for line in hurried.left_out) == 2
    assert hurried.time.seconds_of(TimeClass.COMPUTE) > 0


def test_runner_ups_choose_otherwise(plan: Plan, explanation: Explanation) -> None:
    assert explanation.runners_up
    for other in explanation.runners_up:
        assert other.chosen != other.instead
        assert other.added_step_seconds == pytest.approx(other.step_seconds - seconds_of(plan))
        assert not other.fits or other.added_step_seconds >= -1e-12


def test_inference_has_no_moment_and_says_so(profile: Profile) -> None:
    plan = api.plan(profile, mem=BUDGET, batch=4, mode="inference", margin=0.0, tolerance=0.0)
    explanation = api_plans.explain(plan, profile, what_if=False)
    assert explanation.time is not None
    assert all(not one.moment for one in explanation.memory)
    assert any("Inference" in line for line in explanation.left_out)


def test_delayed_gradients_are_reported_as_not_explained(profile: Profile) -> None:
    plan = api.plan(
        profile, mem=2**30, batch=4, allow_delay=True, fix={"schedule": "cyclic"}, margin=0.0, tolerance=0.0
    )
    explanation = api_plans.explain(plan, profile, what_if=False)
    assert explanation.time is None
    assert explanation.runs == ()
    assert any("go round" in line for line in explanation.left_out)
    assert explanation.step_seconds == pytest.approx(seconds_of(plan))


def test_a_plan_finds_the_profile_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = api.find_profile(model="bert-large", cluster="rtx-titan", gpus=2)
    plan = api.plan(known, batch=4, runners_up=0, margin=0.0, tolerance=0.0)
    write_plan(plan, tmp_path / "plan.yaml")
    assert api_plans.profile_of(plan) == known
    assert plan.provenance is not None
    other = replace(plan, provenance=replace(plan.provenance, profile_hash="0" * 16))
    with pytest.raises(InputError, match="which is not here as it was then"):
        api_plans.profile_of(other)
    with pytest.raises(InputError, match="names no profile"):
        api_plans.profile_of(replace(plan, provenance=None))


PRICED = random_plan(3)


def _time(communication: float, waiting: float) -> TimeAccount:
    """A step of a second of which so much is communication and waiting."""
    parts = (
        TimePart(TimeClass.COMPUTE, "matmul", 1.0 - communication - waiting),
        TimePart(TimeClass.COMMUNICATION, "data", communication),
        TimePart(TimeClass.WAITING, BUBBLE, waiting),
    )
    return replace(account(PRICED), step_seconds=1.0, parts=parts)


def _bounds(time: TimeAccount, *what_ifs: WhatIf) -> tuple[Bound, ...]:
    return bounds(PRICED, time, (), memory_of(PRICED, Budget(10**12)), None, what_ifs)


def _of(found: tuple[Bound, ...], what: Constraint) -> Bound:
    return next(one for one in found if one.constraint is what)


def test_without_what_ifs_the_costliest_layer_comes_first() -> None:
    found = _bounds(_time(0.3, 0.4))
    assert [one.constraint for one in found[:2]] == [Constraint.BATCH, Constraint.LINK]
    assert all(one.binds and "the most that could be saved" in one.said for one in found[:2])
    binding = [one.seconds or 0.0 for one in found if one.binds]
    assert binding == sorted(binding, reverse=True)


def test_what_was_not_tried_is_reported_and_compute_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("galvatron_lite.analysis.explain._balance_bounds", lambda priced: iter(()))
    untried = (
        WhatIf("links_node", "links twice as fast", 4, 8, why=NOT_TRIED),
        WhatIf("batch_twice", "twice the batch", 4, 16, why=NOT_TRIED),
    )
    time = _time(WORTH / 2, 0.0)
    found = _bounds(time, *untried)
    assert "links twice as fast was not tried" in _of(found, Constraint.LINK).said
    assert not any(one.binds for one in found)
    compute = _of(found, Constraint.COMPUTE)
    assert "not known: more memory, links twice as fast, twice the batch were not tried" in compute.said


@pytest.mark.parametrize("other", [True, False])
def test_a_saving_by_another_plan_is_reported_as_such(other: bool) -> None:
    then = WhatIf(
        "links_node", "links twice as fast", 4, 8, step_seconds=0.8, samples_per_second=10.0, gain=0.25,
        summary="another" if other else summary(PRICED.plan),
    )  # fmt: skip
    said = _of(_bounds(_time(0.05, 0.0), then), Constraint.LINK).said
    assert "saves 200 ms" in said
    assert ("another plan" in said) == other


STAGES = Pins(fixed=Fixed(forbidden=("pipeline",)))
"""Without a pipeline the closed form that is searched by is the step time that is told."""


def every_plan(setting: PlanSetting, batch: int) -> Iterator[tuple[int, float]]:
    """Peak and step time of every plan of one stage."""
    session = setting.session(setting.profile.cluster.devices)
    space, devices = session.space(backend_named("galvatron"))[0], setting.profile.cluster.devices
    graph = setting.profile.graph
    sliced = any(kind.tensor_degrees > 1 for kind in graph.kinds.values())
    choices = [space.strategies(layer.kind, devices, UNPINNED) for layer in graph.layers]
    for microbatches in (count for count in range(1, batch + 1) if batch % count == 0):
        for strategies in product(*choices):
            if sliced and _edge(strategies[0]) != _edge(strategies[-1]):
                continue
            plan = plan_of(
                graph, devices=devices, global_batch=batch, microbatches=microbatches, cuts=(0, len(strategies)),
                strategies=strategies,
            )  # fmt: skip
            try:
                prediction = price_staged(session.pricer, plan).prediction
            except InputError:
                continue
            yield prediction.peak_memory, prediction.step_seconds


def _edge(strategy: Strategy) -> tuple[int, int, int]:
    """What the layers before and after the blocks have in common (rule 2 of ``search.problem``)."""
    return strategy.batch_degree, strategy.context, strategy.tensor


def fastest(every: list[tuple[int, float]], budget: int) -> float:
    return min((seconds for peak, seconds in every if peak <= budget), default=float("inf"))


@pytest.mark.parametrize(("seed", "devices", "blocks"), [(1, 1, 4), (7, 1, 3), (9, 2, 1)])
def test_a_price_is_what_every_plan_says(seed: int, devices: int, blocks: int) -> None:
    profile = random_profile(random.Random(seed), devices=devices, blocks=blocks)
    setting = PlanSetting(profile, 2**30, STAGES)
    every = sorted(every_plan(setting, 4))
    peaks = sorted({peak for peak, _ in every})
    for share in (0.1, 0.5):
        budget = Budget(peaks[int(share * (len(peaks) - 1))])
        plan = ask(setting, devices, 4, budget=budget)
        added = max(budget.least // 4, 1)
        replanner = Replanner(setting, TimeLimit(), plan, budget)
        price = with_steps(price_of_memory(replanner, added), replanner)
        now, then = fastest(every, budget.least), fastest(every, budget.least + added)
        assert price.step_seconds == pytest.approx(now, rel=1e-9)
        assert price.seconds_per_gib * added / 2**30 == pytest.approx(now - then, rel=1e-6, abs=1e-12 * now)
        for step in price.steps:
            assert fastest(every, step.budget_bytes) == pytest.approx(step.step_seconds, rel=1e-9)
            assert fastest(every, step.budget_bytes - 1) >= step.step_seconds * (1 + 1e-12) or (
                step.budget_bytes == budget.least
            )
        lean = with_less(price, replanner)
        least = fastest(every, budget.least - added)
        assert (lean.less_step_seconds or float("inf")) == pytest.approx(least, rel=1e-9)


def test_in_its_own_shape_a_price_is_no_more_than_over_all() -> None:
    profile = random_profile(random.Random(3), devices=2, blocks=2)
    setting = PlanSetting(profile, 2**30)
    lean = Budget(int(0.6 * peak_of(ask(setting, 2, 4))))
    plan = ask(setting, 2, 4, budget=lean, runners_up=5)
    replanner = Replanner(setting, TimeLimit(), plan, lean)
    own = price_of_memory(replanner, same_shape=True)
    whole = price_of_memory(replanner)
    assert own.same_shape
    assert not whole.same_shape
    assert own.then_step_seconds >= whole.then_step_seconds * (1 - 1e-9)


def test_added_memory_is_a_gigabyte_or_a_part_of_a_small_budget() -> None:
    assert added_bytes(Budget(80 * 10**9)) == 2**30
    assert added_bytes(Budget(80 * 10**6)) == 10**7
