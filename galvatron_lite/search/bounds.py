"""Lower bounds on the time of whole plans of a shape: what prunes shapes and stage boundaries.

Three kinds, each for few of what the one before leaves:

- ``ComputeBounds``: compute alone, for every shape, before anything is priced.
- ``averaged``: the slowest stage has its share of the layers, with whatever strategies are quickest.
- ``relaxed``: for stage s of layers i..j-1 and any price of memory lambda >= 0,

      theta_s(i, j) >= sum_l min_s (theta_l(s) + lambda y_l(s)) - lambda M

  bounds the time theta = m c + step that the stage needs alone (c: one micro-batch, y: rest + prefix, M: bytes),
  because every feasible choice has sum y <= M; for the last layer y is its own peak (rest + w). With R_s(i, j) what a
  stage delays the step by where another one is the slowest (``cost.schedule``), a plan with that stage takes at least

      theta_s(i, j) + pre_s(i) + post_s(j),

  pre_s(i) the least sum of R of the s stages before it over layers 0..i-1, post_s(j) that of the stages after it. A cut
  takes at least the greatest of that over its stages, and the least over all cuts bounds the plan.

``StageBounds`` are sharpened where it matters: in the stages of the cut that looks best (``best_first``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from galvatron_lite.arrays import BoolArray, FloatArray, IntArray
from galvatron_lite.cost.points import Curves, index_points, slices_of
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.pipeline.cost import weight_seconds
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.search.problem import Problem, blocks_of, cuts_of, even_cuts
from galvatron_lite.search.tables import TICKS, Memo, StrategyTable, pairs_within, remembered, ticks
from galvatron_lite.search.uniform import Uniform

Place = tuple[int, int, int]
"""A stage, its first layer and the one behind its last."""
TableRow = Sequence[StrategyTable]
"""The widest table of every layer of the model that a stage may use."""
_PRICES = np.concatenate(([0.0], 2.0 ** np.arange(-12, 13, 2)))
_TINY, _ROUNDING = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Bounds of a shape; per stage, of the layers i..j-1, (L + 1, L + 1), infinite where nothing fits."""

    excess: tuple[FloatArray, ...]  # picoseconds that no plan with those layers in that stage beats
    pre: FloatArray  # (stages, L + 1): the least ramp of the stages before each, if they end there
    post: FloatArray  # (stages, L + 1): that of the stages after each, if they start there
    looked: frozenset[Place] = frozenset()  # places whose bound is that of their chain's shortest paths
    timed: frozenset[Place] = frozenset()  # places whose bound is exact

    @cached_property
    def _ahead(self) -> list[FloatArray]:
        best = [self.excess[0][0]]
        for stage in self.excess[1:]:
            best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
        return best

    @cached_property
    def _behind(self) -> list[FloatArray]:
        best = [self.excess[-1][:, -1]]
        for stage in reversed(self.excess[:-1]):
            best.append(np.maximum(best[-1], stage).min(axis=1))
        return best[::-1]

    @property
    def bound(self) -> float:
        """A time that no plan beats."""
        return float(self._ahead[-1][-1]) * (1 - _TINY)

    def through(self, stage: int, start: int, stop: int) -> float:
        """A time that no plan with these layers in a stage beats."""
        before = self._ahead[stage - 1][start] if stage else (0.0 if start == 0 else np.inf)
        after = self._behind[stage + 1][stop] if stage + 1 < len(self.excess) else 0.0
        return max(float(before), float(self.excess[stage][start, stop]), float(after)) * (1 - _TINY)

    def least_after(self, stage: int, place: int) -> float:
        """Least ramp of the layers from a place on, in the stages after one, rounded down."""
        return float(self.post[stage][place]) * (1 - _TINY) - 1.0

    def others(self, stage: int, start: int, stop: int) -> int:
        """Least ramp of the layers outside a stage, rounded down; 0 where no plan has it."""
        total = float(self.pre[stage][start] + self.post[stage][stop])
        return max(int(total * (1 - _TINY)) - 1, 0) if np.isfinite(total) else 0

    def cuts(self) -> list[int]:
        """The boundaries of a partition that reaches the bound: (0, ..., L)."""
        cuts = [len(self.excess[0]) - 1]
        for stage in range(len(self.excess) - 1, 0, -1):
            cuts.append(int(np.argmin(np.maximum(self._ahead[stage - 1], self.excess[stage][:, cuts[-1]]))))
        return [0, *reversed(cuts)]

    def with_theta(self, values: Mapping[Place, float], *, exact: bool = True) -> StageBounds:
        """With another theta of some places, picoseconds that a stage needs alone, where that is greater."""
        excess = list(self.excess)
        for stage in {place[0] for place in values}:
            excess[stage] = excess[stage].copy()
        for (stage, start, stop), value in values.items():
            least = value + self.pre[stage][start] + self.post[stage][stop]
            excess[stage][start, stop] = max(excess[stage][start, stop], least)
        already = self.timed | values.keys() if exact else self.timed
        return replace(self, excess=tuple(excess), looked=self.looked | values.keys(), timed=already)

    @property
    def opened(self) -> StageBounds:
        """The same bounds where what is known of single stages may be too low."""
        return replace(self, looked=frozenset(), timed=frozenset())


