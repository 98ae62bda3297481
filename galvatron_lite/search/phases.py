"""Plans of the phases of a run: which plan each has, where a switch costs time too.

The candidates are the fastest plan of every phase by itself; each is tried in every phase, in the number of
micro-batches that is fastest there and fits. A dynamic programme over phases x candidates finds the least predicted
seconds of the whole run, steps and switches (``cost.switching``) together, exactly, among the courses in which every
switch pays back within its own phase: its steps gain more than it costs; or the plan before does not run there.
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
from galvatron_lite.plans.notes import plan_notes
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
from galvatron_lite.search.result import provenance
from galvatron_lite.search.session import Session


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
    """The candidate of every phase, for the least seconds of the whole run; None where no course runs.

    Args:
        seconds: of a step by phase and candidate; infinite where the candidate does not run there.
        steps: of each phase.
        switching: seconds from one candidate to another.
    """
    count = len(seconds[0])
    reached = [(steps[0] * seconds[0][own], [own]) for own in range(count)]
    for phase, own_seconds in enumerate(seconds[1:], start=1):
        before = reached
        reached = []
        for own in range(count):
            ways = [
                (total + _from(own_seconds, steps[phase], last, own, switching), [*path, own])
                for last, (total, path) in enumerate(before)
            ]
            reached.append(min(ways, key=lambda candidate: candidate[0]))
    total, path = min(reached, key=lambda candidate: candidate[0])
    return None if total == inf else path


def _from(seconds: Sequence[float], steps: int, last: int, place: int, switching: Callable[[int, int], float]) -> float:
    if seconds[place] == inf or place == last:
        return steps * seconds[place]
    cost = switching(last, place)
    pays = steps * (seconds[last] - seconds[place]) > cost
    return cost + steps * seconds[place] if pays else inf


def plan_phases(cases: Sequence[PhaseCase]) -> PhasedPlan:
    """The plan of every phase.

    Raises:
        InputError: phases whose profiles are not of the same layers.
        InfeasibleError: no course of plans runs all phases.
    """
    _check_layers(cases)
    splits = _distinct([case.best for case in cases])
    table = [[fitted(case, split) for split in splits] for case in cases]
    seconds = [[_seconds(plan) for plan in row] for row in table]
    steps = [case.phase.steps for case in cases]
    costs: dict[tuple[int, int], SwitchCost] = {}

    def cost(one: int, other: int) -> SwitchCost:
        if (one, other) not in costs:
            costs[one, other] = switch_cost(cases[0].session.profile, splits[one], splits[other])
        return costs[one, other]

    path = choose(seconds, steps, lambda one, other: cost(one, other).seconds)
    if path is None:
        raise InfeasibleError("No course of plans runs all phases: plan each phase by itself, with --batch.")
    switches = [None, *(cost(a, b) if a != b else None for a, b in pairwise(path))]
    planned = [
        PlannedPhase(case.phase.name, 0, case.phase.steps, case.session.profile.graph.sequence, plan, switch)
        for case, plan, switch in zip(cases, _plans(table, path), switches, strict=True)
    ]
    whole = [sum(row[own] * count for row, count in zip(seconds, steps, strict=True)) for own in range(len(splits))]
    always = _always(seconds, steps, cost)
    return PhasedPlan(PHASES_VERSION, in_order(planned), min(whole) if min(whole) < inf else None, always)


def _plans(table: Sequence[Sequence[Plan | None]], path: Sequence[int]) -> list[Plan]:
    found = [row[own] for row, own in zip(table, path, strict=True)]
    return [plan for plan in found if plan is not None]


def _always(seconds: Sequence[Sequence[float]], steps: Sequence[int], cost: Callable[[int, int], SwitchCost]) -> float:
    path = [min(range(len(row)), key=row.__getitem__) for row in seconds]
    moving = sum(cost(a, b).seconds for a, b in pairwise(path))
    return moving + sum(row[own] * count for row, own, count in zip(seconds, path, steps, strict=True))


def fitted(case: PhaseCase, split: Plan) -> Plan | None:
    """A split at a phase's batch, in the micro-batches that are fastest and fit; None where there are none."""
    if same_split(case.best, split):
        return case.best
    found = [plan for count in divisors(case.phase.batch) if (plan := _priced(case, split, count)) is not None]
    return min(found, key=_seconds, default=None)


def _priced(case: PhaseCase, split: Plan, microbatches: int) -> Plan | None:
    wanted = replace(split, global_batch=case.phase.batch, microbatches=microbatches, alternatives=(), left_out=())
    profile = case.session.profile
    try:
        plan = price_plan(case.session.pricer, wanted)
    except GalvatronError:
        return None
    made_from = replace(provenance(profile, case.budget, 0.0), proof=Proof.GIVEN, notes=plan_notes(profile.graph, plan))
    plan = replace(plan, provenance=made_from)
    return plan if plan.fits else None


def _seconds(plan: Plan | None) -> float:
    return inf if plan is None or plan.prediction is None else plan.prediction.step_seconds


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    found: list[Plan] = []
    for plan in plans:
        if not any(same_split(plan, known) for known in found):
            found.append(plan)
    return found


def _check_layers(cases: Sequence[PhaseCase]) -> None:
    first = [layer.name for layer in cases[0].session.profile.graph.layers]
    for case in cases:
        if [layer.name for layer in case.session.profile.graph.layers] != first:
            remedy = "Its profile has other layers than that of the first phase: profile the same model."
            raise InputError(f"phase {case.phase.name}", case.session.profile.name, remedy)
