"""Lower bounds on the time of all plans of a shape: what prunes shapes and stage boundaries.

Three kinds, each computed for the shapes that the one before leaves:

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
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.pipeline.cost import weight_seconds
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.search.problem import Problem, even_cuts
from galvatron_lite.search.tables import TICKS, Memo, StrategyTable, distinct_tables, remembered

Span = tuple[int, int, int]
"""A stage, its first layer and the layer behind its last."""
TableRow = Sequence[StrategyTable]
"""The widest table of every layer of the model that a stage may use."""
_PRICES = np.concatenate(([0.0], 2.0 ** np.arange(-12, 13, 2)))
_TINY, _ROUNDING = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Bounds of a shape: by stage, (L + 1, L + 1) for the layers i..j-1, infinite where nothing fits."""

    excess: tuple[FloatArray, ...]  # picoseconds that no plan with those layers in that stage beats
    pre: FloatArray  # (stages, L + 1): the least ramp of the stages before each, if they end there
    post: FloatArray  # (stages, L + 1): that of the stages after each, if they start there
    looked: frozenset[Span] = frozenset()  # stages whose bound is that of their chain's shortest paths
    timed: frozenset[Span] = frozenset()  # stages whose bound is exact

    @cached_property
    def _ahead(self) -> list[FloatArray]:
        """By stage: bounds of the stages up to it, by where they end."""
        best = [self.excess[0][0]]
        for stage in self.excess[1:]:
            best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
        return best

    @cached_property
    def _behind(self) -> list[FloatArray]:
        """By stage: bounds of the stages from it on, by where they start."""
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
        """Least ramp of the layers from one on, in the stages after a stage, rounded down."""
        return float(self.post[stage][place]) * (1 - _TINY) - 1.0

    def others(self, stage: int, start: int, stop: int) -> int:
        """Least ramp of the layers outside a stage, rounded down; 0 where no plan has that stage."""
        total = float(self.pre[stage][start] + self.post[stage][stop])
        return max(int(total * (1 - _TINY)) - 1, 0) if np.isfinite(total) else 0

    def cuts(self) -> list[int]:
        """The cuts (0, ..., L) of a partition that reaches the bound."""
        cuts = [len(self.excess[0]) - 1]
        for stage in range(len(self.excess) - 1, 0, -1):
            cuts.append(int(np.argmin(np.maximum(self._ahead[stage - 1], self.excess[stage][:, cuts[-1]]))))
        return [0, *reversed(cuts)]

    def with_theta(self, values: Mapping[Span, float], *, exact: bool = True) -> StageBounds:
        """The bounds with the picoseconds that some stages need alone, where these are sharper."""
        excess = list(self.excess)
        for stage in {span[0] for span in values}:
            excess[stage] = excess[stage].copy()
        for (stage, start, stop), value in values.items():
            least = value + self.pre[stage][start] + self.post[stage][stop]
            excess[stage][start, stop] = max(excess[stage][start, stop], least)
        timed = self.timed | values.keys() if exact else self.timed
        return replace(self, excess=tuple(excess), looked=self.looked | values.keys(), timed=timed)

    @property
    def opened(self) -> StageBounds:
        """The same bounds for a narrower problem, under which every stage may need more."""
        return replace(self, looked=frozenset(), timed=frozenset())


def relaxed(problem: Problem, tables: Sequence[TableRow]) -> StageBounds | None:
    """Bounds of a problem; None where they show that nothing fits.

    Args:
        problem: the shape, the budgets and the micro-batches in flight.
        tables: by stage; stages with the same figures share one row.
    """
    rows = {id(row): row for row in tables}
    if any(not len(table) for row in rows.values() for table in row):
        return None
    form, stages, sends = problem.form, problem.shape.stages, problem.least_sends()
    even = stages > 1 and problem.tables[0].fixed.even
    cuts = even_cuts(problem.graph, stages) if even else ()
    if even and not cuts:
        return None
    figures = {key: _RowFigures(problem, row) for key, row in rows.items()}
    pre, post = _least_around([figures[id(row)].ramp for row in tables], sends)
    excess, more = [], problem.more_sends()
    for stage, row in enumerate(tables):
        room = float(problem.budgets[stage] - problem.tables[stage].pricer.profile.cluster.device.context)
        ends = (stage > 0, stage + 1 < stages) if problem.choice.wire is not None else (False, False)
        theta = figures[id(row)].theta(
            problem.in_flight(stage), problem.filled(stage), room, ends, cuts[stage : stage + 2]
        )
        sent = sends[stage] + more[stage][:, None] + more[stage + 1] if more else float(sends[stage])
        excess.append(theta + form.microbatches * sent + pre[stage][:, None] + post[stage])
    bounds = StageBounds(tuple(excess), pre, post)
    return bounds if np.isfinite(bounds.bound) else None


