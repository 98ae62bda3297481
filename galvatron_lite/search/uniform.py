"""Plans whose groups of devices run several virtual stages (interleaved 1F1B, ZB-V): the exact best uniform one.

The declared space. Blocks are shared out evenly over the chunks in the order of the model, or so are blocks and the
layers before and after them, which count as one block each (``cuts_of``). Layers before the blocks are in the first
chunk, those after them in the last. One strategy for all layers before the blocks and one for all layers after them;
for blocks one, or two that differ in what they recompute: of the blocks of every group of devices the first so many
eighths have the one, the others the other. Layers that share parameters have one strategy.

With e, b, h the strategies before the blocks, of the blocks and after them, the time is the closed form of
``cost.schedule`` over groups: sums of figures of b, and of e and h in the groups that hold them. So many candidates are
timed at once as arrays, and so is their memory (``uniform_memory``). Strategies that another one of their layout equals
or beats in everything are left out first. Choices of b are taken in the order of what their blocks take by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import ALONE, ParameterSharing
from galvatron_lite.cost.sharing import sharing_of, tied_groups
from galvatron_lite.cost.stage import transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, chunks_in_flight, stride_between
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.chains.pareto import pairs_within, pareto_rows
from galvatron_lite.search.figures import ticks
from galvatron_lite.search.partition import Partition
from galvatron_lite.search.problem import Problem, StagePlan
from galvatron_lite.search.tables import StrategyTable
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
    """What all layers before the blocks, all blocks, or all layers after them may take."""

    size: int  # number of choices; one without meaning where there are no layers
    tables: dict[int, StrategyTable]  # figures of each layer under each choice

    def at(self, rows: IntArray) -> _Part:
        """Some of the choices."""
        own = {id(table): table.at(rows) for table in self.tables.values()}
        return _Part(len(rows), {place: own[id(table)] for place, table in self.tables.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Choices of two strategies for blocks: of those of each group the first so many parts have the first."""

    table: StrategyTable  # S strategies, each by itself the first of the choices
    first: IntArray  # first, second: (Q,) rows of the others, once for each number of parts from 1 on
    second: IntArray

    def at(self, number: int, rows: IntArray) -> StrategyTable:
        """What a block in one of the parts takes under some of the choices."""
        single = len(self.table)
        pair, count = (rows - single) % max(len(self.first), 1), 1 + (rows - single) // max(len(self.first), 1)
        if not len(self.first):
            return self.table.at(rows)
        mixed = np.where(number < count, self.first[pair], self.second[pair])
        return self.table.at(np.where(rows < single, rows, mixed))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Which layers groups of devices hold."""

    stages_of: tuple[tuple[int, ...], ...]  # per group, the numbers of its stages
    held: tuple[frozenset[int], ...]  # per group, the places of all its layers
    positions: dict[int, int]  # in which of as many equal parts as there are of its group's blocks each block is
    # (groups, chunks, 2, parts) blocks of each chunk that have the first strategy and the second, where those of the
    # first so many parts have the first
    placed: IntArray


@lru_cache(maxsize=4096)
def _chunks(schedule: Schedule, groups: int, virtual: int, cuts: tuple[int, ...], blocks: range) -> _Chunks:
    stages_of = tuple(
        tuple(stage_at(schedule, groups, group, chunk) for chunk in range(virtual)) for group in range(groups)
    )
    held = tuple(frozenset(place for stage in own for place in range(*cuts[stage : stage + 2])) for own in stages_of)
    own = [sorted(places.intersection(blocks)) for places in held]
    parts = min(_PARTS, *map(len, own))
    positions = {place: number * parts // len(places) for places in own for number, place in enumerate(places)}
    counts = np.zeros((groups, virtual, parts), dtype=np.int64)
    for group, stages in enumerate(stages_of):
        for chunk, stage in enumerate(stages):
            for place in range(max(cuts[stage], blocks.start), min(cuts[stage + 1], blocks.stop)):
                counts[group, chunk, positions[place]] += 1
    first = np.cumsum(counts, axis=-1) - counts
    return _Chunks(stages_of, held, positions, np.stack((first, counts.sum(axis=-1, keepdims=True) - first), axis=2))


@dataclass(eq=False)
class Uniform:
    """The uniform plans of one shape."""

    problem: Problem  # the shape, its tables and budgets
    cuts: tuple[int, ...]  # where chunks begin
    lean: bool = False  # whether only memory matters
    settled: list[_Part] = field(default_factory=list)  # ``parts``, where they are known
    _sent: dict[tuple[int, int, int, int], IntArray] = field(default_factory=dict, init=False)

    @cached_property
    def ranges(self) -> tuple[range, range, range]:
        """``parts_of`` the model."""
        return parts_of(self.problem.graph)

    @cached_property
    def chunks(self) -> _Chunks:
        """Which layers groups of devices hold."""
        shape = self.problem.shape
        return _chunks(shape.schedule, shape.stages, shape.virtual, self.cuts, self.ranges[1])

    @cached_property
    def sharing(self) -> dict[int, ParameterSharing]:
        """Of layers that share parameters."""
        found: dict[int, ParameterSharing] = {}
        for places in self.chunks.held:
            found |= sharing_of(self.problem.graph, places)
        return found

    @cached_property
    def parts(self) -> list[_Part]:
        """The parts of the model."""
        if self.settled:
            return self.settled
        before, blocks, after = self.ranges
        every = np.arange(len(self.least)) if self.pairs is not None else None
        return [self._part(before), self._part(blocks) if every is None else self._mixed(every), self._part(after)]

    def _part(self, places: range) -> _Part:
        tables: dict[int, StrategyTable] = {}
        for group, held in enumerate(self.chunks.held):
            for place in held.intersection(places):
                layer = self.problem.graph.layers[place]
                own = self.problem.tables[group]
                tables[place] = own.whole(layer.kind, layer.name, self.sharing.get(place, ALONE))
        if not tables:
            return _Part(1, {})
        distinct = list({id(table): table for _, table in sorted(tables.items())}.values())
        common = set.intersection(*({*table.strategies} for table in distinct))
        every = [table.where(lambda strategy: strategy in common) for table in distinct]
        kept = self._useful(every, distinct, bool(self.sharing.keys() & set(places)))
        thinned = {id(table): own.at(kept) for table, own in zip(distinct, every, strict=True)}
        return _Part(len(kept), {place: thinned[id(table)] for place, table in tables.items()})

    def _useful(self, tables: Sequence[StrategyTable], of: Sequence[StrategyTable], shared: bool) -> IntArray:
        """Rows that no other of the same layout equals or beats in every figure of all tables, parts of some others."""
        first, form, known = tables[0], self.problem.form, self.problem.tables[0].store.useful
        if shared:
            return np.arange(len(first))
        rounds = form.microbatches if form.freed else 0
        key = (self.lean, form.freed, rounds, form.apart, *map(id, of))
        if key not in known:
            judged = [table.memory_keys if self.lean else table.keys(form) for table in tables]
            keys = np.column_stack((*judged, *(table.figures.resting for table in tables)))
            groups = [np.flatnonzero(first.codes == code) for code in first.present]
            kept = [rows[pareto_rows(keys[rows])] for rows in groups]
            known[key] = np.sort(np.concatenate(kept)) if kept else np.array([], dtype=np.int64)
        return known[key]

    @cached_property
    def pairs(self) -> _Pairs | None:
        """The choices for blocks that are all alike; None where they are not."""
        layers, tables, blocks = self.problem.graph.layers, self.problem.tables, self.ranges[1]
        fixed = tables[0].fixed
        kinds = {(layers[place].kind, fixed.pins_of(layers[place].name) if fixed.layers else ()) for place in blocks}
        if len(kinds) > 1 or len({id(own) for own in tables}) > 1 or self.sharing.keys() & set(blocks):
            return None
        whole = tables[0].whole(layers[blocks[0]].kind, layers[blocks[0]].name)
        table = whole.at(self._useful([whole], [whole], shared=False))
        a, b = (
            pairs_within(table.options.degrees[table.rows]) if self.problem.runs != 1 else (np.arange(0), np.arange(0))
        )
        return _Pairs(table, np.concatenate((a, b)), np.concatenate((b, a)))

    def _mixed(self, rows: IntArray) -> _Part:
        """What blocks take under some of the choices."""
        assert self.pairs is not None
        own = [self.pairs.at(number, rows) for number in range(self.chunks.placed.shape[-1])]
        return _Part(len(rows), {place: own[number] for place, number in self.chunks.positions.items()})

    @cached_property
    def least(self) -> FloatArray:
        """(B,): a time that no plan with each choice for blocks beats, quickly: from blocks alone; infinite where the
        first or the last group cannot hold them."""
        pairs = self.pairs
        if pairs is None:
            return np.zeros(self.parts[1].size)
        every = np.arange(len(pairs.table))
        found = [self._least(pairs.table, every, every, 0)]
        if len(pairs.first):
            parts = range(1, self.chunks.placed.shape[-1])
            found += [self._least(pairs.table, pairs.first, pairs.second, count) for count in parts]
        return np.concatenate(found) * (1 - 1e-9)

    def _least(self, table: StrategyTable, first: IntArray, second: IntArray, count: int) -> FloatArray:
        """``least`` where blocks of so many parts have the first of two strategies."""
        form, shape, figures = self.problem.form, self.problem.shape, table.figures
        placed = self.chunks.placed[..., count]
        held = placed.sum(axis=1)
        time = np.zeros(len(first))
        for ramp, rounds, own in zip(form.ramp, form.rounds, table.parts(form), strict=True):
            a, b = own[first], own[second]
            slowest = reduce(np.maximum, (one * a + two * b for one, two in {*map(tuple, held.tolist())}))
            one, two = held.sum(axis=0).tolist()
            time = time + ramp * (one * a + two * b) + rounds * slowest
        kept, states = figures.kept, figures.resting[:, 0]
        for group in (0, shape.stages - 1) if shape.microbatches > 1 else ():
            room = self.problem.budgets[group] - self.problem.tables[0].pricer.profile.cluster.device.context
            one, two = held[group].tolist()
            resting = one * states[first] + two * states[second]
            moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
            flying = np.array([counts for _, counts in moments]) @ placed[group]
            for one, two in {*map(tuple, flying[pareto_rows(-flying)].tolist())}:
                time[resting + one * kept[first] + two * kept[second] > room] = np.inf
        return time

    def bound(self) -> float:
        """A time that no uniform plan beats, quickly."""
        if self.pairs is None:
            return 0.0
        return float(self.least.min(initial=np.inf))

    def best(self, limit: int | None) -> Partition | None:
        """The best plan that fits and takes less than ``limit`` picoseconds; None where there is none."""
        best, top = None, np.inf if limit is None else limit - _HALF
        order = np.argsort(self.least, kind="stable")
        order = order[self.least[order] < top]
        if not len(order):
            return None
        before, after = (self._part(self.ranges[side]) for side in (0, 2))
        for start in range(0, len(order), _AT_ONCE):
            rows = order[start : start + _AT_ONCE]
            if self.least[rows[0]] >= top:
                break
            blocks = self._part(self.ranges[1]).at(rows) if self.pairs is None else self._mixed(rows)
            own = replace(self, settled=[before, blocks, after])
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

    @cached_property
    def alike(self) -> dict[object, list[int]]:
        """Groups by what their time depends on."""
        shape, found = self.problem.shape, dict[object, list[int]]()
        node = self.problem.pricer.profile.cluster.levels[0].size
        strides = [stride_between(a, b, shape.stage_devices, node) for a, b in pairwise(range(shape.stages))]
        ends = stride_between(shape.stages - 1, 0, shape.stage_devices, node)
        for group, stages in enumerate(self.chunks.stages_of):
            edges = 0 in stages, shape.stages * shape.virtual - 1 in stages
            sizes = tuple(self.cuts[stage + 1] - self.cuts[stage] for stage in stages)
            around = (strides[group - 1] if group else ends, strides[group] if group + 1 < shape.stages else ends)
            simple = len({id(own) for own in self.problem.tables}) == 1 and not self.problem.graph.tensors
            key = (sizes, edges, around) if simple and self.pairs is not None else group
            found.setdefault(key, []).append(group)
        return found

    def times(self, limit: float = np.inf) -> FloatArray:
        """(E, B, H): picoseconds of every candidate below the limit that fits; infinite for the others, and where
        layers that share parameters differ."""
        form, counts = self.problem.form, [len(groups) for groups in self.alike.values()]
        columns = [self._group(groups[0]) for groups in self.alike.values()]
        total: FloatArray = reduce(np.maximum, (own[-1] for own in columns)).astype(np.float64)
        for part, (ramp, rounds) in enumerate(zip(form.ramp, form.rounds, strict=True)):
            own = [column[part] for column in columns]
            each = (count * column for count, column in zip(counts, own, strict=True))
            total = total + ramp * reduce(np.add, each) + rounds * reduce(np.maximum, own)
        shape = [part.size for part in self.parts]
        alive = self.agreeing() & (np.broadcast_to(total, shape) < limit)
        # Under interleaved 1F1B later groups hold no more micro-batches of any chunk.
        ahead = self.problem.shape.schedule is Schedule.INTERLEAVED
        for group in (group for groups in self.alike.values() for group in groups[: 1 if ahead else None]):
            if not alive.any():
                break
            alive = alive & self._fitting(group)
        return np.where(alive, np.broadcast_to(total, shape), np.inf)

    def group_bytes(self, group: int) -> IntArray:
        """(E, B, H): bytes on each device of a group; axes of length 1 where alike."""
        chunks = {stage: range(self.cuts[stage], self.cuts[stage + 1]) for stage in self.chunks.stages_of[group]}
        return group_bytes(self.problem, [part.tables for part in self.parts], group, chunks)

    def _fitting(self, group: int) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = self.group_bytes(group) <= self.problem.budgets[group]
        return fits

    def _summed(self, places: Iterable[int], figure: Callable[[StrategyTable], IntArray]) -> IntArray:
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
        form, held = self.problem.form, self.chunks.held[group]
        passes = (lambda own: own.figures.forward, lambda own: own.figures.backward, lambda own: own.saved(form))
        forward, backward, saved = (self._summed(held, figure) for figure in passes)
        moves, sends = self._moves(group), self._sends(group)
        parts = form.parts(forward + moves + sends[0], backward + moves + sends[1], saved)
        return [*parts, self._summed(held, lambda own: own.figures.step)]

    def _moves(self, group: int) -> IntArray:
        """Picoseconds of redistribution in one pass: between blocks and the layers around them."""
        total = np.zeros((1, 1, 1), dtype=np.int64)
        if self.problem.graph.tensors:
            return reduce(np.add, (self._exchanged(group, stage) for stage in self.chunks.stages_of[group]), total)
        blocks = self.ranges[1]
        for axis, right in ((0, blocks.start), (1, blocks.stop)):
            if (
                right - 1 in self.parts[axis].tables
                and right in self.parts[axis + 1].tables
                and right in self.chunks.held[group]
            ):
                left, own = self.parts[axis].tables[right - 1], self.parts[axis + 1].tables[right]
                size = self.problem.tables[0].store.crossing[right]
                moved = self.problem.tables[group].moves(left, own, size)[np.ix_(left.groups, own.groups)]
                total = total + np.expand_dims(moved, 2 if axis == 0 else 0)
        return total

    def _exchanged(self, group: int, stage: int) -> IntArray:
        """The same of one stage where tensors skip layers: each goes straight to its readers."""
        total, start = np.zeros((1, 1, 1), dtype=np.int64), self.cuts[stage]
        axis = [number for number, places in enumerate(self.ranges) for _ in places]
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
        for stage in self.chunks.stages_of[group]:
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
        axis = int(cut > self.ranges[1].start)
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
        return [
            part.tables[place].options.strategies[part.tables[place].rows[own]]
            for part, own, places in zip(self.parts, chosen, self.ranges, strict=True)
            for place in places
        ]  # fmt: skip
