"""Event simulation of a step where every group runs one stage, written apart from ``cost.schedule``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.plans.schema import Schedule


@dataclass(frozen=True, slots=True)
class PassEvent:
    """One pass of one micro-batch on one stage."""

    stage: int  # stage, microbatch: which
    microbatch: int
    forward: bool  # whether it is a forward pass
    start: float  # start, end: seconds since the step began
    end: float


def order_of(schedule: Schedule, stages: int, stage: int, microbatches: int) -> list[tuple[bool, int]]:
    """What a stage does, in order: (whether it is a forward pass, micro-batch)."""
    ahead = microbatches if schedule is Schedule.GPIPE else min(microbatches, stages - stage)
    order = [(True, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append((False, index))
        if ahead + index < microbatches:
            order.append((True, ahead + index))
    return order


def simulate(stages: Sequence[StageTimes], microbatches: int, schedule: Schedule) -> list[PassEvent]:
    """Every pass of a step, each as early as its stage and its input allow; transfers delay, but occupy no stage."""
    orders = [order_of(schedule, len(stages), index, microbatches) for index in range(len(stages))]
    ends: dict[tuple[int, bool, int], float] = {}
    clock, done, events = [0.0] * len(stages), [0] * len(stages), []
    waiting = True
    while waiting:
        waiting = False
        for index, order in enumerate(orders):
            while done[index] < len(order):
                forward, microbatch = order[done[index]]
                ready = _ready(stages, ends, index, forward, microbatch)
                if ready is None:
                    break
                start = max(clock[index], ready)
                clock[index] = start + (stages[index].forward if forward else stages[index].backward)
                ends[index, forward, microbatch] = clock[index]
                events.append(PassEvent(index, microbatch, forward, start, clock[index]))
                done[index] += 1
                waiting = True
    return events


def _ready(
    stages: Sequence[StageTimes], ends: dict[tuple[int, bool, int], float], index: int, forward: bool, microbatch: int
) -> float | None:
    """When the input of a pass is there; None while that is not known."""
    if forward:
        if index == 0:
            return 0.0
        end = ends.get((index - 1, True, microbatch))
        return None if end is None else end + stages[index - 1].send_forward
    if index == len(stages) - 1:
        return ends.get((index, True, microbatch))
    end = ends.get((index + 1, False, microbatch))
    return None if end is None else end + stages[index + 1].send_backward


def makespan(events: Sequence[PassEvent]) -> float:
    """Seconds from the first start to the last end."""
    return max(event.end for event in events)
