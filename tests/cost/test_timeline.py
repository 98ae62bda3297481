"""Every pass of a step: the prediction's seconds and bytes come back, and what must be so of any schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

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
    # 16 bytes an item of one layer, and 100 bytes a micro-batch that waits for backward; 150 while it is worked on.
    buffers = first.resting.communication
    assert [one.total - buffers for one in first.after] == [16100, 16200, 16100, 16200, 16100, 16000]
    assert first.peak.memory.total - buffers == 16000 + 100 + 150
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
