"""The outer choices: pipeline degree, micro-batch count, schedule, layouts at the edges, strategies of tied layers.

They form a tree: ``shapes_of`` a request, the ``Problem`` of each shape, and its children with edges and ties settled.
Every node has a lower bound on the step time of the plans under it, so that ``best_first`` can explore the most
promising node first and stop as soon as no bound is below the best plan it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from galvatron_lite.cluster.budget import Budget, bytes_on
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import ALONE, LayerPricer, ParameterSharing
from galvatron_lite.cost.stage import Shape, sharing_of, tied_groups
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.backends import Backend, in_mode
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Mode, Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.bounds import ComputeBounds, StageBounds, averaged, relaxed
from galvatron_lite.search.problem import Problem, SharedChoice, even_cuts, is_glued
from galvatron_lite.search.space import Fixed, Space, microbatch_counts, pipeline_degrees
from galvatron_lite.search.tables import Glue, Memo, Store, StrategyTable, Tables, glue_of

OPEN = SharedChoice(None, None, ())
"""Nothing is settled: the widest problem of a shape."""
_KINDS = 16
"""Kinds of layers of a model beyond which groups run one stage: one strategy for all of them rarely pays."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is planned."""

    graph: ModelGraph
    devices: int  # world size
    global_batch: int  # samples a step
    budget: int | Budget  # bytes a device, or of each type of device
    fixed: Fixed  # what is not searched
    schedules: tuple[Schedule, ...]  # to choose from
    space: Space  # the strategies to choose from
    prices: Memo = field(default_factory=Memo, compare=False)  # figures, shared by all searches of one space
    cluster: Cluster | None = None  # the devices; None: all alike
    runs: int | None = None  # see ``Problem``
    wider: Request | None = None  # one that has all plans of this one, so that bounds of its shapes hold here
    margin: float = 0.0  # share of the memory of a device that is kept free and not in ``budget``
    hidden: float = 0.0  # see ``Problem``
    problems: Memo = field(default_factory=Memo, compare=False)  # of ``open_problem``, for all searches of the request

    @property
    def pipelines(self) -> tuple[int, ...]:
        """The pipeline degrees to try.

        Raises:
            InputError: the pinned degree is none of them.
        """
        wanted = self.fixed.pipeline
        if self.graph.whole and wanted is not None and wanted > 1:
            raise InputError("pipeline", wanted, f"The model allows {self.graph.whole}.")
        if self.graph.whole:
            return (1,)
        return pipeline_degrees(self.devices, len(self.graph.layers), self.fixed, self.cluster)

    def offered(self, layer: Layer, fixed: Fixed | None = None) -> list[Strategy]:
        """The strategies of a layer on the stages of any pipeline; ``fixed``: under other pins than the layer's."""
        pins, sizes = fixed or self.fixed.at_layer(layer.name), [self.devices // stages for stages in self.pipelines]
        return [strategy for size in sizes for strategy in self.space.strategies(layer.kind, size, pins)]

    def compute_bounds(self, profile: Profile) -> ComputeBounds:
        """First bounds on shapes by a profile."""
        return self.prices.once(("compute_bounds", id(profile)), lambda: ComputeBounds(profile))

    def tables(self, pricer: LayerPricer, shape: Shape, fixed: Fixed) -> Tables:
        """Figures by a pricer, under a shape and pins."""
        store = self.prices.once(id(pricer), lambda: Store(pricer, self.space))
        return self.prices.once((id(pricer), shape, fixed), lambda: Tables(store, shape, fixed))

    def on(self, space: Space, prices: Memo) -> Request:
        """The request on another space of strategies, with its prices."""
        return replace(self, space=space, prices=prices, problems=Memo())

    def under(self, schedule: Schedule) -> Fixed:
        """The pins under a schedule: also those that the backend needs with it."""
        required = self.space.backend.required(schedule)
        return self.fixed.with_pins(required) if required else self.fixed

    def offers(self, schedule: Schedule, stages: int) -> bool:
        """Whether the backend has a strategy for every kind of layer under a schedule, with what is pinned."""
        if not self.space.backend.required(schedule):
            return True
        devices = self.devices // stages
        replicated, under = strategy_with(Layout(batch=devices)), self.under(schedule)
        if not self.fixed.layers and self.space.backend.combines(replicated) and under.allows(replicated):
            return True  # of any layer
        names = {(layer.kind, layer.name if self.fixed.layers else "") for layer in self.graph.layers}
        return all(self.space.strategies(kind, devices, under.at_layer(name)) for kind, name in names)

    def fits(self, plan: Plan) -> bool:
        """Whether every stage of an evaluated plan is within the budget of its devices."""
        return all(stage.memory.total <= bytes_on(self.budget, stage.device) for stage in plan.stages)


def shapes_of(request: Request) -> list[Shape]:
    """Every shape to try; a schedule is left out beside another one under which no plan takes more time or memory."""
    shapes = []
    for stages in request.pipelines:
        counts = microbatch_counts(request.global_batch, request.fixed)
        for count, (schedule, virtual) in product(counts, _schedules(request, stages)):
            if schedule.suits(stages, count):
                shapes.append(Shape(request.devices, stages, count, request.global_batch // count, schedule, virtual))
    return shapes


def _schedules(request: Request, stages: int) -> list[tuple[Schedule, int]]:
    if stages == 1:
        return [(DEFAULT_SCHEDULE, 1)]  # there is no order to choose
    graph, pinned, offered = request.graph, request.fixed.virtual, []
    blocks = sum(layer.role is Role.BLOCK for layer in graph.layers)
    edges = len({layer.role for layer in graph.layers} - {Role.BLOCK})
    few = len(graph.kinds) <= _KINDS
    for schedule in request.schedules:
        if schedule.no_better_than not in request.schedules and request.offers(schedule, stages):
            choices = schedule.virtual_choices(stages, blocks, edges)
            offered += [(schedule, virtual) for virtual in choices if virtual == 1 or pinned or few]
    if request.fixed.even:
        offered = [pair for pair in offered if pair[1] == 1 or even_cuts(request.graph, stages * pair[1])]
    return [(schedule, virtual) for schedule, virtual in offered if pinned in (None, virtual)]


def widest_tables(problem: Problem, stage: int = 0) -> list[StrategyTable]:
    """A table of every layer of the model that bounds all that a stage may use."""
    tables, layers, glue = problem.tables[stage], problem.graph.layers, problem.choice.glue
    first = tables.store.alike(tables.fixed.layers)
    distinct = {place: tables.unpruned(layers[place].kind, layers[place].name) for place in {*first}}
    widest = [distinct[place] for place in first]
    for place, strategy in problem.choice.tied:
        widest[place] = widest[place].only(strategy)
    if glue is not None:
        for place, layer in enumerate(layers):
            if layer.role is not Role.BLOCK:
                widest[place] = widest[place].with_layouts(lambda layout: glue_of(layout) == glue)
    return widest


def open_problem(request: Request, pricer: LayerPricer, shape: Shape) -> Problem:
    """The problem of a shape with nothing else settled; the same one for all requests made of one another."""
    pins = request.fixed

    def opened() -> Problem:
        fixed = request.under(shape.schedule) if shape.stages > 1 else pins
        fixed = replace(fixed, pipeline=None, microbatches=None, schedule=None, virtual=None)
        tables, budgets = list[Tables](), list[int]()
        for group in range(shape.stages if request.cluster is not None else 1):
            priced = pricer.of_group(shape.stage_devices, group)
            budgets.append(bytes_on(request.budget, "" if priced is pricer else priced.profile.cluster.device.name))
            tables.append(request.tables(priced, shape, fixed))
        alike = shape.stages // len(tables)
        problem = Problem(request.graph, pricer, shape, tuple(tables) * alike, OPEN, tuple(budgets) * alike)
        return replace(problem, hidden=request.hidden)

    key = (id(pricer), shape, pins.strategy, pins.layers, pins.forbidden, pins.even, request.budget, request.hidden)
    problem = request.problems.once(key, opened)
    return request.problems.once((*key, request.runs), lambda: replace(problem, runs=request.runs))


def with_ties(problem: Problem) -> Iterator[Problem]:
    """The problem with its layouts at the edges, under every choice of strategies for tied layers; those are dropped
    that another one dominates for all layers of a group at once."""
    options, glue = [], problem.choice.glue
    for group in tied_groups(problem.graph):
        first, *others = tied_tables(problem, group)
        undominated = first.undominated(problem.form, others)
        if glue is not None and any(problem.graph.layers[place].role is not Role.BLOCK for place in group):
            undominated = undominated.with_layouts(lambda layout: glue_of(layout) == glue)
        options.append([tuple((place, strategy) for place in group) for strategy in undominated.strategies])
    for groups in product(*options):
        tied = tuple(pair for group in groups for pair in group)
        yield replace(problem, choice=replace(problem.choice, tied=tied))


def with_edges(problem: Problem) -> Iterator[Problem]:
    """The problem under every choice of layouts at the edges of the one stage, or at the boundaries of several."""
    layers = problem.graph.layers
    glues: Sequence[Glue | None] = [None]
    wires: Sequence[Layout | None] = [None]
    if problem.shape.stages > 1:
        kinds = {(layer.kind, problem.tables[0].fixed.pins_of(layer.name)): layer for layer in layers}
        wires = sorted({layout for layer in kinds.values() for layout in _layouts(problem, layer)})
    elif is_glued(problem.graph):
        edges = [layer for layer in layers if layer.role is not Role.BLOCK]
        offered = [{glue_of(layout) for layout in _layouts(problem, layer)} for layer in edges]
        glues = sorted(set.intersection(*offered))
    for glue, wire in product(glues, wires):
        yield replace(problem, choice=SharedChoice(glue, wire, ()))


def bounds_of(problem: Problem) -> StageBounds | None:
    """Lower bounds of a problem; None where nothing fits."""
    return problem.answers.memo.once(problem.choice, lambda: relaxed(problem, _tables_by_stage(problem)))


def average_of(problem: Problem) -> float:
    """A lower bound of a problem that costs less to compute."""
    return averaged(problem, _tables_by_stage(problem))


def _tables_by_stage(problem: Problem) -> list[list[StrategyTable]]:
    """``widest_tables`` of every stage, the same list for stages with the same tables."""
    stages = {id(tables): stage for stage, tables in enumerate(problem.tables)}
    widest = {key: widest_tables(problem, stage) for key, stage in stages.items()}
    return [widest[id(tables)] for tables in problem.tables]


def _layouts(problem: Problem, layer: Layer) -> list[Layout]:
    table = problem.tables[0].unpruned(layer.kind, layer.name)
    return [table.options.layouts[code] for code in table.present]


def tied_tables(problem: Problem, group: tuple[int, ...]) -> list[StrategyTable]:
    """What strategies that all layers of a group offer cost each of them, in any stages that they may be in."""
    layers = [(place, problem.graph.layers[place]) for place in group]
    tables = [
        stage_tables.unpruned(layer.kind, layer.name, sharing)
        for stage_tables in {id(tables): tables for tables in problem.tables}.values()
        for place, layer in layers
        for sharing in _sharings(problem, group, place)
    ]
    return problem.tables[0].store.common(tables)


def _sharings(problem: Problem, group: tuple[int, ...], place: int) -> list[ParameterSharing]:
    """What a layer may share in its stage: with all of its group there, with some of it, and alone."""
    if problem.shape.stages == 1:
        return [sharing_of(problem.graph, range(len(problem.graph.layers)))[place]]
    ranges = [range(group[0], group[-1] + 1), range(place, place + 1)]
    if len(group) > 2:
        ranges += [range(a, b + 1) for a in group for b in group if a <= place <= b]
    return list(dict.fromkeys(sharing_of(problem.graph, inside).get(place, ALONE) for inside in ranges))


@dataclass(slots=True)
class Session:
    """Prices of a profile, shared by calls of ``find_plan``: they return the same plans, only sooner."""

    profile: Profile  # what layers and communication cost
    mode: Mode = Mode.TRAINING  # what plans are for
    pricer: LayerPricer = field(init=False)  # of the profile in that mode
    _spaces: dict[str, tuple[Space, Memo]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pricer = LayerPricer(for_mode(self.profile, self.mode))

    def space(self, backend: Backend) -> tuple[Space, Memo]:
        """The strategies that a backend runs, and their figures."""
        if backend.name not in self._spaces:
            cluster, offered = self.profile.cluster, in_mode(backend, self.mode)
            space = Space(self.profile.graph, cluster.levels[0].size, offered, cluster.device.host_bandwidth > 0)
            self._spaces[backend.name] = (space, Memo())
        return self._spaces[backend.name]
