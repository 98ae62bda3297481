"""Best-first search over shapes: what ``planner`` and its runner-ups both ask."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count
from math import inf

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.cost.stage import Shape
from galvatron_lite.parallelism.pipeline.schedule import SIMPLE
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.search.bounds.duals import score, scores_of
from galvatron_lite.search.bounds.refine import Refined, opened, refined
from galvatron_lite.search.bounds.relax import Relaxed
from galvatron_lite.search.partition import Partition, best_partition, quick_plan
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.result import plan_of
from galvatron_lite.search.shapes import (
    Request,
    average_of,
    bounds_of,
    open_problem,
    shapes_of,
    with_edges,
    with_tied,
    with_ties,
)
from galvatron_lite.search.uniform import Uniform, averaged, cuts_of

Progress = Callable[[int, int, str], None]
MOST_WORK = 60_000_000
"""Labels after which the search ends with the best plan it has; counted, not timed, so that results repeat."""
_FEW = 8
"""Shapes of uniform plans that are looked into for a plan to begin with."""
_QUICK_WORK, _LOOK = 60_000, 20_000
"""The same for a search that is not exact, and what one quick search of a shape counts besides its labels."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedPlan:
    """What the search ends with."""

    problem: Problem  # the winning shape
    partition: Partition  # its best plan
    gap: float = 0.0  # no plan of the space takes less than (1 - gap) of its time; 0.0: there is no better one
    # by pipeline degree and schedule the best plan met on the way, the winner among them
    others: tuple[SolvedPlan, ...] = ()
    stopped: bool = False  # whether the user stopped the search
    given: bool = False  # whether the plan is one that the user gave


def search(
    request: Request,
    pricer: LayerPricer,
    progress: Progress | None = None,
    exact: bool = True,
    stoppable: bool = False,
    start: SolvedPlan | None = None,
    effort: int = MOST_WORK,
    below: int | None = None,
    slack: float = 0.0,
    ahead: float = 0.0,
) -> SolvedPlan | None:
    """The best plan over all shapes; None where nothing fits.

    Args:
        request: what is planned.
        pricer: of the profile.
        progress: see ``find_plan``.
        exact: False: a good plan, soon, from quick searches of the most promising shapes of 1F1B or GPipe alone.
        stoppable: whether Ctrl-C ends the search with the best plan so far; where there is none it is raised.
        start: a plan to begin with: what is found beats it, or it is what the search ends with.
        effort: labels after which an exact search ends; looked at between one exact search of a shape and the next.
        below: picoseconds that a plan must take less than, to be of any use.
        slack: share by which a plan must be quicker than one that is there, to be of any use.
        ahead: the same where the one that is there is ``start``.
    """
    few = tuple(schedule for schedule in request.schedules if schedule in SIMPLE)
    if not exact and few and (request.fixed.virtual or 1) == 1:
        request = replace(request, schedules=few)
    walk = _Walk([], count(), effort if exact else _QUICK_WORK, exact, start, below=below, slack=slack)
    walk.known, walk.ahead = start, max(ahead, slack)
    stopped = False
    try:
        _walk(walk, request, pricer, progress)
    except KeyboardInterrupt:
        if not stoppable or walk.best is None:
            raise
        stopped = True
    return walk.end(stopped)


def _walk(walk: _Walk, request: Request, pricer: LayerPricer, progress: Progress | None) -> None:
    glance = request.known.glance(pricer.profile)
    shapes = shapes_of(request)
    for shape in shapes:
        problem = open_problem(request, pricer, shape)
        if shape.schedule is Schedule.INTERLEAVED:
            walk.interleaved.setdefault((shape.stages, shape.microbatches), []).append(problem)
        problem.answers.glanced = problem.answers.glanced or glance.bound(request.graph, shape)
        walk.push(problem, None, _Stage.GLANCED, problem.answers.glanced)
    done, total, begun = 0, len(shapes), False
    while (node := walk.pop()) is not None:
        if not begun and node.stage >= _Stage.PRICED and node.problem.shape.stages > 1 and walk.limit is None:
            begun = True
            _begin(walk)
        if node.stage is _Stage.GLANCED:
            done += 1
        if progress is not None:
            progress(done, total, _shape_text(node.problem.shape))
        _look_into(walk, node)
        walk.inside = None
    if progress is not None:
        progress(total, total, "done")


