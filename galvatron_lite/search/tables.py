"""What every strategy of a layer costs under a shape of plan, as arrays of whole numbers: picoseconds and bytes.

A ``Store`` prices strategies once for all shapes; ``Tables`` picks those of one shape. The search compares sums of
these figures, so they are integers: results do not depend on the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from galvatron_lite.arrays import IntArray, Real
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.memory import late_gradients, resting, terms
from galvatron_lite.cost.stage import Shape
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.pipeline.schedule import Form
from galvatron_lite.parallelism.strategy import Strategies, Strategy
from galvatron_lite.search.chain.chain import MEMORY
from galvatron_lite.search.chain.pareto import pareto_within
from galvatron_lite.search.space import UNPINNED, Fixed, LayerPins, Space

T = TypeVar("T")
Args = ParamSpec("Args")
_ROWS = 4096
"""Strategies that are priced at once, those of one table aside."""
TICKS = 10**12
"""Ticks a second: the search counts time in picoseconds."""
REST, PREFIX, PEAK, MIDDLE, PREFETCHED, PENDING, UPDATED = range(len(MEMORY))
"""Columns of ``StrategyFigures.memory``."""


class Memo(dict[object, Any]):
    """Results by what they depend on."""

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """The result of a key, computed the first time it is asked for."""
        if key not in self:
            self[key] = compute()
        result: T = self[key]
        return result


def remembered(method: Callable[Concatenate[Any, Args], T]) -> Callable[Concatenate[Any, Args], T]:
    """Cache a method's results by its arguments, in the object's ``_memo``."""

    @wraps(method)
    def cached(self: Any, *args: Args.args, **named: Args.kwargs) -> T:
        memo: Memo = self._memo
        return memo.once((method.__name__, args, *named.items()), lambda: method(self, *args, **named))

    return cast("Callable[Concatenate[Any, Args], T]", cached)


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
    """``ticks`` of each element."""
    rounded: IntArray = np.rint(np.asarray(seconds) * TICKS).astype(np.int64)
    return rounded


@dataclass(frozen=True, slots=True, eq=False)
class StrategyFigures:
    """What S strategies cost a layer."""

    # (S,) picoseconds of a micro-batch, ``weight`` the part of ``backward`` that computes gradients of weights, and of
    # what is done once a step
    forward: IntArray
    backward: IntArray
    weight: IntArray
    step: IntArray
    kept: IntArray  # (S,) bytes of saved activations of a micro-batch
    memory: IntArray  # (S, 7) bytes with one micro-batch in flight, columns as ``MEMORY``
    # (S,) bytes by which prefix is less in the first backward, where that has all of several micro-batches in memory
    late: IntArray
    # (S, 2) bytes of states, parameters and gradients while other layers compute, and gathered beside them
    resting: IntArray

    def select(self, rows: IntArray) -> StrategyFigures:
        """The figures of some of the strategies."""
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
    """The S strategies that tables choose from, with what does not depend on the micro-batch."""

    strategies: tuple[Strategy, ...]
    arrays: Strategies  # the same, as arrays
    codes: IntArray  # (S,) index into ``layouts``
    degrees: IntArray  # (S,) the same number for strategies that differ in recomputation alone
    layouts: tuple[Layout, ...]  # sorted
    examples: tuple[Strategy, ...]  # a strategy of each layout
    index: dict[Strategy, int]  # of each strategy
    _memo: Memo = field(default_factory=Memo, repr=False)

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> StrategyOptions:
        """The options of some strategies."""
        layouts = [layout_of(strategy) for strategy in strategies]
        examples = dict(zip(reversed(layouts), reversed(strategies), strict=True))
        distinct = sorted(examples)
        codes = {layout: code for code, layout in enumerate(distinct)}
        numbers = dict[Strategy, int]()
        degrees = [numbers.setdefault(each.split, len(numbers)) for each in strategies]
        return cls(
            tuple(strategies),
            Strategies.of(strategies),
            np.array([codes[layout] for layout in layouts], dtype=np.int64),
            np.array(degrees, dtype=np.int64),
            tuple(distinct),
            tuple(examples[layout] for layout in distinct),
            {strategy: row for row, strategy in enumerate(strategies)},
        )

    def subset(self, rows: IntArray) -> Strategies:
        """Some of the strategies as arrays; the same object for the same rows, so that what is cached of it serves."""
        return self._memo.once(rows.tobytes(), lambda: self.arrays.at(rows))


@dataclass(frozen=True, eq=False)
class StrategyTable:
    """S strategies that a layer may take, and what they cost under one shape of plan."""

    options: StrategyOptions  # the strategies are among these
    rows: IntArray  # (S,) index of each among the options
    figures: StrategyFigures

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies."""
        return tuple(self.options.strategies[row] for row in self.rows)

    @cached_property
    def codes(self) -> IntArray:
        """(S,): index of each layout among those of the options."""
        return self.options.codes[self.rows]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """(S,): layout of the boundary tensors."""
        return tuple(self.options.layouts[code] for code in self.codes)

    @cached_property
    def present(self) -> IntArray:
        """Codes of the layouts that occur, ascending."""
        return np.unique(self.codes)

    @cached_property
    def groups(self) -> IntArray:
        """(S,): index of each layout among those present."""
        return np.searchsorted(self.present, self.codes)

    @cached_property
    def both(self) -> IntArray:
        """(S,): picoseconds of both passes of a micro-batch."""
        both: IntArray = self.figures.forward + self.figures.backward
        return both

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: IntArray) -> StrategyTable:
        """The table of some of the strategies."""
        return StrategyTable(self.options, self.rows[rows], self.figures.select(rows))

    def only(self, strategy: Strategy) -> StrategyTable:
        """The table of one strategy; empty where it is not among them."""
        return self.select(np.flatnonzero(self.rows == self.options.index.get(strategy, -1)))

    def with_layouts(self, accepts: Callable[[Layout], bool]) -> StrategyTable:
        """The table of the strategies whose layout is accepted."""
        accepted = np.array([accepts(layout) for layout in self.options.layouts], dtype=bool)
        return self.select(np.flatnonzero(accepted[self.codes]))

    def freed(self, form: Form) -> IntArray:
        """(S,): picoseconds that a schedule frees of a micro-batch, see ``Form.parts``."""
        freed: IntArray = np.rint(form.freed * self.figures.weight).astype(np.int64)
        return freed

    def parts(self, form: Form) -> tuple[IntArray, ...]:
        """The parts of a micro-batch's time under a schedule, (S,) each."""
        return form.parts(self.figures.forward, self.figures.backward, self.freed(form))

    def ramp(self, form: Form) -> IntArray:
        """(S,): picoseconds by which a layer delays the step if its stage is not the slowest."""
        ramp: IntArray = self.both - self.freed(form)
        return ramp

    def theta(self, form: Form) -> IntArray:
        """(S,): picoseconds a step that a layer takes in the stage that is the slowest."""
        time: IntArray = form.microbatches * self.both + self.figures.step
        return time

    def criteria(self, form: Form) -> IntArray:
        """(S, figures): everything a strategy is judged by, apart from its layout."""
        figures = self.figures
        return np.column_stack(
            (*self.parts(form), figures.step, figures.kept, figures.memory, figures.memory[:, PREFIX] - figures.late)
        )

    def undominated(self, form: Form, others: Sequence[StrategyTable] = ()) -> StrategyTable:
        """Drop strategies that another one of the same layout equals or beats in every figure.

        Args:
            form: of the schedule.
            others: tables with the same strategies that must agree (layers with shared parameters).
        """
        criteria = np.column_stack([table.criteria(form) for table in (self, *others)])
        return self.select(pareto_within(criteria, self.codes))

    def memory(self, in_flight: int, filled: bool) -> IntArray:
        """(S, 7): ``StrategyFigures.memory`` with several micro-batches in flight.

        Args:
            in_flight: micro-batches.
            filled: whether that many are there in the first backward alone, see ``cost.memory.terms``.
        """
        memory = self.figures.memory.copy()
        memory[:, REST] += (in_flight - 1) * self.figures.kept
        if filled:
            memory[:, PREFIX] -= self.figures.late
        return memory


