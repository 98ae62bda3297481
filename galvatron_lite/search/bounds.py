"""What the rest of a chain costs at the least: bounds by which the frontier drops labels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from galvatron_lite.search.frontier import Chain

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
T = TypeVar("T", IntArray, FloatArray)
_UNBOUNDED = 2**62
_ROUNDS = 24
_SLACK = 1e-9


@dataclass(slots=True, eq=False)
class Bounds:
    """Bounds for every place and choice.

    Attributes:
        cap: most weighted time of interest.
        room: bytes.
        time: per place (S,): least weighted time of the layers after it.
        memory: per place (S,): least sum of rest + prefix of the layers after it.
        priced: per place (S,): least sum of weighted time + price * (rest + prefix) of the layers after it.
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

    def may_complete(
        self,
        place: int,
        state: IntArray,
        weighted: IntArray,
        worst: IntArray,
        start: IntArray,
        updated: IntArray,
    ) -> NDArray[np.bool_]:
        """Which labels at ``place`` some completion may bring to the end within ``room`` and ``cap``."""
        alive = (weighted + self.time[place][state] <= self.cap) & (start + self.memory[place][state] <= self.room)
        alive &= (worst + self.rest[place] <= self.room) & (updated + self.updated[place] <= self.room)
        if self.price > 0 and self.cap < _UNBOUNDED:
            least = weighted + self.priced[place][state] - self.price * (self.room - start)
            alive &= least <= self.cap * (1 + _SLACK) + 1
        return np.asarray(alive)


@dataclass(frozen=True, slots=True, eq=False)
class _Weighted:
    """A chain in one criterion: its time, and the memory that the Lagrangian prices."""

    chain: Chain
    time: list[IntArray]
    memory: list[IntArray]
    moves: list[IntArray]

    def priced(self, price: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Time + price * memory of each choice, and the least of what follows."""
        values = [time + price * size for time, size in zip(self.time, self.memory, strict=True)]
        return values, _from_the_end(values, self.moves)

    def walk(self, values: list[FloatArray], after: list[FloatArray]) -> list[int]:
        """The path that values and what follows them make least."""
        path = [int(np.argmin(values[0] + after[0]))]
        for value, rest, move in zip(values[1:], after[1:], self.moves[1:], strict=True):
            path.append(int(np.argmin(move[path[-1]] + value + rest)))
        return path

    def path_time(self, path: list[int]) -> int:
        """Weighted time of a path."""
        own = sum(int(values[choice]) for values, choice in zip(self.time, path, strict=True))
        return own + sum(int(self.moves[place][path[place - 1], path[place]]) for place in range(1, len(path)))


def completion_bounds(chain: Chain, cap: int | None) -> Bounds | None:
    """Bounds of a chain; None where they already show that nothing fits.

    With one criterion, the cap is lowered to the best path met on the way.
    """
    layers = chain.layers
    factor = int(chain.moves @ chain.weights)
    problem = _Weighted(
        chain,
        [layer.time @ chain.weights for layer in layers],
        [layer.rest + layer.prefix for layer in layers],
        [layer.move * factor for layer in layers],
    )
    limit = _UNBOUNDED if cap is None else cap
    least_memory = _from_the_end(problem.memory, [np.zeros_like(move) for move in problem.moves])
    least_time = _from_the_end(problem.time, problem.moves)
    if int((least_memory[0] + problem.memory[0]).min()) > chain.room:
        return None
    if int((least_time[0] + problem.time[0]).min()) > limit:
        return None
    price, priced, met = _best_price(problem)
    if len(chain.weights) == 1 and met is not None:
        limit = min(limit, met)
    return Bounds(
        limit, chain.room, least_time, least_memory, priced, price,
        _least_after([layer.rest for layer in layers]),
        _least_after([layer.updated for layer in layers]),
        *_floors(chain), *_certain(chain),
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


def _from_the_end(values: list[T], moves: list[IntArray]) -> list[T]:
    """Least sum of values and moves over the layers after each place, by choice."""
    after = [np.zeros_like(values[-1])]
    for value, move in zip(reversed(values[1:]), reversed(moves[1:]), strict=True):
        after.append((move + (value + after[-1])).min(axis=1))
    return after[::-1]


def _best_price(problem: _Weighted) -> tuple[float, list[FloatArray], int | None]:
    """The price of memory with the highest Lagrangian bound met, its bounds, and the best time met that fits.

    The bound is concave in the price: grow or shrink the price until the cheapest path changes side, then bisect.
    """
    room, met = problem.chain.room, None
    best_bound, best = -np.inf, (0.0, problem.priced(0.0)[1])
    low, high, price = 0.0, np.inf, 0.0
    for _ in range(_ROUNDS):
        values, after = problem.priced(price)
        path = problem.walk(values, after)
        bound = float((values[0] + after[0]).min()) - price * room
        if bound > best_bound:
            best_bound, best = bound, (price, after)
        if path_peak(problem.chain, path) <= room:
            time = problem.path_time(path)
            met = time if met is None else min(met, time)
            if price == 0.0:
                break
        over = sum(int(size[choice]) for size, choice in zip(problem.memory, path, strict=True)) > room
        low, high = (price, high) if over else (low, price)
        if high <= low * 1.001:
            break
        price = _next_price(problem, low, high)
    return *best, met


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
