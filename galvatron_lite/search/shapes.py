"""The outer choices: pipeline degree, micro-batch count, schedule, layouts at the edges, strategies of tied layers.

They form a tree. Every node has a lower bound on the step time of what lies under it, so that the planner can take the
most promising node first and stop as soon as no bound is below the best plan it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from galvatron_lite.cost.layer import ALONE, LayerPricer, Sharing, layout
from galvatron_lite.cost.sharing import sharing_of, tied_groups
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.problem import Choice, Problem
from galvatron_lite.search.relax import Relaxed, relaxed
from galvatron_lite.search.space import Fixed, Space, microbatch_counts, pipeline_degrees
from galvatron_lite.search.tables import Glue, Layout, Table, Tables, glue_of

OPEN = Choice(None, None, ())
"""Nothing settled: the widest problem of a shape."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is planned.

    Attributes:
        graph: the model.
        devices: world size.
        global_batch: samples a step.
        budget: bytes a device.
        fixed: what is not searched.
        schedules: to choose from.
        space: the strategies to choose from.
        tables: figures by shape and pinned strategy, remembered for all searches of a request.
    """

    graph: ModelGraph
    devices: int
    global_batch: int
    budget: int
    fixed: Fixed
    schedules: tuple[Schedule, ...]
    space: Space
    tables: dict[tuple[Shape, tuple[tuple[str, object], ...]], Tables] = field(default_factory=dict, compare=False)


def shapes_of(request: Request) -> list[Shape]:
    """Every shape to try; one stage has no schedule to choose."""
    shapes = []
    for stages in pipeline_degrees(request.devices, len(request.graph.layers), request.fixed):
        schedules = request.schedules if stages > 1 else (Schedule.ONE_F_ONE_B,)
        for count, schedule in product(microbatch_counts(request.global_batch, request.fixed), schedules):
            shapes.append(Shape(request.devices, stages, count, request.global_batch // count, schedule))
    return shapes


def widest_tables(problem: Problem) -> list[Table]:
    """A table of every layer of the model that bounds all that its stages may use."""
    tied = dict(problem.choice.tied)
    every = [problem.tables.table(layer.kind) for layer in problem.graph.layers]
    for place, strategy in tied.items():
        every[place] = _lowest(problem, place).where(lambda option, wanted=strategy: option == wanted)  # type: ignore[misc]
    glue = problem.choice.glue
    if glue is None:
        return every
    edges = [place for place, layer in enumerate(problem.graph.layers) if layer.role is not Role.BLOCK]
    for place in edges:
        every[place] = every[place].where(lambda option: glue_of(layout(option)) == glue)
    return every


def _lowest(problem: Problem, place: int) -> Table:
    """The table of a tied layer that no table of another stage's layers undercuts: nothing shared, nothing left out."""
    return problem.tables.table(problem.graph.layers[place].kind, ALONE, thinned=False)


def open_problem(request: Request, pricer: LayerPricer, shape: Shape) -> Problem:
    """The problem of a shape with nothing else settled."""
    key = (shape, request.fixed.strategy)
    known = request.tables.get(key)
    if known is None or known.pricer is not pricer:
        known = request.tables[key] = Tables(pricer, shape, request.fixed, request.space)
    return Problem(request.graph, shape, known, OPEN, request.budget)


def settled(problem: Problem) -> Iterator[Problem]:
    """The problem under every choice of edge layouts and of strategies for tied layers."""
    for tied, edge in product(_tied_choices(problem), _edge_choices(problem)):
        glue, wire = edge
        if all(glue is None or glue_of(layout(s)) == glue for place, s in tied if _is_edge(problem, place)):
            yield Problem(problem.graph, problem.shape, problem.tables, Choice(glue, wire, tied), problem.budget)


def bounds_of(problem: Problem) -> Relaxed | None:
    """Lower bounds of a problem; None where nothing fits."""
    return relaxed(problem, widest_tables(problem))


def _is_edge(problem: Problem, place: int) -> bool:
    return problem.graph.layers[place].role is not Role.BLOCK


def _edge_choices(problem: Problem) -> list[tuple[Glue | None, Layout | None]]:
    """Layouts to try at the edges of the one stage, or at the boundaries between several."""
    layers = problem.graph.layers
    if problem.shape.stages > 1:
        wires = {own for layer in layers for own in problem.tables.table(layer.kind).layouts}
        return [(None, wire) for wire in sorted(wires)]
    edges = [layer for layer in layers if layer.role is not Role.BLOCK]
    if len(edges) < 2:
        return [(None, None)]
    offered = [{glue_of(own) for own in problem.tables.table(layer.kind).layouts} for layer in edges]
    return [(glue, None) for glue in sorted(set.intersection(*offered))]


def _tied_choices(problem: Problem) -> list[tuple[tuple[int, Strategy], ...]]:
    """Strategies to try for each group of layers that share parameters; those never of use left out."""
    options = [_group_choices(problem, group) for group in tied_groups(problem.graph)]
    return [tuple(pair for group in groups for pair in group) for groups in product(*options)]


def _group_choices(problem: Problem, group: tuple[int, ...]) -> list[tuple[tuple[int, Strategy], ...]]:
    """Strategies that all layers of a group offer, without those that another one beats for all of them at once."""
    tables = [
        problem.tables.table(problem.graph.layers[place].kind, sharing)
        for place in group
        for sharing in _sharings(problem, group, place)
    ]
    common = set.intersection(*({*table.strategies} for table in tables))
    first, *others = (table.where(lambda strategy: strategy in common) for table in tables)
    return [tuple((place, strategy) for place in group) for strategy in first.undominated(others).strategies]


def _sharings(problem: Problem, group: tuple[int, ...], place: int) -> list[Sharing]:
    """What sharing may mean for a layer: with the whole group in its stage, and alone in its stage."""
    if problem.shape.stages == 1:
        return [sharing_of(problem.graph, range(len(problem.graph.layers)))[place]]
    ranges = [range(group[0], group[-1] + 1), range(place, place + 1)]
    if len(group) > 2:
        ranges += [range(a, b + 1) for a in group for b in group if a <= place <= b]
    return list(dict.fromkeys(sharing_of(problem.graph, inside).get(place, ALONE) for inside in ranges))
