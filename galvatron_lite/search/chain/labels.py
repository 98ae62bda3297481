"""The Pareto-best paths of a chain: exact labels, where the bounds of ``bounds`` leave a gap that matters.

Labels (time, A, B, R, U, d) of suffixes s_l..s_L, from the last layer to the first (``_Labels``): what is worst in
memory is mostly in the last layers, so it is settled first, and what is left is a sum. With a choice before it,

    A' = r + q + max(A, B + g)    the worst moment so far, raised by all that earlier layers add to it
    B' = R' + max(w, v + d)       the moment of the first layer so far, that waits for what is gathered before it
    R' = R + r,  U' = U + u       at rest; in the optimizer

All updates are monotone: of two labels whose first choices have the same layout, the one that is no better in any
component is dropped. So is a label whose bound at the prices above exceeds a limit, which grows from the bound of the
chain until a path is met. Nothing is rounded: the result is the exact Pareto set of (1), one solution of each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.search.chain.bounds import (
    BOTH,
    GROUP,
    MIDDLE,
    PARTS,
    PEAK,
    PENDING,
    PREFETCHED,
    REST,
    STRATEGY,
    TIME,
    TINY,
    UPDATED,
    ChainBounds,
)
from galvatron_lite.search.chain.chain import Chain, ChainFront, Path, best_of_parts, strategies_of_parts
from galvatron_lite.search.chain.pareto import pareto_rows, pareto_within

TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, LAYOUT, NAME, RUNS, CRITERIA = range(10)
"""Rows of labels: weighted time, A, B, R, U, d, layout and strategy of the first layer, runs of equal strategies so far
in its part of the model; then time in each criterion, where there are several."""
_START, _GROWTH = 0.04, 1.7
"""How far above the bound the first limit of labels is, as a share of an average layer's time; and how it grows."""
_CROWD, _MOST_PAIRS = 8, 100_000
"""Pairs of labels and choices are looked at up to so many times the beam, or to the second, whichever is more; of a
narrow beam no more than so many times it."""
_NARROW = (64, 256)
"""Beams by which a path near the bound is looked for, one after another."""


