"""Plans whose groups of devices run several virtual stages (interleaved 1F1B, ZB-V): the exact best uniform one.

The declared space. Blocks are shared out evenly over the chunks in the order of the model, or so are blocks and the
layers before and after them, which count as one block each (``problem.cuts_of``). Layers before the blocks are in the
first chunk, those after them in the last. One strategy for all layers before the blocks and one for all layers after
them; for blocks one, or two that differ in what they recompute: of the blocks of every group of devices the first so
many eighths have the one, the others the other. Layers that share parameters have one strategy.

With e, b, h the strategies before the blocks, of the blocks and after them, the time is the closed form of
``cost.schedule`` over groups: sums of figures of b, and of e and h in the groups that hold them. So all candidates of
some b are timed at once as (E, B, H) arrays, and so is their memory (``cost.memory.group_memory``); axes have length 1
where a figure does not depend on a part. Strategies that another one of their layout equals or beats in everything are
left out first. Choices of b are taken in the order of what their blocks take by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import groupby, pairwise

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cost.layer import ALONE, ParameterSharing
from galvatron_lite.cost.stage import sharing_of, tied_groups, transfer_seconds
from galvatron_lite.parallelism.pipeline.cost import (
    boundary_bytes,
    chunks_in_flight,
    held_messages,
    stride_between,
)
from galvatron_lite.parallelism.pipeline.schedule import Moments, group_of, most_of, stage_at
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.chain.chain import worst_moment
from galvatron_lite.search.problem import Partition, Problem, StagePlan, parts_of
from galvatron_lite.search.tables import (
    REST,
    UPDATED,
    Memo,
    StrategyTable,
    pairs_within,
    pareto_rows,
    pareto_within,
    remembered,
    ticks,
)

Part = dict[int, StrategyTable]
"""Figures of each layer before the blocks, of the blocks, or after them, under each choice; empty without layers."""
Parts = Sequence[Part]
Send = tuple[int, int, int, int, int]
"""Whether blocks send, a layer that does, bytes a sample, and the groups of devices on both sides of the boundary."""
_HALF, _TINY = 0.5, 1e-9
_PARTS, _LOOKED, _AT_ONCE = 8, 1024, 64
"""Parts that the blocks of a group are in; choices for blocks that are looked at, and timed, at once."""
_ZERO = np.zeros((1, 1, 1), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Mixtures:
    """Choices for blocks that are all alike: of those of each group of devices the first so many parts have the first
    strategy."""

    table: StrategyTable  # S strategies, by themselves the first S of the B choices
    first: IntArray  # first, second: (B,) rows of the table
    second: IntArray
    count: IntArray  # (B,) parts


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    stages_of: tuple[tuple[int, ...], ...]  # per group, the numbers of its stages
    held: tuple[frozenset[int], ...]  # per group, the places of all its layers
    positions: dict[int, int]  # in which of as many equal parts as there are of its group's blocks each block is
    # (groups, chunks, 2, parts) blocks of each chunk that have the first strategy and the second, where those of the
    # first so many parts have the first
    placed: IntArray
    sends: tuple[tuple[Counter[Send], Counter[Send]], ...]  # per group, what it sends forward and back, how often


@lru_cache(maxsize=4096)
def _chunks(
    schedule: Schedule, groups: int, virtual: int, cuts: tuple[int, ...], blocks: range, crossing: tuple[int, ...]
) -> _Chunks:
    stages_of = tuple(
        tuple(stage_at(schedule, groups, group, chunk) for chunk in range(virtual)) for group in range(groups)
    )
    held = tuple(
        frozenset(place for stage in choice for place in range(*cuts[stage : stage + 2])) for choice in stages_of
    )
    choice = [sorted(places.intersection(blocks)) for places in held]
    parts = min(_PARTS, *(len(places) for places in choice if places))  # a group may hold the edges of the model alone
    positions = {place: number * parts // len(places) for places in choice for number, place in enumerate(places)}
    counts = np.zeros((groups, virtual, parts), dtype=np.int64)
    for group, stages in enumerate(stages_of):
        for chunk, stage in enumerate(stages):
            for place in range(max(cuts[stage], blocks.start), min(cuts[stage + 1], blocks.stop)):
                counts[group, chunk, positions[place]] += 1
    first = np.cumsum(counts, axis=-1) - counts
    placed = np.stack((first, counts.sum(axis=-1, keepdims=True) - first), axis=2)
    sides: list[Send | None] = [None]
    for stage in range(1, len(cuts) - 1):
        left, right = (group_of(schedule, groups, side) for side in (stage - 1, stage))
        inner = cuts[stage] > blocks.start
        # One strategy for all layers of a part: any of them tells what is sent.
        sender = blocks.start if inner else cuts[stage] - 1
        sides.append(None if left == right else (int(inner), sender, crossing[cuts[stage]], left, right))
    sides.append(None)
    sends = tuple(
        (Counter(filter(None, (sides[at + 1] for at in choice))), Counter(filter(None, (sides[at] for at in choice))))
        for choice in stages_of
    )
    return _Chunks(stages_of, held, positions, placed, sends)


class Uniform:
    """The uniform plans of one shape with one way to share layers out."""

    def __init__(self, problem: Problem, cuts: tuple[int, ...]) -> None:
        shape, store = problem.shape, problem.tables[0].store
        self.problem, self.cuts, self.store = problem, cuts, store
        self.ranges = parts_of(problem.graph)
        self.chunks = _chunks(shape.schedule, shape.stages, shape.virtual, cuts, self.ranges[1], store.crossing)
        layers, alike = problem.graph.layers, store.alike(problem.tables[0].fixed.layers)
        self.first = [layers[place] for place in alike]  # what each layer is priced as, sharing aside
        self._memo, self.sharing = Memo(), dict[int, ParameterSharing]()
        for places in self.chunks.held:
            self.sharing |= sharing_of(problem.graph, places)

    def bound(self, limit: float = np.inf, runs: int | None = None) -> float:
        """A time that no uniform plan of so many runs beats, quickly; infinite where none takes less than a limit."""
        return next((float(self._least[rows[0]]) for rows in self._ordered(limit, runs)), np.inf)

    def best(self, limit: float, runs: int | None = None) -> Partition | None:
        """The best plan that fits and takes less than ``limit`` picoseconds; None where there is none.

        Args:
            limit: picoseconds.
            runs: see ``Problem``.
        """
        best, top = None, limit - _HALF
        for some in self._ordered(top, runs):
            some = some[self._least[some] < top]
            if not len(some):
                break
            around = self._part(self.ranges[0]), self._part(self.ranges[2])
            parts, time = self._fitting((around[0], self._blocks(some), around[1]), top)
            if np.isfinite(time).any():
                place = int(np.argmin(time))
                top = float(time.flat[place]) - _HALF
                chosen = [int(index) for index in np.unravel_index(place, time.shape)]
                strategies = [
                    part[place].options.strategies[part[place].rows[choice]]
                    for part, choice, places in zip(parts, chosen, self.ranges, strict=True)
                    for place in places
                ]
                # Stages carry no figures of their own.
                stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(self.cuts))
                best = Partition(round(top + _HALF), self.cuts, stages)
        return best

    def _fitting(self, parts: Sequence[Part], limit: float) -> tuple[list[Part], FloatArray]:
        """Choices for each part of which some combination takes less than the limit and fits, and (E, B, H)
        picoseconds of every combination; infinite for those that do not."""
        groups = [group for groups in self._alike.values() for group in groups]
        if self.problem.shape.schedule.front_loaded:  # later groups hold no more micro-batches of any chunk
            groups = [groups[0] for groups in self._alike.values()]
        time = np.zeros((1, 1, 1))
        for number, group in enumerate(groups):
            time = np.where(self.group_bytes(parts, group) <= self.problem.budgets[group], time, np.inf)
            parts, time = _narrowed(parts, time)
            if time.size and not number:  # what the first group cannot hold is not timed
                parts, time = _narrowed(parts, time + self._times(parts, limit))
            if not time.size:
                break
        return list(parts), time

    def _table(self, group: int, place: int) -> StrategyTable:
        layer = self.first[place]
        return self.problem.tables[group].unpruned(layer.kind, layer.name, self.sharing.get(place, ALONE))

    @remembered
    def _part(self, places: range) -> Part:
        pairs = [(group, place) for group, held in enumerate(self.chunks.held) for place in held.intersection(places)]
        tables = {place: self._table(group, place) for group, place in sorted(pairs, key=lambda pair: pair[1])}
        if not tables:
            return {}
        distinct = list({id(table): table for table in tables.values()}.values())
        every = self.store.common(distinct)
        kept = np.arange(len(every[0])) if self.sharing.keys() & set(places) else self._useful(every, distinct)
        common = {id(table): choice for table, choice in zip(distinct, every, strict=True)}
        return _at({place: common[id(table)] for place, table in tables.items()}, kept)

    def _useful(self, tables: Sequence[StrategyTable], of: Sequence[StrategyTable]) -> IntArray:
        """Rows that no other of the same layout equals or beats in every figure of all tables, parts of some others."""
        form = self.problem.form

        def useful() -> IntArray:
            keys = [*(table.keys(form) for table in tables), *(table.figures.resting for table in tables)]
            return pareto_within(np.column_stack(keys), tables[0].codes)

        key = ("useful", form.freed, form.microbatches if form.freed else 0, form.apart, *map(id, of))
        return self.store.memo.once(key, useful)

    @cached_property
    def mixtures(self) -> Mixtures | None:
        """The choices for blocks that are all alike; None where they are not."""
        tables, blocks = self.problem.tables, self.ranges[1]
        alike = len({self.first[place].name for place in blocks}) == 1 and len({id(choice) for choice in tables}) == 1
        if not alike or self.sharing.keys() & set(blocks):
            return None
        free = self._table(0, blocks[0])
        form, parts = self.problem.form, self.chunks.placed.shape[-1]

        def mixed() -> Mixtures:
            table = free.at(self._useful([free], [free]))
            every, (a, b) = np.arange(len(table)), pairs_within(table.options.degrees[table.rows])
            pairs = (np.concatenate(choice) for choice in ((a, b), (b, a)))
            first, second = (np.concatenate((every, np.tile(choice, parts - 1))) for choice in pairs)
            counts = np.repeat(np.arange(parts), [len(every), *[2 * len(a)] * (parts - 1)])
            return Mixtures(table, first, second, counts)

        key = ("mixtures", id(free), parts, form.freed, form.microbatches if form.freed else 0)
        return self.store.memo.once(key, mixed)

    def _blocks(self, rows: IntArray) -> Part:
        choice = self.mixtures
        if choice is None:
            return _at(self._part(self.ranges[1]), rows)
        first, second, count = choice.first[rows], choice.second[rows], choice.count[rows]
        parts = range(self.chunks.placed.shape[-1])
        tables = [choice.table.at(np.where(number < count, first, second)) for number in parts]
        return {place: tables[number] for place, number in self.chunks.positions.items()}

    def _ordered(self, limit: float, runs: int | None) -> Iterator[IntArray]:
        """Choices for blocks that take less than a limit and that ``_flying`` groups may hold, in the order of
        ``_least``, some at a time."""
        rows = np.flatnonzero(self._least < limit)
        if runs == 1 and self.mixtures is not None:
            rows = rows[rows < len(self.mixtures.table)]
        rows = rows[np.argsort(self._least[rows], kind="stable")]
        for begin in range(0, len(rows), _LOOKED):
            some = self._holding(rows[begin : begin + _LOOKED])
            yield from (some[place : place + _AT_ONCE] for place in range(0, len(some), _AT_ONCE))

    def _holding(self, rows: IntArray) -> IntArray:
        """Those of some choices for blocks whose states and activations alone ``_flying`` groups may hold."""
        for room, flying, held in self._flying:
            assert self.mixtures is not None
            choice = self.mixtures
            first, second, count = choice.first[rows], choice.second[rows], choice.count[rows]
            kept, states = choice.table.figures.kept, choice.table.figures.resting[:, 0]
            flown = flying[:, 0, count] * kept[first] + flying[:, 1, count] * kept[second]
            resting = held[0, count] * states[first] + held[1, count] * states[second]
            rows = rows[resting + flown.max(axis=0) <= room]
        return rows

    @cached_property
    def _flying(self) -> list[tuple[int, IntArray, IntArray]]:
        """Of the groups that may hold most, where blocks are alike: bytes there are, blocks of each strategy times
        micro-batches in flight, by moment and parts of the first strategy, and blocks."""
        shape, in_flight = self.problem.shape, []
        ends = (0,) if shape.schedule.front_loaded else (0, shape.stages - 1)
        for group in ends if self.mixtures is not None and shape.microbatches > 1 else ():
            room = self.problem.budgets[group] - self.problem.tables[0].pricer.profile.cluster.device.context
            moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
            placed = self.chunks.placed[group]
            flying = np.array([*{counts for _, counts in moments}]) @ placed.reshape(len(placed), -1)
            flying = flying[pareto_rows(-flying)]
            in_flight.append((room, flying.reshape(-1, *placed.shape[1:]), placed.sum(axis=0)))
        return in_flight

    @cached_property
    def _least(self) -> FloatArray:
        """(B,): a time that no plan with each choice for blocks beats: layers around them at their least, moves between
        these and blocks left out, and memory too."""
        form, groups = self.problem.form, list(self._alike.values())
        if self.mixtures is None:
            columns = self._columns_of_unlike_blocks([choice[0] for choice in groups])
        else:
            table, first, second = self.mixtures.table, self.mixtures.first, self.mixtures.second
            placed = np.stack([self.chunks.placed[choice[0]].sum(axis=0) for choice in groups])[
                :, :, self.mixtures.count
            ]
            blocks = dict.fromkeys(self.ranges[1], table)
            around = list(zip(*(self._around_blocks(choice[0], blocks) for choice in groups), strict=True))
            columns = [
                placed[:, 0] * choice[first] + placed[:, 1] * choice[second] + np.stack(others)[:, first]
                for choice, others in zip((*table.parts(form), table.figures.step), around, strict=True)
            ]
        counts, time = np.array([len(choice) for choice in groups]), columns[-1].max(axis=0)
        for ramp, rounds, column in zip(form.ramp, form.rounds, columns, strict=False):
            time = time + ramp * (counts @ column) + rounds * column.max(axis=0)
        return np.asarray(time * (1 - _TINY))

    def _columns_of_unlike_blocks(self, groups: Sequence[int]) -> list[FloatArray]:
        """(G, B) each: as ``_around_blocks`` of each group, with the blocks it holds."""
        form, blocks, columns = self.problem.form, self._part(self.ranges[1]), []
        for group in groups:
            total = self._around_blocks(group, blocks)
            held = Counter(id(blocks[place]) for place in self.chunks.held[group].intersection(self.ranges[1]))
            for table in {id(choice): choice for choice in blocks.values()}.values():
                for choice, figure in zip(total, (*table.parts(form), table.figures.step), strict=True):
                    choice += held[id(table)] * figure
            columns.append(total)
        return [np.stack(choice) for choice in zip(*columns, strict=True)]

    def _around_blocks(self, group: int, blocks: Part) -> list[FloatArray]:
        """(S,) each, of the parts of a group's micro-batch and its work once a step: sends by the strategy of blocks,
        and other layers at the least."""
        form = self.problem.form
        sends = self._sends([{}, blocks, {}], group)
        sent = (*form.parts(*sends, 0 * sends[0]), 0 * sends[0])
        total = [np.zeros(len(next(iter(blocks.values())))) + choice.reshape(-1) for choice in sent]
        for place in self.chunks.held[group].difference(self.ranges[1]):
            table = self._table(group, place)
            for choice, figure in zip(total, (*table.parts(form), table.figures.step), strict=True):
                choice += figure.min() if len(table) else np.inf
        return total

    @cached_property
    def _alike(self) -> dict[object, list[int]]:
        """Groups by what their time depends on."""
        shape, groups = self.problem.shape, dict[object, list[int]]()
        node = self.problem.pricer.profile.cluster.levels[0].size
        simple = len({id(choice) for choice in self.problem.tables}) == 1 and not self.problem.graph.tensors
        for group, stages in enumerate(self.chunks.stages_of):
            edges = 0 in stages, shape.stages * shape.virtual - 1 in stages
            sizes = tuple(self.cuts[stage + 1] - self.cuts[stage] for stage in stages)
            sends = [Counter[object](), Counter[object]()]
            for choice, side in zip(sends, self.chunks.sends[group], strict=True):
                for (axis, _, output, left, right), count in side.items():
                    choice[axis, output, stride_between(left, right, shape.stage_devices, node)] += count
            key = (sizes, edges, *(frozenset(choice.items()) for choice in sends))
            groups.setdefault(key if simple and self.mixtures is not None else group, []).append(group)
        return groups

    def _times(self, parts: Parts, limit: float) -> FloatArray:
        """(E, B, H): picoseconds of every candidate below the limit; infinite for the others, and where layers that
        share parameters differ."""
        form, counts = self.problem.form, [len(groups) for groups in self._alike.values()]
        columns = [self._group(parts, groups[0]) for groups in self._alike.values()]
        total: FloatArray = _reduced(np.maximum, [choice[-1] for choice in columns]).astype(np.float64)
        for part, (ramp, rounds) in enumerate(zip(form.ramp, form.rounds, strict=True)):
            choice = [column[part] for column in columns]
            each = [count * column for count, column in zip(counts, choice, strict=True)]
            total = total + (ramp * _reduced(np.add, each) + rounds * _reduced(np.maximum, choice))
        total = np.broadcast_to(total, [len(next(iter(part.values()))) if part else 1 for part in parts])
        alive = total < limit
        for places in tied_groups(self.problem.graph):
            tables = [next((part[place] for place in places if place in part), None) for part in parts]
            named = [(axis, self.store.numbers(table)) for axis, table in enumerate(tables) if table is not None]
            for (a, left), (b, right) in pairwise(named):
                alive = alive & np.expand_dims(left[:, None] == right, ({0, 1, 2} - {a, b}).pop())
        return np.where(alive, total, np.inf)

    def _group(self, parts: Parts, group: int) -> list[IntArray]:
        form, runs = self.problem.form, list(_runs(parts, sorted(self.chunks.held[group])))
        forward, backward, saved, step = (
            _column(runs, figure)
            for figure in (
                lambda table: table.figures.forward,
                lambda table: table.figures.backward,
                lambda table: table.saved(form),
                lambda table: table.figures.step,
            )
        )
        moves, sends = self._moves(parts, group), self._sends(parts, group)
        return [*form.parts(forward + moves + sends[0], backward + moves + sends[1], saved), step]

    def _moves(self, parts: Parts, group: int) -> IntArray:
        """Picoseconds of redistribution in one pass: between blocks and the layers around them, or where tensors skip
        layers, of each to its readers."""
        total, inside = _ZERO, self.problem.tables[group]
        axes = [number for number, places in enumerate(self.ranges) for _ in places]
        moved: list[tuple[int, int, int]] = []
        if self.problem.graph.tensors:
            for stage in self.chunks.stages_of[group]:
                start, stop = self.cuts[stage : stage + 2]
                entering = [(start - 1, start, inside.store.crossing[start])] if start else []
                pairs = inside.store.exchanges(range(start, stop))
                moved += [*entering, *((start + left, start + right, size) for left, right, size in pairs)]
        else:
            cuts = [place for place in (self.ranges[1].start, self.ranges[1].stop) if 0 < place < len(axes)]
            held = self.chunks.held[group]
            moved += [(cut - 1, cut, inside.store.crossing[cut]) for cut in cuts if cut in held]
        for left, right, size in moved:
            if axes[left] != axes[right]:
                a, b = parts[axes[left]][left], parts[axes[right]][right]
                seconds = inside.moves(a, b, size)[np.ix_(a.groups, b.groups)]
                total = total + np.expand_dims(seconds, ({0, 1, 2} - {axes[left], axes[right]}).pop())
        return total

    def _sends(self, parts: Parts, group: int) -> tuple[IntArray, IntArray]:
        """Picoseconds of sends and host work of a micro-batch, forward and backward."""
        overhead, choice = self.problem.tables[group].pricer.profile.overhead, self.chunks.stages_of[group]
        ends = len({0, len(self.cuts) - 2} & {*choice})
        host = sum(
            count * ticks(sides * overhead.pipeline + overhead.microbatch / 2)
            for sides, count in ((1, ends), (2, len(choice) - ends))
        )
        sums = [_ZERO + host, _ZERO + host]
        for number, sends in enumerate(self.chunks.sends[group]):
            for (axis, place, *boundary), count in sends.items():
                if place in parts[axis]:
                    sums[number] = sums[number] + count * _along(self.sent(parts[axis][place], *boundary), axis)
        return sums[0], sums[1]

    def sent(self, table: StrategyTable, output: int, left: int, right: int) -> IntArray:
        """Picoseconds of sending so many bytes a sample from one group of devices to another, by sender's strategy."""
        pricer, shape = self.problem.pricer, self.problem.shape
        stride = stride_between(left, right, shape.stage_devices, pricer.profile.cluster.levels[0].size)
        ends = (id(pricer.of_group(shape.stage_devices, group)) for group in (left, right))

        def seconds() -> IntArray:
            pairs = [(boundary_bytes(output, shape.microbatch, choice), choice) for choice in table.options.samples]
            return np.array([ticks(transfer_seconds(pricer, *choice, shape, (left, right))) for choice in pairs])

        key = ("sends", id(table.options), output, shape.microbatch, shape.stage_devices, stride, *ends)
        every: IntArray = self.store.memo.once(key, seconds)
        return every[table.codes]

    def group_bytes(self, parts: Parts, group: int) -> IntArray:
        """Bytes on each device of a group: while one of its stages computes, the others rest."""
        shape, stages = self.problem.shape, self.chunks.stages_of[group]
        runs = [tuple(_runs(parts, range(*self.cuts[stage : stage + 2]))) for stage in stages]
        kinds = [tuple((axis, id(table), count) for axis, table, count in choice) for choice in runs]
        of = dict(zip(kinds, runs, strict=True))
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        flying = np.array([counts for _, counts in held])
        resting, busy = np.array([np.arange(len(kinds)) != choice for choice, _ in held]), flying > 0
        # at each moment, by kind: stages that rest, micro-batches in flight but one of each that computes, busy stages
        counts = np.stack((resting, flying - busy * ~resting, resting & busy), axis=-1)
        member = np.array([[kind == other for other in kinds] for kind in of], dtype=np.int64)
        moments = np.einsum("kv,mvf->mkf", member, counts).reshape(len(held), -1)
        figures = [_column(choice, figure) for choice in of.values() for figure in _FIGURES]
        peak = sum((_column(choice, lambda table: table.figures.memory[:, UPDATED]) for choice in runs), start=_ZERO)
        for kind, choice in of.items():
            members = moments[[kinds[place] == kind for place, _ in held]]
            worst = _worst(choice)
            for row in members[pareto_rows(-members)]:
                moment = sum((count * figure for count, figure in zip(row, figures, strict=True) if count), start=worst)
                peak = np.maximum(peak, moment)
        context = self.problem.tables[group].pricer.profile.cluster.device.context
        return peak + self._buffers(parts, stages, held) + context

    def _buffers(self, parts: Parts, stages: Sequence[int], held: Moments) -> IntArray:
        """Buffers of the boundaries, by their senders' strategies; copies of tensors made before, by the readers'."""
        shape, counted = self.problem.shape, not self.problem.pricer.profile.unbuffered
        total = _ZERO
        for stage, count in zip(stages, most_of(held), strict=True):
            inside = range(*self.cuts[stage : stage + 2])
            ends = ((stage, inside.start), (stage + 1, inside.stop))
            cuts = [  # 0 where nothing is sent
                0 if cut in (0, len(self.problem.graph.layers)) or len({
                    group_of(shape.schedule, shape.stages, other) for other in (side - 1, side)
                }) == 1 else cut
                for side, cut in ends
            ]  # fmt: skip
            left, right = (self._boundary(parts, cut - 1, self.store.crossing[cut]) if cut else _ZERO for cut in cuts)
            ahead, behind = held_messages(shape.microbatches, shape.schedule)
            total = total + counted * (ahead * left + behind * right)
            borrowed = self.store.borrowed(inside)
            if borrowed:
                total = total + count * self._boundary(parts, inside.start, borrowed)
        return total

    def _boundary(self, parts: Parts, place: int, size: int) -> IntArray:
        """``boundary_bytes`` of so many bytes a sample, by the strategies of a layer."""
        axis, table = next((axis, part[place]) for axis, part in enumerate(parts) if place in part)
        choice = np.zeros(len(table.options.samples), dtype=np.int64)
        for code in table.present:
            choice[code] = boundary_bytes(size, self.problem.shape.microbatch, table.options.samples[code])
        return _along(choice[table.codes], axis)


