"""Bounds of a chain's paths, and good paths, by shortest paths at a price of memory (``chain`` states the problem).

With a price of memory (lambda, time a byte), time + lambda * memory of one moment (2) is a sum over layers, so that
its least is a shortest path over layouts (``ChainBounds``). Its maximum over prices bounds all paths from below.
Of the shortest paths around the best price one takes too much memory, the next one fits; the start of one with the
end of the other, changing over wherever that fits best, is a path that is about a layer away from the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.arrays import BoolArray, FloatArray, IntArray
from galvatron_lite.search.chain.chain import Chain, Path

TIME, BOTH, REST, PEAK, MIDDLE, GATHERED, PENDING, UPDATED, GROUP, STRATEGY, PARTS = range(11)
"""Rows of a layer's figures: weighted time; rest + prefix; rest ... updated; layout; strategy; then time in each
criterion, where there are several."""
_STEPS = np.concatenate(([0.0], 2.0 ** np.arange(-14, 16, 2)))
_AROUND = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.6, 3.0])
TINY = 1e-9
"""Share by which a bound in floating point is lowered, so that rounding never makes it too high."""
_MOMENTS = 3
"""Moments that are tried at most for the one that bounds best."""


class LayerKindFigures:
    """Figures of all choices of layers that are equal; sorted by layout where the least of each is asked for."""

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


@dataclass(frozen=True, slots=True, eq=False)
class ChainFigures:
    """A chain whose equal layers share their figures."""

    kinds: tuple[LayerKindFigures, ...]
    kind: tuple[int, ...]  # (L,) place in ``kinds`` of each layer
    moves: tuple[IntArray, ...]  # per place, of one pass; see ``ChainLayer``
    scaled: tuple[FloatArray, ...]  # the same in weighted time
    by: IntArray  # (1 + criteria if several,) how often a move counts in the weighted time and in each criterion
    room: int
    runs: int | None
    parts: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain) -> ChainFigures:
        """The line of a chain."""
        numbers: dict[object, int] = {}
        kinds: list[LayerKindFigures] = []
        kind: list[int] = []
        for layer in chain.layers:
            if id(layer) not in numbers:
                figures = layer.figures(chain.weights)
                key = figures.tobytes()
                if key not in numbers:
                    numbers[key] = len(kinds)
                    kinds.append(LayerKindFigures(figures))
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

    def at(self, place: int) -> LayerKindFigures:
        """The kind of the layer at a place."""
        return self.kinds[self.kind[place]]

    def groups(self, place: int) -> int:
        """How many layouts the moves to and from a layer tell apart."""
        if place:
            return int(self.moves[place].shape[1])
        return int(self.moves[1].shape[0]) if len(self.kind) > 1 else int(self.at(0).figures[GROUP].max()) + 1

    def only(self, rows: Sequence[IntArray]) -> ChainFigures:
        """With some of the choices of each kind."""
        pairs = zip(self.kinds, rows, strict=True)
        kinds = (
            figures if len(kept) == len(figures.order) else LayerKindFigures(figures.figures[:, kept])
            for figures, kept in pairs
        )
        return replace(self, kinds=tuple(kinds))

    @property
    def longest(self) -> float:
        """No path takes more weighted time."""
        own = sum(float(self.at(place).figures[TIME].max()) for place in range(len(self.kind)))
        return own + sum(float(move.max()) for move in self.scaled[1:])

    def evaluated(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Weighted time of paths, (paths, L) choices, and whether each is within the room and the runs."""
        kinds = [self.at(place).figures for place in range(len(self.kind))]
        f = np.stack([figures[:PARTS, chosen] for figures, chosen in zip(kinds, rows.T, strict=True)], axis=2)
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

    line: ChainFigures
    prices: FloatArray  # (K,) picoseconds a byte
    moment: int  # place of the layer whose moment is priced
    before: list[FloatArray]  # per place (K, groups): the least of the layers before it, with the move to it
    behind: list[FloatArray]  # per place (K, groups): the least of the layers behind it, with the move from it
    root: FloatArray  # (K,) bounds on the weighted time of the whole

    @classmethod
    def of(cls, chain: Chain) -> ChainBounds:
        """Bounds at prices about the one that bounds best, with the moment priced that is the worst there."""
        line = ChainFigures.of(chain)
        trial = moment = len(line.kind) - 1
        best = (0.0, -np.inf)
        for _ in range(_MOMENTS):
            better = _best_price(line, trial)
            if better[1] <= best[1]:
                break
            best, moment, trial = better, trial, _worst_moment(line, better[0])
            if trial == moment:
                break
        return cls.at(line, best[0] * _AROUND, moment)

    @classmethod
    def at(cls, line: ChainFigures, prices: FloatArray, moment: int) -> ChainBounds:
        """The bounds at some prices."""
        before, root = _before(line, prices, moment)
        values, behind = _priced(line, prices, moment), [np.zeros((len(prices), line.groups(len(line.kind) - 1)))]
        for place in range(len(line.kind) - 1, 0, -1):
            ahead = line.at(place).least(values[place], line.groups(place)) + behind[-1]
            behind.append((line.scaled[place] + ahead[:, None, :]).min(axis=2))
        return cls(line, prices, moment, before, behind[::-1], root)

    @property
    def least(self) -> float:
        """No path within the room takes less weighted time, but for rounding."""
        return float(self.root.max())

    def ceiling(self, limit: float) -> FloatArray:
        """(K,): bounds above this are above ``limit`` in spite of rounding."""
        return limit * (1 + TINY) + 1 + self.prices * (self.line.room * 1e-12)

    def exceeds(self, limit: float) -> bool:
        """Whether no path takes at most a limit."""
        return bool((self.root > self.ceiling(limit)).any())

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
        return Path((int(times[best]),), tuple(int(choice) for choice in options[best]))

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


