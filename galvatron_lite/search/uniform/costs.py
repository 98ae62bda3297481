"""Time and memory of many uniform plans at once.

A plan chooses one option for each part of the model: the layers before the blocks, the blocks, and those after them.
Figures of all combinations are (E, B, H) arrays, one axis a part, of length 1 where a figure does not depend on it.
Time is the closed form of ``cost.schedule`` over groups of devices, memory that of ``cost.memory.group_memory``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cost.layer import ALONE, ParameterSharing
from galvatron_lite.cost.stage import sharing_of, tied_groups, transfer_seconds
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, chunks_in_flight, stride_between
from galvatron_lite.parallelism.pipeline.schedule import Moments, group_of, most_of, stage_at
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.chain.chain import worst_moment
from galvatron_lite.search.chain.pareto import pareto_rows
from galvatron_lite.search.problem import Problem, parts_of
from galvatron_lite.search.tables import REST, UPDATED, StrategyFigures, StrategyTable, ticks

Part = dict[int, StrategyTable]
"""By layer of a part of the model, its figures under each option of the part; empty where the part has no layers."""
Parts = Sequence[Part]
Run = tuple[int, StrategyTable, int]
"""Neighbouring layers with one table: axis of their part, the table, and how many they are."""
_SHARES = 8
"""Equal shares that the blocks of a group are divided into, where it has as many."""
_ZERO = np.zeros((1, 1, 1), dtype=np.int64)


class StageSend(NamedTuple):
    """What one stage sends to the next."""

    axis: int  # part of the layer that sends: 0 before the blocks, 1 a block
    sender: int  # that layer; all layers of a part have one strategy, so that any of them tells what is sent
    size: int  # bytes a sample
    left: int  # groups of devices on both sides of the boundary
    right: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Where the layers of a model are, by group of devices and by chunk of a group."""

    stages_of: tuple[tuple[int, ...], ...]  # by group: its stages
    layers_of: tuple[frozenset[int], ...]  # by group: the layers of all its stages
    share_of: dict[int, int]  # by block: which share of its group's blocks it is in
    # (groups, chunks, 2, shares): blocks of each chunk that have the first strategy and the second, where the first so
    # many shares have the first
    placed: IntArray
    # by group: what it sends forward and back, and how often
    sends: tuple[tuple[Counter[StageSend], Counter[StageSend]], ...]


