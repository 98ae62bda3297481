"""Figures of every strategy of a kind of layer as whole numbers: picoseconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.arrays import BoolArray, IntArray, Real
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.memory import late_gradients, resting, terms
from galvatron_lite.cost.stage import Shape
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.pipeline.schedule import Form
from galvatron_lite.parallelism.strategy import Strategies, Strategy
from galvatron_lite.search.chain.chain import MEMORY
from galvatron_lite.search.space import UNPINNED, Fixed, LayerPins, Space

T = TypeVar("T")
Args = ParamSpec("Args")
_ROWS = 4096
"""Strategies that are priced at once, those of one table aside."""
TICKS = 10**12
"""Search counts time in picoseconds, so that sums do not depend on their order."""
REST, PREFIX, PEAK, MIDDLE, PREFETCHED, PENDING, UPDATED = range(len(MEMORY))


class Memo(dict[object, Any]):
    """What is worked out once, by what it depends on."""

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What is known by a key; made where nothing is."""
        if key not in self:
            self[key] = make()
        value: T = self[key]
        return value


def remembered(make: Callable[Concatenate[Any, Args], T]) -> Callable[Concatenate[Any, Args], T]:
    """A method that is worked out once by what it is called with, in its object's ``_memo``."""

    @wraps(make)
    def once(self: Any, *args: Args.args, **named: Args.kwargs) -> T:
        memo: Memo = self._memo
        return memo.once((make.__name__, args, *named.items()), lambda: make(self, *args, **named))

    return cast("Callable[Concatenate[Any, Args], T]", once)


def ticks(seconds: float) -> int:
    """Seconds as whole picoseconds.

    Raises:
        InputError: more than 64 bits hold.
    """
    if not seconds * TICKS < 2**63:
        remedy = "A step of 100 days is beyond what is searched: look at the rates of the profile or the cluster."
        raise InputError("step", f"{seconds:.3g} s", remedy)
    return round(seconds * TICKS)


def all_ticks(seconds: Real) -> IntArray:
    """``ticks`` of each."""
    rounded: IntArray = np.rint(np.asarray(seconds) * TICKS).astype(np.int64)
    return rounded


@dataclass(frozen=True, slots=True, eq=False)
class StrategyFigures:
    """What S strategies cost a layer."""

    # forward, backward, weight, step: (S,) picoseconds a micro-batch (``weight``: of ``backward``, the gradients of
    # weights) and a step
    forward: IntArray
    backward: IntArray
    weight: IntArray
    step: IntArray
    kept: IntArray  # (S,) bytes
    memory: IntArray  # (S, 7) bytes with one micro-batch in flight, columns as ``chain.MEMORY``
    # (S,) bytes by which prefix is less in the first backward, where that has all of several micro-batches in memory
    late: IntArray
    # (S, 2) bytes of states, parameters and gradients while other layers compute, and gathered beside them
    resting: IntArray

    def at(self, rows: IntArray) -> StrategyFigures:
        """Of some of the strategies."""
        return StrategyFigures(*(getattr(self, name)[rows] for name in self.__slots__))


def _figures(costs: LayerCost, single: bool) -> StrategyFigures:
    memory = terms(costs, 1, 1 if single else 2)
    return StrategyFigures(
        all_ticks(costs.forward_seconds),
        all_ticks(costs.backward_seconds),
        all_ticks(costs.weight),
        all_ticks(costs.step_seconds),
        np.asarray(costs.kept),
        np.column_stack([getattr(memory, name) for name in MEMORY]),
        np.zeros_like(np.asarray(costs.kept)) if single else np.asarray(late_gradients(costs)),
        np.column_stack((resting(costs, 1 if single else 2), costs.gathered)),
    )


Glue = Layout
"""A layout without the choice of tensor groups to share tokens."""


def glue_of(layout: Layout) -> Glue:
    """What layouts must have in common to be glued: all but whether groups share what they hold."""
    return layout.replicated("sequence")


