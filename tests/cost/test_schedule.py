"""Schedules: their closed forms, their simulation, and zero-bubble orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.schedule import closed_form, extrapolated_ends, group_ends, run, run_ordered
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig, group_of, schedules, stage_at
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes
from galvatron_lite.plans.schema import Schedule
from tests.cost.priced import makespan, simulate
from tests.schedules import SIMPLE, ZERO_BUBBLE

SECONDS = st.floats(0.01, 10)
SENDS = st.floats(0, 5)
SCHEDULES = st.sampled_from(SIMPLE)


@st.composite
def pipelines(draw: st.DrawFn) -> list[StageTimes]:
    """Unequal stages; a boundary's transfer takes as long forward as back."""
    count = draw(st.integers(1, 6))
    sends = [draw(SENDS) for _ in range(count - 1)]
    return [StageTimes(draw(SECONDS), draw(SECONDS), right, left)
            for left, right in zip([0.0, *sends], [*sends, 0.0], strict=True)]  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(SECONDS, min_size=1, max_size=6), st.floats(0.3, 3), SENDS, st.integers(1, 12), SCHEDULES)
def test_closed_form_is_never_below_the_simulation_of_one_ratio(
    forwards: list[float], ratio: float, send: float, microbatches: int, schedule: Schedule
) -> None:
    last = len(forwards) - 1
    stages = [
        StageTimes(seconds, ratio * seconds, send if place < last else 0.0, send if place else 0.0)
        for place, seconds in enumerate(forwards)
    ]
    simulated = makespan(simulate(stages, microbatches, schedule))
    assert closed_form(stages, microbatches, schedule) >= simulated * (1 - 1e-12)


def test_unlike_ratios_can_exceed_the_closed_form_of_1f1b() -> None:
    """With two micro-batches every stage but the last runs both forwards first, as GPipe does."""
    stages = [StageTimes(4, 1), StageTimes(1, 4), StageTimes(1, 1)]
    assert closed_form(stages, 2, Schedule.ONE_F_ONE_B) == 17
    assert makespan(simulate(stages, 2, Schedule.ONE_F_ONE_B)) == 18
    assert closed_form(stages, 2, Schedule.GPIPE) == 20


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 20), SECONDS, SECONDS, SCHEDULES)
def test_equal_for_equal_stages(
    count: int, microbatches: int, forward: float, backward: float, schedule: Schedule
) -> None:
    stages = [StageTimes(forward, backward)] * count
    simulated = makespan(simulate(stages, microbatches, schedule))
    assert closed_form(stages, microbatches, schedule) == pytest.approx(simulated)
    # Narayanan et al. 2021: (m + p - 1) (f + b) for both schedules
    assert simulated == pytest.approx((microbatches + count - 1) * (forward + backward))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pipelines(), SCHEDULES)
def test_equal_for_one_microbatch(stages: list[StageTimes], schedule: Schedule) -> None:
    assert closed_form(stages, 1, schedule) == pytest.approx(makespan(simulate(stages, 1, schedule)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 5), SECONDS, SECONDS)
def test_interleaved_equals_the_simulation_of_equal_stages(
    groups: int, virtual: int, rounds: int, forward: float, backward: float
) -> None:
    """Narayanan et al. 2021, section 2.2.2: (m + (p - 1) / v) times what all stages of a group take."""
    stages = [StageTimes(forward, backward)] * (groups * virtual)
    count = rounds * groups
    simulated = max(group_ends(stages, ScheduleConfig(Schedule.INTERLEAVED, groups, virtual, count)))
    assert simulated == pytest.approx((count * virtual + groups - 1) * (forward + backward))
    assert closed_form(stages, count, Schedule.INTERLEAVED, virtual) == pytest.approx(simulated)


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
def test_zero_bubble_equals_the_simulation_of_passes_alike(groups: int, rounds: int) -> None:
    """With forward, the gradients of inputs and those of weights a second each (Qi et al. 2023, figures 2 and 3)."""
    stages, count = (StageTimes(1, 2, weight=1),) * groups, rounds * groups
    for schedule in (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P):
        run = run_ordered(PassOrder(stages, 0.0, 0.5), ScheduleConfig(schedule, groups, 1, count))
        span, end = max(run.spans), max(run.ends)
        assert closed_form(stages, count, schedule, steps_overlap=True) == pytest.approx(span, rel=0.12)
        assert closed_form(stages, count, schedule) == pytest.approx(end, rel=0.12)
        assert closed_form(stages, count, schedule) <= end * (1 + 1e-9)
    # ZB-H1: (p - 1)(F + B - W) of bubble; ZB-H2: (p - 1)(F + B - 2 W) = 0
    assert closed_form(stages, count, Schedule.ZERO_BUBBLE_1P) == pytest.approx(3 * count + groups - 1)
    if count >= 2 * groups:
        overlapping = closed_form(stages, count, Schedule.ZERO_BUBBLE_2P, steps_overlap=True)
        assert overlapping == pytest.approx(3 * count)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=2, max_size=6), st.integers(1, 20))
