"""Plans whose groups of devices run several virtual stages (interleaved 1F1B, ZB-V): the best uniform plan, exactly.

The declared space. Blocks are shared out evenly over the chunks in the order of the model, or so are blocks and the
layers before and after them, which count as one block each (``problem.cuts_of``). Layers before the blocks are in the
first chunk, those after them in the last. One strategy for all layers before the blocks and one for all layers after
them; for blocks one, or two that differ in what they recompute: of the blocks of every group of devices the first so
many eighths have the one, the others the other. Layers that share parameters have one strategy.

Options of blocks are taken in the order of a lower bound on the step time, some at a time; with each of them all
options of the other parts are priced at once (``costs``). Options that another one of their layout equals or beats in
everything are dropped first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight
from galvatron_lite.search.chain.pareto import pairs_within, pareto_rows, pareto_within
from galvatron_lite.search.problem import Partition, Problem, StagePlan, blocks_of, cuts_of
from galvatron_lite.search.tables import Memo, StrategyTable, distinct_tables, remembered, ticks
from galvatron_lite.search.uniform.costs import Part, UniformCosts

_HALF, _TINY = 0.5, 1e-9
_CHECKED, _PRICED = 1024, 64
"""Options of blocks whose memory is checked, and which are priced, at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixtures:
    """B options of blocks that are all alike: those of the first so many shares of each group of devices have the first
    strategy, the others the second."""

    table: StrategyTable  # S strategies; the first S options have one of them alone
    first: IntArray  # first, second: (B,) rows of the table
    second: IntArray
    count: IntArray  # (B,) shares


