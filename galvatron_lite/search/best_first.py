"""Best-first search over shapes: what ``planner`` and its runner-ups both ask."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count
from math import inf

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import price_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.partition import Partition, best_partition, quick_partition
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.relax import Relaxed
from galvatron_lite.search.result import plan_of
from galvatron_lite.search.shapes import Request, bounds_of, open_problem, settled, shapes_of

Progress = Callable[[int, int, str], None]
MOST_WORK = 6_000_000
"""Labels after which the search ends with the best plan it has; counted, not timed, so that results repeat."""
_QUICK_WORK, _LOOK = 500_000, 20_000
"""The same for a search that is not exact, and what one quick search of a shape counts besides its labels."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the search ends with.

    Attributes:
        problem: the winning shape.
        partition: its best plan.
        gap: no plan of the space takes less than (1 - gap) of its time; 0.0: there is no better one.
    """

    problem: Problem
    partition: Partition
    gap: float = 0.0


def search(request: Request, pricer: LayerPricer, progress: Progress | None = None, exact: bool = True) -> Found | None:
    """The best plan over all shapes; None where nothing fits.

    Args:
        request: what is planned.
        pricer: of the profile.
        progress: see ``find_plan``.
        exact: False: a good plan, soon, from quick searches of the most promising shapes alone.
    """
    walk = _Walk([], count(), MOST_WORK if exact else _QUICK_WORK, exact)
    for shape in shapes_of(request):
        problem = open_problem(request, pricer, shape)
        walk.push(problem, bounds_of(problem), _Stage.SHAPE)
    done, total = 0, len(walk.heap)
    while (node := walk.pop()) is not None:
        if node.stage is _Stage.SHAPE:
            done += 1
            if progress is not None:
                shape = node.problem.shape
                progress(done, total, f"{shape.stages} stages, {shape.microbatches} micro-batches")
        _look_into(walk, node)
    if progress is not None:
        progress(total, total, "done")
    return walk.end()


def _look_into(walk: _Walk, node: _Node) -> None:
    """Replace a node by what is found a step further."""
    problem, bounds = node.problem, node.bounds
    if node.stage is _Stage.SHAPE:
        for child in settled(problem):
            walk.push(child, bounds, _Stage.SETTLED)
    elif node.stage is _Stage.SETTLED:
        walk.push(problem, bounds_of(problem), _Stage.BOUNDED)
    elif node.stage is _Stage.BOUNDED:
        quick = quick_partition(problem, bounds, walk.limit)
        walk.better(problem, quick.plan)
        walk.work += problem.work + _LOOK
        if walk.exact:
            walk.push(problem, bounds, _Stage.TRIED, quick.least)
    else:
        before = problem.work
        best = best_partition(problem, bounds, walk.limit)
        walk.better(problem, best.plan)
        walk.open = min(walk.open, best.least)
        walk.work += problem.work - before


class _Stage(IntEnum):
    """How far a node of the tree has been looked into."""

    SHAPE = 0
    SETTLED = 1
    BOUNDED = 2
    TRIED = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    problem: Problem
    bounds: Relaxed
    stage: _Stage
    bound: float


@dataclass(slots=True)
class _Walk:
    """Nodes in the order they are looked into, and the best plan so far.

    Attributes:
        heap: (rank, number, node); the rank is the node's bound, or what ``_later`` says.
        order: gives the numbers.
        most_work: labels after which the search ends; an exact one only once there is a plan.
        exact: see ``search``.
        best: plan so far.
        work: labels looked at.
        open: a time that no plan beats in the nodes that were looked into but not to the end.
    """

    heap: list[tuple[float, int, _Node]]
    order: Iterator[int]
    most_work: int
    exact: bool
    best: Found | None = None
    open: float = inf
    work: int = 0

    @property
    def limit(self) -> int | None:
        """What a plan must beat."""
        return None if self.best is None else self.best.partition.time

    def worth(self, bound: float) -> bool:
        """Whether a bound leaves room for a better plan."""
        return self.best is None or bound < self.best.partition.time

    def push(self, problem: Problem, bounds: Relaxed | None, stage: _Stage, least: float = 0.0) -> None:
        """Add a node, unless it is known to lead nowhere."""
        if bounds is None or not self.worth(bound := max(bounds.bound, least)) or bound == inf:
            return
        rank = self._later(bound) if stage is _Stage.TRIED else bound
        heapq.heappush(self.heap, (rank, next(self.order), _Node(problem, bounds, stage, bound)))

    def _later(self, bound: float) -> float:
        """Rank of an exact search: after quick ones that have a chance to lower the limit it runs under."""
        return bound if self.limit is None else (bound + self.limit) / 2

    def pop(self) -> _Node | None:
        """The most promising node; None where none can lead to a better plan, or where enough work was done."""
        while self.heap:
            node = heapq.heappop(self.heap)[2]
            if not self.worth(node.bound):
                continue
            if self.work <= self.most_work or (self.exact and self.best is None):
                return node
            self.open = min(self.open, node.bound)
        return None

    def better(self, problem: Problem, partition: Partition | None) -> None:
        """Keep a plan that beats the best so far."""
        if partition is not None and self.worth(partition.time):
            self.best = Found(problem, partition)

    def end(self) -> Found | None:
        """The best plan, and how far from the best there is it may be."""
        if self.best is None:
            return None
        return replace(self.best, gap=max(1.0 - self.open / self.best.partition.time, 0.0))


def finished(request: Request, pricer: LayerPricer, found: Found) -> Plan:
    """The plan of a search's end, with its prediction."""
    return price_plan(pricer, plain(request, found))


def plain(request: Request, found: Found) -> Plan:
    """The plan of a search's end, without prediction."""
    shape = found.problem.shape
    return plan_of(
        request.graph,
        devices=request.devices,
        global_batch=request.global_batch,
        microbatches=shape.microbatches,
        cuts=found.partition.cuts,
        strategies=[strategy for stage in found.partition.stages for strategy in stage.strategies],
        schedule=shape.schedule,
    )
