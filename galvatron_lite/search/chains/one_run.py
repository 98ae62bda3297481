"""A chain whose parts have one strategy each: every combination at once, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby, pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chains.chain import Chain, ChainLayer

IntArray = NDArray[np.int64]
_MOST = 100_000
"""Combinations that are looked at in less time than a search takes."""
_MEMORY = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")


def worst_moment(runs: Sequence[tuple[Sequence[IntArray], int]]) -> IntArray:
    """The worst moment of layers that compute, without what they have at rest and the optimizer's; (2) of ``frontier``.

    In a run of equal layers moments go up or down evenly, so that only those at its ends are looked at.

    Args:
        runs: by runs of equal layers, their figures in the order of ``cost.memory.MemoryTerms``, and how many they are.
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


def best_of_parts(chain: Chain, cap: float) -> tuple[int, tuple[int, ...]] | None:
    """The least time and the choices of a chain with one criterion and one run a part; None where nothing fits.

    Raises:
        OverflowError: there are too many combinations.
    """
    parts = [list(layers) for _, layers in groupby(chain.layers, key=lambda layer: layer.part)]
    common = [reduce(np.intersect1d, {id(layer): _strategies(layer) for layer in layers}.values()) for layers in parts]
    if prod(own.size for own in common) > _MOST:
        raise OverflowError
    rows: dict[int, IntArray] = {}
    for layers, wanted in zip(parts, common, strict=True):
        for layer in {id(layer): layer for layer in layers}.values():
            order = np.argsort(_strategies(layer))
            rows[id(layer)] = order[np.searchsorted(_strategies(layer), wanted, sorter=order)]
    if not all(own.size for own in common):
        return None

    def along(values: IntArray, layer: ChainLayer, axis: int) -> IntArray:
        return np.expand_dims(values[rows[id(layer)]], [other for other in range(len(parts)) if other != axis])

    runs = [
        (axis, layers[0], len(layers))
        for axis, own in enumerate(parts)
        for layers in (list(same) for _, same in groupby(own, key=id))
    ]
    none = np.zeros([own.size for own in common], dtype=np.int64)
    time = sum((count * along(layer.time[:, 0], layer, axis) for axis, layer, count in runs), start=none)
    for axis, (left, right) in enumerate(pairwise(parts)):
        a, b = left[-1], right[0]
        move = b.move[np.ix_(a.group[rows[id(a)]], b.group[rows[id(b)]])]
        others = [other for other in range(len(parts)) if other not in (axis, axis + 1)]
        time = time + chain.moves[0] * np.expand_dims(move, others)
    figures = [([along(getattr(layer, name), layer, axis) for name in _MEMORY], count) for axis, layer, count in runs]
    rest, updated = (sum((count * own[column] for own, count in figures), start=none) for column in (0, 6))
    fits = (rest + worst_moment(figures) <= chain.room) & (updated <= chain.room)
    least = np.where(fits & (time * chain.weights[0] <= cap), time, np.inf)
    place = int(np.argmin(least))
    if not np.isfinite(least.flat[place]):
        return None
    chosen = np.unravel_index(place, least.shape)
    choices = [int(rows[id(layer)][chosen[axis]]) for axis, own in enumerate(parts) for layer in own]
    return int(time.flat[place]), tuple(choices)


def _strategies(layer: ChainLayer) -> IntArray:
    assert layer.strategy is not None
    return layer.strategy
