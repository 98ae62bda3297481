"""Lower bounds on the time of a whole plan, without choosing strategies: what prunes shapes and stage boundaries.

For a stage that holds layers i..j-1 with k micro-batches in flight, and any price of memory lambda >= 0,

    theta(i, j) >= sum_l min_s (theta_l(s) + lambda y_l(s)) - lambda M

bounds the time theta = m c + step that the stage needs alone (c: one micro-batch, y: rest + prefix, M: bytes),
because every feasible choice has sum y <= M; for the last layer y is its own peak (rest + w). The step time of a plan
is at least, for every stage s, theta_s + the sum over the other stages of r, by which a stage that is not the slowest
delays the step (R of ``cost.schedule``; c for 1F1B).

Where the layout at the boundaries is settled (the wire), the layers next to them must have it, and the layers between
either all have it too, or the stage pays for leaving it and for coming back: two of the cheapest moves (one in the
first and the last stage). Other moves are left out (they cost no less than nothing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.model.graph import Role
from galvatron_lite.search.even import offered
from galvatron_lite.search.problem import Problem, part_of
from galvatron_lite.search.tables import StrategyTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_PRICES = 2.0 ** np.arange(-12, 13, 2)
_TINY = 1e-9
_EVERY, _BEST, _CLOSER = 8, 3, 4
"""So many micro-batches in flight are told apart one by one; the best so many prices are kept for all ranges; rounds of
prices, each between two of the one before, for the only stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """Bounds of one shape of plan."""

    micro: FloatArray  # (L + 1,): least r of the layers before each place, on any devices
    # before, after: per stage (L + 1,): the same on the devices of the stages before it, and of those after it
    before: tuple[FloatArray, ...]
    after: tuple[FloatArray, ...]
    sends: float  # r of all stages' sends and host work
    # per stage (L + 1, L + 1): bound on theta of layers i..j-1 and r of all others, less the least r of all and that
    # of its sends; infinite where nothing fits or the range is empty
    excess: tuple[FloatArray, ...]
    # per stage (L + 1,): the least greatest excess of the stages up to it when it ends at j
    ahead: tuple[FloatArray, ...]
    behind: tuple[FloatArray, ...]  # per stage (L + 1,): the same of the stages from it on when it starts at i
    # per stage (L + 1, L + 1): bound on theta of layers i..j-1, with sends; infinite as ``excess``
    theta: tuple[FloatArray, ...]
    ramps: tuple[FloatArray, ...]  # per stage (L + 1,): least r of the layers before each place on its own devices
    sent: tuple[float, ...]  # per stage r of its sends and host work

    @property
    def least(self) -> float:
        """Least r of all layers and sends."""
        return float(self.micro[-1]) + self.sends

    def least_after(self, stage: int, place: int) -> float:
        """Least r of the layers from a place on, in the stages after one, rounded down."""
        after = self.after[stage]
        return float(after[-1] - after[place]) * (1 - _TINY) - 1.0

    def others(self, stage: int, start: int, stop: int) -> int:
        """Least r of the layers outside a stage, rounded down."""
        before, after = self.before[stage], self.after[stage]
        return max(int(float(after[-1] - after[stop] + before[start]) * (1 - _TINY)) - 1, 0)

    @property
    def bound(self) -> float:
        """A time that no plan of the shape beats."""
        return (self.least + float(self.ahead[-1][-1])) * (1 - _TINY)

    def through(self, stage: int, start: int, stop: int) -> float:
        """A time that no plan with these layers in a stage beats."""
        before = self.ahead[stage - 1][start] if stage else (0.0 if start == 0 else np.inf)
        after = self.behind[stage + 1][stop] if stage + 1 < len(self.excess) else 0.0
        worst = max(float(before), float(self.excess[stage][start, stop]), float(after))
        return (self.least + worst) * (1 - _TINY)

    def cuts(self) -> list[int]:
        """The boundaries of a partition that reaches the bound: (0, ..., L)."""
        stop, cuts = len(self.ahead[-1]) - 1, [len(self.ahead[-1]) - 1]
        for stage in range(len(self.excess) - 1, 0, -1):
            worst = np.maximum(self.ahead[stage - 1], self.excess[stage][:, stop])
            stop = int(np.argmin(worst))
            cuts.append(stop)
        return [0, *reversed(cuts)]


