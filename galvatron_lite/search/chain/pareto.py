"""Pareto sets: the rows of a table of whole numbers that no other row equals or beats in every column (less is better).

The search drops strategies and partial plans that are dominated in every figure, many millions in a run, so these
functions compare as arrays and in the order that drops most rows soonest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.arrays import BoolArray, IntArray

_SMALL = 96
"""Rows up to which all pairs are compared at once."""
_FIRST_BLOCK, _BLOCK, _PAIRS = 64, 256, 2**17
"""Rows of the first and of later blocks of a long table; pairs that are compared at once."""
_GROUP_SIZES = (8, 32)
"""Sizes up to which groups are padded and compared together."""
_EARLIER = np.tri(_SMALL, k=-1, dtype=bool)


def pareto_rows(values: IntArray) -> IntArray:
    """Indices of the undominated rows, in lexicographic order of their values; the first of equal rows."""
    if len(values) <= 1:
        return np.arange(len(values))
    varying = values[:, (values != values[0]).any(axis=0)]
    if varying.shape[1] == 0:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort(varying.T[::-1])
    if varying.shape[1] == 1:
        return order[:1]
    ordered = varying[order]
    if varying.shape[1] == 2:
        least = np.minimum.accumulate(ordered[:, 1])
        return order[np.concatenate(([True], ordered[1:, 1] < least[:-1]))]
    return order[_undominated_in_order(ordered)]


def pareto_within(values: IntArray, groups: IntArray) -> IntArray:
    """Indices, ascending, of the rows that no row of their group dominates; the first of equal rows."""
    if len(values) <= _SMALL:
        same_group = np.stack((groups, -groups))  # rows of other groups are greater in one of the two
        return np.flatnonzero(~_dominated(np.concatenate((values.T, same_group))))
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate(([0], np.flatnonzero(np.diff(groups[order])) + 1))
    sizes, count = np.diff(np.append(starts, len(order))), len(order)
    columns = np.column_stack((values[order].T, np.full(values.shape[1], np.iinfo(np.int64).max)))
    kept, smaller = list[IntArray](), 0
    for size in _GROUP_SIZES:  # groups of about one size, padded with rows that dominate none
        batch, offsets = np.flatnonzero((sizes > smaller) & (sizes <= size)), np.arange(size)
        rows = np.where(offsets < sizes[batch, None], starts[batch, None] + offsets, count)
        kept.append(order[rows[~_dominated(columns[:, rows]) & (rows < count)]])
        smaller = size
    for group in np.flatnonzero(sizes > smaller):
        members = order[starts[group] : starts[group] + sizes[group]]
        kept.append(members[pareto_rows(values[members])])
    return np.sort(np.concatenate(kept))


def pairs_within(groups: IntArray) -> tuple[IntArray, IntArray]:
    """Indices of every two rows of the same group, the earlier row first."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    later = np.searchsorted(ordered, ordered, side="right") - np.arange(len(ordered)) - 1
    first = np.repeat(np.arange(len(ordered)), later)
    second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(later) - later, later)
    return order[first], order[second]


def _undominated_in_order(ordered: IntArray) -> IntArray:
    """Indices of the undominated of rows that are sorted.

    A row is only dominated by rows whose ranks in all columns add up to no more. In that order few rows dominate most
    others soon (Chomicki et al. 2003, "Skyline with presorting").
    """
    if len(ordered) <= _SMALL:
        earlier = _EARLIER[: len(ordered), : len(ordered)]
        return np.flatnonzero(~(_dominates(ordered.T, ordered.T) & earlier).any(axis=1))
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in ordered.T])
    ranks = ranks.astype(np.min_scalar_type(len(ordered)))  # small integers compare faster
    left = np.argsort(ranks.sum(axis=0, dtype=np.int64), kind="stable")
    columns, size, kept = np.ascontiguousarray(ranks[:, left]), _FIRST_BLOCK, list[IntArray]()
    while len(left):
        block = columns[:, :size]
        # What a dominated row dominates, the row that dominates it does too.
        alive = ~(_dominates(block, block) & np.tri(block.shape[1], k=-1, dtype=bool)).any(axis=1)
        kept.append(left[:size][alive])
        left, columns = left[size:], columns[:, size:]
        rest = ~_dominated_by(columns, np.ascontiguousarray(block[:, alive]))
        left, columns, size = left[rest], np.ascontiguousarray(columns[:, rest]), _BLOCK
    return np.sort(np.concatenate(kept))


def _dominated(columns: IntArray) -> BoolArray:
    """(..., rows): whether another row dominates each, or an earlier one equals it; columns first."""
    dominates = _dominates(columns, columns)
    equal = dominates & np.swapaxes(dominates, -1, -2)
    earlier = _EARLIER[: dominates.shape[-1], : dominates.shape[-1]]
    dominated: BoolArray = (dominates & (~equal | earlier)).any(axis=-1)
    return dominated


def _dominates(columns: NDArray[Any], others: NDArray[Any]) -> BoolArray:
    """(..., rows, others): whether each of the others equals or beats a row in every column; columns first."""
    dominates: BoolArray = others[0][..., None, :] <= columns[0][..., :, None]
    for column, other in zip(columns[1:], others[1:], strict=True):
        dominates &= other[..., None, :] <= column[..., :, None]
    return dominates


def _dominated_by(columns: NDArray[Any], front: NDArray[Any]) -> BoolArray:
    """(rows,): whether some row of a front dominates each, some rows at a time; columns first."""
    dominated = np.empty(columns.shape[1], dtype=bool)
    size = max(_PAIRS // max(front.shape[1], 1), 1)
    for begin in range(0, len(dominated), size):
        dominated[begin : begin + size] = _dominates(columns[:, begin : begin + size], front).any(axis=1)
    return dominated
