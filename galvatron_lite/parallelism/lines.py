"""The groups of a stage's ranks under a strategy: the runtime creates them, and ``verify`` checks the messages of a run
against them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Generic, TypeVar

from galvatron_lite.parallelism.axes import SLICES, MeshAxis, ParameterSpread, Part, Purpose, RankAxis, RankLine
from galvatron_lite.parallelism.ranks import strides_of
from galvatron_lite.parallelism.registry import added_degrees, dimensions
from galvatron_lite.parallelism.strategy import Strategy, degree_names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageRanks(Generic[T]):
    """Groups of a stage's ranks, by what a group's ranks have different parts of: rank lines or process groups."""

    batch: T  # samples; for statistics of all samples
    weights: T  # slices of parameters
    matmuls: T  # slices of matmuls
    channels: T  # slices of convolutions
    tokens: T  # tokens, planes, rows or columns of the same samples
    planes: T
    rows: T
    columns: T
    stage: T  # all ranks: for gradients of parameters used on shares of tokens or channels
    everyone: T  # all ranks: for moving activations between layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLines(StageRanks[RankLine]):
    """The groups of a stage's ranks as lines."""

    states: ParameterSpread  # of most parameters
    spread: ParameterSpread | None  # of parameters that a dimension spreads over other ranks (experts)
    added: tuple[RankLine, ...] = ()  # of each added dimension

    def lines(self) -> tuple[RankLine, ...]:
        """The lines of the fields of ``StageRanks``, in their order."""
        return tuple(getattr(self, item.name) for item in fields(StageRanks))

    @property
    def uneven(self) -> bool:
        """Whether ranks may have unequal work, as they have different pixels, channels or spread parameters."""
        parts = (self.planes, self.rows, self.columns, self.channels)
        return self.spread is not None or any(line.size > 1 for line in parts)

    def __iter__(self) -> Iterator[RankLine]:
        """All lines."""
        yield from (*self.lines(), *self.added)
        for spread in (self.states, self.spread):
            if spread is not None:
                yield from (spread.shards, spread.replicas, spread.gradients)
                yield from () if spread.over is None else (spread.over,)


@lru_cache(maxsize=4096)
def lines_of(strategy: Strategy) -> StageLines:
    """Return the groups of a stage's ranks under a strategy.

    Ranks that do not share weights have different samples, tokens or pixels, so gradients are summed over them. All of
    these but replicas shard the states; so do Megatron-Core's distributed optimizer and torchtitan's ``dp_shard_cp``
    mesh, which include context ranks.
    """
    strides, order = strides_of(strategy), degree_names()
    axes = sorted(
        (axis for dimension in dimensions() for axis in dimension.axes), key=lambda axis: order.index(axis.degree)
    )

    def line(purpose: Purpose, chosen: Iterable[MeshAxis]) -> RankLine:
        sizes = {axis.degree: getattr(strategy, axis.degree) for axis in chosen}
        return RankLine(purpose, tuple(RankAxis(size, strides[name]) for name, size in sizes.items() if size > 1))

    def along(purpose: Purpose, *parts: Part) -> RankLine:
        return line(purpose, (axis for axis in axes if axis.part in parts))

    others = [axis for axis in axes if axis.part not in SLICES]
    sharing = others if strategy.state_shards > 1 else []
    states = ParameterSpread(
        line(Purpose.STATES, (axis for axis in sharing if not axis.replicates)),
        line(Purpose.STATES, (axis for axis in sharing if axis.replicates)),
        line(Purpose.GRADIENTS, others),
    )
    spreads = (dimension.spread(strategy) for dimension in dimensions())
    return StageLines(
        along(Purpose.ACTIVATIONS, Part.SAMPLES),
        along(Purpose.ACTIVATIONS, *SLICES),
        along(Purpose.ACTIVATIONS, Part.MATMULS),
        along(Purpose.ACTIVATIONS, Part.CHANNELS),
        along(Purpose.TOKENS, Part.TOKENS),
        along(Purpose.PIXELS, Part.PLANES),
        along(Purpose.PIXELS, Part.ROWS),
        along(Purpose.PIXELS, Part.COLUMNS),
        line(Purpose.GRADIENTS, axes),
        line(Purpose.ACTIVATIONS, axes),
        states=states,
        spread=next((spread for spread in spreads if spread is not None), None),
        added=tuple(line(Purpose.ACTIVATIONS, dimension.axes) for dimension, _ in added_degrees(strategy)),
    )
