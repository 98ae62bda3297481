"""What the layers before and behind a place of a chain cost at the least: bounds by which the frontier drops labels.

With a price of memory (lambda, time a byte), time + lambda * memory is a sum over the layers as far as memory is: every
layer before a moment adds rest + prefix to it. So the least of it over all layers before a place is a dynamic programme
over layouts, for many prices at once. Behind a place the moment to be priced is not known; there

    V(s) = t + lambda r + max(lambda q + least (x + V'), lambda (q + g) + least (x + own'), own),
    own(s) = max(lambda w + least (x + still'), lambda v + least (x + still' + lambda d'))

is no more than what any path through s costs with its worst moment priced, since a sum of leasts is below the least
sum (the least is over choices of the next layer, whose figures are primed; own: its own moment priced; still: no
moment). It is used for the last layers, where the worst moment mostly is; before them the first term of the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chains.chain import Chain, ChainLayer
from galvatron_lite.search.chains.segments import (
    BOTH,
    FIRST,
    GATHERED,
    HEAD,
    PENDING,
    REST,
    SINGLE,
    TIME,
    UPDATED,
    Segment,
    single,
)  # fmt: skip

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_LAST, _TRIES = 4, 3
_STEPS = 2.0 ** np.arange(-14, 16, 2)
_FINE = (0.0, 0.3, 0.6, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.6, 3.0)
_SLACK = 1e-9
"""Share by which a bound in floating point is lowered, so that rounding never makes it too high."""


class LayerChoices:
    """The choices of all equal layers of a chain, and what their figures come to at the least and at the most."""

    def __init__(self, segment: Segment) -> None:
        """Sorts the choices by layout."""
        figures = segment.figures
        self.segment = segment
        self.group = figures[HEAD]
        self.order = np.argsort(self.group, kind="stable")
        ordered = self.group[self.order]
        self.starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        self.present = ordered[self.starts]
        self.prefix = figures[BOTH] - figures[REST]

    @cached_property
    def extremes(self) -> tuple[int, ...]:
        """The figures that ``Ahead`` is made of, in its order."""
        f, q = self.segment.figures, self.prefix
        local = np.maximum(f[FIRST], f[SINGLE])
        return (
            int(f[BOTH].min()), int(f[BOTH].max()), int(f[UPDATED].min()), int(f[UPDATED].max()),
            int((f[UPDATED] - f[BOTH]).max()), int(f[REST].max()), int(q.min()), int((f[FIRST] - q).max()),
            int((f[SINGLE] - q).max()), int(f[FIRST].max()), int(f[SINGLE].max()), int(f[GATHERED].max()),
            int(f[PENDING].max()), int((f[FIRST] - f[SINGLE]).min()), int(local.min()),
        )  # fmt: skip

    def least(self, values: FloatArray, groups: int) -> FloatArray:
        """(K, groups): the least of (K, S) values of each layout; infinite without choices."""
        found = np.minimum.reduceat(values[:, self.order], self.starts, axis=1)
        if len(self.present) == groups:
            return found
        wide = np.full((len(values), groups), np.inf)
        wide[:, self.present] = found
        return wide


@dataclass(frozen=True, slots=True, eq=False)
class LinkedChain:
    """A chain with its equal layers told."""

    kinds: tuple[LayerChoices, ...]  # distinct layers
    kind: tuple[int, ...]  # (L,) place in ``kinds`` of each layer
    moves: tuple[IntArray, ...]  # per place, of one pass; see ``ChainLayer``
    by: IntArray  # (1 + criteria if several,) how many times a move counts in the weighted time and in each criterion
    room: int  # bytes
    runs: int | None = None  # that a part of the model may have; None: any
    parts: tuple[int, ...] = ()  # of each layer

    def at(self, place: int) -> LayerChoices:
        """The kind of the layer at a place."""
        return self.kinds[self.kind[place]]

    def groups(self, place: int) -> int:
        """How many layouts the moves to and from a layer tell apart."""
        if place:
            return int(self.moves[place].shape[1])
        return int(self.moves[1].shape[0]) if len(self.kind) > 1 else int(self.at(0).group.max()) + 1

    def only(self, rows: Sequence[IntArray]) -> LinkedChain:
        """With some of the choices of each kind."""
        kinds = tuple(
            kind if len(own) == len(kind.group) else LayerChoices(kind.segment.take(own))
            for kind, own in zip(self.kinds, rows, strict=True)
        )
        return replace(self, kinds=kinds)


def line_of(chain: Chain) -> LinkedChain:
    """The chain with its equal layers told."""
    numbers: dict[object, int] = {}
    kinds: list[LayerChoices] = []
    kind: list[int] = []
    for place, layer in enumerate(chain.layers):
        groups = layer.move.shape[1] if place else -1
        if (id(layer), groups) not in numbers:
            own = (_key(layer, chain.runs is not None), groups)
            if own not in numbers:
                numbers[own] = len(kinds)
                kinds.append(LayerChoices(single(layer, chain.weights)))
            numbers[id(layer), groups] = numbers[own]
        kind.append(numbers[id(layer), groups])
    several = chain.moves if len(chain.weights) > 1 else chain.moves[:0]
    by = np.array([int(chain.moves @ chain.weights), *several], dtype=np.int64)
    moves: list[IntArray] = []
    for layer in chain.layers:
        same = bool(moves) and moves[-1].shape == layer.move.shape and bool((moves[-1] == layer.move).all())
        moves.append(moves[-1] if same else layer.move)
    parts = tuple(layer.part for layer in chain.layers)
    return LinkedChain(tuple(kinds), tuple(kind), tuple(moves), by, chain.room, chain.runs, parts)


def _key(layer: ChainLayer, with_strategy: bool) -> bytes:
    names = (
        "time",
        "rest",
        "prefix",
        "peak",
        "middle",
        "prefetched",
        "pending",
        "updated",
        "group",
        *(("strategy",) if with_strategy else ()),
    )
    return b"".join(getattr(layer, name).tobytes() for name in names)


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Lagrangian bounds of a line."""

    line: LinkedChain  # the chain
    prices: FloatArray  # (K,) of memory, picoseconds a byte
    before: list[FloatArray]  # per place (K, groups): the least of the layers before it, with the move to it
    behind: list[FloatArray]  # per place (K, groups): that of the layers behind it, with the move from it
    last: dict[int, FloatArray]  # V of the last few layers (K, S), by place
    root: FloatArray  # (K,) bounds on the weighted time of the whole
    # per place (K, groups): ``before`` with a moment of these layers priced; by place, where there is one
    inside: dict[int, FloatArray]

    @property
    def least(self) -> float:
        """No path within the room takes less weighted time."""
        return float(self.root.max())

    def ceiling(self, limit: float) -> FloatArray:
        """(K,): bounds above this are above ``limit`` in spite of rounding."""
        return limit * (1 + _SLACK) + 1 + self.prices * (self.line.room * 1e-12)

    def useful(self, limit: float) -> list[IntArray]:
        """Per kind, the choices that some path may use that takes at most ``limit`` (or, if infinite, fits)."""
        line = self.line
        best: dict[int, FloatArray] = {}
        for place in range(len(line.kind)):
            number, kind = line.kind[place], line.at(place)
            if place in self.last:
                through = self.before[place][:, kind.group] + self.last[place]
                best[number] = np.minimum(best[number], through) if number in best else through
        ends: dict[int, FloatArray] = {}
        for place in range(len(line.kind) - len(self.last)):
            number = line.kind[place]
            end = self.before[place] + self.behind[place]
            ends[number] = np.minimum(ends[number], end) if number in ends else end
        for number, end in ends.items():
            kind = line.kinds[number]
            through = priced(kind, self.prices) + end[:, kind.group]
            best[number] = np.minimum(best[number], through) if number in best else through
        ceiling = (self.ceiling(limit) + self.prices * line.room)[:, None]
        return [np.flatnonzero((best[number] <= ceiling).all(axis=0)) for number in range(len(line.kinds))]


