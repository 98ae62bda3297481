"""Who sends what to whom when the parts of a tensor change hands. No torch here.

Each rank holds boxes of a whole tensor before, and wants boxes of it after. What several ranks hold is sent by the one
that wants it, to itself, or else by its holders in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.runtime.layout import Box

Boxes = tuple[Box, ...]
"""What one rank holds of a tensor; boxes are equal or apart."""
Everyone = tuple[Boxes, ...]
"""The same of all ranks."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Items that go from one rank to another."""

    peer: int  # the other rank; this rank itself where they stay
    place: int  # number of this rank's box that they lie in
    box: Box  # which items of the whole tensor


@lru_cache(maxsize=4096)
def holders(everyone: Everyone) -> Mapping[Box, tuple[int, ...]]:
    """The ranks that hold each box, in order."""
    found: dict[Box, dict[int, None]] = {}
    for rank, boxes in enumerate(everyone):
        for box in boxes:
            found.setdefault(box, {})[rank] = None
    return {box: tuple(ranks) for box, ranks in found.items()}


@lru_cache(maxsize=4096)
def first_only(everyone: Everyone) -> Everyone:
    """The same where only the first rank that holds a box counts, and that once if parts of it share the tensor."""
    first = {box: ranks[0] for box, ranks in holders(everyone).items()}
    return tuple(
        tuple(box for box in dict.fromkeys(boxes) if first[box] == rank) for rank, boxes in enumerate(everyone)
    )


@lru_cache(maxsize=4096)
def sends(before: Everyone, after: Everyone, rank: int) -> tuple[Leg, ...]:
    """What a rank sends; for each receiver in the order in which ``receives`` lists it there."""
    known = holders(before)
    mine = {box: before[rank].index(box) for box in known if box in before[rank]}
    return tuple(
        Leg(receiver, place, met)
        for receiver, wanted in enumerate(after)
        for box, place in mine.items()
        if _sender(known[box], receiver) == rank
        for one in wanted
        if (met := box.meet(one)).items
    )


@lru_cache(maxsize=4096)
def receives(before: Everyone, after: Everyone, rank: int) -> tuple[Leg, ...]:
    """What a rank receives, by sender in the order in which ``sends`` lists it there."""
    return tuple(
        Leg(_sender(ranks, rank), place, met)
        for box, ranks in holders(before).items()
        for place, one in enumerate(after[rank])
        if (met := box.meet(one)).items
    )


def covers(everyone: Everyone, shape: tuple[int, ...]) -> bool:
    """Whether the ranks together hold all of a tensor."""
    whole = Box(tuple((0, extent) for extent in shape))
    return sum(box.items for box in holders(everyone)) == whole.items


def _sender(ranks: tuple[int, ...], receiver: int) -> int:
    return receiver if receiver in ranks else ranks[receiver % len(ranks)]