_FIGURES: tuple[Callable[[StrategyTable], IntArray], ...] = (
    lambda table: table.figures.resting[:, 0],
    lambda table: table.figures.kept,
    lambda table: table.figures.resting[:, 1],
)
"""Bytes of a layer: at rest, of each micro-batch in flight, with any in flight besides."""
Run = tuple[int, StrategyTable, int]
"""Axis, table and number of neighbouring layers with one table."""


def _reduced(combine: Callable[[IntArray, IntArray], IntArray], columns: Iterable[IntArray]) -> IntArray:
    """Columns of unlike extents combined, the smallest first."""
    return reduce(combine, sorted(columns, key=np.size))


def _along(values: IntArray, axis: int) -> IntArray:
    shape = [1, 1, 1]
    shape[axis] = len(values)
    return values.reshape(shape)


def _runs(parts: Parts, inside: Iterable[int]) -> Iterator[Run]:
    choice = [(axis, part[place]) for place in inside for axis, part in enumerate(parts) if place in part]
    for (axis, _), same in groupby(choice, key=lambda pair: (pair[0], id(pair[1]))):
        layers = list(same)
        yield axis, layers[0][1], len(layers)


def _column(runs: Sequence[Run], figure: Callable[[StrategyTable], IntArray]) -> IntArray:
    return sum((_along(count * figure(table), axis) for axis, table, count in runs), start=_ZERO)


