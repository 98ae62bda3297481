"""What the rest of a chain costs at the least: bounds by which the frontier drops labels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chain import Chain

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
T = TypeVar("T", IntArray, FloatArray)
_UNBOUNDED = 2**62
_ROUNDS = 24
SLACK = 1e-9
"""Share by which a bound in floating point is lowered, so that rounding never makes it too high."""


@dataclass(slots=True, eq=False)
class Bounds:
    """Bounds for every place and choice.

    Attributes:
        cap: most weighted time of interest.
        room: bytes.
        time: per place (S,): least weighted time of the layers after it.
        moment: place of the layer whose moment is priced (see ``_Weighted``).
        waits: whether that is its moment that waits for the next layer's reduction.
        beside: (S,): what choices of the layer before it leave gathered.
        memory: per place (S,): least memory that the layers after it add to that moment.
        priced: per place (S,): least sum of weighted time + price * that memory of the layers after it.
        price: time a byte (lambda).
        rest, updated: per place: least sum of rest (of updated) of the layers after it.
        worst_floor, waiting_floor, start_floor, updated_floor: per place: a label's component up to this value keeps
            within ``room`` whatever follows.
        ahead: per place: some later moment exceeds a label's ``start`` by at least this much, what later layers hold
            at rest aside.
        pending: per place: the most that the next layer's reduction adds to a waiting moment.
        updating: per place: the most by which later layers' updates exceed what they hold at rest.
    """

    cap: int
    room: int
    moment: int
    waits: bool
    beside: IntArray
    time: list[IntArray]
    memory: list[IntArray]
    priced: list[FloatArray]
    price: float
    rest: list[int]
    updated: list[int]
    worst_floor: list[int]
    waiting_floor: list[int]
    start_floor: list[int]
    updated_floor: list[int]
    ahead: list[int]
    pending: list[int]
    updating: list[int]

    def raised(
        self, place: int, start: IntArray, worst: IntArray, waiting: IntArray, updated: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The components of labels at ``place``, raised as far as makes no difference to what may follow.

        That is up to the floors, and for all but ``start`` up to what a later moment certainly exceeds.
        """
        certain = start + self.ahead[place]
        return (
            np.maximum(start, self.start_floor[place]),
            np.maximum(np.maximum(worst, self.worst_floor[place]), certain),
            np.maximum(np.maximum(waiting, self.waiting_floor[place]), certain - self.pending[place]),
            np.maximum(np.maximum(updated, self.updated_floor[place]), certain - self.updating[place]),
        )

    def base(self, place: int, state: IntArray, start: IntArray, worst: IntArray, waiting: IntArray) -> IntArray:
        """Which of its figures a label at ``place`` brings to the priced moment."""
        if place > self.moment:
            return worst
        if place == self.moment:
            return waiting if self.waits else worst
        return start + self.beside[state] if place == self.moment - 1 else start

    def may_complete(
        self, place: int, state: IntArray, weighted: IntArray, base: IntArray, worst: IntArray, updated: IntArray
    ) -> NDArray[np.bool_]:
        """Which labels at ``place`` some completion may bring to the end within ``room`` and ``cap``."""
        alive = (weighted + self.time[place][state] <= self.cap) & (base + self.memory[place][state] <= self.room)
        alive &= (worst + self.rest[place] <= self.room) & (updated + self.updated[place] <= self.room)
        if self.price > 0 and self.cap < _UNBOUNDED:
            alive &= self.promise(place, state, weighted, base) <= self.cap * (1 + SLACK) + 1
        return np.asarray(alive)

    def promise(self, place: int, state: IntArray, weighted: IntArray, base: IntArray) -> FloatArray:
        """The Lagrangian bound on the weighted time of the whole path that begins as a label."""
        bound: FloatArray = weighted + self.priced[place][state] - self.price * (self.room - base)
        return bound