def pareto_paths(chain: Chain, cap: float = np.inf, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a chain within memory; empty where nothing fits.

    Args:
        chain: the layers, their figures and the memory.
        cap: paths of more weighted time than this are left out.
        beam: keep only so many labels a layer, the most promising. Where that drops any, the front is not complete.
        near: of one criterion, share by which another path may be quicker than the one returned.
    """
    common = strategies_of_parts(chain)
    if common is not None:
        best = best_of_parts(chain, common, cap)
        return ChainFront(() if best is None else (best,), len(chain.layers))
    bounds = ChainBounds.of(chain)
    limit = min(float(cap), bounds.chain.longest)
    if bounds.exceeds(limit):
        return ChainFront(())
    return _front(bounds, limit, beam) if len(chain.weights) > 1 else _quickest(bounds, limit, beam, near)


def good_path(chain: Chain) -> tuple[Path | None, float]:
    """A good path of one criterion, quickly, None where none is met that fits; and a weighted time that no path
    beats."""
    common = strategies_of_parts(chain)
    if common is not None:
        best = best_of_parts(chain, common)
        return best, np.inf if best is None else float(best.time[0])
    bounds = ChainBounds.of(chain)
    if bounds.exceeds(bounds.chain.longest):
        return None, np.inf
    path = bounds.rounded()
    if path is None and bounds.exceeds_elsewhere(bounds.chain.longest):
        return None, np.inf
    least = bounds.least * (1 - TINY) - 1
    return path, least if path is None else min(least, float(path.time[0]))


def _quickest(bounds: ChainBounds, cap: float, beam: int | None, near: float) -> ChainFront:
    """The path of least time: a path of the bounds where it is near enough, else by labels."""
    best, low, work = bounds.rounded(), max(bounds.least * (1 - TINY) - 1, 0.0), 0
    if best is None and bounds.exceeds_elsewhere(cap):
        return ChainFront(())
    if best is not None and best.time[0] > cap:
        best = None
    if near and (best is None or low < best.time[0] * (1 - near)):
        enough = min(low / (1 - near), cap)
        for labels in _NARROW:
            close = _front(bounds, enough, labels)
            work += close.work
            if close.paths or close.complete:
                break
        best = close.paths[0] if close.paths else best
        if close.complete and best is None and enough == cap:
            return ChainFront((), work)
    if best is not None and low >= best.time[0] * (1 - near):
        return ChainFront((best,), work, low)
    return _quickest_by_labels(bounds, best, low, cap, beam, work)


def _quickest_by_labels(
    bounds: ChainBounds, best: Path | None, low: float, cap: float, beam: int | None, work: int
) -> ChainFront:
    """The path of least time: limits grow from a lower bound until a path is met; then none is quicker."""
    most, dropped = cap, np.inf
    step = _START * max(low, cap * 1e-6) / len(bounds.chain)
    if best is not None:
        # the next time that is less, as a float: beyond 2**53 one less is the same
        most = min(float(best.time[0] - 1), float(np.nextafter(float(best.time[0]), 0.0)))
        step = max((most - low) / 8, 1.0)
    while low <= most:
        limit = float(int(min(most, low + step)))
        front = _front(bounds, limit, beam)
        work += front.work
        if not front.paths and front.dropped <= limit:
            dropped = front.dropped
            if best is None and limit < most:
                front = _front(bounds, most, beam)
                work += front.work
        if front.paths:
            best, dropped = front.paths[0], min(dropped, front.dropped)
        if front.paths or front.dropped <= limit:
            break
        low = max(limit + 1, float(np.nextafter(limit, np.inf)))
        step *= _GROWTH
    if best is not None and dropped >= best.time[0]:
        dropped = np.inf
    return ChainFront(() if best is None else (best,), work, dropped)


def _front(bounds: ChainBounds, limit: float, beam: int | None) -> ChainFront:
    """The Pareto set of the paths of at most a limit."""
    useful = bounds.useful(limit)
    if not all(len(rows) for rows in useful):
        return ChainFront(())
    labels = _Labels(replace(bounds, chain=bounds.chain.select(useful)), limit, beam)
    paths = sorted(labels.paths(useful), key=lambda path: (path.time, path.choices))
    return ChainFront(tuple(paths), labels.work, labels.dropped)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The n labels of one layer."""

    figures: IntArray  # (rows, n), rows from ``TIMES`` on
    promise: FloatArray  # (K, n) Lagrangian bounds
    choice: IntArray  # (n,) of the layer
    parent: IntArray  # (n,) label of the layer behind it

    def select(self, rows: IntArray) -> _Step:
        """Some of the labels."""
        return _Step(self.figures[:, rows], self.promise[:, rows], self.choice[rows], self.parent[rows])


class _Labels:
    """One pass over a chain from its last layer to its first, for paths of at most ``limit``."""

    def __init__(self, bounds: ChainBounds, limit: float, beam: int | None) -> None:
        self.bounds, self.chain, self.limit, self.beam = bounds, bounds.chain, limit, beam
        earlier = [self.chain.layer(place).figures for place in range(len(self.chain) - 1)]

        def sums(values: Sequence[int]) -> IntArray:
            return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))

        # by layer, of the layers before it: the least and the most bytes of rest and prefix, the least in the optimizer
        self._least = sums([int(figures[BOTH].min()) for figures in earlier])
        self._most = sums([int(figures[BOTH].max()) for figures in earlier])
        self._updated = sums([int(figures[UPDATED].min()) for figures in earlier])
        self._ceiling = bounds.ceiling(limit)
        self.work = 0  # pairs of labels and choices looked at
        self.dropped = np.inf  # the least promise of a label that the beam dropped

    def paths(self, useful: Sequence[IntArray]) -> Iterator[Path]:
        """The undominated paths; ``useful``: by kind, the choices that the chain was narrowed to."""
        place = len(self.chain) - 1
        steps = [self._thinned(place, self._last_layer(place))]
        while place and len(steps[-1].choice):
            place -= 1
            steps.append(self._thinned(place, self._extended(place, steps[-1])))
        for row in range(len(steps[-1].choice)):
            figures = steps[-1].figures[:, row]
            time, choices = figures[CRITERIA:] if len(figures) > CRITERIA else figures[:1], []
            for place, step in enumerate(reversed(steps)):
                choices.append(int(useful[self.chain.kind[place]][step.choice[row]]))
                row = int(step.parent[row])
            yield Path(tuple(int(value) for value in time), tuple(choices))

    def _last_layer(self, place: int) -> _Step:
        x = self.chain.layer(place).figures
        count = x.shape[1]
        waiting, ones = x[REST] + np.maximum(x[PEAK], x[MIDDLE]), np.ones(count, dtype=np.int64)
        rows = [x[TIME], x[REST], waiting, x[REST], x[UPDATED], x[PENDING], x[GROUP], x[STRATEGY], ones, *x[PARTS:]]
        return self._bounded(place, np.array(rows), np.arange(count), np.full(count, -1))

    def _extended(self, place: int, step: _Step) -> _Step:
        """Every label with every choice of the layer before it, as far as the limit allows."""
        chain, x, old = self.chain, self.chain.layer(place).figures, step.figures
        choice, parent, runs = self._pairs(place, step)
        x, old = x[:, choice], old[:, parent]
        moved = chain.moves[place + 1][x[GROUP], old[LAYOUT]]
        new = np.empty((CRITERIA + len(x) - PARTS, len(choice)), dtype=np.int64)
        np.add(old[RESTING], x[REST], out=new[RESTING])
        new[WORST] = np.maximum(old[WORST], old[WAITING] + x[PREFETCHED]) + x[BOTH]
        new[WAITING] = new[RESTING] + np.maximum(x[PEAK], x[MIDDLE] + old[OWED])
        new[TIMES] = old[TIMES] + x[TIME] + moved * chain.move_counts[0]
        new[OPTIMIZER] = old[OPTIMIZER] + x[UPDATED]
        new[OWED], new[LAYOUT], new[NAME] = x[PENDING], x[GROUP], x[STRATEGY]
        new[RUNS] = 1 if runs is None else runs[choice, parent]
        if len(new) > CRITERIA:
            new[CRITERIA:] = old[CRITERIA:] + x[PARTS:] + moved * chain.move_counts[1:, None]
        return self._bounded(place, new, choice, parent)

    def _pairs(self, place: int, step: _Step) -> tuple[IntArray, IntArray, IntArray | None]:
        """Choices of a layer and labels behind it that are worth joining: by the price that bounds most labels best;
        and the runs of every pair where these are counted."""
        x, old, bounds, chain = self.chain.layer(place).figures, step.figures, self.bounds, self.chain
        number = int(np.argmax(step.promise.min(axis=1)))
        price, inside = bounds.prices[number], place > bounds.moment
        reduced = x[TIME] + price * x[REST if inside else BOTH] + bounds.before[place][number][x[GROUP]]
        reach = old[TIMES] + price * (old[RESTING] if inside else np.maximum(old[WORST], old[WAITING]))
        totals = (reduced[:, None] + chain.weighted_moves[place + 1][x[GROUP]])[:, old[LAYOUT]] + reach
        useful = totals <= self._ceiling[number] + price * chain.room
        runs = None
        if chain.runs is not None and chain.parts[place] == chain.parts[place + 1]:
            runs = old[RUNS] + (x[STRATEGY][:, None] != old[NAME])
            useful &= runs <= chain.runs
        self.work += totals.size
        choice, parent = np.nonzero(useful)
        fewest = 0 if self.beam in _NARROW else _MOST_PAIRS
        most = np.inf if self.beam is None else max(_CROWD * self.beam, fewest)
        if len(choice) > most:
            seconds = totals[choice, parent] - price * chain.room
            order = np.argsort(seconds, kind="stable")
            self._drop(float(seconds[order[int(most)]]))
            kept = np.sort(order[: int(most)])
            choice, parent = choice[kept], parent[kept]
        return choice, parent, runs

    def _bounded(self, place: int, figures: IntArray, choice: IntArray, parent: IntArray) -> _Step:
        """Labels without those that cannot lead to a path that fits and takes at most the limit."""
        bounds, room, price = self.bounds, self.chain.room, self.bounds.prices[:, None]
        peak = np.maximum(figures[WORST], figures[WAITING])
        promise = bounds.before[place][:, figures[LAYOUT]] + (
            figures[TIMES] + price * ((figures[RESTING] if place > bounds.moment else peak) - room)
        )
        alive = (promise <= self._ceiling[:, None]).all(axis=0)
        alive &= peak <= room - self._least[place]
        alive &= figures[OPTIMIZER] <= room - self._updated[place]
        if place == 0:
            alive &= figures[TIMES] <= self.limit
        return _Step(figures, promise, choice, parent).select(np.flatnonzero(alive))

    def _thinned(self, place: int, step: _Step) -> _Step:
        """Labels without dominated ones, and without those that the beam drops."""
        if len(step.choice) > 1:
            step = step.select(self._undominated(place, step.figures))
        if self.beam is None or len(step.choice) <= self.beam:
            return step
        promise = (step.promise - (self.bounds.ceiling(0.0) - 1)[:, None]).max(axis=0)
        order = np.argsort(promise, kind="stable")
        if self.chain.runs is not None and self.beam in _NARROW:  # as many of each number of runs
            runs = step.figures[RUNS][order]
            counts = (runs[:, None] == np.arange(1, self.chain.runs + 1)).cumsum(axis=0)
            order = order[np.argsort(counts[np.arange(len(runs)), runs - 1], kind="stable")]
        self._drop(float(promise[order[self.beam :]].min()))
        return step.select(np.sort(order[: self.beam]))

    def _drop(self, promise: float) -> None:
        self.dropped = min(self.dropped, promise * (1 - TINY) - 1)

    def _undominated(self, place: int, figures: IntArray) -> IntArray:
        """Indices of the undominated labels; of the first layer only times count."""
        times = figures[CRITERIA:] if len(figures) > CRITERIA else figures[TIMES : TIMES + 1]
        if place == 0:
            return np.sort(pareto_rows(times.T))
        worst = np.maximum(figures[WORST], self.chain.room - self._most[place])  # less makes no difference
        memory = [worst, *figures[[WAITING, RESTING, OPTIMIZER, OWED]]]
        if self.chain.runs is None:
            return pareto_within(np.column_stack((*times, *memory)), figures[LAYOUT])
        return pareto_within(np.column_stack((*times, *memory, figures[RUNS])), figures[NAME])
