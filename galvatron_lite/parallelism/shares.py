"""The shares of ranks along a dim: of vocabularies, channels, pixels and tokens. No torch here."""

from __future__ import annotations


def share(extent: int, degree: int, rank: int) -> tuple[int, int]:
    """Return (start, length) of a rank's share of ``extent`` items; the first ``extent % degree`` ranks have one
    more."""
    base, extra = divmod(extent, degree)
    return rank * base + min(rank, extra), base + (rank < extra)


Range = tuple[int, int]
"""Items [start, stop)."""


def mirrored(extent: int, degree: int, rank: int) -> tuple[Range, ...]:
    """Return a rank's ranges of tokens under context parallelism: an early and a late one.

    So all ranks have the same work under a causal mask (Megatron-Core's order). A sequence that does not divide into 2
    x ``degree`` ranges is split by ``share``.
    """
    piece, rest = divmod(extent, 2 * degree)
    if rest or degree == 1 or not piece:
        start, length = share(extent, degree, rank)
        return ((start, start + length),)
    late = 2 * degree - 1 - rank
    return (rank * piece, (rank + 1) * piece), (late * piece, (late + 1) * piece)


def part_of(pieces: tuple[Range, ...], start: int, stop: int) -> tuple[Range, ...]:
    """Select [start, stop) of the items that consecutive ranges contain, as ranges."""
    ranges, before = list[Range](), 0
    for first, last in pieces:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            ranges.append((first + low, first + high))
        before += last - first
    return tuple(ranges)
