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

TIME, BOTH, REST, PEAK, MIDDLE, PREFETCHED, PENDING, UPDATED, GROUP, STRATEGY, PARTS = range(11)
"""Rows of a layer's figures: weighted time; rest + prefix; rest ... updated; layout; strategy; then time in each
criterion, where there are several."""
_STEPS = np.concatenate(([0.0], 2.0 ** np.arange(-14, 16, 2)))
_AROUND = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.6, 3.0])
"""Prices that are tried, in units of the spread of times over that of bytes; and around the best, in units of it."""
TINY = 1e-9
"""Share by which a bound in floating point is lowered, so that rounding never makes it too high."""
_MOMENTS, _MOST_ENDS = 3, 16
"""Moments that are tried at most for the one that bounds best, and to show that nothing fits."""


class LayerKindFigures:
    """Figures of all choices of layers that are equal."""

    def __init__(self, figures: IntArray) -> None:
        self.figures = figures  # (rows, S), rows from ``TIME`` on
        self._order = np.argsort(figures[GROUP], kind="stable")
        ordered = figures[GROUP][self._order]
        self._starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        self._present = ordered[self._starts]

    def __len__(self) -> int:
        return int(self.figures.shape[1])

    def least(self, values: FloatArray, groups: int) -> FloatArray:
        """(K, groups): the least of (K, S) values of each layout; infinite without choices."""
        least = np.minimum.reduceat(values[:, self._order], self._starts, axis=1)
        if len(self._present) == groups:
            return least
        wide = np.full((len(values), groups), np.inf)
        wide[:, self._present] = least
        return wide

    def memory(self, place: int, moment: int, pending: int) -> IntArray:
        """(S,): bytes that a layer adds to the moment of a layer, whose successor has so many bytes pending."""
        f = self.figures
        if place == moment:
            at_peak: IntArray = f[REST] + np.maximum(f[PEAK], f[MIDDLE] + pending)
            return at_peak
        added: IntArray = f[REST] if place > moment else f[BOTH]
        return added + f[PREFETCHED] if place == moment - 1 else added


