"""Zero-bubble schedules: bounds, limits of memory, and the bubbles that their paper prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.schedule import group_ends, run_ordered
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes
from galvatron_lite.plans.schema import Schedule
from tests.schedules import ZERO_BUBBLE

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


def order_of(groups: int, times: tuple[float, float, float, float], virtual: int = 1) -> PassOrder:
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
        bubbles[schedule] = 1 - work / max(run_ordered(order_of(groups, times, virtual), course).spans)
    assert bubbles[Schedule.ZERO_BUBBLE_2P] < bubbles[Schedule.ZERO_BUBBLE_1P] < bubbles[Schedule.ONE_F_ONE_B]
    # section 2.3: ZB-H1 has (p - 1) (F + B - W) of bubble; the greedy order comes within 3 points of it
    quick, course = order_of(groups, (*times[:3], 0.0)), ScheduleConfig(Schedule.ZERO_BUBBLE_1P, groups, 1, count)
    greedy = 1 - work / max(run_ordered(quick, course).spans)
    handmade = (groups - 1) * (times[0] + times[1] - times[2])
    assert greedy == pytest.approx(handmade / (handmade + work), abs=0.03)
    assert bubbles[Schedule.ZERO_BUBBLE_2P] < 0.06
    assert bubbles[Schedule.ZERO_BUBBLE_V] < bubbles[Schedule.ZERO_BUBBLE_1P]


def test_twice_the_memory_is_held() -> None:
    order = order_of(8, (29.718, 29.444, 19.927, 0.527))
    held = [
        max(whole for whole, _ in held_by(run_ordered(order, ScheduleConfig(schedule, 8, 1, 24)).actions[0]))
        for schedule in (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P)
    ]
    assert held == [8, 15]
