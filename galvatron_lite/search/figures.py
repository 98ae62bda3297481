"""Prices of many strategies as whole numbers: picoseconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cost.layer import LayerCosts, LayerPricer, ParameterSharing
from galvatron_lite.cost.memory import late_gradients, resting, terms
from galvatron_lite.cost.stage import weight_seconds
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategies import Strategies

TICKS = 10**12
"""Search counts time in picoseconds, so that sums do not depend on their order."""
MEMORY = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")
"""Columns of ``Figures.memory``, see ``cost.memory.MemoryTerms``."""
REST, PREFIX, PEAK, MIDDLE, PREFETCHED, PENDING, UPDATED = range(len(MEMORY))


def ticks(seconds: float) -> int:
    """Seconds as whole picoseconds.

    Raises:
        InputError: more than 64 bits hold.
    """
    if not seconds * TICKS < 2**63:
        remedy = "A step of 100 days is beyond what is searched: look at the rates of the profile or the cluster."
        raise InputError("step", f"{seconds:.3g} s", remedy)
    return round(seconds * TICKS)


def all_ticks(seconds: FloatArray) -> IntArray:
    """``ticks`` of each."""
    return np.rint(seconds * TICKS).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StrategyFigures:
    """What S strategies cost a layer."""

    # forward, backward, weight, step: (S,) picoseconds a micro-batch (``weight``: of ``backward``, the gradients of
    # weights) and a step
    forward: IntArray
    backward: IntArray
    weight: IntArray
    step: IntArray
    kept: IntArray  # (S,) bytes
    memory: IntArray  # (S, 7) bytes with one micro-batch in flight, columns as ``MEMORY``
    # (S,) bytes by which prefix is less in the first backward, where that has all of several micro-batches in memory
    late: IntArray
    # (S, 2) bytes of states, parameters and gradients while other layers compute, and gathered beside them
    resting: IntArray

    def at(self, rows: IntArray) -> StrategyFigures:
        """Of some of the strategies."""
        return StrategyFigures(
            self.forward[rows],
            self.backward[rows],
            self.weight[rows],
            self.step[rows],
            self.kept[rows],
            self.memory[rows],
            self.late[rows],
            self.resting[rows],
        )


def figures_of(
    pricer: LayerPricer,
    kind: str,
    strategies: Strategies,
    microbatch: int,
    stages: int,
    sharing: ParameterSharing,
    single: bool,
) -> tuple[IntArray, StrategyFigures]:
    """Places of the strategies that the profile has figures for, and their figures.

    Args:
        pricer: of the profile.
        kind: key into the graph's kinds.
        strategies: to price.
        microbatch: samples of one micro-batch over the stage.
        stages: of the pipeline.
        sharing: of parameters with other layers.
        single: whether a step has one micro-batch.
    """
    costs = pricer.price_many(kind, strategies, microbatch, stages, sharing)
    valid = np.flatnonzero(costs.valid)
    return valid, _figures(costs, single).at(valid)


def _figures(costs: LayerCosts, single: bool) -> StrategyFigures:
    memory = terms(costs, 1, 1 if single else 2)
    return StrategyFigures(
        all_ticks(costs.forward_seconds),
        all_ticks(costs.backward_seconds),
        all_ticks(weight_seconds(costs.forward, costs.backward)),
        all_ticks(costs.step_seconds),
        costs.kept,
        np.column_stack([getattr(memory, name) for name in MEMORY]),
        np.zeros_like(costs.kept) if single else np.asarray(late_gradients(costs)),
        np.column_stack((resting(costs, 1 if single else 2), costs.gathered)),
    )
