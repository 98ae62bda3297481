"""Plans of a run with several phases (other batches or sequences), which may go from plan to plan.

Candidates are the fastest plan of every phase by itself; each is tried in every phase, in the number of micro-batches
that is fastest there and fits. A dynamic programme over phases x candidates finds the least predicted seconds of the
run, steps and switches (``cost.switching``) together, exactly, among the courses in which every switch pays back within
its phase: its steps gain more than it costs; or the plan before does not run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.switching import switch_cost
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.plans.phases import (
    PHASES_VERSION,
    Phase,
    PhasedPlan,
    PlannedPhase,
    SwitchCost,
    in_order,
    same_split,
)
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search.families.family import seconds_of
from galvatron_lite.search.result import provenance
from galvatron_lite.search.shapes import Session


@dataclass(frozen=True, slots=True)
class PhaseCase:
    """A phase and what its plans are made from."""

    phase: Phase  # its steps, batch and sequence
    session: Session  # of the profile at its sequence
    budget: int | Budget  # bytes a device
    best: Plan  # the fastest plan for it alone


def choose(
    seconds: Sequence[Sequence[float]], steps: Sequence[int], switching: Callable[[int, int], float]
) -> list[int] | None:
    """The candidate of every phase, for the least seconds of the run; None where no course runs.

    Args:
        seconds: of a step by phase and candidate; infinite where the candidate does not run there.
        steps: of each phase.
        switching: seconds from one candidate to another.
    """

    def phase_seconds(phase: int, last: int, candidate: int) -> float:
        """Of a phase with a candidate after another one; infinite where the switch does not pay back."""
        step = seconds[phase]
        if step[candidate] == inf or candidate == last:
            return steps[phase] * step[candidate]
        cost = switching(last, candidate)
        pays = steps[phase] * (step[last] - step[candidate]) > cost
        return cost + steps[phase] * step[candidate] if pays else inf

    candidates = range(len(seconds[0]))
    reached = [(steps[0] * seconds[0][candidate], [candidate]) for candidate in candidates]
    for phase in range(1, len(seconds)):
        courses = [
            [
                (total + phase_seconds(phase, last, candidate), [*path, candidate])
                for last, (total, path) in enumerate(reached)
            ]
            for candidate in candidates
        ]
        reached = [min(options, key=lambda option: option[0]) for options in courses]
    total, path = min(reached, key=lambda course: course[0])
    return None if total == inf else path


def plan_phases(cases: Sequence[PhaseCase]) -> PhasedPlan:
    """The plan of every phase.

    Raises:
        InputError: phases whose profiles are not of the same layers.
        InfeasibleError: no course of plans runs all phases.
    """
    _check_layers(cases)
    splits = list[Plan]()
    for case in cases:
        if not any(same_split(case.best, split) for split in splits):
            splits.append(case.best)
    table = [[fitted(case, split) for split in splits] for case in cases]
    seconds = [[seconds_of(plan) for plan in row] for row in table]
    steps = [case.phase.steps for case in cases]
    costs: dict[tuple[int, int], SwitchCost] = {}

    def cost(before: int, after: int) -> SwitchCost:
        if (before, after) not in costs:
            costs[before, after] = switch_cost(cases[0].session.profile, splits[before], splits[after])
        return costs[before, after]

    path = choose(seconds, steps, lambda before, after: cost(before, after).seconds)
    if path is None:
        raise InfeasibleError("No course of plans runs all phases: plan each phase by itself, with --batch.")
    plans = [row[option] for row, option in zip(table, path, strict=True)]
    switches = [None, *(cost(a, b) if a != b else None for a, b in pairwise(path))]
    planned = [
        PlannedPhase(case.phase.name, 0, case.phase.steps, case.session.profile.graph.sequence, plan, switch)
        for case, plan, switch in zip(cases, plans, switches, strict=True)
        if plan is not None
    ]
    totals = [
        sum(row[option] * count for row, count in zip(seconds, steps, strict=True)) for option in range(len(splits))
    ]
    fastest = [min(range(len(row)), key=row.__getitem__) for row in seconds]
    always = sum(cost(a, b).seconds for a, b in pairwise(fastest))
    always += sum(row[option] * count for row, option, count in zip(seconds, fastest, steps, strict=True))
    return PhasedPlan(PHASES_VERSION, in_order(planned), min(totals) if min(totals) < inf else None, always)


def _check_layers(cases: Sequence[PhaseCase]) -> None:
    first = [layer.name for layer in cases[0].session.profile.graph.layers]
    for case in cases:
        if [layer.name for layer in case.session.profile.graph.layers] != first:
            remedy = "Its profile has other layers than that of the first phase: profile the same model."
            raise InputError(f"phase {case.phase.name}", case.session.profile.name, remedy)


def fitted(case: PhaseCase, split: Plan) -> Plan | None:
    """A split at a phase's batch, in the micro-batches that are fastest and fit; None where there are none."""
    if same_split(case.best, split):
        return case.best
    plans = [plan for count in divisors(case.phase.batch) if (plan := _priced(case, split, count)) is not None]
    return min(plans, key=seconds_of, default=None)


def _priced(case: PhaseCase, split: Plan, microbatches: int) -> Plan | None:
    """A split in so many micro-batches, with its prediction; None where it does not run or fit."""
    resized = replace(split, global_batch=case.phase.batch, microbatches=microbatches, alternatives=(), left_out=())
    profile = case.session.profile
    try:
        plan = price_plan(case.session.pricer, resized)
    except GalvatronError:
        return None
    source = replace(provenance(profile, case.budget, 0.0), proof=Proof.GIVEN, notes=plan_notes(profile.graph, plan))
    plan = replace(plan, provenance=source)
    return plan if plan.fits else None
