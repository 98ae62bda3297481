"""Pipeline schedules and their registry. No torch here.

A schedule defines its order of passes, micro-batches in flight and closed form of a step. Zero-bubble orders depend on
the seconds of each pass (``table``); ``table.actions_of`` returns the order of any schedule.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import le
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.arrays import IntArray

Moments: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Backward passes of a group: the chunk of each, and the micro-batches of each chunk that the group holds during it."""


Figure = TypeVar("Figure", float, int, "IntArray")


@dataclass(frozen=True, slots=True)
class Form:
    """The closed form of a schedule, over parts c_1..c_K of the time of one micro-batch on each group of devices:

    T = sum_k (ramp_k sum_g c_gk + rounds_k max_g c_gk)
    """

    microbatches: int  # a step, rounded up to whole rounds
    ramp: tuple[float, ...]  # ramp, rounds: per part
    rounds: tuple[float, ...]
    freed: float = 0.0  # how much of W leaves R; 0 if backward is not split
    apart: bool = False  # whether forward and backward are separate parts (GPipe)

    def parts(self, forward: Figure, backward: Figure, saved: Figure) -> tuple[Figure, ...]:
        """Return the parts of a group, a stage or a layer; they add up over layers.

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
        """The share of a stage's time (without what is freed) that delays a step if the stage is not the slowest."""
        return self.ramp[0]

    @property
    def alone(self) -> tuple[float, ...]:
        """How often each part of the slowest group counts."""
        return tuple(ramp + rounds for ramp, rounds in zip(self.ramp, self.rounds, strict=True))


