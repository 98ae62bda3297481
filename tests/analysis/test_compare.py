from __future__ import annotations

import random
from dataclasses import replace
from math import fsum

import pytest

from galvatron_lite import api, api_plans
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.result import plan_of
from tests.factories import random_profile


@pytest.fixture
def profile() -> Profile:
    return random_profile(random.Random(6), devices=2, blocks=2)


def made(profile: Profile, *ways: Strategy, cuts: tuple[int, ...] = (0, 4), microbatches: int = 2) -> Plan:
    return plan_of(
        profile.graph, devices=2, global_batch=4, microbatches=microbatches, cuts=cuts, strategies=ways
    )  # fmt: skip


def test_plans_are_priced_on_one_basis_and_it_is_said(profile: Profile) -> None:
    data, sharded = made(profile, *[Strategy(data=2)] * 4), made(profile, *[Strategy(zero=2, zero_stage=3)] * 4)
    slower = replace(
        profile, name="slower", layers=tuple(replace(one, forward=2 * one.forward) for one in profile.layers)
    )
    theirs = api.evaluate(sharded, slower, mem=2**20)
    told = api_plans.compare({"data": data, "theirs": theirs}, profile, mem=2**20)
    for one, plan in zip(told.plans, (data, sharded), strict=True):
        priced = evaluate(profile, plan)
        assert one.step_seconds == priced.prediction.step_seconds
        assert fsum(one.time.values()) == pytest.approx(one.step_seconds, rel=1e-12)
        assert fsum(part.seconds for part in one.parts.parts) == pytest.approx(one.step_seconds, rel=1e-12)
        assert one.memory.total == one.peak_bytes
    assert told.plans[1].said_step_seconds == theirs.prediction.step_seconds > told.plans[1].step_seconds
    assert told.notes[0].startswith("data: written by hand")
    assert told.notes[1].startswith("theirs: made from slower")
    assert told.budget_bytes == 2**20


def test_only_layers_that_differ_are_told(profile: Profile) -> None:
    data, tensor = Strategy(data=2), Strategy(zero=2, zero_stage=1)
    told = api_plans.compare([made(profile, *[data] * 4), made(profile, data, tensor, tensor, data)], profile)
    assert [(one.first, one.last, one.count, one.strategies) for one in told.layers] == [
        ("l1", "l2", 2, ("data2", "zero1x2"))
    ]
    alike = api_plans.compare([made(profile, *[data] * 4), made(profile, *[data] * 4)], profile)
    assert alike.layers == ()
    assert alike.buys[0].added_step_seconds == alike.buys[0].added_bytes == 0
    assert alike.buys[0].said == "takes the same time and memory"


def test_what_one_buys_over_the_other(profile: Profile) -> None:
    whole = Strategy()
    first, second = made(profile, *[Strategy(data=2)] * 4), made(profile, *[whole] * 4, cuts=(0, 2, 4))
    told = api_plans.compare([first, second], profile)
    a, b = told.plans
    assert told.buys[0].added_step_seconds == b.step_seconds - a.step_seconds
    assert told.buys[0].added_bytes == b.peak_bytes - a.peak_bytes
    assert [one.strategies for one in told.layers] == [("data2", "stage 0: unsplit"), ("data2", "stage 1: unsplit")]
    gain = b.samples_per_second / a.samples_per_second - 1
    assert f"({gain:+.1%} samples/s)" in told.buys[0].said


def test_other_batches_are_said(profile: Profile) -> None:
    plan = made(profile, *[Strategy(data=2)] * 4)
    other = replace(plan, global_batch=8, microbatches=4)
    told = api_plans.compare([plan, other], profile)
    assert any("unlike batches (4, 8)" in note for note in told.notes)


def test_other_groups_of_devices_are_said(profile: Profile) -> None:
    """The parts are those of the busiest stage: the one with three of the four layers."""
    late, early = (made(profile, *[Strategy()] * 4, cuts=(0, cut, 4)) for cut in (1, 3))
    told = api_plans.compare({"late": late, "early": early}, profile)
    groups = [one.parts.group for one in told.plans if one.parts is not None]
    said = [note for note in told.notes if "work longest" in note]
    assert len(set(groups)) == 2
    assert said == [
        "the parts of a step are those of the devices that work longest: "
        f"group {groups[0]} of late, group {groups[1]} of early"
    ]
    assert not any("work longest" in note for note in api_plans.compare([late, late], profile).notes)


def test_one_plan_is_no_comparison(profile: Profile) -> None:
    with pytest.raises(InputError, match="two or more"):
        api_plans.compare([made(profile, *[Strategy(data=2)] * 4)], profile)
    with pytest.raises(InputError, match="names no profile"):
        api_plans.compare([made(profile, *[Strategy(data=2)] * 4)] * 2)
