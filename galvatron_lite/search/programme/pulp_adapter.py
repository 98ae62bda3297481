"""The one place that knows PuLP: builds and solves a programme, for PuLP 3.3 and 4, with HiGHS if there, else CBC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any

Expression = Mapping[int, float]
"""Coefficients by variable number."""


class SolverVerdict(StrEnum):
    """What a solver knows at its end."""

    PROVEN = "proven"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class IntegerProgramme:
    """A mixed-integer programme: variables are numbers, constraints are ``expression <= bound`` or ``== bound``."""

    binary: list[bool] = field(default_factory=list)  # per variable, whether it is 0 or 1; else at least 0
    objective: dict[int, float] = field(default_factory=dict)  # to be minimised
    at_most: list[tuple[dict[int, float], float]] = field(default_factory=list)  # at_most, equal: constraints
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def variable(self, binary: bool) -> int:
        """A new variable's number."""
        self.binary.append(binary)
        return len(self.binary) - 1


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found."""

    verdict: SolverVerdict  # how sure it is
    values: Sequence[float]  # of every variable; empty without a solution
    solver: str  # which
    bound: float = -inf  # no solution's objective is less, as far as the solver knows

    def unsure(self) -> Solution:
        """The answer where its values turn out not to be a solution; its bound holds."""
        return replace(self, verdict=SolverVerdict.UNKNOWN, values=())


HIGHS, CBC = "HiGHS", ("PULP_CBC_CMD", "COIN_CMD")
"""Solvers by PuLP's names; CBC as PuLP 3 brings it, and as PuLP 4 or the machine does."""


def solve(programme: IntegerProgramme, seconds: float = 60.0, solver: str | None = None) -> Solution:
    """Solve a programme within a time limit; by HiGHS where it is installed, if not said otherwise.

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
    name = solver or _offered(pulp)[0]
    outcome = problem.solve(pulp.getSolver(name, msg=False, timeLimit=seconds, gapRel=0.0))
    verdict = _verdict(pulp, problem, outcome)
    known = verdict in (SolverVerdict.PROVEN, SolverVerdict.FEASIBLE)
    values = [float(variable.varValue or 0.0) for variable in variables] if known else []
    found = pulp.value(problem.objective) if verdict is SolverVerdict.PROVEN else None
    bound = float(found) if found is not None else _bound(problem, outcome)
    return Solution(verdict, values, name, bound)


def _bound(problem: Any, outcome: Any) -> float:
    """What HiGHS says of solutions it has not met (PuLP 3: its model; 4: its statistics); CBC keeps it to itself."""
    for owner, name in ((outcome, "best_bound"), (getattr(problem, "solverModel", None), "getInfo")):
        value = getattr(owner, name, None)
        value = value().mip_dual_bound if callable(value) else value
        if value is not None:
            return float(value)
    return -inf


def _offered(pulp: Any) -> list[str]:
    there = pulp.listSolvers(onlyAvailable=True)
    return [name for name in (HIGHS, *CBC) if name in there] or [CBC[0]]


def _variable(pulp: Any, problem: Any, number: int, binary: bool) -> Any:
    category = pulp.LpBinary if binary else pulp.LpContinuous
    upper = 1 if binary else None
    if hasattr(problem, "add_variable"):
        return problem.add_variable(f"x{number}", 0, upper, category)
    return pulp.LpVariable(f"x{number}", 0, upper, category)


def _sum(pulp: Any, variables: Sequence[Any], expression: Expression) -> Any:
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