class Uniform:
    """The uniform plans of one shape, with the layers divided one way."""

    def __init__(self, problem: Problem, cuts: tuple[int, ...]) -> None:
        self.problem, self.cuts, self.store = problem, cuts, problem.tables[0].store
        self.costs = UniformCosts(problem, cuts)
        self.chunks, self.ranges = self.costs.chunks, self.costs.ranges
        self._memo = Memo()

    def bound(self, limit: float = np.inf, runs: int | None = None) -> float:
        """Picoseconds that no uniform plan beats, quickly; infinite where none takes less than a limit. ``runs``: see
        ``Problem``."""
        return next((float(self._least[rows[0]]) for rows in self._ordered(limit, runs)), np.inf)

    def best(self, limit: float, runs: int | None = None) -> Partition | None:
        """The best plan that fits and takes less than a limit in picoseconds; None where there is none."""
        best, top = None, limit - _HALF
        for rows in self._ordered(top, runs):
            rows = rows[self._least[rows] < top]
            if not len(rows):
                break
            options = self._part(self.ranges[0]), self._blocks(rows), self._part(self.ranges[2])
            parts, time = self._fitting(options, top)
            if np.isfinite(time).any():
                place = int(np.argmin(time))
                top = float(time.flat[place]) - _HALF
                chosen = [int(option) for option in np.unravel_index(place, time.shape)]
                strategies = [
                    part[place].options.strategies[part[place].rows[option]]
                    for part, option, places in zip(parts, chosen, self.ranges, strict=True)
                    for place in places
                ]
                # the time is that of the plan: its stages have no figures
                stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(self.cuts))
                best = Partition(round(top + _HALF), self.cuts, stages)
        return best

    def _fitting(self, parts: Sequence[Part], limit: float) -> tuple[list[Part], FloatArray]:
        """The options of each part that some plan has which fits and takes less than the limit, and the picoseconds of
        all their combinations, (E, B, H); infinite for those that do not."""
        groups = [group for alike in self.costs.alike_groups for group in alike]
        if self.problem.shape.schedule.front_loaded:  # later groups hold no more micro-batches of any chunk
            groups = [alike[0] for alike in self.costs.alike_groups]
        time = np.zeros((1, 1, 1))
        for number, group in enumerate(groups):
            time = np.where(self.costs.group_bytes(parts, group) <= self.problem.budgets[group], time, np.inf)
            parts, time = _narrowed(parts, time)
            if time.size and not number:  # what the first group cannot hold is not timed
                parts, time = _narrowed(parts, time + self.costs.times(parts, limit))
            if not time.size:
                break
        return list(parts), time

    @remembered
    def _part(self, places: range) -> Part:
        """The options of a part, with the strategies that all of its layers have; dominated ones are dropped."""
        groups = enumerate(self.chunks.layers_of)
        pairs = sorted((place, group) for group, layers in groups for place in layers.intersection(places))
        tables = {place: self.costs.table(group, place) for place, group in pairs}
        if not tables:
            return {}
        distinct = distinct_tables([*tables.values()])
        common = self.store.common(distinct)
        shared = self.costs.sharing.keys() & set(places)  # the layers that these share parameters with have a say
        kept = np.arange(len(common[0])) if shared else self._undominated(common, distinct)
        common_of = {id(table): options for table, options in zip(distinct, common, strict=True)}
        return _select({place: common_of[id(table)] for place, table in tables.items()}, kept)

    def _undominated(self, tables: Sequence[StrategyTable], source: Sequence[StrategyTable]) -> IntArray:
        """Rows that no other of the same layout equals or beats in every figure of all tables.

        ``source``: the tables that these are parts of, which tell them apart.
        """
        form = self.problem.form

        def rows() -> IntArray:
            criteria = [*(table.criteria(form) for table in tables), *(table.figures.resting for table in tables)]
            return pareto_within(np.column_stack(criteria), tables[0].codes)

        key = ("undominated", form.freed, form.microbatches if form.freed else 0, form.apart, *map(id, source))
        return self.store.memo.once(key, rows)

    @cached_property
    def mixtures(self) -> Mixtures | None:
        """The options of blocks that are all alike; None where they are not."""
        if not self.costs.blocks_alike:
            return None
        blocks, form = self.ranges[1], self.problem.form
        unpruned, shares = self.costs.table(0, blocks[0]), self.chunks.placed.shape[-1]

        def mixed() -> Mixtures:
            table = self._part(blocks)[blocks[0]]
            alone, (a, b) = np.arange(len(table)), pairs_within(table.options.degrees[table.rows])
            pairs = (np.concatenate(rows) for rows in ((a, b), (b, a)))
            first, second = (np.concatenate((alone, np.tile(rows, shares - 1))) for rows in pairs)
            count = np.repeat(np.arange(shares), [len(alone), *[2 * len(a)] * (shares - 1)])
            return Mixtures(table, first, second, count)

        key = ("mixtures", id(unpruned), shares, form.freed, form.microbatches if form.freed else 0)
        return self.store.memo.once(key, mixed)

    def _blocks(self, rows: IntArray) -> Part:
        """Some of the options of blocks."""
        mixtures = self.mixtures
        if mixtures is None:
            return _select(self._part(self.ranges[1]), rows)
        first, second, count = mixtures.first[rows], mixtures.second[rows], mixtures.count[rows]
        shares = range(self.chunks.placed.shape[-1])
        tables = [mixtures.table.select(np.where(share < count, first, second)) for share in shares]
        return {place: tables[share] for place, share in self.chunks.share_of.items()}

    def _ordered(self, limit: float, runs: int | None) -> Iterator[IntArray]:
        """Options of blocks that take less than a limit and may fit, in the order of ``_least``, some at a time."""
        rows = np.flatnonzero(self._least < limit)
        if runs == 1 and self.mixtures is not None:
            rows = rows[rows < len(self.mixtures.table)]
        rows = rows[np.argsort(self._least[rows], kind="stable")]
        for begin in range(0, len(rows), _CHECKED):
            held = self._may_fit(rows[begin : begin + _CHECKED])
            yield from (held[place : place + _PRICED] for place in range(0, len(held), _PRICED))

    def _may_fit(self, rows: IntArray) -> IntArray:
        """Those of some options of blocks whose states and activations alone fit, where blocks are alike."""
        mixtures = self.mixtures
        if mixtures is None:
            return rows
        for room, in_flight, placed in self._fullest:
            first, second, count = mixtures.first[rows], mixtures.second[rows], mixtures.count[rows]
            kept, states = mixtures.table.figures.kept, mixtures.table.figures.resting[:, 0]
            activations = in_flight[:, 0, count] * kept[first] + in_flight[:, 1, count] * kept[second]
            resting = placed[0, count] * states[first] + placed[1, count] * states[second]
            rows = rows[resting + activations.max(axis=0) <= room]
        return rows

    @cached_property
    def _fullest(self) -> list[tuple[int, IntArray, IntArray]]:
        """Of the groups that may hold most: the room in bytes; blocks of the first and the second strategy times
        micro-batches in flight, by moment and shares of the first; and such blocks."""
        shape, fullest = self.problem.shape, []
        ends = (0,) if shape.schedule.front_loaded else (0, shape.stages - 1)
        for group in ends if shape.microbatches > 1 else ():
            room = self.problem.budgets[group] - self.problem.tables[0].pricer.profile.cluster.device.context
            moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
            placed = self.chunks.placed[group]
            in_flight = np.array([*{counts for _, counts in moments}]) @ placed.reshape(len(placed), -1)
            in_flight = in_flight[pareto_rows(-in_flight)]
            fullest.append((room, in_flight.reshape(-1, *placed.shape[1:]), placed.sum(axis=0)))
        return fullest

    @cached_property
    def _least(self) -> FloatArray:
        """(B,): picoseconds that no plan with each option of blocks beats: layers around them at their least, moves
        between these and blocks left out, and memory too."""
        form, groups = self.problem.form, [alike[0] for alike in self.costs.alike_groups]
        mixtures = self.mixtures
        if mixtures is None:
            columns = self._unlike_blocks(groups)
        else:
            table, first, second = mixtures.table, mixtures.first, mixtures.second
            placed = np.stack([self.chunks.placed[group].sum(axis=0) for group in groups])[:, :, mixtures.count]
            blocks = dict.fromkeys(self.ranges[1], table)
            around = list(zip(*(self._around_blocks(group, blocks) for group in groups), strict=True))
            columns = [
                placed[:, 0] * figure[first] + placed[:, 1] * figure[second] + np.stack(others)[:, first]
                for figure, others in zip((*table.parts(form), table.figures.step), around, strict=True)
            ]
        counts, time = np.array([len(alike) for alike in self.costs.alike_groups]), columns[-1].max(axis=0)
        for ramp, rounds, column in zip(form.ramp, form.rounds, columns, strict=False):
            time = time + ramp * (counts @ column) + rounds * column.max(axis=0)
        return np.asarray(time * (1 - _TINY))

    def _unlike_blocks(self, groups: Sequence[int]) -> list[FloatArray]:
        """(groups, B) each: ``_around_blocks`` with the blocks that each group holds, where they are not alike."""
        form, blocks, columns = self.problem.form, self._part(self.ranges[1]), []
        for group in groups:
            totals = self._around_blocks(group, blocks)
            counts = Counter(id(blocks[place]) for place in self.chunks.layers_of[group].intersection(self.ranges[1]))
            for table in distinct_tables([*blocks.values()]):
                for total, figure in zip(totals, (*table.parts(form), table.figures.step), strict=True):
                    total += counts[id(table)] * figure
            columns.append(totals)
        return [np.stack(column) for column in zip(*columns, strict=True)]

    def _around_blocks(self, group: int, blocks: Part) -> list[FloatArray]:
        """(S,) each: the parts of a micro-batch's time in a group and its work once a step, without blocks: sends by
        the strategy of blocks, and other layers at their least."""
        form = self.problem.form
        sends = self.costs.sends([{}, blocks, {}], group)
        sent = (*form.parts(*sends, 0 * sends[0]), 0 * sends[0])
        totals = [np.zeros(len(next(iter(blocks.values())))) + column.reshape(-1) for column in sent]
        for place in self.chunks.layers_of[group].difference(self.ranges[1]):
            table = self.costs.table(group, place)
            for total, figure in zip(totals, (*table.parts(form), table.figures.step), strict=True):
                total += figure.min() if len(table) else np.inf
        return totals


