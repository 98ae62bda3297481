"""The Pareto-best paths of a chain: exact labels, where the bounds of ``chain_bounds`` leave a gap that matters.

Labels (time, A, B, R, U, d) of suffixes s_l..s_L, from the last layer to the first (``_Labels``): what is worst in
memory is mostly in the last layers, so it is settled first, and what is left is a sum. With a choice before it,

    A' = r + q + max(A, B + g)    the worst moment so far, raised by all that earlier layers add to it
    B' = R' + max(w, v + d)       the moment of the first layer so far, that waits for what is gathered before it
    R' = R + r,  U' = U + u       at rest; in the optimizer

All updates are monotone: of two labels whose first choices have the same layout, the one that is no better in any
component goes. A component that cannot decide (2) or (3) is not compared. A label also goes when its bound at the
prices above exceeds a limit, which grows from the bound of the whole chain until a path is met. Nothing is rounded:
the result is the exact Pareto set of (1), one solution of each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.search.chain import Chain, ChainFront, Path, best_of_parts, is_countable
from galvatron_lite.search.chain_bounds import (
    BOTH,
    GATHERED,
    GROUP,
    MIDDLE,
    PARTS,
    PEAK,
    PENDING,
    REST,
    STRATEGY,
    TIME,
    TINY,
    UPDATED,
    ChainBounds,
    ChainFigures,
    PriceHint,
)
from galvatron_lite.search.pareto import pareto_rows, pareto_within

TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, LAYOUT, NAME, RUNS, CRITERIA = range(10)
"""Rows of labels: weighted time, A, B, R, U, d, layout and strategy of the first layer, runs of equal strategies so far
in its part of the model; then time in each criterion, where there are several."""
_START, _GROWTH = 0.04, 1.7
"""How far above the bound the first limit of labels is, as a share of an average layer's time; and how it grows."""
_CROWD, _MOST_PAIRS = 8, 100_000
"""Pairs of labels and choices are looked at up to so many times the beam, or to the second, whichever is more."""
_FITTING, _CLOSE = 1_000, 64
"""Labels a layer by which it is told whether any path fits, and by which a path near the bound is looked for."""
_NEAR = 1.1
"""Caps up to so many times the bound are reached as soon as it is known whether any path fits."""


