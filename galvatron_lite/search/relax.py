"""Lower bounds on the time of a whole plan, without choosing strategies: what prunes shapes and stage boundaries.

For a stage that holds layers i..j-1 with k micro-batches in flight, and any price of memory lambda >= 0,

    theta(i, j) >= sum_l min_s (theta_l(s) + lambda y_l(s)) - lambda M

bounds the time theta = m c + step that the stage needs alone (c: one micro-batch, y: rest + prefix, M: bytes),
because every feasible choice has sum y <= M; for the last layer y is its own peak (rest + w). The step time of a plan
is at least, for every stage s, theta_s + sum of c over the other stages. Moves between layouts are left out (they cost
no less than nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.problem import Problem
from galvatron_lite.search.tables import Table

FloatArray = NDArray[np.float64]
_PRICES = 2.0 ** np.arange(-12, 13, 2)
_TINY = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """Bounds of one shape of plan.

    Attributes:
        micro: (L + 1,): least time of one micro-batch of the layers before each place.
        excess: per stage (L + 1, L + 1): bound on theta of layers i..j-1 less their least time of one micro-batch;
            infinite where nothing fits or the range is empty.
        ahead: per stage (L + 1,): the least greatest excess of the stages up to it when it ends at j.
        behind: per stage (L + 1,): the same of the stages from it on when it starts at i.
    """

    micro: FloatArray
    excess: tuple[FloatArray, ...]
    ahead: tuple[FloatArray, ...]
    behind: tuple[FloatArray, ...]

    @property
    def least(self) -> float:
        """Least time of one micro-batch over all layers."""
        return float(self.micro[-1])

    def least_after(self, place: int) -> float:
        """Least time of one micro-batch of the layers from a place on, rounded down."""
        return float(self.micro[-1] - self.micro[place]) * (1 - _TINY) - 1.0

    @property
    def bound(self) -> float:
        """A time that no plan of the shape beats."""
        return (self.least + float(self.ahead[-1][-1])) * (1 - _TINY)

    def through(self, stage: int, start: int, stop: int) -> float:
        """A time that no plan with these layers in a stage beats."""
        before = self.ahead[stage - 1][start] if stage else (0.0 if start == 0 else np.inf)
        after = self.behind[stage + 1][stop] if stage + 1 < len(self.excess) else 0.0
        worst = max(float(before), float(self.excess[stage][start, stop]), float(after))
        return (self.least + worst) * (1 - _TINY)

    def cuts(self) -> list[int]:
        """The boundaries of a partition that reaches the bound: (0, ..., L)."""
        stop, cuts = len(self.ahead[-1]) - 1, [len(self.ahead[-1]) - 1]
        for stage in range(len(self.excess) - 1, 0, -1):
            worst = np.maximum(self.ahead[stage - 1], self.excess[stage][:, stop])
            stop = int(np.argmin(worst))
            cuts.append(stop)
        return [0, *reversed(cuts)]


def relaxed(problem: Problem, tables: list[Table]) -> Relaxed | None:
    """Bounds of a problem; None where they show that nothing fits.

    Args:
        problem: gives the shape, the budget and the micro-batches in flight.
        tables: of every layer of the model, the widest that any stage may use.
    """
    if any(not table.strategies for table in tables):
        return None
    count, stages = problem.shape.microbatches, problem.shape.stages
    room = float(problem.budget - problem.tables.pricer.profile.cluster.device.context)
    micro = _summed([float((table.forward + table.backward).min()) for table in tables])
    excess: dict[int, FloatArray] = {}
    for stage in range(stages):
        held = problem.held(stage)
        if held not in excess:
            excess[held] = _excess(tables, held, count, room, micro)
    every = tuple(excess[problem.held(stage)] for stage in range(stages))
    ahead, behind = _ahead(every), _behind(every)
    if not np.isfinite(ahead[-1][-1]):
        return None
    return Relaxed(micro, every, ahead, behind)


def _excess(tables: list[Table], held: int, count: int, room: float, micro: FloatArray) -> FloatArray:
    kinds = list(dict.fromkeys(tables))
    which = np.array([kinds.index(table) for table in tables])
    rest = [(table.memory[:, 0] + (held - 1) * table.kept).astype(np.float64) for table in kinds]
    memory = [own + table.memory[:, 1] for own, table in zip(rest, kinds, strict=True)]
    local = [own + table.memory[:, 2:4].max(axis=1) for own, table in zip(rest, kinds, strict=True)]
    time = [(count * (table.forward + table.backward) + table.step).astype(np.float64) for table in kinds]
    prices = np.concatenate(([0.0], _PRICES * _spread(time, which) / (_spread(memory, which) + 1.0)))
    # The last layer of a stage counts with its own peak instead of what it leaves to later ones.
    total, ends = _ranges(_least(time, memory, prices)[which], _least(time, local, prices)[which])
    bound = np.full((len(tables) + 1, len(tables) + 1), -np.inf)
    for number, price in enumerate(prices):
        np.maximum(bound, ends[:, number][None, :] - (total[:, number] + price * room)[:, None], out=bound)
    bound -= micro[None, :] - micro[:, None]
    lightest, heaviest = _ranges(*(np.array([[values.min()] for values in own])[which] for own in (memory, local)))
    too_much = heaviest.T - lightest > room
    return np.where(too_much | np.tri(len(tables) + 1, dtype=bool), np.inf, bound)


def _spread(values: list[FloatArray], which: NDArray[np.int64]) -> float:
    """How far the choices of all layers together lie apart."""
    return float(np.array([np.ptp(own) for own in values])[which].sum())


def _least(time: list[FloatArray], memory: list[FloatArray], prices: FloatArray) -> FloatArray:
    """(kinds, prices): least time + price * memory."""
    return np.array([(own + prices[:, None] * size).min(axis=1) for own, size in zip(time, memory, strict=True)])


def _ranges(values: FloatArray, last: FloatArray) -> tuple[FloatArray, FloatArray]:
    """From (L, columns): sums of the layers before each place, and the same with ``last`` for the last of them."""
    nothing = np.zeros((1, values.shape[1]))
    total = np.concatenate((nothing, np.cumsum(values, axis=0)))
    return total, np.concatenate((nothing, total[:-1] + last))


def _summed(values: list[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _ahead(excess: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
    best = [excess[0][0]]
    for stage in excess[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    return tuple(best)


def _behind(excess: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
    best = [excess[-1][:, -1]]
    for stage in reversed(excess[:-1]):
        best.append(np.maximum(best[-1][None, :], stage).min(axis=1))
    return tuple(reversed(best))
