"""One strategy a layer along a chain of layers: least time within the memory of one device.

The problem. Layers l = 1..L, choices s_l in S_l; all figures are whole numbers (picoseconds, bytes):

    t_l(s) in Z^C          time in C criteria (C = 1: a step; else parts of a micro-batch, then work once a step)
    x_l(s', s) >= 0        redistribution from choice s' of layer l-1 to s, counted c_1..c_C times in the criteria
    r, q, w, v, g, d, u    memory of (l, s): rest, prefix, peak, middle, prefetched, pending, updated (``cost.memory``)

    minimise (Pareto)  sum_l t_l(s_l) + c * sum_l x_l(s_{l-1}, s_l)                                            (1)
    subject to         sum_l r_l + sum_{j<l} q_j + g_{l-1} + max(w_l, v_l + d_{l+1}) <= M      for every l     (2)
                       sum_l u_l <= M                                                                          (3)
                       weights . (1) <= cap                                                                    (4)

The method has two parts, and the second one is asked for only where the first leaves a gap that matters.

1. With a price of memory (lambda, time a byte), time + lambda * memory of one moment (2) is a sum over layers, so that
   its least is a shortest path over layouts (``ChainBounds``). Its maximum over prices bounds all paths from below.
   Of the shortest paths around the best price one takes too much memory, the next one fits; the start of one with the
   end of the other, changing over wherever that fits best, is a path that is about a layer away from the bound.
2. Labels (time, A, B, R, U, d) of suffixes s_l..s_L, from the last layer to the first (``_Labels``): what is worst in
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
from functools import cached_property, reduce
from itertools import groupby, pairwise
from math import prod

import numpy as np

from galvatron_lite.arrays import BoolArray, FloatArray, IntArray
from galvatron_lite.search.pareto import pareto_rows, pareto_within

MEMORY = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")
TIME, BOTH, REST, PEAK, MIDDLE, GATHERED, PENDING, UPDATED, GROUP, STRATEGY, PARTS = range(11)
"""Rows of a layer's figures: weighted time; rest + prefix; rest ... updated; layout; strategy; then time in each
criterion, where there are several."""
TIMES, WORST, WAITING, RESTING, OPTIMIZER, OWED, LAYOUT, NAME, RUNS, CRITERIA = range(10)
"""Rows of labels: weighted time, A, B, R, U, d, layout and strategy of the first layer, runs of equal strategies so far
in its part of the model; then time in each criterion, where there are several."""
_STEPS = np.concatenate(([0.0], 2.0 ** np.arange(-14, 16, 2)))
_AROUND = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.6, 3.0])
_TINY = 1e-9
"""Share by which a bound in floating point is lowered, so that rounding never makes it too high."""
_MOMENTS = 3
"""Moments that are tried at most for the one that bounds best."""
_START, _GROWTH = 0.04, 1.7
"""How far above the bound the first limit of labels is, as a share of an average layer's time; and how it grows."""
_CROWD, _MOST_PAIRS = 8, 100_000
"""Pairs of labels and choices are looked at up to so many times the beam, or to the second, whichever is more."""
_FITTING = 1_000
"""Labels a layer by which it is told whether any path fits."""
_COMBINATIONS = 100_000
"""Combinations of one strategy a part that are all looked at sooner than a search takes."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainLayer:
    """One layer of a chain: figures of each of its S choices."""

    time: IntArray  # (S, C)
    rest: IntArray  # (S,) each, see ``cost.memory.MemoryTerms``
    prefix: IntArray
    peak: IntArray
    middle: IntArray
    prefetched: IntArray
    pending: IntArray
    updated: IntArray
    move: IntArray  # (groups of the layer before, groups); meaningless in the first layer
    group: IntArray  # (S,) the choice's layout: 0, 1, ...
    strategy: IntArray | None = None  # (S,) number of the choice's strategy; None where runs are not counted
    part: int = 0  # of the model (before, among or after the blocks); runs of strategies are counted in each

    def only(self, rows: IntArray) -> ChainLayer:
        """The layer with some of its choices."""
        figures = {name: getattr(self, name)[rows] for name in ("time", *MEMORY, "group")}
        return replace(self, **figures, strategy=None if self.strategy is None else self.strategy[rows])

    def figures(self, weights: IntArray) -> IntArray:
        """(rows, S), see ``TIME`` and on."""
        names = np.zeros_like(self.group) if self.strategy is None else self.strategy
        memory = [getattr(self, name) for name in MEMORY if name != "prefix"]
        several = self.time.T if len(weights) > 1 else ()
        return np.array([self.time @ weights, self.rest + self.prefix, *memory, self.group, names, *several])


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain of layers."""

    layers: tuple[ChainLayer, ...]
    moves: IntArray  # (C,) how many times a move counts in each criterion
    weights: IntArray  # (C,) what turns the criteria into one time
    room: int  # bytes (M)
    runs: int | None = None  # of neighbouring layers with one strategy that each part may have; None: any


