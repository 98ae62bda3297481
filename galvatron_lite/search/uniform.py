"""Plans whose groups of devices run several virtual stages (interleaved 1F1B, ZB-V): the exact best uniform one.

The declared space. Blocks are shared out evenly over the chunks in the order of the model, or so are blocks and the
layers before and after them, which count as one block each (``cuts_of``). Layers before the blocks are in the first
chunk, those after them in the last. One strategy for all layers before the blocks and one for all layers after them;
for blocks one, or two of equal layout: of the blocks of every group of devices the first so many eighths have the one,
the others the other. Layers that share parameters have one strategy.

With e, b, h the strategies before the blocks, of the blocks and after them, the time is the closed form of
``cost.schedule`` over groups: sums of figures of b, and of e and h in the groups that hold them. So many candidates are
timed at once as arrays, and so is their memory (``uniform_memory``). Strategies that another one of their layout equals
or beats in everything are left out first. Choices of b are taken in the order of what their blocks take by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import ALONE, Sharing
from galvatron_lite.cost.sharing import sharing_of, tied_groups
from galvatron_lite.cost.stage import transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.chains.pareto import pairs_within, pareto_rows
from galvatron_lite.search.figures import ticks
from galvatron_lite.search.partition import Partition
from galvatron_lite.search.problem import Problem, StagePlan
from galvatron_lite.search.tables import Table
from galvatron_lite.search.uniform_memory import along, group_bytes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_HALF = 0.5
_PARTS, _AT_ONCE = 8, 64
"""Parts that the blocks of a group are in; choices for blocks that are timed at once."""


def parts_of(graph: ModelGraph) -> tuple[range, range, range]:
    """Places of the layers before the blocks, from the first to the last block, and after them."""
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    return range(blocks[0]), range(blocks[0], blocks[-1] + 1), range(blocks[-1] + 1, len(graph.layers))


def cuts_of(graph: ModelGraph, chunks: int) -> list[tuple[int, ...]]:
    """Where chunks begin, and the number of layers: the ways to share layers out, see the module."""
    before, blocks, after = parts_of(graph)
    sizes = [_shares(len(blocks), chunks, 0)] if len(blocks) >= chunks else []
    edges = bool(before) + bool(after)
    if len(blocks) % chunks and len(blocks) + edges >= chunks:
        shares = _shares(len(blocks) + edges, chunks, bool(before))
        shares[0] -= bool(before)
        shares[-1] -= bool(after)
        sizes.append(shares)
    return [(0, *list(accumulate(own, initial=blocks.start))[1:-1], len(graph.layers)) for own in sizes]


def _shares(count: int, chunks: int, first: int) -> list[int]:
    """Even shares; those from a place on are one larger where that is needed."""
    return [count // chunks + (first <= chunk < first + count % chunks) for chunk in range(chunks)]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What all layers before the blocks, all blocks, or all layers after them may take.

    Attributes:
        size: number of choices; one without meaning where there are no layers.
        tables: figures of each layer under each choice.
    """

    size: int
    tables: dict[int, Table]

    def at(self, rows: IntArray) -> _Part:
        """Some of the choices."""
        own = {id(table): table.at(rows) for table in self.tables.values()}
        return _Part(len(rows), {place: own[id(table)] for place, table in self.tables.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Choices of two strategies for blocks: of those of each group the first so many parts have the first."""

    table: Table
    first: IntArray
    second: IntArray
    counts: IntArray

    def at(self, number: int) -> Table:
        """What a block in one of the parts takes under all choices."""
        return self.table.at(np.where(number < self.counts, self.first, self.second))


@dataclass(eq=False)
class Uniform:
    """The uniform plans of one shape.

    Attributes:
        problem: the shape, its tables and budgets.
        cuts: where chunks begin.
        lean: whether only memory matters.
        settled: ``parts``, where they are known.
    """

    problem: Problem
    cuts: tuple[int, ...]
    lean: bool = False
    settled: list[_Part] = field(default_factory=list)
    _sent: dict[tuple[int, int, int, int], IntArray] = field(default_factory=dict, init=False)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """Per group, the numbers of its stages."""
        shape = self.problem.shape
        return [
            [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]
            for group in range(shape.stages)
        ]

    @cached_property
    def _held(self) -> list[frozenset[int]]:
        """Per group, the places of all its layers."""
        return [
            frozenset(place for stage in own for place in range(self.cuts[stage], self.cuts[stage + 1]))
            for own in self.stages_of
        ]

    @cached_property
    def sharing(self) -> dict[int, Sharing]:
        """Of layers that share parameters."""
        found: dict[int, Sharing] = {}
        for places in self._held:
            found |= sharing_of(self.problem.graph, places)
        return found

    @cached_property
    def parts(self) -> list[_Part]:
        """The parts of the model."""
        if self.settled:
            return self.settled
        before, blocks, after = parts_of(self.problem.graph)
        return [self._part(before), self._mixed() if self.pairs is not None else self._part(blocks), self._part(after)]

    def _part(self, places: range) -> _Part:
        tables: dict[int, Table] = {}
        for group, held in enumerate(self._held):
            for place in held.intersection(places):
                layer = self.problem.graph.layers[place]
                own = self.problem.tables[group]
                tables[place] = own.whole(layer.kind, layer.name, self.sharing.get(place, ALONE))
        if not tables:
            return _Part(1, {})
        distinct = list({id(table): table for _, table in sorted(tables.items())}.values())
        common = set.intersection(*({*table.strategies} for table in distinct))
        every = [table.where(lambda strategy: strategy in common) for table in distinct]
        kept = self._useful(every, bool(self.sharing.keys() & set(places)))
        thinned = {id(table): own.at(kept) for table, own in zip(distinct, every, strict=True)}
        return _Part(len(kept), {place: thinned[id(table)] for place, table in tables.items()})

    def _useful(self, tables: Sequence[Table], shared: bool) -> IntArray:
        """Rows that no other of the same layout equals or beats in every figure of all tables."""
        first = tables[0]
        if shared:
            return np.arange(len(first))
        judged = [table.memory_keys if self.lean else table.keys(self.problem.form) for table in tables]
        keys = np.column_stack((*judged, *(table.figures.resting for table in tables)))
        groups = [np.flatnonzero(first.codes == code) for code in first.present]
        kept = [rows[pareto_rows(keys[rows])] for rows in groups]
        return np.sort(np.concatenate(kept)) if kept else np.array([], dtype=np.int64)

    @cached_property
    def positions(self) -> dict[int, int]:
        """In which of as many equal parts as there are of its group's blocks each block is."""
        blocks = parts_of(self.problem.graph)[1]
        own = [sorted(held.intersection(blocks)) for held in self._held]
        parts = min(_PARTS, *map(len, own))
        return {place: number * parts // len(places) for places in own for number, place in enumerate(places)}

    @cached_property
    def pairs(self) -> _Pairs | None:
        """The choices for blocks that are all alike; None where they are not."""
        layers, tables = self.problem.graph.layers, self.problem.tables
        blocks = parts_of(self.problem.graph)[1]
        kinds = {(layers[place].kind, tables[0].fixed.pins_of(layers[place].name)) for place in blocks}
        if len(kinds) > 1 or len({id(own) for own in tables}) > 1 or self.sharing.keys() & set(blocks):
            return None
        whole = tables[0].whole(layers[blocks[0]].kind, layers[blocks[0]].name)
        table = whole.at(self._useful([whole], shared=False))
        every = np.arange(len(table))
        first, second, counts = [every], [every], [np.zeros_like(every)]
        a, b = pairs_within(table.codes)
        left, right = np.concatenate((a, b)), np.concatenate((b, a))
        for count in range(1, max(self.positions.values()) + 1) if self.problem.runs != 1 else ():
            first.append(left)
            second.append(right)
            counts.append(np.full(len(left), count))
        return _Pairs(table, *map(np.concatenate, (first, second, counts)))

    def _mixed(self) -> _Part:
        """What blocks take under all choices."""
        assert self.pairs is not None
        own = {number: self.pairs.at(number) for number in set(self.positions.values())}
        return _Part(len(self.pairs.first), {place: own[number] for place, number in self.positions.items()})

    @cached_property
    def least(self) -> FloatArray:
        """(B,): a time that no plan with each choice for blocks beats, quickly: from blocks alone; infinite where the
        first or the last group cannot hold them."""
        form, shape, pairs = self.problem.form, self.problem.shape, self.pairs
        if pairs is None:
            return np.zeros(self.parts[1].size)
        chunks = [[self._placed(stage) for stage in own] for own in self.stages_of]
        own = [parts[pairs.first] for parts in pairs.table.parts(form)]
        other = [parts[pairs.second] for parts in pairs.table.parts(form)]
        held = {tuple(map(tuple, sum(group))): sum(group) for group in chunks}
        time = np.zeros(len(pairs.first))
        for ramp, rounds, a, b in zip(form.ramp, form.rounds, own, other, strict=True):
            slowest = reduce(np.maximum, (one[pairs.counts] * a + two[pairs.counts] * b for one, two in held.values()))
            one, two = sum(sum(group) for group in chunks)
            time = time + ramp * (one[pairs.counts] * a + two[pairs.counts] * b) + rounds * slowest
        figures = pairs.table.figures
        for group in (0, shape.stages - 1):
            room = self.problem.budgets[group] - self.problem.tables[0].pricer.profile.cluster.device.context
            one, two = sum(chunks[group])
            states = (
                one[pairs.counts] * figures.resting[pairs.first, 0]
                + two[pairs.counts] * figures.resting[pairs.second, 0]
            )
            every = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
            for _, flying in every if shape.microbatches > 1 else ():
                one, two = sum(count * size for count, size in zip(flying, chunks[group], strict=True))
                kept = one[pairs.counts] * figures.kept[pairs.first] + two[pairs.counts] * figures.kept[pairs.second]
                time[states + kept > room] = np.inf
        return time * (1 - 1e-9)

    def _placed(self, stage: int) -> IntArray:
        """(2, n): how many blocks of a chunk have the first strategy and the second, where the first so many parts of
        those of its group have the first."""
        own = [
            self.positions[place] for place in range(self.cuts[stage], self.cuts[stage + 1]) if place in self.positions
        ]
        first = np.array([sum(number < count for number in own) for count in range(max(self.positions.values()) + 1)])
        return np.array([first, len(own) - first])

    def bound(self) -> float:
        """A time that no uniform plan beats, quickly."""
        return float(self.least.min(initial=np.inf))

    def best(self, limit: int | None) -> Partition | None:
        """The best plan that fits and takes less than ``limit`` picoseconds; None where there is none."""
        best, top = None, np.inf if limit is None else limit - _HALF
        order = np.argsort(self.least, kind="stable")
        order = order[self.least[order] < top]
        for start in range(0, len(order), _AT_ONCE):
            rows = order[start : start + _AT_ONCE]
            if self.least[rows[0]] >= top:
                break
            own = replace(self, settled=[self.parts[0], self.parts[1].at(rows), self.parts[2]])
            time = own.times(top)
            place = int(np.argmin(time)) if time.size else 0
            if time.size and np.isfinite(time.flat[place]):
                top = float(time.flat[place]) - _HALF
                chosen = [int(index) for index in np.unravel_index(place, time.shape)]
                # Stages carry no figures of their own.
                strategies = own.strategies(chosen)
                stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(self.cuts))
                best = Partition(round(float(time.flat[place])), self.cuts, stages)
        return best

    def times(self, limit: float = np.inf) -> FloatArray:
        """(E, B, H): picoseconds of every candidate below the limit that fits; infinite for the others, and where
        layers that share parameters differ."""
        form = self.problem.form
        columns = [self._group(group) for group in range(self.problem.shape.stages)]
        total: FloatArray = reduce(np.maximum, (own[-1] for own in columns)).astype(np.float64)
        for part, (ramp, rounds) in enumerate(zip(form.ramp, form.rounds, strict=True)):
            own = [column[part] for column in columns]
            total = total + ramp * reduce(np.add, own) + rounds * reduce(np.maximum, own)
        shape = [part.size for part in self.parts]
        alive = self.agreeing() & (np.broadcast_to(total, shape) < limit)
        for group in range(self.problem.shape.stages):
            if not alive.any():
                break
            alive = alive & self._fitting(group)
        return np.where(alive, np.broadcast_to(total, shape), np.inf)

    def group_bytes(self, group: int) -> IntArray:
        """(E, B, H): bytes on each device of a group; axes of length 1 where alike."""
        chunks = {stage: range(self.cuts[stage], self.cuts[stage + 1]) for stage in self.stages_of[group]}
        return group_bytes(self.problem, [part.tables for part in self.parts], group, chunks)

    def _fitting(self, group: int) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = self.group_bytes(group) <= self.problem.budgets[group]
        return fits

    def _summed(self, places: Iterable[int], figure: Callable[[Table], IntArray]) -> IntArray:
        """A figure of layers, added up; axes as ``times``, of length 1 where alike."""
        total = np.zeros((1, 1, 1), dtype=np.int64)
        for axis, part in enumerate(self.parts):
            tables = [part.tables[place] for place in places if place in part.tables]
            counts = Counter(map(id, tables))
            for table in {id(own): own for own in tables}.values():
                total = total + along(counts[id(table)] * figure(table), axis)
        return total

    def _group(self, group: int) -> list[IntArray]:
        """The parts of a group's micro-batch and its work once a step; axes as ``times``, of length 1 where alike."""
        form, held = self.problem.form, self._held[group]
        passes = (lambda own: own.figures.forward, lambda own: own.figures.backward, lambda own: own.saved(form))
        forward, backward, saved = (self._summed(held, figure) for figure in passes)
        moves, sends = self._moves(group), self._sends(group)
        parts = form.parts(forward + moves + sends[0], backward + moves + sends[1], saved)
        return [*parts, self._summed(held, lambda own: own.figures.step)]

    def _moves(self, group: int) -> IntArray:
        """Picoseconds of redistribution in one pass: between blocks and the layers around them."""
        total = np.zeros((1, 1, 1), dtype=np.int64)
        if self.problem.graph.tensors:
            return reduce(np.add, (self._exchanged(group, stage) for stage in self.stages_of[group]), total)
        blocks = parts_of(self.problem.graph)[1]
        for axis, right in ((0, blocks.start), (1, blocks.stop)):
            if (
                right - 1 in self.parts[axis].tables
                and right in self.parts[axis + 1].tables
                and right in self._held[group]
            ):
                left, own = self.parts[axis].tables[right - 1], self.parts[axis + 1].tables[right]
                size = self.problem.tables[0].store.crossing[right]
                moved = self.problem.tables[group].moves(left, own, size)[np.ix_(left.groups, own.groups)]
                total = total + np.expand_dims(moved, 2 if axis == 0 else 0)
        return total

    def _exchanged(self, group: int, stage: int) -> IntArray:
        """The same of one stage where tensors skip layers: each goes straight to its readers."""
        total, start = np.zeros((1, 1, 1), dtype=np.int64), self.cuts[stage]
        axis = [number for number, places in enumerate(parts_of(self.problem.graph)) for _ in places]
        inside = self.problem.tables[group]
        entering = [(-1, 0, inside.store.crossing[start])] if start else []
        for left, right, size in (*entering, *inside.store.exchanges(range(start, self.cuts[stage + 1]))):
            ends = (axis[start + left], axis[start + right])
            if ends[0] != ends[1]:
                a, b = (self.parts[end].tables[start + place] for end, place in zip(ends, (left, right), strict=True))
                moved = inside.moves(a, b, size)[np.ix_(a.groups, b.groups)]
                total = total + np.expand_dims(moved, ({0, 1, 2} - {*ends}).pop())
        return total

    def _sends(self, group: int) -> tuple[IntArray, IntArray]:
        """Picoseconds of sends and host work of a micro-batch, forward and backward; axes as ``times``."""
        overhead, layers = self.problem.tables[group].pricer.profile.overhead, len(self.problem.graph.layers)
        sums = [np.zeros((1, 1, 1), dtype=np.int64) for _ in range(2)]
        for stage in self.stages_of[group]:
            start, stop = self.cuts[stage], self.cuts[stage + 1]
            host = ticks(((start > 0) + (stop < layers)) * overhead.pipeline + overhead.microbatch / 2)
            for number, (side, cut) in enumerate(((stage + 1, stop), (stage, start))):
                sums[number] = sums[number] + self._sent_over(side, cut) + host
        return sums[0], sums[1]

    def _sent_over(self, stage: int, cut: int) -> IntArray:
        """Picoseconds of sending the tensor before layer ``cut``, where a stage begins, by its sender's strategy."""
        shape, graph = self.problem.shape, self.problem.graph
        left, right = (group_of(shape.schedule, shape.stages, side) for side in (stage - 1, stage))
        if cut in (0, len(graph.layers)) or left == right:
            return np.zeros((1, 1, 1), dtype=np.int64)
        output = self.problem.tables[0].store.crossing[cut]
        axis = int(cut > parts_of(graph)[1].start)
        key = (axis, left, right, output)
        if key not in self._sent:
            table = self.parts[axis].tables[cut - 1]
            sent = np.zeros(len(table.options.layouts), dtype=np.int64)
            for code in table.present:
                sender = table.options.samples[code]
                size = boundary_bytes(output, shape.microbatch, sender)
                sent[code] = ticks(transfer_seconds(self.problem.pricer, size, sender, shape, (left, right)))
            self._sent[key] = along(sent[table.codes], axis)
        return self._sent[key]

    def agreeing(self) -> NDArray[np.bool_]:
        """Candidates whose layers that share parameters have one strategy."""
        agree = np.ones((1, 1, 1), dtype=bool)
        for places in tied_groups(self.problem.graph):
            axes = sorted({axis for axis, part in enumerate(self.parts) for place in places if place in part.tables})
            for a, b in pairwise(axes):
                left, right = (self._tied(axis, places) for axis in (a, b))
                same = np.array([[one == other for other in right] for one in left], dtype=bool)
                agree = agree & np.expand_dims(same, ({0, 1, 2} - {a, b}).pop())
        return agree

    def _tied(self, axis: int, places: Sequence[int]) -> tuple[Strategy, ...]:
        """Of the layers of a part that share parameters."""
        tables = self.parts[axis].tables
        return next(tables[place] for place in places if place in tables).strategies

    def strategies(self, chosen: Sequence[int]) -> list[Strategy]:
        """Of every layer."""
        ranges = parts_of(self.problem.graph)
        return [
            part.tables[place].options.strategies[part.tables[place].rows[own]]
            for part, own, places in zip(self.parts, chosen, ranges, strict=True)
            for place in places
        ]  # fmt: skip
