from __future__ import annotations

import random
from dataclasses import replace
from math import fsum

import pytest

from galvatron_lite import api, api_plans
from galvatron_lite.analysis.setting import device_counts, first_devices
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
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


def by_hand(profile: Profile, *strategies: Strategy, cuts: tuple[int, ...] = (0, 4)) -> Plan:
    """A plan of these strategies of the four layers, or of the only one for all."""
    each = strategies * 4 if len(strategies) == 1 else strategies
    return plan_of(profile.graph, devices=2, global_batch=4, microbatches=2, cuts=cuts, strategies=each)


def test_plans_are_priced_on_one_basis_which_is_reported(profile: Profile) -> None:
    data, sharded = by_hand(profile, Strategy(data=2)), by_hand(profile, Strategy(zero=2, zero_stage=3))
    slower = replace(
        profile, name="slower", layers=tuple(replace(one, forward=2 * one.forward) for one in profile.layers)
    )
    theirs = api.evaluate(sharded, slower, mem=2**20)
    comparison = api_plans.compare({"data": data, "theirs": theirs}, profile, mem=2**20)
    for one, plan in zip(comparison.plans, (data, sharded), strict=True):
        priced = evaluate(profile, plan)
        assert one.step_seconds == priced.prediction.step_seconds
        assert fsum(one.time.values()) == pytest.approx(one.step_seconds, rel=1e-12)
        assert fsum(part.seconds for part in one.parts.parts) == pytest.approx(one.step_seconds, rel=1e-12)
        assert one.memory.total == one.peak_bytes
    assert comparison.plans[1].said_step_seconds == theirs.prediction.step_seconds > comparison.plans[1].step_seconds
    assert comparison.notes[0].startswith("data: written by hand")
    assert comparison.notes[1].startswith("theirs: made from slower")
    assert comparison.budget_bytes == 2**20


def test_only_layers_that_differ_are_listed(profile: Profile) -> None:
    data, tensor = Strategy(data=2), Strategy(zero=2, zero_stage=1)
    comparison = api_plans.compare([by_hand(profile, data), by_hand(profile, data, tensor, tensor, data)], profile)
    assert [(one.first, one.last, one.count, one.strategies) for one in comparison.layers] == [
        ("l1", "l2", 2, ("data2", "zero1x2"))
    ]
    alike = api_plans.compare([by_hand(profile, data), by_hand(profile, data)], profile)
    assert alike.layers == ()
    assert alike.buys[0].added_step_seconds == alike.buys[0].added_bytes == 0
    assert alike.buys[0].said == "takes the same time and memory"


def test_the_difference_between_two_plans_is_explained(profile: Profile) -> None:
    first, second = by_hand(profile, Strategy(data=2)), by_hand(profile, Strategy(), cuts=(0, 2, 4))
    comparison = api_plans.compare([first, second], profile)
    a, b = comparison.plans
    assert comparison.buys[0].added_step_seconds == b.step_seconds - a.step_seconds
    assert comparison.buys[0].added_bytes == b.peak_bytes - a.peak_bytes
    assert [one.strategies[1] for one in comparison.layers] == ["stage 0: unsplit", "stage 1: unsplit"]
    assert {one.strategies[0] for one in comparison.layers} == {"data2"}
    gain = b.samples_per_second / a.samples_per_second - 1
    assert f"({gain:+.1%} samples/s)" in comparison.buys[0].said


def test_other_batches_and_groups_of_devices_are_reported(profile: Profile) -> None:
    """The parts are those of the busiest stage: the one with three of the four layers."""
    plan = by_hand(profile, Strategy(data=2))
    comparison = api_plans.compare([plan, replace(plan, global_batch=8, microbatches=4)], profile)
    assert any("unlike batches (4, 8)" in note for note in comparison.notes)
    late, early = (by_hand(profile, Strategy(), cuts=(0, cut, 4)) for cut in (1, 3))
    comparison = api_plans.compare({"late": late, "early": early}, profile)
    groups = [one.parts.group for one in comparison.plans if one.parts is not None]
    said = [note for note in comparison.notes if "work longest" in note]
    assert len(set(groups)) == 2
    assert said == [
        "the parts of a step are those of the devices that work longest: "
        f"group {groups[0]} of late, group {groups[1]} of early"
    ]
    assert not any("work longest" in note for note in api_plans.compare([late, late], profile).notes)


def test_a_single_plan_is_refused(profile: Profile) -> None:
    with pytest.raises(InputError, match="two or more"):
        api_plans.compare([by_hand(profile, Strategy(data=2))], profile)
    with pytest.raises(InputError, match="names no profile"):
        api_plans.compare([by_hand(profile, Strategy(data=2))] * 2)


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "t4"])
def test_the_first_devices_are_the_cluster_of_so_many(name: str) -> None:
    whole = load_cluster(name, 32)
    offered = device_counts(whole)
    for devices in range(1, 33):
        try:
            built = load_cluster(name, devices)
        except InputError:
            assert devices not in offered
            with pytest.raises(InputError, match="whole ones"):
                first_devices(whole, devices)
        else:
            assert devices in offered
            assert first_devices(whole, devices) == built


def test_counts_fill_whole_members_of_every_level() -> None:
    whole = load_cluster("a100-80gb", 64)
    assert device_counts(whole) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
    assert device_counts(whole, divide_well=True) == (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
    assert device_counts(load_cluster("a100-80gb", 56), divide_well=True)[-3:] == (32, 48, 56)


def test_the_first_devices_of_a_mixed_cluster() -> None:
    fast, slow = (Device(name, 2**30, 1e10, {"fp32": flops}) for name, flops in (("fast", 2e11), ("slow", 1e11)))
    levels = (Level("node", 2, 1e9, 0.0), Level("cluster", 4, 1e9, 0.0))
    whole = Cluster("mixed", (DeviceGroup(fast, 4), DeviceGroup(slow, 4)), levels)
    half = first_devices(whole, 6)
    assert [(group.device.name, group.count) for group in half.groups] == [("fast", 4), ("slow", 2)]
    assert [level.size for level in half.levels] == [2, 3]
    assert [group.device.name for group in first_devices(whole, 4).groups] == ["fast"]
    for devices in (0, -1, 9):
        with pytest.raises(InputError, match="The cluster has 8"):
            first_devices(whole, devices)
