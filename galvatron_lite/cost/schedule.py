"""Seconds of one step of a pipeline: the closed form that the search optimises, and the simulation that prices plans.

Symbols: stages s = 0..p-1; m micro-batches; f_s, b_s seconds of forward and backward of one micro-batch; x_s seconds
of sending one boundary tensor from stage s to s+1, and as long for its gradient back.

Every stage pays for what it sends: F_s = f_s + x_s, B_s = b_s + x_{s-1}, C_s = F_s + B_s. Then

    1F1B    T = sum_s C_s + (m - 1) max_s C_s
    GPipe   T = sum_s C_s + (m - 1) (max_s F_s + max_s B_s)

is the makespan of the event graph where sends occupy their sender: exactly for GPipe (a flow shop of equal jobs), and
for 1F1B if p = 1, if m = 1, and if all stages are equal and x = 0. It is never less than the makespan of 1F1B if all
stages have one ratio of backward to forward and all boundaries one x. (A cycle of the event graph that advances by j
micro-batches visits stage s at most once forward and once back for each, and both ends of a transfer pay for it, so
that its mean is at most max_s C_s.) If one stage is slow forward and another one backward, few micro-batches can take
longer, but never longer than GPipe's form (``tests/cost`` checks all this on random pipelines).

The other schedules, with W_g the seconds in which group g of p makes gradients of weights, and C_g, W_g summed over
the v stages of a group:

    T = sum_g R_g + max_g (m C_g - R_g)

    1F1B                 R = C
    interleaved          R = C / v, m rounded up to a multiple of p           (Narayanan et al. 2021, section 2.2)
    zero-bubble 1p, V    R = C - (1 + min(1, (m - 1) / (p - 1))) W            (Qi et al. 2023, table 2: ZB-H1)
    zero-bubble 2p       R = C - (1 + min(2, (m - 1) / (p - 1))) W            (the same: ZB-H2)

R is the delay that one more group adds to the step. If zero-bubble steps follow one another without waiting for all
groups, T is the span of the busiest group, as in the simulation. If they wait, 2p gains nothing over 1p, as it starts
later by what it saves at the end, so it has the form of 1p. On equal stages without sends T equals the simulation for
interleaved, and for zero-bubble if the gradients of input and weights take a forward each; elsewhere the greedy order
of the simulation differs from it (``tests/cost``). ZB-V has the bubble of ZB-H1 here: its own has no closed form if
passes are unequal.

The simulation. The schedule fixes the order of passes on every group of devices, so that the event graph of a step is
the same for all plans of one ``ScheduleConfig``: it is sorted once (``program_of``) and then walked through with each
plan's seconds. Ends are linear in the seconds in (max, +) algebra. In the steady state of a pipeline they grow by a
constant for every further round of micro-batches (Baccelli et al. 1992, "Synchronization and Linearity", theorem
3.109): long steps are simulated up to there and then extrapolated. Zero-bubble schedules order their passes by the
seconds they take (``parallelism.pipeline.table``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    ScheduleConfig,
    group_of,
    stage_at,
)
from galvatron_lite.parallelism.pipeline.table import actions_of, shown_of, shown_rounds
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes


def closed_form(
    stages: Sequence[StageTimes],
    microbatches: int,
    schedule: Schedule,
    virtual: int = 1,
    *,
    steps_overlap: bool = False,
) -> float:
    """Return the seconds from the first forward to the last backward, or of the busiest group's span; see the module.

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
"""Longer steps are extrapolated from their steady state; an event takes less than 0.1 microseconds."""

Step = tuple[int, int, int, int]
"""A pass: its group, its index into the seconds (forwards of all stages, then backwards), the slot that it fills, and
the slot that it waits for; slot 0 is the beginning."""


@dataclass(frozen=True, slots=True)
class Program:
    """The passes of a step, each after what it waits for."""

    steps: tuple[Step, ...]
    slots: int


