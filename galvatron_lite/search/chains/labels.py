"""One pass over a chain from its last layer to its first: the labels of ``frontier``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chains.bounds import Ahead, Bounds, LinkedChain, ahead_of
from galvatron_lite.search.chains.pareto import pareto_rows
from galvatron_lite.search.chains.runs import (
    Behind,
    around_run,
    equal_segments,
    is_plain,
    narrowed,
    run_before,
    segments_of,
)
from galvatron_lite.search.chains.segments import (
    BOTH,
    FIRST,
    GATHERED,
    HEAD,
    INNER,
    LAST,
    PARTS,
    PENDING,
    REST,
    SINGLE,
    TAIL,
    TIME,
    UPDATED,
    Segment,
)  # fmt: skip

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_CROWD, _WIDE = 8, 100_000
"""How many times as many pairs as the beam keeps labels are looked at, unless that is less than the second."""
_NARROW = 100
"""Labels of a beam that is to be quick."""
_RUN = 6
"""Layers of the shortest run that is joined to segments."""
_FAR = 2**45
TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, GROUP, CRITERIA = range(8)
"""Rows of labels: weighted time, A, B, R, U, d, layout of the first layer; time in each criterion, if several."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainExtension:
    """The labels after a segment more."""

    figures: IntArray  # (rows, n), see ``TIMES`` and on
    promise: FloatArray  # (K, n) Lagrangian bounds
    segment: Segment  # what was put before
    choice: IntArray  # (n,) of the segment
    parent: IntArray  # (n,) label of the step before
    runs: IntArray  # (n,) of strategies so far in the part of the model that the first layer is in

    def take(self, rows: IntArray) -> ChainExtension:
        """Some of the labels."""
        return ChainExtension(
            self.figures[:, rows],
            self.promise[:, rows],
            self.segment,
            self.choice[rows],
            self.parent[rows],
            self.runs[rows],
        )


