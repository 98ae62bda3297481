"""Every best trade of memory for time that a number of equal layers offers: an exact sum of Pareto fronts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Front:
    """Ways to run some layers, none of which needs both more memory and more time than another."""

    memory: Ints  # MB of each, ascending
    seconds: Floats  # of each, descending
    counts: Ints  # (ways, strategies): how many layers take each strategy

    def best(self, room: int) -> int:
        """Place of the quickest way within so many MB; -1 where none is."""
        return int(np.searchsorted(self.memory, room, side="right")) - 1


def front_of(memory: Sequence[int], seconds: Sequence[float], layers: int, room: int) -> Front:
    """The front of so many equal layers."""
    single = _best(np.array(memory), np.array(seconds), np.eye(len(memory), dtype=np.int64), room)
    total = Front(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, len(memory)), np.int64))
    power = single
    while layers:
        if layers & 1:
            total = both(total, power, room)
        layers >>= 1
        power = both(power, power, room) if layers else power
    return total


def both(left: Front, right: Front, room: int) -> Front:
    """The front of the layers of two fronts together; their counts add up."""
    memory = (left.memory[:, None] + right.memory[None, :]).ravel()
    seconds = (left.seconds[:, None] + right.seconds[None, :]).ravel()
    kept = _order(memory, seconds, room)
    rows, columns = np.divmod(kept, max(len(right.memory), 1))
    return Front(memory[kept], seconds[kept], left.counts[rows] + right.counts[columns])


def beside(left: Front, right: Front, room: int) -> Front:
    """The front of two types of layer: counts of the one, then those of the other."""
    wide = left.counts.shape[1], right.counts.shape[1]
    first = Front(left.memory, left.seconds, np.pad(left.counts, ((0, 0), (0, wide[1]))))
    return both(first, Front(right.memory, right.seconds, np.pad(right.counts, ((0, 0), (wide[0], 0)))), room)


def _best(memory: Ints, seconds: Floats, counts: Ints, room: int) -> Front:
    kept = _order(memory, seconds, room)
    return Front(memory[kept], seconds[kept], counts[kept])


def _order(memory: Ints, seconds: Floats, room: int) -> Ints:
    """Places of what nothing beats, by memory; of equal ones the first."""
    order = np.lexsort((seconds, memory))
    order = order[memory[order] <= room]
    least = np.minimum.accumulate(seconds[order])
    quicker = np.ones(len(order), dtype=bool)
    quicker[1:] = seconds[order][1:] < least[:-1]
    return order[quicker]