def _averaged(walk: _Walk, problem: Problem) -> float:
    """A quick bound of a shape; under interleaved 1F1B found for all numbers of stages a group at once."""
    shape = problem.shape
    if not problem.answers.averaged and shape.schedule is Schedule.INTERLEAVED:
        alike = walk.interleaved[shape.stages, shape.microbatches]
        for own, bound in zip(alike, averaged(alike), strict=True):
            own.answers.averaged = float(bound)
    problem.answers.averaged = problem.answers.averaged or average_of(problem)
    return problem.answers.averaged


def _begin(walk: _Walk) -> None:
    """A uniform plan to begin with: of the shapes that look best the one of least bound that fits."""
    every = [own for family in walk.interleaved.values() for own in family]
    few = sorted((own for own in every if own.answers.averaged), key=lambda own: own.answers.averaged)[:_FEW]
    bounds = [min(way.bound(runs=own.runs) for way in _uniform(own)) for own in few]
    for bound, problem in sorted(zip(bounds, few, strict=True), key=lambda pair: pair[0]):
        if 0.0 < bound < inf and walk.limit is None:
            _solve_uniform(walk, _Node(problem, None, _Stage.TRIED, bound))


def _shape_text(shape: Shape) -> str:
    order = "" if shape.schedule is Schedule.ONE_F_ONE_B else f"{shape.schedule.value}, "
    return f"{shape.stages} stages, {order}{shape.microbatches} micro-batches"


def _look_into(walk: _Walk, node: _Node) -> None:
    """Replace a node by what is found a step further."""
    problem = node.problem
    if node.stage is _Stage.GLANCED:
        walk.push(problem, None, _Stage.PRICED, max(node.bound, _averaged(walk, problem)))
    elif problem.shape.virtual > 1:
        _solve_uniform(walk, node)
    elif node.stage is _Stage.PRICED:
        walk.push_bounded(problem, _Stage.SHAPE, node.bound)
    elif problem.shape.stages > 1 and walk.exact:
        _cut_further(walk, node)
    elif node.stage is _Stage.SHAPE:
        for child in with_ties(problem):
            if child.choice.tied:
                walk.push_bounded(child, _Stage.TIED, node.bound)
            else:
                walk.push(child, node.bounds, _Stage.TIED, node.bound)
    elif node.stage is _Stage.TIED:
        for child in with_edges(problem):
            if child.choice.tied:
                walk.push(child, None, _Stage.EDGED, max(node.bound, walk.edge_bound(child)))
            else:
                walk.push_bounded(child, _Stage.SETTLED, node.bound)
    elif node.stage is _Stage.EDGED:
        walk.push_bounded(problem, _Stage.SETTLED, node.bound)
    elif node.stage is _Stage.SETTLED:
        before = problem.work
        cuts = (0, len(problem.graph.layers)) if node.bounds is None else tuple(node.bounds.cuts())
        walk.better(problem, quick_plan(problem, cuts, walk.limit))
        walk.work += problem.work - before + _LOOK
        if walk.exact:
            walk.push(problem, None, _Stage.TRIED, node.bound)
        else:
            walk.open = min(walk.open, node.bound)
    else:
        _solve(walk, node, None)