def relaxed(problem: Problem, tables: Sequence[Sequence[StrategyTable]]) -> Relaxed | None:
    """Bounds of a problem; None where they show that nothing fits.

    Args:
        problem: gives the shape, the budgets and the micro-batches in flight.
        tables: by stage, of every layer of the model, the widest that the stage may use.
    """
    if any(not len(table) for own in _distinct(tables) for table in own):
        return None
    form, stages = problem.form, problem.shape.stages
    lows = {id(own): np.array([float(table.ramp(form).min()) for table in own]) for own in _distinct(tables)}
    sums = _Sums([id(own) for own in tables], lows)
    micro = sums.over(range(stages))
    before, after = (micro,) * stages, (micro,) * stages
    if len(lows) > 1:
        before = tuple(sums.over(range(stage or stages)) for stage in range(stages))
        after = tuple(sums.over(range((stage + 1) % stages, stages)) for stage in range(stages))
    levels = _levels([problem.held(stage) for stage in range(stages)])
    sends = problem.least_sends()
    known: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
    shared: dict[int, _Layers] = {}
    every, thetas = [], []
    for stage, own in enumerate(tables):
        ends = (stage > 0, stage + 1 < stages) if problem.choice.wire is not None else (False, False)
        room = float(problem.budgets[stage] - problem.tables[stage].pricer.profile.cluster.device.context)
        filled = problem.filled(stage)
        key = (levels[stage], filled, id(own), room, ends, sends[stage], id(before[stage]), id(after[stage]))
        if key not in known:
            if id(own) not in shared:
                shared[id(own)] = _layers_of(problem, stage, own)
            layers = shared[id(own)]
            bound = (
                _theta(problem, layers, levels[stage], filled, room, ends)
                if stages > 1
                else _single(problem, layers, room)
            )
            bound = bound + (form.microbatches - 1) * sends[stage]
            outside = before[stage][:, None] + (after[stage][-1] - after[stage])[None, :]
            known[key] = bound + outside - micro[-1], bound + sends[stage]
        every.append(offered(problem, stage, known[key][0]))
        thetas.append(offered(problem, stage, known[key][1]))
    ahead, behind = _ahead(every), _behind(every)
    if not np.isfinite(ahead[-1][-1]):
        return None
    own_ramps = tuple(sums.over(range(stage, stage + 1)) for stage in range(stages))
    sent = tuple(float(own) for own in sends)
    return Relaxed(micro, before, after, sum(sent), tuple(every), ahead, behind, tuple(thetas), own_ramps, sent)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of the least figures of layers in ranges of stages; answers are remembered, so that equal ones are one."""

    tables: Sequence[int]  # by stage, which tables it has
    lows: dict[int, FloatArray]  # by tables, (L,) the least figure of each layer
    _known: dict[tuple[int, ...], FloatArray] = field(default_factory=dict)

    def over(self, stages: range) -> FloatArray:
        """(L + 1,): sums of the layers before each place, each in the stage where it is least."""
        found = tuple(sorted({self.tables[stage] for stage in stages}))
        if found not in self._known:
            self._known[found] = _summed(np.min([self.lows[own] for own in found], axis=0))
        return self._known[found]


def averaged(problem: Problem, tables: Sequence[Sequence[StrategyTable]]) -> float:
    """A time that no plan beats, quickly: the slowest stage has its share of the layers; memory is left out."""
    form, ramps, rounds = problem.form, [], []
    share = form.share
    for own in _distinct(tables):
        if not all(len(table) for table in own):
            return np.inf
        known = {id(table): table for table in own}
        least = {
            key: (share * float(table.ramp(form).min()), float((table.theta(form) - share * table.ramp(form)).min()))
            for key, table in known.items()
        }
        ramps.append([least[id(table)][0] for table in own])
        rounds.append([least[id(table)][1] for table in own])
    ramp, more = np.min(ramps, axis=0), np.min(rounds, axis=0)
    return float(ramp.sum() + max(more.sum() / problem.shape.stages, more.max())) * (1 - _TINY)


def _distinct(tables: Sequence[Sequence[StrategyTable]]) -> list[Sequence[StrategyTable]]:
    return list({id(own): own for own in tables}.values())


def _levels(held: Sequence[int]) -> list[int]:
    """Micro-batches in flight, rounded down to few levels where there are many: less memory bounds more."""
    if len(set(held)) <= _EVERY:
        return list(held)
    steps = sorted({1, *(base << shift for base in (2, 3) for shift in range(40))})
    return [max(step for step in steps if step <= own) for own in held]


@dataclass(frozen=True, slots=True, eq=False)
class _Layers:
    """What bounds take from a stage's tables."""

    which: IntArray  # (L,) the kind of each layer
    # of each kind theta, bytes with one micro-batch in flight as (rest + prefix, rest + own peak), kept bytes, which
    # choices have the wire's layout, and bytes by which prefix is less where the stage is filled
    kinds: list[tuple[FloatArray, FloatArray, FloatArray, FloatArray, NDArray[np.bool_], FloatArray]]
    move: float  # theta of the cheapest move away from the wire's layout or back


