"""Which blocks of scores a rank of a ring computes: its queries with the keys of one rank. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from galvatron_lite.parallelism.shares import Range

Pieces = tuple[Range, ...]


class VisibleKeys(Enum):
    """Which keys the queries of a block see."""

    ALL = "all"
    BEFORE = "before"
    """As many queries as keys, at the same places: each sees those up to its own."""
    PLACES = "places"
    """Each sees those whose places are not behind its own."""


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """One block."""

    rows: Range  # of the rank's own queries, as it holds them
    columns: Range  # of the keys, as their rank holds them
    seen: VisibleKeys  # which of these the queries see


def tasks(queries: Pieces, keys: Pieces, causal: bool) -> tuple[AttentionTask, ...]:
    """The blocks of queries and keys that lie in these pieces of their sequences; those nobody sees are left out.

    Where both sides hold an early and a late piece (``shares.mirrored``), the block of other ranks is always one, of
    half the scores: all queries with the early keys of a rank before, the late queries with all keys of a rank behind.
    """
    rows, columns = _size(queries), _size(keys)
    if not rows or not columns:
        return ()
    if not causal:
        return (AttentionTask((0, rows), (0, columns), VisibleKeys.ALL),)
    if queries == keys:
        return (AttentionTask((0, rows), (0, columns), VisibleKeys.BEFORE),)
    return tuple(_together(list(_each(queries, keys))))


def _each(queries: Pieces, keys: Pieces) -> Iterator[AttentionTask]:
    """Block by block of pieces; what is seen wholly comes first, as keys are in order."""
    for query, rows in _held(queries):
        whole = 0
        for key, columns in _held(keys):
            if key[1] <= query[0] + 1:
                whole = columns[1]
            elif key[0] < query[1]:
                yield AttentionTask(rows, columns, VisibleKeys.PLACES)
        if whole:
            yield AttentionTask(rows, (0, whole), VisibleKeys.ALL)


def _together(tasks: list[AttentionTask]) -> Iterator[AttentionTask]:
    """Blocks of neighbouring queries with the same keys as one."""
    yield from (task for task in tasks if task.seen is VisibleKeys.PLACES)
    plain = [task for task in tasks if task.seen is VisibleKeys.ALL]
    for columns, several in groupby(plain, key=lambda task: task.columns):
        same = list(several)
        yield AttentionTask((same[0].rows[0], same[-1].rows[1]), columns, VisibleKeys.ALL)


def _held(pieces: Pieces) -> Iterator[tuple[Range, Range]]:
    """Pieces, and where they lie in what a rank holds."""
    before = 0
    for start, stop in pieces:
        if stop > start:
            yield (start, stop), (before, before + stop - start)
        before += stop - start


def _size(pieces: Pieces) -> int:
    return sum(stop - start for start, stop in pieces)