def test_freed_bubbles_are_never_slower(figures: list[tuple[float, float, float]], count: int) -> None:
    stages = [StageTimes(forward, forward + more, weight=min(more, forward)) for forward, more, _ in figures]
    orders = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P)
    times = [closed_form(stages, count, schedule) for schedule in orders]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(times))


def blocking(stages: list[StageTimes], hidden: float) -> list[StageTimes]:
    """What is not hidden of a send counts as the sender's compute."""
    shown = 1 - hidden
    return [
        StageTimes(
            one.forward + shown * one.send_forward, one.backward + shown * one.send_backward,
            hidden * one.send_forward, hidden * one.send_backward,
        )
        for one in stages
    ]  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pipelines(),
    st.integers(1, 12),
    st.sampled_from(SIMPLE),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_equals_the_plain_simulation(stages: list[StageTimes], count: int, schedule: Schedule, hidden: float) -> None:
    ends = group_ends(stages, ScheduleConfig(schedule, len(stages), 1, count), hidden)
    events = simulate(blocking(stages, hidden), count, schedule)
    expected = [max(event.end for event in events if event.stage == stage) for stage in range(len(stages))]
    assert ends == pytest.approx(expected)
    assert max(ends) <= closed_form(stages, count, Schedule.GPIPE) * (1 + 1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pipelines(), st.integers(1, 12))
def test_gpipe_is_its_closed_form_where_sends_block(stages: list[StageTimes], count: int) -> None:
    """A flow shop whose jobs are alike: every stage waits for the slowest before it, then never again."""
    ends = group_ends(stages, ScheduleConfig(Schedule.GPIPE, len(stages), 1, count))
    assert max(ends) == pytest.approx(closed_form(stages, count, Schedule.GPIPE))