@dataclass(frozen=True, slots=True)
class Path:
    """One choice a layer."""

    time: tuple[int, ...]  # in each criterion
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChainFront:
    """The Pareto-best paths of a chain, ascending in time."""

    paths: tuple[Path, ...]
    work: int = 0  # labels looked at
    dropped: float = np.inf  # a weighted time that no path left out beats; infinite where none was

    @property
    def complete(self) -> bool:
        """Whether the paths are the whole Pareto set."""
        return self.dropped == np.inf


def pareto_paths(chain: Chain, cap: int | None = None, beam: int | None = None) -> ChainFront:
    """The Pareto set of a chain within memory; empty where nothing fits.

    Args:
        chain: the problem.
        cap: paths of more weighted time than this are of no interest.
        beam: keep only so many labels a layer, the most promising. Where that drops any, the front is not complete.
    """
    if chain.runs == 1 and len(chain.weights) == 1 and _countable(chain):
        best = best_of_parts(chain, np.inf if cap is None else cap)
        return ChainFront(() if best is None else (best,), len(chain.layers))
    bounds = ChainBounds.of(chain)
    limit = bounds.line.longest if cap is None else min(float(cap), bounds.line.longest)
    if bounds.exceeds(limit):
        return ChainFront(())
    return _front(bounds, limit, beam) if len(chain.weights) > 1 else _quickest(bounds, limit, beam)


def good_path(chain: Chain, cap: int | None = None) -> tuple[Path | None, float]:
    """A good path of one criterion, soon, and a weighted time that no path beats; None where none is met that fits.

    The time is infinite where no path takes at most ``cap``.
    """
    if chain.runs == 1 and _countable(chain):
        best = best_of_parts(chain, np.inf if cap is None else cap)
        return best, np.inf if best is None else float(best.time[0] * chain.weights[0])
    bounds = ChainBounds.of(chain)
    if bounds.exceeds(bounds.line.longest if cap is None else min(float(cap), bounds.line.longest)):
        return None, np.inf
    path = bounds.rounded()
    least = bounds.least * (1 - _TINY) - 1
    return path, least if path is None else min(least, float(path.time[0] * chain.weights[0]))