def relaxed(problem: Problem, tables: Sequence[TableRow]) -> StageBounds | None:
    """Bounds of a problem; None where they show that nothing fits.

    Args:
        problem: gives the shape, the budgets and the micro-batches in flight.
        tables: by stage.
    """
    if any(not len(table) for stage_tables in _distinct(tables) for table in stage_tables):
        return None
    form, stages, sends = problem.form, problem.shape.stages, problem.least_sends()
    even = stages > 1 and problem.tables[0].fixed.even
    cuts = even_cuts(problem.graph, stages) if even else ()
    if even and not cuts:
        return None
    figures = {key: _Figures(problem, row) for key, row in {id(row): row for row in tables}.items()}
    pre, post = _least_around([figures[id(row)].ramp for row in tables], sends)
    excess = []
    for stage, row in enumerate(tables):
        room = float(problem.budgets[stage] - problem.tables[stage].pricer.profile.cluster.device.context)
        ends = (stage > 0, stage + 1 < stages) if problem.choice.wire is not None else (False, False)
        place = cuts[stage : stage + 2]
        own = figures[id(row)].theta(problem.held(stage), problem.filled(stage), room, ends, place)
        excess.append(own + form.microbatches * sends[stage] + pre[stage][:, None] + post[stage])
    bounds = StageBounds(tuple(excess), pre, post)
    return bounds if np.isfinite(bounds.bound) else None