def _layers_of(problem: Problem, stage: int, tables: Sequence[StrategyTable]) -> _Layers:
    numbers: dict[int, int] = {}
    which = np.array([numbers.setdefault(id(table), len(numbers)) for table in tables])
    first = {number: table for table in tables for number in (numbers[id(table)],)}
    kinds = []
    for number in range(len(numbers)):
        table = first[number]
        memory = table.figures.memory
        laid = np.array([problem.at_ends(own) for own in table.options.layouts], dtype=bool)[table.codes]
        kinds.append((
            table.theta(problem.form).astype(np.float64),
            (memory[:, 0] + memory[:, 1]).astype(np.float64),
            (memory[:, 0] + memory[:, 2:4].max(axis=1)).astype(np.float64),
            table.figures.kept.astype(np.float64),
            laid,
            table.figures.late.astype(np.float64),
        ))  # fmt: skip
    return _Layers(which, kinds, 2.0 * problem.shape.microbatches * problem.least_move(stage))


def _theta(
    problem: Problem, layers: _Layers, held: int, filled: bool, room: float, ends: tuple[bool, bool]
) -> FloatArray:
    """(L + 1, L + 1): bound on theta of the layers i..j-1."""
    count = len(layers.which)
    extra = float(held - 1)
    time = [own[0] for own in layers.kinds]
    memory = [own[1] + extra * own[3] - filled * own[5] for own in layers.kinds]
    local = [own[2] + extra * own[3] for own in layers.kinds]
    parts = part_of(problem.graph) if problem.runs == 1 and problem.alike_parts else []
    if parts and max(parts.count(0), parts.count(2)) < 2 and not problem.tables[0].fixed.layers:
        return _alike_theta(np.array(parts), layers, time, memory, local, room)
    prices = _best_prices(layers, time, memory, room)
    free, last = _least(time, memory, prices)[layers.which], _least(time, local, prices)[layers.which]
    bound = np.full((count + 1, count + 1), -np.inf)
    if any(ends):
        laid = [own[4] for own in layers.kinds]
        kept = _least(time, memory, prices, laid)[layers.which]
        kept_last = _least(time, local, prices, laid)[layers.which]
        for number, price in enumerate(prices):
            own = _wired(
                free[:, number], last[:, number], kept[:, number], kept_last[:, number], ends, layers.move
            )  # fmt: skip
            np.maximum(bound, own - price * room, out=bound)
    else:
        for number, price in enumerate(prices):
            np.maximum(bound, _ranges(free[:, number], last[:, number]) - price * room, out=bound)
    lightest = [np.array([values.min() for values in own])[layers.which] for own in (memory, local)]
    too_much = _ranges(*lightest) > room
    return np.where(too_much | np.tri(count + 1, dtype=bool), np.inf, bound)