class _Kind:
    def __init__(self, figures: IntArray) -> None:
        self.figures = figures
        self.order = np.argsort(figures[GROUP], kind="stable")
        ordered = figures[GROUP][self.order]
        self.starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        self.present = ordered[self.starts]

    def least(self, values: FloatArray, groups: int) -> FloatArray:
        """(K, groups): the least of (K, S) values of each layout; infinite without choices."""
        found = np.minimum.reduceat(values[:, self.order], self.starts, axis=1)
        if len(self.present) == groups:
            return found
        wide = np.full((len(values), groups), np.inf)
        wide[:, self.present] = found
        return wide

    def memory(self, place: int, moment: int, pending: int) -> IntArray:
        """(S,): what a layer at a place adds to the moment of the layer at another one, which ``pending`` follows."""
        f = self.figures
        added: IntArray = f[REST] if place > moment else f[BOTH]
        if place == moment - 1:
            added = added + f[GATHERED]
        if place == moment:
            added = f[REST] + np.maximum(f[PEAK], f[MIDDLE] + pending)
        return added

    @cached_property
    def extremes(self) -> dict[str, int]:
        """What ``_Ahead`` is made of."""
        f = self.figures
        q = f[BOTH] - f[REST]
        return {
            "both_least": int(f[BOTH].min()), "both_most": int(f[BOTH].max()), "updated_least": int(f[UPDATED].min()),
            "updated_most": int(f[UPDATED].max()), "updating": int((f[UPDATED] - f[BOTH]).max()),
            "rest": int(f[REST].max()), "prefix": int(q.min()), "peak_over": int((f[PEAK] - q).max()),
            "middle_over": int((f[MIDDLE] - q).max()), "peak": int(f[PEAK].max()), "middle": int(f[MIDDLE].max()),
            "gathered": int(f[GATHERED].max()), "pending": int(f[PENDING].max()),
            "spare": int((f[PEAK] - f[MIDDLE]).min()),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """A chain whose equal layers share their figures."""

    kinds: tuple[_Kind, ...]
    kind: tuple[int, ...]  # (L,) place in ``kinds`` of each layer
    moves: tuple[IntArray, ...]  # per place, of one pass; see ``ChainLayer``
    scaled: tuple[FloatArray, ...]  # the same in weighted time
    by: IntArray  # (1 + criteria if several,) how often a move counts in the weighted time and in each criterion
    room: int
    runs: int | None
    parts: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain) -> _Line:
        """The line of a chain."""
        numbers: dict[object, int] = {}
        kinds: list[_Kind] = []
        kind: list[int] = []
        for layer in chain.layers:
            if id(layer) not in numbers:
                figures = layer.figures(chain.weights)
                key = figures.tobytes()
                if key not in numbers:
                    numbers[key] = len(kinds)
                    kinds.append(_Kind(figures))
                numbers[id(layer)] = numbers[key]
            kind.append(numbers[id(layer)])
        by = int(chain.moves @ chain.weights)
        scaled = {id(layer.move): (layer.move * by).astype(np.float64) for layer in chain.layers}
        return cls(
            tuple(kinds), tuple(kind), tuple(layer.move for layer in chain.layers),
            tuple(scaled[id(layer.move)] for layer in chain.layers),
            np.array([by, *(chain.moves if len(chain.weights) > 1 else ())], dtype=np.int64),
            chain.room, chain.runs, tuple(layer.part for layer in chain.layers),
        )  # fmt: skip

    def at(self, place: int) -> _Kind:
        """The kind of the layer at a place."""
        return self.kinds[self.kind[place]]

    def groups(self, place: int) -> int:
        """How many layouts the moves to and from a layer tell apart."""
        if place:
            return int(self.moves[place].shape[1])
        return int(self.moves[1].shape[0]) if len(self.kind) > 1 else int(self.at(0).figures[GROUP].max()) + 1

    def only(self, rows: Sequence[IntArray]) -> _Line:
        """With some of the choices of each kind."""
        pairs = zip(self.kinds, rows, strict=True)
        kinds = (own if len(kept) == len(own.order) else _Kind(own.figures[:, kept]) for own, kept in pairs)
        return replace(self, kinds=tuple(kinds))

    @property
    def longest(self) -> float:
        """No path takes more weighted time."""
        own = sum(float(self.at(place).figures[TIME].max()) for place in range(len(self.kind)))
        return own + sum(float(move.max()) for move in self.scaled[1:])

    def timeless(self) -> _Line:
        """With nothing but memory."""
        kinds = []
        for kind in self.kinds:
            figures = kind.figures.copy()
            figures[TIME] = 0
            kinds.append(_Kind(figures))
        return replace(self, kinds=tuple(kinds), scaled=tuple(0.0 * move for move in self.scaled), by=0 * self.by)

    def evaluated(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Weighted time of paths, (paths, L) choices, and whether each is within the room and the runs."""
        kinds = [self.at(place).figures for place in range(len(self.kind))]
        f = np.stack([figures[:PARTS, own] for figures, own in zip(kinds, rows.T, strict=True)], axis=2)
        moved = sum(
            (self.moves[place][f[GROUP, :, place - 1], f[GROUP, :, place]] for place in range(1, len(kinds))),
            start=np.zeros(len(rows), dtype=np.int64),
        )
        prefix = f[BOTH] - f[REST]
        after, before = np.zeros_like(prefix), np.zeros_like(prefix)
        after[:, :-1], before[:, 1:] = f[PENDING, :, 1:], f[GATHERED, :, :-1]
        moments = np.cumsum(prefix, axis=1) - prefix + before + np.maximum(f[PEAK], f[MIDDLE] + after)
        fits = (f[REST].sum(axis=1) + moments.max(axis=1) <= self.room) & (f[UPDATED].sum(axis=1) <= self.room)
        if self.runs is not None:
            parts = np.array(self.parts)
            changes = (f[STRATEGY, :, 1:] != f[STRATEGY, :, :-1]) & (parts[1:] == parts[:-1])
            for part in set(self.parts):
                fits &= changes[:, parts[1:] == part].sum(axis=1) < self.runs
        return f[TIME].sum(axis=1) + moved * self.by[0], fits


@dataclass(frozen=True, slots=True, eq=False)
class ChainBounds:
    """Lagrangian bounds of a chain: shortest paths at several prices of memory, with one moment priced."""

    line: _Line
    weight: int  # of the one criterion; 0 where there are several
    prices: FloatArray  # (K,) picoseconds a byte
    moment: int  # place of the layer whose moment is priced
    before: list[FloatArray]  # per place (K, groups): the least of the layers before it, with the move to it
    behind: list[FloatArray]  # per place (K, groups): the least of the layers behind it, with the move from it
    root: FloatArray  # (K,) bounds on the weighted time of the whole

    @classmethod
    def of(cls, chain: Chain) -> ChainBounds:
        """Bounds at prices about the one that bounds best, with the moment priced that is the worst there."""
        line = _Line.of(chain)
        best, moment = (0.0, -np.inf), len(line.kind) - 1
        trial = moment
        for _ in range(_MOMENTS):
            found = _best_price(line, trial)
            if found[1] <= best[1]:
                break
            best, moment, trial = found, trial, _worst_moment(line, found[0])
            if trial == moment:
                break
        return cls.at(line, best[0] * _AROUND, moment, int(chain.weights[0]) if len(chain.weights) == 1 else 0)

    @classmethod
    def at(cls, line: _Line, prices: FloatArray, moment: int, weight: int = 0) -> ChainBounds:
        """The bounds at some prices."""
        before, root = _before(line, prices, moment)
        values, behind = _priced(line, prices, moment), [np.zeros((len(prices), line.groups(len(line.kind) - 1)))]
        for place in range(len(line.kind) - 1, 0, -1):
            own = line.at(place).least(values[place], line.groups(place)) + behind[-1]
            behind.append((line.scaled[place] + own[:, None, :]).min(axis=2))
        return cls(line, weight, prices, moment, before, behind[::-1], root)

    @property
    def least(self) -> float:
        """No path within the room takes less weighted time, but for rounding."""
        return float(self.root.max())

    def ceiling(self, limit: float) -> FloatArray:
        """(K,): bounds above this are above ``limit`` in spite of rounding."""
        return limit * (1 + _TINY) + 1 + self.prices * (self.line.room * 1e-12)

    def exceeds(self, limit: float) -> bool:
        """Whether no path takes at most a limit."""
        return bool((self.root > self.ceiling(limit)).any())

    def through(self, place: int) -> FloatArray:
        """(K, S): bounds on paths through each choice of a layer."""
        own = _priced(self.line, self.prices, self.moment)[place]
        group = self.line.at(place).figures[GROUP]
        values: FloatArray = own + (self.before[place] + self.behind[place])[:, group]
        return values - self.prices[:, None] * self.line.room

    def useful(self, limit: float) -> list[IntArray]:
        """Per kind, the choices that some path may use that takes at most ``limit``."""
        line, ends = self.line, dict[tuple[int, int], tuple[FloatArray, FloatArray]]()
        for place, values in enumerate(_priced(line, self.prices, self.moment)):
            key, end = (line.kind[place], id(values)), self.before[place] + self.behind[place]
            ends[key] = (values, np.minimum(ends[key][1], end) if key in ends else end)
        best: dict[int, FloatArray] = {}
        for (number, _), (values, end) in ends.items():
            through = values + end[:, line.kinds[number].figures[GROUP]]
            best[number] = np.minimum(best[number], through) if number in best else through
        ceiling = (self.ceiling(limit) + self.prices * line.room)[:, None]
        return [np.flatnonzero((best[number] <= ceiling).all(axis=0)) for number in range(len(line.kinds))]

    def rounded(self) -> Path | None:
        """The best of the shortest paths that fit, and of those that change over from one that does not to one that
        does, or the other way; None where none fits."""
        line, rows = self.line, self._shortest()
        times, fits = line.evaluated(rows)
        if not fits.any():
            return None
        first = int(np.argmax(fits))
        options = rows[fits]
        if first:
            low, high = rows[first - 1], rows[first]
            start = np.tri(len(low) + 1, len(low), k=-1, dtype=bool)
            options = np.concatenate((options, np.where(start, low, high), np.where(start, high, low)))
        times, fits = line.evaluated(options)
        best = int(np.argmin(np.where(fits, times.astype(np.float64), np.inf)))
        return Path((int(times[best]) // self.weight,), tuple(int(choice) for choice in options[best]))

    def _shortest(self) -> IntArray:
        """(K, L): the choices of the shortest path at each price."""
        line, values = self.line, _priced(self.line, self.prices, self.moment)
        rows = np.empty((len(self.prices), len(line.kind)), dtype=np.int64)
        after: FloatArray = np.zeros((len(self.prices), line.groups(len(line.kind) - 1)))
        for place in range(len(line.kind) - 1, -1, -1):
            group = line.at(place).figures[GROUP]
            rows[:, place] = np.argmin(values[place] + (self.before[place] + after)[:, group], axis=1)
            after = line.scaled[place][:, group[rows[:, place]]].T if place else after
        return rows


def _priced(line: _Line, prices: FloatArray, moment: int) -> list[FloatArray]:
    """Per place (K, S): weighted time + price * memory at a moment; the same array for layers of which it is."""
    last = moment + 1 == len(line.kind)
    pending = 0 if last else int(line.at(moment + 1).figures[PENDING].min())
    known: dict[tuple[int, int], FloatArray] = {}
    values = []
    for place, number in enumerate(line.kind):
        key = number, min(max(place - moment, -2), 1)
        if key not in known:
            own = line.kinds[number]
            known[key] = own.figures[TIME] + prices[:, None] * own.memory(place, moment, pending)
        values.append(known[key])
    return values


def _before(line: _Line, prices: FloatArray, moment: int) -> tuple[list[FloatArray], FloatArray]:
    """``ChainBounds.before`` and ``root``.

    Up to the moment, layers count what they add to any later one; ``prefetched`` is for this one alone.
    """
    values, known = _priced(line, prices, moment), dict[int, FloatArray]()
    before = [np.zeros((len(prices), line.groups(0)))]
    reached = before[0]
    for place, own in enumerate(values):
        if id(own) not in known:
            known[id(own)] = line.at(place).least(own, line.groups(place))
        if place + 1 == len(values):
            break
        last, after = reached, line.scaled[place + 1]
        reached = ((last + known[id(own)])[:, :, None] + after).min(axis=1)
        if place + 1 == moment:
            plain = line.at(place).figures[TIME] + prices[:, None] * line.at(place).figures[BOTH]
            least = line.at(place).least(plain, line.groups(place))
            before.append(((last + least)[:, :, None] + after).min(axis=1))
        else:
            before.append(reached)
    return before, (reached + known[id(values[-1])]).min(axis=1) - prices * line.room


def _best_price(line: _Line, moment: int) -> tuple[float, float]:
    """The price with the highest bound on the whole, more than nothing, and that bound.

    The bound is concave in the price, so the best of a row of prices has the greatest one next to it.
    """
    times = sum(float(np.ptp(kind.figures[TIME])) for kind in line.kinds) + 1.0
    sizes = sum(float(np.ptp(kind.figures[BOTH])) for kind in line.kinds) + 1.0
    prices = times / sizes * _STEPS
    for _ in range(2):
        best = int(np.argmax(_before(line, prices, moment)[1]))
        low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
        low = max(low, high * 2.0**-6)
        prices = np.concatenate(([0.0], low * (high / low) ** (np.arange(17) / 16)))
    root = _before(line, prices, moment)[1]
    best = int(np.argmax(root))
    return float(max(prices[best], high * 2.0**-12)), float(root[best])


def _worst_moment(line: _Line, price: float) -> int:
    """Place of the layer whose moment is the worst where each layer takes what is cheapest at a price, moves aside."""
    rows = []
    for kind in line.kinds:
        f = kind.figures[:, int(np.argmin(kind.figures[TIME] + price * kind.figures[BOTH]))]
        rows.append((int(f[BOTH] - f[REST]), max(int(f[PEAK]), int(f[MIDDLE])), int(f[GATHERED])))
    prefix, local, gathered = np.array(rows)[list(line.kind)].T
    moments = np.cumsum(prefix) - prefix + local
    moments[1:] += gathered[:-1]
    return int(np.argmax(moments))


def _quickest(bounds: ChainBounds, cap: float, beam: int | None) -> ChainFront:
    """The path of least time: limits grow until a path is met; then none is quicker."""
    best = bounds.rounded()
    if best is None and not _may_fit(bounds.line):
        return ChainFront(())
    if best is not None and best.time[0] * bounds.weight > cap:
        best = None
    low, most = max(bounds.least * (1 - _TINY) - 1, 0.0), cap
    step = _START * max(low, cap * 1e-6) / len(bounds.line.kind)
    work, dropped = 0, np.inf
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


def _may_fit(line: _Line) -> bool:
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
        self.dropped = min(self.dropped, promise * (1 - _TINY) - 1)

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

    def __init__(self, line: _Line) -> None:
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


def worst_moment(runs: Sequence[tuple[Sequence[IntArray], int]]) -> IntArray:
    """The worst moment of layers that compute, without what they have at rest and the optimizer's; (2) above.

    In a run of equal layers moments go up or down evenly, so that only those at its ends are looked at.

    Args:
        runs: by runs of equal layers, their figures in the order of ``MEMORY``, and how many they are.
    """
    worst, before = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for number, ((_, prefix, peak, middle, prefetched, pending, _), count) in enumerate(runs):
        for place in sorted({0, min(1, count - 1), max(count - 2, 0), count - 1}):
            last = runs[number - 1][0][4] if number else 0
            first = runs[number + 1][0][5] if number + 1 < len(runs) else 0
            end = middle + (pending if place + 1 < count else first)
            moment = before + place * prefix + np.maximum(peak, end) + (prefetched if place else last)
            worst = np.maximum(worst, moment)
        before = before + count * prefix
    return worst


def _common(chain: Chain) -> tuple[list[list[ChainLayer]], list[IntArray]]:
    parts = [list(layers) for _, layers in groupby(chain.layers, key=lambda layer: layer.part)]
    names = [{id(layer): _strategies(layer) for layer in layers}.values() for layers in parts]
    return parts, [reduce(np.intersect1d, own) for own in names]


def _strategies(layer: ChainLayer) -> IntArray:
    assert layer.strategy is not None  # as wherever runs are counted
    return layer.strategy


def _countable(chain: Chain) -> bool:
    return prod(own.size for own in _common(chain)[1]) <= _COMBINATIONS


def best_of_parts(chain: Chain, cap: float) -> Path | None:
    """The best path of a chain with one criterion whose parts have one strategy each; None where none fits.

    Every combination at once, as arrays.
    """
    parts, common = _common(chain)
    if not all(own.size for own in common):
        return None
    rows: dict[int, IntArray] = {}
    for layers, wanted in zip(parts, common, strict=True):
        for layer in {id(layer): layer for layer in layers}.values():
            order = np.argsort(_strategies(layer))
            rows[id(layer)] = order[np.searchsorted(_strategies(layer), wanted, sorter=order)]

    def along(values: IntArray, layer: ChainLayer, axis: int) -> IntArray:
        return np.expand_dims(values[rows[id(layer)]], [other for other in range(len(parts)) if other != axis])

    runs = [
        (axis, layers[0], len(layers))
        for axis, own in enumerate(parts)
        for layers in (list(same) for _, same in groupby(own, key=id))
    ]
    none = np.zeros([own.size for own in common], dtype=np.int64)
    time = sum((count * along(layer.time[:, 0], layer, axis) for axis, layer, count in runs), start=none)
    for axis, (left, right) in enumerate(pairwise(parts)):
        a, b = left[-1], right[0]
        move = b.move[np.ix_(a.group[rows[id(a)]], b.group[rows[id(b)]])]
        others = [other for other in range(len(parts)) if other not in (axis, axis + 1)]
        time = time + chain.moves[0] * np.expand_dims(move, others)
    figures = [([along(getattr(layer, name), layer, axis) for name in MEMORY], count) for axis, layer, count in runs]
    rest, updated = (sum((count * own[column] for own, count in figures), start=none) for column in (0, 6))
    fits = (rest + worst_moment(figures) <= chain.room) & (updated <= chain.room)
    least = np.where(fits & (time * chain.weights[0] <= cap), time, np.inf)
    place = int(np.argmin(least))
    if not np.isfinite(least.flat[place]):
        return None
    chosen = np.unravel_index(place, least.shape)
    choices = tuple(int(rows[id(layer)][chosen[axis]]) for axis, own in enumerate(parts) for layer in own)
    return Path((int(time.flat[place]),), choices)
