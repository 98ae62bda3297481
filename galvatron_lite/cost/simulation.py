"""Event simulation of one step of a pipeline, quick enough for thousands of plans.

The order of passes on every group of devices is fixed by the schedule, so the event graph of a step is the same for
all plans of one course: it is sorted once (``program_of``) and then only walked through with each plan's seconds. Ends
are linear in the seconds in (max, +) algebra, so they grow by a constant for every further round of micro-batches once
the pipeline runs in its steady state (Baccelli et al. 1992, "Synchronization and Linearity", theorem 3.109); long
steps are simulated up to there and continued in a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig, group_of, stage_at
from galvatron_lite.parallelism.pipeline.table import actions_of, shown_of, shown_rounds
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes

MOST_EVENTS = 8192
"""Longer steps are continued from their steady state; an event takes less than 0.1 microseconds."""


@dataclass(frozen=True, slots=True)
class Program:
    """The passes of a step in an order in which each comes after all it waits for."""

    # (group, index into the seconds, own slot, slot it waits for); slot 0 is the beginning
    steps: tuple[tuple[int, int, int, int], ...]
    slots: int


def group_ends(stages: Sequence[StageTimes], course: ScheduleConfig, hidden: float = 0.0) -> tuple[float, ...]:
    """Seconds from the step's beginning to the end of each group's last backward.

    Args:
        stages: in the order of the model; a group's backward may end with a send.
        course: of the pipeline.
        hidden: share of a send that the sender's compute hides: it delays the receiver only. What is not hidden
            occupies the sender.
    """
    turn = course.groups
    rounds = max(MOST_EVENTS // (2 * len(stages) * turn), 2)
    long = course.microbatches % turn + rounds * turn
    if course.microbatches <= long:
        return run(stages, course, hidden)
    return _continued(stages, course, hidden, long)


def run(stages: Sequence[StageTimes], course: ScheduleConfig, hidden: float = 0.0) -> tuple[float, ...]:
    """``group_ends`` by simulating every pass."""
    seconds, delays = _seconds(stages, hidden)
    program = program_of(course)
    clock, ready = [0.0] * course.groups, [0.0] * program.slots
    for group, index, slot, source in program.steps:
        start, known = clock[group], ready[source]
        end = (known if known > start else start) + seconds[index]
        clock[group] = end
        ready[slot] = end + delays[index]
    return tuple(clock)


def _continued(stages: Sequence[StageTimes], course: ScheduleConfig, hidden: float, long: int) -> tuple[float, ...]:
    """``group_ends`` from a step of ``long`` micro-batches and one that is a round shorter.

    A round takes as long as the two differ, and at least what the busiest group computes in it: with stages that are
    very unequal the slowest has not yet settled the pace.
    """
    turn = course.groups
    short_ends, long_ends = (run(stages, replace(course, microbatches=count), hidden) for count in (long - turn, long))
    pace = max(after - before for before, after in zip(short_ends, long_ends, strict=True))
    left = (course.microbatches - long) // turn
    return tuple(end + left * max(pace, turn * busiest(stages, course, hidden)) for end in long_ends)


def busiest(stages: Sequence[StageTimes], course: ScheduleConfig, hidden: float) -> float:
    """Seconds that the busiest group works on one micro-batch."""
    busy = [0.0] * course.groups
    for index, stage in enumerate(stages):
        sends = (1.0 - hidden) * (stage.send_forward + stage.send_backward)
        busy[group_of(course.schedule, course.groups, index)] += stage.forward + stage.backward + sends
    return max(busy)


def _seconds(stages: Sequence[StageTimes], hidden: float) -> tuple[list[float], list[float]]:
    """Seconds each pass occupies its group and delays what waits for it: forwards, backwards, weight gradients."""
    shown = 1.0 - hidden
    seconds = [stage.forward + shown * stage.send_forward for stage in stages]
    seconds += [stage.backward + shown * stage.send_backward for stage in stages]
    delays = [hidden * stage.send_forward for stage in stages]
    delays += [hidden * stage.send_backward for stage in stages]
    return seconds, delays


@lru_cache(maxsize=128)
def program_of(course: ScheduleConfig) -> Program:
    """The passes of a step, sorted.

    Raises:
        InputError: the groups wait for one another in a circle.
    """
    return sorted_passes(course, actions_of(course))


def sorted_passes(course: ScheduleConfig, orders: Sequence[Sequence[Action]]) -> Program:
    """The program of given orders of passes."""
    done: set[int] = {0}
    places = [0] * course.groups
    steps: list[tuple[int, int, int, int]] = []
    waiting = list(range(course.groups))
    while waiting:
        group = waiting.pop()
        order = orders[group]
        while places[group] < len(order):
            step = _step(course, group, order[places[group]])
            if step[3] not in done:
                break
            done.add(step[2])
            steps.append(step)
            places[group] += 1
            waiting += _wakes(course, step, group)
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise InputError("schedule", course.schedule.value, f"Its passes wait for one another in a circle: {course}.")
    return Program(tuple(steps), 1 + 2 * course.groups * course.virtual * course.microbatches)


def _step(course: ScheduleConfig, group: int, action: Action) -> tuple[int, int, int, int]:
    stages = course.groups * course.virtual
    stage = stage_at(course.schedule, course.groups, group, action.chunk)
    if action.what is Pass.FORWARD:
        source = _slot(course, stage - 1, action.microbatch) if stage else 0
        return group, stage, _slot(course, stage, action.microbatch), source
    own = _slot(course, stages + stage, action.microbatch)
    last = stage == stages - 1
    source = _slot(course, stage if last else stages + stage + 1, action.microbatch)
    return group, stages + stage, own, source


def _slot(course: ScheduleConfig, index: int, microbatch: int) -> int:
    return 1 + index * course.microbatches + microbatch


def _wakes(course: ScheduleConfig, step: tuple[int, int, int, int], group: int) -> list[int]:
    """The groups that a pass's result may set going."""
    stages, index = course.groups * course.virtual, step[1]
    after = index + 1 if index < stages else index - stages - 1
    if not 0 <= after < stages:
        return []
    woken = group_of(course.schedule, course.groups, after)
    return [] if woken == group else [woken]


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """A step whose order of passes depends on their seconds (zero-bubble schedules)."""

    spans: tuple[float, ...]  # seconds from each group's first pass to its last
    ends: tuple[float, ...]  # seconds from the step's beginning to each group's last pass
    actions: tuple[tuple[Action, ...], ...]  # of each group, in order, as far as they are simulated (``shown_of``)


def run_ordered(order: PassOrder, course: ScheduleConfig) -> OrderedStep:
    """A step in the order that its seconds ask for (``parallelism.pipeline.greedy``), which the runtime follows.

    Where software does without the optimizer's global synchronisation (Qi et al. 2023, section 4, post-validation),
    steps follow one another like parallelograms, so a step takes what the busiest group needs from its first pass to
    its last, not the makespan.

    Args:
        order: seconds of every stage's passes, and what else decides their order.
        course: of the pipeline.
    """
    groups = shown_rounds(order, course)
    more = (course.microbatches - shown_of(course).microbatches) * busiest(order.stages, course, order.hidden)
    return OrderedStep(
        tuple(group.span + more for group in groups),
        tuple(group.starts[0] + group.span + more for group in groups),
        tuple(group.actions for group in groups),
    )
