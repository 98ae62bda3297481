"""Stretches of time, and how they lie on one another. No torch here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Stretch = tuple[float, float]


class Cover:
    """The union of some stretches: disjoint and in order.

    Args:
        stretches: (start, end), in any order.
    """

    __slots__ = ("_ends", "_starts", "_sums")

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        merged: list[list[float]] = []
        for start, end in sorted(stretches):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts, self._ends = [one[0] for one in merged], [one[1] for one in merged]
        self._sums = [0.0, *accumulate(end - start for start, end in merged)]

    @property
    def stretches(self) -> Sequence[Stretch]:
        """Of the union."""
        return list(zip(self._starts, self._ends, strict=True))

    def inside(self, start: float, end: float) -> float:
        """How much of a stretch is covered."""
        return max(self._until(end) - self._until(start), 0.0)

    def minus(self, other: Cover) -> Cover:
        """What of this is not covered by another one."""
        left: list[Stretch] = []
        for start, end in self.stretches:
            place = start
            first = bisect_right(other._ends, start)
            for hole, back in zip(other._starts[first:], other._ends[first:], strict=True):
                if hole >= end:
                    break
                if hole > place:
                    left.append((place, hole))
                place = max(place, back)
            if place < end:
                left.append((place, end))
        return Cover(left)

    def _until(self, moment: float) -> float:
        """How much lies before a moment."""
        place = bisect_left(self._starts, moment)
        if place == 0:
            return 0.0
        return self._sums[place] - max(self._ends[place - 1] - moment, 0.0)
