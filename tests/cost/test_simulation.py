"""The quick simulation against the plain one, closed forms of published schedules, and long steps against short."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost import schedule as simulation
from galvatron_lite.cost.schedule import closed_form, group_ends, run
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import Pass, ScheduleConfig, group_of, schedules, stage_at
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.plans.schema import Schedule
from tests.cost.priced import simulate
from tests.schedules import SIMPLE

SECONDS = st.floats(0.01, 10)
INTERLEAVED = st.tuples(st.integers(2, 6), st.integers(1, 4), st.integers(1, 17))


@st.composite
def pipelines(draw: st.DrawFn, least: int = 1) -> list[StageTimes]:
    """Unequal stages; a boundary's transfer takes as long forward as back."""
    count = draw(st.integers(least, 6))
    sends = [draw(st.floats(0, 5)) for _ in range(count - 1)]
    return [StageTimes(draw(SECONDS), draw(SECONDS), right, left)
            for left, right in zip([0.0, *sends], [*sends, 0.0], strict=True)]  # fmt: skip


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaving_divides_the_bubble(
    groups: int, virtual: int, rounds: int, forward: float, backward: float
) -> None:
    """Narayanan et al. 2021, section 2.2.2: m (f + b) + (p - 1) (f + b) / v where p divides m."""
    count = groups * rounds
    stages = [StageTimes(forward / virtual, backward / virtual)] * (groups * virtual)
    ends = group_ends(stages, ScheduleConfig(Schedule.INTERLEAVED, groups, virtual, count))
    assert max(ends) == pytest.approx((count + (groups - 1) / virtual) * (forward + backward))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(INTERLEAVED)
def test_every_chunk_passes_every_micro_batch_once(shape: tuple[int, int, int]) -> None:
    groups, virtual, count = shape
    for group in range(groups):
        actions = Schedule.INTERLEAVED.actions(groups, group, count, virtual)
        assert len(set(actions)) == len(actions) == 2 * virtual * count
        for chunk in range(virtual):
            for what in (Pass.FORWARD, Pass.BACKWARD):
                own = [a.microbatch for a in actions if a.what is what and a.chunk == chunk]
                assert own == list(range(count))
    # the simulation meets no circle, and takes no less than the busiest group
    stages = [StageTimes(1.0, 2.0)] * (groups * virtual)
    assert max(group_ends(stages, ScheduleConfig(Schedule.INTERLEAVED, groups, virtual, count))) >= 3 * virtual * count


@pytest.mark.parametrize(("groups", "virtual"), [(2, 2), (4, 3), (8, 4), (35, 3)])
def test_interleaved_holds_what_its_warm_up_brings(groups: int, virtual: int) -> None:
    for group in range(groups):
        held = chunks_in_flight(Schedule.INTERLEAVED, groups, group, 4 * groups, virtual)
        assert max(sum(counts) for _, counts in held) == 2 * (groups - group - 1) + (virtual - 1) * groups + 1


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
    continued = simulation._continued
    assert max(continued(stages, course, hidden, long)) == pytest.approx(max(run(stages, course, hidden)), rel=0.02)
    alike = [replace(stages[0], send_forward=0.0, send_backward=0.0)] * len(stages)
    assert continued(alike, course, hidden, long) == pytest.approx(run(alike, course, hidden))
