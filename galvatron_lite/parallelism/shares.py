"""How an extent is shared by ranks in order: the one rule for vocabularies, channels and pixels. No torch here."""

from __future__ import annotations


def share(extent: int, degree: int, rank: int) -> tuple[int, int]:
    """(start, length) of a rank's share of ``extent`` items; the first ``extent % degree`` ranks hold one more."""
    base, extra = divmod(extent, degree)
    return rank * base + min(rank, extra), base + (rank < extra)
