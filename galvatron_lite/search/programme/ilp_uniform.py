"""The integer programme of a schedule that runs several stages on each group of devices (interleaved 1F1B, ZB-V).

Boundaries are settled (blocks are shared out evenly), and so is which blocks have one strategy: all, or those of two
sets that only recompute differently. All layers before the blocks have one, and all layers after them. What is left
is the path of ``ilp_model`` through all virtual stages, the time added up by groups, and memory as in
``cost.memory.group_memory``: while one stage of a group computes, the others hold what they hold at rest and
activations of micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.cost.layer import ALONE
from galvatron_lite.cost.memory import resting
from galvatron_lite.cost.sharing import sharing_of
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.programme.ilp_model import ShapeModel, Terms, added, row_of
from galvatron_lite.search.tables import Layout, StrategyTable


def first_blocks(graph: ModelGraph, strategies: Sequence[Strategy]) -> frozenset[int]:
    """The blocks of a plan that have the strategy of the first."""
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    return frozenset(place for place in blocks if strategies[place] == strategies[blocks[0]])


@dataclass(slots=True)
class UniformModel(ShapeModel):
    """``ShapeModel`` of a schedule with virtual stages; ``cuts`` must be given."""

    first: frozenset[int] = frozenset()  # blocks that have a strategy of their own

    def _places(self, group: int) -> list[int]:
        return [place for place, stage in self.layers_in_order if self._group(stage) == group]

    @property
    def layers_in_order(self) -> list[tuple[int, int]]:
        """(layer, its stage)."""
        return [(place, next(self._stages_of(place))) for place in range(self.count)]

    def _table(self, place: int, stage: int) -> StrategyTable:
        layer = self.problem.graph.layers[place]
        sharing = sharing_of(self.problem.graph, self._places(self._group(stage))).get(place, ALONE)
        return self.problem.tables[self._group(stage)].unpruned(layer.kind, layer.name, sharing)

    def _across(self, layout: Layout, others: Iterable[Layout]) -> list[Layout]:  # noqa: ARG002
        """Any: what arrives is redistributed."""
        return list(others)

    def _add_wire(self) -> None:
        """None is asked for."""

    def _add_agreements(self) -> None:
        """As for every shape; and one strategy for all layers of a role, or of two sets of them."""
        super(UniformModel, self)._add_agreements()
        layers = self.problem.graph.layers
        for role in Role:
            places = [place for place, layer in enumerate(layers) if layer.role is role]
            self._agree(places, lambda table, row: replace(table.strategies[row], recompute=Recompute.NONE))
            for inside in (True, False):
                same = [place for place in places if (place in self.first) is inside]
                self._agree(same, lambda table, row: table.strategies[row])

    def _add_memory(self, group: int) -> None:
        shape = self.problem.shape
        stages = [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        buffers = added(*((self._stages[stage].buffers, 1.0) for stage in stages))
        room = self.problem.budgets[group] - self._pricer(stages[0]).profile.cluster.device.context
        self._within([buffers, *(self._column(place, stage, 6) for place, stage in self._in(stages))], room)
        for own, counts in held:
            resting = [self._resting(other, counts[at]) for at, other in enumerate(stages) if at != own]
            self._add_moments(stages[own], max(counts[own], 1), [buffers, *resting], room)

    def _in(self, stages: list[int]) -> list[tuple[int, int]]:
        return [(place, stage) for place, stage in self.layers_in_order if stage in stages]

    def _resting(self, stage: int, count: int) -> Terms:
        total: Terms = {}
        shape = self.problem.shape
        for place, _ in self._in([stage]):
            table, numbers = self.layers[place, stage]
            layer = self.problem.graph.layers[place]
            sharing = sharing_of(self.problem.graph, self._places(self._group(stage))).get(place, ALONE)
            cost = self._pricer(stage).price_many(layer.kind, table.strategies, shape.microbatch, shape.stages, sharing)
            bytes_ = resting(cost, shape.microbatches) + count * cost.kept
            total |= row_of(numbers, np.asarray(bytes_ + (cost.gathered if count else 0)))
        return total
