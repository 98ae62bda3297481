"""Micro-batches that repeat: a long step is run with a few of them, which stand for the others.

Under 1F1B (Narayanan et al., 2019, PipeDream) a stage takes up work until as many micro-batches are under way as
there are stages from it to the last; from then on each forward is followed by one backward, and nothing changes from
micro-batch to micro-batch, neither what is held nor what is sent, until the last ones drain. Gradient accumulation
without a pipeline is the same with one stage. That two neighbours in that state sent the same is looked at, not
assumed. What is sent is written down for a step of as many micro-batches as the first stage needs, on every rank: where
all ranks come through the state that repeats once, they come through it any number of times.

The order of other schedules (interleaved, zero-bubble) does not repeat exactly, but what a stage holds at once stops
growing: a step with so many micro-batches that as many wait at once, for each pass, as in the whole step shows as much
memory, and one micro-batch in the middle stands for those left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.table import Pipeline, actions_of
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import NOBODY, During, Message, MessageType


class UnlikeError(GalvatronError):
    """Micro-batches did not repeat: all must be run."""


def shortened(plan: Plan, stage: int) -> Plan:
    """The plan with as many micro-batches as show all that happens in a stage, each of the same size; itself if it has
    no more.

    Where they repeat, those are as many as are under way there at most, two to be held against each other, and the last
    ones, ahead of which less is received. Elsewhere see ``_settled_count``. Schedules that hold more the more
    micro-batches there are stay as long as they are.
    """
    under_way = 1 if plan.pipeline == 1 else plan.schedule.in_flight(plan.pipeline, stage, plan.microbatches)
    enough = under_way + 2 + _last(plan) if _repeats(plan) else _settled_count(pipeline_of(plan), plan.microbatches)
    if plan.microbatches <= enough or plan.global_batch % plan.microbatches:
        return plan
    samples = plan.global_batch // plan.microbatches * enough
    return replace(plan, microbatches=enough, global_batch=samples)


def _repeats(plan: Plan) -> bool:
    return plan.schedule.repeats or plan.pipeline == 1


@lru_cache(maxsize=64)
def _settled_count(pipeline: Pipeline, microbatches: int) -> int:
    """The fewest rounds of micro-batches in which every group of devices holds as much as in a step of so many."""
    wanted, groups = _most_held(pipeline, microbatches), pipeline.groups
    counts = range(_ROUNDS * groups, microbatches, groups)
    return next((count for count in counts if _most_held(pipeline, count) == wanted), microbatches)


_ROUNDS = 3
"""Of as many micro-batches as there are groups: one fills the pipeline, one lies in between, one drains it."""

Held = tuple[int, ...]
"""Micro-batches whose backward pass is to come, by stage of a group; all for which a pass is to come."""


def _most_held(pipeline: Pipeline, microbatches: int) -> list[dict[tuple[Pass, int], Held]]:
    """By group and pass: the most that is held when it runs."""
    table = actions_of(pipeline.course(microbatches), pipeline.order)
    return [_most_of(actions, pipeline) for actions in table]


def _most_of(actions: Sequence[Action], pipeline: Pipeline) -> dict[tuple[Pass, int], Held]:
    most: dict[tuple[Pass, int], Held] = {}
    held, last = [0] * (pipeline.virtual + 1), Pass.WEIGHT if pipeline.splits_backward else Pass.BACKWARD
    for action in actions:
        for place in (action.chunk, -1):
            held[place] += action.what is Pass.FORWARD
        key = action.what, action.chunk
        most[key] = tuple(map(max, most.get(key, held), held))
        held[action.chunk] -= action.what is Pass.BACKWARD
        held[-1] -= action.what is last
    return most


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
    if not _repeats(plan):
        return _with_stand_in(messages, len(starts), plan.microbatches)
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


def _with_stand_in(messages: Sequence[Message], run: int, microbatches: int) -> tuple[Message, ...]:
    """The messages of a step with fewer micro-batches; those of one in the middle count for all that are left out."""
    middle = run // 2
    alike, following = (
        Counter(_without_order(message) for message in messages if _microbatch_of(message) == place)
        for place in (middle, middle + 1)
    )
    if alike != following:
        raise UnlikeError("Micro-batches of one step send unlike messages.")
    times = microbatches - run + 1
    return tuple(
        replace(message, times=times) if _microbatch_of(message) == middle else message for message in messages
    )


def _microbatch_of(message: Message) -> int:
    """The micro-batch that a message is for: one that arrives was asked for while another was worked on."""
    arrives = message.kind is MessageType.RECEIVE and message.used != NOBODY
    return message.used if arrives else message.microbatch


def _without_order(message: Message) -> Message:
    """What is left of a message whenever it is sent."""
    phase = During.BETWEEN if message.kind is MessageType.RECEIVE else message.phase
    return replace(message, number=0, microbatch=0, waited=NOBODY, used=NOBODY, phase=phase)


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