def distinct_tables(tables: Sequence[StrategyTable]) -> list[StrategyTable]:
    """The tables without repetitions, in order; layers that are alike share one object."""
    return list({id(table): table for table in tables}.values())


@dataclass(slots=True)
class Store:
    """Figures of all strategies of all kinds of layers, priced when asked for."""

    pricer: LayerPricer  # of the profile
    space: Space  # the strategies to choose from
    # bytes a sample that go over each boundary between layers (``ModelGraph.crossings``)
    crossing: tuple[int, ...] = field(init=False)
    memo: Memo = field(default_factory=Memo)  # for results that others derive from the figures
    _memo: Memo = field(default_factory=Memo)
    _tables: dict[tuple[object, ...], StrategyTable] = field(default_factory=dict)
    _batches: dict[tuple[object, ...], _PricedBatch] = field(default_factory=dict)
    _numbers: dict[Strategy, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.crossing = self.pricer.profile.graph.crossings()

    @remembered
    def borrowed(self, inside: range) -> int:
        """``ModelGraph.borrowed``, remembered."""
        return self.pricer.profile.graph.borrowed(inside)

    @remembered
    def exchanges(self, inside: range) -> tuple[tuple[int, int, int], ...]:
        """``ModelGraph.exchanges``, remembered, with layers counted from the first of the range."""
        exchanges = self.pricer.profile.graph.exchanges(inside)
        return tuple((a - inside.start, b - inside.start, size) for a, b, size in exchanges)

    @remembered
    def alike(self, pins: LayerPins) -> tuple[int, ...]:
        """Of each layer the first one of its kind with its pins: a price of that one holds for all of them."""
        fixed, first = Fixed(layers=pins), dict[object, int]()
        layers = self.pricer.profile.graph.layers
        return tuple(
            first.setdefault((layer.kind, fixed.pins_of(layer.name)), place) for place, layer in enumerate(layers)
        )

    def numbers(self, table: StrategyTable) -> IntArray:
        """(S,): a number for each strategy of a table, the same in all tables."""
        strategies = table.options.strategies
        numbers: IntArray = self._memo.once(
            id(table.options),
            lambda: np.array([self._numbers.setdefault(strategy, len(self._numbers)) for strategy in strategies]),
        )
        return numbers[table.rows]

    def common(self, tables: Sequence[StrategyTable]) -> list[StrategyTable]:
        """The tables, each with the strategies that all of them have."""
        numbers = [self.numbers(table) for table in tables]
        common = reduce(np.intersect1d, numbers)
        return [table.select(np.flatnonzero(np.isin(row, common))) for row, table in zip(numbers, tables, strict=True)]

    def table(self, kind: str, shape: Shape, fixed: Fixed, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """Every strategy of a kind of layer under a shape and pins."""
        key = (kind, shape.stage_devices, shape.stages, sharing, shape.microbatch, shape.microbatches == 1)
        splits = shape.schedule.splits_backward and self.pricer.prices_splitting
        if (*key, fixed, splits) not in self._tables:
            narrowed = None
            if (*key, fixed) not in self._batches and (*key, UNPINNED) in self._batches:
                narrowed = self._narrowed(self.table(kind, shape, UNPINNED, sharing), fixed)
            self._tables[*key, fixed, splits] = narrowed or self._priced(kind, shape, fixed, sharing, splits)
        return self._tables[*key, fixed, splits]

    def _narrowed(self, unpinned: StrategyTable, fixed: Fixed) -> StrategyTable | None:
        """What pins leave of a table; None where they go beyond the space."""
        options = unpinned.options
        allowed = self._memo.once(("kept", id(options), fixed), lambda: np.array(fixed.kept(options.strategies)))
        return unpinned.select(np.flatnonzero(allowed[unpinned.rows])) or None

    def _priced(self, kind: str, shape: Shape, fixed: Fixed, sharing: ParameterSharing, splits: bool) -> StrategyTable:
        """Price a table, together with those of other micro-batches of the batch where these have few strategies."""
        options, batch = self._options(kind, shape.stage_devices, fixed), shape.microbatch * shape.microbatches

        def key(size: int) -> tuple[object, ...]:
            return (kind, shape.stage_devices, shape.stages, sharing, size, size == batch, fixed)

        if key(shape.microbatch) not in self._batches:
            rows: dict[int, IntArray] = {}
            degrees = options.arrays.batch_degree
            for size in (shape.microbatch, *(divisor for divisor in divisors(batch) if divisor != shape.microbatch)):
                enough = size // degrees >= self.pricer.profile.least_samples
                divisible = np.flatnonzero((size % degrees == 0) & enough)
                few = sum(map(len, rows.values())) + len(divisible) <= _ROWS
                if not rows or (few and key(size) not in self._batches):
                    rows[size] = divisible
            all_rows = np.concatenate(list(rows.values()))
            sizes = np.repeat(list(rows), [len(some) for some in rows.values()])
            costs = self.pricer.price_many(kind, options.subset(all_rows), sizes, shape.stages, sharing)
            batch_of_sizes = _PricedBatch(options, all_rows, sizes, costs)
            self._batches.update((key(size), batch_of_sizes) for size in rows)
        return self._batches[key(shape.microbatch)].table(shape.microbatch, shape.microbatches == 1, splits)

    @remembered
    def _options(self, kind: str, devices: int, fixed: Fixed) -> StrategyOptions:
        strategies = self.space.strategies(kind, devices, fixed)
        # the options keep the strategies alive, so that no other object takes their id
        return self._memo.once(("options", id(strategies)), lambda: StrategyOptions.of(strategies))


@dataclass(frozen=True, slots=True)
class _PricedBatch:
    """Strategies of a kind of layer that were priced together, at several sizes of micro-batches."""

    options: StrategyOptions
    rows: IntArray  # (S,) index among the options
    sizes: IntArray  # (S,) samples of a micro-batch
    costs: LayerCost
    # by whether a step is one micro-batch, and whether its schedule splits backward
    figures: dict[tuple[bool, bool], StrategyFigures] = field(default_factory=dict)

    def table(self, size: int, single: bool, splits: bool) -> StrategyTable:
        """The table of one size of micro-batches."""
        if (single, splits) not in self.figures:
            costs = self.costs.with_split_backward() if splits else self.costs
            self.figures[single, splits] = _figures(costs, single)
        valid = np.flatnonzero(self.costs.valid & (self.sizes == size))
        return StrategyTable(self.options, self.rows[valid], self.figures[single, splits].select(valid))


@dataclass(slots=True)
class Tables:
    """Tables of all kinds of layers under one shape of plan, built when asked for."""

    store: Store
    shape: Shape
    fixed: Fixed  # what the user pinned
    form: Form = field(init=False)
    pricer: LayerPricer = field(init=False)
    _unpinned_layer: Fixed = field(init=False)  # the pins of layers without pins of their own
    _memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self.pricer = self.store.pricer
        shape, overlap = self.shape, self.pricer.profile.steps_overlap
        self.form = shape.schedule.form(shape.stages, shape.microbatches, shape.virtual, steps_overlap=overlap)
        self._unpinned_layer = Fixed(strategy=self.fixed.strategy, forbidden=self.fixed.forbidden)

    def unpruned(self, kind: str, layer: str, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """Every strategy that a layer may take.

        Args:
            kind: key into the graph's kinds.
            layer: name, for what is pinned for it.
            sharing: of parameters.
        """

        def table() -> StrategyTable:
            fixed = self.fixed.at_layer(layer) if self.fixed.pins_of(layer) else self._unpinned_layer
            return self.store.table(kind, self.shape, fixed, sharing)

        return self._memo.once((kind, layer if self.fixed.layers else "", sharing), table)

    def table(self, kind: str, layer: str, sharing: ParameterSharing = ALONE) -> StrategyTable:
        """``unpruned`` without dominated strategies; of a layer that shares parameters none is dropped, because the
        layers that it shares them with have a say."""
        unpruned = self.unpruned(kind, layer, sharing)
        if sharing != ALONE:
            return unpruned
        return self._memo.once(id(unpruned), lambda: unpruned.undominated(self.form))

    def moves(self, left: StrategyTable, right: StrategyTable, size: int | None) -> IntArray:
        """Picoseconds of redistribution in one pass, from each layout present in one table to each of the next.

        Args:
            left: table of a layer.
            right: table of the layer that reads it.
            size: bytes a sample that go between them; None: nothing does.
        """
        if size is None:
            return np.zeros((len(left.present), len(right.present)), dtype=np.int64)
        layouts = left.options.layouts, right.options.layouts
        moves: IntArray = self._memo.once(
            (id(left.options), id(right.options), size),
            lambda: all_ticks(self.pricer.redistributions(size, self.shape.microbatch, *layouts)),
        )
        return moves[np.ix_(left.present, right.present)]
