"""Axes of the mesh of a stage's ranks, and lines of ranks along some of them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod

from galvatron_lite.arrays import Whole


class Part(StrEnum):
    """What the ranks along an axis have different parts of: of what goes between layers, by the field of ``Layout``
    that counts the ways, or (``SLICES``) of the parameters alone, for the same samples."""

    SAMPLES = "batch"
    TOKENS = "tokens"
    PLANES = "planes"
    ROWS = "rows"
    COLUMNS = "columns"
    MATMULS = "matmuls"
    CHANNELS = "channels of convolutions"


SLICES = frozenset((Part.MATMULS, Part.CHANNELS))
"""Slices of matmuls, and of convolutions with their running statistics."""


class Purpose(StrEnum):
    """What a group of ranks exchanges. Groups of equal ranks are separate by purpose, so that traffic of one kind waits
    for no other."""

    GRADIENTS = "gradients"
    STATES = "states"
    ACTIVATIONS = "activations"
    PIXELS = "pixels"
    TOKENS = "tokens"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """An axis of a stage's mesh."""

    degree: str  # the field of ``Strategy`` that is its size
    part: Part  # what its ranks have different parts of
    replicates: bool = False  # whether its ranks hold the same states also where states are sharded


@dataclass(frozen=True, slots=True)
class RankAxis:
    """Ranks that differ along one axis only."""

    size: Whole
    stride: Whole  # ranks from one to the next


@dataclass(frozen=True, slots=True)
class RankLine:
    """Ranks of a stage that differ along some axes only; places are counted from the stage's first rank."""

    purpose: Purpose  # what they exchange
    axes: tuple[RankAxis, ...] = ()  # the outermost first; none: each rank is alone

    @property
    def size(self) -> int:
        """Ranks of a line."""
        return prod(axis.size for axis in self.axes)

    def index(self, place: Whole) -> Whole:
        """Which of the ranks of its line the one at a place is."""
        index: Whole = 0
        for axis in self.axes:
            index = index * axis.size + place // axis.stride % axis.size
        return index

    def through(self, place: int) -> tuple[int, ...]:
        """Places on the line through one of them, in order."""
        first = place - sum(place // axis.stride % axis.size * axis.stride for axis in self.axes)
        moves = product(*(range(0, axis.size * axis.stride, axis.stride) for axis in self.axes))
        return tuple(first + sum(move) for move in moves)

    def every(self, devices: int) -> Iterator[tuple[int, ...]]:
        """All lines of a stage of so many ranks."""
        return (self.through(place) for place in range(devices) if self.index(place) == 0)

    def around(self, rank: int, devices: int) -> tuple[int, ...]:
        """World ranks on the line through one, where stages have so many ranks."""
        start = rank - rank % devices
        return tuple(start + place for place in self.through(rank % devices))


ALONE = RankLine(Purpose.STATES)
"""Each rank by itself."""


@dataclass(frozen=True, slots=True)
class ParameterSpread:
    """Where some parameters of a layer lie."""

    shards: RankLine  # ranks that share their states
    replicas: RankLine  # ranks that hold the same shard
    gradients: RankLine  # ranks that use them on other samples, tokens or pixels: both together
    over: RankLine | None = None  # ranks that each have others of them, and exchange what works on them; None: none
    sharing: int = 1  # ranks that share each of them
