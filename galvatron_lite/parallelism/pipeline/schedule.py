"""The order in which one group of devices works through its micro-batches. Pure: no torch, no communication."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import le
from typing import TypeAlias

Moments: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Backward passes of a group: the chunk it is of, and the micro-batches of every chunk that the group holds then (the
one of the pass included)."""


class Schedule(StrEnum):
    """Order of micro-batches in a pipeline."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE_1P = "zb-1p"
    ZERO_BUBBLE_2P = "zb-2p"
    ZERO_BUBBLE_V = "zb-v"
    CYCLIC = "cyclic"


ZERO_BUBBLE = (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P, Schedule.ZERO_BUBBLE_V)
"""Schedules that split backward into the gradient of the input and that of the weights."""
SIMPLE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
"""Schedules in which a group of devices runs one stage, and backward in one pass."""
EXECUTABLE = tuple(schedule for schedule in Schedule if schedule is not Schedule.CYCLIC)
"""Schedules that the runtime's pipelines run; cyclic data parallelism is run in a way of its own."""


class Pass(StrEnum):
    """What is done with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch."""

    what: Pass  # the pass; with a zero-bubble schedule ``BACKWARD`` is the gradient of the input only
    microbatch: int  # its number
    chunk: int = 0  # which of the group's virtual stages, in the order of the model


@dataclass(frozen=True, slots=True)
class Course:
    """What the passes of a step, and what they wait for, depend on."""

    schedule: Schedule  # order of passes
    groups: int  # of devices that the stages are spread over (the pipeline degree)
    virtual: int  # stages of each group
    microbatches: int  # a step


def group_of(schedule: Schedule, pipeline: int, stage: int) -> int:
    """The group of devices that runs a (virtual) stage: round and round, with ``zb-v`` forth and back."""
    turn, place = divmod(stage, pipeline)
    return pipeline - 1 - place if schedule is Schedule.ZERO_BUBBLE_V and turn % 2 else place


def stage_at(schedule: Schedule, pipeline: int, group: int, chunk: int) -> int:
    """The (virtual) stage that is a group's ``chunk``-th: the inverse of ``group_of``."""
    back = schedule is Schedule.ZERO_BUBBLE_V and chunk % 2
    return chunk * pipeline + (pipeline - 1 - group if back else group)


def stage_actions(
    schedule: Schedule, stages: int, stage: int, microbatches: int, virtual: int = 1
) -> tuple[Action, ...]:
    """What group ``stage`` of ``stages`` does, in order.

    GPipe runs every forward pass, then every backward pass. 1F1B (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters", section 2.2) starts with ``stages - stage - 1`` forward passes and then
    alternates, so that a stage never holds the activations of more than ``stages - stage`` micro-batches. Interleaved
    1F1B (same, figure 4): ``_interleaved``. Zero-bubble schedules depend on the seconds of each pass and are not made
    here, but in ``zero_bubble``; ``table.actions_of`` has all.
    """
    if schedule is Schedule.INTERLEAVED:
        return _interleaved(stages, stage, microbatches, virtual)
    forward = [Action(Pass.FORWARD, index) for index in range(microbatches)]
    backward = [Action(Pass.BACKWARD, index) for index in range(microbatches)]
    return _alternating(forward, backward, microbatches if schedule is Schedule.GPIPE else stages - stage - 1)


def _alternating(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """So many forward passes ahead, then one of each in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forward))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


@lru_cache(maxsize=4096)
def _interleaved(groups: int, group: int, microbatches: int, virtual: int) -> tuple[Action, ...]:
    """Interleaved 1F1B as in Megatron-LM: micro-batches go through the chunks ``groups`` at a time.

    Warm-up: ``2 (groups - group - 1) + (virtual - 1) groups`` forward passes (Megatron-LM,
    ``forward_backward_pipelining_with_interleaving``). Where ``groups`` does not divide the micro-batches, the order
    is that of the next multiple without the passes there is no micro-batch for.
    """
    padded = -(-microbatches // groups) * groups
    rounds = [
        (chunk, index)
        for start in range(0, padded, groups)
        for chunk in range(virtual)
        for index in range(start, start + groups)
    ]
    forward = [Action(Pass.FORWARD, index, chunk) for chunk, index in rounds]
    backward = [Action(Pass.BACKWARD, index, virtual - 1 - chunk) for chunk, index in rounds]
    order = _alternating(forward, backward, 2 * (groups - group - 1) + (virtual - 1) * groups)
    return tuple(action for action in order if action.microbatch < microbatches)


def moments_of(actions: Sequence[Action], virtual: int) -> Moments:
    """The backward passes of a group that may be its worst moments, by what it holds then.

    Which of them is the worst depends on the bytes of each chunk. Left out are those of a chunk at which no more of any
    chunk is held than at another one of it, and those halfway between two others: bytes are linear in counts, so no
    such moment is worse than both.
    """
    held, found = [0] * virtual, [dict[tuple[int, ...], None]() for _ in range(virtual)]
    for action in actions:
        if action.what is Pass.FORWARD:
            held[action.chunk] += 1
        elif action.what is Pass.BACKWARD:
            found[action.chunk][tuple(held)] = None
            held[action.chunk] -= 1
    return tuple((chunk, counts) for chunk, every in enumerate(found) for counts in _worst(tuple(every)))


def most_of(moments: Moments) -> tuple[int, ...]:
    """The most micro-batches of each chunk at any of them."""
    return tuple(max(counts) for counts in zip(*(counts for _, counts in moments), strict=True))


def _worst(every: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Counts that no other ones exceed, without the midpoints of two that hold some of the same chunks."""
    most = [own for own in every if not any(own != other and all(map(le, own, other)) for other in every)]
    known = set(most)
    return [own for own in most if not any(_between(own, other, known) for other in most if other != own)]


def _between(middle: tuple[int, ...], other: tuple[int, ...], points: Container[tuple[int, ...]]) -> bool:
    """Whether ``middle`` is the midpoint of ``other`` and a third one, each with some of the same chunks."""
    third = tuple(2 * here - there for here, there in zip(middle, other, strict=True))
    return third in points and [count > 0 for count in other] == [count > 0 for count in middle] == [
        count > 0 for count in third
    ]
