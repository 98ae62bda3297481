"""When each group of devices holds most, and how near that is to its budget. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.timeline import GroupTimeline, timeline, untimed
from galvatron_lite.explainer.priced import Priced
from galvatron_lite.explainer.schema import StageMemory
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.plans.schema import Plan, Schedule

MOST_PASSES = 4096
"""Passes of a step above which the moment is looked for in a step of fewer micro-batches, where it is the same one."""
_SETTLED = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""Schedules that hold as many micro-batches at once in a long step as in one of a few rounds."""
_WORDS = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHT: "gradients of weights"}


def memory_of(priced: Priced, budget: Budget) -> tuple[StageMemory, ...]:
    """Memory of each group of devices at its worst moment.

    Args:
        priced: the plan.
        budget: a device.
    """
    plan = priced.plan
    timed: Sequence[GroupTimeline | None] = [None] * plan.pipeline
    if not untimed(plan):
        timed = timeline(priced.pricer.profile, _shorter(plan)).groups
    return tuple(_group(priced, number, own, budget) for number, own in enumerate(timed))


def _shorter(plan: Plan) -> Plan:
    """The plan with fewer micro-batches of the same size, where that moves no peak of memory."""
    fewest = 3 * len(plan.stages)
    if plan.schedule not in _SETTLED or 2 * len(plan.stages) * plan.microbatches <= MOST_PASSES:
        return plan
    count = min(-(-fewest // plan.pipeline) * plan.pipeline, plan.microbatches)
    return replace(plan, microbatches=count, global_batch=count * plan.microbatch)


def _group(priced: Priced, number: int, timed: GroupTimeline | None, budget: Budget) -> StageMemory:
    stages = priced.stages_of(number)
    stage = priced.plan.stages[stages[0]]
    moment, layer, microbatch = "", "", -1
    if timed is not None:
        moment, layer, microbatch = _moment(timed)
    return StageMemory(
        number, stages, stage.memory.total, budget.of(stage.device), moment, layer, microbatch, stage.memory
    )


def _moment(timed: GroupTimeline) -> tuple[str, str, int]:
    peak = timed.peak
    if peak.place < 0:
        return "the optimizer's update", "", -1
    one = timed.passes[peak.place]
    return f"{_WORDS[one.what]} of micro-batch {one.microbatch} in {peak.layer}", peak.layer, one.microbatch
