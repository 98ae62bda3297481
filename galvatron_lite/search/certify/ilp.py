"""The certificate: the winning shape of plan as an integer programme, solved by another method.

``model`` builds the programme: stage boundaries, layouts at them, and the strategy of every layer are all chosen
anew; of the search's plan only the shape is used. PuLP 3.3 or 4 has HiGHS solve it if that is there, else CBC. The
solution and the search's plan are priced alike (``cost.step.bound_seconds``), so that the two figures compare.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any

from galvatron_lite.cost.step import bound_seconds, price_stages, straggling
from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.certify.model import (
    SCALE,
    IntegerProgramme,
    ShapeModel,
    UniformModel,
    choosable,
    first_blocks,
)
from galvatron_lite.search.problem import Partition, Problem
from galvatron_lite.search.tables import TICKS

_TOLERANCE = 1e-6
SECONDS = 60.0
"""A solver's time limit."""


class SolverVerdict(StrEnum):
    """What a solver knows at its end."""

    PROVEN = "proven"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the integer programme says."""

    verdict: SolverVerdict
    plan_seconds: float  # seconds of a step by the search's plan, by the closed form of ``cost.schedule``
    seconds: float  # the same of the programme's solution; infinite without one
    bound: float  # seconds that no plan of the shape beats, as far as the solver knows
    solver: str  # its name
    taken: float = 0.0  # seconds that building and solving took
    boundaries: bool = True  # whether stage boundaries were chosen by the programme too

    @property
    def gap(self) -> float:
        """Share of the search's step time that, as far as the solver knows, may be saved."""
        return max(1.0 - self.bound / self.plan_seconds, 0.0)

    def __str__(self) -> str:
        """For people, in a line; without the time it took, so that it repeats."""
        optimum = "no solution" if self.seconds == inf else f"{self.seconds:.9g} s"
        what = "" if self.boundaries else ", stage boundaries as found"
        sure = "" if self.verdict is SolverVerdict.PROVEN else f", bound {self.bound:.9g} s"
        return (
            f"search {self.plan_seconds:.9g} s, integer programme {optimum} ({self.verdict.value}{sure}), "
            f"gap {self.gap:.2g}; {self.solver}{what}"
        )


def certify(problem: Problem, partition: Partition, seconds: float = SECONDS) -> Certificate:
    """Solve the shape of the search's plan as an integer programme, within a time limit, and compare.

    Raises:
        GalvatronError: the solver found a quicker plan than the search, or proved that there is none as quick.
    """
    certificate = solve_shape(problem, partition, seconds)
    better = certificate.seconds < certificate.plan_seconds * (1 - _TOLERANCE)
    worse = certificate.seconds > certificate.plan_seconds * (1 + _TOLERANCE)
    unmet = certificate.verdict is SolverVerdict.PROVEN and worse
    if better or unmet or certificate.verdict is SolverVerdict.INFEASIBLE:
        raise GalvatronError(
            f"The search and the integer programme of the same shape of plan disagree: {certificate}. "
            "Please report this with the profile."
        )
    return certificate


def solve_shape(problem: Problem, partition: Partition, seconds: float = SECONDS) -> Certificate:
    """What the integer programme of a plan's shape says, whether it agrees or not; arguments as of ``certify``."""
    began = perf_counter()
    strategies = partition.strategies
    plan_seconds, _ = _priced(problem, [b - a for a, b in pairwise(partition.cuts)], strategies)
    virtual = problem.shape.virtual > 1
    free = choosable(problem) and not virtual and not problem.tables[0].fixed.even
    unit, cuts = partition.time / TICKS / SCALE, None if free else partition.cuts
    model = (
        UniformModel(problem, unit, cuts, first=first_blocks(problem.graph, strategies))
        if virtual
        else ShapeModel(problem, unit, cuts)
    )
    solution, solved_seconds = solve(model.programme, seconds), inf
    if solution.values:
        solved_seconds, fits = _priced(problem, *model.path(solution.values))
        if not fits:  # by a ten-billionth of the memory, a solver's tolerance: the solution is no plan, its bound holds
            solution, solved_seconds = replace(solution, verdict=SolverVerdict.UNKNOWN, values=()), inf
    bound = solved_seconds
    if solution.verdict is not SolverVerdict.PROVEN:  # of a value of the objective; ``offset`` comes on top
        profile = problem.pricer.profile
        alone = solution.bound * model.unit + model.offset + profile.overhead.step
        bound = alone * straggling(profile, problem.shape.devices)
    taken = perf_counter() - began
    return Certificate(solution.verdict, plan_seconds, solved_seconds, bound, solution.solver, taken, free)


