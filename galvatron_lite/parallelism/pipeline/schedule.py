"""Pipeline schedules: all that is known of each, and the order in which groups of devices work through micro-batches.

Pure: no torch, no communication. Zero-bubble orders depend on the seconds of each pass: see ``zero_bubble``;
``table.actions_of`` has the order of every schedule.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import le
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from galvatron_lite.arrays import IntArray

Moments: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Backward passes of a group: the chunk it is of, and the micro-batches of every chunk that the group holds then (the
one of the pass included)."""


Figure = TypeVar("Figure", float, int, "IntArray")


@dataclass(frozen=True, slots=True)
class Form:
    """The closed form of a schedule, over parts c_1..c_K of the time of one micro-batch on each group of devices:

    T = sum_k (ramp_k sum_g c_gk + rounds_k max_g c_gk)
    """

    microbatches: int  # a step, rounded up to whole rounds
    ramp: tuple[float, ...]  # ramp, rounds: per part
    rounds: tuple[float, ...]
    freed: float = 0.0  # how much of W leaves R; 0 where backward is not split
    apart: bool = False  # whether forward and backward count apart (GPipe)

    def parts(self, forward: Figure, backward: Figure, saved: Figure) -> tuple[Figure, ...]:
        """The parts of a group, a stage or a layer; they add up over layers.

        Args:
            forward, backward: time of one micro-batch, backward with the gradients of weights.
            saved: ``freed`` times that of the gradients of weights.
        """
        if self.apart:
            return forward, backward
        both = forward + backward
        if self.freed == 0.0:
            return (both,)
        return both - saved, (self.microbatches - 1) * both + saved

    @property
    def share(self) -> float:
        """What of a stage's time (less what is freed) delays the step where the stage is not the slowest."""
        return self.ramp[0]

    @property
    def alone(self) -> tuple[float, ...]:
        """Per part, how often it counts for a group that is the slowest."""
        return tuple(ramp + rounds for ramp, rounds in zip(self.ramp, self.rounds, strict=True))


class Schedule(StrEnum):
    """Order of micro-batches in a pipeline."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE_1P = "zb-1p"
    ZERO_BUBBLE_2P = "zb-2p"
    ZERO_BUBBLE_V = "zb-v"
    CYCLIC = "cyclic"

    @property
    def splits_backward(self) -> bool:
        """Whether backward is split into the gradient of the input and that of the weights (zero-bubble)."""
        return self in (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P, Schedule.ZERO_BUBBLE_V)

    @property
    def executable(self) -> bool:
        """Whether pipelines run it; cyclic data parallelism is run in a way of its own."""
        return self is not Schedule.CYCLIC

    @property
    def virtual_stages(self) -> int | None:
        """Stages of each group of devices; None: as many as a plan says, more than one."""
        return {Schedule.INTERLEAVED: None, Schedule.ZERO_BUBBLE_V: 2}.get(self, 1)

    @property
    def simple(self) -> bool:
        """Whether a group of devices runs one stage, and backward in one pass."""
        return self.executable and self.virtual_stages == 1 and not self.splits_backward

    @property
    def turns_back(self) -> bool:
        """Whether stages go forth and back over the groups of devices, instead of round and round."""
        return self is Schedule.ZERO_BUBBLE_V

    @property
    def settles(self) -> bool:
        """Whether a group holds as many micro-batches at once in a long step as in one of a few rounds."""
        return self in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)

    @property
    def repeats(self) -> bool:
        """Whether nothing changes from one micro-batch to the next between warm-up and draining."""
        return self is Schedule.ONE_F_ONE_B

    def in_flight(self, stages: int, stage: int, microbatches: int) -> int:
        """The most micro-batches whose activations a stage holds at once, where every group runs one stage.

        1F1B: the stage may run ahead of its own backward by the stages that follow it (Narayanan et al. 2021). GPipe:
        all. Zero-bubble: its limit, waiting gradients of weights included: as many as there are stages (``zb-1p``) or
        twice that (``zb-2p``; Qi et al. 2023, section 3.1).
        """
        if self is Schedule.GPIPE:
            return microbatches
        return min(microbatches, self.limit(stages) if self.splits_backward else stages - stage)

    def form(self, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False) -> Form:
        """Seconds of a step on so many groups of devices with so many stages each; derived in ``cost.schedule``."""
        rounds = microbatches - 1
        if self is Schedule.GPIPE:
            return Form(microbatches, (1, 1), (rounds, rounds), apart=True)
        if self is Schedule.INTERLEAVED:
            padded = -(-microbatches // groups) * groups
            return Form(padded, (1 / virtual,), (padded - 1 / virtual,))
        if self.splits_backward:
            most = 2.0 if self is Schedule.ZERO_BUBBLE_2P and steps_overlap else 1.0
            return Form(microbatches, (1, 0), (0, 1), 1.0 + min(most, rounds / max(groups - 1, 1)))
        return Form(microbatches, (1,), (rounds,))

    def limit(self, groups: int) -> int:
        """Micro-batches of each chunk that a group of devices may hold under a zero-bubble schedule."""
        return groups if self is Schedule.ZERO_BUBBLE_1P else 2 * groups


ZERO_BUBBLE = tuple(schedule for schedule in Schedule if schedule.splits_backward)
SIMPLE = tuple(schedule for schedule in Schedule if schedule.simple)
EXECUTABLE = tuple(schedule for schedule in Schedule if schedule.executable)


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
    """The group of devices that runs a (virtual) stage."""
    turn, place = divmod(stage, pipeline)
    return pipeline - 1 - place if schedule.turns_back and turn % 2 else place


def stage_at(schedule: Schedule, pipeline: int, group: int, chunk: int) -> int:
    """The (virtual) stage that is a group's ``chunk``-th: the inverse of ``group_of``."""
    return chunk * pipeline + (pipeline - 1 - group if schedule.turns_back and chunk % 2 else group)