class Pass(StrEnum):
    """A pass of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch."""

    what: Pass  # under zero-bubble schedules ``BACKWARD`` is only the gradient of the input
    microbatch: int  # index
    chunk: int = 0  # index of the virtual stage of the group, in the order of the model


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The figures that determine the passes of a step."""

    schedule: Schedule
    groups: int  # of devices (the pipeline degree)
    virtual: int  # stages of each group
    microbatches: int  # a step


_REGISTRY: dict[str, Schedule] = {}


@dataclass(frozen=True, eq=False)
class Schedule(str):
    """Order of the passes of micro-batches in a pipeline. A schedule compares and prints as its name.

    This class runs one stage on each group of devices: ``ahead`` forward passes, then backward and forward passes in
    turn. Subclasses define other orders; ``register`` makes them available.

    Attributes:
        value: name in plans and on the command line.
        aliases: other names on the command line.
        software: other training software that runs it (``backends``).
        executable: whether pipelines run it; cyclic data parallelism has an engine of its own.
        virtual_stages: stages of each group of devices; None: the plan's number, more than one.
        splits_backward: whether backward is split into the gradient of the input and that of the weights
            (``table`` orders the passes).
        no_better_than: name of a schedule under which no plan takes longer or holds more; the search skips this
            schedule if it tries the other.
        settles: whether a group holds as many micro-batches at once in a long step as in a step of a few rounds.
        repeats: whether all micro-batches between warm-up and draining run alike.
        front_loaded: whether the first group, before its first backward, runs as many micro-batches as there are groups
            through each of its stages, and later groups hold no more of any stage.
    """

    value: str
    aliases: tuple[str, ...] = ()
    software: tuple[str, ...] = ()
    executable: bool = True
    virtual_stages: int | None = 1
    splits_backward: bool = False
    no_better_than: str = ""
    settles: bool = False
    repeats: bool = False
    front_loaded: bool = False

    turns_back: ClassVar[bool] = False  # whether stages go back and forth over the groups, instead of round and round
    GPIPE: ClassVar[Schedule]
    ONE_F_ONE_B: ClassVar[Schedule]
    INTERLEAVED: ClassVar[Schedule]
    ZERO_BUBBLE_1P: ClassVar[Schedule]
    ZERO_BUBBLE_2P: ClassVar[Schedule]
    ZERO_BUBBLE_V: ClassVar[Schedule]
    CYCLIC: ClassVar[Schedule]

    def __new__(cls, value: str, *_: object, **__: object) -> Schedule:
        """Make a string of the name."""
        return super().__new__(cls, value)

    def __str__(self) -> str:
        return self.value

    def __reduce__(self) -> tuple[Any, ...]:
        return schedule_named, (self.value,)  # a schedule has a single object

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: Any) -> Any:
        from pydantic_core import core_schema

        serialization = core_schema.to_string_ser_schema()
        return core_schema.no_info_plain_validator_function(_read, serialization=serialization)

    @property
    def simple(self) -> bool:
        """Whether a group of devices runs one stage, and backward in one pass."""
        return self.executable and self.virtual_stages == 1 and not self.splits_backward

    def ahead(self, groups: int, group: int, microbatches: int) -> int:  # noqa: ARG002
        """Return the forward passes of a group's warm-up, before forward and backward passes alternate.

        1F1B: one for each later stage (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
        Clusters", section 2.2), so that a stage never holds more than ``groups - group`` micro-batches.
        """
        return groups - group - 1

    def in_flight(self, groups: int, group: int, microbatches: int) -> int:
        """Return the most micro-batches whose activations a group of one stage holds at once."""
        return min(microbatches, self.ahead(groups, group, microbatches) + 1)

    def limit(self, groups: int) -> int:
        """Return the most micro-batches of each stage that a group may hold under a split backward, until pass W."""
        return groups

    def moments(self, groups: int, group: int, microbatches: int, virtual: int) -> Moments:
        """Return the moments at which a group may hold the most memory.

        They recur after warm-up, so a step of three rounds shows all of them.
        """
        if self.virtual_stages == 1:
            return ((0, (self.in_flight(groups, group, microbatches),)),)
        return moments_of(self.actions(groups, group, min(microbatches, 3 * groups), virtual), virtual)

    def actions(self, groups: int, group: int, microbatches: int, virtual: int = 1) -> tuple[Action, ...]:  # noqa: ARG002
        """Return the passes of a group in a step, in order, if the order does not depend on seconds."""
        forward = [Action(Pass.FORWARD, index) for index in range(microbatches)]
        backward = [Action(Pass.BACKWARD, index) for index in range(microbatches)]
        return alternating(forward, backward, self.ahead(groups, group, microbatches))

    def form(self, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False) -> Form:  # noqa: ARG002
        """Return the closed form of a step's seconds, for ``virtual`` stages a group; derived in ``cost.schedule``."""
        return Form(microbatches, (1,), (microbatches - 1,))

    def virtual_choices(self, groups: int, blocks: int, edges: int) -> Sequence[int]:  # noqa: ARG002
        """Return how many stages a group may run; ``edges``: layers around the blocks that may be stages too."""
        return (1,)

    def suits(self, groups: int, microbatches: int) -> bool:  # noqa: ARG002
        """Whether the search tries a number of micro-batches."""
        return True


class _AllForward(Schedule):
    """All forward passes, then all backward passes (Huang et al. 2019, GPipe)."""

    def ahead(self, groups: int, group: int, microbatches: int) -> int:  # noqa: ARG002
        return microbatches - 1

    def form(self, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False) -> Form:  # noqa: ARG002
        return Form(microbatches, (1, 1), (microbatches - 1, microbatches - 1), apart=True)


class _Interleaved(Schedule):
    """Micro-batches go through the stages of a group a round at a time (Narayanan et al. 2021, section 2.2, figure 4):
    a group holds up to ``2 (p - group - 1) + (v - 1) p + 1`` in all."""

    def actions(self, groups: int, group: int, microbatches: int, virtual: int = 1) -> tuple[Action, ...]:
        return _interleaved(groups, group, microbatches, virtual)

    def form(self, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False) -> Form:  # noqa: ARG002
        padded = -(-microbatches // groups) * groups
        return Form(padded, (1 / virtual,), (padded - 1 / virtual,))

    def virtual_choices(self, groups: int, blocks: int, edges: int) -> Sequence[int]:
        """Each of several stages holds a block, or layers before or after all blocks."""
        return range(2, (blocks + edges) // groups + 1) if blocks >= groups else ()

    def suits(self, groups: int, microbatches: int) -> bool:
        return microbatches % groups == 0


@dataclass(frozen=True, eq=False)
class _ZeroBubble(Schedule):
    """Backward in two passes, of which the later fills gaps, within a memory limit (Qi et al. 2023, section 3.1)."""

    rounds: int = 1  # micro-batches of each stage that a group may hold, over the number of groups
    splits_backward: bool = True

    def limit(self, groups: int) -> int:
        return self.rounds * groups

    def in_flight(self, groups: int, group: int, microbatches: int) -> int:  # noqa: ARG002
        return min(microbatches, self.limit(groups))

    def form(self, groups: int, microbatches: int, virtual: int = 1, *, steps_overlap: bool = False) -> Form:  # noqa: ARG002
        most = self.rounds if steps_overlap else 1
        freed = 1.0 + min(most, (microbatches - 1) / max(groups - 1, 1))
        return Form(microbatches, (1, 0), (0, 1), freed)


class _VShaped(_ZeroBubble):
    """Two half stages a group, back and forth (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory")."""

    turns_back = True

    def limit(self, groups: int) -> int:
        return 2 * groups

    def moments(self, groups: int, group: int, microbatches: int, virtual: int) -> Moments:  # noqa: ARG002
        """Up to 2p half stages in all; group g holds 2p - g - 1 of its first and g + 1 of its second."""
        most = min(microbatches, 2 * groups - group - 1), min(microbatches, group + 1)
        return (0, most), (1, most)

    def virtual_choices(self, groups: int, blocks: int, edges: int) -> Sequence[int]:  # noqa: ARG002
        return (2,) if 2 * groups <= blocks else ()


def register(schedule: Schedule) -> Schedule:
    """Make a schedule available to plans and the search.

    Raises:
        InputError: another schedule has its name or one of its aliases.
    """
    for name in (schedule.value, *schedule.aliases):
        if name in schedule_names():
            raise InputError("schedule", name, "Another schedule has this name.")
    _REGISTRY[schedule.value] = schedule
    return schedule


@contextmanager
def registered(schedule: Schedule) -> Iterator[Schedule]:
    """Register a schedule within a ``with`` block; see ``register``."""
    register(schedule)
    try:
        yield schedule
    finally:
        del _REGISTRY[schedule.value]


def schedules() -> tuple[Schedule, ...]:
    """List the registered schedules."""
    return tuple(_REGISTRY.values())


def schedule_names() -> dict[str, Schedule]:
    """Return the registered schedules by name, then by alias."""
    aliases = {alias: schedule for schedule in schedules() for alias in schedule.aliases}
    return {**_REGISTRY, **aliases}


def schedule_named(value: str) -> Schedule:
    """Return the schedule of a name in plans.

    Raises:
        InputError: no schedule has this name.
    """
    if value not in _REGISTRY:
        raise InputError("schedule", value, f"Give one of {', '.join(_REGISTRY)}.")
    return _REGISTRY[value]


def _read(value: object) -> Schedule:
    from pydantic_core import PydanticCustomError

    if isinstance(value, Schedule):
        return value
    if not isinstance(value, str) or value not in _REGISTRY:
        *most, last = (repr(name) for name in _REGISTRY)
        raise PydanticCustomError("enum", f"Input should be {', '.join(most)} or {last}")
    return _REGISTRY[value]


Schedule.GPIPE = register(_AllForward("gpipe", software=("torchtitan",), no_better_than="1f1b"))
Schedule.ONE_F_ONE_B = register(Schedule("1f1b", software=("megatron", "torchtitan"), settles=True, repeats=True))
Schedule.INTERLEAVED = register(_Interleaved(
    "interleaved-1f1b", ("interleaved",), ("megatron", "torchtitan"), virtual_stages=None, settles=True,
    front_loaded=True,
))  # fmt: skip
Schedule.ZERO_BUBBLE_1P = register(_ZeroBubble("zb-1p", ("zb1p",)))
Schedule.ZERO_BUBBLE_2P = register(_ZeroBubble("zb-2p", ("zb2p",), rounds=2))
Schedule.ZERO_BUBBLE_V = register(_VShaped("zb-v", ("zbv",), virtual_stages=2))
Schedule.CYCLIC = register(Schedule("cyclic", executable=False))
DEFAULT_SCHEDULE = Schedule.ONE_F_ONE_B
"""The schedule of plans that name none, and of plans without a pipeline."""
DELAYED_SCHEDULE = Schedule.CYCLIC
"""The schedule of plans with delayed gradients."""


def group_of(schedule: Schedule, pipeline: int, stage: int) -> int:
    """Return the group of devices that runs a (virtual) stage."""
    chunk, index = divmod(stage, pipeline)
    return pipeline - 1 - index if schedule.turns_back and chunk % 2 else index


def stage_at(schedule: Schedule, pipeline: int, group: int, chunk: int) -> int:
    """Return the (virtual) stage that is a group's chunk: the inverse of ``group_of``."""
    return chunk * pipeline + (pipeline - 1 - group if schedule.turns_back and chunk % 2 else group)


def alternating(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Return ``ahead`` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forward))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


@lru_cache(maxsize=4096)
def _interleaved(groups: int, group: int, microbatches: int, virtual: int) -> tuple[Action, ...]:
    """Micro-batches go through the chunks ``groups`` at a time.

    Warm-up: ``2 (groups - group - 1) + (virtual - 1) groups`` forward passes (Megatron-LM,
    ``forward_backward_pipelining_with_interleaving``). If ``groups`` does not divide the micro-batches, the order is
    that of the next multiple, without the passes of absent micro-batches.
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
    order = alternating(forward, backward, 2 * (groups - group - 1) + (virtual - 1) * groups)
    return tuple(action for action in order if action.microbatch < microbatches)


def moments_of(actions: Sequence[Action], virtual: int) -> Moments:
    """Return the backward passes of a group during which it may hold the most memory.

    Which of them it is depends on the bytes of each chunk. A moment is left out if another of the same chunk holds as
    many or more micro-batches of all chunks, or if it is the midpoint of two others: bytes are linear in micro-batches,
    so it cannot hold more than both.
    """
    held, moments = [0] * virtual, [dict[tuple[int, ...], None]() for _ in range(virtual)]
    for action in actions:
        if action.what is Pass.FORWARD:
            held[action.chunk] += 1
        elif action.what is Pass.BACKWARD:
            moments[action.chunk][tuple(held)] = None
            held[action.chunk] -= 1
    return tuple((chunk, counts) for chunk, distinct in enumerate(moments) for counts in _worst(tuple(distinct)))


def most_of(moments: Moments) -> tuple[int, ...]:
    """Return the most micro-batches of each chunk at any of the moments."""
    return tuple(max(counts) for counts in zip(*(counts for _, counts in moments), strict=True))


def _worst(moments: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The counts that no others exceed, without midpoints of two that hold the same chunks."""
    points: dict[tuple[int, ...], None] = {}
    for counts in sorted(moments, key=sum, reverse=True):  # counts that exceed others come before them
        if not any(all(map(le, counts, more)) for more in points):
            points[counts] = None
    most = [counts for counts in moments if counts in points]
    return [counts for counts in most if not any(_between(counts, end, points) for end in most if end != counts)]


def _between(middle: tuple[int, ...], end: tuple[int, ...], points: Container[tuple[int, ...]]) -> bool:
    """Whether ``middle`` is the midpoint of ``end`` and another point that holds the same chunks."""
    third = tuple([2 * count - other for count, other in zip(middle, end, strict=True)])
    if third not in points:
        return False
    chunks = [[count > 0 for count in counts] for counts in (end, middle, third)]
    return chunks[0] == chunks[1] == chunks[2]