def _cut_further(walk: _Walk, node: _Node) -> None:
    """The same with several stages: layouts at boundaries first, then strategies of tied layers.

    Bounds are refined with strategies of tied layers left open; what that shows of stages without such layers holds
    under every choice of them.
    """
    problem = node.problem
    if node.stage is _Stage.SHAPE:
        for child in with_edges(problem):
            walk.push_bounded(child, _Stage.TIED, node.bound)
    elif node.stage is _Stage.TIED and node.bounds is not None:
        bounds = _refine(walk, problem, opened(node.bounds))
        tied = tuple(sorted(place for group in tied_groups(problem.graph) for place in group))
        if not walk.worth(bounds.bound):
            return
        scores, own = scores_of(problem, bounds, tied), bounds.opened(tied)
        for child in with_ties(problem):
            least = max(bounds.bound, score(scores, child.choice.tied))
            walk.push(child, None, _Stage.EDGED if tied else _Stage.TRIED, least, own)
    elif node.refined is not None and node.stage is _Stage.EDGED:
        bounds = _refine(walk, problem, node.refined)
        walk.push(problem, None, _Stage.TRIED, max(bounds.bound, node.bound), bounds)
    elif node.refined is not None:
        bounds = _refine(walk, problem, node.refined)
        if walk.worth(bounds.bound):
            _solve(walk, node, bounds)


def _refine(walk: _Walk, problem: Problem, bounds: Refined) -> Refined:
    """Sharper bounds; a plan that was met on the way is kept if it has all that is settled."""
    before = problem.work
    bounds, plan = refined(problem, bounds, walk.limit)
    walk.work += problem.work - before
    if problem.choice.tied or not tied_groups(problem.graph):
        walk.better(problem, plan)
    walk.work += _LOOK if plan is not None else 0
    return bounds


def _solve_uniform(walk: _Walk, node: _Node) -> None:
    """The best uniform plan of a node; looked for once plans of other nodes have had a chance to lower the limit."""
    ways = _uniform(node.problem)
    if node.stage is _Stage.PRICED:
        limit = inf if walk.limit is None else walk.limit
        walk.push(
            node.problem, None, _Stage.TRIED, max(node.bound, min(way.bound(limit, node.problem.runs) for way in ways))
        )
    else:
        walk.work += _LOOK
        for way in ways:
            walk.better(node.problem, way.best(walk.limit, node.problem.runs))


def _uniform(problem: Problem) -> list[Uniform]:
    """The uniform plans of a shape, by cuts."""
    ways, shape = problem.answers.uniform, problem.shape
    if not ways:
        ways += [Uniform(problem, cuts) for cuts in cuts_of(problem.graph, shape.stages * shape.virtual)]
    return ways


def _solve(walk: _Walk, node: _Node, bounds: Refined | None) -> None:
    """The best plan of a node."""
    problem, before = node.problem, node.problem.work
    best = best_partition(problem, bounds, walk.limit)
    walk.better(problem, best.plan)
    walk.open = min(walk.open, best.least)
    walk.work += problem.work - before


class _Stage(IntEnum):
    """How far a node of the tree has been looked into."""

    GLANCED = 0
    PRICED = 1
    SHAPE = 2
    TIED = 3
    EDGED = 4
    SETTLED = 5
    TRIED = 6


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    problem: Problem
    bounds: Relaxed | None
    stage: _Stage
    bound: float
    refined: Refined | None = None


