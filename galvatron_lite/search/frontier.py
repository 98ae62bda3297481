"""Exact search along a chain of layers: one strategy a layer, least time within the memory of one device.

The problem. Layers l = 1..L; choices s_l in S_l. Data, all whole numbers (picoseconds, bytes):

    t_l(s) in Z^C          time in C criteria (C = 1: a step; else passes of a micro-batch, then work once a step)
    x_l(s', s) >= 0        time of going from choice s' of layer l-1 to s, counted c_1..c_C times in the criteria
    r, q, w, v, g, d, u    memory figures of (l, s), see ``cost.memory``

    minimise (Pareto)  sum_l t_l(s_l) + c * sum_l x_l(s_{l-1}, s_l)                                            (1)
    subject to         sum_l r_l + sum_{j<l} q_j + g_{l-1} + max(w_l, v_l + d_{l+1}) <= M      for every l     (2)
                       sum_l u_l <= M                                                                          (3)
                       weights . (1) <= cap                                                                    (4)

The method. Suffixes s_l..s_L are labels (time, A, B, R, U, d), from the last layer to the first: what is worst in
memory is nearly always in the last layers, so it is settled first, and what is left is a sum. With a choice before it,

    A' = r + q + max(A, B + g)    the worst moment so far, raised by all that earlier layers add to it
    B' = R' + max(w, v + d)       the moment of the first layer so far, that waits for what is gathered before it
    R' = R + r,  U' = U + u       at rest; in the optimizer

All updates are monotone, so of two labels whose first choices have the same moves from what is before, the one that
is no better in any component never leads to a better plan and goes. A component that cannot decide (2) or (3) in any
label, because there is room whatever comes before or because another moment is certainly worse, is not compared. A
label also goes when its Lagrangian bound, sum(time + lambda * memory) - lambda * M with the best of some lambda,
exceeds a limit.

With one criterion the limit starts a little above the bound of the whole chain, and grows until a path is met; then no
path is quicker, for all with a bound below the limit were looked at. Runs of equal layers are joined to segments
(``segments``) whose useless combinations go by the same bounds. Nothing is rounded: the result is the exact Pareto set
of (1), one solution of each value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.bounds import Ahead, Bounds, Line, ahead_of, best_bounds, line_of
from galvatron_lite.search.chain import Chain
from galvatron_lite.search.pareto import pareto_rows
from galvatron_lite.search.runs import Behind, around_run, is_plain, narrowed, run_before, segments_of
from galvatron_lite.search.segments import (
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
_CROWD = 8
_START, _GROWTH = 0.04, 1.7
_FAR = 2**45
_RUN, _ALONE = 6, 1
_QUICK = 40
TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, GROUP, CRITERIA = range(8)
"""Rows of labels: weighted time, A, B, R, U, d, layout of the first layer; time in each criterion, if several."""


@dataclass(frozen=True, slots=True)
class Path:
    """One choice a layer.

    Attributes:
        time: in each criterion.
        choices: place of the choice in each layer.
    """

    time: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """The answer to a chain.

    Attributes:
        paths: ascending in time.
        work: labels looked at.
        dropped: a weighted time that no path left out beats; infinite where none was.
    """

    paths: tuple[Path, ...]
    work: int = 0
    dropped: float = np.inf

    @property
    def complete(self) -> bool:
        """Whether the paths are the whole Pareto set; else some may be missing."""
        return self.dropped == np.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The labels after a segment more.

    Attributes:
        figures: (rows, n), see ``TIMES`` and on.
        promise: (K, n) Lagrangian bounds.
        segment: what was put before.
        choice: (n,) of the segment.
        parent: (n,) label of the step before.
    """

    figures: IntArray
    promise: FloatArray
    segment: Segment
    choice: IntArray
    parent: IntArray

    def take(self, rows: IntArray) -> _Step:
        """Some of the labels."""
        return _Step(self.figures[:, rows], self.promise[:, rows], self.segment, self.choice[rows], self.parent[rows])


