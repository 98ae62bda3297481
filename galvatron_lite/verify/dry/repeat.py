"""Micro-batches that repeat: a long step is run with a few of them, and what they send is written down for the others.

Under 1F1B (Narayanan et al., 2019, PipeDream) a stage takes up work until as many micro-batches are under way as
there are stages from it to the last; from then on each forward is followed by one backward, and nothing changes from
micro-batch to micro-batch, neither what is held nor what is sent, until the last ones drain. Gradient accumulation
without a pipeline is the same with one stage. That two neighbours in that state sent the same is looked at, not
assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.pipeline.table import ROOM
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import NOBODY, Message


class UnlikeError(GalvatronError):
    """Micro-batches did not repeat: all must be run."""


def shortened(plan: Plan, stage: int) -> Plan:
    """The plan with as many micro-batches as show all that happens in a stage, each of the same size; itself if it has
    no more.

    Those are as many as are under way there at most, two to be held against each other, and those that pass until what
    was sent is waited for. Schedules that hold more the more micro-batches there are (GPipe), and those that go round
    the stages, stay whole.
    """
    enough = _under_way(plan, stage) + 2 + _behind(plan)
    repeats = plan.schedule.repeats or plan.pipeline == 1
    if not repeats or plan.microbatches <= enough or plan.global_batch % plan.microbatches:
        return plan
    samples = plan.global_batch // plan.microbatches * enough
    return replace(plan, microbatches=enough, global_batch=samples)


def _under_way(plan: Plan, stage: int) -> int:
    """The most micro-batches that a stage works on at once."""
    return 1 if plan.pipeline == 1 else plan.schedule.in_flight(plan.pipeline, stage, plan.microbatches)


def _behind(plan: Plan) -> int:
    """Micro-batches behind two that are held against each other: as many as there is room for messages of
    (``parallelism.pipeline.table.ROOM``), and the one that is under way with them."""
    return 1 + (ROOM if plan.pipeline > 1 else 1)


def lengthened(messages: Sequence[Message], starts: Sequence[int], plan: Plan) -> tuple[Message, ...]:
    """The messages of all micro-batches of a plan, from those of a rank in a shortened step."""
    missing = plan.microbatches - len(starts)
    if missing <= 0:
        return tuple(messages)
    place = len(starts) - 1 - _behind(plan)
    before, start, end = starts[place - 1 : place + 2]
    length = end - start
    if [_shifted(one, 1, length) for one in messages[before:start]] != list(messages[start:end]):
        raise UnlikeError("Micro-batches of one step send unlike messages.")
    moved = missing * length
    drained = starts[-1]
    early = [replace(one, waited=one.waited + moved) if one.waited > drained else one for one in messages[:start]]
    copies = [_shifted(one, turn, length) for turn in range(missing + 1) for one in messages[start:end]]
    late = [_shifted(one, missing, length) for one in messages[end:]]
    return (*early, *copies, *late)


def _shifted(one: Message, turns: int, length: int) -> Message:
    """The same message so many micro-batches, of so many messages each, later."""
    if turns == 0:
        return one
    moved = turns * length
    microbatch = one.microbatch if one.microbatch == NOBODY else one.microbatch + turns
    waited = one.waited if one.waited == NOBODY else one.waited + moved
    used = one.used if one.used == NOBODY else one.used + turns
    return Message(  # ``replace`` takes several times as long
        one.number + moved, one.kind, one.ranks, one.purpose, one.peer, one.tag, one.shape, one.dtype, one.bytes,
        one.phase, microbatch, one.layer, one.sent, one.taken, waited, used, one.operator,
    )  # fmt: skip
