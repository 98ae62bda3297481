"""Memory over the layers of a stage, and over time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.cost.timeline import Timeline, timeline
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Cyclic, Mode, Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.result import plan_of
from tests.cost.test_step import simple
from tests.factories import random_profile
from tests.schedules import EXECUTABLE, ZERO_BUBBLE


def make_cost(draw: random.Random, zero: int) -> LayerCost:
    """A layer under no ZeRO (0), ZeRO-2 or ZeRO-3."""
    whole = draw.randint(0, 500)
    shard = whole // 4 if zero else whole
    kept = draw.randint(0, 800)
    working = kept + draw.randint(0, 500)
    return LayerCost(
        1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        parameters=shard, gradients=0 if zero else shard, formed_gradients=shard if zero else 0, states=2 * shard,
        kept=kept, gathered=whole if zero == 2 else 0, transient_parameters=whole if zero == 3 else 0,
        gather_buffer=whole if zero else 0, full_gradients=whole if zero else 0, reduce_buffer=whole if zero else 0,
        working=working, weight_working=draw.choice([kept, working]), forward_working=kept,
        optimizer_working=draw.randint(0, 400),
        passing_gradients=draw.choice([0, whole]), weight_copies=0 if zero else draw.choice([0, whole]),
        new_gradient=0 if zero else draw.choice([0, 3 * whole]),
        cast_gradient=0 if zero else draw.choice([0, 4 * whole]), bucket_copy=0 if zero else draw.choice([0, whole]),
    )  # fmt: skip


def replay(costs: list[LayerCost], microbatches: int) -> int:
    """Peak bytes of a single stage, one micro-batch after the other, by keeping a ledger of what is alive."""
    peak, formed = 0, [0] * len(costs)
    rest = sum(cost.parameters + cost.gradients + cost.states + cost.weight_copies for cost in costs)
    for number in range(microbatches):
        held = 0
        for cost in costs:
            own = cost.gathered + cost.transient_parameters + cost.gather_buffer + cost.forward_working
            peak = max(peak, rest + sum(formed) + held + own)
            held += cost.kept + cost.gathered
        pending = passing = 0
        for place in reversed(range(len(costs))):
            cost = costs[place]
            held -= cost.kept + cost.gathered
            prefetched = costs[place - 1].transient_parameters if place else 0
            new = cost.cast_gradient if microbatches == 1 else cost.new_gradient if number else 0
            working = max(cost.working, cost.weight_working + new)
            middle = cost.gathered + cost.transient_parameters + working + cost.full_gradients
            formed[place] = cost.formed_gradients
            # autograd goes from the newest to the oldest: copies of the first micro-batch come last in all others
            passing += cost.passing_gradients + (cost.weight_copies if number else 0)
            alive = rest + sum(formed) + passing + held + prefetched
            reduced = cost.reduce_buffer + cost.bucket_copy
            peak, pending = max(peak, alive + middle + pending, alive + cost.full_gradients + reduced), reduced
    return max(peak, rest + sum(formed) + sum(cost.optimizer_working - cost.weight_copies for cost in costs))


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_replay_in_the_steady_state(seed: int) -> None:
    """From the second micro-batch on all gradients exist, which is what the formula counts."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    expected, predicted = replay(costs, 3), stage_memory(costs, 1, 3, 0, 0).total
    # A layer's own passing gradients are counted in its forward too, as those that form are below.
    assert expected <= predicted <= expected + max(cost.passing_gradients + cost.weight_copies for cost in costs)
    lasting = [replace(cost, passing_gradients=0, weight_copies=0) for cost in costs]
    assert stage_memory(lasting, 1, 3, 0, 0).total == replay(lasting, 3)