@pytest.mark.parametrize("schedule", schedules())
def test_groups_and_stages_are_inverse(schedule: Schedule) -> None:
    for group in range(4):
        for chunk in range(3):
            assert group_of(schedule, 4, stage_at(schedule, 4, group, chunk)) == group
    if schedule is Schedule.ZERO_BUBBLE_V:
        assert [group_of(schedule, 3, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(30, 60), st.sampled_from([0.0, 1.0]), st.data())
def test_long_steps_go_on_as_they_began(
    groups: int, virtual: int, count: int, hidden: float, data: st.DataObject
) -> None:
    """Continued from four rounds against simulated to the end: within 2 %, and exact for equal stages."""
    near = st.floats(0.9, 1.1)
    stages = [StageTimes(data.draw(near), 2 * data.draw(near), 0.1, 0.1) for _ in range(groups * virtual)]
    schedule = Schedule.ONE_F_ONE_B if virtual == 1 else Schedule.INTERLEAVED
    course = ScheduleConfig(schedule, groups, virtual, count)
    long = count % groups + 4 * groups
    assert max(extrapolated_ends(stages, course, hidden, long)) == pytest.approx(
        max(run(stages, course, hidden)), rel=0.02
    )
    alike = [replace(stages[0], send_forward=0.0, send_backward=0.0)] * len(stages)
    assert extrapolated_ends(alike, course, hidden, long) == pytest.approx(run(alike, course, hidden))


SHARE = 0.43
"""Bytes between B and W for one between F and B: 32 s b h of 74 (Qi et al. 2023, table 1, at 4096 wide, 1024 long)."""


def stages_of(groups: int, times: tuple[float, float, float, float], virtual: int = 1) -> tuple[StageTimes, ...]:
    forward, backward, weight, send = (seconds / virtual for seconds in times)
    send *= virtual
    last = groups * virtual - 1
    return tuple(
        StageTimes(forward, backward + weight, send if place < last else 0.0, send if place else 0.0, weight)
        for place in range(last + 1)
    )


def passes_of(groups: int, times: tuple[float, float, float, float], virtual: int = 1) -> PassOrder:
    return PassOrder(stages_of(groups, times, virtual), 0.0, SHARE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(ZERO_BUBBLE), st.integers(2, 6), st.integers(1, 20), st.floats(0.5, 2), st.floats(0.5, 2),
    st.floats(0.1, 1), st.floats(0, 0.3),
)  # fmt: skip
def test_all_work_is_done_within_the_limit(
    schedule: Schedule, groups: int, count: int, forward: float, backward: float, weight: float, share: float
) -> None:
    virtual = 2 if schedule is Schedule.ZERO_BUBBLE_V else 1
    stages = stages_of(groups, (forward, backward, weight, 0.0), virtual)
    result = run_ordered(PassOrder(stages, 0.0, share), ScheduleConfig(schedule, groups, virtual, count))
    least = count * (forward + backward + weight)
    assert min(result.spans) >= least * (1 - 1e-9)
    assert max(result.spans) <= (count + 2 * groups) * (forward + backward + weight) + 1e-9
    limit = groups if schedule is Schedule.ZERO_BUBBLE_1P else 2 * groups
    # the limit holds whenever a forward starts; B and W only lower what is held
    for own in result.actions:
        assert max(whole + share * pending for whole, pending in held_by(own)) <= limit + 1e-6


def held_by(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """After each pass: micro-batches between forward and B, and between B and W."""
    done: Counter[Pass] = Counter()
    for action in actions:
        done[action.what] += 1
        yield done[Pass.FORWARD] - done[Pass.BACKWARD], done[Pass.BACKWARD] - done[Pass.WEIGHT]


# Qi et al. 2023, table 5 (milliseconds of F, B, W and a send) and the 1F1B, ZB-1p and ZB-2p they order from them.
PUBLISHED = [(8, 24, (18.522, 18.086, 9.337, 0.601)), (8, 24, (29.718, 29.444, 19.927, 0.527)),
             (16, 48, (11.347, 11.248, 8.132, 0.377)), (32, 96, (10.419, 10.207, 7.715, 0.408))]  # fmt: skip


@pytest.mark.parametrize(("groups", "count", "times"), PUBLISHED)
def test_bubbles_come_out_in_the_published_order(
    groups: int, count: int, times: tuple[float, float, float, float]
) -> None:
    work = count * sum(times[:3])
    plain = max(group_ends(stages_of(groups, times), ScheduleConfig(Schedule.ONE_F_ONE_B, groups, 1, count)))
    bubbles = {Schedule.ONE_F_ONE_B: 1 - work / plain}
    for schedule, virtual in zip(ZERO_BUBBLE, (1, 1, 2), strict=True):
        course = ScheduleConfig(schedule, groups, virtual, count)
        bubbles[schedule] = 1 - work / max(run_ordered(passes_of(groups, times, virtual), course).spans)
    assert bubbles[Schedule.ZERO_BUBBLE_2P] < bubbles[Schedule.ZERO_BUBBLE_1P] < bubbles[Schedule.ONE_F_ONE_B]
    # section 2.3: ZB-H1 has (p - 1) (F + B - W) of bubble; the greedy order comes within 3 points of it
    quick, course = passes_of(groups, (*times[:3], 0.0)), ScheduleConfig(Schedule.ZERO_BUBBLE_1P, groups, 1, count)
    greedy = 1 - work / max(run_ordered(quick, course).spans)
    handmade = (groups - 1) * (times[0] + times[1] - times[2])
    assert greedy == pytest.approx(handmade / (handmade + work), abs=0.03)
    assert bubbles[Schedule.ZERO_BUBBLE_2P] < 0.06
    assert bubbles[Schedule.ZERO_BUBBLE_V] < bubbles[Schedule.ZERO_BUBBLE_1P]


def test_twice_the_memory_is_held() -> None:
    order = passes_of(8, (29.718, 29.444, 19.927, 0.527))
    held = [
        max(whole for whole, _ in held_by(run_ordered(order, ScheduleConfig(schedule, 8, 1, 24)).actions[0]))
        for schedule in (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P)
    ]
    assert held == [8, 15]
