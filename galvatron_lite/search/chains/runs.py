"""Runs of equal layers, joined to segments of 2, 4, 8, ... layers that are put before the labels of a frontier.

Of the pairs of choices of two halves only those stay that some path within the limit may use, by the Lagrangian bound
of the layers before, and the labels behind with the layers between; and of those with the same layouts at their ends
only those that no other one equals or beats. The bound is the least over all places of the run, so that a segment holds
wherever in the run it lies. Runs are joined only where no moment inside them can be the worst (``is_plain``): then time
and rest + prefix are all that counts of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chains.bounds import Ahead, Bounds, LayerChoices, LinkedChain, priced
from galvatron_lite.search.chains.pareto import pareto_rows
from galvatron_lite.search.chains.segments import (
    BOTH,
    FIRST,
    HEAD,
    PARTS,
    SINGLE,
    TAIL,
    TIME,
    Segment,
    join,
)  # fmt: skip

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_CROWDED = 384
_FAR = 2**45


def run_before(line: LinkedChain, place: int) -> int:
    """How many equal layers lie before a place, with equal moves between them."""
    count = 1
    while (
        place - count > 0
        and line.kind[place - count - 1] == line.kind[place - 1]
        and (count == 1 or line.moves[place - count] is line.moves[place - 1])
    ):
        count += 1
    return count


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """What lies behind a run: the labels of a frontier, at one price of memory."""

    price: float  # picoseconds a byte
    number: int  # of that price among those of the bounds
    least: FloatArray  # (groups of the run's last layer,) least of time + price * memory, with the move
    ceiling: float  # of time + price * memory


def is_plain(
    line: LinkedChain,
    ahead: Ahead,
    place: int,
    count: int,
    floor: int,
    worst: IntArray,
    waiting: IntArray,
    rest: IntArray,
    updated: IntArray,
) -> bool:
    """Whether in a run of ``count`` layers before ``place`` only times and rest + prefix count, whatever is chosen.

    That is so if every moment of the run and of the layers before it is certainly less than the worst one of the labels
    behind, which earlier layers raise by as much or more. Optimizer moments up to ``floor`` do not matter either.
    """
    kind = line.at(place - 1)
    x = kind.segment.figures
    gathered, pending = kind.extremes[11], max(kind.extremes[12], line.at(place).extremes[12])
    if kind.extremes[6] < 0 or bool((waiting + gathered > worst).any()):
        return False
    least = int((worst - rest).min())
    inside = int((np.maximum(x[FIRST], x[SINGLE] + pending) - kind.prefix).max()) + gathered
    if max(inside, *ahead.local[place - count : place + 1]) > least:
        return False
    quiet = updated <= np.maximum(floor - ahead.updated_most[place], worst - ahead.updating[place])
    return bool(quiet.all())


def narrowed(
    line: LinkedChain, place: int, count: int, around: tuple[FloatArray, FloatArray], behind: Behind
) -> LinkedChain:
    """With only those choices in the run of ``count`` layers before ``place`` that a path within the limit may use."""
    kind = line.at(place - 1)
    ends = (around[0] + around[1]).min(axis=0)
    through = priced(kind, np.array([behind.price]))[0] + ends[kind.group]
    rows = np.flatnonzero(through <= behind.ceiling)
    if len(rows) == len(kind.group) or not len(rows):
        return line
    kinds = (*line.kinds, LayerChoices(kind.segment.take(rows)))
    numbers = [*line.kind[: place - count], *([len(line.kinds)] * count), *line.kind[place:]]
    return replace(line, kinds=kinds, kind=tuple(numbers))


def segments_of(
    line: LinkedChain, place: int, count: int, around: tuple[FloatArray, FloatArray], behind: Behind
) -> list[Segment]:
    """The run of ``count`` layers before ``place`` as segments, the last layers first."""
    before, after = around
    sizes = [line.at(place - 1).segment]
    while 2 * sizes[-1].layers <= count:
        half = sizes[-1]
        wider = _doubled(line, place, half, before, after, behind)
        if wider is None or wider.figures.shape[1] == 0:
            break
        sizes.append(wider)
    segments, left = [], count
    for size in sizes[:-1]:
        if left & size.layers:
            segments.append(size)
            left -= size.layers
    return segments + [sizes[-1]] * (left // sizes[-1].layers)


def equal_segments(line: LinkedChain, place: int, count: int) -> list[Segment]:
    """The layers of one part in the run of ``count`` layers before ``place`` as segments whose layers all have one
    strategy, the last layers first."""
    parts = line.parts[place - count : place]
    left = next((n for n, part in enumerate(reversed(parts)) if part != parts[-1]), count)
    size, segments = line.at(place - 1).segment, list[Segment]()
    move, rows = line.moves[place - 1], np.arange(size.figures.shape[1])
    while left:
        if left & 1:
            segments.append(size)
        left //= 2
        if left:
            x = size.figures
            joined = join(size, size, rows, rows, move[x[TAIL], x[HEAD]], line.by)
            size = replace(joined, strategy=size.strategy)
    return segments


def around_run(
    line: LinkedChain, bounds: Bounds, place: int, count: int, behind: Behind
) -> tuple[FloatArray, FloatArray]:
    """(count, groups): for each place of the run, bounds of what is before it and of what is behind it."""
    kind, move = line.at(place - 1), line.moves[place - 1] * float(line.by[0])
    least = kind.least(priced(kind, np.array([behind.price])), line.groups(place - 1))[0]
    after = [behind.least]
    for _ in range(count - 1):
        after.append((move + (least + after[-1])).min(axis=1))
    before = np.array([own[behind.number] for own in bounds.before[place - count : place]])
    return before, np.array(after[::-1])


def _doubled(
    line: LinkedChain, place: int, half: Segment, before: FloatArray, after: FloatArray, behind: Behind
) -> Segment | None:
    """Twice the segment; None where too much is left of it."""
    x, move, size = half.figures, line.moves[place - 1], 2 * half.layers
    around = (before[: len(before) - size + 1, :, None] + after[size - 1 :, None, :]).min(axis=0)
    own = x[TIME] + behind.price * x[BOTH]
    scaled = move * float(line.by[0])
    values = own[:, None] + own + scaled[x[TAIL]][:, x[HEAD]] + around[x[HEAD]][:, x[TAIL]]
    first, second = np.nonzero(values <= behind.ceiling)
    if len(first) > 64 * _CROWDED:
        return None
    joined = join(half, half, first, second, move[x[TAIL, first], x[HEAD, second]], line.by)
    joined = joined.take(_undominated(joined))
    return joined if joined.figures.shape[1] <= _CROWDED else None


def _undominated(segment: Segment) -> IntArray:
    """Places of the choices that no other one with the same layouts at the ends equals or beats."""
    x = segment.figures
    if x.shape[1] <= 1:
        return np.arange(x.shape[1])
    ends = x[HEAD] * (int(x[TAIL].max()) + 1) + x[TAIL]
    if len(x) == PARTS:
        order = np.lexsort((x[BOTH], x[TIME], ends))
        ordered = x[BOTH][order] - ends[order] * _FAR
        kept = np.concatenate(([True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]))
        return np.sort(order[kept])
    keys = np.column_stack((*x[PARTS:], x[BOTH]))
    order = np.argsort(ends, kind="stable")
    edges = np.flatnonzero(np.diff(ends[order])) + 1
    return np.sort(np.concatenate([own[pareto_rows(keys[own])] for own in np.split(order, edges)]))
