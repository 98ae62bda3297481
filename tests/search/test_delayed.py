"""Delayed gradients in the search: the best of all settings and rules, only where they are allowed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Cyclic, Plan, Proof, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.families.family import PlanTask, with_families
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.result import plan_of
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Delay, Fixed
from tests.factories import random_profile

ROOM = 2**40


def made(seed: int, devices: int, *, tied: bool = False) -> Profile:
    return random_profile(random.Random(seed), devices=devices, blocks=3, tied=tied)


def every_delayed(profile: Profile, devices: int, batch: int) -> Iterator[Plan]:
    """All plans with stages of equal time, each split looked for among all."""
    pricer, layers = LayerPricer(profile), profile.graph.layers
    for setting in CyclicSetting:
        for count in range(2, len(layers) + 1):
            if batch % count or device_count(setting, count) != devices:
                continue
            costs = [pricer.price(layer.kind, Strategy(), batch // count, 1) for layer in layers]
            seconds = [cost.forward_seconds + cost.backward_seconds for cost in costs if cost is not None]
            splits = [(0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), count - 1)]
            sums = {cuts: [sum(seconds[a:b]) for a, b in pairwise(cuts)] for cuts in splits}
            cuts = min(splits, key=lambda own, s=sums: (round(max(s[own]), 12), sum(x * x for x in s[own])))  # type: ignore[misc]
            for rule in CyclicRule:
                plan = plan_of(
                    profile.graph, devices=devices, global_batch=batch, microbatches=count, cuts=cuts,
                    strategies=[Strategy()] * len(layers), schedule=Schedule.CYCLIC,
                )  # fmt: skip
                yield price_plan(pricer, replace(plan, cyclic=Cyclic(rule, setting)))


def seconds_of(plan: Plan) -> float:
    return plan.prediction.step_seconds


@pytest.mark.parametrize(("devices", "batch"), [(1, 12), (3, 12), (6, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_the_plan_equals_brute_force(seed: int, devices: int, batch: int) -> None:
    profile = made(seed, devices)
    delayed = list(every_delayed(profile, devices, batch))
    ordinary = find_plan(profile, devices=devices, global_batch=batch, budget=ROOM, runners_up=0)
    peaks = sorted({plan.prediction.peak_memory for plan in delayed if plan.prediction})
    for budget in (peaks[0], peaks[len(peaks) // 2]):
        fitting = [plan for plan in delayed if plan.prediction and plan.prediction.peak_memory <= budget]
        found = find_plan(
            profile, devices=devices, global_batch=batch, budget=budget, runners_up=0, delay=Delay(only=True)
        )
        assert seconds_of(found) == pytest.approx(min(map(seconds_of, fitting)))
        assert found.fits
        assert found.cyclic is not None
    both = find_plan(profile, devices=devices, global_batch=batch, budget=ROOM, delay=Delay())
    assert seconds_of(both) == pytest.approx(min([*map(seconds_of, delayed), seconds_of(ordinary)]))
    assert both.provenance.proof is Proof.PROVEN
    if both.cyclic is not None:
        assert any("delayed gradients" in note for note in both.provenance.notes)
        assert any(other.summary.startswith("without delay: ") for other in both.alternatives)


@pytest.mark.parametrize("seed", range(2))
def test_nothing_changes_where_delay_is_not_allowed(seed: int) -> None:
    profile = made(seed, 3)
    plan = find_plan(profile, devices=3, global_batch=12, budget=ROOM)
    assert plan.cyclic is None
    assert not any("cyclic" in text or "delay" in text for text in (*plan.left_out, *map(str, plan.alternatives)))


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("setting", [CyclicSetting.DATA, CyclicSetting.STAGES])
def test_pins_are_kept(rule: CyclicRule, setting: CyclicSetting) -> None:
    delay = Delay(rule, setting, only=True)
    plan = find_plan(made(1, 3), devices=3, global_batch=12, budget=ROOM, delay=delay)
    assert plan.cyclic == Cyclic(rule, setting)
    assert len(plan.stages) == (2 if setting is CyclicSetting.STAGES else 3)


@pytest.mark.parametrize(
    ("devices", "batch", "setting", "fixed", "said"),
    [
        (4, 8, CyclicSetting.STAGES, Fixed(), "3 or 6, not 4"),
        (4, 8, CyclicSetting.SINGLE, Fixed(), "it is of one device, not 4"),
        (1, 8, CyclicSetting.DATA, Fixed(), "two devices or more"),
        (3, 8, CyclicSetting.DATA, Fixed(), "must divide by the 3 micro-batches"),
        (2, 8, CyclicSetting.DATA, Fixed(forbidden=("data",)), "--forbid data rules it out"),
        (2, 8, CyclicSetting.DATA, Fixed(strategy=(("tensor", 2),)), "every layer is whole"),
        (2, 8, CyclicSetting.DATA, Fixed(microbatches=4), "as many micro-batches as stages"),
        (2, 8, CyclicSetting.DATA, Fixed(pipeline=2), "as many micro-batches as stages"),
        (8, 8, CyclicSetting.DATA, Fixed(), "5 layers do not make 8 stages"),
    ],
)
def test_questions_that_contradict_are_refused(
    devices: int, batch: int, setting: CyclicSetting, fixed: Fixed, said: str
) -> None:
    profile = made(4, devices)
    if dict(fixed.strategy).get("tensor"):
        profile = made(next(s for s in range(9) if made(s, 2).graph.kinds["block0"].tensor_degrees == 4), devices)
    delay = Delay(None, setting, only=True)
    with pytest.raises(InputError, match="cyclic") as refused:
        find_plan(profile, devices=devices, global_batch=batch, budget=ROOM, fixed=fixed, delay=delay)
    assert said in refused.value.remedy


def test_layers_that_share_parameters() -> None:
    with pytest.raises(InputError) as refused:
        find_plan(made(1, 2, tied=True), devices=2, global_batch=8, budget=ROOM, delay=Delay(only=True))
    assert "l0 and l4 share parameters and must be in one stage" in refused.value.remedy
    plan = find_plan(made(1, 2, tied=True), devices=2, global_batch=8, budget=ROOM, delay=Delay())
    assert plan.cyclic is None
    assert any(line.startswith("cyclic: data: l0 and l4") for line in plan.left_out)


def test_a_budget_that_nothing_fits_is_refused() -> None:
    profile = made(2, 3)
    with pytest.raises(InfeasibleError) as plain:
        find_plan(profile, devices=3, global_batch=12, budget=1000)
    with pytest.raises(InfeasibleError, match="Another way needs") as allowed:
        find_plan(profile, devices=3, global_batch=12, budget=1000, delay=Delay())
    least = min(plan.prediction.peak_memory for plan in every_delayed(profile, 3, 12) if plan.prediction)
    assert plain.value.smallest_budget is not None
    assert "delayed gradients (cdp-v" in str(allowed.value)
    assert allowed.value.smallest_budget == min(least, plain.value.smallest_budget)
    with pytest.raises(InfeasibleError, match="No such plan of test fits"):
        find_plan(profile, devices=3, global_batch=12, budget=least - 1, delay=Delay(only=True))


def test_only_plans_of_delayed_gradients_where_no_others_are_wanted() -> None:
    profile = made(1, 3)
    delayed = find_plan(profile, devices=3, global_batch=12, budget=ROOM, delay=Delay(only=True))
    quick = find_plan(profile, devices=3, global_batch=12, budget=ROOM)
    quicker = replace(quick, prediction=replace(quick.prediction, step_seconds=1e-9))
    session = Session(profile)
    request = request_of(session, 3, 12, ROOM, Fixed(), None, GALVATRON)
    for only in (False, True):
        asked = PlanTask(session, request, GALVATRON, Delay(only=only))
        found = with_families(lambda: quick, asked, 3, (lambda _: (quicker,), lambda _: (delayed,)))
        assert (found.cyclic is not None) == only
