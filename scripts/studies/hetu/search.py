"""Our search over Hetu-Galvatron's own space, by its formulas, ours, or a mixture of both.

Its space: stages of equally many layers, micro-batches that divide the batch, degrees in powers of two, a strategy for
each layer, one for embedding and head. For one pipeline degree, number of micro-batches and edge strategy, stages need
only agree on those, so each takes its quickest way in the memory that is left: what its formulas charge for layers
depends on how many take each strategy alone (``front_of``), not on which. Each stage is told to make

    m c + weight (r - c)

small, where c and r are a micro-batch without and with the sum of gradients: weight 1 is the sum over a step, 0 leaves
gradients out. Its own engine minimises r, gradients in every micro-batch, and so misses the best plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.peers.hetu.model import Engine, HetuHardware, HetuModel, block_name
from galvatron_lite.peers.hetu.plan import DataType, HetuPlan, HetuStrategy, our_strategy
from studies.hetu.formulas import buffer_mb, edges_mb, layer_mb, layer_ms, price

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from galvatron_lite.cost.layer import LayerPricer
    from studies.hetu.recorded import RecordedSearch


WEIGHTS = (1.0, 0.0)
MOST = (0, 1, 2, 4, 8)
"""The most ranks that share a sample, on which the buffer of tensor groups depends; 0: Ulysses alone, without one."""


@dataclass(slots=True)
class PeerSearch:
    """The space of one recorded search."""

    asked: RecordedSearch  # model, cluster, batch, budget and what is left out
    model: HetuModel  # its profiles
    hardware: HetuHardware
    pricer: LayerPricer  # of our profile of the same; for mixtures
    _known: dict[tuple[object, ...], Front] = field(default_factory=dict)

    def plans(self, room: int, share: float = 1.0) -> Iterator[HetuPlan]:
        """The best plan of each pipeline degree, number of micro-batches and edge strategy that fits."""
        for stages, most in product(self._pipelines(), MOST):
            if most * stages > self.asked.devices:
                continue
            for chunks in self._chunks(stages):
                for edges in self._strategies(stages, chunks, most, edges=True):
                    for weight in WEIGHTS:
                        plan = self._plan(stages, chunks, most, edges, room, share, weight)
                        if plan is not None:
                            yield plan

    def seconds(self, plan: HetuPlan) -> float:
        """A step of a plan by its formulas."""
        return price(self.model, self.hardware, plan, self.asked.rules).seconds

    def best(self, room: int) -> tuple[HetuPlan, float] | None:
        """The quickest plan by its formulas, and its seconds; None where none fits."""
        priced = [(self.seconds(plan), plan) for plan in self.plans(room)]
        if not priced:
            return None
        seconds, plan = min(priced, key=lambda pair: pair[0])
        return plan, seconds

    def _pipelines(self) -> Iterator[int]:
        stages = 1
        while stages <= min(self.asked.devices, self.model.layers, 8) and (stages == 1 or "pp" not in self.asked.off):
            if self.model.layers % stages == 0 and (stages == 1 or len(self.model.types) == 1):
                yield stages
            stages *= 2

    def _chunks(self, stages: int) -> Sequence[int]:
        given = (self.asked.chunks,) if self.asked.chunks else divisors(self.asked.batch)
        return [chunks for chunks in given if chunks >= stages]

    def _strategies(self, stages: int, chunks: int, most: int, *, edges: bool = False) -> list[HetuStrategy]:
        """What a layer, or embedding and head, may do on a stage; ``most``: see ``MOST``."""
        devices, off = self.asked.devices // stages, self.asked.off
        result, size = [], 1
        while size <= min(devices, most or MOST[-1]):
            data = devices // size
            for tensor, ulysses in ((size, 1), (1, size))[(size == 1 or not most) :]:
                if data <= self.asked.batch // chunks and self._offers(tensor, ulysses):
                    sharded = (data > 1 or (edges and self.asked.rules.engine is Engine.V240)) and "fsdp" not in off
                    kinds = (DataType.ZERO2, DataType.ZERO3) if sharded else (DataType.ZERO2,)
                    again = (False,) if edges or "ckpt" in off else (False, True)
                    result += [HetuStrategy(tensor, ulysses, data, kind, c) for kind in kinds for c in again]
            size *= 2
        return result

    def _offers(self, tensor: int, ulysses: int) -> bool:
        off = self.asked.off
        profiled = all(max(tensor, ulysses) in kind.activation for kind in self.model.types)
        wide = tensor == 1 or ("tp" not in off and tensor <= self.asked.most_tensor)
        heads = ulysses == 1 or ("sp" not in off and self.asked.tables and ulysses in self.hardware.exchange)
        return profiled and wide and heads

    def _plan(
        self, stages: int, chunks: int, most: int, edges: HetuStrategy, room: int, share: float, weight: float
    ) -> HetuPlan | None:
        each = self.model.layers // stages
        own = self._strategies(stages, chunks, most)
        empty = HetuPlan(
            self.asked.devices, stages, self.asked.batch, chunks, (each,) * stages, (edges,) * self.model.layers, edges
        )
        layers: list[HetuStrategy] = []
        for stage in range(stages):
            left = room - ceil(edges_mb(self.model, empty, stage, self.asked.rules))
            front = self._front(empty, own, most, stage, room, share, weight)
            place = front.best(left - int(buffer_mb(self.model, empty, most) if most else 0))
            if place < 0:
                return None
            layers += self._arranged(front, place, own)
        return HetuPlan(empty.devices, stages, empty.batch, chunks, empty.division, tuple(layers), edges)

    def _front(
        self,
        empty: HetuPlan,
        own: Sequence[HetuStrategy],
        most: int,
        stage: int,
        room: int,
        share: float,
        weight: float,
    ) -> Front:
        """Ways to run the layers of a stage; their counts are by layer type and strategy."""
        key = (empty.pipeline, empty.chunks, most, stage, room, share, weight)
        if key not in self._known:
            fronts = [self._type_front(empty, own, place, stage, room, share, weight) for place in self._places()]
            total = fronts[0]
            for other in fronts[1:]:
                total = beside(total, other, room)
            self._known[key] = total
        return self._known[key]

    def _places(self) -> list[int]:
        """The first layer of each type."""
        return [sum(kind.layers for kind in self.model.types[:place]) for place in range(len(self.model.types))]

    def _type_front(
        self,
        empty: HetuPlan,
        own: Sequence[HetuStrategy],
        place: int,
        stage: int,
        room: int,
        share: float,
        weight: float,
    ) -> Front:
        rules, memory, seconds = self.asked.rules, [], []
        for strategy in own:
            plan = _all(empty, strategy)
            memory.append(ceil(layer_mb(self.model, plan, place, stage, rules.engine, rules.async_reduce)))
            seconds.append(self._layer_seconds(plan, place, share, weight))
        return front_of(memory, seconds, self.model.type_of(place).layers // empty.pipeline, room)

    def _layer_seconds(self, plan: HetuPlan, place: int, share: float, weight: float) -> float:
        rules = self.asked.rules
        summed, plain = layer_ms(self.model, self.hardware, plan, place, rules.engine, rules.tables)
        theirs = (plan.chunks * plain + weight * (summed - plain)) / 1000
        if share == 1.0:
            return theirs
        strategy = our_strategy(plan.layers[place], self.model.sequence_parallel, 1 if rules.async_reduce else 2)
        kind = block_name(self.model, self.model.types.index(self.model.type_of(place)))
        cost = self.pricer.price(kind, strategy, plan.batch // plan.chunks, plan.pipeline)
        if cost is None:
            return theirs
        ours: float = plan.chunks * (cost.forward_seconds + cost.backward_seconds) + weight * cost.step_seconds
        return share * theirs + (1.0 - share) * ours

    def _arranged(self, front: Front, place: int, own: Sequence[HetuStrategy]) -> list[HetuStrategy]:
        """The layers of a stage, equal ones side by side."""
        counts = front.counts[place].reshape(-1, len(own))
        return [one for row in counts for one, count in zip(own, row, strict=True) for _ in range(int(count))]


def _all(plan: HetuPlan, strategy: HetuStrategy) -> HetuPlan:
    """The plan with one strategy for all layers."""
    return HetuPlan(
        plan.devices, plan.pipeline, plan.batch, plan.chunks, plan.division, (strategy,) * len(plan.layers), plan.edges
    )


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
