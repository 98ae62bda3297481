"""Segments: neighbouring layers of a chain taken as one, with the figures of every choice worth keeping.

A segment is one layer, or two segments joined. Moments count from where the segment starts, without what is at rest:

    inner    the greatest of the moments that wait for nothing outside
    first    moments of the first layer, raised by what the choice before it leaves gathered (g)
    last     moments of the last layer, raised by what the choice after it has pending (d)
    single   moments of a segment of one layer, raised by both

Segment X before Y (q: prefix, g: of X's last layer, d: of Y's first layer):

    inner' = max(inner_X, last_X + d_Y, q_X + max(inner_Y, first_Y + g_X))
    first' = max(first_X, single_X + d_Y)          last' = q_X + max(last_Y, single_Y + g_X)

while times, rest, prefix and updated add up. Joining is associative: a run of n equal layers takes log2 n joins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chains.chain import ChainLayer

IntArray = NDArray[np.int64]
NEVER = -(2**61)
"""A moment that does not exist."""
TIME, BOTH, REST, INNER, FIRST, LAST, SINGLE, GATHERED, PENDING, UPDATED, HEAD, TAIL, PARTS = range(13)
"""Rows of ``Segment.figures``: weighted time; rest + prefix; rest; the moments; what the last layer leaves gathered;
what the first has pending; updated; groups of the first and of the last layer; time in each criterion, if several."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The choices of neighbouring layers."""

    layers: int
    figures: IntArray  # (rows, S), see ``TIME`` and on
    names: IntArray | None = None  # (S,) the choice, of a single layer
    strategy: IntArray | None = None  # (S,) number of the strategy that all its layers have; None where they may differ
    halves: tuple[Segment, Segment] | None = None  # the two segments that it is made of, of more layers
    places: IntArray | None = None  # (2, S) the choices of those

    def take(self, rows: IntArray) -> Segment:
        """Only some of the choices."""
        names = None if self.names is None else self.names[rows]
        places = None if self.places is None else self.places[:, rows]
        strategy = None if self.strategy is None else self.strategy[rows]
        return Segment(self.layers, self.figures[:, rows], names, strategy, self.halves, places)

    def choices(self, row: int) -> tuple[int, ...]:
        """The choice of each layer."""
        if self.halves is None or self.places is None:
            return () if self.names is None else (int(self.names[row]),)
        first, second = self.halves
        return first.choices(int(self.places[0, row])) + second.choices(int(self.places[1, row]))


def single(layer: ChainLayer, weights: IntArray) -> Segment:
    """A layer as a segment; ``weights`` turn its criteria into one time."""
    count = len(layer.rest)
    none = np.full(count, NEVER)
    several = layer.time.T if len(weights) > 1 else np.empty((0, count), dtype=np.int64)
    figures = np.array(
        [
            layer.time @ weights, layer.rest + layer.prefix, layer.rest, none, layer.peak, none, layer.middle,
            layer.prefetched, layer.pending, layer.updated, layer.group, layer.group, *several,
        ]
    )  # fmt: skip
    return Segment(1, figures, names=np.arange(count), strategy=layer.strategy)


def join(first: Segment, second: Segment, rows: IntArray, others: IntArray, moved: IntArray, by: IntArray) -> Segment:
    """Some pairs of choices of two segments, the second behind the first.

    Args:
        first, second: segments.
        rows, others: (S,) choices of either.
        moved: (S,) redistribution between them, one pass.
        by: (1 + criteria,) how many times that counts in the weighted time and in each criterion if there are several.
    """
    x, y = first.figures[:, rows], second.figures[:, others]
    prefix = x[BOTH] - x[REST]
    figures = x + y
    figures[TIME] += moved * by[0]
    figures[PARTS:] += moved * by[1:, None]
    figures[INNER] = np.maximum(
        np.maximum(x[INNER], x[LAST] + y[PENDING]), prefix + np.maximum(y[INNER], y[FIRST] + x[GATHERED])
    )
    figures[FIRST] = np.maximum(x[FIRST], x[SINGLE] + y[PENDING])
    figures[LAST] = prefix + np.maximum(y[LAST], y[SINGLE] + x[GATHERED])
    figures[SINGLE] = NEVER
    figures[GATHERED], figures[PENDING] = y[GATHERED], x[PENDING]
    figures[HEAD], figures[TAIL] = x[HEAD], y[TAIL]
    return Segment(first.layers + second.layers, figures, halves=(first, second), places=np.array([rows, others]))