def priced(kind: LayerChoices, prices: FloatArray) -> FloatArray:
    """(K, S): weighted time + price * (rest + prefix)."""
    values: FloatArray = kind.segment.figures[TIME] + prices[:, None] * kind.segment.figures[BOTH]
    return values


def bounds_at(line: LinkedChain, prices: FloatArray, every_layer: bool = True, moment: int | None = None) -> Bounds:
    """The bounds at some prices.

    Args:
        line: the chain.
        prices: (K,) of memory.
        every_layer: whether ``behind`` is wanted of all layers, not only of the last.
        moment: place of a layer before the last ones whose moment is priced too.
    """
    count = len(line.kind)
    own = [priced(kind, prices) for kind in line.kinds]
    least = [
        kind.least(values, line.groups(line.kind.index(n)))
        for n, (kind, values) in enumerate(zip(line.kinds, own, strict=True))
    ]
    scaled = _scaled(line)
    before = [np.zeros_like(least[line.kind[0]])]
    for place in range(1, count):
        before.append(((before[-1] + least[line.kind[place - 1]])[:, :, None] + scaled[place]).min(axis=1))
    last, behind = _last(line, prices, scaled)
    start = count - len(last)
    root = (before[start][:, line.at(start).group] + last[start]).min(axis=1) - prices * line.room
    inside: dict[int, FloatArray] = {}
    if moment is not None:
        inside, early = _inside(line, prices, scaled, before, moment)
        root = np.maximum(root, early - prices * line.room)
    if every_layer:
        for place in range(start - 1, 0, -1):
            behind.append((scaled[place] + (behind[-1] + least[line.kind[place]])[:, None, :]).min(axis=2))
    return Bounds(line, prices, before, behind[::-1], last, root, inside)


