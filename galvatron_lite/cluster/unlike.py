"""Links among devices of several types: of each level the slower of the types' own. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from galvatron_lite.cluster.cluster import Level
from galvatron_lite.errors import FileFormatError


def check_sizes(types: Sequence[Sequence[Level]], field: str) -> None:
    """Refuse types of devices whose nodes are not of one size: ranks are laid out in equal levels.

    Raises:
        FileFormatError: names the sizes.
    """
    sizes = [[level.size for level in levels] for levels in types]
    if any(own != sizes[0] for own in sizes):
        raise FileFormatError(
            f"{field}, groups.levels", sizes, "Give all types equally many levels with the same numbers of members."
        )


def slower_levels(types: Sequence[Sequence[Level]]) -> tuple[Level, ...]:
    """What counts among devices of all types: ``slower`` of each level."""
    return tuple(slower(levels) for levels in zip(*types, strict=True))


def slower(levels: Sequence[Level]) -> Level:
    """One level for members joined by unlike links: a message goes through the sender's and the receiver's.

    The least bandwidth counts, for a whole member and for one of its lanes alone; of all else the worst.
    """
    worst = min(levels, key=lambda level: level.bandwidth * level.efficiency)
    if all(level == worst for level in levels):
        return worst
    reached = worst.bandwidth * worst.efficiency
    lane = min(level.bandwidth * level.efficiency / level.lanes for level in levels)
    return replace(
        worst,
        latency=max(level.latency for level in levels),
        contention=max(level.contention for level in levels),
        half_size=max(level.half_size for level in levels),
        start=max(level.start for level in levels),
        lanes=max(worst.lanes, ceil(reached / lane * (1 - 1e-9))),
    )
