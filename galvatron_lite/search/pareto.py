"""Rows of a table that no other row equals or beats."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.arrays import BoolArray, IntArray

_FIRST, _CHUNK, _PAIRS, _SMALL = 64, 256, 2**17, 96
_EARLIER = np.tri(_SMALL, k=-1, dtype=bool)


def pareto_rows(values: IntArray) -> IntArray:
    """Places of the rows that no other row equals or beats in every column (less is better), in lexicographic order.

    Of equal rows the first stays.
    """
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
    return order[_more_columns(ordered)]


def pareto_within(values: IntArray, groups: IntArray) -> IntArray:
    """Places, ascending, of the rows that no row of their group equals or beats in every column.

    Of equal rows the first stays.
    """
    if len(values) <= _SMALL:
        beats = _beats(values.T, values.T) & (groups == groups[:, None])
        equal = beats & beats.T
        return np.flatnonzero(~(beats & (~equal | _EARLIER[: len(values), : len(values)])).any(axis=1))
    order = np.argsort(groups, kind="stable")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    return np.sort(np.concatenate([rows[pareto_rows(values[rows])] for rows in np.split(order, edges)]))


def pairs_within(groups: IntArray) -> tuple[IntArray, IntArray]:
    """Places of every two rows of the same group, the earlier row first."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    later = np.searchsorted(ordered, ordered, side="right") - np.arange(len(ordered)) - 1
    first = np.repeat(np.arange(len(ordered)), later)
    second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(later) - later, later)
    return order[first], order[second]


def _more_columns(ordered: IntArray) -> IntArray:
    """Rows can only be beaten by rows whose ranks in all columns add up to no more.

    In that order few rows beat most others soon (Chomicki et al. 2003, "Skyline with presorting").
    """
    if len(ordered) <= _SMALL:
        return np.flatnonzero(~(_beats(ordered.T, ordered.T) & _EARLIER[: len(ordered), : len(ordered)]).any(axis=1))
    ranks = _ranks(ordered)
    left = np.argsort(ranks.sum(axis=0, dtype=np.int64), kind="stable")
    columns, count = np.ascontiguousarray(ranks[:, left]), _FIRST
    kept: list[IntArray] = []
    while len(left):
        some = columns[:, :count]
        # A row beaten by a row that is itself beaten is beaten by the latter's victor too.
        alive = ~(_beats(some, some) & np.tri(some.shape[1], k=-1, dtype=bool)).any(axis=1)
        kept.append(left[:count][alive])
        left, columns = left[count:], columns[:, count:]
        rest = ~_beaten(columns, np.ascontiguousarray(some[:, alive]))
        left, columns, count = left[rest], np.ascontiguousarray(columns[:, rest]), _CHUNK
    return np.sort(np.concatenate(kept))


def _ranks(ordered: IntArray) -> NDArray[Any]:
    """(columns, rows): ranks of values in their column; small integers compare faster."""
    ranks = np.empty(ordered.shape[::-1], dtype=np.uint16 if len(ordered) < 2**16 else np.int64)
    for number, column in enumerate(ordered.T):
        order = np.argsort(column, kind="stable")
        values = column[order]
        ranks[number, order] = np.cumsum(np.concatenate(([False], values[1:] != values[:-1])))
    return ranks


def _beats(columns: NDArray[Any], others: NDArray[Any]) -> BoolArray:
    """(rows, others): whether each of the others equals or beats a row in every column."""
    found: BoolArray = others[0] <= columns[0][:, None]
    for column, other in zip(columns[1:], others[1:], strict=True):
        found &= other <= column[:, None]
    return found


def _beaten(columns: NDArray[Any], front: NDArray[Any]) -> BoolArray:
    beaten = np.empty(columns.shape[1], dtype=bool)
    some = max(_PAIRS // max(front.shape[1], 1), 1)
    for begin in range(0, len(beaten), some):
        beaten[begin : begin + some] = _beats(columns[:, begin : begin + some], front).any(axis=1)
    return beaten