@pytest.mark.parametrize("seed", range(60))
def test_is_close_above_a_replay_of_one_microbatch(seed: int) -> None:
    """The formula counts a layer's own forming gradients in its forward, nothing else too much."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    predicted, expected = stage_memory(costs, 1, 1, 0, 0).total, replay(costs, 1)
    assert expected <= predicted <= expected + sum(cost.formed_gradients + cost.passing_gradients for cost in costs)


def replay_filled(costs: list[LayerCost], microbatches: int) -> int:
    """Peak bytes of the backward passes of a stage that has all micro-batches in memory when they begin: parameters
    that were gathered in forward last for the first of them, gradients of shards form in it."""
    peak, formed = 0, [0] * len(costs)
    rest = sum(cost.parameters + cost.gradients + cost.states + cost.weight_copies for cost in costs)
    for left in reversed(range(microbatches)):
        held = left * sum(cost.kept for cost in costs) + sum(cost.kept for cost in costs)
        gathered, pending = [cost.gathered for cost in costs] if left == microbatches - 1 else [0] * len(costs), 0
        for place in reversed(range(len(costs))):
            cost = costs[place]
            held, gathered[place] = held - cost.kept, 0
            prefetched = costs[place - 1].transient_parameters if place else 0
            new = cost.new_gradient if left < microbatches - 1 else 0
            working = max(cost.working, cost.weight_working + new)
            middle = cost.gathered + cost.transient_parameters + working + cost.full_gradients
            formed[place] = cost.formed_gradients
            alive = rest + sum(formed) + held + sum(gathered) + prefetched
            reduced = cost.reduce_buffer + cost.bucket_copy
            peak, pending = max(peak, alive + middle + pending, alive + cost.full_gradients + reduced), reduced
    return max(peak, rest + sum(formed) + sum(cost.optimizer_working - cost.weight_copies for cost in costs))


@pytest.mark.parametrize("seed", range(60))
def test_is_close_above_a_replay_that_begins_with_all_micro_batches(seed: int) -> None:
    """Never less; not more than with all gradients there from the beginning; equal where gradients weigh less than what
    is let go of."""
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(draw.randint(1, 6))]
    costs = [replace(cost, passing_gradients=0, weight_copies=0) for cost in costs]
    predicted, expected = stage_memory(costs, 3, 3, 0, 0, filled=True).total, replay_filled(costs, 3)
    assert expected <= predicted <= stage_memory(costs, 3, 3, 0, 0).total
    costs = [replace(cost, new_gradient=0) for cost in costs]  # counted beside the first micro-batch's activations
    light = [replace(cost, formed_gradients=min(cost.formed_gradients, cost.kept + cost.gathered)) for cost in costs]
    assert stage_memory(light, 3, 3, 0, 0, filled=True).total == replay_filled(light, 3)


@pytest.mark.parametrize("seed", range(30))
def test_parts_add_up_and_are_not_negative(seed: int) -> None:
    draw = random.Random(seed)
    costs = [make_cost(draw, draw.choice([0, 2, 3])) for _ in range(5)]
    memory = stage_memory(costs, draw.randint(1, 3), 4, 70, 1000, filled=draw.random() < 0.5)
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations,
             memory.temporary, memory.communication, memory.context)  # fmt: skip
    assert min(parts) >= 0
    assert sum(parts) == memory.total


def test_passing_gradients_are_gone_when_the_optimizer_runs() -> None:
    cost = replace(make_cost(random.Random(3), 0), passing_gradients=10_000, optimizer_working=50_000)
    rest = cost.parameters + cost.gradients + cost.states
    assert stage_memory([cost], 1, 1, 0, 0).total == rest + cost.optimizer_working
    assert stage_memory([replace(cost, optimizer_working=0)], 1, 1, 0, 0).gradients == cost.gradients + 10_000


ROUNDING = 1e-12
"""Seconds."""


def drawn(seed: int, schedule: Schedule, *, even: bool = False) -> tuple[Profile, Plan]:
    """A random model in a random pipeline, priced; ``even``: all stages are alike but for the first and the last."""
    draw = random.Random(seed)
    virtual = {Schedule.INTERLEAVED: draw.choice((1, 2, 3)), Schedule.ZERO_BUBBLE_V: 2}.get(schedule, 1)
    pipeline, devices, count = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.choice((1, 2, 3, 4, 7, 8, 20))
    stages = pipeline * virtual
    profile = random_profile(draw, devices=pipeline * devices, blocks=stages + 4, alike=even)
    layers = stages + 6
    cuts = sorted(draw.sample(range(1, layers), stages - 1))
    data = Strategy(data=devices)
    strategy = draw.choice((data, Strategy(zero=devices, zero_stage=draw.choice((1, 2, 3)))))
    plan = plan_of(
        profile.graph, devices=pipeline * devices, global_batch=devices * count, microbatches=count,
        cuts=(0, *cuts, layers), strategies=[strategy] * layers, schedule=schedule,
    )  # fmt: skip
    return profile, evaluate(profile, replace(plan, virtual_stages=virtual))


@pytest.mark.parametrize("schedule", EXECUTABLE)
def test_the_step_takes_what_is_predicted(schedule: Schedule) -> None:
    for seed in range(15):
        profile, plan = drawn(seed, schedule)
        assert timeline(profile, plan).seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)


@pytest.mark.parametrize("schedule", EXECUTABLE)
def test_the_peak_of_every_group_is_the_plans(schedule: Schedule) -> None:
    for seed in range(15):
        profile, plan = drawn(seed, schedule)
        found = timeline(profile, plan)
        assert [group.peak.memory for group in found.groups] == list(device_memory(plan))


@pytest.mark.parametrize("schedule", EXECUTABLE)
def test_every_pass_is_done_once_and_after_what_it_needs(schedule: Schedule) -> None:
    for seed in range(8):
        profile, plan = drawn(seed, schedule)
        check_order(timeline(profile, plan), plan)


def check_order(found: Timeline, plan: Plan) -> None:
    """Each group does one thing at a time, and nothing before what it needs has come."""
    arrived = {(one.what, one.stage, one.microbatch): one.arrives for group in found.groups for one in group.passes}
    kinds = 3 if plan.schedule in ZERO_BUBBLE else 2
    assert len(arrived) == sum(len(group.passes) for group in found.groups)
    assert len(arrived) == kinds * len(plan.stages) * plan.microbatches
    last = len(plan.stages) - 1
    for group in found.groups:
        for before, one in zip((None, *group.passes), group.passes, strict=False):
            assert one.start <= one.end <= one.free <= one.arrives
            assert before is None or before.free <= one.start + ROUNDING
            needs = {
                Pass.FORWARD: (Pass.FORWARD, one.stage - 1),
                Pass.BACKWARD: (Pass.BACKWARD, one.stage + 1) if one.stage < last else (Pass.FORWARD, last),
                Pass.WEIGHT: (Pass.BACKWARD, one.stage),
            }[one.what]
            if needs[1] >= 0:
                assert arrived[(*needs, one.microbatch)] <= one.start + ROUNDING
    groups = found.course.groups
    between = [one for one in found.sends() if one.source_group == one.target_group]
    assert not between
    if groups > 1 and plan.virtual_stages == 1:
        assert sum(1 for _ in found.sends()) == 2 * (groups - 1) * plan.microbatches


def test_a_pipeline_by_hand() -> None:
    """Two stages of one and two layers, 1 s forward and 2 s backward a layer, three micro-batches, 1F1B."""
    profile = simple(2)
    plan = plan_of(
        profile.graph, devices=2, global_batch=3, microbatches=3, cuts=(0, 1, 3), strategies=[Strategy()] * 3
    )
    first, second = timeline(profile, plan).groups
    send = 0.1  # 1000 bytes at 1e4 bytes a second
    begins = [(one.what, one.microbatch, round(one.start, 9)) for one in first.passes]
    assert begins == [
        (Pass.FORWARD, 0, 0.0), (Pass.FORWARD, 1, 1 + send), (Pass.BACKWARD, 0, 7 + 2 * send),
        (Pass.FORWARD, 2, 9 + 2 * send), (Pass.BACKWARD, 1, 13 + 3 * send), (Pass.BACKWARD, 2, 19 + 4 * send),
    ]  # fmt: skip
    assert [one.microbatch for one in second.passes] == [0, 0, 1, 1, 2, 2]
    assert [one.name for one in first.closing] == ["optimizer"]
    assert first.closing[0].end - first.closing[0].start == pytest.approx(1.0)  # 1000 items, 1 ms each
    # 16 bytes an item of one layer, 100 bytes a micro-batch that waits for backward, and a gradient beside the buffer.
    buffers = first.resting.communication
    assert [one.total - buffers for one in first.after] == [16100, 16200, 16100, 16200, 16100, 16000]
    assert first.peak.memory.total - buffers == 16000 + 2 * 100 + 4000
    assert (first.peak.place, first.peak.layer, second.peak.layer) == (2, "l0", "l2")


def test_a_long_step_ends_within_a_thousandth_of_the_straight_line_it_is_priced_by() -> None:
    profile = random_profile(random.Random(5), devices=32, blocks=30, alike=True)
    plan = plan_of(
        profile.graph, devices=32, global_batch=200, microbatches=200, cuts=tuple(range(33)),
        strategies=[Strategy()] * 32,
    )  # fmt: skip
    priced = evaluate(profile, plan)
    assert timeline(profile, plan).seconds == pytest.approx(priced.prediction.step_seconds, rel=1e-3)


def test_plans_of_other_kinds_say_why_they_have_none() -> None:
    profile, plan = drawn(1, Schedule.GPIPE)
    cyclic = Cyclic(CyclicRule.V1, CyclicSetting.SINGLE)
    for other in (replace(plan, cyclic=cyclic), replace(plan, mode=Mode.INFERENCE)):
        with pytest.raises(InputError, match="no timeline"):
            timeline(profile, other)
