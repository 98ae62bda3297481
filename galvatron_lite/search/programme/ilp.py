"""The certificate: the winning shape of plan as an integer programme, solved by another method.

``ilp_model`` builds the programme: stage boundaries, layouts at them, and the strategy of every layer are all chosen
anew; nothing of the search's plan is looked at but its shape. Its solution is priced by the evaluator (``cost.groups``,
``cost.step.bound_seconds``), and so is the search's, so that the two figures compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from time import perf_counter

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.step import bound_seconds, straggling
from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.problem import Partition, Problem
from galvatron_lite.search.programme.ilp_model import SCALE, ShapeModel, choosable
from galvatron_lite.search.programme.ilp_uniform import UniformModel, first_blocks
from galvatron_lite.search.programme.pulp_adapter import SolverVerdict, solve
from galvatron_lite.search.tables import TICKS

_TOLERANCE = 1e-6
SECONDS = 60.0
"""A solver's time, if not said otherwise."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the integer programme says."""

    verdict: SolverVerdict  # how sure the solver is
    found: float  # seconds of a step by the search's plan, by the closed form of ``cost.schedule``
    seconds: float  # the same of the programme's own solution; infinite without one
    bound: float  # seconds that no plan of the shape beats, as far as the solver knows
    solver: str  # which
    taken: float = 0.0  # seconds that building and solving took
    boundaries: bool = True  # whether stage boundaries were chosen by the programme too

    @property
    def gap(self) -> float:
        """Share of the search's step time that, as far as the solver knows, may be saved."""
        return max(1.0 - self.bound / self.found, 0.0)

    def __str__(self) -> str:
        """For people, in a line; without the time it took, so that it repeats."""
        own = "no solution" if self.seconds == inf else f"{self.seconds:.9g} s"
        what = "" if self.boundaries else ", stage boundaries as found"
        sure = "" if self.verdict is SolverVerdict.PROVEN else f", bound {self.bound:.9g} s"
        return (
            f"search {self.found:.9g} s, integer programme {own} ({self.verdict.value}{sure}), gap {self.gap:.2g}; "
            f"{self.solver}{what}"
        )


def certify(problem: Problem, partition: Partition, seconds: float = SECONDS) -> Certificate:
    """Solve the shape of a plan anew, as an integer programme, within a solver's time.

    Raises:
        GalvatronError: the solver found a quicker plan than the search, or proved that there is none as quick.
    """
    certificate = solve_shape(problem, partition, seconds)
    better = certificate.seconds < certificate.found * (1 - _TOLERANCE)
    unmet = certificate.verdict is SolverVerdict.PROVEN and certificate.seconds > certificate.found * (1 + _TOLERANCE)
    if better or unmet or certificate.verdict is SolverVerdict.INFEASIBLE:
        raise GalvatronError(
            f"The search and the integer programme of the same shape of plan disagree: {certificate}. "
            "Please report this with the profile."
        )
    return certificate


def solve_shape(problem: Problem, partition: Partition, seconds: float = SECONDS) -> Certificate:
    """What the integer programme of a plan's shape says, whether it agrees or not."""
    began = perf_counter()
    strategies = [strategy for stage in partition.stages for strategy in stage.strategies]
    found, _ = _priced(problem, [b - a for a, b in pairwise(partition.cuts)], strategies)
    several = problem.shape.virtual > 1
    free = choosable(problem) and not several and not problem.tables[0].fixed.even
    unit, cuts = partition.time / TICKS / SCALE, None if free else partition.cuts
    model = (
        UniformModel(problem, unit, cuts, first=first_blocks(problem.graph, strategies))
        if several
        else ShapeModel(problem, unit, cuts)
    )
    answer = solve(model.programme, seconds)
    own = inf
    if answer.values:
        own, fits = _priced(problem, *model.path(answer.values))
        # A solver's tolerance is about a ten-billionth of the memory: a solution that exceeds it by so much is a bound.
        answer, own = (answer, own) if fits else (answer.unsure(), inf)
    bound = own if answer.verdict is SolverVerdict.PROVEN else _step_seconds(problem, model, answer.bound)
    return Certificate(answer.verdict, found, own, bound, answer.solver, perf_counter() - began, free)


def _priced(problem: Problem, sizes: Sequence[int], strategies: Sequence[Strategy]) -> tuple[float, bool]:
    pricer, shape = problem.pricer, problem.shape
    costs = price_stages(pricer, shape, sizes, strategies)
    seconds = bound_seconds(pricer.profile, shape, costs)
    return seconds, all(
        cost.memory.total <= problem.budgets[group_of(shape.schedule, shape.stages, stage)]
        for stage, cost in enumerate(costs)
    )


def _step_seconds(problem: Problem, model: ShapeModel, objective: float) -> float:
    """Seconds of a step from a value of the objective: what no variable stands for comes on top."""
    profile, shape = problem.pricer.profile, problem.shape
    alone = objective * model.unit + model.offset + profile.overhead.step
    return alone * straggling(profile, shape.devices)