def _priced(line: ChainFigures, prices: FloatArray, moment: int) -> list[FloatArray]:
    """Per place (K, S): weighted time + price * memory at a moment; the same array for layers of which it is."""
    last = moment + 1 == len(line.kind)
    pending = 0 if last else int(line.at(moment + 1).figures[PENDING].min())
    cache: dict[tuple[int, int], FloatArray] = {}
    values = []
    for place, number in enumerate(line.kind):
        key = number, min(max(place - moment, -2), 1)
        if key not in cache:
            figures = line.kinds[number]
            cache[key] = figures.figures[TIME] + prices[:, None] * figures.memory(place, moment, pending)
        values.append(cache[key])
    return values


def _before(line: ChainFigures, prices: FloatArray, moment: int) -> tuple[list[FloatArray], FloatArray]:
    """``ChainBounds.before`` and ``root``.

    Up to the moment, layers count what they add to any later one; ``prefetched`` is for this one alone.
    """
    values, cache = _priced(line, prices, moment), dict[int, FloatArray]()
    before = [np.zeros((len(prices), line.groups(0)))]
    reached = before[0]
    for place, value in enumerate(values):
        if id(value) not in cache:
            cache[id(value)] = line.at(place).least(value, line.groups(place))
        if place + 1 == len(values):
            break
        last, after = reached, line.scaled[place + 1]
        reached = ((last + cache[id(value)])[:, :, None] + after).min(axis=1)
        if place + 1 == moment:
            plain = line.at(place).figures[TIME] + prices[:, None] * line.at(place).figures[BOTH]
            least = line.at(place).least(plain, line.groups(place))
            before.append(((last + least)[:, :, None] + after).min(axis=1))
        else:
            before.append(reached)
    return before, (reached + cache[id(values[-1])]).min(axis=1) - prices * line.room


def _best_price(line: ChainFigures, moment: int) -> tuple[float, float]:
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


def _worst_moment(line: ChainFigures, price: float) -> int:
    """Place of the layer whose moment is the worst where each layer takes what is cheapest at a price, moves aside."""
    rows = []
    for kind in line.kinds:
        f = kind.figures[:, int(np.argmin(kind.figures[TIME] + price * kind.figures[BOTH]))]
        rows.append((int(f[BOTH] - f[REST]), max(int(f[PEAK]), int(f[MIDDLE])), int(f[GATHERED])))
    prefix, local, gathered = np.array(rows)[list(line.kind)].T
    moments = np.cumsum(prefix) - prefix + local
    moments[1:] += gathered[:-1]
    return int(np.argmax(moments))
