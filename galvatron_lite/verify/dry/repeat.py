"""Run a step with fewer micro-batches, one of which stands for those left out.

Under 1F1B (Narayanan et al., 2019, PipeDream) a stage starts micro-batches until as many are in flight as there are
stages from it to the last. From then on forward and backward passes alternate, with the same memory and messages for
each micro-batch, until the last ones drain. Gradient accumulation without a pipeline is the same with one stage. Other
schedules (interleaved, zero-bubble) do not repeat exactly, but the memory of a stage stops growing: a shorter step in
which as many micro-batches wait for each pass as in the full step shows the same peak.

A micro-batch in the middle stands for those left out; that the next one sends the same messages is checked. All ranks
run the same number, so their messages match: if they do with one more in the middle, they do with any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.parallelism.pipeline.table import Pipeline, actions_of
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import NOBODY, During, Message, MessageType


class UnlikeError(GalvatronError):
    """Micro-batches do not repeat, so all must be run."""


def shortened(plan: Plan) -> Plan:
    """Return the plan with as few micro-batches, of the same size, as show the memory and messages of its step.

    Schedules that repeat need as many as are in flight at most, and two more: after the first backward pass, which
    allocates the gradients, there is then a forward pass during which the next input arrives. For other schedules see
    ``_settled_count``; those whose memory grows with every micro-batch (GPipe) keep them all.
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
    """Return the fewest micro-batches, in rounds, with which every group of devices has the peak of the full step."""
    peaks, groups = _peak_in_flight(pipeline, microbatches), pipeline.groups
    counts = range(_ROUNDS * groups, microbatches, groups)
    return next((count for count in counts if _peak_in_flight(pipeline, count) == peaks), microbatches)


_ROUNDS = 3
"""Of one micro-batch for each group of devices: one fills the pipeline, one is in the middle, one drains it."""

InFlight = tuple[int, ...]
"""Micro-batches before their backward pass, by stage of a group; last, those before their last pass."""


def _peak_in_flight(pipeline: Pipeline, microbatches: int) -> dict[tuple[int, Pass, int], InFlight]:
    """Return the peaks while a pass runs, by group of devices, pass, and stage of the group."""
    peaks: dict[tuple[int, Pass, int], InFlight] = {}
    last = Pass.WEIGHT if pipeline.splits_backward else Pass.BACKWARD
    for group, actions in enumerate(actions_of(pipeline.course(microbatches), pipeline.order)):
        counts = [0] * (pipeline.virtual + 1)
        for action in actions:
            for index in (action.chunk, -1):
                counts[index] += action.what is Pass.FORWARD
            key = group, action.what, action.chunk
            peaks[key] = tuple(map(max, peaks.get(key, counts), counts))
            counts[action.chunk] -= action.what is Pass.BACKWARD
            counts[-1] -= action.what is last
    return peaks


def lengthened(messages: Sequence[Message], run: int, microbatches: int) -> tuple[Message, ...]:
    """Return the messages of a step that ran ``run`` of its micro-batches, counted for all ``microbatches``.

    Messages of one micro-batch in the middle get ``Message.times``.

    Raises:
        UnlikeError: the next micro-batch sends other messages.
    """
    middle = (run - 1) // 2
    in_middle, in_next = (
        Counter(_without_order(message) for message in messages if _microbatch_of(message) == index)
        for index in (middle, middle + 1)
    )
    if in_middle != in_next:
        raise UnlikeError("Micro-batches of one step send unlike messages.")
    times = microbatches - run + 1
    return tuple(
        replace(message, times=times) if _microbatch_of(message) == middle else message for message in messages
    )


def _microbatch_of(message: Message) -> int:
    """Return the micro-batch that uses a message; it may be received while another one runs."""
    arrives = message.kind is MessageType.RECEIVE and message.used != NOBODY
    return message.used if arrives else message.microbatch


def _without_order(message: Message) -> Message:
    """Return a message without all that depends on when it is sent."""
    phase = During.BETWEEN if message.kind is MessageType.RECEIVE else message.phase
    return replace(message, number=0, microbatch=0, waited=NOBODY, used=NOBODY, phase=phase)
