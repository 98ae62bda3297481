"""Which rows of a table no other row is at least as good as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_FIRST, _CHUNK, _PAIRS, _SMALL = 64, 256, 2**17, 96
_EARLIER = np.tri(_SMALL, k=-1, dtype=bool)


def pareto_rows(values: IntArray) -> IntArray:
    """Places of the rows that no other row equals or beats in every column (less is better).

    Of equal rows the first stays. The places come in lexicographic order of their rows.

    Args:
        values: (rows, columns) of whole numbers.
    """
    if len(values) <= 1:
        return np.arange(len(values))
    varying = values[:, (values != values[0]).any(axis=0)]
    if varying.shape[1] == 0:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort(varying.T[::-1])
    ordered = varying[order]
    if varying.shape[1] == 1:
        return order[:1]
    kept = _two_columns(ordered) if varying.shape[1] == 2 else _more_columns(ordered)
    return order[kept]


def pairs_within(groups: IntArray) -> tuple[IntArray, IntArray]:
    """Places of every two rows of the same group, (rows,), the one that comes first first."""
    order = np.argsort(groups, kind="stable")
    own = groups[order]
    ends = np.searchsorted(own, own, side="right")
    later = ends - np.arange(len(own)) - 1
    first = np.repeat(np.arange(len(own)), later)
    second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(later) - later, later)
    return order[first], order[second]


def undominated_rows(values: IntArray, pairs: tuple[IntArray, IntArray]) -> IntArray:
    """Places, ascending, of the rows that no row paired with them equals or beats in every column.

    Of equal rows the first stays.

    Args:
        values: (rows, columns) of whole numbers.
        pairs: of rows of one group (``pairs_within``).
    """
    kept = np.ones(len(values), dtype=bool)
    for begin in range(0, len(pairs[0]), _PAIRS):
        first, second = (places[begin : begin + _PAIRS] for places in pairs)
        more = values[second] - values[first]
        beats = (more >= 0).all(axis=1)
        kept[second[beats]] = False
        kept[first[(more <= 0).all(axis=1) & ~beats]] = False
    return np.flatnonzero(kept)


def _two_columns(ordered: IntArray) -> IntArray:
    """In lexicographic order a row of two columns stays where its second is below all before it."""
    second = ordered[:, 1]
    least = np.minimum.accumulate(second)
    return np.flatnonzero(np.concatenate(([True], second[1:] < least[:-1])))


def _more_columns(ordered: IntArray) -> IntArray:
    """Rows can only be beaten by rows whose places in all columns add up to no more.

    In that order few rows beat most others soon, which are then out of the way (Chomicki et al. 2003, "Skyline with
    presorting"; Bartolini et al. 2008 sort by sums as well). Places are compared instead of values: they are short.
    """
    if len(ordered) <= _SMALL:
        return np.flatnonzero(~(_beats(ordered.T, ordered.T) & _EARLIER[: len(ordered), : len(ordered)]).any(axis=1))
    ranks = _ranks(ordered)
    left = np.argsort(ranks.sum(axis=0, dtype=np.int64), kind="stable")
    columns, count = np.ascontiguousarray(ranks[:, left]), _FIRST
    kept: list[IntArray] = []
    while len(left):
        some = columns[:, :count]
        among = _beats(some, some) & np.tri(some.shape[1], k=-1, dtype=bool)
        # A row beaten by a row that is itself beaten is beaten by the latter's victor too.
        alive = ~among.any(axis=1)
        kept.append(left[:count][alive])
        left, columns = left[count:], columns[:, count:]
        open_rows = ~_beaten(columns, np.ascontiguousarray(some[:, alive]))
        left, columns, count = left[open_rows], np.ascontiguousarray(columns[:, open_rows]), _CHUNK
    return np.sort(np.concatenate(kept))


def _ranks(ordered: IntArray) -> NDArray[Any]:
    """Places of values in their column, equal ones alike: (columns, rows)."""
    ranks = np.empty(ordered.shape[::-1], dtype=np.uint16 if len(ordered) < 2**16 else np.int64)
    for number, column in enumerate(ordered.T):
        order = np.argsort(column, kind="stable")
        values = column[order]
        ranks[number, order] = np.cumsum(np.concatenate(([False], values[1:] != values[:-1])))
    return ranks


def _beats(columns: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of the rows (first) is equalled or beaten in every column by each of others (second)."""
    found: NDArray[np.bool_] = others[0] <= columns[0][:, None]
    own = np.empty_like(found)
    for column, other in zip(columns[1:], others[1:], strict=True):
        np.less_equal(other, column[:, None], out=own)
        found &= own
    return found


def _beaten(columns: NDArray[Any], front: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows some row of ``front`` equals or beats in every column."""
    beaten = np.empty(columns.shape[1], dtype=bool)
    some = max(_PAIRS // max(front.shape[1], 1), 1)
    for begin in range(0, len(beaten), some):
        beaten[begin : begin + some] = _beats(columns[:, begin : begin + some], front).any(axis=1)
    return beaten
