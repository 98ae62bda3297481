"""Prices of many strategies as whole numbers: picoseconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import LayerCost, LayerPricer, Sharing
from galvatron_lite.cost.memory import terms
from galvatron_lite.cost.stage import weight_seconds
from galvatron_lite.parallelism.base import Strategy

IntArray = NDArray[np.int64]
TICKS = 10**12
"""Search counts time in picoseconds, so that sums do not depend on their order."""
MEMORY = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")
"""Columns of ``Figures.memory``, see ``cost.memory.MemoryTerms``."""


def ticks(seconds: float) -> int:
    """Seconds as whole picoseconds."""
    return round(seconds * TICKS)


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What S strategies cost a layer.

    Attributes:
        forward, backward, weight, step: (S,) picoseconds a micro-batch (``weight``: of ``backward``, the gradients of
            weights) and a step.
        kept: (S,) bytes.
        memory: (S, 7) bytes with one micro-batch in flight, columns as ``MEMORY``.
    """

    forward: IntArray
    backward: IntArray
    weight: IntArray
    step: IntArray
    kept: IntArray
    memory: IntArray

    def at(self, rows: IntArray) -> Figures:
        """Of some of the strategies."""
        return Figures(
            self.forward[rows],
            self.backward[rows],
            self.weight[rows],
            self.step[rows],
            self.kept[rows],
            self.memory[rows],
        )


def figures_of(
    pricer: LayerPricer,
    kind: str,
    strategies: Sequence[Strategy],
    microbatch: int,
    stages: int,
    sharing: Sharing,
    single: bool,
) -> tuple[IntArray, Figures]:
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
    priced = [pricer.price(kind, strategy, microbatch, stages, sharing) for strategy in strategies]
    valid = np.array([place for place, cost in enumerate(priced) if cost is not None], dtype=np.int64)
    return valid, _figures([cost for cost in priced if cost is not None], single)


def _figures(costs: Sequence[LayerCost], single: bool) -> Figures:
    memory = [terms(cost, 1, 1 if single else 2) for cost in costs]
    columns = [[getattr(own, name) for name in MEMORY] for own in memory]
    return Figures(
        np.array([ticks(cost.forward_seconds) for cost in costs], dtype=np.int64),
        np.array([ticks(cost.backward_seconds) for cost in costs], dtype=np.int64),
        np.array([ticks(weight_seconds(cost.forward, cost.backward)) for cost in costs], dtype=np.int64),
        np.array([ticks(cost.step_seconds) for cost in costs], dtype=np.int64),
        np.array([cost.kept for cost in costs], dtype=np.int64),
        np.array(columns, dtype=np.int64).reshape(len(costs), len(MEMORY)),
    )