@dataclass(frozen=True, slots=True, eq=False)
class ChainFigures:
    """A chain whose equal layers share their figures."""

    kinds: tuple[LayerKindFigures, ...]
    kind: tuple[int, ...]  # by layer: index into ``kinds``
    moves: tuple[IntArray, ...]  # by layer: redistribution in one pass, see ``ChainLayer``
    weighted_moves: tuple[FloatArray, ...]  # the same in weighted time
    move_counts: IntArray  # how often a move counts in the weighted time and, of several, in each criterion
    room: int
    runs: int | None
    parts: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain) -> ChainFigures:
        """The figures of a chain."""
        numbers: dict[object, int] = {}
        kinds: list[LayerKindFigures] = []
        for layer in chain.layers:
            if id(layer) not in numbers:
                figures = layer.figures(chain.weights)
                key = figures.tobytes()
                if key not in numbers:
                    numbers[key] = len(kinds)
                    kinds.append(LayerKindFigures(figures))
                numbers[id(layer)] = numbers[key]
        factor = int(chain.moves @ chain.weights)
        weighted = {id(layer.move): (layer.move * factor).astype(np.float64) for layer in chain.layers}
        return cls(
            tuple(kinds),
            tuple(numbers[id(layer)] for layer in chain.layers),
            tuple(layer.move for layer in chain.layers),
            tuple(weighted[id(layer.move)] for layer in chain.layers),
            np.array([factor, *(chain.moves if len(chain.weights) > 1 else ())], dtype=np.int64),
            chain.room,
            chain.runs,
            tuple(layer.part for layer in chain.layers),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def layer(self, place: int) -> LayerKindFigures:
        """The figures of a layer."""
        return self.kinds[self.kind[place]]

    def groups(self, place: int) -> int:
        """How many layouts the moves to and from a layer tell apart."""
        if place:
            return int(self.moves[place].shape[1])
        return int(self.moves[1].shape[0]) if len(self) > 1 else int(self.layer(0).figures[GROUP].max()) + 1

    def select(self, rows: Sequence[IntArray]) -> ChainFigures:
        """The figures of some of the choices of each kind."""
        kinds = (
            kind if len(kept) == len(kind) else LayerKindFigures(kind.figures[:, kept])
            for kind, kept in zip(self.kinds, rows, strict=True)
        )
        return replace(self, kinds=tuple(kinds))

    @property
    def longest(self) -> float:
        """No path takes more weighted time."""
        layers = sum(float(self.layer(place).figures[TIME].max()) for place in range(len(self)))
        return layers + sum(float(move.max()) for move in self.weighted_moves[1:])

    def evaluate(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Weighted time of paths, (paths, L) choices, and whether each is within the room and the runs."""
        layers = [self.layer(place).figures for place in range(len(self))]
        f = np.stack([figures[:PARTS, chosen] for figures, chosen in zip(layers, rows.T, strict=True)], axis=2)
        moved = sum(
            (self.moves[place][f[GROUP, :, place - 1], f[GROUP, :, place]] for place in range(1, len(layers))),
            start=np.zeros(len(rows), dtype=np.int64),
        )
        prefix = f[BOTH] - f[REST]
        after, before = np.zeros_like(prefix), np.zeros_like(prefix)
        after[:, :-1], before[:, 1:] = f[PENDING, :, 1:], f[PREFETCHED, :, :-1]
        moments = np.cumsum(prefix, axis=1) - prefix + before + np.maximum(f[PEAK], f[MIDDLE] + after)
        fits = (f[REST].sum(axis=1) + moments.max(axis=1) <= self.room) & (f[UPDATED].sum(axis=1) <= self.room)
        if self.runs is not None:
            parts = np.array(self.parts)
            changes = (f[STRATEGY, :, 1:] != f[STRATEGY, :, :-1]) & (parts[1:] == parts[:-1])
            for part in set(self.parts):
                fits &= changes[:, parts[1:] == part].sum(axis=1) < self.runs
        return f[TIME].sum(axis=1) + moved * self.move_counts[0], fits


@dataclass(frozen=True, slots=True, eq=False)
class ChainBounds:
    """Lagrangian bounds of a chain: shortest paths at several prices of memory, with one moment priced."""

    chain: ChainFigures
    prices: FloatArray  # (K,) picoseconds a byte
    moment: int  # the layer whose moment is priced
    before: list[FloatArray]  # by layer (K, groups): the least of the layers before it, with the move to it
    behind: list[FloatArray]  # by layer (K, groups): the least of the layers behind it, with the move from it
    root: FloatArray  # (K,) bounds on the weighted time of the chain

    @classmethod
    def of(cls, chain: Chain) -> ChainBounds:
        """Bounds at prices about the one that bounds best, with the moment priced that is the worst there."""
        figures = ChainFigures.of(chain)
        trial = moment = len(figures) - 1
        best = (0.0, -np.inf)
        for _ in range(_MOMENTS):
            better = _best_price(figures, trial)
            if better[1] <= best[1]:
                break
            best, moment, trial = better, trial, _worst_moment(figures, better[0])
            if trial == moment:
                break
        return cls.at(figures, best[0] * _AROUND, moment)

    @classmethod
    def at(cls, chain: ChainFigures, prices: FloatArray, moment: int) -> ChainBounds:
        """The bounds at some prices."""
        before, root = _before(chain, prices, moment)
        values, behind = _priced(chain, prices, moment), [np.zeros((len(prices), chain.groups(len(chain) - 1)))]
        for place in range(len(chain) - 1, 0, -1):
            ahead = chain.layer(place).least(values[place], chain.groups(place)) + behind[-1]
            behind.append((chain.weighted_moves[place] + ahead[:, None, :]).min(axis=2))
        return cls(chain, prices, moment, before, behind[::-1], root)

    @property
    def least(self) -> float:
        """No path within the room takes less weighted time, but for rounding."""
        return float(self.root.max())

    def ceiling(self, limit: float) -> FloatArray:
        """(K,): bounds above this are above ``limit`` in spite of rounding."""
        return limit * (1 + TINY) + 1 + self.prices * (self.chain.room * 1e-12)

    def exceeds(self, limit: float) -> bool:
        """Whether no path takes at most a limit."""
        return bool((self.root > self.ceiling(limit)).any())

    def exceeds_elsewhere(self, limit: float) -> bool:
        """The same with other moments priced, one after another: the first and the last of each run of equal layers."""
        kind, last = self.chain.kind, len(self.chain) - 1
        ends = [place for place in range(last + 1) if not 0 < place < last or len({*kind[place - 1 : place + 2]}) > 1]
        prices = _tried(self.chain)
        bounds = replace(self, prices=prices)
        return len(ends) <= _MOST_ENDS and any(
            replace(bounds, root=_before(self.chain, prices, place)[1]).exceeds(limit) for place in ends
        )

    def useful(self, limit: float) -> list[IntArray]:
        """By kind: the choices that some path may use that takes at most ``limit``."""
        chain, ends = self.chain, dict[tuple[int, int], tuple[FloatArray, FloatArray]]()
        for place, values in enumerate(_priced(chain, self.prices, self.moment)):
            key, end = (chain.kind[place], id(values)), self.before[place] + self.behind[place]
            ends[key] = (values, np.minimum(ends[key][1], end) if key in ends else end)
        best: dict[int, FloatArray] = {}
        for (number, _), (values, end) in ends.items():
            through = values + end[:, chain.kinds[number].figures[GROUP]]
            best[number] = np.minimum(best[number], through) if number in best else through
        ceiling = (self.ceiling(limit) + self.prices * chain.room)[:, None]
        return [np.flatnonzero((best[number] <= ceiling).all(axis=0)) for number in range(len(chain.kinds))]

    def rounded(self) -> Path | None:
        """The best of the shortest paths that fit, and of those that change over from one that does not to one that
        does, or the other way round; None where none fits."""
        chain, rows = self.chain, self._shortest()
        times, fits = chain.evaluate(rows)
        if not fits.any():
            return None
        first = int(np.argmax(fits))
        options = rows[fits]
        if first:
            low, high = rows[first - 1], rows[first]
            start = np.tri(len(low) + 1, len(low), k=-1, dtype=bool)
            options = np.concatenate((options, np.where(start, low, high), np.where(start, high, low)))
        times, fits = chain.evaluate(options)
        best = int(np.argmin(np.where(fits, times.astype(np.float64), np.inf)))
        return Path((int(times[best]),), tuple(int(choice) for choice in options[best]))

    def _shortest(self) -> IntArray:
        """(K, L): the choices of the shortest path at each price."""
        chain, values = self.chain, _priced(self.chain, self.prices, self.moment)
        rows = np.empty((len(self.prices), len(chain)), dtype=np.int64)
        after: FloatArray = np.zeros((len(self.prices), chain.groups(len(chain) - 1)))
        for place in range(len(chain) - 1, -1, -1):
            group = chain.layer(place).figures[GROUP]
            rows[:, place] = np.argmin(values[place] + (self.before[place] + after)[:, group], axis=1)
            after = chain.weighted_moves[place][:, group[rows[:, place]]].T if place else after
        return rows


def _priced(chain: ChainFigures, prices: FloatArray, moment: int) -> list[FloatArray]:
    """By layer (K, S): weighted time + price * memory at a moment; one array for layers that add the same to it."""
    last = moment + 1 == len(chain)
    pending = 0 if last else int(chain.layer(moment + 1).figures[PENDING].min())
    cache: dict[tuple[int, int], FloatArray] = {}
    values = []
    for place, number in enumerate(chain.kind):
        key = number, min(max(place - moment, -2), 1)
        if key not in cache:
            kind = chain.kinds[number]
            cache[key] = kind.figures[TIME] + prices[:, None] * kind.memory(place, moment, pending)
        values.append(cache[key])
    return values


def _before(chain: ChainFigures, prices: FloatArray, moment: int) -> tuple[list[FloatArray], FloatArray]:
    """``ChainBounds.before`` and ``root``.

    Up to the moment, layers count what they add to any later one; ``prefetched`` is for this one alone.
    """
    values, cache = _priced(chain, prices, moment), dict[int, FloatArray]()
    reached = np.zeros((len(prices), chain.groups(0)))
    before = [reached]
    for place, value in enumerate(values):
        if id(value) not in cache:
            cache[id(value)] = chain.layer(place).least(value, chain.groups(place))
        if place + 1 == len(values):
            break
        last, move = reached, chain.weighted_moves[place + 1]
        reached = ((last + cache[id(value)])[:, :, None] + move).min(axis=1)
        if place + 1 == moment:
            figures = chain.layer(place).figures
            plain = figures[TIME] + prices[:, None] * figures[BOTH]
            least = chain.layer(place).least(plain, chain.groups(place))
            before.append(((last + least)[:, :, None] + move).min(axis=1))
        else:
            before.append(reached)
    return before, (reached + cache[id(values[-1])]).min(axis=1) - prices * chain.room


def _best_price(chain: ChainFigures, moment: int) -> tuple[float, float]:
    """The price above 0 with the highest bound, and that bound.

    The bound is concave in the price, so the best of a row of prices has the greatest one next to it.
    """
    prices = _tried(chain)
    for _ in range(2):
        best = int(np.argmax(_before(chain, prices, moment)[1]))
        low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
        low = max(low, high * 2.0**-6)
        prices = np.concatenate(([0.0], low * (high / low) ** (np.arange(17) / 16)))
    root = _before(chain, prices, moment)[1]
    best = int(np.argmax(root))
    return float(max(prices[best], high * 2.0**-12)), float(root[best])


def _tried(chain: ChainFigures) -> FloatArray:
    """Prices over the whole range, without a hint."""
    times = sum(float(np.ptp(kind.figures[TIME])) for kind in chain.kinds) + 1.0
    sizes = sum(float(np.ptp(kind.figures[BOTH])) for kind in chain.kinds) + 1.0
    return times / sizes * _STEPS


def _worst_moment(chain: ChainFigures, price: float) -> int:
    """The layer whose moment is the worst where each layer takes what is cheapest at a price, moves aside."""
    rows = []
    for kind in chain.kinds:
        f = kind.figures[:, int(np.argmin(kind.figures[TIME] + price * kind.figures[BOTH]))]
        rows.append((int(f[BOTH] - f[REST]), max(int(f[PEAK]), int(f[MIDDLE])), int(f[PREFETCHED])))
    prefix, local, prefetched = np.array(rows)[list(chain.kind)].T
    moments = np.cumsum(prefix) - prefix + local
    moments[1:] += prefetched[:-1]
    return int(np.argmax(moments))
