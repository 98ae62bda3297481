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
from galvatron_lite.search.figures import ticks
from galvatron_lite.search.pareto import pairs_within, pareto_within
from galvatron_lite.search.problem import Partition, Problem, StagePlan
from galvatron_lite.search.tables import Mixtures, StrategyTable
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
    start, layers = parts_of(graph)[1].start, len(graph.layers)
    return [(0, *list(accumulate(own, initial=start))[1:-1], layers) for own in _blocks_of(graph, chunks)]


def _blocks_of(graph: ModelGraph, chunks: int) -> tuple[list[int], ...]:
    """Blocks of each chunk under each of the ways to share layers out."""
    before, blocks, after = parts_of(graph)
    return _sizes(len(blocks), bool(before), bool(after), chunks)


@lru_cache(maxsize=4096)
def _sizes(blocks: int, before: bool, after: bool, chunks: int) -> tuple[list[int], ...]:
    sizes = [_shares(blocks, chunks, 0)] if blocks >= chunks else []
    if blocks % chunks and blocks + before + after >= chunks:
        shares = _shares(blocks + before + after, chunks, before)
        shares[0] -= before
        shares[-1] -= after
        sizes.append(shares)
    return tuple(sizes)


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
class _Chunks:
    """Which layers groups of devices hold."""

    stages_of: tuple[tuple[int, ...], ...]  # per group, the numbers of its stages
    held: tuple[frozenset[int], ...]  # per group, the places of all its layers
    positions: dict[int, int]  # in which of as many equal parts as there are of its group's blocks each block is
    # (groups, chunks, 2, parts) blocks of each chunk that have the first strategy and the second, where those of the
    # first so many parts have the first
    placed: IntArray
    # per group, of what it sends forward and back: whether blocks send, a layer that does, bytes a sample, the groups
    # of devices on both sides of the boundary, and how often that is
    sends: tuple[tuple[Counter[_Send], Counter[_Send]], ...]


_Send = tuple[int, int, int, int, int]


