"""Best-first search over shapes of plan: the most promising first, until no bound is below the best plan.

A shape (pipeline degree, schedule, micro-batches) is explored step by step, each with sharper bounds (``bounds``):
compute alone, averages, every stage's layers by themselves; then layouts at boundaries are settled (``with_edges``),
then strategies of layers that share parameters (``with_ties``). In between, the stages of the cut that looks best are
solved by shortest paths (``Problem.good_plan``), which gives plans, too. What is left below the best plan is then
solved exactly: single stages first, then all stages of all cuts (``best_partition``). Shapes whose groups of devices
run several stages have plans of their own (``uniform``).

Stages s = 0..p-1 hold layers [e_s, e_{s+1}); a stage has bottleneck parts c_sk and work once a step u_s, from its
Pareto set. With the closed form of the schedule (``cost.schedule.Form``) labels over all cuts minimise

    sum_k (ramp_k sum_s c_sk + rounds_k max_s c_sk) + max_s u_s

subject to 0 = e_0 < e_1 < ... < e_p = L, and every stage within the memory of its device. A label for (stages so far,
layers so far) is (ramp, max of each part, max step); all updates are monotone, so dominated labels are dropped, and so
are labels whose bound reaches the limit.
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
from galvatron_lite.search.bounds import StageBounds
from galvatron_lite.search.chain.pareto import pareto_rows
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
from galvatron_lite.search.uniform.plans import Uniform, averaged_uniform

Progress = Callable[[int, int, str], None]
MOST_WORK = 60_000_000
"""Labels after which the search ends with the best plan it has; counted, not timed, so that results repeat."""
NEAR_WORK = 20_000_000
"""The same where the plan need only be near the best."""
ANY_TIME = 2**62
"""Picoseconds that any plan takes less than."""
QUICK = 60_000
"""``MOST_WORK`` of a quick search; without ``below`` it goes on to the first plan."""
_UNIFORM_WORK, _STAGE_WORK = 20_000, 2_000
"""What looking for uniform plans, and at one stage, counts besides labels."""
_MOST_STAGES = 96
"""Stages that are solved at most for one bound."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedPlan:
    """What a search ends with."""

    problem: Problem  # of the plan's shape
    partition: Partition
    gap: float = 0.0  # no plan of the space takes less than (1 - gap) of its time; 0.0: it is the best
    others: tuple[SolvedPlan, ...] = ()  # the best plan met of each pipeline degree and schedule, this one included
    stopped: bool = False  # whether the user stopped the search
    from_user: bool = False  # whether the user supplied the plan


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
    """Find the best plan over all shapes; None where nothing fits, or pins leave no shape.

    Args:
        request: what is planned.
        pricer: of the profile.
        progress: called with (shapes done, shapes in all, what is being looked at).
        stoppable: whether Ctrl-C ends the search with the best plan so far; where there is none it is raised.
        start: a plan to begin with: the result beats it, or is it.
        effort: labels after which an exact search ends.
        below: picoseconds that the result takes less than.
        slack: share by which another plan may be quicker than the result.
        settled: the same for plans that only labels find.
    """
    try:
        shapes = shapes_of(request)
    except InputError:
        return None
    walk = _Walk(request, pricer, effort, start, start, below, slack, settled)
    stopped = False
    try:
        walk.run(shapes, progress)
    except KeyboardInterrupt:
        if not stoppable or walk.best is None:
            raise
        stopped = True
    return walk.result(stopped)


class _Depth(IntEnum):
    """How far a node of the tree has been explored."""

    COMPUTE = 0  # bounded by compute
    AVERAGED = 1  # bounded by averages
    RELAXED = 2  # bounded stage by stage
    EDGES = 3  # layouts at boundaries are settled
    TIES = 4  # strategies of layers that share parameters are settled
    ROUNDED = 5  # stages of the best cut are solved by shortest paths


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    shape: Shape
    depth: _Depth
    bound: float
    problem: Problem | None = None  # None: nothing is priced
    bounds: StageBounds | None = None


