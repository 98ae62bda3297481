"""Micro-batches that repeat: a long step is run with a few of them, which stand for the others.

Under 1F1B (Narayanan et al., 2019, PipeDream) a stage takes up work until as many micro-batches are under way as
there are stages from it to the last; from then on each forward is followed by one backward, and nothing changes from
micro-batch to micro-batch, neither what is held nor what is sent, until the last ones drain. Gradient accumulation
without a pipeline is the same with one stage. That two neighbours in that state sent the same is looked at, not
assumed. What is sent is written down for a step of as many micro-batches as the first stage needs, on every rank: where
all ranks come through the state that repeats once, they come through it any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.errors import GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import NOBODY, Message


class UnlikeError(GalvatronError):
    """Micro-batches did not repeat: all must be run."""


def shortened(plan: Plan, stage: int) -> Plan:
    """The plan with as many micro-batches as show all that happens in a stage, each of the same size; itself if it has
    no more.

    Those are as many as are under way there at most, two to be held against each other, and the last ones, ahead of
    which less is received. Schedules that hold more the more micro-batches there are, and those that visit a stage
    several times, stay as long as they are.
    """
    under_way = 1 if plan.pipeline == 1 else plan.schedule.in_flight(plan.pipeline, stage, plan.microbatches)
    enough = under_way + 2 + _last(plan)
    repeats = plan.schedule.repeats or plan.pipeline == 1
    if not repeats or plan.microbatches <= enough or plan.global_batch % plan.microbatches:
        return plan
    samples = plan.global_batch // plan.microbatches * enough
    return replace(plan, microbatches=enough, global_batch=samples)


def _last(plan: Plan) -> int:
    return 1 if plan.pipeline == 1 else 2


def lengthened(messages: Sequence[Message], starts: Sequence[int], plan: Plan) -> tuple[Message, ...]:
    """The messages of a rank in a step as long as the first stage needs, from those of a shortened one; those of a
    micro-batch that repeats are counted as often as there are such in the plan's step.

    Args:
        messages: of a rank.
        starts: by micro-batch that was run, how many messages the rank had sent before it.
        plan: the long one.

    Raises:
        UnlikeError: two micro-batches that should be alike are not.
    """
    if len(starts) == plan.microbatches:
        return tuple(messages)
    missing = shortened(plan, 0).microbatches - len(starts)
    ends = _last(plan)
    start, end, after = starts[-2 - ends : len(starts) - ends + 1]
    length = after - end
    drained = starts[-1]  # from where on waits are unlike
    pairs = zip(messages[start:end], messages[end:after], strict=False)
    if end - start != length or not all(_same(_shifted(one, 1, length), other, drained) for one, other in pairs):
        raise UnlikeError("Micro-batches of one step send unlike messages.")
    moved, times = missing * length, plan.microbatches - len(starts) - missing + 1
    early = [
        replace(message, waited=message.waited + moved) if message.waited >= drained else message
        for message in messages[:start]
    ]
    copies = [_shifted(message, turn, length) for turn in range(missing) for message in messages[start:end]]
    stands = [replace(_shifted(message, missing, length), times=times) for message in messages[start:end]]
    return (*early, *copies, *stands, *(_shifted(message, missing, length) for message in messages[end:]))


def _same(one: Message, other: Message, drained: int) -> bool:
    if one.waited >= drained:
        other = replace(other, waited=one.waited, used=one.used)
    return one == other


def _shifted(one: Message, turns: int, length: int) -> Message:
    """The same message so many micro-batches, of so many messages each, later."""
    moved = turns * length
    return replace(
        one,
        number=one.number + moved,
        microbatch=one.microbatch + turns * (one.microbatch != NOBODY),
        waited=one.waited + moved * (one.waited != NOBODY),
        used=one.used + turns * (one.used != NOBODY),
    )