def _inside(
    line: LinkedChain, prices: FloatArray, scaled: list[FloatArray], before: list[FloatArray], moment: int
) -> tuple[dict[int, FloatArray], FloatArray]:
    """What the layers before each place behind ``moment`` cost with that moment priced, and (K,) that of all layers.

    Layers before the moment add rest + prefix to it, the last of them what it leaves gathered; those behind it rest.
    """
    price, count = prices[:, None], len(line.kind)
    values = before[moment]
    if moment:
        kind = line.at(moment - 1)
        own = priced(kind, prices) + price * kind.segment.figures[GATHERED] + before[moment - 1][:, kind.group]
        values = (kind.least(own, line.groups(moment - 1))[:, :, None] + scaled[moment]).min(axis=1)
    kind, pending = line.at(moment), int(line.at(moment + 1).segment.figures[PENDING].min())
    f = kind.segment.figures
    own = f[TIME] + price * (f[REST] + np.maximum(f[FIRST], f[SINGLE] + pending))
    reached = values + kind.least(own, line.groups(moment))
    still: dict[int, FloatArray] = {}
    inside: dict[int, FloatArray] = {}
    for place in range(moment + 1, count):
        inside[place] = (reached[:, :, None] + scaled[place]).min(axis=1)
        number, kind = line.kind[place], line.at(place)
        if number not in still:
            f = kind.segment.figures
            still[number] = kind.least(f[TIME] + price * f[REST], line.groups(place))
        reached = inside[place] + still[number]
    return inside, reached.min(axis=1)


def _scaled(line: LinkedChain) -> list[FloatArray]:
    """The moves, as many times as they count in the weighted time."""
    known: dict[int, FloatArray] = {}
    for move in line.moves:
        if id(move) not in known:
            known[id(move)] = (move * int(line.by[0])).astype(np.float64)
    return [known[id(move)] for move in line.moves]


def _last(
    line: LinkedChain, prices: FloatArray, scaled: list[FloatArray]
) -> tuple[dict[int, FloatArray], list[FloatArray]]:
    """V of the last layers, and what is behind them and behind the layer before them (last place first)."""
    count, price = len(line.kind), prices[:, None]
    nothing: FloatArray = np.zeros((len(prices), line.groups(count - 1)))
    never = np.full_like(nothing, -np.inf)
    # What is behind: the worst moment priced; the next layer's priced; at rest alone; that and what is pending.
    reach = [never, never, nothing, nothing]
    last: dict[int, FloatArray] = {}
    behind = [nothing]
    for place in range(count - 1, max(count - 1 - _LAST, -1), -1):
        kind = line.at(place)
        f = kind.segment.figures
        worst, following, still, owing = (own[:, kind.group] for own in reach)
        base, prefix = f[TIME] + price * f[REST], price * kind.prefix
        own = base + np.maximum(price * f[FIRST] + still, price * f[SINGLE] + owing)
        last[place] = np.maximum(own, base + prefix + np.maximum(worst, price * f[GATHERED] + following))
        if place:
            values = [last[place], own, base + still, base + still + price * f[PENDING]]
            least = [kind.least(value, line.groups(place))[:, None, :] for value in values]
            reach = [(scaled[place] + value).min(axis=2) for value in least]
            behind.append(reach[0])
    return last, behind


