"""Axes of the mesh of a stage's ranks, and groups of ranks ("lines") that differ along some axes only. No torch
here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod

from galvatron_lite.arrays import Whole


class Part(StrEnum):
    """What the ranks along an axis have different parts of: a dim of the activations between layers, named as the field
    of ``Layout``, or (``SLICES``) the parameters."""

    SAMPLES = "batch"
    TOKENS = "tokens"
    PLANES = "planes"
    ROWS = "rows"
    COLUMNS = "columns"
    MATMULS = "matmuls"
    CHANNELS = "channels of convolutions"


SLICES = frozenset((Part.MATMULS, Part.CHANNELS))
"""Parts of parameters: slices of matmuls, and of convolutions with their running statistics."""


class Purpose(StrEnum):
    """What a group of ranks exchanges. Each purpose has process groups of its own, so that traffic of one purpose does
    not wait for that of another."""

    GRADIENTS = "gradients"
    STATES = "states"
    ACTIVATIONS = "activations"
    PIXELS = "pixels"
    TOKENS = "tokens"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """An axis of a stage's mesh."""

    degree: str  # the field of ``Strategy`` with its size
    part: Part  # what its ranks have different parts of
    replicates: bool = False  # whether its ranks hold the same states even if states are sharded


@dataclass(frozen=True, slots=True)
class RankAxis:
    """An axis of the mesh as a group of ranks sees it."""

    size: Whole
    stride: Whole  # difference of neighbouring ranks


@dataclass(frozen=True, slots=True)
class RankLine:
    """Groups of ranks that differ along some axes only. Places are ranks counted from the stage's first."""

    purpose: Purpose  # what they exchange
    axes: tuple[RankAxis, ...] = ()  # the outermost first; none: groups of one rank

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return prod(axis.size for axis in self.axes)

    def index(self, place: Whole) -> Whole:
        """The index of a place in its group."""
        index: Whole = 0
        for axis in self.axes:
            index = index * axis.size + place // axis.stride % axis.size
        return index

    def through(self, place: int) -> tuple[int, ...]:
        """The places of the group that contains ``place``, in order."""
        first = place - sum(place // axis.stride % axis.size * axis.stride for axis in self.axes)
        offsets = product(*(range(0, axis.size * axis.stride, axis.stride) for axis in self.axes))
        return tuple(first + sum(offset) for offset in offsets)

    def groups(self, devices: int) -> Iterator[tuple[int, ...]]:
        """All groups of a stage of ``devices`` ranks."""
        return (self.through(place) for place in range(devices) if self.index(place) == 0)

    def around(self, rank: int, devices: int) -> tuple[int, ...]:
        """The world ranks of the group that contains ``rank``, in stages of ``devices`` ranks."""
        start = rank - rank % devices
        return tuple(start + place for place in self.through(rank % devices))


ALONE = RankLine(Purpose.STATES)
"""Groups of one rank."""


@dataclass(frozen=True, slots=True)
class ParameterSpread:
    """The ranks that hold some parameters of a layer."""

    shards: RankLine  # ranks that shard their states
    replicas: RankLine  # ranks that hold the same shard
    gradients: RankLine  # shards and replicas: ranks that use them on other samples, tokens or pixels
    over: RankLine | None = None  # ranks that hold different ones of them, and exchange activations; None: none
    sharing: int = 1  # ranks that share each of them