def averaged_uniform(problems: Sequence[Problem]) -> FloatArray:
    """(V,): picoseconds that no uniform plan beats under a front-loaded schedule, of shapes that differ in virtual
    stages alone.

    Quickly: all groups take their average of what blocks, sends and the least of other layers come to, and of memory
    only blocks in the first group count, when it begins its first backward pass: p micro-batches of each of its v
    stages, and where there are more p - 1 of the first besides. Of two strategies that differ in recomputation alone
    blocks have any shares.
    """
    if not problems:
        return np.zeros(0)
    problem, graph, shape, tables = problems[0], problems[0].graph, problems[0].shape, problems[0].tables[0]
    stages = np.array([[other.shape.virtual * shape.stages] for other in problems])
    uniform = Uniform(problem, cuts_of(graph, int(stages[0, 0]))[0])
    if uniform.mixtures is None:
        return np.zeros(len(problems))
    table, blocks = uniform.mixtures.table, uniform.ranges[1]
    around = [tables.unpruned(layer.kind, layer.name) for layer in graph.layers if layer.role is not Role.BLOCK]
    if not len(table) or not all(map(len, around)):
        return np.full(len(problems), np.inf)
    # Sends go over each boundary forth and back, but for one that other layers may send over; whole picoseconds differ.
    smallest = min(tables.store.crossing[blocks.start + 1 : blocks.stop], default=0)
    ends = ((0, 1), (shape.stages - 1, 0))
    sent = np.min([uniform.costs.send_ticks(table, smallest, *pair) for pair in ends], axis=0)
    overhead = problem.pricer.profile.overhead
    host = (4 * stages - 4) * ticks(overhead.pipeline) + stages * ticks(overhead.microbatch) - 8 * stages
    layers = len(blocks) * table.both + sum(int(other.both.min()) for other in around)
    steps = len(blocks) * table.figures.step + sum(int(other.figures.step.min()) for other in around)
    ramps, rounds = (np.array([getattr(other.form, name) for other in problems]) for name in ("ramp", "rounds"))
    time = (layers + (2 * stages - 4) * sent + host) * (ramps + rounds / shape.stages) + steps / shape.stages
    chunks = [[sizes[:: shape.stages] for sizes in blocks_of(graph, int(count))] for (count,) in stages]
    held = np.array([[min(map(sum, divisions))] for divisions in chunks])
    first = np.array([[min(sizes[0] for sizes in divisions)] for divisions in chunks])
    in_flight = shape.stages * held + (shape.microbatches > shape.stages) * (shape.stages - 1) * first
    room = problem.budgets[0] - tables.pricer.profile.cluster.device.context
    over = held * table.figures.resting[:, 0] + in_flight * table.figures.kept - room
    least = np.where(over <= 0, time, np.inf).min(axis=1)
    a, b = pairs_within(table.options.degrees[table.rows])
    if len(a):
        a, b = np.concatenate((a, b)), np.concatenate((b, a))
        span = np.maximum(over[:, b] - over[:, a], 1)
        mixed = time[:, a] + np.minimum(-over[:, a] / span, 1.0) * (time[:, b] - time[:, a])
        least = np.minimum(least, np.where((over[:, a] <= 0) & (over[:, b] > 0), mixed, np.inf).min(axis=1))
    return np.asarray(least * (1 - _TINY))


def _select(part: Part, rows: IntArray) -> Part:
    """Some of the options of a part; layers of one table share theirs."""
    selected = {id(table): table.select(rows) for table in distinct_tables([*part.values()])}
    return {place: selected[id(table)] for place, table in part.items()}


def _narrowed(parts: Sequence[Part], time: FloatArray) -> tuple[list[Part], FloatArray]:
    """Drop the options of each part of which no combination has a finite time."""
    finite = np.broadcast_to(np.isfinite(time), [len(next(iter(part.values()))) if part else 1 for part in parts])
    rows = [np.flatnonzero(finite.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(len(parts))]
    narrowed = [_select(part, kept) for part, kept in zip(parts, rows, strict=True)]
    return narrowed, np.broadcast_to(time, finite.shape)[np.ix_(*rows)]