def best_bounds(line: LinkedChain) -> Bounds:
    """Bounds at prices about the one with the highest bound on the whole, with the moment priced that seems the worst.

    The bound is concave in the price, so the best of a row of prices has the greatest one next to it.
    """
    best, moment = _best_price(line, None), None
    for _ in range(_TRIES):
        found = _worst_moment(line, best[0])
        if found >= len(line.kind) - _LAST or found == moment:
            break
        other = _best_price(line, found)
        if other[1] <= best[1]:
            break
        best, moment = other, found
    return bounds_at(line, best[0] * np.array(_FINE), moment=moment)


def _best_price(line: LinkedChain, moment: int | None) -> tuple[float, float]:
    """The price with the highest bound on the whole, more than nothing, and that bound."""
    times = sum(float(np.ptp(kind.segment.figures[TIME])) for kind in line.kinds) + 1.0
    sizes = sum(float(np.ptp(kind.segment.figures[BOTH])) for kind in line.kinds) + 1.0
    prices = np.concatenate(([0.0], times / sizes * _STEPS))
    for _ in range(2):
        best = int(np.argmax(bounds_at(line, prices, every_layer=False, moment=moment).root))
        low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
        low = max(low, high * 2.0**-6)
        prices = np.concatenate(([0.0], low * (high / low) ** (np.arange(17) / 16)))
    root = bounds_at(line, prices, every_layer=False, moment=moment).root
    best = int(np.argmax(root))
    return float(max(prices[best], high * 2.0**-12)), float(root[best])


def _worst_moment(line: LinkedChain, price: float) -> int:
    """Place of the layer whose moment is the worst where each layer takes what is cheapest at a price, moves aside."""
    rows = []
    for kind in line.kinds:
        choice = int(np.argmin(priced(kind, np.array([price]))[0]))
        f = kind.segment.figures[:, choice]
        rows.append((int(kind.prefix[choice]), max(int(f[FIRST]), int(f[SINGLE])), int(f[GATHERED])))
    prefix, local, gathered = np.array(rows)[list(line.kind)].T
    moments = np.cumsum(prefix) - prefix + local
    moments[1:] += gathered[:-1]
    return int(np.argmax(moments))


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What the layers before a place come to at the least or at the most; (L,) each, ``ahead_of``."""

    both_least: list[int]  # both_least, both_most: sums of rest + prefix
    both_most: list[int]
    updated_least: list[int]  # updated_least, updated_most: sums of updated
    updated_most: list[int]
    updating: list[int]  # the most by which their updated exceed their rest + prefix
    local: list[int]  # with ``rest`` of a label this much below ``start``, no moment of theirs is the worst
    resting: list[int]  # the most that their moments add to a label's ``rest``
    gathered: list[int]  # the most that the layer just before leaves gathered
    waiting: list[int]  # the same as ``local``, for what a label has pending alone
    covered: list[int]  # what a label may have pending without raising any moment of the layer just before


def ahead_of(line: LinkedChain) -> Ahead:
    """See ``Ahead``."""
    sums = [[0] for _ in range(5)]
    local, resting, gathered, waiting, covered = [-(2**60)], [-(2**60)], [0], [-(2**60)], [2**60]
    for place, number in enumerate(line.kind):
        own = line.kinds[number].extremes
        rest, prefix, first, middle, peak, inside, beside = own[5:12]
        following = line.at(place + 1).extremes[12] if place + 1 < len(line.kind) else 0
        left = gathered[-1]
        moment = max(peak, inside + following) + left
        resting.append(rest + max(resting[-1], moment + sums[1][-1]))
        local.append(max(local[-1] - prefix, max(first, middle + following) + left))
        waiting.append(middle + left)
        covered.append(own[13])
        gathered.append(beside)
        for total, value in zip(sums, own[:5], strict=True):
            total.append(total[-1] + value)
    least, most, updated, updates, updating = sums
    return Ahead(least, most, updated, updates, updating, local, resting, gathered, waiting, covered)
