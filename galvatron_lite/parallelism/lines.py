"""Which ranks of a stage work together under a strategy, and what for: the groups that the runtime makes, and what the
messages of a run are held against. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Generic, TypeVar

from galvatron_lite.parallelism.axes import SLICES, MeshAxis, ParameterSpread, Part, Purpose, RankAxis, RankLine
from galvatron_lite.parallelism.ranks import strides_of
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategy, degree_names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageRanks(Generic[T]):
    """Ranks of a stage that work together, by what they share or do: lines of them, or process groups."""

    batch: T  # other samples; for statistics of all samples
    weights: T  # slices of the same parameters, for the same samples
    matmuls: T  # matmuls, channels: those of matmuls, and of convolutions
    channels: T
    tokens: T  # tokens, planes, rows, columns: of the same samples
    planes: T
    rows: T
    columns: T
    stage: T  # all: for gradients of parameters used on shares of tokens or channels
    everyone: T  # all: for moving activations between layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLines(StageRanks[RankLine]):
    """The lines of ranks of a stage."""

    states: ParameterSpread  # of parameters
    spread: ParameterSpread | None  # of those that a dimension spreads over other ranks

    def lines(self) -> tuple[RankLine, ...]:
        """By what ranks share or do, in the order of the fields of ``StageRanks``."""
        return tuple(getattr(self, item.name) for item in fields(StageRanks))

    @property
    def uneven(self) -> bool:
        """Whether a rank's work depends on which pixels, channels or spread parameters it has."""
        parts = (self.planes, self.rows, self.columns, self.channels)
        return self.spread is not None or any(line.size > 1 for line in parts)

    def __iter__(self) -> Iterator[RankLine]:
        """Every line."""
        yield from self.lines()
        for one in (self.states, self.spread):
            yield from (one.shards, one.replicas, one.gradients) if one is not None else ()
            yield from (one.over,) if one is not None and one.over is not None else ()


@lru_cache(maxsize=4096)
def lines_of(strategy: Strategy) -> StageLines:
    """The lines of ranks under a strategy.

    All ranks that do not share weights see other samples, tokens or pixels, so gradients are summed over them. States
    are shared by all of these but replicas (Megatron-Core's distributed optimizer and torchtitan's ``dp_shard_cp`` mesh
    take context ranks in too).
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
    spread = (dimension.spread(strategy) for dimension in dimensions())
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
        spread=next((one for one in spread if one is not None), None),
    )