def _least_around(ramps: Sequence[FloatArray], sends: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """``pre`` and ``post`` where the ramp of layers adds up over any stages: each layer where it takes least."""
    stages, count = np.shape(ramps)
    pre, post = (np.where(np.arange(count + 1) == np.full((stages, 1), end), 0.0, np.inf) for end in (0, count))
    sent = np.cumsum([sends], axis=1).T
    pre[1:] = _summed(np.minimum.accumulate(ramps))[:-1] + sent[:-1]
    behind = _summed(np.minimum.accumulate(ramps[::-1])[::-1])[1:]
    post[:-1] = behind[:, -1:] - behind + (sent[-1] - sent[:-1])
    return pre, post


class _Figures:
    def __init__(self, problem: Problem, tables: TableRow) -> None:
        self._memo, numbers = Memo(), dict[int, int]()
        self.which = np.array([numbers.setdefault(id(table), len(numbers)) for table in tables])
        kinds, form = list({id(table): table for table in tables}.values()), problem.form
        self.ramp = np.array([float(table.ramp(form).min()) for table in kinds])[self.which]
        self.time = [table.theta(form).astype(np.float64) for table in kinds]
        memory = [table.figures.memory for table in kinds]
        self.both = [(bytes_[:, 0] + bytes_[:, 1]).astype(np.float64) for bytes_ in memory]
        self.last = [(bytes_[:, 0] + bytes_[:, 2:4].max(axis=1)).astype(np.float64) for bytes_ in memory]
        self.kept = [table.figures.kept.astype(np.float64) for table in kinds]
        self.late = [table.figures.late.astype(np.float64) for table in kinds]
        self.wired = [
            np.array([problem.at_ends(layout) for layout in table.options.layouts], dtype=bool)[table.codes]
            for table in kinds
        ]

    @remembered
    def theta(
        self, held: int, filled: bool, room: float, ends: tuple[bool, bool], place: tuple[int, ...]
    ) -> FloatArray:
        """(L + 1, L + 1): bound on theta of the layers i..j-1, infinite but at a place, where there is one.

        Layers next to a boundary have the wire's layout.
        """
        inside = np.s_[place[0] : place[0] + 1, place[1] : place[1] + 1] if place else np.s_[:, :]
        theta = np.full((len(self.which) + 1,) * 2, np.inf)
        theta[inside] = self._theta(held, filled, room, ends, inside)
        return theta

    def _theta(
        self, held: int, filled: bool, room: float, ends: tuple[bool, bool], inside: tuple[slice, slice]
    ) -> FloatArray:
        extra = float(held - 1)
        rows = zip(self.both, self.kept, self.late, strict=True)
        memory = [both + extra * kept - filled * late for both, kept, late in rows]
        local = [last + extra * kept for last, kept in zip(self.last, self.kept, strict=True)]
        counts = np.bincount(self.which)
        spreads = [float(counts @ [np.ptp(value) for value in values]) for values in (self.time, memory)]
        prices = _PRICES * spreads[0] / (spreads[1] + 1.0)
        free, last = self._least(memory, prices), self._least(local, prices)
        # what a stage takes is what its layers come to up to its end, less what they come to up to its start
        ways, gone = [(_summed(free), _ended(free, last))], None
        if any(ends):
            kept, kept_last = self._least(memory, prices, wired=True), self._least(local, prices, wired=True)
            ways, gone = _wired(free, last, kept, kept_last, ends)
        lightest = [np.array([values.min() for values in costs])[self.which] for costs in (memory, local)]
        over = ((_ranges(*lightest) > room) | np.tri(len(self.which) + 1, dtype=bool))[inside]
        bound, (starts, stops) = np.full(over.shape, -np.inf), inside
        for number, price in enumerate(prices):  # one after another: few figures stay near the processor
            costs = [(to[number, stops] - price * room) - start[number, starts, None] for start, to in ways]
            if gone is not None:
                costs[0][gone[inside]] = np.inf
            np.maximum(bound, costs[0] if len(costs) == 1 else np.minimum(costs[0], costs[1], out=costs[0]), out=bound)
        return np.where(over, np.inf, bound)

    def _least(self, memory: list[FloatArray], prices: FloatArray, *, wired: bool = False) -> FloatArray:
        """(K, L): least time + price * memory; infinite where nothing has the wire's layout, if that is asked for."""
        rows = zip(self.time, memory, self.wired, strict=True)
        pairs = ((time[among], size[among]) if wired else (time, size) for time, size, among in rows)
        least = [(time + prices[:, None] * size).min(axis=1, initial=np.inf) for time, size in pairs]
        return np.stack(least, axis=1)[:, self.which]


def _wired(
    free: FloatArray, last: FloatArray, kept: FloatArray, kept_last: FloatArray, ends: tuple[bool, bool]
) -> tuple[list[tuple[FloatArray, FloatArray]], BoolArray | None]:
    """Two ways to bound a stage with boundaries at these ends, of which the lower one counts: all of its layers in the
    wire's layout, or those at its ends; and where the first is infinite. ``kept``: least in the wire's layout.

    Each as what layers come to up to a start and up to an end.
    """
    never, start = ~np.isfinite(kept[0]), _summed(free)
    missing = _summed(never)
    plain, plain_last = np.where(never, 0.0, kept), np.where(never, 0.0, kept_last)
    if ends[0]:
        start[:, :-1] -= kept - free
    ways = [(_summed(plain), _ended(plain, plain_last)), (start, _ended(free, kept_last if ends[1] else last))]
    return ways, missing - missing[:, None] > 0 if never.any() else None


def _ranges(values: FloatArray, last: FloatArray) -> FloatArray:
    """(..., L + 1, L + 1): sums over the layers i..j-1, with ``last`` for the last of them."""
    between: FloatArray = _ended(values, last)[..., None, :] - _summed(values)[..., :, None]
    return between


def _ended(values: FloatArray, last: FloatArray) -> FloatArray:
    """(..., L + 1): sums of the first so many, with ``last`` for the last of them."""
    total = _summed(values)
    return np.concatenate((np.zeros_like(total[..., :1]), total[..., :-1] + last), axis=-1)


def _summed(values: FloatArray | BoolArray) -> FloatArray:
    """(..., L + 1): sums of the first so many."""
    total = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=total[..., 1:])
    return total


