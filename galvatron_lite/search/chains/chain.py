"""A chain of layers and the figures of every choice: what the search inside one stage works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_BY_CHOICE = ("time", "rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")


@dataclass(frozen=True, slots=True, eq=False)
class ChainLayer:
    """One layer of a chain: figures of each of its S choices."""

    time: IntArray  # (S, C)
    # rest, prefix, peak, middle, prefetched, pending, updated: (S,) each, see ``cost.memory.MemoryTerms``
    rest: IntArray
    prefix: IntArray
    peak: IntArray
    middle: IntArray
    prefetched: IntArray
    pending: IntArray
    updated: IntArray
    move: IntArray  # (groups of the layer before, groups); of no meaning in the first layer
    group: IntArray  # (S,): the choice's group (layout), 0, 1, ...; moves depend on groups only
    # (S,): number of the choice's strategy, the same in all layers; None where runs are not counted
    strategy: IntArray | None = None
    part: int = 0  # of the model (before, among or after the blocks); runs of strategies are counted in each

    def only(self, rows: IntArray) -> ChainLayer:
        """The layer with some of its choices."""
        figures = {name: getattr(self, name)[rows] for name in _BY_CHOICE}
        strategy = None if self.strategy is None else self.strategy[rows]
        return replace(self, **figures, group=self.group[rows], strategy=strategy)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain of layers."""

    layers: tuple[ChainLayer, ...]  # in order
    moves: IntArray  # (C,) how many times a move counts in each criterion
    weights: IntArray  # (C,) what turns the criteria into one time
    room: int  # bytes (M)
    # neighbouring layers of one part and one strategy are a run; how many a part may have; None: any
    runs: int | None = None

    def only(self, rows: Sequence[IntArray]) -> Chain:
        """The chain with some of the choices of each layer."""
        layers = (layer.only(own) for layer, own in zip(self.layers, rows, strict=True))
        return replace(self, layers=tuple(layers))