def _alike_theta(
    parts: IntArray,
    layers: _Layers,
    time: list[FloatArray],
    memory: list[FloatArray],
    local: list[FloatArray],
    room: float,
) -> FloatArray:
    """``_theta`` where blocks of a stage have one strategy, in the wire's layout, as one of them is at a boundary: no
    more than one layer is before them, and after them."""
    blocks = np.concatenate(([0], np.cumsum(parts == 1)))
    kind, count = layers.which[np.flatnonzero(parts == 1)[0]], np.arange(blocks[-1] + 1)[:, None]
    own, size, end = (every[kind][layers.kinds[kind][4]] for every in (time, memory, local))
    first, last = layers.which[0], layers.which[-1]
    before = (time[first].min(), np.minimum(memory[first], local[first]).min()) if parts[0] == 0 else (0.0, 0.0)
    after = (time[last].min(), local[last].min()) if parts[-1] == 2 else (0.0, 0.0)

    def least(edges: float, around: FloatArray | float) -> FloatArray:
        """(blocks + 1,): theta of so many blocks, and of layers around them, which need so many bytes."""
        best = np.where(count * size + around <= room, count * own, np.inf).min(axis=1, initial=np.inf)
        best[0] = 0.0
        return np.asarray(best + edges)

    alone = (end - size) * (count > 0)
    bound = least(0.0, alone)[np.maximum(blocks[None, :] - blocks[:, None], 0)]
    bound[0] = least(before[0], before[1] + alone)[blocks]
    if parts[-1] == 2:
        bound[:, -1] = least(after[0], after[1])[blocks[-1] - blocks]
        bound[0, -1] = least(before[0] + after[0], before[1] + after[1])[-1]
    return np.where(np.tri(len(blocks), dtype=bool), np.inf, bound)


def _single(problem: Problem, layers: _Layers, room: float) -> FloatArray:
    """``_theta`` of the only stage, for all layers: layers between glued ones keep to the glue or move twice."""
    time, memory = [own[0] for own in layers.kinds], [own[1] - problem.filled(0) * own[5] for own in layers.kinds]
    extra = float(problem.held(0) - 1)
    memory = [size + extra * own[3] for size, own in zip(memory, layers.kinds, strict=True)]
    local = [own[2] + extra * own[3] for own in layers.kinds]
    spreads = [float(np.array([np.ptp(own) for own in values])[layers.which].sum()) for values in (time, memory)]
    prices = np.concatenate(([0.0], _PRICES * spreads[0] / (spreads[1] + 1.0)))
    edges = [layer.role is not Role.BLOCK for layer in problem.graph.layers]
    moves = (edges[0] + edges[-1]) * layers.move if problem.choice.glue is not None else 0.0
    count = len(layers.which)
    bound = np.full((count + 1, count + 1), np.inf)
    lightest = sum(memory[which].min() for which in layers.which[:-1]) + local[layers.which[-1]].min()
    if lightest <= room:
        best = -np.inf
        for _ in range(_CLOSER):
            sums = []
            for among in (None, [own[4] for own in layers.kinds]):
                own = _least(time, memory, prices, among)[layers.which[:-1]].sum(axis=0)
                sums.append(own + _least(time, local, prices, among)[layers.which[-1]])
            bounds = np.minimum(sums[0] + moves, sums[1]) - prices * room
            # Bounds are concave in the price: the best is between the neighbours of the best so far.
            place = int(np.argmax(bounds))
            best = max(best, float(bounds[place]))
            prices = np.linspace(prices[max(place - 1, 0)], prices[min(place + 1, len(prices) - 1)], len(prices))
        bound[0, count] = max(best, _alike(problem, layers, time, memory, local, room, moves))
    return bound