@dataclass(frozen=True, slots=True, eq=False)
class _Weighted:
    """A chain in one criterion: its time, and the memory that the Lagrangian prices.

    That memory is one moment of constraint (2), the one in the layer at ``moment``, so a sum over the layers: rest +
    prefix before it (and what the last of them leaves gathered), rest and what it needs itself there (its peak, or if
    it ``waits`` its middle, and what the next layer has pending), rest behind it.
    """

    chain: Chain
    time: list[IntArray]
    memory: list[IntArray]
    moves: list[IntArray]
    moment: int
    waits: bool

    def priced(self, price: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Time + price * memory of each choice, and the least of what follows."""
        values = [time + price * size for time, size in zip(self.time, self.memory, strict=True)]
        return values, self.after(values)

    def after(self, values: list[T], still: bool = False) -> list[T]:
        """Least sum of values and moves (none if ``still``) over the layers after each place, by choice."""
        after = [np.zeros_like(values[-1])]
        for place in range(len(values) - 1, 0, -1):
            layer, before = self.chain.layers[place], self.chain.layers[place - 1]
            best = _by_group(values[place] + after[-1], layer.group, self.moves[place].shape[1])
            move = np.zeros_like(self.moves[place]) if still else self.moves[place]
            after.append((move + best).min(axis=1)[before.group])
        return after[::-1]

    def before(self, values: list[FloatArray], still: bool) -> list[FloatArray]:
        """Least sum of values and moves (none if ``still``) over the layers before each place, by choice."""
        before = [np.zeros_like(values[0])]
        for place in range(1, len(values)):
            layer, last = self.chain.layers[place], self.chain.layers[place - 1]
            best = _by_group(values[place - 1] + before[-1], last.group, self.moves[place].shape[0])
            move = np.zeros_like(self.moves[place]) if still else self.moves[place]
            before.append((move + best[:, None]).min(axis=0)[layer.group])
        return before

    def through(self, price: float, timed: float) -> list[FloatArray]:
        """Least sum of ``timed`` * time + ``price`` * memory over the paths through each choice."""
        values = [timed * time + price * size for time, size in zip(self.time, self.memory, strict=True)]
        still = timed == 0.0
        parts = zip(self.before(values, still), values, self.after(values, still), strict=True)
        return [before + own + after for before, own, after in parts]

    def walk(self, values: list[FloatArray], after: list[FloatArray]) -> list[int]:
        """The path that values and what follows them make least."""
        path = [int(np.argmin(values[0] + after[0]))]
        for place in range(1, len(values)):
            group = self.chain.layers[place - 1].group[path[-1]]
            moved = self.moves[place][group][self.chain.layers[place].group]
            path.append(int(np.argmin(moved + values[place] + after[place])))
        return path

    def path_time(self, path: list[int]) -> int:
        """Weighted time of a path."""
        own = sum(int(values[choice]) for values, choice in zip(self.time, path, strict=True))
        groups = [int(layer.group[choice]) for layer, choice in zip(self.chain.layers, path, strict=True)]
        return own + sum(int(self.moves[place][groups[place - 1], groups[place]]) for place in range(1, len(path)))


def useful_choices(chain: Chain, cap: int | None) -> list[IntArray] | None:
    """Per layer, the choices that some path within memory and cap may use; None where there is no such path.

    A choice goes when the least path through it breaks the cap, the memory, or the Lagrangian bound of both.
    """
    problem = _weighted(chain)
    limit = _UNBOUNDED if cap is None else cap
    price, _, met = _best_price(problem)
    if len(chain.weights) == 1 and met is not None:
        limit = min(limit, met)
    ceilings = [(0.0, 1.0, float(limit)), (1.0, 0.0, float(chain.room)), (price, 1.0, limit + price * chain.room)]
    alive = [np.ones(len(time), dtype=bool) for time in problem.time]
    for priced, timed, ceiling in ceilings:
        if timed and limit == _UNBOUNDED:
            continue
        for own, through in zip(alive, problem.through(priced, timed), strict=True):
            own &= through <= ceiling * (1 + SLACK) + 1
    rows = [np.flatnonzero(own) for own in alive]
    return rows if all(len(own) for own in rows) else None


def _weighted(chain: Chain) -> _Weighted:
    """The chain in one criterion, with that late moment as priced memory that gives the best bound at a usual price."""
    last = len(chain.layers) - 1
    options = [_at_moment(chain, at, waits) for at in range(max(last - 2, 0), last + 1) for waits in {False, at < last}]
    price = _next_price(options[-1], 0.0, np.inf)
    bounds = []
    for option in options:
        values, after = option.priced(price)
        bounds.append(float((values[0] + after[0]).min()))
    return options[int(np.argmax(bounds))]


def _at_moment(chain: Chain, moment: int, waits: bool) -> _Weighted:
    layers, factor = chain.layers, int(chain.moves @ chain.weights)
    memory = [layer.rest + layer.prefix for layer in layers[:moment]]
    local = layers[moment].middle if waits else np.maximum(layers[moment].peak, layers[moment].middle)
    memory += [layers[moment].rest + local, *(layer.rest for layer in layers[moment + 1 :])]
    if moment:
        memory[moment - 1] = memory[moment - 1] + layers[moment - 1].prefetched
    if waits:
        memory[moment + 1] = memory[moment + 1] + layers[moment + 1].pending
    times = [layer.time @ chain.weights for layer in layers]
    return _Weighted(chain, times, memory, [layer.move * factor for layer in layers], moment, waits)


def completion_bounds(chain: Chain, cap: int | None) -> Bounds | None:
    """Bounds of a chain; None where they already show that nothing fits.

    With one criterion, the cap is lowered to the best path met on the way.
    """
    problem, layers = _weighted(chain), chain.layers
    limit = _UNBOUNDED if cap is None else cap
    least_memory, least_time = problem.after(problem.memory, still=True), problem.after(problem.time)
    if int((least_memory[0] + problem.memory[0]).min()) > chain.room:
        return None
    if int((least_time[0] + problem.time[0]).min()) > limit:
        return None
    price, priced, met = _best_price(problem)
    if len(chain.weights) == 1 and met is not None:
        limit = min(limit, met)
    beside = layers[max(problem.moment - 1, 0)].prefetched
    rest, updated = ([getattr(layer, name) for layer in layers] for name in ("rest", "updated"))
    return Bounds(
        limit, chain.room, problem.moment, problem.waits, beside, least_time, least_memory, priced, price,
        _least_after(rest), _least_after(updated), *_floors(chain), *_certain(chain),
    )  # fmt: skip


def path_peak(chain: Chain, choices: list[int]) -> int:
    """The worst moment of one path: the left side of constraints (2) and (3), at its greatest."""
    worst, waiting, start, updated, beside = 0, -_UNBOUNDED, 0, 0, 0
    for layer, choice in zip(chain.layers, choices, strict=True):
        rest, middle = int(layer.rest[choice]), start + int(layer.middle[choice]) + beside
        worst = max(worst, waiting + int(layer.pending[choice]), start + int(layer.peak[choice]) + beside, middle)
        worst, waiting = worst + rest, middle + rest
        start += rest + int(layer.prefix[choice])
        updated += int(layer.updated[choice])
        beside = int(layer.prefetched[choice])
    return max(worst, updated)


def _by_group(values: T, group: IntArray, groups: int) -> T:
    """Least value of each group; a very great number for a group without choices."""
    least = np.full(groups, _UNBOUNDED, dtype=values.dtype)
    np.minimum.at(least, group, values)
    return least


def _best_price(problem: _Weighted) -> tuple[float, list[FloatArray], int | None]:
    """The price of memory with the highest Lagrangian bound met, its bounds, and the best time met that fits.

    The bound is concave in the price: grow or shrink the price until the cheapest path changes side, then bisect.
    """
    room, met = problem.chain.room, None
    best_bound, best = -np.inf, (0.0, problem.priced(0.0)[1])
    low, high, price = 0.0, np.inf, 0.0
    quick: list[int] = []
    lean: list[int] = []
    for _ in range(_ROUNDS):
        values, after = problem.priced(price)
        path = problem.walk(values, after)
        bound = float((values[0] + after[0]).min()) - price * room
        if bound > best_bound:
            best_bound, best = bound, (price, after)
        if path_peak(problem.chain, path) <= room:
            time, lean = problem.path_time(path), path
            met = time if met is None else min(met, time)
            if price == 0.0:
                break
        else:
            quick = path
        over = sum(int(size[choice]) for size, choice in zip(problem.memory, path, strict=True)) > room
        low, high = (price, high) if over else (low, price)
        if high <= low * 1.001:
            break
        price = _next_price(problem, low, high)
    if met is not None and quick:
        met = min(met, _crossed(problem, quick, lean), _crossed(problem, lean, quick))
    return *best, met


def _crossed(problem: _Weighted, first: list[int], second: list[int]) -> int:
    """The least time met that fits among paths that begin as one and end as the other (bisection over where)."""
    best, low, high = _UNBOUNDED, 0, len(first)
    quick_first = path_peak(problem.chain, first) > problem.chain.room
    while low <= high:
        middle = (low + high) // 2
        path = [*first[:middle], *second[middle:]]
        fits = path_peak(problem.chain, path) <= problem.chain.room
        if fits:
            best = min(best, problem.path_time(path))
        low, high = (middle + 1, high) if fits == quick_first else (low, middle - 1)
    return best


def _next_price(problem: _Weighted, low: float, high: float) -> float:
    if low == 0.0 and high == np.inf:
        time = sum(float(np.ptp(values)) for values in problem.time)
        return (time + 1.0) / (sum(float(np.ptp(values)) for values in problem.memory) + 1.0)
    if high == np.inf:
        return low * 8.0
    return high / 8.0 if low == 0.0 else float((low * high) ** 0.5)


def _least_after(values: list[IntArray]) -> list[int]:
    least = [int(value.min()) for value in values]
    return [sum(least[place + 1 :]) for place in range(len(values))]


def _floors(chain: Chain) -> tuple[list[int], list[int], list[int], list[int]]:
    """Per place, the greatest value of each component that keeps within the room whatever follows."""
    worst, waiting, start, updated = [chain.room], [chain.room], [chain.room], [chain.room]
    for before, layer in reversed(list(pairwise(chain.layers))):
        rest, beside = int(layer.rest.max()), int(before.prefetched.max())
        middle, inside = int(layer.middle.max()), int(np.maximum(layer.peak, layer.middle).max())
        room_after = worst[-1] - rest
        start.append(
            min(
                room_after - inside - beside,
                waiting[-1] - rest - middle - beside,
                start[-1] - int((layer.rest + layer.prefix).max()),
            )
        )
        waiting.append(room_after - int(layer.pending.max()))
        updated.append(updated[-1] - int(layer.updated.max()))
        worst.append(room_after)
    return worst[::-1], waiting[::-1], start[::-1], updated[::-1]


def _certain(chain: Chain) -> tuple[list[int], list[int], list[int]]:
    """Per place: ``ahead``, ``pending`` and ``updating`` of ``Bounds``, from the least or greatest of each layer."""
    nothing = -_UNBOUNDED
    ahead, pending, updating = [nothing], [0], [0]
    for layer in reversed(chain.layers[1:]):
        own = int(np.maximum(layer.peak, layer.middle).min())
        ahead.append(max(own, ahead[-1] + int(layer.prefix.min())))
        pending.append(int(layer.pending.max()))
        updating.append(updating[-1] + int((layer.updated - layer.rest).max()))
    return ahead[::-1], pending[::-1], updating[::-1]