@dataclass(frozen=True, slots=True, eq=False)
class StrategyOptions:
    """Strategies that tables choose from, with what does not depend on the micro-batch."""

    strategies: tuple[Strategy, ...]  # S of them
    many: Strategies  # the same as arrays
    batch: IntArray  # (S,) batch degrees
    codes: IntArray  # (S,) the number of the layout of each
    degrees: IntArray  # (S,) the same number for strategies that only recompute differently
    layouts: tuple[Layout, ...]  # by number
    samples: tuple[Strategy, ...]  # a strategy of each layout
    places: dict[Strategy, int]  # of the strategies
    _memo: Memo = field(default_factory=Memo, repr=False)

    def part(self, rows: IntArray) -> Strategies:
        """Some of the strategies; the same object for the same rows, so that what is known of them is kept."""
        return self._memo.once(rows.tobytes(), lambda: self.many.at(rows))


def options_of(strategies: Sequence[Strategy]) -> StrategyOptions:
    """Strategies as options."""
    layouts = [layout_of(strategy) for strategy in strategies]
    samples = dict(zip(reversed(layouts), reversed(strategies), strict=True))
    names = sorted(samples)
    numbers = {name: number for number, name in enumerate(names)}
    many, same = Strategies.of(strategies), dict[Strategy, int]()
    degrees = [same.setdefault(replace(strategy, recompute=Recompute.NONE), len(same)) for strategy in strategies]
    return StrategyOptions(
        tuple(strategies),
        many,
        many.batch_degree,
        np.array([numbers[name] for name in layouts], dtype=np.int64),
        np.array(degrees, dtype=np.int64),
        tuple(names),
        tuple(samples[name] for name in names),
        {strategy: place for place, strategy in enumerate(strategies)},
    )


@dataclass(frozen=True, eq=False)
class StrategyTable:
    """What strategies of one kind of layer cost under one shape of plan."""

    options: StrategyOptions  # that the strategies are among
    rows: IntArray  # (S,) which of them
    figures: StrategyFigures  # of each

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """S of them."""
        return tuple(self.options.strategies[row] for row in self.rows)

    @cached_property
    def codes(self) -> IntArray:
        """(S,): number of each layout among the options."""
        return self.options.codes[self.rows]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """(S,): of their boundary tensors."""
        return tuple(self.options.layouts[code] for code in self.codes)

    @cached_property
    def present(self) -> IntArray:
        """Numbers of the layouts that occur, ascending."""
        return np.unique(self.codes)

    @cached_property
    def groups(self) -> IntArray:
        """(S,): place of each layout among those present."""
        return np.searchsorted(self.present, self.codes)

    @cached_property
    def both(self) -> IntArray:
        """(S,): picoseconds of both passes of a micro-batch."""
        both: IntArray = self.figures.forward + self.figures.backward
        return both

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, strategy: Strategy) -> StrategyTable:
        """Only one of the strategies; none, where it is not among them."""
        return self.at(np.flatnonzero(self.rows == self.options.places.get(strategy, -1)))

    def lay_out_model(self, wanted: Callable[[Layout], bool]) -> StrategyTable:
        """Only the strategies whose layout is wanted."""
        wanted_layouts = np.array([wanted(layout) for layout in self.options.layouts], dtype=bool)
        return self.at(np.flatnonzero(wanted_layouts[self.codes]))

    def at(self, rows: IntArray) -> StrategyTable:
        """Only some of the strategies."""
        return StrategyTable(self.options, self.rows[rows], self.figures.at(rows))

    def saved(self, form: Form) -> IntArray:
        """(S,): picoseconds that a schedule frees of a micro-batch, see ``Form.parts``."""
        saved: IntArray = np.rint(form.freed * self.figures.weight).astype(np.int64)
        return saved

    def parts(self, form: Form) -> tuple[IntArray, ...]:
        """The parts of a micro-batch's time under a schedule, (S,) each."""
        return form.parts(self.figures.forward, self.figures.backward, self.saved(form))

    def ramp(self, form: Form) -> IntArray:
        """(S,): picoseconds by which a layer delays the step if its stage is not the slowest."""
        left: IntArray = self.both - self.saved(form)
        return left

    def theta(self, form: Form) -> IntArray:
        """(S,): picoseconds a step of a stage that is the slowest."""
        time: IntArray = form.microbatches * self.both + self.figures.step
        return time

    def keys(self, form: Form) -> IntArray:
        """Everything a strategy is judged by, apart from its layout: (S, figures)."""
        figures = self.figures
        return np.column_stack(
            (*self.parts(form), figures.step, figures.kept, figures.memory, figures.memory[:, PREFIX] - figures.late)
        )

    def undominated(self, form: Form, others: Sequence[StrategyTable] = ()) -> StrategyTable:
        """Without strategies that another one of the same layout equals or beats in every figure.

        Args:
            form: of the schedule.
            others: tables with the same strategies that must agree (layers with shared parameters).
        """
        keys = np.column_stack([table.keys(form) for table in (self, *others)])
        return self.at(pareto_within(keys, self.codes))

    def held(self, in_flight: int, filled: bool) -> IntArray:
        """(S, 7): ``Figures.memory`` with so many micro-batches in flight.

        Args:
            in_flight: micro-batches.
            filled: whether that many are there in the first backward alone, see ``cost.memory.terms``.
        """
        held_bytes = self.figures.memory.copy()
        held_bytes[:, REST] += (in_flight - 1) * self.figures.kept
        if filled:
            held_bytes[:, PREFIX] -= self.figures.late
        return held_bytes


