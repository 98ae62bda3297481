"""The plan that needs least memory: what is reported where nothing fits.

A search like that for the fastest plan, with bytes in place of seconds: shapes, then layouts at their edges, then
strategies of tied layers, the one of the least bound first; boundaries and strategies inside are exact
(``lean_stages``, ``lean_uniform``). Of schedules that keep no less in flight at any stage only one is looked at. Exact
for few layers; for others a plan is good enough when no other needs less than 97 % of its memory, and the error says
so: many shapes of a deep pipeline differ by less.

Where devices of several types have budgets of their own, memory counts as a share of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, groupby, product
from math import ceil

import numpy as np

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import layout
from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.cost.stage import Shape
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, fills, in_flight
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.chains.pareto import pareto_rows
from galvatron_lite.search.checks import unglued
from galvatron_lite.search.infeasible.lean_stages import Lean, Memory, Stages, least_share
from galvatron_lite.search.infeasible.lean_uniform import LeanUniform
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.shapes import Request, open_problem, shapes_of, tied_tables, with_edges, with_tied
from galvatron_lite.units import format_budget

_EXACT_LAYERS = 8
_SLACK = 0.03
"""Share of its memory that the leanest plan of a model with more layers may be above the least possible."""
_BOUNDLESS = 2**60
Tied = tuple[tuple[int, Strategy], ...]


def infeasible(request: Request, pricer: LayerPricer) -> InfeasibleError:
    """The error for a budget that is too small: the smallest that fits, and what would have to give."""
    slack = 0.0 if len(request.graph.layers) <= _EXACT_LAYERS else _SLACK
    lean = leanest(request, pricer, slack)
    if lean is None:
        return InfeasibleError(
            f"No plan of {request.graph.name} exists on {request.devices} devices with a batch of "
            f"{request.global_batch}: no way to split its layers divides the batch and has figures in the profile. "
            + (unglued(request) or "Give another batch, other devices, or profile more tensor degrees.")
        )
    given = _before_margin(request.budget, request.margin)
    return InfeasibleError(
        f"No plan of {request.graph.name} fits {given} a device on {request.devices} devices. "
        f"{_needed(request, lean, slack)}, with {summary(plan_from(request, lean))}. "
        "What would have to give: more memory a device, more devices, shorter samples, or a smaller model.",
        ceil(max(lean.peaks) / (1.0 - request.margin)),
    )


def plan_from(request: Request, lean: Lean) -> Plan:
    """The leanest plan, without prediction."""
    shape = lean.problem.shape
    plan = plan_of(
        request.graph, devices=request.devices, global_batch=request.global_batch, microbatches=shape.microbatches,
        cuts=lean.cuts, strategies=lean.strategies, schedule=shape.schedule,
    )  # fmt: skip
    return replace(plan, virtual_stages=shape.virtual)


def _before_margin(less: int | Budget, margin: float) -> str:
    """The budget as it was before a margin was taken off."""
    budget = as_budget(less).scaled(1.0 / (1.0 - margin)).plus(1) if margin else as_budget(less)
    own = budget.own
    shares = " and ".join(f"{format_budget(size)} ({name})" for name, size in own)
    return shares or format_budget(bytes_on(budget, ""))


def _needed(request: Request, lean: Lean, slack: float) -> str:
    """The smallest budget, or that of each type of device where they have budgets of their own."""
    share = (f", to {slack:.0%}" if slack else "") + (f", {request.margin:.1%} of it free" if request.margin else "")
    own = as_budget(request.budget).own
    if not own:
        needed = ceil(max(lean.peaks) / (1.0 - request.margin))
        return f"The smallest budget that fits is {format_budget(needed, up=True)} ({needed} bytes{share})"
    pricers = [tables.pricer for tables in lean.problem.tables]
    names = ["" if one is lean.problem.pricer else one.profile.cluster.device.name for one in pricers]
    pairs = list(zip(lean.peaks, names, strict=True))
    needs = {name: max((peak for peak, on in pairs if on in ("", name)), default=0) for name, _ in own}
    needs = {name: ceil(size / (1.0 - request.margin)) for name, size in needs.items()}
    told = " and ".join(f"{format_budget(size, up=True)} ({name}: {size} bytes{share})" for name, size in needs.items())
    return f"The smallest budgets that fit, in about the proportion of those given, are {told}"


@dataclass(slots=True)
class _Walk:
    """Nodes, the one of least bound first."""

    slack: float  # see ``leanest``
    # bound, number, and what is in the node
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    best: Lean | None = None  # plan so far
    memory: Memory = field(default_factory=Memory)
    _order: Iterator[int] = field(default_factory=count)

    @property
    def limit(self) -> float:
        """Scaled bytes that a plan must need less of."""
        return np.inf if self.best is None else (1.0 - self.slack) * self.best.peak

    def push(self, bound: float, look: Callable[[], None]) -> None:
        """Add a node, unless it is known to lead nowhere."""
        if bound < self.limit:
            heapq.heappush(self.heap, (bound, next(self._order), look))

    def run(self) -> Lean | None:
        """Look into nodes until none is worth it."""
        while self.heap and self.heap[0][0] < self.limit:
            heapq.heappop(self.heap)[2]()
        return self.best

    def shape(self, problem: Problem, scales: tuple[float, ...]) -> None:
        """Add the open problem of a shape."""
        if problem.shape.virtual > 1:
            uniform = LeanUniform(problem, scales)
            self.push(uniform.bound(), lambda: self._keep(uniform.best(self.limit)))
        else:
            self.push(least_share(problem, self.memory) * min(scales), lambda: self._opened(problem, scales))

    def _opened(self, problem: Problem, scales: tuple[float, ...]) -> None:
        bound = Stages(problem, self.memory, scales).bound
        self.push(bound, lambda: self._edges(problem, scales, bound))

    def _edges(self, problem: Problem, scales: tuple[float, ...], bound: float) -> None:
        """Add a problem under every choice of layouts, those whose boundaries take least first."""
        for child in sorted(with_edges(problem), key=_boundary):
            self.push(bound, lambda child=child: self._laid_out(child, scales))  # type: ignore[misc]

    def _laid_out(self, problem: Problem, scales: tuple[float, ...]) -> None:
        stages = Stages(problem, self.memory, scales)
        if problem.graph.ties:
            self.push(stages.bound, lambda: self._ties(problem, scales, stages.bound))
        else:
            self.push(stages.bound, lambda: self._solve(stages))

    def _ties(self, problem: Problem, scales: tuple[float, ...], bound: float) -> None:
        for tied in _tied_choices(problem):
            self.push(bound, lambda tied=tied: self._tied(with_tied(problem, tied), scales))  # type: ignore[misc]

    def _tied(self, problem: Problem, scales: tuple[float, ...]) -> None:
        stages = Stages(problem, self.memory, scales)
        self.push(stages.bound, lambda: self._solve(stages))

    def _solve(self, stages: Stages) -> None:
        self._keep(stages.best(self.limit, self.slack))

    def _keep(self, lean: Lean | None) -> None:
        self.best = lean or self.best


def _boundary(problem: Problem) -> int:
    """Bytes of the largest tensor at a boundary."""
    largest = max(problem.tables[0].store.crossing[1:-1], default=0)
    return boundary_bytes(largest, problem.shape.microbatch, problem.sender)


def leanest(request: Request, pricer: LayerPricer, slack: float = 0.0) -> Lean | None:
    """The plan of the whole space that needs least memory; None where the space is empty.

    Args:
        request: what is asked for; of its budget only the proportion between types of devices matters.
        pricer: prices layers.
        slack: no plan needs less than ``1 - slack`` of the memory of the one returned.
    """
    walk, boundless = _Walk(slack), replace(request, budget=_BOUNDLESS)
    given = request.budget
    most = 0 if isinstance(given, int) else max(given.least, *(own for _, own in given.own), 1)
    for shape in _lean_shapes(shapes_of(request)):
        budgets = open_problem(request, pricer, shape).budgets
        scales = tuple(1.0 if own >= most else most / own for own in budgets)
        walk.shape(open_problem(boundless, pricer, shape), scales)
    return walk.run()


def _lean_shapes(shapes: list[Shape]) -> Iterator[Shape]:
    """Of shapes that differ in their schedule alone, those of which no other keeps as little in flight everywhere."""
    plain = sorted((own for own in shapes if own.virtual == 1), key=lambda own: (own.stages, own.microbatches))
    for _, alike in groupby(plain, key=lambda own: (own.stages, own.microbatches)):
        options = list(alike)
        held = [[_held(option, stage) for stage in range(option.stages)] for option in options]
        yield from (options[row] for row in sorted(pareto_rows(np.array(held))))
    yield from (own for own in shapes if own.virtual > 1)


def _held(shape: Shape, stage: int) -> int:
    """Twice the micro-batches in flight; one less where a stage lacks gradients then."""
    held = in_flight(shape.schedule, shape.stages, stage, shape.microbatches)
    return 2 * held - fills(shape.schedule, held, shape.microbatches)


def _tied_choices(problem: Problem) -> list[Tied]:
    """Strategies to try for layers that share parameters, by memory alone."""
    options = [_group_choices(problem, group) for group in tied_groups(problem.graph)]
    return [tuple(pair for group in groups for pair in group) for groups in product(*options)]


def _group_choices(problem: Problem, group: tuple[int, ...]) -> list[Tied]:
    """Those that need no more memory than another one for all layers at once, wherever they may be."""
    tables = tied_tables(problem, group)
    laid = np.array([problem.at_ends(layout(strategy)) for strategy in tables[0].strategies], dtype=np.int64)
    kept = pareto_rows(np.column_stack((1 - laid, *(table.memory_keys for table in tables))))
    return [tuple((place, tables[0].strategies[row]) for place in group) for row in sorted(kept)]
