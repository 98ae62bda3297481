"""Time of one step of a pipeline: the closed form that search optimises.

Symbols: stages s = 0..p-1; m micro-batches; f_s, b_s seconds of forward and backward of one micro-batch; x_s seconds
of sending one boundary tensor from stage s to s+1, and as long for its gradient on the way back.

Every stage pays for what it sends: F_s = f_s + x_s, B_s = b_s + x_{s-1}, C_s = F_s + B_s. Then

    1F1B    T = sum_s C_s + (m - 1) max_s C_s
    GPipe   T = sum_s C_s + (m - 1) (max_s F_s + max_s B_s)

is the makespan of the event graph where sends occupy their sender: exactly for GPipe (a flow shop of equal jobs), and
for 1F1B where p = 1, where m = 1, and where all stages are alike and x = 0. It is never less than the makespan of 1F1B
where all stages have one ratio of backward to forward and all boundaries one x. (A cycle of the event graph that
advances by j micro-batches visits stage s at most once forward and once back for each, and each transfer it uses is
paid by both of its ends, so that its mean is at most max_s C_s.) Where one stage is slow forward and another one
backward, few micro-batches can take longer, but never longer than GPipe's form says (``tests/cost`` checks all this on
random pipelines).

The other schedules, with W_g the seconds that group g of p makes gradients of weights in, and C_g, W_g summed over the
v stages that a group runs:

    T = sum_g R_g + max_g (m C_g - R_g)

    1F1B                 R = C
    interleaved          R = C / v, m rounded up to a multiple of p           (Narayanan et al. 2021, section 2.2)
    zero-bubble 1p, V    R = C - (1 + min(1, (m - 1) / (p - 1))) W            (Qi et al. 2023, table 2: ZB-H1)
    zero-bubble 2p       R = C - (1 + min(2, (m - 1) / (p - 1))) W            (the same: ZB-H2)

R is what one more group delays the step by. Where zero-bubble steps follow one another without waiting for all groups,
T is the span of the busiest group, as in the simulation. Where they wait, 2p gains nothing over 1p: what it saves
on the way back it pays for by starting later, so it has the form of 1p. On equal stages without sends T equals the
simulation for interleaved, and for zero-bubble where the gradients of input and weights take a forward each; elsewhere
the two differ by what the greedy order of the simulation makes of it (``tests/cost``). ZB-V is given the bubble of
ZB-H1, at half its memory: its bubble has no closed form where passes are unlike.

The event simulation. The order of passes on every group of devices is fixed by the schedule, so the event graph of a
step is the same for all plans of one course: it is sorted once (``program_of``) and then only walked through with each
plan's seconds. Ends are linear in the seconds in (max, +) algebra, so they grow by a constant for every further round
of micro-batches once the pipeline runs in its steady state (Baccelli et al. 1992, "Synchronization and Linearity",
theorem 3.109); long steps are simulated up to there and continued in a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import (
    Action,
    Figure,
    Form,
    Pass,
    Schedule,
    ScheduleConfig,
    group_of,
    stage_at,
)
from galvatron_lite.parallelism.pipeline.table import actions_of, shown_of, shown_rounds
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes

__all__ = ["Figure", "Form", "closed_form", "form_of"]


def form_of(
    schedule: Schedule, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False
) -> Form:
    """The closed form of a schedule on so many groups of devices with so many stages each; see the module."""
    return schedule.form(groups, microbatches, virtual, steps_overlap=steps_overlap)


def closed_form(
    stages: Sequence[StageTimes],
    microbatches: int,
    schedule: Schedule,
    virtual: int = 1,
    *,
    steps_overlap: bool = False,
) -> float:
    """Seconds from the first forward to the last backward, or of the busiest group's span; see the module.

    Args:
        stages: in the order of the model, ``virtual`` for each group of devices.
        microbatches: a step.
        schedule: order of passes.
        virtual: stages of each group.
        steps_overlap: see ``Profile``.
    """
    groups = len(stages) // virtual
    form = schedule.form(groups, microbatches, virtual, steps_overlap=steps_overlap)
    totals = [[0.0] * len(form.ramp) for _ in range(groups)]
    for index, stage in enumerate(stages):
        total = totals[group_of(schedule, groups, index)]
        for part, value in enumerate(form.parts(stage.forward_total, stage.backward_total, form.freed * stage.weight)):
            total[part] += value
    by_part = zip(form.ramp, form.rounds, zip(*totals, strict=True), strict=True)
    return sum((ramp * sum(values) + rounds * max(values) for ramp, rounds, values in by_part), 0.0)


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
        start, ready_at = clock[group], ready[source]
        end = (ready_at if ready_at > start else start) + seconds[index]
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
    slot = _slot(course, stages + stage, action.microbatch)
    last = stage == stages - 1
    source = _slot(course, stage if last else stages + stage + 1, action.microbatch)
    return group, stages + stage, slot, source


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
    """A step in the order that its seconds ask for (``parallelism.pipeline.table``), which the runtime follows.

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