def _distinct(tables: Sequence[TableRow]) -> list[TableRow]:
    return list({id(table): table for table in tables}.values())


def averaged(problem: Problem, tables: Sequence[TableRow]) -> float:
    """A time that no plan beats, quickly: the slowest stage has its share of the layers; memory is left out."""
    form, rows = problem.form, _distinct(tables)
    kinds = {id(table): table for row in rows for table in row}
    if not all(map(len, kinds.values())):
        return np.inf
    ramps = {key: form.share * table.ramp(form) for key, table in kinds.items()}
    least = {key: float(ramp.min()) for key, ramp in ramps.items()}
    rounds = {key: float((kinds[key].theta(form) - ramp).min()) for key, ramp in ramps.items()}
    ramp = np.min([[least[id(table)] for table in row] for row in rows], axis=0)
    more = np.min([[rounds[id(table)] for table in row] for row in rows], axis=0)
    return float(ramp.sum() + max(more.sum() / problem.shape.stages, more.max())) * (1 - _TINY)


def averaged_uniform(problems: Sequence[Problem]) -> FloatArray:
    """(V,): times that no uniform plan beats under a front-loaded schedule, of shapes that differ in stages alone.

    Quickly: all groups take their average of what blocks, sends and the least of other layers come to, and of memory
    only blocks in the first group count, when it begins its first backward pass: p micro-batches of each of its v
    stages, and where there are more p - 1 of the first besides. Of two strategies that only recompute differently
    blocks have any shares.
    """
    if not problems:
        return np.zeros(0)
    choice, graph, shape, tables = problems[0], problems[0].graph, problems[0].shape, problems[0].tables
    stages = np.array([[problem.shape.virtual * shape.stages] for problem in problems])
    uniform = Uniform(choice, cuts_of(graph, int(stages[0, 0]))[0])
    if uniform.mixtures is None:
        return np.zeros(len(problems))
    table, blocks = uniform.mixtures.table, uniform.ranges[1]
    around = [tables[0].unpruned(layer.kind, layer.name) for layer in graph.layers if layer.role is not Role.BLOCK]
    if not len(table) or not all(map(len, around)):
        return np.full(len(problems), np.inf)
    # Sends go over each boundary forth and back, but for one that other layers may send over; whole picoseconds differ.
    pairs = ((0, 1), (shape.stages - 1, 0))
    outputs = min(tables[0].store.crossing[blocks.start + 1 : blocks.stop], default=0)
    sent = np.min([uniform.sent(table, outputs, *pair) for pair in pairs], axis=0)
    overhead = choice.pricer.profile.overhead
    host = (4 * stages - 4) * ticks(overhead.pipeline) + stages * ticks(overhead.microbatch) - 8 * stages
    layers = len(blocks) * table.both + sum(int(other.both.min()) for other in around)
    steps = len(blocks) * table.figures.step + sum(int(other.figures.step.min()) for other in around)
    ramps, rounds = (np.array([getattr(problem.form, name) for problem in problems]) for name in ("ramp", "rounds"))
    time = (layers + (2 * stages - 4) * sent + host) * (ramps + rounds / shape.stages) + steps / shape.stages
    shares = [[every[:: shape.stages] for every in blocks_of(graph, int(count))] for (count,) in stages]
    held = np.array([[min(map(sum, choice))] for choice in shares])
    first = np.array([[min(chunks[0] for chunks in choice)] for choice in shares])
    flying = shape.stages * held + (shape.microbatches > shape.stages) * (shape.stages - 1) * first
    room = choice.budgets[0] - tables[0].pricer.profile.cluster.device.context
    over = held * table.figures.resting[:, 0] + flying * table.figures.kept - room
    least = np.where(over <= 0, time, np.inf).min(axis=1)
    a, b = pairs_within(table.options.degrees[table.rows])
    if len(a):
        a, b = np.concatenate((a, b)), np.concatenate((b, a))
        span = np.maximum(over[:, b] - over[:, a], 1)
        mixed = time[:, a] + np.minimum(-over[:, a] / span, 1.0) * (time[:, b] - time[:, a])
        least = np.minimum(least, np.where((over[:, a] <= 0) & (over[:, b] > 0), mixed, np.inf).min(axis=1))
    return np.asarray(least * (1 - _TINY))