def _worst(runs: Sequence[Run]) -> IntArray:
    """The worst moment of a chunk that computes with one micro-batch in flight (``cost.memory.worst_moment``), the
    optimizer's aside."""
    figures = [([_along(column, axis) for column in table.figures.memory.T], count) for axis, table, count in runs]
    return _column(runs, lambda choice: choice.figures.memory[:, REST]) + worst_moment(figures)


def _at(part: Part, rows: IntArray) -> Part:
    """Some of the choices for a part; layers of one table share theirs."""
    tables = {key: table.at(rows) for key, table in {id(one): one for one in part.values()}.items()}
    return {place: tables[id(table)] for place, table in part.items()}


def _narrowed(parts: Sequence[Part], time: FloatArray) -> tuple[list[Part], FloatArray]:
    """Without the choices for each part of which no combination has a finite time."""
    finite, narrowed, rows = np.isfinite(time), list[Part](), list[IntArray]()
    finite = np.broadcast_to(finite, [len(next(iter(part.values()))) if part else 1 for part in parts])
    for axis, part in enumerate(parts):
        rows.append(np.flatnonzero(finite.any(axis=tuple({0, 1, 2} - {axis}))))
        narrowed.append(_at(part, rows[-1]))
    return narrowed, np.broadcast_to(time, finite.shape)[np.ix_(*rows)]