@dataclass(slots=True)
class _Walk:
    """Nodes in the order they are explored, and the best plan so far."""

    request: Request
    pricer: LayerPricer
    most_work: int  # labels after which the search ends, once there is a plan
    best: SolvedPlan | None  # plan so far
    start: SolvedPlan | None  # start, below, slack, settled: see ``search``
    below: float
    slack: float
    settled: float
    heap: list[tuple[float, int, _Node]] = field(default_factory=list)  # (bound, number, node)
    numbers: Iterator[int] = field(default_factory=count)
    work: int = 0  # labels looked at
    abandoned: float = inf  # a time that no plan beats in the nodes that were not explored to the end
    current: _Node | None = None  # the node that is being explored
    met: dict[tuple[int, Schedule], SolvedPlan] = field(default_factory=dict)  # best by pipeline degree and schedule
    # shapes of front-loaded schedules that differ in virtual stages alone
    front_loaded: dict[tuple[Schedule, int, int], list[Shape]] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """What bounds must be below to be of interest; infinite where any plan will do."""
        if self.best is None:
            return self.below
        return self.best.partition.time - int(self.slack * self.best.partition.time)

    def run(self, shapes: Sequence[Shape], progress: Progress | None) -> None:
        """Explore nodes until none is left."""
        self._push_shapes(shapes)
        done = 0
        while (node := self._pop()) is not None:
            done += node.depth is _Depth.COMPUTE
            if progress is not None:
                progress(done, len(shapes), _shape_text(node.shape))
            if node.problem is None:
                problem = open_problem(self.request, self.pricer, node.shape)
                self._push(problem, _Depth.AVERAGED, max(node.bound, self._averaged(problem)))
            elif node.shape.virtual > 1:
                self._explore_uniform(node, node.problem)
            else:
                self._explore(node, node.problem)
            self.current = None
        if progress is not None:
            progress(len(shapes), len(shapes), "done")

    def result(self, stopped: bool) -> SolvedPlan | None:
        """The best plan, with how far from the best there is it may be."""
        if self.best is None:
            return None
        least = min(self.abandoned, self.limit) if self.slack else self.abandoned
        if stopped:
            left = [node.bound for _, _, node in self.heap] + ([] if self.current is None else [self.current.bound])
            least = min([least, *left])
        gap, before = max(1.0 - least / self.best.partition.time, 0.0), self.start.others if self.start else ()
        return replace(self.best, gap=gap, others=(*self.met.values(), *before), stopped=stopped)

    def _push_shapes(self, shapes: Sequence[Shape]) -> None:
        request = self.request
        compute_bounds = request.compute_bounds(self.pricer.profile)
        for shape in shapes:
            bound = compute_bounds.bound(request.graph, shape)
            if request.wider is not None and bound < self.limit:
                answers = open_problem(request.wider, self.pricer, shape).answers
                bound = max(bound, answers.averaged, answers.relaxed)
            if bound < self.limit:
                heapq.heappush(self.heap, (bound, next(self.numbers), _Node(shape, _Depth.COMPUTE, bound)))
                if shape.schedule.front_loaded:
                    key = shape.schedule, shape.stages, shape.microbatches
                    self.front_loaded.setdefault(key, []).append(shape)

    def _push(self, problem: Problem, depth: _Depth, bound: float, bounds: StageBounds | None = None) -> None:
        """Add a node, unless it leads nowhere."""
        if bound < self.limit:
            heapq.heappush(self.heap, (bound, next(self.numbers), _Node(problem.shape, depth, bound, problem, bounds)))

    def _pop(self) -> _Node | None:
        """The most promising node; None where none can lead to a better plan, or where enough work was done."""
        while self.heap:
            node = heapq.heappop(self.heap)[2]
            if node.bound >= self.limit:
                continue
            exhausted = self.work >= self.most_work and (self.best is not None or self.below < inf)
            if not exhausted and not self._hardly_improves(node):
                self.current = node
                return node
            self.abandoned = min(self.abandoned, node.bound)
        return None

    def _hardly_improves(self, node: _Node) -> bool:
        """Whether the labels that a node asks for would lead to a plan that is hardly quicker."""
        least = inf if self.best is None else self.best.partition.time * (1.0 - self.settled)
        return node.depth is _Depth.ROUNDED and node.shape.virtual == 1 and node.bound >= least

    def _offer(self, problem: Problem, partition: Partition | None) -> None:
        """Keep a plan that beats the best so far, and one that beats those of its degree and schedule."""
        if partition is None:
            return
        key = (problem.shape.stages, problem.shape.schedule)
        if key not in self.met or partition.time < self.met[key].partition.time:
            self.met[key] = SolvedPlan(problem, partition)
        most = self.below if self.best is None else self.best.partition.time
        if partition.time < most:
            self.best = SolvedPlan(problem, partition)

    def _averaged(self, problem: Problem) -> float:
        """A quick bound of a shape; under front-loaded schedules of all numbers of virtual stages at once."""
        shape = problem.shape
        if not problem.answers.averaged and shape.schedule.front_loaded:
            shapes = self.front_loaded.pop((shape.schedule, shape.stages, shape.microbatches), [])
            problems = [open_problem(self.request, problem.pricer, shape) for shape in shapes]
            for alike, bound in zip(problems, averaged_uniform(problems), strict=True):
                alike.answers.averaged = float(bound)
        problem.answers.averaged = problem.answers.averaged or average_of(problem)
        return problem.answers.averaged

    def _explore(self, node: _Node, problem: Problem) -> None:
        if node.depth is _Depth.AVERAGED:
            self._push_bounded(problem, _Depth.RELAXED, node.bound)
        elif node.depth is _Depth.RELAXED:
            for child in with_edges(problem):
                self._push_bounded(child, _Depth.EDGES, node.bound)
        elif node.bounds is None:
            return
        elif node.depth is _Depth.EDGES and tied_groups(problem.graph):
            bounds = self._sharpened(problem, node.bounds, feasible=False)  # layers that are tied may differ
            if bounds.bound < self.limit:
                for child in with_ties(problem):
                    self._push(child, _Depth.TIES, max(bounds.bound, node.bound), bounds.opened)
        elif node.depth is not _Depth.ROUNDED:
            bounds = self._sharpened(problem, node.bounds)
            self._push(problem, _Depth.ROUNDED, max(bounds.bound, node.bound), bounds)
        else:
            bounds = self._sharpened(problem, node.bounds, exact=True)
            if bounds.bound < self.limit:
                self._solve(problem, bounds)

    def _push_bounded(self, problem: Problem, depth: _Depth, least: float) -> None:
        bounds = bounds_of(problem)
        if depth is _Depth.RELAXED:
            problem.answers.relaxed = inf if bounds is None else bounds.bound
        if bounds is not None:
            self._push(problem, depth, max(bounds.bound, least), bounds)

    def _solve(self, problem: Problem, bounds: StageBounds) -> None:
        """The best plan of a node by labels over all cuts; one stage was solved exactly."""
        if problem.shape.stages == 1:
            layers = range(len(problem.graph.layers))
            self.abandoned = min(self.abandoned, problem.quickest_plan(0, layers, self.limit - 1, self.settled)[1])
            return
        before, left = problem.work, inf if self.best is None else self.most_work - self.work
        plan, least = best_partition(problem, bounds, self.limit, left)
        self._offer(problem, plan)
        self.abandoned = min(self.abandoned, least)
        self.work += problem.work - before

    def _explore_uniform(self, node: _Node, problem: Problem) -> None:
        """Bound the uniform plans of a shape, then find the best, once other nodes have had a chance to lower the
        limit."""
        cuts = cuts_of(problem.graph, problem.shape.stages * problem.shape.virtual)
        divisions: list[Uniform] = problem.answers.memo.once(
            "uniform", lambda: [Uniform(problem, division) for division in cuts]
        )
        if node.depth is _Depth.AVERAGED:
            least = min(plans.bound(self.limit, problem.runs) for plans in divisions)
            self._push(problem, _Depth.ROUNDED, max(node.bound, least))
        else:
            self.work += _UNIFORM_WORK
            for plans in divisions:
                self._offer(problem, plans.best(self.limit, problem.runs))

    def _sharpened(
        self, problem: Problem, bounds: StageBounds, *, feasible: bool = True, exact: bool = False
    ) -> StageBounds:
        """Sharper bounds, by solving the stages of the cut that looks best until another one does.

        ``feasible``: whether the stages of a cut make a plan; ``exact``: whether stages are solved exactly where
        shortest paths leave a gap.
        """
        before = problem.work
        for _ in range(_MOST_STAGES):
            if bounds.bound >= self.limit:
                break
            cuts = bounds.cuts()
            spans = [(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
            todo = [span for span in spans if span not in bounds.looked]
            if todo:
                self.work += _STAGE_WORK * len(todo)
                values = {span: problem.good_plan(span[0], range(*span[1:]))[1] for span in todo}
                bounds = bounds.with_theta(values, exact=False)
                continue
            if feasible:
                self._offer(problem, _best_of_cut(problem, cuts))
                if bounds.bound >= self.limit:
                    break
            todo = [span for span in spans if exact and span not in bounds.timed]
            if not todo:
                break
            span = max(todo, key=lambda span: float(bounds.excess[span[0]][span[1:]]))
            cap = self.limit - 1 - bounds.others(*span)
            quickest = problem.quickest_plan(span[0], range(*span[1:]), cap, self.settled)[1]
            bounds = bounds.with_theta({span: quickest})
        else:  # another cut looks best each time: the last one makes a plan, too
            self._offer(problem, _best_of_cut(problem, cuts) if feasible else None)
        self.work += problem.work - before
        return bounds


def _best_of_cut(problem: Problem, cuts: list[int]) -> Partition | None:
    """The plan of the quickest stages that were met of a cut."""
    plans = [problem.best_plan_met(stage, range(*ends)) for stage, ends in enumerate(pairwise(cuts))]
    stages = [plan for plan in plans if plan is not None]
    if len(stages) < len(plans):
        return None
    return Partition(step_time(stages, problem.form), tuple(cuts), tuple(stages))


def _shape_text(shape: Shape) -> str:
    schedule = "" if shape.schedule is DEFAULT_SCHEDULE else f"{shape.schedule}, "
    return f"{shape.stages} stages, {schedule}{shape.microbatches} micro-batches"


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
        strategies=result.partition.strategies,
        schedule=shape.schedule,
    )
    return replace(plan, virtual_stages=shape.virtual)


_Front = tuple[IntArray, list[tuple[tuple[int, StagePlan], ...]]]
"""Labels: their figures (labels, columns), and the stages of each with the layers they end before."""


def best_partition(
    problem: Problem, bounds: StageBounds, limit: float, effort: float = inf
) -> tuple[Partition | None, float]:
    """The best plan of a shape of several stages that takes less than ``limit`` picoseconds; and a time that no plan
    below the limit beats.

    Args:
        problem: with layouts at boundaries and strategies of tied layers settled.
        bounds: of it.
        limit: picoseconds.
        effort: labels after which there is no plan, and the bound of all.
    """
    most_work = problem.work + effort
    layers, least, stages, form = len(problem.graph.layers), np.inf, problem.shape.stages, problem.form
    fronts: dict[int, _Front] = {0: (np.zeros((1, len(problem.weights) + 1), dtype=np.int64), [()])}  # by layers so far
    for stage in range(stages):
        reached: dict[int, list[tuple[_Front, list[StagePlan]]]] = {}
        for start, labels in sorted(fronts.items()):
            later = stages - stage - 1
            for stop in range(start + 1, layers - later + 1) if later else (layers,):
                through = bounds.through(stage, start, stop)
                if problem.work > most_work:
                    return None, bounds.bound
                if through < limit:
                    others = bounds.others(stage, start, stop)
                    options, dropped = problem.pareto_plans(stage, range(start, stop), limit - others)
                    # A plan with an option left out takes that option's time alone and what other layers need.
                    least = min(least, max(through, dropped + others))
                    if options:
                        reached.setdefault(stop, []).append((labels, options))
        fronts = {}
        for stop, pairs in reached.items():
            joined = _joined(pairs, stop, form, limit - bounds.least_after(stage, stop))
            if joined[1]:
                fronts[stop] = joined
    partitions = [
        Partition(step_time(plans, form), (0, *cuts), plans)
        for cuts, plans in (zip(*path, strict=True) for path in fronts.get(layers, (None, []))[1])
    ]
    best = min(partitions, key=lambda plan: (plan.time, plan.cuts), default=None)
    return best, least if best is None else min(least, best.time)


def _joined(pairs: list[tuple[_Front, list[StagePlan]]], stop: int, form: Form, limit: float) -> _Front:
    """Labels joined with the plans of the stage after them, which ends before layer ``stop``: those that so far take
    less than the limit and are undominated."""
    blocks = []
    for (before, _), options in pairs:
        parts = np.array([option.bottleneck for option in options], dtype=np.int64)
        ramps = np.array([weighted(form.ramp, option.bottleneck) for option in options], dtype=np.int64)
        most = np.column_stack((parts, [option.step for option in options]))
        columns = (before[:, None, :1] + ramps[:, None], np.maximum(before[:, None, 1:], most))
        blocks.append(np.concatenate(columns, axis=-1).reshape(-1, before.shape[1]))
    figures = np.concatenate(blocks)
    rounds = np.array([int(weight) for weight in form.rounds], dtype=np.int64)
    rows = np.flatnonzero(figures[:, 0] + figures[:, 1:-1] @ rounds + figures[:, -1] < limit)
    kept = rows[pareto_rows(figures[rows])] if len(rows) else rows
    starts, paths = np.cumsum([0, *(len(block) for block in blocks)]), []
    for row, number in zip(kept, np.searchsorted(starts, kept, side="right") - 1, strict=True):
        (_, before), options = pairs[number]
        label, option = divmod(int(row - starts[number]), len(options))
        paths.append((*before[label], (stop, options[option])))
    return figures[kept], paths