def stage_actions(
    schedule: Schedule, stages: int, stage: int, microbatches: int, virtual: int = 1
) -> tuple[Action, ...]:
    """What group ``stage`` of ``stages`` does, in order, under schedules whose order does not depend on seconds.

    GPipe runs every forward pass, then every backward pass. 1F1B (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters", section 2.2) starts with ``stages - stage - 1`` forward passes and then
    alternates, so that a stage never holds the activations of more than ``stages - stage`` micro-batches. Interleaved
    1F1B: the same, figure 4.
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
    """Micro-batches go through the chunks ``groups`` at a time.

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
    held, moments = [0] * virtual, [dict[tuple[int, ...], None]() for _ in range(virtual)]
    for action in actions:
        if action.what is Pass.FORWARD:
            held[action.chunk] += 1
        elif action.what is Pass.BACKWARD:
            moments[action.chunk][tuple(held)] = None
            held[action.chunk] -= 1
    return tuple((chunk, counts) for chunk, every in enumerate(moments) for counts in _worst(tuple(every)))


def most_of(moments: Moments) -> tuple[int, ...]:
    """The most micro-batches of each chunk at any of them."""
    return tuple(max(counts) for counts in zip(*(counts for _, counts in moments), strict=True))


def _worst(every: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Counts that no other ones exceed, without the midpoints of two that hold some of the same chunks."""
    most = [counts for counts in every if not any(counts != more and all(map(le, counts, more)) for more in every)]
    points = set(most)
    return [counts for counts in most if not any(_between(counts, end, points) for end in most if end != counts)]


def _between(middle: tuple[int, ...], end: tuple[int, ...], points: Container[tuple[int, ...]]) -> bool:
    """Whether ``middle`` is the midpoint of ``end`` and a third one, each with some of the same chunks."""
    third = tuple(2 * here - there for here, there in zip(middle, end, strict=True))
    chunks = [[count > 0 for count in counts] for counts in (end, middle, third)]
    return third in points and chunks[0] == chunks[1] == chunks[2]
