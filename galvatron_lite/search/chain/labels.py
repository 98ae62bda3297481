"""The Pareto-best paths of a chain: exact labels, where the bounds of ``bounds`` leave a gap that matters.

Labels (time, A, B, R, U, d) of suffixes s_l..s_L, from the last layer to the first (``_Labels``): what is worst in
memory is mostly in the last layers, so it is settled first, and what is left is a sum. With a choice before it,

    A' = r + q + max(A, B + g)    the worst moment so far, raised by all that earlier layers add to it
    B' = R' + max(w, v + d)       the moment of the first layer so far, that waits for what is gathered before it
    R' = R + r,  U' = U + u       at rest; in the optimizer

All updates are monotone: of two labels whose first choices have the same layout, the one that is no better in any
component goes. A label also goes when its bound at the
prices above exceeds a limit, which grows from the bound of the whole chain until a path is met. Nothing is rounded:
the result is the exact Pareto set of (1), one solution of each value.

Stages whose tensors skip layers (``Net``) have edges (i, j), i + 1 < j, besides: what layer i makes goes straight to
layer j, which takes x_ij(a, b) >= 0 in each pass, by their layouts a and b. Where the layout of one end of each edge is
settled, what it takes is part of the other end's own time, and a chain is left.

Branch and bound over layouts of single layers, best first. A node settles some; an edge between layers
that may both have several layouts takes the least of what the producer may make it, as part of its reader's time. The
chain that is left is solved exactly: its paths are no slower than any of the node, and a path that prices at what the
chain says is the node's best. Otherwise the layer whose edges were most underrated is settled, once for each of its
layouts. Where all layers that matter agree, as most do, the first chain is the answer; an encoder's output that every
decoder block reads takes one branching.

With several criteria the same holds for Pareto sets: a node whose paths all price at what its chain says, or are
beaten by ways known, is done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.search.chain.bounds import (
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
)
from galvatron_lite.search.chain.chain import Chain, ChainFront, Path, best_of_parts, strategies_of_parts
from galvatron_lite.search.tables import pareto_rows, pareto_within

TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, LAYOUT, NAME, RUNS, CRITERIA = range(10)
"""Rows of labels: weighted time, A, B, R, U, d, layout and strategy of the first layer, runs of equal strategies so far
in its part of the model; then time in each criterion, where there are several."""
_START, _GROWTH = 0.04, 1.7
"""How far above the bound the first limit of labels is, as a share of an average layer's time; and how it grows."""
_CROWD, _MOST_PAIRS = 8, 100_000
"""Pairs of labels and choices are looked at up to so many times the beam, or to the second, whichever is more; of a
narrow beam no more than so many times it."""
_CLOSE = (64, 256)
"""Labels a layer by which a path near the bound is looked for, one after another."""


