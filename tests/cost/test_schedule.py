"""The closed form against the event simulation, and the simulation against hand-worked pipelines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.schedule import closed_form, group_ends, run_ordered
from galvatron_lite.parallelism.pipeline.schedule import ScheduleConfig
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes
from galvatron_lite.plans.schema import Schedule
from tests.cost.priced import makespan, order_of, simulate
from tests.schedules import SIMPLE

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
@given(pipelines(), st.integers(1, 12), SCHEDULES)
def test_closed_form_of_gpipe_is_never_below_the_simulation(
    stages: list[StageTimes], microbatches: int, schedule: Schedule
) -> None:
    simulated = makespan(simulate(stages, microbatches, schedule))
    assert closed_form(stages, microbatches, Schedule.GPIPE) >= simulated * (1 - 1e-12)


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pipelines(), st.integers(1, 8), SCHEDULES)
def test_simulation_keeps_every_dependency(stages: list[StageTimes], microbatches: int, schedule: Schedule) -> None:
    events = {(e.stage, e.forward, e.microbatch): e for e in simulate(stages, microbatches, schedule)}
    assert len(events) == 2 * microbatches * len(stages)
    for (stage, forward, microbatch), event in events.items():
        source = (stage - 1, True, microbatch) if forward else (stage + 1, False, microbatch)
        if source in events:
            assert event.start >= events[source].end
        if not forward:
            assert event.start >= events[stage, True, microbatch].end
    for stage in range(len(stages)):
        own = sorted((e for e in events.values() if e.stage == stage), key=lambda e: e.start)
        assert all(after.start >= before.end for before, after in pairwise(own))


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_f_one_b_holds_no_more_than_the_stages_behind(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        held = most = 0
        for forward, _ in order_of(Schedule.ONE_F_ONE_B, stages, stage, microbatches):
            held += 1 if forward else -1
            most = max(most, held)
        assert most == min(microbatches, stages - stage)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5), SECONDS, SECONDS)
def test_interleaved_equals_the_simulation_of_equal_stages(
    groups: int, virtual: int, rounds: int, forward: float, backward: float
) -> None:
    stages = [StageTimes(forward, backward)] * (groups * virtual)
    count = rounds * groups
    simulated = max(group_ends(stages, ScheduleConfig(Schedule.INTERLEAVED, groups, virtual, count)))
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
