"""Which rows of a table no other row is at least as good as."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_CHUNK, _PAIRS = 256, 2**17


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
    """Rows can only be beaten by rows before them; the first column need not be compared."""
    rest = ordered[:, 1:]
    front = np.empty((0, rest.shape[1]), dtype=np.int64)
    kept: list[IntArray] = []
    for begin in range(0, len(rest), _CHUNK):
        places = np.arange(begin, min(begin + _CHUNK, len(rest)))
        places = places[~_beaten(rest[places], front)]
        chunk = rest[places]
        beats = np.tri(len(chunk), k=-1, dtype=bool)
        for column in chunk.T:
            beats &= column[None, :] <= column[:, None]
        # A row beaten by a row that is itself beaten is beaten by the latter's victor too.
        places = places[~beats.any(axis=1)]
        front = np.concatenate((front, rest[places]))
        kept.append(places)
    return np.concatenate(kept)


def _beaten(rows: IntArray, front: IntArray) -> NDArray[np.bool_]:
    """Which rows some row of ``front`` equals or beats in every column."""
    beaten = np.zeros(len(rows), dtype=bool)
    for begin in range(0, len(front), 4 * _CHUNK):
        some = front[begin : begin + 4 * _CHUNK]
        open_rows = np.flatnonzero(~beaten)
        if not len(open_rows):
            break
        better = np.ones((len(open_rows), len(some)), dtype=bool)
        for column in range(rows.shape[1]):
            better &= some[None, :, column] <= rows[open_rows, column][:, None]
        beaten[open_rows] = better.any(axis=1)
    return beaten
