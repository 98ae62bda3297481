"""Best-first search over shapes of plan: the most promising first, until no bound is below the best plan.

A shape (pipeline degree, schedule, micro-batches) is looked into step by step, each with sharper bounds (``bounds``):
compute alone, averages, every stage's layers by themselves; then layouts at boundaries are settled (``with_edges``),
then strategies of layers that share parameters (``with_ties``). In between, the stages of the cut that looks best are
solved by shortest paths (``chain_labels.good_path``), which gives plans, too. What is left below the best plan is then
solved exactly: single stages first, then all stages of all cuts (``best_partition``). Shapes whose groups of devices
run several stages have plans of their own (``uniform``).

Stages s = 0..p-1 hold layers [e_s, e_{s+1}); a stage has bottleneck parts c_sk and work once a step u_s, from its
Pareto set. With the closed form of the schedule (``cost.schedule.Form``) labels over all cuts minimise

    sum_k (ramp_k sum_s c_sk + rounds_k max_s c_sk) + max_s u_s

subject to 0 = e_0 < e_1 < ... < e_p = L, and every stage within the memory of its device. A label for (stages so far,
layers so far) is (ramp, max of each part, max step); all updates are monotone, so labels that another one equals or
beats go, and so do labels whose bound reaches the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count, pairwise
from math import inf

import numpy as np

from galvatron_lite.arrays import IntArray
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape, tied_groups
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import Form
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Plan, Schedule
from galvatron_lite.search.bounds import StageBounds, averaged_uniform
from galvatron_lite.search.problem import Partition, Problem, StagePlan, cuts_of, step_time, weighted
from galvatron_lite.search.result import plan_of
from galvatron_lite.search.shapes import (
    Request,
    average_of,
    bounds_of,
    open_problem,
    shapes_of,
    with_edges,
    with_ties,
)
from galvatron_lite.search.tables import pareto_rows
from galvatron_lite.search.uniform import Uniform

Progress = Callable[[int, int, str], None]
MOST_WORK = 60_000_000
"""Labels after which the search ends with the best plan it has; counted, not timed, so that results repeat."""
ANY_TIME = 2**62
"""Picoseconds that any plan takes less than."""
QUICK = 60_000
"""The same for a good plan, soon; with ``below``, else it goes on to the first plan."""
_LOOK, _STAGE = 20_000, 2_000
"""What a look at uniform plans, and at one stage, counts besides labels."""
_MOST_STAGES = 96
"""Stages that are solved at most for one bound."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedPlan:
    """What the search ends with."""

    problem: Problem  # the winning shape
    partition: Partition  # its best plan
    gap: float = 0.0  # no plan of the space takes less than (1 - gap) of its time; 0.0: there is no better one
    others: tuple[SolvedPlan, ...] = ()  # by pipeline degree and schedule the best plan met, the winner among them
    stopped: bool = False  # whether the user stopped the search
    from_user: bool = False  # whether the plan is one that the user gave


def search(
    request: Request,
    pricer: LayerPricer,
    progress: Progress | None = None,
    stoppable: bool = False,
    start: SolvedPlan | None = None,
    effort: int = MOST_WORK,
    below: float = inf,
    slack: float = 0.0,
    settled: float = 0.0,
) -> SolvedPlan | None:
    """The best plan over all shapes; None where nothing fits, or pins leave no shape.

    Args:
        request: what is planned.
        pricer: of the profile.
        progress: called with (shapes done, shapes in all, what is being looked at).
        stoppable: whether Ctrl-C ends the search with the best plan so far; where there is none it is raised.
        start: a plan to begin with: what is found beats it, or it is what the search ends with.
        effort: labels after which an exact search ends.
        below: picoseconds that a plan must take less than, to be of any use.
        slack: share by which plans may be quicker than the one that is found.
        settled: the same for plans that only labels find.
    """
    try:
        shapes = shapes_of(request)
    except InputError:
        return None
    walk = _Walk(effort, start, start, below, slack, settled)
    stopped = False
    try:
        walk.run(request, shapes, pricer, progress)
    except KeyboardInterrupt:
        if not stoppable or walk.best is None:
            raise
        stopped = True
    return walk.end(stopped)


class _Stage(IntEnum):
    """How far a node of the tree has been looked into."""

    GLANCED = 0
    PRICED = 1
    SHAPE = 2
    EDGED = 3
    SETTLED = 4
    TRIED = 5


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    shape: Shape
    stage: _Stage
    bound: float
    problem: Problem | None = None  # None: only glanced at
    bounds: StageBounds | None = None


