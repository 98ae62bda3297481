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
    memory, time, local = {}, {}, {}
    for table in dict.fromkeys(tables):
        rest = (table.memory[:, 0] + (held - 1) * table.kept).astype(np.float64)
        memory[table] = rest + table.memory[:, 1]
        local[table] = rest + table.memory[:, 2:4].max(axis=1)
        time[table] = (count * (table.forward + table.backward) + table.step).astype(np.float64)
    spread = [{table: float(np.ptp(values[table])) for table in values} for values in (time, memory)]
    scale = sum(spread[0][t] for t in tables) / (sum(spread[1][t] for t in tables) + 1.0)
    lightest = _summed([float(memory[table].min()) for table in tables])
    bound = np.full((len(tables) + 1, len(tables) + 1), -np.inf)
    prices = np.concatenate(([0.0], _PRICES * scale))[:, None]
    least = {table: (time[table] + prices * memory[table]).min(axis=1) for table in time}
    final = {table: (time[table] + prices * local[table]).min(axis=1) for table in time}
    for number, price in enumerate(prices[:, 0]):
        total = _summed([least[table][number] for table in tables])
        # The last layer of a stage counts with its own peak instead of what it leaves to later ones.
        ends = np.concatenate(([0.0], total[:-1] + [final[table][number] for table in tables]))
        bound = np.maximum(bound, ends[None, :] - total[:, None] - price * room)
    bound -= micro[None, :] - micro[:, None]
    heaviest = np.concatenate(([0.0], lightest[:-1] + [float(local[table].min()) for table in tables]))
    too_much = heaviest[None, :] - lightest[:, None] > room
    empty = np.tri(len(tables) + 1, dtype=bool)
    return np.where(too_much | empty, np.inf, bound)


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