@dataclass(slots=True)
class Search:
    """One pass from the last layer to the first, for paths of at most ``limit`` (weighted time) within ``room``."""

    line: LinkedChain  # the chain
    bounds: Bounds  # of it
    ahead: Ahead  # of it
    limit: float  # on the weighted time
    room: int  # bytes
    beam: int | None  # how many labels of a layer are kept at most; None: all
    work: int = 0  # pairs of labels and choices looked at
    dropped: float = np.inf  # the least promise of a label that the beam dropped
    history: list[ChainExtension] = field(default_factory=list)  # labels after each segment
    origin: tuple[int, ...] = field(init=False)  # kinds of the layers before any choices were narrowed

    def __post_init__(self) -> None:
        """Keeps which layers are equal, for their choices may be narrowed apart."""
        self.origin = self.line.kind

    def run(self) -> ChainExtension | None:
        """The labels of whole paths, none of them beaten; None without any."""
        place = len(self.line.kind) - 1
        step = self._thinned(place, self._first(place))
        queue: list[Segment] = []
        while len(step.choice):
            self.history.append(step)
            if place == 0:
                return step
            segment, *queue = queue or self._segments(place, step)
            place -= segment.layers
            step = self._thinned(place, self._extended(place, segment, step))
        return None

    def _segments(self, place: int, step: ChainExtension) -> list[Segment]:
        """What to put before the labels at ``place``, one after the other."""
        one, count = self.line.at(place - 1).segment, run_before(self.line, place)
        alone = self._alone(place)
        if self.line.runs is not None:
            return equal_segments(self.line, place, count) if self.line.runs == 1 else [one]
        if count < _RUN or alone & (alone - 1):
            return [one]
        figures = step.figures
        number = int(np.argmax(step.promise[: len(self.bounds.prices)].min(axis=1)))
        price = float(self.bounds.prices[number])
        reach = figures[TIMES] + price * np.maximum(figures[WORST], figures[WAITING])
        move = self.line.moves[place] * float(self.line.by[0])
        ceiling = float(self.bounds.ceiling(self.limit)[number] + price * self.room)
        behind = Behind(price, number, (move[:, figures[GROUP]] + reach).min(axis=1), ceiling)
        around = around_run(self.line, self.bounds, place, count, behind)
        line = narrowed(self.line, place, count, around, behind)
        if line is not self.line:
            self.line, self.ahead = line, ahead_of(line)
        memory = (figures[WORST], figures[WAITING], figures[RESTING], figures[OPTIMIZER])
        if is_plain(self.line, self.ahead, place, count, self.room, *memory):
            return segments_of(self.line, place, count, around, behind)
        return [self.line.at(place - 1).segment]

    def _alone(self, place: int) -> int:
        """How many layers like the one before ``place`` were put before the labels one by one."""
        after = place
        while after < len(self.origin) and self.origin[after] == self.origin[place - 1]:
            after += 1
        return after - place

    def _first(self, place: int) -> ChainExtension:
        segment = self.line.at(place).segment
        x = segment.figures
        count = x.shape[1]
        worst = x[REST] + np.maximum(x[INNER], 0)
        rows = [x[TIME], worst, x[REST] + np.maximum(x[FIRST], x[SINGLE]), x[REST], x[UPDATED], x[PENDING], x[HEAD]]
        figures = np.array([*rows, *x[PARTS:]])
        return self._bounded(
            place, figures, segment, np.arange(count), np.full(count, -1), np.ones(count, dtype=np.int64)
        )

    def _extended(self, place: int, segment: Segment, step: ChainExtension) -> ChainExtension:
        """Every label with every choice of one segment more, as far as the limit lets them."""
        x, old, bounds = segment.figures, step.figures, self.bounds
        move = self.line.moves[place + segment.layers]
        number = int(np.argmax(step.promise.min(axis=1)))
        best = number % len(bounds.prices)
        price, early = bounds.prices[best], number >= len(bounds.prices) and place in bounds.inside
        before = (bounds.inside if early else bounds.before)[place][best]
        own = x[TIME] + price * x[REST if early else BOTH] + before[x[HEAD]]
        scaled = move * float(self.line.by[0])
        reach = old[TIMES] + price * (old[RESTING] if early else np.maximum(old[WORST], old[WAITING]))
        ceiling = bounds.ceiling(self.limit)[best] + price * self.room
        if self.line.runs is None:
            totals = (own[:, None] + scaled[x[TAIL]])[:, old[GROUP]] + reach
            self.work += totals.size
            choice, parent = np.nonzero(totals <= ceiling)
            totals, runs = totals[choice, parent], np.ones(len(choice), dtype=np.int64)
        else:
            choice, parent, runs = self._pairs(place, segment, step, self.line.runs)
            self.work += len(choice)
            totals = own[choice] + scaled[x[TAIL][choice], old[GROUP][parent]] + reach[parent]
            rows = np.flatnonzero(totals <= ceiling)
            choice, parent, runs, totals = choice[rows], parent[rows], runs[rows], totals[rows]
        if len(choice) > self._crowd():
            rows = self._most_promising(totals - price * self.room)
            choice, parent, runs = choice[rows], parent[rows], runs[rows]
        x, old = x[:, choice], old[:, parent]
        moved = move[x[TAIL], old[GROUP]]
        new = np.empty((CRITERIA + len(x) - PARTS, len(choice)), dtype=np.int64)
        np.add(old[RESTING], x[REST], out=new[RESTING])
        np.maximum(old[WORST], old[WAITING] + x[GATHERED], out=new[WORST])
        new[WORST] += x[BOTH]
        if segment.layers > 1:
            np.maximum(new[WORST], new[RESTING] + np.maximum(x[INNER], x[LAST] + old[OWED]), out=new[WORST])
        new[WAITING] = new[RESTING] + np.maximum(x[FIRST], x[SINGLE] + old[OWED])
        new[TIMES] = old[TIMES] + x[TIME] + moved * self.line.by[0]
        new[OPTIMIZER] = old[OPTIMIZER] + x[UPDATED]
        new[OWED], new[GROUP] = x[PENDING], x[HEAD]
        if len(new) > CRITERIA:
            new[CRITERIA:] = old[CRITERIA:] + x[PARTS:] + moved * self.line.by[1:, None]
        return self._bounded(place, new, segment, choice, parent, runs)

    def _pairs(
        self, place: int, segment: Segment, step: ChainExtension, most: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Choices of a segment to put before the labels, those labels, and the runs that there are then."""
        line, count, every = self.line, segment.figures.shape[1], len(step.choice)
        inside = line.parts[place] == line.parts[place + segment.layers]
        free = np.flatnonzero(step.runs < most) if inside else np.arange(every)
        choice, parent = np.repeat(np.arange(count), len(free)), np.tile(free, count)
        if not inside:
            return choice, parent, np.ones(len(choice), dtype=np.int64)
        names, before = _strategies(segment), _strategies(step.segment)[step.choice]
        same = np.full(max(int(names.max()), int(before.max())) + 1, -1)
        same[names] = np.arange(count)
        bound = np.flatnonzero((step.runs == most) & (same[before] >= 0))
        runs = step.runs[parent] + (names[choice] != before[parent])
        return (
            np.concatenate((choice, same[before[bound]])),
            np.concatenate((parent, bound)),
            np.concatenate((runs, step.runs[bound])),
        )

    def _most_promising(self, seconds: FloatArray) -> IntArray:
        """Some times as many pairs as the beam keeps labels, and notes what any other costs at the least."""
        order = np.argsort(seconds, kind="stable")
        count = int(self._crowd())
        self._drop(float(seconds[order[count]]))
        return np.sort(order[:count])

    def _crowd(self) -> float:
        """How many pairs of a label and a choice are looked at."""
        if self.beam is None:
            return np.inf
        return _CROWD * self.beam if self.beam <= _NARROW else max(_CROWD * self.beam, _WIDE)

    def _drop(self, promise: float) -> None:
        self.dropped = min(self.dropped, promise * (1 - 1e-9) - 1)

    def _bounded(
        self, place: int, figures: IntArray, segment: Segment, choice: IntArray, parent: IntArray, runs: IntArray
    ) -> ChainExtension:
        """The labels that may be completed within room and limit."""
        bounds, ahead = self.bounds, self.ahead
        peak = np.maximum(figures[WORST], figures[WAITING])
        before = bounds.before[place][:, figures[GROUP]]
        price = bounds.prices[:, None]
        promise = before + (figures[TIMES] + price * (peak - self.room))
        alive = (promise <= bounds.ceiling(self.limit)[:, None]).all(axis=0)
        if place in bounds.inside:
            within = bounds.inside[place][:, figures[GROUP]]
            early = within + (figures[TIMES] + price * (figures[RESTING] - self.room))
            alive &= (early <= bounds.ceiling(self.limit)[:, None]).all(axis=0)
            promise = np.concatenate((promise, early))
        alive &= peak <= self.room - ahead.both_least[place]
        alive &= figures[OPTIMIZER] <= self.room - ahead.updated_least[place]
        if place == 0:
            alive &= figures[TIMES] <= self.limit
        return ChainExtension(figures, promise, segment, choice, parent, runs).take(np.flatnonzero(alive))

    def _thinned(self, place: int, step: ChainExtension) -> ChainExtension:
        """Without labels that are no better than another one, and without those that the beam drops."""
        if len(step.choice) <= 1:
            return step
        step = step.take(self._undominated(place, step))
        return step if self.beam is None else self._narrowed(step, self.beam)

    def _narrowed(self, step: ChainExtension, count: int) -> ChainExtension:
        """The most promising labels; what paths through any other cost at the least is noted."""
        if len(step.choice) <= count:
            return step
        slack = self.bounds.ceiling(0.0)[:, None] - 1
        promise = (step.promise - np.resize(slack, (len(step.promise), 1))).max(axis=0)
        order = np.argsort(promise, kind="stable")
        self._drop(float(promise[order[count]]))
        return step.take(np.sort(order[:count]))

    def _undominated(self, place: int, step: ChainExtension) -> IntArray:
        """Places of the labels that no other one equals or beats; at place 0 only their times count."""
        figures = step.figures
        several = len(figures) > CRITERIA
        times = figures[CRITERIA:] if several else figures[TIMES : TIMES + 1]
        if place == 0:
            return np.sort(pareto_rows(times.T))
        telling = self._telling(place, figures)
        limited = self.line.runs is not None
        group = _strategies(step.segment)[step.choice] if limited else figures[GROUP]
        if limited:
            telling.append(step.runs)
        if len(telling) == 1 and not several:
            order = np.lexsort((telling[0], times[0], group))
            ordered = telling[0][order] - group[order] * _FAR
            least = np.minimum.accumulate(ordered)
            kept = np.concatenate(([True], ordered[1:] < least[:-1]))
            return np.sort(order[kept])
        keys = np.column_stack((*times, *telling))
        order = np.argsort(group, kind="stable")
        edges = np.flatnonzero(np.diff(group[order])) + 1
        return np.sort(np.concatenate([own[pareto_rows(keys[own])] for own in np.split(order, edges)]))

    def _telling(self, place: int, figures: IntArray) -> list[IntArray]:
        """The memory figures that may make a difference, raised as far as makes none."""
        ahead, floor = self.ahead, self.room
        worst = np.maximum(figures[WORST], floor - ahead.both_most[place])
        rest = figures[RESTING]
        certain = [
            np.maximum(worst - ahead.gathered[place], floor - ahead.both_most[place] - ahead.gathered[place]),
            np.maximum(worst - ahead.local[place], floor - ahead.resting[place]),
            np.maximum(worst - ahead.updating[place], floor - ahead.updated_most[place]),
            np.maximum(worst - rest - ahead.waiting[place], ahead.covered[place]),
        ]
        own = [figures[WAITING], rest, figures[OPTIMIZER], figures[OWED]]
        raised = [np.maximum(a, b) for a, b in zip(own, certain, strict=True) if (a > b).any()]
        return [worst, *raised]

    def path(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A path of the last step: its time in each criterion, and the choice of each layer."""
        figures = self.history[-1].figures[:, row]
        choices: list[int] = []
        for step in reversed(self.history):
            choices += step.segment.choices(int(step.choice[row]))
            row = int(step.parent[row])
        time = figures[CRITERIA:] if len(figures) > CRITERIA else figures[:1]
        return tuple(int(value) for value in time), tuple(choices)


def _strategies(segment: Segment) -> IntArray:
    """Numbers of the strategies of a segment's choices, all of whose layers have one."""
    assert segment.strategy is not None  # others are made only where runs are not counted
    return segment.strategy