@lru_cache(maxsize=4096)
def _chunks(
    schedule: Schedule, groups: int, virtual: int, cuts: tuple[int, ...], blocks: range, crossing: tuple[int, ...]
) -> _Chunks:
    stages_of = tuple(
        tuple(stage_at(schedule, groups, group, chunk) for chunk in range(virtual)) for group in range(groups)
    )
    held = tuple(frozenset(place for stage in own for place in range(*cuts[stage : stage + 2])) for own in stages_of)
    own = [sorted(places.intersection(blocks)) for places in held]
    parts = min(_PARTS, *(len(places) for places in own if places))  # a group may hold the edges of the model alone
    positions = {place: number * parts // len(places) for places in own for number, place in enumerate(places)}
    counts = np.zeros((groups, virtual, parts), dtype=np.int64)
    for group, stages in enumerate(stages_of):
        for chunk, stage in enumerate(stages):
            for place in range(max(cuts[stage], blocks.start), min(cuts[stage + 1], blocks.stop)):
                counts[group, chunk, positions[place]] += 1
    first = np.cumsum(counts, axis=-1) - counts
    placed = np.stack((first, counts.sum(axis=-1, keepdims=True) - first), axis=2)
    sides: list[_Send | None] = [None]
    for stage in range(1, len(cuts) - 1):
        left, right = (group_of(schedule, groups, side) for side in (stage - 1, stage))
        inner = cuts[stage] > blocks.start
        # One strategy for all layers of a part: any of them tells what is sent.
        sender = blocks.start if inner else cuts[stage] - 1
        sides.append(None if left == right else (int(inner), sender, crossing[cuts[stage]], left, right))
    sides.append(None)
    sends = tuple(
        (Counter(filter(None, (sides[at + 1] for at in own))), Counter(filter(None, (sides[at] for at in own))))
        for own in stages_of
    )
    return _Chunks(stages_of, held, positions, placed, sends)


@dataclass(eq=False)
class Uniform:
    """The uniform plans of one shape."""

    problem: Problem  # the shape, its tables and budgets
    cuts: tuple[int, ...]  # where chunks begin
    settled: list[_Part] = field(default_factory=list)  # ``parts``, where they are known
    _kept: IntArray = field(default_factory=lambda: np.arange(0), init=False)  # see ``_first``
    _looked: int = field(default=0, init=False)

    @cached_property
    def ranges(self) -> tuple[range, range, range]:
        """``parts_of`` the model."""
        return parts_of(self.problem.graph)

    @cached_property
    def chunks(self) -> _Chunks:
        """Which layers groups of devices hold."""
        shape = self.problem.shape
        crossing = self.problem.tables[0].store.crossing
        return _chunks(shape.schedule, shape.stages, shape.virtual, self.cuts, self.ranges[1], crossing)

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
        own = self.mixtures
        blocks = self._part(self.ranges[1]) if own is None else self._mixed(own, np.arange(len(own.first)))
        return [self._edges[0], blocks, self._edges[1]]

    @cached_property
    def _edges(self) -> tuple[_Part, _Part]:
        return self._part(self.ranges[0]), self._part(self.ranges[2])

    def _part(self, places: range) -> _Part:
        tables: dict[int, StrategyTable] = {}
        for group, held in enumerate(self.chunks.held):
            for place in held.intersection(places):
                layer = self.problem.graph.layers[place]
                own = self.problem.tables[group]
                tables[place] = own.unpruned(layer.kind, layer.name, self.sharing.get(place, ALONE))
        if not tables:
            return _Part(1, {})
        distinct = list({id(table): table for _, table in sorted(tables.items())}.values())
        every = self.problem.tables[0].store.common(distinct)
        kept = self._useful(every, distinct, bool(self.sharing.keys() & set(places)))
        thinned = {id(table): own.at(kept) for table, own in zip(distinct, every, strict=True)}
        return _Part(len(kept), {place: thinned[id(table)] for place, table in tables.items()})

    def _useful(self, tables: Sequence[StrategyTable], of: Sequence[StrategyTable], shared: bool) -> IntArray:
        """Rows that no other of the same layout equals or beats in every figure of all tables, parts of some others."""
        first, form, known = tables[0], self.problem.form, self.problem.tables[0].store.useful
        if shared:
            return np.arange(len(first))
        rounds = form.microbatches if form.freed else 0
        key = (form.freed, rounds, form.apart, *map(id, of))
        if key not in known:
            judged = [table.keys(form) for table in tables]
            keys = np.column_stack((*judged, *(table.figures.resting for table in tables)))
            known[key] = pareto_within(keys, first.codes)
        return known[key]

    @cached_property
    def mixtures(self) -> Mixtures | None:
        """The choices for blocks that are all alike; None where they are not."""
        layers, tables, blocks = self.problem.graph.layers, self.problem.tables, self.ranges[1]
        fixed = tables[0].fixed
        kinds = {(layers[place].kind, fixed.pins_of(layers[place].name) if fixed.layers else ()) for place in blocks}
        if len(kinds) > 1 or len({id(own) for own in tables}) > 1 or self.sharing.keys() & set(blocks):
            return None
        whole, parts = tables[0].unpruned(layers[blocks[0]].kind, layers[blocks[0]].name), self.chunks.placed.shape[-1]
        form, known = self.problem.form, tables[0].store.mixtures
        key = (id(whole), parts, form.freed, form.microbatches if form.freed else 0)
        if key not in known:
            table = whole.at(self._useful([whole], [whole], shared=False))
            every, (a, b) = np.arange(len(table)), pairs_within(table.options.degrees[table.rows])
            pairs = (np.concatenate(own) for own in ((a, b), (b, a)))
            first, second = (np.concatenate((every, np.tile(own, parts - 1))) for own in pairs)
            counts = np.repeat(np.arange(parts), [len(every), *[2 * len(a)] * (parts - 1)])
            known[key] = Mixtures(table, first, second, counts)
        return known[key]

    def _mixed(self, mixtures: Mixtures, rows: IntArray) -> _Part:
        """What blocks take under some of the choices."""
        first, second, count = mixtures.first[rows], mixtures.second[rows], mixtures.count[rows]
        parts = range(self.chunks.placed.shape[-1])
        tables = [mixtures.table.at(np.where(number < count, first, second)) for number in parts]
        return _Part(len(rows), {place: tables[number] for place, number in self.chunks.positions.items()})

    @cached_property
    def least(self) -> FloatArray:
        """(B,): a time that no plan with each choice for blocks beats: layers around them at their least, moves between
        these and blocks left out, and memory too."""
        if self.mixtures is None:
            return np.zeros(self.parts[1].size)
        form, table, groups = self.problem.form, self.mixtures.table, list(self.alike.values())
        first, second = self.mixtures.first, self.mixtures.second
        placed = np.stack([self.chunks.placed[own[0]].sum(axis=0) for own in groups])[:, :, self.mixtures.count]
        around = list(zip(*(self._around_blocks(own[0], table) for own in groups), strict=True))
        columns = [
            placed[:, 0] * own[first] + placed[:, 1] * own[second] + np.stack(others)[:, first]
            for own, others in zip((*table.parts(form), table.figures.step), around, strict=True)
        ]
        counts, time = np.array([len(own) for own in groups]), columns[-1].max(axis=0)
        for ramp, rounds, column in zip(form.ramp, form.rounds, columns, strict=False):
            time = time + ramp * (counts @ column) + rounds * column.max(axis=0)
        return np.asarray(time * (1 - 1e-9))

    def _around_blocks(self, group: int, blocks: StrategyTable) -> list[FloatArray]:
        """(S,) each, of the parts of a group's micro-batch and its work once a step: sends by the strategy of blocks,
        and other layers at the least."""
        form, size = self.problem.form, len(blocks)
        only = replace(self, settled=[_Part(1, {}), _Part(size, dict.fromkeys(self.ranges[1], blocks)), _Part(1, {})])
        sends = only._sends(group)
        sent = (*form.parts(*sends, 0 * sends[0]), 0 * sends[0])
        total = [np.zeros(size) + own.reshape(-1) for own in sent]
        tables = self.problem.tables[group]
        for place in self.chunks.held[group].difference(self.ranges[1]):
            layer = self.problem.graph.layers[place]
            table = tables.unpruned(layer.kind, layer.name, self.sharing.get(place, ALONE))
            for own, figure in zip(total, (*table.parts(form), table.figures.step), strict=True):
                own += figure.min() if len(table) else np.inf
        return total

    @cached_property
    def _order(self) -> IntArray:
        return np.argsort(self.least, kind="stable")

    def _first(self, count: int, top: float, runs: int | None) -> IntArray:
        """At least so many choices for blocks, if there are, that the first and the last group can hold, in the order
        of ``least``; none is left out that takes less than ``top`` and has no more runs."""
        while True:
            kept = (
                self._kept if runs != 1 or self.mixtures is None else self._kept[self._kept < len(self.mixtures.table)]
            )
            if len(kept) >= count or self._looked >= len(self._order):
                return kept
            rows = self._order[self._looked : 2 * max(self._looked, _AT_ONCE)]
            if self.least[rows[0]] >= top:
                return kept
            self._kept = np.concatenate((self._kept, rows[self._held(rows)]))
            self._looked += len(rows)

    def _held(self, rows: IntArray) -> NDArray[np.bool_]:
        """Which choices for blocks the first and the last group can hold, for all that is known of blocks alone."""
        fits, own = np.ones(len(rows), dtype=bool), self.mixtures
        if own is None:
            return fits
        first, second, count = own.first[rows], own.second[rows], own.count[rows]
        kept, states = own.table.figures.kept, own.table.figures.resting[:, 0]
        for room, held, flying in self._rooms:
            resting = held[0, count] * states[first] + held[1, count] * states[second]
            flown = flying[:, 0, count] * kept[first] + flying[:, 1, count] * kept[second]
            fits &= resting + flown.max(axis=0) <= room
        return fits

    @cached_property
    def _rooms(self) -> list[tuple[int, IntArray, IntArray]]:
        """Of the first and the last group: bytes, (2, parts) blocks, and (moments, 2, parts) micro-batches of them."""
        shape, found = self.problem.shape, list[tuple[int, IntArray, IntArray]]()
        for group in (0, shape.stages - 1) if shape.microbatches > 1 else ():
            room = self.problem.budgets[group] - self.problem.tables[0].pricer.profile.cluster.device.context
            moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
            placed = self.chunks.placed[group]
            flying = np.array([*{counts for _, counts in moments}]) @ placed.reshape(len(placed), -1)
            found.append((room, placed.sum(axis=0), flying.reshape(-1, *placed.shape[1:])))
        return found

    def bound(self, limit: float = np.inf, runs: int | None = None) -> float:
        """A time that no uniform plan of less than the limit and of so many runs beats, quickly."""
        rows = self._first(1, limit, runs)
        ahead = self.least[self._order[self._looked]] if self._looked < len(self._order) else np.inf
        return float(self.least[rows[0]] if len(rows) else ahead)

    def best(self, limit: int | None, runs: int | None = None) -> Partition | None:
        """The best plan that fits and takes less than ``limit`` picoseconds; None where there is none.

        Args:
            limit: picoseconds; None: any plan will do.
            runs: see ``Problem``.
        """
        best, top, start = None, np.inf if limit is None else limit - _HALF, 0
        while len(rows := self._first(start + _AT_ONCE, top, runs)[start : start + _AT_ONCE]):
            if self.least[rows[0]] >= top:
                break
            start += len(rows)
            rows, mixtures = rows[self.least[rows] < top], self.mixtures
            blocks = self.parts[1].at(rows) if mixtures is None else self._mixed(mixtures, rows)
            own = replace(self, settled=[self._edges[0], blocks, self._edges[1]])
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
        simple = len({id(own) for own in self.problem.tables}) == 1 and not self.problem.graph.tensors
        for group, stages in enumerate(self.chunks.stages_of):
            edges = 0 in stages, shape.stages * shape.virtual - 1 in stages
            sizes = tuple(self.cuts[stage + 1] - self.cuts[stage] for stage in stages)
            sends = [Counter[object](), Counter[object]()]
            for own, side in zip(sends, self.chunks.sends[group], strict=True):
                for (axis, _, output, left, right), count in side.items():
                    own[axis, output, stride_between(left, right, shape.stage_devices, node)] += count
            key = (sizes, edges, *(frozenset(own.items()) for own in sends))
            found.setdefault(key if simple and self.mixtures is not None else group, []).append(group)
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
        overhead, own = self.problem.tables[group].pricer.profile.overhead, self.chunks.stages_of[group]
        ends = [len({0, len(self.cuts) - 2} & {*own}), len(own)]
        host = sum(
            count * ticks(sides * overhead.pipeline + overhead.microbatch / 2)
            for sides, count in ((1, ends[0]), (2, ends[1] - ends[0]))
        )
        sums = [np.full((1, 1, 1), host) for _ in range(2)]
        for number, sends in enumerate(self.chunks.sends[group]):
            for (axis, place, *boundary), count in sends.items():
                if place in self.parts[axis].tables:
                    sent = self._sent_over(self.parts[axis].tables[place], *boundary)
                    sums[number] = sums[number] + count * along(sent, axis)
        return sums[0], sums[1]

    def _sent_over(self, table: StrategyTable, output: int, left: int, right: int) -> IntArray:
        """Picoseconds of sending so many bytes a sample from one group of devices to another, by sender's strategy."""
        pricer, shape, sends = self.problem.pricer, self.problem.shape, self.problem.tables[0].store.sends
        stride = stride_between(left, right, shape.stage_devices, pricer.profile.cluster.levels[0].size)
        ends = (id(pricer.of_group(shape.stage_devices, group)) for group in (left, right))
        key = (id(table.options), output, shape.microbatch, shape.stage_devices, stride, *ends)
        if key not in sends:
            sizes = [boundary_bytes(output, shape.microbatch, sender) for sender in table.options.samples]
            pairs = zip(sizes, table.options.samples, strict=True)
            sends[key] = np.array([ticks(transfer_seconds(pricer, *own, shape, (left, right))) for own in pairs])
        return sends[key][table.codes]

    def agreeing(self) -> NDArray[np.bool_]:
        """Candidates whose layers that share parameters have one strategy."""
        agree = np.ones((1, 1, 1), dtype=bool)
        for places in tied_groups(self.problem.graph):
            axes = sorted({axis for axis, part in enumerate(self.parts) for place in places if place in part.tables})
            for a, b in pairwise(axes):
                left, right = (self._tied(axis, places) for axis in (a, b))
                agree = agree & np.expand_dims(left[:, None] == right, ({0, 1, 2} - {a, b}).pop())
        return agree

    def _tied(self, axis: int, places: Sequence[int]) -> IntArray:
        """Numbers of the strategies of the layers of a part that share parameters."""
        tables = self.parts[axis].tables
        return self.problem.tables[0].store.numbers(next(tables[place] for place in places if place in tables))

    def strategies(self, chosen: Sequence[int]) -> list[Strategy]:
        """Of every layer."""
        return [
            part.tables[place].options.strategies[part.tables[place].rows[own]]
            for part, own, places in zip(self.parts, chosen, self.ranges, strict=True)
            for place in places
        ]  # fmt: skip


def uniform_plans(problem: Problem) -> list[Uniform]:
    """The uniform plans of a shape, by cuts."""
    shape = problem.shape
    return [Uniform(problem, cuts) for cuts in cuts_of(problem.graph, shape.stages * shape.virtual)]


def averaged(problems: Sequence[Problem]) -> FloatArray:
    """(V,): times that no uniform plan under interleaved 1F1B beats, of shapes that differ in stages a group alone.

    Quickly: all groups take their average of what blocks, sends and the least of other layers come to, and of memory
    only blocks in the first group count, when it begins its first backward pass: p micro-batches of each of its v
    stages, and where there are more p - 1 of the first besides. Of two strategies that only recompute differently
    blocks have any shares.
    """
    own, graph, shape, tables = problems[0], problems[0].graph, problems[0].shape, problems[0].tables
    stages = np.array([[problem.shape.virtual * shape.stages] for problem in problems])
    uniform = Uniform(own, cuts_of(graph, int(stages[0, 0]))[0])
    if uniform.mixtures is None:
        return np.zeros(len(problems))
    table, blocks = uniform.mixtures.table, uniform.ranges[1]
    around = [tables[0].unpruned(one.kind, one.name) for one in graph.layers if one.role is not Role.BLOCK]
    if not len(table) or not all(map(len, around)):
        return np.full(len(problems), np.inf)
    # Sends go over each boundary forth and back, but for one that other layers may send over; whole picoseconds differ.
    pairs = ((0, 1), (shape.stages - 1, 0))
    outputs = min(tables[0].store.crossing[blocks.start + 1 : blocks.stop], default=0)
    sent = np.min([uniform._sent_over(table, outputs, *pair) for pair in pairs], axis=0)
    overhead = own.pricer.profile.overhead
    host = (4 * stages - 4) * ticks(overhead.pipeline) + stages * ticks(overhead.microbatch) - 8 * stages
    layers = len(blocks) * table.both + sum(int(other.both.min()) for other in around)
    steps = len(blocks) * table.figures.step + sum(int(other.figures.step.min()) for other in around)
    ramps, rounds = (np.array([getattr(problem.form, name) for problem in problems]) for name in ("ramp", "rounds"))
    time = (layers + (2 * stages - 4) * sent + host) * (ramps + rounds / shape.stages) + steps / shape.stages
    shares = [[every[:: shape.stages] for every in _blocks_of(graph, int(count))] for (count,) in stages]
    held = np.array([[min(map(sum, own))] for own in shares])
    first = np.array([[min(chunks[0] for chunks in own)] for own in shares])
    flying = shape.stages * held + (shape.microbatches > shape.stages) * (shape.stages - 1) * first
    room = own.budgets[0] - tables[0].pricer.profile.cluster.device.context
    over = held * table.figures.resting[:, 0] + flying * table.figures.kept - room
    least = np.where(over <= 0, time, np.inf).min(axis=1)
    a, b = pairs_within(table.options.degrees[table.rows])
    if len(a):
        a, b = np.concatenate((a, b)), np.concatenate((b, a))
        span = np.maximum(over[:, b] - over[:, a], 1)
        mixed = time[:, a] + np.minimum(-over[:, a] / span, 1.0) * (time[:, b] - time[:, a])
        least = np.minimum(least, np.where((over[:, a] <= 0) & (over[:, b] > 0), mixed, np.inf).min(axis=1))
    return np.asarray(least * (1 - 1e-9))
