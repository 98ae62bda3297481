"""How an extent is shared by ranks in order: the one rule for vocabularies, channels and pixels. No torch here."""

from __future__ import annotations


def share(extent: int, degree: int, rank: int) -> tuple[int, int]:
    """(start, length) of a rank's share of ``extent`` items; the first ``extent % degree`` ranks hold one more."""
    base, extra = divmod(extent, degree)
    return rank * base + min(rank, extra), base + (rank < extra)


Range = tuple[int, int]
"""Items [start, stop)."""


def mirrored(extent: int, degree: int, rank: int) -> tuple[Range, ...]:
    """The tokens of a rank that shares a sequence, in order: an early and a late piece, so that under a causal mask all
    ranks have the same work (Megatron-Core's order); one piece by ``share`` where 2 x ``degree`` pieces are not even.
    """
    piece, rest = divmod(extent, 2 * degree)
    if rest or degree == 1 or not piece:
        start, length = share(extent, degree, rank)
        return ((start, start + length),)
    late = 2 * degree - 1 - rank
    return (rank * piece, (rank + 1) * piece), (late * piece, (late + 1) * piece)


def part_of(pieces: tuple[Range, ...], start: int, stop: int) -> tuple[Range, ...]:
    """Of items that lie in these pieces one after the other, those from the one numbered ``start`` to ``stop``."""
    ranges, before = list[Range](), 0
    for first, last in pieces:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            ranges.append((first + low, first + high))
        before += last - first
    return tuple(ranges)