def _alike(
    problem: Problem,
    layers: _Layers,
    time: list[FloatArray],
    memory: list[FloatArray],
    local: list[FloatArray],
    room: float,
    moves: float,
) -> float:
    """``_single`` where layers of one kind have one strategy: the best of the most frequent kind that fits."""
    if problem.runs != 1 or not problem.alike_parts:
        return -np.inf
    inner, last = Counter(layers.which[:-1].tolist()), layers.which[-1]
    ((most, count),) = inner.most_common(1)
    others = [(kind, own) for kind, own in inner.items() if kind != most]
    fits = count * memory[most] + sum(own * memory[kind].min() for kind, own in others) + local[last].min() <= room
    around = sum(own * time[kind].min() for kind, own in others) + time[last].min()
    whole = count * time[most] + np.where(layers.kinds[most][4], 0.0, moves) + around
    return float(whole[fits].min(initial=np.inf))


def _best_prices(layers: _Layers, time: list[FloatArray], memory: list[FloatArray], room: float) -> FloatArray:
    """No price, and those that bound best where a stage needs about as much memory as there is."""
    spreads = [float(np.array([np.ptp(own) for own in values])[layers.which].sum()) for values in (time, memory)]
    prices = np.concatenate(([0.0], _PRICES * spreads[0] / (spreads[1] + 1.0)))
    summed = np.concatenate((np.zeros((1, len(prices))), np.cumsum(_least(time, memory, prices)[layers.which], axis=0)))
    bounds = []
    for length in sorted({max(len(layers.which) // share, 1) for share in (1, 2, 4, 8, 16, 32, 64)}):
        bounds.append((summed[length:] - summed[:-length]).mean(axis=0) - prices * room)
    best = {int(number) for own in bounds for number in (np.argmax(own),)}
    kept = sorted({0, *sorted(best)[: _BEST * 2]})
    return np.asarray(prices[kept])


def _least(
    time: list[FloatArray], memory: list[FloatArray], prices: FloatArray, among: list[NDArray[np.bool_]] | None = None
) -> FloatArray:
    """(kinds, prices): least time + price * memory; infinite where nothing is among the wanted."""
    rows = []
    for number, (own, size) in enumerate(zip(time, memory, strict=True)):
        if among is not None:
            own, size = own[among[number]], size[among[number]]
        rows.append((own + prices[:, None] * size).min(axis=1) if len(own) else np.full(len(prices), np.inf))
    return np.array(rows)


def _ranges(values: FloatArray, last: FloatArray) -> FloatArray:
    """(L + 1, L + 1): sums over the layers i..j-1, with ``last`` for the last of them."""
    total = _summed(values)
    ends = np.concatenate(([0.0], total[:-1] + last))
    result: FloatArray = ends[None, :] - total[:, None]
    return result


def _wired(
    free: FloatArray, last: FloatArray, kept: FloatArray, kept_last: FloatArray, ends: tuple[bool, bool], move: float
) -> FloatArray:
    """``_ranges`` of a stage with boundaries at these ends; ``kept``: least of the choices in the wire's layout."""
    never = ~np.isfinite(kept)
    whole = _ranges(np.where(never, 0.0, kept), np.where(never, 0.0, kept_last))
    missing = np.concatenate(([0], np.cumsum(never)))
    whole = np.where(missing[None, :] - missing[:, None] > 0, np.inf, whole)
    mixed = _ranges(free, kept_last if ends[1] else last)
    if ends[0]:
        mixed = mixed + np.concatenate((kept - free, [0.0]))[:, None]
    return np.minimum(whole, mixed + sum(ends) * move)


def _summed(values: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _ahead(excess: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    best = [excess[0][0]]
    for stage in excess[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    return tuple(best)


def _behind(excess: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    best = [excess[-1][:, -1]]
    for stage in reversed(excess[:-1]):
        best.append(np.maximum(best[-1][None, :], stage).min(axis=1))
    return tuple(reversed(best))