def _least_around(ramps: Sequence[FloatArray], sends: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """``pre`` and ``post`` where each layer is in the stage in which its ramp is least."""
    stages, count = np.shape(ramps)
    pre, post = (np.where(np.arange(count + 1) == np.full((stages, 1), end), 0.0, np.inf) for end in (0, count))
    sent = np.cumsum([sends], axis=1).T
    pre[1:] = _prefix_sums(np.minimum.accumulate(ramps))[:-1] + sent[:-1]
    behind = _prefix_sums(np.minimum.accumulate(ramps[::-1])[::-1])[1:]
    post[:-1] = behind[:, -1:] - behind + (sent[-1] - sent[:-1])
    return pre, post


class _RowFigures:
    """Figures of the widest tables of all layers, those of equal tables once; see the module for theta and y."""

    def __init__(self, problem: Problem, tables: TableRow) -> None:
        self._memo, numbers = Memo(), dict[int, int]()
        self.kind = np.array([numbers.setdefault(id(table), len(numbers)) for table in tables])  # by layer
        kinds, form = distinct_tables(tables), problem.form
        self.ramp = np.array([float(table.ramp(form).min()) for table in kinds])[self.kind]
        # by kind:
        self.time = [table.theta(form).astype(np.float64) for table in kinds]
        memory = [table.figures.memory for table in kinds]
        self.both = [(bytes_[:, 0] + bytes_[:, 1]).astype(np.float64) for bytes_ in memory]
        self.last = [(bytes_[:, 0] + bytes_[:, 2:4].max(axis=1)).astype(np.float64) for bytes_ in memory]
        self.kept = [table.figures.kept.astype(np.float64) for table in kinds]
        self.late = [table.figures.late.astype(np.float64) for table in kinds]
        self.wired = [
            np.array([problem.allows_at_ends(layout) for layout in table.options.layouts], dtype=bool)[table.codes]
            for table in kinds
        ]

    @remembered
    def theta(
        self, in_flight: int, filled: bool, room: float, ends: tuple[bool, bool], stage: tuple[int, ...]
    ) -> FloatArray:
        """(L + 1, L + 1): bound on theta of the layers i..j-1 within some bytes.

        ``ends``: whether there are boundaries before and behind, next to which layers have the wire's layout;
        ``stage``: the only i and j of interest; empty: all.
        """
        inside = np.s_[stage[0] : stage[0] + 1, stage[1] : stage[1] + 1] if stage else np.s_[:, :]
        theta = np.full((len(self.kind) + 1,) * 2, np.inf)
        theta[inside] = self._theta(in_flight, filled, room, ends, inside)
        return theta

    def _theta(
        self, in_flight: int, filled: bool, room: float, ends: tuple[bool, bool], inside: tuple[slice, slice]
    ) -> FloatArray:
        more = float(in_flight - 1)
        rows = zip(self.both, self.kept, self.late, strict=True)
        memory = [both + more * kept - filled * late for both, kept, late in rows]
        local = [last + more * kept for last, kept in zip(self.last, self.kept, strict=True)]
        counts = np.bincount(self.kind)
        spreads = [float(counts @ [np.ptp(value) for value in values]) for values in (self.time, memory)]
        prices = _PRICES * spreads[0] / (spreads[1] + 1.0)
        free, last = self._least(memory, prices), self._least(local, prices)
        # what a stage takes is what its layers come to up to its end, less what they come to up to its start
        sums, missing = [(_prefix_sums(free), _sums_with_last(free, last))], None
        if any(ends):
            kept, kept_last = self._least(memory, prices, wired=True), self._least(local, prices, wired=True)
            sums, missing = _wired(free, last, kept, kept_last, ends)
        lightest = [np.array([values.min() for values in costs])[self.kind] for costs in (memory, local)]
        needed = _sums_with_last(*lightest) - _prefix_sums(lightest[0])[:, None]
        over = ((needed > room) | np.tri(len(self.kind) + 1, dtype=bool))[inside]
        bound, (starts, stops) = np.full(over.shape, -np.inf), inside
        for number, price in enumerate(prices):  # one after another: few figures stay near the processor
            costs = [(to[number, stops] - price * room) - start[number, starts, None] for start, to in sums]
            if missing is not None:
                costs[0][missing[inside]] = np.inf
            np.maximum(bound, costs[0] if len(costs) == 1 else np.minimum(costs[0], costs[1], out=costs[0]), out=bound)
        return np.where(over, np.inf, bound)

    def _least(self, memory: list[FloatArray], prices: FloatArray, *, wired: bool = False) -> FloatArray:
        """(K, L): least time + price * memory; ``wired``: in the wire's layout, infinite where nothing has it."""
        rows = zip(self.time, memory, self.wired, strict=True)
        pairs = ((time[among], size[among]) if wired else (time, size) for time, size, among in rows)
        least = [(time + prices[:, None] * size).min(axis=1, initial=np.inf) for time, size in pairs]
        return np.stack(least, axis=1)[:, self.kind]


def _wired(
    free: FloatArray, last: FloatArray, kept: FloatArray, kept_last: FloatArray, ends: tuple[bool, bool]
) -> tuple[list[tuple[FloatArray, FloatArray]], BoolArray | None]:
    """Two bounds of a stage with boundaries at these ends, of which the lower one counts: all of its layers in the
    wire's layout, or those at its ends; and where the first is infinite.

    Each as what layers come to up to a start and up to an end. ``free``: (K, L) least of each layer in any layout,
    ``kept``: in the wire's; ``last``, ``kept_last``: where it is the last of its stage.
    """
    never, start = ~np.isfinite(kept[0]), _prefix_sums(free)
    missing = _prefix_sums(never)
    plain, plain_last = np.where(never, 0.0, kept), np.where(never, 0.0, kept_last)
    if ends[0]:
        start[:, :-1] -= kept - free
    sums = [
        (_prefix_sums(plain), _sums_with_last(plain, plain_last)),
        (start, _sums_with_last(free, kept_last if ends[1] else last)),
    ]
    return sums, missing - missing[:, None] > 0 if never.any() else None


def _sums_with_last(values: FloatArray, last: FloatArray) -> FloatArray:
    """(..., L + 1): sums of the first so many, with ``last`` for the last of them."""
    total = _prefix_sums(values)
    return np.concatenate((np.zeros_like(total[..., :1]), total[..., :-1] + last), axis=-1)


def _prefix_sums(values: FloatArray | BoolArray) -> FloatArray:
    """(..., L + 1): sums of the first so many."""
    total = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=total[..., 1:])
    return total


def averaged(problem: Problem, tables: Sequence[TableRow]) -> float:
    """Picoseconds that no plan beats, quickly: the slowest stage has its share of the layers; memory is left out.
    ``tables``: as of ``relaxed``."""
    form, rows = problem.form, list({id(row): row for row in tables}.values())
    kinds = {id(table): table for row in rows for table in row}
    if not all(map(len, kinds.values())):
        return np.inf
    ramps = {key: form.share * table.ramp(form) for key, table in kinds.items()}
    least = {key: float(ramp.min()) for key, ramp in ramps.items()}
    rounds = {key: float((kinds[key].theta(form) - ramp).min()) for key, ramp in ramps.items()}
    ramp = np.min([[least[id(table)] for table in row] for row in rows], axis=0)
    more = np.min([[rounds[id(table)] for table in row] for row in rows], axis=0)
    return float(ramp.sum() + max(more.sum() / problem.shape.stages, more.max())) * (1 - _TINY)


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
