"""The least memory of uniform plans, whose groups of devices run several stages: all of them at once, as arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce

import numpy as np

from galvatron_lite.arrays import FloatArray
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import Moments
from galvatron_lite.search.figures import PREFIX, REST, UPDATED
from galvatron_lite.search.infeasible.lean_stages import Lean
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.tables import StrategyTable
from galvatron_lite.search.uniform import Uniform, cuts_of


@dataclass(frozen=True, slots=True)
class LeanUniform:
    """The uniform plans of one shape."""

    problem: Problem  # the shape and its tables
    scales: tuple[float, ...]  # by group, what bytes are multiplied by to compare them

    def bound(self) -> float:
        """Scaled bytes that no plan needs less of, quickly: from the blocks of the first and the last group."""
        groups = (0, self.problem.shape.stages - 1)
        ways = [Uniform(self.problem, cuts) for cuts in self._cuts()]
        return min(max(self._least(way, group) * self.scales[group] for group in groups) for way in ways)

    def _cuts(self) -> list[tuple[int, ...]]:
        shape = self.problem.shape
        return cuts_of(self.problem.graph, shape.stages * shape.virtual)

    def _least(self, uniform: Uniform, group: int) -> float:
        shape, graph, tables = self.problem.shape, self.problem.graph, self.problem.tables[group]
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        own = [range(uniform.cuts[stage], uniform.cuts[stage + 1]) for stage in uniform.chunks.stages_of[group]]
        blocks = [[graph.layers[place] for place in inside if graph.layers[place].role is Role.BLOCK] for inside in own]
        alike = {(layer.kind, tables.fixed.pins_of(layer.name)): layer for chunk in blocks for layer in chunk}
        counts = [Counter((layer.kind, tables.fixed.pins_of(layer.name)) for layer in chunk) for chunk in blocks]
        total = np.zeros(len(held) + 1)
        for kind, layer in alike.items():
            table = tables.unpruned(layer.kind, layer.name)
            if not len(table):
                return float("inf")
            total += _moments(table, [chunk[kind] for chunk in counts], held)
        return float(total.max()) + tables.pricer.profile.cluster.device.context

    def best(self, limit: float) -> Lean | None:
        """The leanest plan of less than ``limit`` scaled bytes; None where there is none."""
        best = None
        for cuts in self._cuts():
            best = self._best(Uniform(self.problem, cuts, lean=True), limit) or best
            limit = limit if best is None else best.peak
        return best

    def _best(self, uniform: Uniform, limit: float) -> Lean | None:
        if not all(part.size for part in uniform.parts):
            return None
        sizes = [uniform.group_bytes(group) for group in range(self.problem.shape.stages)]
        peak = reduce(np.maximum, (size * scale for size, scale in zip(sizes, self.scales, strict=True)))
        full = np.broadcast_to(peak, [part.size for part in uniform.parts])
        found = np.where(uniform.agreeing(), full, np.inf)
        place = int(np.argmin(found))
        if not found.flat[place] < limit:
            return None
        chosen = [int(index) for index in np.unravel_index(place, found.shape)]
        peaks = [int(np.broadcast_to(size, found.shape)[tuple(chosen)]) for size in sizes]
        return Lean(
            round(float(found.flat[place])), self.problem, uniform.cuts, tuple(uniform.strategies(chosen)), tuple(peaks)
        )


def _moments(table: StrategyTable, counts: list[int], held: Moments) -> FloatArray:
    """Bytes that blocks of one kind need at the least while the optimizer runs and while each chunk computes.

    Args:
        table: of the kind.
        counts: how many of them each chunk has.
        held: chunks that compute, and micro-batches of every chunk in flight then.
    """
    own, memory = table.figures, table.figures.memory
    least = [float(sum(counts) * memory[:, UPDATED].min())]
    for chunk, flying in held:
        size = np.zeros(len(table))
        for other, (count, waiting) in enumerate(zip(counts, flying, strict=True)):
            if other == chunk:
                size += count * (memory[:, REST] + memory[:, PREFIX] + (max(waiting, 1) - 1) * own.kept)
            else:
                size += count * (own.resting[:, 0] + waiting * own.kept + (waiting > 0) * own.resting[:, 1])
        least.append(float(size.min()))
    return np.array(least)
