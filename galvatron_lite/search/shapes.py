"""The outer choices: pipeline degree, micro-batch count, schedule, layouts at the edges, strategies of tied layers.

They form a tree. Every node has a lower bound on the step time of what lies under it, so that the planner can take the
most promising node first and stop as soon as no bound is below the best plan it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from galvatron_lite.cost.layer import LayerPricer, Sharing
from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.problem import Choice, Layout, Problem
from galvatron_lite.search.relax import Relaxed, relaxed
from galvatron_lite.search.space import Fixed, microbatch_counts, pipeline_degrees
from galvatron_lite.search.tables import Table, Tables

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
    """

    graph: ModelGraph
    devices: int
    global_batch: int
    budget: int
    fixed: Fixed
    schedules: tuple[Schedule, ...]


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
        own = problem.tables.table(problem.graph.layers[place].kind, Sharing())
        every[place] = own.where(lambda option, wanted=strategy: option == wanted)  # type: ignore[misc]
    return every


def open_problem(request: Request, pricer: LayerPricer, shape: Shape) -> Problem:
    """The problem of a shape with nothing else settled."""
    return Problem(request.graph, shape, Tables(pricer, shape, request.fixed), OPEN, request.budget)


def settled(problem: Problem) -> Iterator[Problem]:
    """The problem under every choice of edge layouts and of strategies for tied layers."""
    for tied, edge in product(_tied_choices(problem), _edge_choices(problem)):
        glue, wire = edge
        if all(glue is None or (s.batch_degree, s.tensor) == glue for place, s in tied if _is_edge(problem, place)):
            yield Problem(problem.graph, problem.shape, problem.tables, Choice(glue, wire, tied), problem.budget)


def bounds_of(problem: Problem) -> Relaxed | None:
    """Lower bounds of a problem; None where nothing fits."""
    return relaxed(problem, widest_tables(problem))


def _is_edge(problem: Problem, place: int) -> bool:
    return problem.graph.layers[place].role is not Role.BLOCK


def _edge_choices(problem: Problem) -> list[tuple[tuple[int, int] | None, Layout | None]]:
    """Layouts to try at the edges of the one stage, or at the boundaries between several."""
    layers = problem.graph.layers
    if problem.shape.stages > 1:
        wires = {own for layer in layers for own in problem.tables.table(layer.kind).layouts}
        return [(None, wire) for wire in sorted(wires)]
    edges = [layer for layer in layers if layer.role is not Role.BLOCK]
    if len(edges) < 2:
        return [(None, None)]
    offered = [{own[:2] for own in problem.tables.table(layer.kind).layouts} for layer in edges]
    return [(glue, None) for glue in sorted(set.intersection(*offered))]


def _tied_choices(problem: Problem) -> list[tuple[tuple[int, Strategy], ...]]:
    """Strategies to try for each group of layers that share parameters; those never of use left out."""
    options = [_group_choices(problem, group) for group in tied_groups(problem.graph)]
    return [tuple(pair for group in groups for pair in group) for groups in product(*options)]


def _group_choices(problem: Problem, group: tuple[int, ...]) -> list[tuple[tuple[int, Strategy], ...]]:
    kinds = [problem.graph.layers[place].kind for place in group]
    tables = [problem.tables.table(kind, _apart(problem, place)) for kind, place in zip(kinds, group, strict=True)]
    common = set.intersection(*({*table.strategies} for table in tables))
    agreed = [table.where(lambda strategy: strategy in common) for table in tables]
    return [tuple((place, strategy) for place in group) for strategy in sorted({*agreed[0].strategies})]


def _apart(problem: Problem, place: int) -> Sharing:
    """Some sharing whose table is not thinned out: any strategy may suit the others of the group."""
    shared = (tie for tie in problem.graph.ties if problem.graph.layers[place].name in (tie.first, tie.second))
    return Sharing(exchanged=max(tie.parameters for tie in shared))