@dataclass(slots=True)
class Store:
    """Figures of all strategies of all kinds of layers; made when asked for."""

    pricer: LayerPricer  # of the profile
    space: Space  # the strategies to choose from
    # bytes a sample that go over each boundary between layers (``ModelGraph.crossings``)
    crossing: tuple[int, ...] = field(init=False)
    memo: Memo = field(default_factory=Memo)  # of what others work out of the figures
    _memo: Memo = field(default_factory=Memo)
    # by kind, devices and number of stages, sharing, micro-batch, whether it is the only one; by pins; and tables by
    # whether splitting backward is priced
    _tables: dict[tuple[object, ...], StrategyTable] = field(default_factory=dict)
    _priced: dict[tuple[object, ...], _Batch] = field(default_factory=dict)
    _numbers: dict[Strategy, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.crossing = self.pricer.profile.graph.crossings()

    @remembered
    def borrowed(self, inside: range) -> int:
        """``ModelGraph.borrowed``, remembered."""
        return self.pricer.profile.graph.borrowed(inside)

    @remembered
    def exchanges(self, inside: range) -> tuple[tuple[int, int, int], ...]:
        """``ModelGraph.exchanges``, remembered, with places counted from the first layer of the range."""
        found = self.pricer.profile.graph.exchanges(inside)
        return tuple((a - inside.start, b - inside.start, size) for a, b, size in found)

    @remembered
    def alike(self, pins: LayerPins) -> tuple[int, ...]:
        """By place of a layer the first one of its kind with its pins: what is priced of it is priced of them all."""
        fixed, first = Fixed(layers=pins), dict[object, int]()
        layers = self.pricer.profile.graph.layers
        return tuple(
            first.setdefault((layer.kind, fixed.pins_of(layer.name)), place) for place, layer in enumerate(layers)
        )

    def numbers(self, table: StrategyTable) -> IntArray:
        """(S,): a number for each strategy of a table, the same in all tables."""
        strategies = table.options.strategies
        every: IntArray = self._memo.once(
            id(table.options),
            lambda: np.array([self._numbers.setdefault(strategy, len(self._numbers)) for strategy in strategies]),
        )
        return every[table.rows]

    def common(self, tables: Sequence[StrategyTable]) -> list[StrategyTable]:
        """The tables, each with the strategies that all of them have."""
        every = [self.numbers(table) for table in tables]
        common = reduce(np.intersect1d, every)
        return [table.at(np.flatnonzero(np.isin(number, common))) for number, table in zip(every, tables, strict=True)]

    @remembered
    def options(self, kind: str, devices: int, fixed: Fixed) -> StrategyOptions:
        """What a kind of layer may do on a stage of so many devices."""
        strategies = self.space.strategies(kind, devices, fixed)
        # the options keep the strategies, and so their place in memory, alive
        return self._memo.once(("options", id(strategies)), lambda: options_of(strategies))

    def table(self, kind: str, shape: Shape, fixed: Fixed, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """Every strategy of a kind of layer under a shape."""
        key = (kind, shape.stage_devices, shape.stages, sharing, shape.microbatch, shape.microbatches == 1)
        splits = shape.schedule.splits_backward and self.pricer.prices_splitting
        if (*key, fixed, splits) not in self._tables:
            narrowed = None
            if (*key, fixed) not in self._priced and (*key, UNPINNED) in self._priced:
                narrowed = self._narrowed(self.table(kind, shape, UNPINNED, sharing), fixed)
            self._tables[*key, fixed, splits] = narrowed or self._priced_table(kind, shape, fixed, sharing, splits)
        return self._tables[*key, fixed, splits]

    def _narrowed(self, unpinned: StrategyTable, fixed: Fixed) -> StrategyTable | None:
        """What pins leave of a table; None where they go beyond the space."""
        options = unpinned.options
        allowed = self._memo.once(("kept", id(options), fixed), lambda: np.array(fixed.kept(options.strategies)))
        return unpinned.at(np.flatnonzero(allowed[unpinned.rows])) or None

    def _priced_table(
        self, kind: str, shape: Shape, fixed: Fixed, sharing: ParameterSharing, splits: bool
    ) -> StrategyTable:
        """Prices the strategies of a table, and of those for other micro-batches of the batch where they are few."""
        options, batch = self.options(kind, shape.stage_devices, fixed), shape.microbatch * shape.microbatches

        def key(size: int) -> tuple[object, ...]:
            return (kind, shape.stage_devices, shape.stages, sharing, size, size == batch, fixed)

        if key(shape.microbatch) not in self._priced:
            rows: dict[int, IntArray] = {}
            for size in (shape.microbatch, *(divisor for divisor in divisors(batch) if divisor != shape.microbatch)):
                enough = size // options.batch >= self.pricer.profile.graph.least_samples
                some = np.flatnonzero((size % options.batch == 0) & enough)
                few = sum(map(len, rows.values())) + len(some) <= _ROWS
                if not rows or (few and key(size) not in self._priced):
                    rows[size] = some
            every = np.concatenate(list(rows.values()))
            sizes = np.repeat(list(rows), [len(some) for some in rows.values()])
            costs = self.pricer.price_many(kind, options.part(every), sizes, shape.stages, sharing)
            priced = _Batch(options, every, sizes, costs)
            self._priced.update((key(size), priced) for size in rows)
        return self._priced[key(shape.microbatch)].table(shape.microbatch, shape.microbatches == 1, splits)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Strategies of a kind of layer that were priced at once, at several sizes of micro-batches."""

    options: StrategyOptions
    rows: IntArray  # (S,) which of the options
    sizes: IntArray  # (S,) samples of a micro-batch
    costs: LayerCost
    # by whether a step is one micro-batch, and whether its schedule splits backward
    figures: dict[tuple[bool, bool], StrategyFigures] = field(default_factory=dict)

    def table(self, size: int, single: bool, splits: bool) -> StrategyTable:
        """Of one size of micro-batches."""
        if (single, splits) not in self.figures:
            costs = self.costs.with_split_backward() if splits else self.costs
            self.figures[single, splits] = _figures(costs, single)
        valid = np.flatnonzero(self.costs.valid & (self.sizes == size))
        return StrategyTable(self.options, self.rows[valid], self.figures[single, splits].at(valid))


@dataclass(slots=True)
class Tables:
    """Tables of all kinds of layers under one shape of plan; made when asked for."""

    store: Store  # of figures
    shape: Shape  # of the plan
    fixed: Fixed  # what the user pinned
    form: Form = field(init=False)
    pricer: LayerPricer = field(init=False)  # prices the layers
    _plain: Fixed = field(init=False)
    _memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self.pricer = self.store.pricer
        shape, overlap = self.shape, self.pricer.profile.steps_overlap
        self.form = shape.schedule.form(shape.stages, shape.microbatches, shape.virtual, steps_overlap=overlap)
        self._plain = Fixed(strategy=self.fixed.strategy, forbidden=self.fixed.forbidden)

    def unpruned(self, kind: str, layer: str, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """Every strategy that a layer may take.

        Args:
            kind: key into the graph's kinds.
            layer: name, for what is pinned for it.
            sharing: of parameters.
        """
        key = (kind, layer if self.fixed.layers else "", sharing)
        return self._memo.once(key, lambda: self.store.table(kind, self.shape, self._fixed_at(layer), sharing))

    def _fixed_at(self, layer: str) -> Fixed:
        return self.fixed.at_layer(layer) if self.fixed.pins_of(layer) else self._plain

    def table(self, kind: str, layer: str, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """The same without strategies that never help; with any sharing none is left out: another layer has a say."""
        unpruned = self.unpruned(kind, layer, sharing)
        if sharing != ALONE:
            return unpruned
        return self._memo.once(id(unpruned), lambda: unpruned.undominated(self.form))

    def moves(self, left: StrategyTable, right: StrategyTable, size: int | None) -> IntArray:
        """Picoseconds of redistribution in one pass between the layouts present in one table and in the next, of what
        goes between their layers (bytes a sample; None: nothing does)."""
        if size is None:
            return np.zeros((len(left.present), len(right.present)), dtype=np.int64)
        layouts = left.options.layouts, right.options.layouts
        every: IntArray = self._memo.once(
            (id(left.options), id(right.options), size),
            lambda: all_ticks(self.pricer.redistributions(size, self.shape.microbatch, *layouts)),
        )
        return every[np.ix_(left.present, right.present)]


_FIRST, _CHUNK, _PAIRS, _SMALL = 64, 256, 2**17, 96
_EARLIER = np.tri(_SMALL, k=-1, dtype=bool)
_TOGETHER = (8, 32)
"""Rows up to which groups are looked at together."""


def pareto_rows(values: IntArray) -> IntArray:
    """Places of the rows that no other row equals or beats in every column (less is better), in lexicographic order.

    Of equal rows the first stays.
    """
    if len(values) <= 1:
        return np.arange(len(values))
    varying = values[:, (values != values[0]).any(axis=0)]
    if varying.shape[1] == 0:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort(varying.T[::-1])
    if varying.shape[1] == 1:
        return order[:1]
    ordered = varying[order]
    if varying.shape[1] == 2:
        least = np.minimum.accumulate(ordered[:, 1])
        return order[np.concatenate(([True], ordered[1:, 1] < least[:-1]))]
    return order[_more_columns(ordered)]


def pareto_within(values: IntArray, groups: IntArray) -> IntArray:
    """Places, ascending, of the rows that no row of their group equals or beats in every column.

    Of equal rows the first stays.
    """
    if len(values) <= _SMALL:
        same = np.stack((groups, -groups))  # rows of other groups beat none
        return np.flatnonzero(~_beaten_before(np.concatenate((values.T, same))))
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate(([0], np.flatnonzero(np.diff(groups[order])) + 1))
    sizes, count = np.diff(np.append(starts, len(order))), len(order)
    columns = np.column_stack((values[order].T, np.full(values.shape[1], np.iinfo(np.int64).max)))
    kept, least = list[IntArray](), 0
    for most in _TOGETHER:  # groups of about one size, filled up with rows that beat none
        some, own = np.flatnonzero((sizes > least) & (sizes <= most)), np.arange(most)
        places = np.where(own < sizes[some, None], starts[some, None] + own, count)
        kept.append(order[places[~_beaten_before(columns[:, places]) & (places < count)]])
        least = most
    for group in np.flatnonzero(sizes > least):
        rows = order[starts[group] : starts[group] + sizes[group]]
        kept.append(rows[pareto_rows(values[rows])])
    return np.sort(np.concatenate(kept))


def pairs_within(groups: IntArray) -> tuple[IntArray, IntArray]:
    """Places of every two rows of the same group, the earlier row first."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    later = np.searchsorted(ordered, ordered, side="right") - np.arange(len(ordered)) - 1
    first = np.repeat(np.arange(len(ordered)), later)
    second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(later) - later, later)
    return order[first], order[second]


def _more_columns(ordered: IntArray) -> IntArray:
    """Rows can only be beaten by rows whose ranks in all columns add up to no more.

    In that order few rows beat most others soon (Chomicki et al. 2003, "Skyline with presorting").
    """
    if len(ordered) <= _SMALL:
        return np.flatnonzero(~(_beats(ordered.T, ordered.T) & _EARLIER[: len(ordered), : len(ordered)]).any(axis=1))
    ranks = _ranks(ordered)
    left = np.argsort(ranks.sum(axis=0, dtype=np.int64), kind="stable")
    columns, count = np.ascontiguousarray(ranks[:, left]), _FIRST
    kept: list[IntArray] = []
    while len(left):
        some = columns[:, :count]
        # A row beaten by a row that is itself beaten is beaten by the latter's victor too.
        alive = ~(_beats(some, some) & np.tri(some.shape[1], k=-1, dtype=bool)).any(axis=1)
        kept.append(left[:count][alive])
        left, columns = left[count:], columns[:, count:]
        rest = ~_beaten(columns, np.ascontiguousarray(some[:, alive]))
        left, columns, count = left[rest], np.ascontiguousarray(columns[:, rest]), _CHUNK
    return np.sort(np.concatenate(kept))


def _ranks(ordered: IntArray) -> NDArray[Any]:
    """(columns, rows): ranks of values in their column; small integers compare faster."""
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in ordered.T])
    return ranks.astype(np.min_scalar_type(len(ordered)))


def _beaten_before(columns: IntArray) -> BoolArray:
    """(..., rows): whether another of the rows beats each, or an earlier one equals it; columns first."""
    beats = _beats(columns, columns)
    equal, earlier = beats & np.swapaxes(beats, -1, -2), _EARLIER[: beats.shape[-1], : beats.shape[-1]]
    beaten: BoolArray = (beats & (~equal | earlier)).any(axis=-1)
    return beaten


def _beats(columns: NDArray[Any], others: NDArray[Any]) -> BoolArray:
    """(..., rows, others): whether each of the others equals or beats a row in every column; columns first."""
    beaten: BoolArray = others[0][..., None, :] <= columns[0][..., :, None]
    for column, other in zip(columns[1:], others[1:], strict=True):
        beaten &= other[..., None, :] <= column[..., :, None]
    return beaten


def _beaten(columns: NDArray[Any], front: NDArray[Any]) -> BoolArray:
    beaten = np.empty(columns.shape[1], dtype=bool)
    some = max(_PAIRS // max(front.shape[1], 1), 1)
    for begin in range(0, len(beaten), some):
        beaten[begin : begin + some] = _beats(columns[:, begin : begin + some], front).any(axis=1)
    return beaten