def pareto_paths(chain: Chain, cap: float = np.inf, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a chain within memory; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising. Where that drops any, the front is not complete.
        near: of one criterion, a path will do that another one may beat by this share.
    """
    common = strategies_of_parts(chain)
    if common is not None:
        best = best_of_parts(chain, common, cap)
        return ChainFront(() if best is None else (best,), len(chain.layers))
    bounds = ChainBounds.of(chain)
    limit = min(float(cap), bounds.line.longest)
    if bounds.exceeds(limit):
        return ChainFront(())
    return _front(bounds, limit, beam) if len(chain.weights) > 1 else _quickest(bounds, limit, beam, near)


def good_path(chain: Chain) -> tuple[Path | None, float]:
    """A good path of one criterion, soon, and a weighted time that no path beats; None where none is met that fits."""
    common = strategies_of_parts(chain)
    if common is not None:
        best = best_of_parts(chain, common)
        return best, np.inf if best is None else float(best.time[0])
    bounds = ChainBounds.of(chain)
    if bounds.exceeds(bounds.line.longest):
        return None, np.inf
    path = bounds.rounded()
    least = bounds.least * (1 - TINY) - 1
    return path, least if path is None else min(least, float(path.time[0]))


def _quickest(bounds: ChainBounds, cap: float, beam: int | None, near: float) -> ChainFront:
    """The path of least time: limits grow until a path is met; then none is quicker."""
    best, low, most = bounds.rounded(), max(bounds.least * (1 - TINY) - 1, 0.0), cap
    work, dropped = 0, np.inf
    if best is not None and best.time[0] > cap:
        best = None
    if near and (best is None or low < best.time[0] * (1 - near)):
        enough = min(low / (1 - near), cap)
        for labels in _CLOSE:
            close = _front(bounds, enough, labels)
            work += close.work
            if close.paths or close.complete:
                break
        best = close.paths[0] if close.paths else best
        if close.complete and best is None and enough == cap:
            return ChainFront((), work)
    if best is not None and low >= best.time[0] * (1 - near):
        return ChainFront((best,), work, low)
    step = _START * max(low, cap * 1e-6) / len(bounds.line.kind)
    if best is not None:
        most = _below(best.time[0])
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


def _below(time: int) -> float:
    """The next time that is less, as a float: beyond 2**53 one less is the same."""
    return min(float(time - 1), float(np.nextafter(float(time), 0.0)))


def _front(bounds: ChainBounds, limit: float, beam: int | None) -> ChainFront:
    useful = bounds.useful(limit)
    if not all(len(rows) for rows in useful):
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
        # what the layers before each place come to, at the least and at the most, and at the least in the optimizer
        lasting = [line.at(place).figures for line in (bounds.line,) for place in range(len(line.kind) - 1)]
        self.least, self.most, self.updated = (
            np.concatenate(([0], np.cumsum([int(of(figures[row])) for figures in lasting], dtype=np.int64)))
            for of, row in ((np.min, BOTH), (np.max, BOTH), (np.min, UPDATED))
        )
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
        reduced = x[TIME] + price * x[REST if inside else BOTH] + bounds.before[place][number][x[GROUP]]
        reach = old[TIMES] + price * (old[RESTING] if inside else np.maximum(old[WORST], old[WAITING]))
        totals = (reduced[:, None] + line.scaled[place + 1][x[GROUP]])[:, old[LAYOUT]] + reach
        useful = totals <= self.ceiling[number] + price * line.room
        runs, counted = None, line.runs is not None and line.parts[place] == line.parts[place + 1]
        if counted:
            runs = old[RUNS] + (x[STRATEGY][:, None] != old[NAME])
            useful &= runs <= line.runs
        self.work += totals.size
        choice, parent = np.nonzero(useful)
        fewest = 0 if self.beam in _CLOSE else _MOST_PAIRS
        most = np.inf if self.beam is None else max(_CROWD * self.beam, fewest)
        if len(choice) > most:
            seconds = totals[choice, parent] - price * line.room
            order = np.argsort(seconds, kind="stable")
            self._drop(float(seconds[order[int(most)]]))
            choice, parent = (reduced[np.sort(order[: int(most)])] for reduced in (choice, parent))
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
        alive &= peak <= room - self.least[place]
        alive &= figures[OPTIMIZER] <= room - self.updated[place]
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
        if self.line.runs is not None and self.beam in _CLOSE:  # as many of each number of runs
            runs = step.figures[RUNS][order]
            rank = ((runs[:, None] == np.arange(1, self.line.runs + 1)).cumsum(axis=0))[np.arange(len(runs)), runs - 1]
            order = order[np.argsort(rank, kind="stable")]
        self._drop(float(promise[order[self.beam :]].min()))
        return step.take(np.sort(order[: self.beam]))

    def _drop(self, promise: float) -> None:
        self.dropped = min(self.dropped, promise * (1 - TINY) - 1)

    def _undominated(self, place: int, figures: IntArray) -> IntArray:
        """Places of the labels that no other one equals or beats; at place 0 only their times count."""
        times = figures[CRITERIA:] if len(figures) > CRITERIA else figures[TIMES : TIMES + 1]
        if place == 0:
            return np.sort(pareto_rows(times.T))
        worst = np.maximum(figures[WORST], self.line.room - self.most[place])  # less makes no difference
        memory = [worst, *figures[[WAITING, RESTING, OPTIMIZER, OWED]]]
        if self.line.runs is None:
            return pareto_within(np.column_stack((*times, *memory)), figures[LAYOUT])
        return pareto_within(np.column_stack((*times, *memory, figures[RUNS])), figures[NAME])


Pair = tuple[int, int]
Settled = Mapping[int, int]
_MOST = 400
"""Nodes that are looked into at the most, counted, so that results repeat."""


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """A stage."""

    chain: Chain  # its layers, with what goes from each to the next
    # by places of producer and reader, (groups, groups) picoseconds in one pass
    skips: Mapping[Pair, IntArray] = field(default_factory=dict)

    def groups(self, choices: Sequence[int]) -> list[int]:
        """The layout of each layer of a path."""
        return [int(layer.group[choice]) for layer, choice in zip(self.chain.layers, choices, strict=True)]

    def moved(self, choices: Sequence[int]) -> int:
        """Picoseconds of redistribution of a path in one pass."""
        groups = self.groups(choices)
        steps = zip(self.chain.layers[1:], pairwise(groups), strict=True)
        along = sum(int(layer.move[ends]) for layer, ends in steps)
        return along + sum(int(move[groups[i], groups[j]]) for (i, j), move in self.skips.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """A net as a chain, with the layouts of some layers settled."""

    chain: Chain  # the layers that are left; times hold what edges take at the least
    rows: list[IntArray]  # per layer, its choices among those of the net
    # by edge, which end has it in its time, and what each of that layer's layouts takes
    charged: dict[Pair, tuple[int, IntArray]]


def net_paths(net: Net, cap: float = np.inf, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a net within memory, as ``pareto_paths`` has it of a chain."""
    if not net.skips:
        return pareto_paths(net.chain, cap, beam, near)

    def weighted(path: Path) -> int:
        return sum(int(weight) * time for weight, time in zip(net.chain.weights, path.time, strict=True))

    def beaten(path: Path) -> bool:
        return any(all(a <= b for a, b in zip(other.time, path.time, strict=True)) for other in best)

    best, work, dropped, looked, order = list[Path](), 0, np.inf, 0, count()
    heap = [(0, next(order), dict[int, int]())]
    while heap:
        least, _, settled = heapq.heappop(heap)
        limit = weighted(best[0]) - 1 if best and len(net.chain.weights) == 1 else cap
        if least <= limit and looked >= _MOST:
            dropped = min(dropped, float(least))
        if least > limit or looked >= _MOST:
            continue
        looked += 1
        relaxed = _relaxed(net, settled)
        front = pareto_paths(relaxed.chain, limit, beam)
        work, dropped = work + front.work, min(dropped, front.dropped)
        priced = [_priced(net, relaxed, path) for path in front.paths]
        best += [path for path, _ in priced if weighted(path) <= cap]
        best = [best[row] for row in pareto_rows(np.array([path.time for path in best], dtype=np.int64))]
        # The node is to be looked into where a path that no way met beats does not price at what its chain says.
        pairs = zip(front.paths, priced, strict=True)
        unsure = [(weighted(path), under) for path, (_, under) in pairs if under and not beaten(path)]
        if unsure:
            least, under = min(unsure, key=lambda pair: pair[0])
            place = _most_underrated(under)
            groups = np.unique(net.chain.layers[place].group)
            for group in groups:
                heapq.heappush(heap, (least, next(order), settled | {place: int(group)}))
    return ChainFront(tuple(sorted(best, key=lambda path: (path.time, path.choices))), work, dropped)


def good_net_path(net: Net) -> tuple[Path | None, float]:
    """A good path of one criterion, soon, and a weighted time that no path beats, as ``good_path``."""
    if not net.skips:
        return good_path(net.chain)
    relaxed = _relaxed(net, {})
    path, least = good_path(relaxed.chain)
    return (None if path is None else _priced(net, relaxed, path)[0]), least


def _relaxed(net: Net, settled: Settled) -> _Relaxed:
    layers = net.chain.layers
    rows = [
        np.flatnonzero(layer.group == settled[place]) if place in settled else np.arange(len(layer.group))
        for place, layer in enumerate(layers)
    ]
    present = [np.unique(layer.group[row]) for layer, row in zip(layers, rows, strict=True)]
    charged = {pair: _charge(move, pair, present) for pair, move in net.skips.items()}
    relaxed_parts = [
        layer if len(kept) == len(layer.group) else layer.only(kept) for layer, kept in zip(layers, rows, strict=True)
    ]
    for place, taken in charged.values():
        if taken.any():
            time = relaxed_parts[place].time + taken[relaxed_parts[place].group][:, None] * net.chain.moves
            relaxed_parts[place] = replace(relaxed_parts[place], time=time)
    return _Relaxed(replace(net.chain, layers=tuple(relaxed_parts)), rows, charged)


def _charge(move: IntArray, pair: Pair, present: Sequence[IntArray]) -> tuple[int, IntArray]:
    """Which end of an edge has what it takes in its time, and that by its layout: exact where the other is settled."""
    i, j = pair
    if len(present[j]) == 1:
        return i, move[:, int(present[j][0])]
    least: IntArray = move[present[i]].min(axis=0)
    return j, least


def _priced(net: Net, relaxed: _Relaxed, path: Path) -> tuple[Path, dict[Pair, int]]:
    """A path of a node as the net has it, and by how much edges were underrated."""
    choices = tuple(int(rows[choice]) for rows, choice in zip(relaxed.rows, path.choices, strict=True))
    groups, under = net.groups(choices), {}
    for (i, j), move in net.skips.items():
        end, taken = relaxed.charged[i, j]
        missing = int(move[groups[i], groups[j]] - taken[groups[end]])
        if missing:
            under[i, j] = missing
    more = sum(under.values())
    time = tuple(seconds + int(times) * more for seconds, times in zip(path.time, net.chain.moves, strict=True))
    return Path(time, choices), under


def _most_underrated(under: Mapping[Pair, int]) -> int:
    sums = Counter[int]()
    for pair, missing in under.items():
        sums.update(dict.fromkeys(pair, missing))
    return min(sums, key=lambda place: (-sums[place], place))