def _priced(problem: Problem, sizes: Sequence[int], strategies: Sequence[Strategy]) -> tuple[float, bool]:
    """Seconds of a step, and whether every stage fits."""
    pricer, shape = problem.pricer, problem.shape
    costs = price_stages(pricer, shape, sizes, strategies)
    seconds = bound_seconds(pricer.profile, shape, costs)
    return seconds, all(
        cost.memory.total <= problem.budgets[group_of(shape.schedule, shape.stages, stage)]
        for stage, cost in enumerate(costs)
    )


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver returns."""

    verdict: SolverVerdict
    values: Sequence[float]  # of every variable; empty without a solution
    solver: str  # its name
    bound: float = -inf  # no solution's objective is less, as far as the solver knows


HIGHS, CBC = "HiGHS", ("PULP_CBC_CMD", "COIN_CMD")
"""Solvers by PuLP's names; CBC as PuLP 3 brings it, and as PuLP 4 or the machine does."""


def solve(programme: IntegerProgramme, seconds: float = SECONDS, solver: str | None = None) -> Solution:
    """Solve a programme within a time limit, by a solver of PuLP or by HiGHS where it is installed, else CBC.

    ``LpStatus`` says "Optimal" when the limit was hit; only ``sol_status`` tells a proven optimum from a good solution.
    """
    import pulp

    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [_variable(pulp, problem, number, binary) for number, binary in enumerate(programme.binary)]
    problem += _sum(pulp, variables, programme.objective)
    for expression, bound in programme.at_most:
        problem += _sum(pulp, variables, expression) <= bound
    for expression, bound in programme.equal:
        problem += _sum(pulp, variables, expression) == bound
    if solver is None:
        available = pulp.listSolvers(onlyAvailable=True)
        solver = next((name for name in (HIGHS, *CBC) if name in available), CBC[0])
    with _nothing_printed():
        outcome = problem.solve(pulp.getSolver(solver, msg=False, timeLimit=seconds, gapRel=0.0))
    verdict = _verdict(pulp, problem, outcome)
    solved = verdict in (SolverVerdict.PROVEN, SolverVerdict.FEASIBLE)
    values = [float(variable.varValue or 0.0) for variable in variables] if solved else []
    objective = pulp.value(problem.objective) if verdict is SolverVerdict.PROVEN else None
    bound = float(objective) if objective is not None else _bound(problem, outcome)
    return Solution(verdict, values, solver, bound)


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Standard output of the process leads nowhere: HiGHS names itself there in spite of ``msg=False``, amid JSON."""
    sys.stdout.flush()
    with open(os.devnull, "wb") as nowhere:
        before = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)


def _bound(problem: Any, outcome: Any) -> float:
    """What HiGHS says of solutions it has not met (PuLP 3: its model; 4: its statistics); CBC keeps it to itself."""
    for owner, name in ((outcome, "best_bound"), (getattr(problem, "solverModel", None), "getInfo")):
        value = getattr(owner, name, None)
        value = value().mip_dual_bound if callable(value) else value
        if value is not None:
            return float(value)
    return -inf


def _variable(pulp: Any, problem: Any, number: int, binary: bool) -> Any:
    category = pulp.LpBinary if binary else pulp.LpContinuous
    upper = 1 if binary else None
    if hasattr(problem, "add_variable"):
        return problem.add_variable(f"x{number}", 0, upper, category)
    return pulp.LpVariable(f"x{number}", 0, upper, category)


def _sum(pulp: Any, variables: Sequence[Any], expression: Mapping[int, float]) -> Any:
    return pulp.lpSum(factor * variables[number] for number, factor in expression.items())


def _verdict(pulp: Any, problem: Any, outcome: Any) -> SolverVerdict:
    """PuLP 3: ``sol_status``; PuLP 4: the statistics that ``solve`` returns."""
    status = getattr(problem, "sol_status", None)
    if status is None:
        status = getattr(outcome, "sol_status", None)
    if status == pulp.LpSolutionOptimal:
        return SolverVerdict.PROVEN
    if status == pulp.LpSolutionIntegerFeasible:
        return SolverVerdict.FEASIBLE
    return SolverVerdict.INFEASIBLE if status == pulp.LpSolutionInfeasible else SolverVerdict.UNKNOWN