@lru_cache(maxsize=4096)
def _chunks(
    schedule: Schedule, groups: int, virtual: int, cuts: tuple[int, ...], blocks: range, crossing: tuple[int, ...]
) -> Chunks:
    stages_of = tuple(
        tuple(stage_at(schedule, groups, group, chunk) for chunk in range(virtual)) for group in range(groups)
    )
    layers_of = tuple(
        frozenset(place for stage in stages for place in range(*cuts[stage : stage + 2])) for stages in stages_of
    )
    blocks_of = [sorted(layers.intersection(blocks)) for layers in layers_of]
    shares = min(_SHARES, *(len(places) for places in blocks_of if places))  # a group may hold no block
    share_of = {place: number * shares // len(places) for places in blocks_of for number, place in enumerate(places)}
    counts = np.zeros((groups, virtual, shares), dtype=np.int64)
    for group, stages in enumerate(stages_of):
        for chunk, stage in enumerate(stages):
            for place in range(max(cuts[stage], blocks.start), min(cuts[stage + 1], blocks.stop)):
                counts[group, chunk, share_of[place]] += 1
    first = np.cumsum(counts, axis=-1) - counts
    placed = np.stack((first, counts.sum(axis=-1, keepdims=True) - first), axis=2)
    boundaries: list[StageSend | None] = [None]
    for stage in range(1, len(cuts) - 1):
        left, right = (group_of(schedule, groups, side) for side in (stage - 1, stage))
        inner = cuts[stage] > blocks.start
        sender = blocks.start if inner else cuts[stage] - 1
        send = StageSend(int(inner), sender, crossing[cuts[stage]], left, right)
        boundaries.append(None if left == right else send)
    boundaries.append(None)
    sends = tuple(
        (
            Counter(filter(None, (boundaries[stage + 1] for stage in stages))),
            Counter(filter(None, (boundaries[stage] for stage in stages))),
        )
        for stages in stages_of
    )
    return Chunks(stages_of, layers_of, share_of, placed, sends)


class UniformCosts:
    """Time and memory of the uniform plans of one shape, with the layers divided one way."""

    def __init__(self, problem: Problem, cuts: tuple[int, ...]) -> None:
        shape, store, fixed = problem.shape, problem.tables[0].store, problem.tables[0].fixed
        self.problem, self.cuts, self.store = problem, cuts, store
        self.ranges = parts_of(problem.graph)
        self.chunks = _chunks(shape.schedule, shape.stages, shape.virtual, cuts, self.ranges[1], store.crossing)
        self.sharing: dict[int, ParameterSharing] = {}
        for places in self.chunks.layers_of:
            self.sharing |= sharing_of(problem.graph, places)
        self._priced_as = [problem.graph.layers[place] for place in store.alike(fixed.layers)]
        blocks = self.ranges[1]
        self.blocks_alike = (
            len({self._priced_as[place].name for place in blocks}) == 1
            and len({id(tables) for tables in problem.tables}) == 1
            and not self.sharing.keys() & set(blocks)
        )

    def table(self, group: int, place: int) -> StrategyTable:
        """Every strategy of a layer on a group of devices."""
        layer = self._priced_as[place]
        return self.problem.tables[group].unpruned(layer.kind, layer.name, self.sharing.get(place, ALONE))

    @cached_property
    def alike_groups(self) -> list[list[int]]:
        """Groups of devices, those together that take the same time under any plan."""
        shape, groups = self.problem.shape, dict[object, list[int]]()
        node = self.problem.pricer.profile.cluster.levels[0].size
        comparable = self.blocks_alike and not self.problem.graph.tensors
        for group, stages in enumerate(self.chunks.stages_of):
            edges = 0 in stages, shape.stages * shape.virtual - 1 in stages
            sizes = tuple(self.cuts[stage + 1] - self.cuts[stage] for stage in stages)
            sends = [Counter[object](), Counter[object]()]
            for counted, direction in zip(sends, self.chunks.sends[group], strict=True):
                for send, count in direction.items():
                    stride = stride_between(send.left, send.right, shape.stage_devices, node)
                    counted[send.axis, send.size, stride] += count
            key = (sizes, edges, *(frozenset(counted.items()) for counted in sends))
            groups.setdefault(key if comparable else group, []).append(group)
        return list(groups.values())

    def times(self, parts: Parts, limit: float) -> FloatArray:
        """(E, B, H): picoseconds of every plan below the limit; infinite for the others, and where layers that share
        parameters differ."""
        form, counts = self.problem.form, [len(groups) for groups in self.alike_groups]
        columns = [self._group_columns(parts, groups[0]) for groups in self.alike_groups]
        total: FloatArray = _combined(np.maximum, [column[-1] for column in columns]).astype(np.float64)
        for number, (ramp, rounds) in enumerate(zip(form.ramp, form.rounds, strict=True)):
            times = [column[number] for column in columns]
            added = _combined(np.add, [count * time for count, time in zip(counts, times, strict=True)])
            total = total + (ramp * added + rounds * _combined(np.maximum, times))
        total = np.broadcast_to(total, [len(next(iter(part.values()))) if part else 1 for part in parts])
        valid = total < limit
        for places in tied_groups(self.problem.graph):
            tables = [next((part[place] for place in places if place in part), None) for part in parts]
            numbers = [(axis, self.store.numbers(table)) for axis, table in enumerate(tables) if table is not None]
            for (a, left), (b, right) in pairwise(numbers):
                valid = valid & np.expand_dims(left[:, None] == right, 3 - a - b)
        return np.where(valid, total, np.inf)

    def _group_columns(self, parts: Parts, group: int) -> list[IntArray]:
        """The parts of a micro-batch's time in a group of devices, and its work once a step."""
        form, runs = self.problem.form, list(_runs(parts, sorted(self.chunks.layers_of[group])))
        moves, (sent, returned) = self._moves(parts, group), self.sends(parts, group)
        forward = _summed(runs, lambda figures: figures.forward) + moves + sent
        backward = _summed(runs, lambda figures: figures.backward) + moves + returned
        freed = sum((_along(count * table.freed(form), axis) for axis, table, count in runs), start=_ZERO)
        return [*form.parts(forward, backward, freed), _summed(runs, lambda figures: figures.step)]

    def _moves(self, parts: Parts, group: int) -> IntArray:
        """Picoseconds of redistribution in one pass: between blocks and the layers around them; where tensors skip
        layers, of each to its readers."""
        total, tables = _ZERO, self.problem.tables[group]
        axes = [axis for axis, places in enumerate(self.ranges) for _ in places]
        exchanges: list[tuple[int, int, int]] = []
        if self.problem.graph.tensors:
            for stage in self.chunks.stages_of[group]:
                start, stop = self.cuts[stage : stage + 2]
                exchanges += [(start - 1, start, tables.store.crossing[start])] if start else []
                inside = tables.store.exchanges(range(start, stop))
                exchanges += [(start + left, start + right, size) for left, right, size in inside]
        else:
            for cut in (self.ranges[1].start, self.ranges[1].stop):
                if 0 < cut < len(axes) and cut in self.chunks.layers_of[group]:
                    exchanges.append((cut - 1, cut, tables.store.crossing[cut]))
        for left, right, size in exchanges:
            if axes[left] != axes[right]:
                a, b = parts[axes[left]][left], parts[axes[right]][right]
                moved = tables.moves(a, b, size)[np.ix_(a.groups, b.groups)]
                total = total + np.expand_dims(moved, 3 - axes[left] - axes[right])
        return total

    def sends(self, parts: Parts, group: int) -> tuple[IntArray, IntArray]:
        """Picoseconds of sends and host work of a micro-batch, forward and backward."""
        overhead, stages = self.problem.tables[group].pricer.profile.overhead, self.chunks.stages_of[group]
        ends = len({0, len(self.cuts) - 2} & {*stages})
        host = sum(
            count * ticks(sides * overhead.pipeline + overhead.microbatch / 2)
            for sides, count in ((1, ends), (2, len(stages) - ends))
        )
        sums = [_ZERO + host, _ZERO + host]
        for number, sends in enumerate(self.chunks.sends[group]):
            for send, count in sends.items():
                if send.sender in parts[send.axis]:
                    seconds = self.send_ticks(parts[send.axis][send.sender], send.size, send.left, send.right)
                    sums[number] = sums[number] + count * _along(seconds, send.axis)
        return sums[0], sums[1]

    def send_ticks(self, table: StrategyTable, size: int, left: int, right: int) -> IntArray:
        """(S,): picoseconds of sending so many bytes a sample between two groups of devices, by the sender's
        strategy."""
        pricer, shape = self.problem.pricer, self.problem.shape
        stride = stride_between(left, right, shape.stage_devices, pricer.profile.cluster.levels[0].size)
        hidden, ends = self.problem.hidden, (id(pricer.of_group(shape.stage_devices, group)) for group in (left, right))

        def by_layout() -> IntArray:
            senders = [(boundary_bytes(size, shape.microbatch, sender), sender) for sender in table.options.examples]
            seconds = [transfer_seconds(pricer, *sender, shape, (left, right)) for sender in senders]
            return np.array([ticks((1.0 - hidden) * second) for second in seconds])

        key = ("sends", id(table.options), size, shape.microbatch, shape.stage_devices, stride, hidden, *ends)
        sent: IntArray = self.store.memo.once(key, by_layout)
        return sent[table.codes]

    def group_bytes(self, parts: Parts, group: int) -> IntArray:
        """(E, B, H): bytes on each device of a group: while one of its stages computes, the others rest."""
        shape, stages = self.problem.shape, self.chunks.stages_of[group]
        runs = [tuple(_runs(parts, range(*self.cuts[stage : stage + 2]))) for stage in stages]
        kinds = [tuple((axis, id(table), count) for axis, table, count in stage_runs) for stage_runs in runs]
        runs_of = dict(zip(kinds, runs, strict=True))  # stages of one kind hold the same bytes
        moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        in_flight = np.array([counts for _, counts in moments])
        rests, busy = np.array([np.arange(len(kinds)) != chunk for chunk, _ in moments]), in_flight > 0
        # by moment and stage: whether it rests; micro-batches in flight besides the one that it computes; whether it
        # rests with any in flight
        counts = np.stack((rests, in_flight - busy * ~rests, rests & busy), axis=-1)
        member = np.array([[kind == other for other in kinds] for kind in runs_of], dtype=np.int64)
        factors = np.einsum("kv,mvf->mkf", member, counts).reshape(len(moments), -1)
        columns = [_summed(stage_runs, figure) for stage_runs in runs_of.values() for figure in _AT_REST]
        peak = sum((_summed(stage_runs, lambda figures: figures.memory[:, UPDATED]) for stage_runs in runs), _ZERO)
        for kind, stage_runs in runs_of.items():
            computing = factors[[kinds[chunk] == kind for chunk, _ in moments]]
            worst = _worst_moment(stage_runs)
            for row in computing[pareto_rows(-computing)]:
                moment = sum((count * column for count, column in zip(row, columns, strict=True) if count), worst)
                peak = np.maximum(peak, moment)
        context = self.problem.tables[group].pricer.profile.cluster.device.context
        return peak + self._buffers(parts, stages, moments) + context

    def _buffers(self, parts: Parts, stages: Sequence[int], moments: Moments) -> IntArray:
        """Buffers of the boundaries, by their senders' strategies; copies of earlier tensors, by their readers'."""
        shape, counted = self.problem.shape, not self.problem.pricer.profile.unbuffered
        total = _ZERO
        for stage, count in zip(stages, most_of(moments), strict=True):
            left, right = self._boundary(parts, stage), self._boundary(parts, stage + 1)
            total = total + buffer_bytes(left, right, shape.microbatches, shape.schedule, counted=counted)
            inside = range(*self.cuts[stage : stage + 2])
            borrowed = self.store.borrowed(inside)
            if borrowed:
                total = total + count * self._boundary_bytes(parts, inside.start, borrowed)
        return total

    def _boundary(self, parts: Parts, stage: int) -> IntArray:
        """Bytes of what goes to a stage from the one before it; 0 where one group of devices runs both."""
        cut, shape = self.cuts[stage], self.problem.shape
        if cut in (0, len(self.problem.graph.layers)):
            return _ZERO
        left, right = (group_of(shape.schedule, shape.stages, side) for side in (stage - 1, stage))
        return _ZERO if left == right else self._boundary_bytes(parts, cut - 1, self.store.crossing[cut])

    def _boundary_bytes(self, parts: Parts, place: int, size: int) -> IntArray:
        """``boundary_bytes`` of so many bytes a sample, by the strategies of a layer."""
        axis, table = next((axis, part[place]) for axis, part in enumerate(parts) if place in part)
        by_code = np.zeros(len(table.options.examples), dtype=np.int64)
        for code in table.present:
            by_code[code] = boundary_bytes(size, self.problem.shape.microbatch, table.options.examples[code])
        return _along(by_code[table.codes], axis)


_AT_REST: tuple[Callable[[StrategyFigures], IntArray], ...] = (
    lambda figures: figures.resting[:, 0],
    lambda figures: figures.kept,
    lambda figures: figures.resting[:, 1],
)
"""Bytes of a layer: at rest, of each micro-batch in flight, with any in flight besides."""


def _combined(combine: Callable[[IntArray, IntArray], IntArray], columns: Iterable[IntArray]) -> IntArray:
    """Columns of unlike extents combined, the smallest first."""
    return reduce(combine, sorted(columns, key=np.size))


def _along(values: IntArray, axis: int) -> IntArray:
    shape = [1, 1, 1]
    shape[axis] = len(values)
    return values.reshape(shape)


def _runs(parts: Parts, inside: Iterable[int]) -> Iterator[Run]:
    tables = [(axis, part[place]) for place in inside for axis, part in enumerate(parts) if place in part]
    for (axis, _), same in groupby(tables, key=lambda pair: (pair[0], id(pair[1]))):
        layers = list(same)
        yield axis, layers[0][1], len(layers)


def _summed(runs: Sequence[Run], figure: Callable[[StrategyFigures], IntArray]) -> IntArray:
    return sum((_along(count * figure(table.figures), axis) for axis, table, count in runs), start=_ZERO)


def _worst_moment(runs: Sequence[Run]) -> IntArray:
    """Bytes of the worst moment of a stage that computes with one micro-batch in flight, the optimizer's aside."""
    figures = [([_along(column, axis) for column in table.figures.memory.T], count) for axis, table, count in runs]
    return _summed(runs, lambda figures: figures.memory[:, REST]) + worst_moment(figures)
