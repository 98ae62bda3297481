"""Along which of its dims ranks share a parameter. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def cut_dim(shape: Sequence[int], ranks: int, zero_stage: int) -> int:
    """The first dim; where that has less than a row for each rank (few stacked experts), the next that divides evenly.

    Args:
        shape: of the parameter.
        ranks: that share it.
        zero_stage: 1: what a rank updates has to lie together in memory; FSDP2 (2 and 3) copies what does not.
    """
    if not shape or shape[0] >= ranks:
        return 0
    for dim in range(1, len(shape)):
        if zero_stage == 1 and prod(shape[:dim]) > 1:
            break
        if shape[dim] and shape[dim] % ranks == 0:
            return dim
    return 0