def pareto_paths(chain: Chain, cap: int | None = None, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a chain within memory; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising. Where that drops any, the front is not complete.
        near: of one criterion, a path will do that another one may beat by this share.
    """
    if chain.runs == 1 and len(chain.weights) == 1 and is_countable(chain):
        best = best_of_parts(chain, np.inf if cap is None else cap)
        return ChainFront(() if best is None else (best,), len(chain.layers))
    bounds = ChainBounds.of(chain)
    limit = bounds.line.longest if cap is None else min(float(cap), bounds.line.longest)
    if bounds.exceeds(limit):
        return ChainFront(())
    return _front(bounds, limit, beam) if len(chain.weights) > 1 else _quickest(bounds, limit, beam, near)


def good_path(chain: Chain, cap: int | None = None, like: PriceHint | None = None) -> tuple[Path | None, float]:
    """A good path of one criterion, soon, and a weighted time that no path beats; None where none is met that fits.

    The time is infinite where no path takes at most ``cap``.
    """
    if chain.runs == 1 and is_countable(chain):
        best = best_of_parts(chain, np.inf if cap is None else cap)
        return best, np.inf if best is None else float(best.time[0] * chain.weights[0])
    bounds = ChainBounds.of(chain, like)
    if bounds.exceeds(bounds.line.longest if cap is None else min(float(cap), bounds.line.longest)):
        return None, np.inf
    path = bounds.rounded()
    least = bounds.least * (1 - TINY) - 1
    return path, least if path is None else min(least, float(path.time[0] * chain.weights[0]))


def _quickest(bounds: ChainBounds, cap: float, beam: int | None, near: float) -> ChainFront:
    """The path of least time: limits grow until a path is met; then none is quicker."""
    best, low, most = bounds.rounded(), max(bounds.least * (1 - TINY) - 1, 0.0), cap
    work, dropped = 0, np.inf
    if best is not None and best.time[0] * bounds.weight > cap:
        best = None
    if near and (best is None or low < best.time[0] * bounds.weight * (1 - near)):
        close = _front(bounds, min(low / (1 - near), cap), _CLOSE)
        work += close.work
        best = Path((close.paths[0].time[0] // bounds.weight,), close.paths[0].choices) if close.paths else best
    if best is not None and low >= best.time[0] * bounds.weight * (1 - near):
        return ChainFront((best,), work, low)
    if best is None and cap > _NEAR * low and not _may_fit(bounds.line):
        return ChainFront((), work)
    step = _START * max(low, cap * 1e-6) / len(bounds.line.kind)
    if best is not None:
        most = _below(best.time[0] * bounds.weight)
        step = max((most - low) / 8, 1.0)
    while low <= most:
        limit = float(int(min(most, low + step)))
        found = _front(bounds, limit, beam)
        work += found.work
        if not found.paths and found.dropped <= limit:
            dropped = found.dropped
            if best is None and limit < most:
                found = _front(bounds, most, beam)
                work += found.work
        if found.paths:
            best = Path((found.paths[0].time[0] // bounds.weight,), found.paths[0].choices)
            dropped = min(dropped, found.dropped)
        if found.paths or found.dropped <= limit:
            break
        low = max(limit + 1, float(np.nextafter(limit, np.inf)))
        step *= _GROWTH
    if best is not None and dropped >= best.time[0] * bounds.weight:
        dropped = np.inf
    return ChainFront(() if best is None else (best,), work, dropped)


def _below(time: int) -> float:
    """The next time that is less, as a float: beyond 2**53 one less is the same."""
    return min(float(time - 1), float(np.nextafter(float(time), 0.0)))


def _may_fit(line: ChainFigures) -> bool:
    """Whether any path is within the room, whatever its time, as far as some labels tell."""
    timeless = line.timeless()
    bounds = ChainBounds.at(timeless, np.ones(1), len(line.kind) - 1)
    if bounds.exceeds(0.0):
        return False
    front = _front(bounds, 0.0, _FITTING)
    return bool(front.paths) or not front.complete


def _front(bounds: ChainBounds, limit: float, beam: int | None) -> ChainFront:
    useful = bounds.useful(limit)
    if not all(len(own) for own in useful):
        return ChainFront(())
    search = _Labels(replace(bounds, line=bounds.line.only(useful)), limit, beam)
    paths = sorted(search.run(useful), key=lambda path: (path.time, path.choices))
    return ChainFront(tuple(paths), search.work, search.dropped)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    figures: IntArray  # (rows, n), see ``TIMES`` and on
    promise: FloatArray  # (K, n) Lagrangian bounds
    choice: IntArray  # (n,) of the layer
    parent: IntArray  # (n,) label of the step before

    def take(self, rows: IntArray) -> _Step:
        """Some of the labels."""
        return _Step(self.figures[:, rows], self.promise[:, rows], self.choice[rows], self.parent[rows])


class _Labels:
    """One pass over a chain from its last layer to its first, for paths of at most ``limit``."""

    def __init__(self, bounds: ChainBounds, limit: float, beam: int | None) -> None:
        self.bounds, self.line, self.limit, self.beam = bounds, bounds.line, limit, beam
        self.ahead = _Ahead(bounds.line)
        self.ceiling = bounds.ceiling(limit)
        self.work = 0  # pairs of labels and choices looked at
        self.dropped = np.inf  # the least promise of a label that the beam dropped

    def run(self, useful: Sequence[IntArray]) -> Iterator[Path]:
        """The paths, none of them beaten; ``useful``: the choices, by kind, that the line was narrowed to."""
        place = len(self.line.kind) - 1
        steps = [self._thinned(place, self._first(place))]
        while place and len(steps[-1].choice):
            place -= 1
            steps.append(self._thinned(place, self._extended(place, steps[-1])))
        for row in range(len(steps[-1].choice)):
            figures = steps[-1].figures[:, row]
            time, choices = figures[CRITERIA:] if len(figures) > CRITERIA else figures[:1], []
            for place, step in enumerate(reversed(steps)):
                choices.append(int(useful[self.line.kind[place]][step.choice[row]]))
                row = int(step.parent[row])
            yield Path(tuple(int(value) for value in time), tuple(choices))

    def _first(self, place: int) -> _Step:
        x = self.line.at(place).figures
        count = x.shape[1]
        waiting, ones = x[REST] + np.maximum(x[PEAK], x[MIDDLE]), np.ones(count, dtype=np.int64)
        rows = [x[TIME], x[REST], waiting, x[REST], x[UPDATED], x[PENDING], x[GROUP], x[STRATEGY], ones, *x[PARTS:]]
        return self._bounded(place, np.array(rows), np.arange(count), np.full(count, -1))

    def _extended(self, place: int, step: _Step) -> _Step:
        """Every label with every choice of one layer more, as far as the limit lets them."""
        x, old, bounds, line = self.line.at(place).figures, step.figures, self.bounds, self.line
        number = int(np.argmax(step.promise.min(axis=1)))
        price, inside = bounds.prices[number], place > bounds.moment
        own = x[TIME] + price * x[REST if inside else BOTH] + bounds.before[place][number][x[GROUP]]
        reach = old[TIMES] + price * (old[RESTING] if inside else np.maximum(old[WORST], old[WAITING]))
        totals = (own[:, None] + line.scaled[place + 1][x[GROUP]])[:, old[LAYOUT]] + reach
        useful = totals <= self.ceiling[number] + price * line.room
        runs, counted = None, line.runs is not None and line.parts[place] == line.parts[place + 1]
        if counted:
            runs = old[RUNS] + (x[STRATEGY][:, None] != old[NAME])
            useful &= runs <= line.runs
        self.work += totals.size
        choice, parent = np.nonzero(useful)
        most = np.inf if self.beam is None else max(_CROWD * self.beam, _MOST_PAIRS)
        if len(choice) > most:
            seconds = totals[choice, parent] - price * line.room
            order = np.argsort(seconds, kind="stable")
            self._drop(float(seconds[order[int(most)]]))
            choice, parent = (own[np.sort(order[: int(most)])] for own in (choice, parent))
        x, old = x[:, choice], old[:, parent]
        moved = line.moves[place + 1][x[GROUP], old[LAYOUT]]
        new = np.empty((CRITERIA + len(x) - PARTS, len(choice)), dtype=np.int64)
        np.add(old[RESTING], x[REST], out=new[RESTING])
        new[WORST] = np.maximum(old[WORST], old[WAITING] + x[GATHERED]) + x[BOTH]
        new[WAITING] = new[RESTING] + np.maximum(x[PEAK], x[MIDDLE] + old[OWED])
        new[TIMES] = old[TIMES] + x[TIME] + moved * line.by[0]
        new[OPTIMIZER] = old[OPTIMIZER] + x[UPDATED]
        new[OWED], new[LAYOUT], new[NAME] = x[PENDING], x[GROUP], x[STRATEGY]
        new[RUNS] = 1 if runs is None else runs[choice, parent]
        if len(new) > CRITERIA:
            new[CRITERIA:] = old[CRITERIA:] + x[PARTS:] + moved * line.by[1:, None]
        return self._bounded(place, new, choice, parent)

    def _bounded(self, place: int, figures: IntArray, choice: IntArray, parent: IntArray) -> _Step:
        bounds, room, price = self.bounds, self.line.room, self.bounds.prices[:, None]
        peak = np.maximum(figures[WORST], figures[WAITING])
        promise = bounds.before[place][:, figures[LAYOUT]] + (
            figures[TIMES] + price * ((figures[RESTING] if place > bounds.moment else peak) - room)
        )
        alive = (promise <= self.ceiling[:, None]).all(axis=0)
        alive &= peak <= room - self.ahead.both_least[place]
        alive &= figures[OPTIMIZER] <= room - self.ahead.updated_least[place]
        if place == 0:
            alive &= figures[TIMES] <= self.limit
        return _Step(figures, promise, choice, parent).take(np.flatnonzero(alive))

    def _thinned(self, place: int, step: _Step) -> _Step:
        """Without labels that are no better than another one, and without those that the beam drops."""
        if len(step.choice) > 1:
            step = step.take(self._undominated(place, step.figures))
        if self.beam is None or len(step.choice) <= self.beam:
            return step
        promise = (step.promise - (self.bounds.ceiling(0.0) - 1)[:, None]).max(axis=0)
        order = np.argsort(promise, kind="stable")
        self._drop(float(promise[order[self.beam]]))
        return step.take(np.sort(order[: self.beam]))

    def _drop(self, promise: float) -> None:
        self.dropped = min(self.dropped, promise * (1 - TINY) - 1)

    def _undominated(self, place: int, figures: IntArray) -> IntArray:
        """Places of the labels that no other one equals or beats; at place 0 only their times count."""
        times = figures[CRITERIA:] if len(figures) > CRITERIA else figures[TIMES : TIMES + 1]
        if place == 0:
            return np.sort(pareto_rows(times.T))
        memory = self.ahead.compared(place, figures, self.line.room)
        if self.line.runs is None:
            return pareto_within(np.column_stack((*times, *memory)), figures[LAYOUT])
        return pareto_within(np.column_stack((*times, *memory, figures[RUNS])), figures[NAME])


class _Ahead:
    """What the layers before each place come to at the least or at the most."""

    def __init__(self, line: ChainFigures) -> None:
        self.both_least, self.both_most, self.updated_least, self.updated_most, self.updating = ([0] for _ in range(5))
        self.local = [-(2**60)]  # with a label's rest this much below its worst, no moment of theirs is the worst
        self.resting = [-(2**60)]  # the most that their moments add to a label's rest
        self.gathered = [0]  # the most that the layer just before leaves gathered
        self.waiting = [-(2**60)]  # as ``local``, for what a label has pending alone
        self.spare = [2**60]  # what a label may have pending without raising any moment of the layer just before
        for place in range(len(line.kind)):
            x = line.at(place).extremes
            following = line.at(place + 1).extremes["pending"] if place + 1 < len(line.kind) else 0
            left = self.gathered[-1]
            moment = max(x["peak"], x["middle"] + following) + left
            self.resting.append(x["rest"] + max(self.resting[-1], moment + self.both_most[-1]))
            over = max(x["peak_over"], x["middle_over"] + following) + left
            self.local.append(max(self.local[-1] - x["prefix"], over))
            self.waiting.append(x["middle_over"] + left)
            self.spare.append(x["spare"])
            self.gathered.append(x["gathered"])
            for name in ("both_least", "both_most", "updated_least", "updated_most", "updating"):
                total = getattr(self, name)
                total.append(total[-1] + x[name])

    def compared(self, place: int, figures: IntArray, room: int) -> list[IntArray]:
        """The memory figures of labels that may make a difference, raised as far as makes none."""
        worst, rest = np.maximum(figures[WORST], room - self.both_most[place]), figures[RESTING]
        certain = [
            worst - self.gathered[place],
            np.maximum(worst - self.local[place], room - self.resting[place]),
            np.maximum(worst - self.updating[place], room - self.updated_most[place]),
            np.maximum(worst - rest - self.waiting[place], self.spare[place]),
        ]
        own = [figures[WAITING], rest, figures[OPTIMIZER], figures[OWED]]
        return [worst, *(np.maximum(a, b) for a, b in zip(own, certain, strict=True) if (a > b).any())]