@dataclass(slots=True)
class _Walk:
    """Nodes in the order they are looked into, and the best plan so far."""

    heap: list[tuple[float, int, _Node]]  # (rank, number, node); the rank is the node's bound, or what ``_later`` says
    order: Iterator[int]  # gives the numbers
    most_work: int  # labels after which the search ends; an exact one only once there is a plan
    exact: bool  # exact, below, slack: see ``search``
    best: SolvedPlan | None = None  # plan so far
    work: int = 0  # labels looked at
    open: float = inf  # a time that no plan beats in the nodes that were looked into but not to the end
    inside: _Node | None = None  # the node that is being looked into
    # best plan so far by pipeline degree and schedule
    met: dict[tuple[int, Schedule], SolvedPlan] = field(default_factory=dict)
    # bound by shape and layouts at the edges, whatever the strategies of tied layers
    edges: dict[tuple[object, ...], float] = field(default_factory=dict)
    # shapes of interleaved 1F1B by pipeline degree and micro-batches: they differ in the stages of each group
    interleaved: dict[tuple[int, int], list[Problem]] = field(default_factory=dict)
    below: int | None = None
    slack: float = 0.0
    known: SolvedPlan | None = None  # known, ahead: see ``search``
    ahead: float = 0.0

    @property
    def limit(self) -> int | None:
        """What a plan must beat."""
        if self.best is None:
            return self.below
        slack = self.ahead if self.best is self.known else self.slack
        return self.best.partition.time - int(slack * self.best.partition.time)

    def worth(self, bound: float) -> bool:
        """Whether a bound leaves room for a better plan."""
        return self.limit is None or bound < self.limit

    def push(
        self, problem: Problem, bounds: Relaxed | None, stage: _Stage, bound: float, sharper: Refined | None = None
    ) -> None:
        """Add a node, unless it is known to lead nowhere."""
        if not self.worth(bound) or bound == inf:
            return
        rank = self._later(bound) if stage is _Stage.TRIED else bound
        heapq.heappush(self.heap, (rank, next(self.order), _Node(problem, bounds, stage, bound, sharper)))

    def push_bounded(self, problem: Problem, stage: _Stage, least: float) -> None:
        """Add a node with its bounds."""
        bounds = bounds_of(problem)
        if bounds is not None:
            self.push(problem, bounds, stage, max(bounds.bound, least))

    def edge_bound(self, problem: Problem) -> float:
        """The bound of the layouts at the edges alone: the same for many choices for tied layers."""
        key = (problem.shape, problem.choice.glue, problem.choice.wire)
        if key not in self.edges:
            bounds = bounds_of(with_tied(problem, ()))
            self.edges[key] = inf if bounds is None else bounds.bound
        return self.edges[key]

    def _later(self, bound: float) -> float:
        """Rank of an exact search: after quick ones that have a chance to lower the limit it runs under."""
        return bound if self.limit is None else (bound + self.limit) / 2

    def pop(self) -> _Node | None:
        """The most promising node; None where none can lead to a better plan, or where enough work was done."""
        while self.heap:
            node = heapq.heappop(self.heap)[2]
            if not self.worth(node.bound):
                continue
            if self.work < self.most_work or (self.exact and self.best is None and self.below is None):
                self.inside = node
                return node
            self.open = min(self.open, node.bound)
        return None

    def better(self, problem: Problem, partition: Partition | None) -> None:
        """Keep a plan that beats the best so far, and one that beats those of its degree and schedule."""
        if partition is None:
            return
        key = (problem.shape.stages, problem.shape.schedule)
        known = self.met.get(key)
        if known is None or partition.time < known.partition.time:
            self.met[key] = SolvedPlan(problem, partition)
        if self.worth(partition.time):
            self.best = SolvedPlan(problem, partition)

    def end(self, stopped: bool) -> SolvedPlan | None:
        """The best plan, and how far from the best there is it may be."""
        if self.best is None:
            return None
        least = min(self.open, self.limit or inf) if self.slack or self.ahead else self.open
        if stopped:
            left = [node.bound for _, _, node in self.heap] + ([] if self.inside is None else [self.inside.bound])
            least = min([least, *left])
        gap, before = max(1.0 - least / self.best.partition.time, 0.0), self.known.others if self.known else ()
        return replace(self.best, gap=gap, others=(*self.met.values(), *before), stopped=stopped)


def finished(request: Request, pricer: LayerPricer, result: SolvedPlan) -> Plan:
    """The plan of a search's end, with its prediction."""
    return price_plan(pricer, plain(request, result))


def plain(request: Request, result: SolvedPlan) -> Plan:
    """The plan of a search's end, without prediction."""
    shape = result.problem.shape
    plan = plan_of(
        request.graph,
        devices=request.devices,
        global_batch=request.global_batch,
        microbatches=shape.microbatches,
        cuts=result.partition.cuts,
        strategies=[strategy for stage in result.partition.stages for strategy in stage.strategies],
        schedule=shape.schedule,
    )
    return replace(plan, virtual_stages=shape.virtual)