@dataclass(slots=True)
class _Walk:
    """Nodes in the order they are looked into, and the best plan so far."""

    most_work: int  # labels after which the search ends; only once there is a plan
    best: SolvedPlan | None  # plan so far
    start: SolvedPlan | None
    below: float  # below, slack, settled: see ``search``
    slack: float
    settled: float
    heap: list[tuple[float, int, _Node]] = field(default_factory=list)  # (bound, number, node)
    order: Iterator[int] = field(default_factory=count)  # gives the numbers
    work: int = 0  # labels looked at
    open: float = inf  # a time that no plan beats in the nodes that were looked into but not to the end
    inside: _Node | None = None  # the node that is being looked into
    met: dict[tuple[int, Schedule], SolvedPlan] = field(default_factory=dict)  # best by pipeline degree and schedule
    # shapes of front-loaded schedules that differ in the stages of each group alone
    front_loaded: dict[tuple[Schedule, int, int], list[Shape]] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """What bounds must be below for a plan to be looked for; infinite where any plan will do."""
        if self.best is None:
            return self.below
        return self.best.partition.time - int(self.slack * self.best.partition.time)

    def worth(self, bound: float) -> bool:
        """Whether a bound leaves room for a better plan."""
        return bound < self.limit

    def push(self, problem: Problem, stage: _Stage, bound: float, bounds: StageBounds | None = None) -> None:
        """Add a node, unless it leads nowhere."""
        if self.worth(bound):
            heapq.heappush(self.heap, (bound, next(self.order), _Node(problem.shape, stage, bound, problem, bounds)))

    def pop(self) -> _Node | None:
        """The most promising node; None where none can lead to a better plan, or where enough work was done."""
        while self.heap:
            node = heapq.heappop(self.heap)[2]
            if not self.worth(node.bound):
                continue
            if node.stage is _Stage.TRIED and self._is_settled(node):
                self.open = min(self.open, node.bound)
                continue
            if self.work < self.most_work or (self.best is None and self.below == inf):
                self.inside = node
                return node
            self.open = min(self.open, node.bound)
        return None

    def _is_settled(self, node: _Node) -> bool:
        """Whether the labels that a node asks for would lead to a plan that is hardly quicker."""
        least = inf if self.best is None else self.best.partition.time * (1.0 - self.settled)
        return node.shape.virtual == 1 and node.bound >= least

    def better(self, problem: Problem, partition: Partition | None) -> None:
        """Keep a plan that beats the best so far, and one that beats those of its degree and schedule."""
        if partition is None:
            return
        key = (problem.shape.stages, problem.shape.schedule)
        reached = self.met.get(key)
        if reached is None or partition.time < reached.partition.time:
            self.met[key] = SolvedPlan(problem, partition)
        most = self.below if self.best is None else self.best.partition.time
        if partition.time < most:
            self.best = SolvedPlan(problem, partition)

    def end(self, stopped: bool) -> SolvedPlan | None:
        """The best plan, and how far from the best there is it may be."""
        if self.best is None:
            return None
        least = min(self.open, self.limit) if self.slack else self.open
        if stopped:
            left = [node.bound for _, _, node in self.heap] + ([] if self.inside is None else [self.inside.bound])
            least = min([least, *left])
        gap, before = max(1.0 - least / self.best.partition.time, 0.0), self.start.others if self.start else ()
        return replace(self.best, gap=gap, others=(*self.met.values(), *before), stopped=stopped)

    def run(self, request: Request, shapes: Sequence[Shape], pricer: LayerPricer, progress: Progress | None) -> None:
        """Looks into nodes until none is left."""
        compute_bounds = request.prices.compute_bounds(pricer.profile)
        for shape in shapes:
            bound = compute_bounds.bound(request.graph, shape)
            if request.wider is not None and self.worth(bound):
                answers = open_problem(request.wider, pricer, shape).answers
                bound = max(bound, answers.averaged, answers.relaxed)
            if self.worth(bound):
                heapq.heappush(self.heap, (bound, next(self.order), _Node(shape, _Stage.GLANCED, bound)))
                if shape.schedule.front_loaded:
                    key = shape.schedule, shape.stages, shape.microbatches
                    self.front_loaded.setdefault(key, []).append(shape)
        done = 0
        while (node := self.pop()) is not None:
            done += node.stage is _Stage.GLANCED
            if progress is not None:
                progress(done, len(shapes), _shape_text(node.shape))
            if node.problem is None:
                problem = open_problem(request, pricer, node.shape)
                self.push(problem, _Stage.PRICED, max(node.bound, self._averaged(request, problem)))
            else:
                self._look_into(node, node.problem)
            self.inside = None
        if progress is not None:
            progress(len(shapes), len(shapes), "done")

    def _averaged(self, request: Request, problem: Problem) -> float:
        """A quick bound of a shape; under front-loaded schedules found for all numbers of stages a group at once."""
        shape = problem.shape
        if not problem.answers.averaged and shape.schedule.front_loaded:
            shapes = self.front_loaded.pop((shape.schedule, shape.stages, shape.microbatches), [])
            alike = [open_problem(request, problem.pricer, shape) for shape in shapes]
            for alike_problem, bound in zip(alike, averaged_uniform(alike), strict=True):
                alike_problem.answers.averaged = float(bound)
        problem.answers.averaged = problem.answers.averaged or average_of(problem)
        return problem.answers.averaged

    def _look_into(self, node: _Node, problem: Problem) -> None:
        tied = tied_groups(problem.graph)
        if problem.shape.virtual > 1:
            self._solve_uniform(node, problem)
        elif node.stage is _Stage.PRICED:
            self._push_bounded(problem, _Stage.SHAPE, node.bound)
        elif node.stage is _Stage.SHAPE:
            for child in with_edges(problem):
                self._push_bounded(child, _Stage.EDGED, node.bound)
        elif node.bounds is None:
            return
        elif node.stage is _Stage.EDGED and tied:
            # with strategies of tied layers left open
            bounds = self._refined(problem, node.bounds)
            if self.worth(bounds.bound):
                for child in with_ties(problem):
                    self.push(child, _Stage.SETTLED, max(bounds.bound, node.bound), bounds.opened)
        elif node.stage is not _Stage.TRIED:
            bounds = self._refined(problem, node.bounds, accepted=True)
            self.push(problem, _Stage.TRIED, max(bounds.bound, node.bound), bounds)
        else:
            bounds = self._refined(problem, node.bounds, accepted=True, exact=True)
            if self.worth(bounds.bound):
                self._solve(problem, bounds)

    def _push_bounded(self, problem: Problem, stage: _Stage, least: float) -> None:
        bounds = bounds_of(problem)
        if stage is _Stage.SHAPE:
            problem.answers.relaxed = inf if bounds is None else bounds.bound
        if bounds is not None:
            self.push(problem, stage, max(bounds.bound, least), bounds)

    def _solve(self, problem: Problem, bounds: StageBounds) -> None:
        """The best plan of a node by labels over all cuts; one stage was solved exactly."""
        if problem.shape.stages == 1:
            every_layer = range(len(problem.graph.layers))
            self.open = min(self.open, problem.quickest(0, every_layer, self.limit - 1, self.settled)[1])
            return
        before = problem.work
        plan, least = best_partition(problem, bounds, self.limit)
        self.better(problem, plan)
        self.open = min(self.open, least)
        self.work += problem.work - before

    def _solve_uniform(self, node: _Node, problem: Problem) -> None:
        """The best uniform plan of a node; looked for once other nodes have had a chance to lower the limit."""
        if node.stage is _Stage.PRICED:
            least = min(plans.bound(self.limit, problem.runs) for plans in _uniform(problem))
            self.push(problem, _Stage.TRIED, max(node.bound, least))
        else:
            self.work += _LOOK
            for plans in _uniform(problem):
                self.better(problem, plans.best(self.limit, problem.runs))

    def _refined(
        self, problem: Problem, bounds: StageBounds, *, accepted: bool = False, exact: bool = False
    ) -> StageBounds:
        """Sharper bounds, by solving the stages of the cut that looks best until another one does.

        Args:
            problem: of the bounds.
            bounds: to begin with.
            accepted: whether what is met on the way is a plan.
            exact: whether stages are solved exactly where shortest paths leave a gap.
        """
        before = problem.work
        for _ in range(_MOST_STAGES):
            if not self.worth(bounds.bound):
                break
            cuts = bounds.cuts()
            stages = [(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
            todo = [place for place in stages if place not in bounds.looked]
            if todo:
                self.work += _STAGE * len(todo)
                values = {place: problem.good(place[0], range(*place[1:]))[1] for place in todo}
                bounds = bounds.with_theta(values, exact=False)
                continue
            if accepted:
                self.better(problem, _combined(problem, cuts))
                if not self.worth(bounds.bound):
                    break
            todo = [place for place in stages if exact and place not in bounds.timed]
            if not todo:
                break
            place = max(todo, key=lambda place: float(bounds.excess[place[0]][place[1:]]))
            cap = self.limit - 1 - bounds.others(*place)
            bounds = bounds.with_theta({place: problem.quickest(place[0], range(*place[1:]), cap, self.settled)[1]})
        self.work += problem.work - before
        return bounds


def _combined(problem: Problem, cuts: list[int]) -> Partition | None:
    """The quickest ways that are known to run some stages."""
    chosen = [problem.met(stage, range(*ends)) for stage, ends in enumerate(pairwise(cuts))]
    stages = [stage for stage in chosen if stage is not None]
    if len(stages) < len(chosen):
        return None
    return Partition(step_time(stages, problem.form), tuple(cuts), tuple(stages))


def _uniform(problem: Problem) -> list[Uniform]:
    cuts = cuts_of(problem.graph, problem.shape.stages * problem.shape.virtual)
    return problem.answers.memo.once("uniform", lambda: [Uniform(problem, cut) for cut in cuts])


def _shape_text(shape: Shape) -> str:
    order = "" if shape.schedule is DEFAULT_SCHEDULE else f"{shape.schedule}, "
    return f"{shape.stages} stages, {order}{shape.microbatches} micro-batches"


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


def best_partition(problem: Problem, bounds: StageBounds, limit: float) -> tuple[Partition | None, float]:
    """The best plan of a shape of several stages that takes less than ``limit`` picoseconds; and a time that no plan
    below the limit beats.

    Args:
        problem: with everything settled.
        bounds: of it.
        limit: picoseconds.
    """
    layers, least, stages, form = len(problem.graph.layers), np.inf, problem.shape.stages, problem.form
    # by layers so far, the figures (labels, columns) of each label, and its stages with where they end
    front: dict[int, _Front] = {0: (np.zeros((1, len(problem.weights) + 1), dtype=np.int64), [()])}
    for stage in range(stages):
        reached: dict[int, list[tuple[_Front, list[StagePlan]]]] = {}
        for start, labels in sorted(front.items()):
            later = stages - stage - 1
            for stop in range(start + 1, layers - later + 1) if later else (layers,):
                through = bounds.through(stage, start, stop)
                if through < limit:
                    others = bounds.others(stage, start, stop)
                    options, dropped = problem.plans(stage, range(start, stop), limit - others)
                    # A plan with an option left out takes that option's time alone and what other layers need.
                    least = min(least, max(through, dropped + others))
                    if options:
                        reached.setdefault(stop, []).append((labels, options))
        front = {}
        for stop, pairs in reached.items():
            joined = _joined(pairs, stop, form, limit - bounds.least_after(stage, stop))
            if joined[1]:
                front[stop] = joined
    ends = [
        Partition(step_time(chosen, form), (0, *cuts), chosen)
        for cuts, chosen in (zip(*path, strict=True) for path in front.get(layers, (None, []))[1])
    ]
    best = min(ends, key=lambda plan: (plan.time, plan.cuts), default=None)
    return best, least if best is None else min(least, best.time)


_Front = tuple[IntArray, list[tuple[tuple[int, StagePlan], ...]]]


def _joined(pairs: list[tuple[_Front, list[StagePlan]]], stop: int, form: Form, limit: float) -> _Front:
    """Labels each with each of the ways to run the stage after them, which ends before layer ``stop``: those that so
    far take less than the limit and are not beaten; a label is beaten by none that takes longer."""
    every = []
    for (before, _), options in pairs:
        parts = np.array([option.bottleneck for option in options], dtype=np.int64)
        ramps = np.array([weighted(form.ramp, option.bottleneck) for option in options], dtype=np.int64)
        most = np.column_stack((parts, [option.step for option in options]))
        columns = (before[:, None, :1] + ramps[:, None], np.maximum(before[:, None, 1:], most))
        every.append(np.concatenate(columns, axis=-1).reshape(-1, before.shape[1]))
    figures = np.concatenate(every)
    rounds = np.array([int(weight) for weight in form.rounds], dtype=np.int64)
    rows = np.flatnonzero(figures[:, 0] + figures[:, 1:-1] @ rounds + figures[:, -1] < limit)
    kept = rows[pareto_rows(figures[rows])] if len(rows) else rows
    starts, paths = np.cumsum([0, *(len(partitions) for partitions in every)]), []
    for row, place in zip(kept, np.searchsorted(starts, kept, side="right") - 1, strict=True):
        (_, before), options = pairs[place]
        label, option = divmod(int(row - starts[place]), len(options))
        paths.append((*before[label], (stop, options[option])))
    return figures[kept], paths