@dataclass(slots=True)
class ComputeBounds:
    """First bounds of shapes, from compute alone.

    Of every kind of layer the least seconds of compute that the profile holds for any tensor degree and choice of
    recomputation, with the samples shared out over all other devices. With r and c, what a layer delays the step by and
    what it takes of a micro-batch, p stages, and the share q of r that counts in any stage (``Form.share``),

        T >= q sum_l r_l + (m - q) max(max_l c_l, sum_l c_l / p)

    because the slowest stage has at least its share, and at least the slowest layer.
    """

    profile: Profile  # of devices of several types, the quickest counts for each kind
    _numbers: dict[str, int] = field(init=False)
    _groups: dict[int, tuple[IntArray, Curves]] = field(init=False)
    _memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self._numbers = {kind: number for number, kind in enumerate(self.profile.graph.kinds)}
        by_devices: dict[int, list[tuple[int, tuple[LayerPoint, ...]]]] = {}
        types = [type_.layers for type_ in self.profile.types] or [self.profile.layers]
        for key, points in (pair for layers in types for pair in index_points(layers).items()):
            if key[0] in self._numbers:
                by_devices.setdefault(slices_of(key), []).append((self._numbers[key[0]], points))
        self._groups = {
            degree: (
                np.array([kind for kind, _ in points]),
                Curves.stacked(range(len(points)), [rows for _, rows in points]),
            )
            for degree, points in by_devices.items()
        }

    def bound(self, graph: ModelGraph, shape: Shape) -> float:
        """Picoseconds that no plan of a shape is below."""
        return self._memo.once((id(graph), shape), lambda: self._bound(graph, shape))

    def _bound(self, graph: ModelGraph, shape: Shape) -> float:
        overlap = self.profile.steps_overlap
        form = shape.schedule.form(shape.stages, shape.microbatches, shape.virtual, steps_overlap=overlap)
        counts = self._memo.once(id(graph), lambda: Counter(self._numbers[layer.kind] for layer in graph.layers))
        used, times = np.array(list(counts)), np.array(list(counts.values()))
        least = self._bounds_at(shape.stage_devices, shape.microbatch, form.freed)
        both, ramp = (values[used] for values in least)
        slowest = max(float(times @ both) / shape.stages, float(both.max()))
        seconds = float(times @ ramp) * form.share + (form.microbatches - form.share) * slowest
        return seconds * TICKS * (1 - _ROUNDING)

    @remembered
    def _bounds_at(self, devices: int, microbatch: int, freed: float) -> tuple[FloatArray, FloatArray]:
        """(kinds,): c and r of each kind of layer, at the least."""
        both, ramp = np.full(len(self._numbers), np.inf), np.full(len(self._numbers), np.inf)
        for degree, (kinds, _) in self._groups.items():
            if devices % degree == 0:
                seconds, weight = self._seconds(degree, microbatch * degree / devices)
                np.minimum.at(both, kinds, seconds)
                np.minimum.at(ramp, kinds, seconds - freed * weight)
        return both, ramp

    @remembered
    def _seconds(self, degree: int, samples: float) -> tuple[FloatArray, FloatArray]:
        """Of each kind in slices of a degree: seconds of both passes, and of those the gradients of weights."""
        forward, backward = self._groups[degree][1].seconds(samples)
        return forward + backward, weight_seconds(forward, backward)
