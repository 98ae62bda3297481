"""One strategy a layer along a chain of layers: least time within the memory of one device.

The problem. Layers l = 1..L, choices s_l in S_l; all figures are whole numbers (picoseconds, bytes):

    t_l(s) in Z^C          time in C criteria (C = 1: a step; else parts of a micro-batch, then work once a step)
    x_l(s', s) >= 0        redistribution from choice s' of layer l-1 to s, counted c_1..c_C times in the criteria
    r, q, w, v, g, d, u    memory of (l, s): rest, prefix, peak, middle, prefetched, pending, updated (``cost.memory``)

    minimise (Pareto)  sum_l t_l(s_l) + c * sum_l x_l(s_{l-1}, s_l)                                            (1)
    subject to         sum_l r_l + sum_{j<l} q_j + g_{l-1} + max(w_l, v_l + d_{l+1}) <= M      for every l     (2)
                       sum_l u_l <= M                                                                          (3)
                       weights . (1) <= cap                                                                    (4)

Bounds and good paths are found by shortest paths at a price of memory (``bounds``), exact fronts by labels
(``labels``), chains with one strategy a part by comparing every combination, where there are few (``best_of_parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby, pairwise
from math import prod

import numpy as np

from galvatron_lite.arrays import IntArray

MEMORY = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")
_COMBINATIONS = 100_000
"""Combinations of one strategy a part that are compared sooner than a search takes."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainLayer:
    """One layer of a chain: figures of its S choices."""

    time: IntArray  # (S, C)
    rest: IntArray  # (S,) each, see ``cost.memory.MemoryTerms``
    prefix: IntArray
    peak: IntArray
    middle: IntArray
    prefetched: IntArray
    pending: IntArray
    updated: IntArray
    move: IntArray  # (groups of the layer before, groups); meaningless in the first layer
    group: IntArray  # (S,) the choice's layout: 0, 1, ...
    strategy: IntArray | None = None  # (S,) number of the choice's strategy; None where runs are not counted
    part: int = 0  # of the model: before, among or after the blocks; runs of strategies are counted in each

    def only(self, rows: IntArray) -> ChainLayer:
        """The layer with some of its choices."""
        figures = {name: getattr(self, name)[rows] for name in ("time", *MEMORY, "group")}
        return replace(self, **figures, strategy=None if self.strategy is None else self.strategy[rows])

    def figures(self, weights: IntArray) -> IntArray:
        """(rows, S), rows as ``bounds`` names them, from ``TIME`` on."""
        names = np.zeros_like(self.group) if self.strategy is None else self.strategy
        memory = [getattr(self, name) for name in MEMORY if name != "prefix"]
        several = self.time.T if len(weights) > 1 else ()
        return np.array([self.time @ weights, self.rest + self.prefix, *memory, self.group, names, *several])


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain of layers."""

    layers: tuple[ChainLayer, ...]
    moves: IntArray  # (C,) how many times a move counts in each criterion
    weights: IntArray  # (C,) what turns the criteria into one time; 1 of a single one
    room: int  # bytes (M)
    runs: int | None = None  # of neighbouring layers with one strategy that each part may have; None: any


@dataclass(frozen=True, slots=True)
class Path:
    """One choice a layer."""

    time: tuple[int, ...]  # in each criterion
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChainFront:
    """The Pareto-best paths of a chain, ascending in time."""

    paths: tuple[Path, ...]
    work: int = 0  # labels looked at
    dropped: float = np.inf  # a weighted time that no path left out beats; infinite where none was

    @property
    def complete(self) -> bool:
        """Whether the paths are the whole Pareto set."""
        return self.dropped == np.inf


def worst_moment(runs: Sequence[tuple[Sequence[IntArray], int]]) -> IntArray:
    """The worst moment (2) of layers that compute, without what they have at rest and the optimizer's.

    In a run of equal layers moments go up or down evenly, so that only those at its ends are compared.

    Args:
        runs: of equal layers, their figures in the order of ``MEMORY``, and how many they are.
    """
    worst, before = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for number, ((_, prefix, peak, middle, prefetched, pending, _), count) in enumerate(runs):
        for place in sorted({0, min(1, count - 1), max(count - 2, 0), count - 1}):
            last = runs[number - 1][0][4] if number else 0
            first = runs[number + 1][0][5] if number + 1 < len(runs) else 0
            end = middle + (pending if place + 1 < count else first)
            moment = before + place * prefix + np.maximum(peak, end) + (prefetched if place else last)
            worst = np.maximum(worst, moment)
        before = before + count * prefix
    return worst


def strategies_of_parts(chain: Chain) -> list[IntArray] | None:
    """Where each part of the model must have one strategy: by part, those that all of its layers have. None where it
    may have several, or where there are too many combinations to compare."""
    if chain.runs != 1 or len(chain.weights) > 1:
        return None
    parts = groupby(chain.layers, key=lambda layer: layer.part)
    numbers = [{id(layer): _strategies(layer) for layer in layers}.values() for _, layers in parts]
    common = [reduce(np.intersect1d, layers) for layers in numbers]
    return common if prod(strategies.size for strategies in common) <= _COMBINATIONS else None


def _strategies(layer: ChainLayer) -> IntArray:
    assert layer.strategy is not None  # as wherever runs are counted
    return layer.strategy


def best_of_parts(chain: Chain, common: Sequence[IntArray], cap: float = np.inf) -> Path | None:
    """The best path of a chain with one criterion whose parts have one strategy each; None where none fits.

    All combinations are compared at once, as arrays with one axis a part.

    Args:
        chain: the layers.
        common: see ``strategies_of_parts``.
        cap: the path takes at most this time.
    """
    if not all(strategies.size for strategies in common):
        return None
    parts = [list(layers) for _, layers in groupby(chain.layers, key=lambda layer: layer.part)]
    rows: dict[int, IntArray] = {}
    for layers, wanted in zip(parts, common, strict=True):
        for layer in {id(layer): layer for layer in layers}.values():
            order = np.argsort(_strategies(layer))
            rows[id(layer)] = order[np.searchsorted(_strategies(layer), wanted, sorter=order)]

    def along(values: IntArray, layer: ChainLayer, axis: int) -> IntArray:
        return np.expand_dims(values[rows[id(layer)]], [other for other in range(len(parts)) if other != axis])

    runs = [
        (axis, layers[0], len(layers))
        for axis, part in enumerate(parts)
        for layers in (list(same) for _, same in groupby(part, key=id))
    ]
    zero = np.zeros([strategies.size for strategies in common], dtype=np.int64)
    time = sum((count * along(layer.time[:, 0], layer, axis) for axis, layer, count in runs), start=zero)
    for axis, (left, right) in enumerate(pairwise(parts)):
        a, b = left[-1], right[0]
        move = b.move[np.ix_(a.group[rows[id(a)]], b.group[rows[id(b)]])]
        others = [other for other in range(len(parts)) if other not in (axis, axis + 1)]
        time = time + chain.moves[0] * np.expand_dims(move, others)
    figures = [([along(getattr(layer, name), layer, axis) for name in MEMORY], count) for axis, layer, count in runs]
    rest, updated = (sum((count * memory[column] for memory, count in figures), start=zero) for column in (0, 6))
    fits = (rest + worst_moment(figures) <= chain.room) & (updated <= chain.room)
    least = np.where(fits & (time <= cap), time, np.inf)
    place = int(np.argmin(least))
    if not np.isfinite(least.flat[place]):
        return None
    chosen = np.unravel_index(place, least.shape)
    choices = tuple(int(rows[id(layer)][chosen[axis]]) for axis, part in enumerate(parts) for layer in part)
    return Path((int(time.flat[place]),), choices)
