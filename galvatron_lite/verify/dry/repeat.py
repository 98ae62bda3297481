"""Micro-batches that repeat: a long step is run with a few of them, of which one stands for the others.

Under 1F1B (Narayanan et al., 2019, PipeDream) a stage takes up work until as many micro-batches are under way as
there are stages from it to the last; from then on each forward is followed by one backward, and nothing changes from
micro-batch to micro-batch, neither what is held nor what is sent, until the last ones drain. Gradient accumulation
without a pipeline is the same with one stage. The order of other schedules (interleaved, zero-bubble) does not repeat
exactly, but what a stage holds at once stops growing: a step with so many micro-batches that as many wait at once, for
each pass, as in the whole step shows as much memory.

One micro-batch in the middle stands for those left out. That its neighbour sends the same is looked at, not assumed.
All ranks run as many, so that their messages meet: where all come through one more micro-batch in the middle, they come
through any number of them.
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


def shortened(plan: Plan) -> Plan:
    """The plan with as many micro-batches as show all that happens in a step, each of the same size; itself if it has
    no more.

    Where they repeat, those are as many as are under way at most, and two more: behind the first backward pass, which
    makes the gradients, there is then a forward pass during which the next one's input arrives. Elsewhere see
    ``_settled_count``. Schedules that hold more the more micro-batches there are stay as long as they are.
    """
    if plan.pipeline == 1:
        enough = 4
    elif plan.schedule.repeats:
        enough = plan.schedule.in_flight(plan.pipeline, 0, plan.microbatches) + 2
    else:
        enough = _settled_count(pipeline_of(plan), plan.microbatches)
    if plan.microbatches <= enough or plan.global_batch % plan.microbatches:
        return plan
    return replace(plan, microbatches=enough, global_batch=plan.global_batch // plan.microbatches * enough)


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


def lengthened(messages: Sequence[Message], run: int, microbatches: int) -> tuple[Message, ...]:
    """The messages of a rank in a step that ran so many of the micro-batches; those of one in the middle are counted
    as often as there are micro-batches like it.

    Raises:
        UnlikeError: the micro-batch behind it sends other messages.
    """
    middle = (run - 1) // 2
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