def group_ends(stages: Sequence[StageTimes], config: ScheduleConfig, hidden: float = 0.0) -> tuple[float, ...]:
    """Return the seconds from the step's beginning to the end of each group's last backward.

    Args:
        stages: in the order of the model; a group's backward may end with a send.
        config: of the schedule.
        hidden: share of a send that the sender's compute hides: it delays the receiver only. The rest occupies the
            sender.
    """
    groups = config.groups
    rounds = max(MOST_EVENTS // (2 * len(stages) * groups), 2)
    simulated = config.microbatches % groups + rounds * groups
    if config.microbatches <= simulated:
        return run(stages, config, hidden)
    return extrapolated_ends(stages, config, hidden, simulated)


def run(stages: Sequence[StageTimes], config: ScheduleConfig, hidden: float = 0.0) -> tuple[float, ...]:
    """Simulate every pass; as ``group_ends``."""
    seconds, delays = pass_seconds(stages, hidden)
    program = program_of(config)
    clock, ready = [0.0] * config.groups, [0.0] * program.slots
    for group, index, slot, source in program.steps:
        start, ready_at = clock[group], ready[source]
        end = (ready_at if ready_at > start else start) + seconds[index]
        clock[group] = end
        ready[slot] = end + delays[index]
    return tuple(clock)


def extrapolated_ends(
    stages: Sequence[StageTimes], config: ScheduleConfig, hidden: float, simulated: int
) -> tuple[float, ...]:
    """``group_ends`` from a step of ``simulated`` micro-batches and a step that is a round shorter.

    A further round takes the difference of the two, and at least what the busiest group computes in it: among very
    unequal stages the slowest has not settled the pace yet.
    """
    groups = config.groups
    shorter, longer = (
        run(stages, replace(config, microbatches=count), hidden) for count in (simulated - groups, simulated)
    )
    pace = max(after - before for before, after in zip(shorter, longer, strict=True))
    rounds = (config.microbatches - simulated) // groups
    return tuple(end + rounds * max(pace, groups * busiest(stages, config, hidden)) for end in longer)


def pass_seconds(stages: Sequence[StageTimes], hidden: float) -> tuple[list[float], list[float]]:
    """Return the seconds that each pass occupies its group, and by which its result comes later, by ``Step`` index."""
    exposed = 1.0 - hidden
    seconds = [stage.forward + exposed * stage.send_forward for stage in stages]
    seconds += [stage.backward + exposed * stage.send_backward for stage in stages]
    delays = [hidden * stage.send_forward for stage in stages]
    delays += [hidden * stage.send_backward for stage in stages]
    return seconds, delays


def busiest(stages: Sequence[StageTimes], config: ScheduleConfig, hidden: float) -> float:
    """Return the seconds that the busiest group works on one micro-batch."""
    busy = [0.0] * config.groups
    for index, stage in enumerate(stages):
        sends = (1.0 - hidden) * (stage.send_forward + stage.send_backward)
        busy[group_of(config.schedule, config.groups, index)] += stage.forward + stage.backward + sends
    return max(busy)


@lru_cache(maxsize=128)
def program_of(config: ScheduleConfig) -> Program:
    """Sort the passes of a step.

    Raises:
        InputError: the groups wait for one another in a circle.
    """
    orders = actions_of(config)
    stages = config.groups * config.virtual
    done, steps, positions = {0}, list[Step](), [0] * config.groups
    waiting = list(range(config.groups))
    while waiting:
        group = waiting.pop()
        order = orders[group]
        while positions[group] < len(order):
            step = _step(config, group, order[positions[group]])
            _, index, slot, source = step
            if source not in done:
                break
            done.add(slot)
            steps.append(step)
            positions[group] += 1
            reader = index + 1 if index < stages else index - stages - 1  # the stage that waits for the result
            if 0 <= reader < stages:
                other = group_of(config.schedule, config.groups, reader)
                waiting += [] if other == group else [other]
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        raise InputError("schedule", config.schedule.value, f"Its passes wait for one another in a circle: {config}.")
    return Program(tuple(steps), 1 + 2 * stages * config.microbatches)


def _step(config: ScheduleConfig, group: int, action: Action) -> Step:
    stages = config.groups * config.virtual
    stage = stage_at(config.schedule, config.groups, group, action.chunk)

    def slot(index: int) -> int:
        return 1 + index * config.microbatches + action.microbatch

    if action.what is Pass.FORWARD:
        return group, stage, slot(stage), slot(stage - 1) if stage else 0
    source = stage if stage == stages - 1 else stages + stage + 1
    return group, stages + stage, slot(stages + stage), slot(source)


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """A step whose order of passes depends on their seconds (zero-bubble schedules)."""

    spans: tuple[float, ...]  # seconds from each group's first pass to its last
    ends: tuple[float, ...]  # seconds from the step's beginning to each group's last pass
    actions: tuple[tuple[Action, ...], ...]  # of each group, in order, as far as they are simulated (``shown_of``)


def run_ordered(order: PassOrder, config: ScheduleConfig) -> OrderedStep:
    """Simulate a step in the order that its seconds lead to, which is the order of the runtime.

    If software does without the optimizer's global synchronisation (Qi et al. 2023, section 4, post-validation), steps
    follow one another like parallelograms: a step takes the longest span of a group, not the makespan.

    Args:
        order: seconds of every stage's passes, and what else decides their order.
        config: of the schedule.
    """
    groups = shown_rounds(order, config)
    more = (config.microbatches - shown_of(config).microbatches) * busiest(order.stages, config, order.hidden)
    return OrderedStep(
        tuple(group.span + more for group in groups),
        tuple(group.starts[0] + group.span + more for group in groups),
        tuple(group.actions for group in groups),
    )