@dataclass(slots=True)
class _Search:
    """One pass from the last layer to the first, for paths of at most ``limit`` (weighted time) within ``room``."""

    line: Line
    bounds: Bounds
    ahead: Ahead
    limit: float
    room: int
    beam: int | None
    floors: bool = True
    work: int = 0
    dropped: float = np.inf
    history: list[_Step] = field(default_factory=list)
    origin: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Keeps which layers are equal, for their choices may be narrowed apart."""
        self.origin = self.line.kind

    def run(self) -> _Step | None:
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

    def _segments(self, place: int, step: _Step) -> list[Segment]:
        """What to put before the labels at ``place``, one after the other."""
        one, count = self.line.at(place - 1).segment, run_before(self.line, place)
        alone = self._alone(place)
        if count < _RUN or alone & (alone - 1):
            return [one]
        figures = step.figures
        number = int(np.argmax(step.promise.min(axis=1)))
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
        if is_plain(self.line, self.ahead, place, count, *memory):
            return segments_of(self.line, place, count, around, behind)
        return [self.line.at(place - 1).segment]

    def _alone(self, place: int) -> int:
        """How many layers like the one before ``place`` were put before the labels one by one."""
        after = place
        while after < len(self.origin) and self.origin[after] == self.origin[place - 1]:
            after += 1
        return after - place

    def _first(self, place: int) -> _Step:
        segment = self.line.at(place).segment
        x = segment.figures
        count = x.shape[1]
        worst = x[REST] + np.maximum(x[INNER], 0)
        rows = [x[TIME], worst, x[REST] + np.maximum(x[FIRST], x[SINGLE]), x[REST], x[UPDATED], x[PENDING], x[HEAD]]
        figures = np.array([*rows, *x[PARTS:]])
        return self._bounded(place, figures, segment, np.arange(count), np.full(count, -1))

    def _extended(self, place: int, segment: Segment, step: _Step) -> _Step:
        """Every label with every choice of one segment more, as far as the limit lets them."""
        x, old, bounds = segment.figures, step.figures, self.bounds
        move = self.line.moves[place + segment.layers]
        best = int(np.argmax(step.promise.min(axis=1)))
        price = bounds.prices[best]
        own = x[TIME] + price * x[BOTH] + bounds.before[place][best][x[HEAD]]
        values = own[:, None] + move[x[TAIL]] * float(self.line.by[0])
        reach = old[TIMES] + price * np.maximum(old[WORST], old[WAITING])
        ceiling = bounds.ceiling(self.limit)[best] + price * self.room
        self.work += values.shape[0] * len(reach)
        totals = values[:, old[GROUP]] + reach
        choice, parent = np.nonzero(totals <= ceiling)
        if self.beam is not None and len(choice) > _CROWD * self.beam:
            choice, parent = self._most_promising(totals - price * self.room, choice, parent)
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
        return self._bounded(place, new, segment, choice, parent)

    def _most_promising(self, totals: FloatArray, choice: IntArray, parent: IntArray) -> tuple[IntArray, IntArray]:
        """Some times as many pairs as the beam keeps labels, and notes what any other costs at the least."""
        own = totals[choice, parent]
        order = np.argsort(own, kind="stable")
        count = _CROWD * (self.beam or 1)
        self._drop(float(own[order[count]]))
        rows = np.sort(order[:count])
        return choice[rows], parent[rows]

    def _drop(self, promise: float) -> None:
        self.dropped = min(self.dropped, promise * (1 - 1e-9) - 1)

    def _bounded(self, place: int, figures: IntArray, segment: Segment, choice: IntArray, parent: IntArray) -> _Step:
        """The labels that may be completed within room and limit."""
        bounds, ahead = self.bounds, self.ahead
        peak = np.maximum(figures[WORST], figures[WAITING])
        before = bounds.before[place][:, figures[GROUP]]
        promise = before + (figures[TIMES] + bounds.prices[:, None] * (peak - self.room))
        alive = (promise <= bounds.ceiling(self.limit)[:, None]).all(axis=0)
        alive &= peak <= self.room - ahead.both_least[place]
        alive &= figures[OPTIMIZER] <= self.room - ahead.updated_least[place]
        if place == 0:
            alive &= figures[TIMES] <= self.limit
        return _Step(figures, promise, segment, choice, parent).take(np.flatnonzero(alive))

    def _thinned(self, place: int, step: _Step) -> _Step:
        """Without labels that are no better than another one, and without those that the beam drops."""
        if len(step.choice) <= 1:
            return step
        step = step.take(self._undominated(place, step.figures))
        return step if self.beam is None else self._narrowed(step, self.beam)

    def _narrowed(self, step: _Step, count: int) -> _Step:
        """The most promising labels; what paths through any other cost at the least is noted."""
        if len(step.choice) <= count:
            return step
        promise = (step.promise - (self.bounds.ceiling(0.0) - 1)[:, None]).max(axis=0)
        order = np.argsort(promise, kind="stable")
        self._drop(float(promise[order[count]]))
        return step.take(np.sort(order[:count]))

    def _undominated(self, place: int, figures: IntArray) -> IntArray:
        """Places of the labels that no other one equals or beats; at place 0 only their times count."""
        several = len(figures) > CRITERIA
        times = figures[CRITERIA:] if several else figures[TIMES : TIMES + 1]
        if place == 0:
            return np.sort(pareto_rows(times.T))
        telling = self._telling(place, figures)
        group = figures[GROUP]
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
        ahead, floor = self.ahead, self.room if self.floors else -_FAR * 8
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

    def path(self, row: int) -> Path:
        """A path of the last step."""
        figures = self.history[-1].figures[:, row]
        choices: list[int] = []
        for step in reversed(self.history):
            choices += step.segment.choices(int(step.choice[row]))
            row = int(step.parent[row])
        time = figures[CRITERIA:] if len(figures) > CRITERIA else figures[:1]
        return Path(tuple(int(value) for value in time), tuple(choices))


def pareto_paths(chain: Chain, cap: int | None = None, beam: int | None = None) -> Front:
    """The Pareto set of a chain within memory, ascending in time; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising by their Lagrangian bound. Where that drops any,
            the front is not complete, and says what paths through those may have cost at the least.
    """
    line = line_of(chain)
    bounds = best_bounds(line)
    limit = np.inf if cap is None else float(cap)
    if bounds.least > bounds.ceiling(limit).max() or not _may_fit(line):
        return Front(())
    if len(chain.weights) > 1:
        return _front(line, bounds, limit, beam)
    front = _quickest(line, bounds, limit, beam)
    weight = int(chain.weights[0])
    return replace(front, paths=tuple(Path((path.time[0] // weight,), path.choices) for path in front.paths))


def _may_fit(line: Line) -> bool:
    both = sum(line.at(place).extremes[0] for place in range(len(line.kind)))
    return both <= line.room + 2**60


def _searched(line: Line, bounds: Bounds, limit: float, beam: int | None) -> tuple[_Search, _Step | None]:
    useful = bounds.useful(limit)
    if not all(len(own) for own in useful):
        return _Search(line, bounds, ahead_of(line), limit, line.room, beam), None
    line = line.only(useful)
    search = _Search(line, bounds, ahead_of(line), limit, line.room, beam)
    return search, search.run()


def _front(line: Line, bounds: Bounds, limit: float, beam: int | None) -> Front:
    search, last = _searched(line, bounds, limit, beam)
    if last is None:
        return Front((), search.work, search.dropped)
    paths = (search.path(row) for row in range(len(last.choice)))
    return Front(tuple(sorted(paths, key=lambda path: (path.time, path.choices))), search.work, search.dropped)


def _quickest(line: Line, bounds: Bounds, cap: float, beam: int | None) -> Front:
    """The path of least time."""
    most = sum(float(line.at(place).segment.figures[TIME].max()) for place in range(len(line.kind)))
    most += sum(float(move.max()) * float(line.by[0]) for move in line.moves[1:])
    most, low, missed = min(cap, most), max(bounds.least * (1 - 1e-9) - 1, 0.0), np.inf
    share, work, best = _START * max(bounds.least, most * 1e-6) / len(line.kind), 0, Front(())
    first, narrow = share, _QUICK if beam is None else min(beam, _QUICK)
    while low <= most:
        near = (low + most) / 2 if best.paths and most - low > first else most
        limit = float(int(min(near, low + share)))
        found = _front(line, bounds, limit, beam if best.paths else narrow)
        work += found.work
        if not best.paths and not found.paths and found.dropped <= limit and narrow != beam:
            found = _front(line, bounds, limit, beam)
            work += found.work
        if found.paths:
            best, most = found, float(found.paths[0].time[0] - 1)
            low = max(low, min(found.dropped, most + 1))
            if found.dropped <= most and narrow == beam:
                missed = min(missed, found.dropped)
                break
        else:
            low, missed, share = limit + 1, min(missed, found.dropped), share * _GROWTH
    return Front(best.paths, work, missed if missed <= most else np.inf)
