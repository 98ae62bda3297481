"""Families of plans beside those of stages in the model's order: all are asked for, and the quickest plan counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Alternative, Plan
from galvatron_lite.search.best_first import MOST_WORK, Progress
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import Delay
from galvatron_lite.units import format_budget, format_seconds

_ROUNDING = 1e-9
_WORTH = 0.01
"""Share of a step by which one device must be quicker than the plan to be noted."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What a family of plans is asked for."""

    session: Session  # of the profile and the mode
    request: Request  # what is planned
    backend: Backend  # what is to run the plan
    delay: Delay | None = None  # which rules of delayed gradients the user allows; None: none
    ordinary: Plan | None = None  # the best plan of stages in the model's order; None where none fits
    # certify, tolerance, progress, stoppable, candidates, effort: see ``find_plan``
    certify: bool = False
    tolerance: float = 0.0
    progress: Progress | None = None
    stoppable: bool = True
    candidates: tuple[Plan, ...] = ()
    effort: int = MOST_WORK


PlanFamily = Callable[[PlanTask], Sequence[Plan]]
"""Plans of one family with their prediction and provenance, whether they fit or not; none where it offers none."""


def with_families(
    ordinary: Callable[[], Plan], task: PlanTask, runners_up: int, families: Sequence[PlanFamily]
) -> Plan:
    """The quickest plan that fits, the ordinary one of equal ones; the other is among its alternatives.

    Args:
        ordinary: finds the best plan of stages in the model's order.
        task: what is planned.
        runners_up: how many other plans to report.
        families: to ask besides.

    Raises:
        InfeasibleError: that of the ordinary search with what other families need, where they have no plan that fits
            either.
        InputError: the same where the ordinary search cannot share out the batch.
    """
    only = task.delay is not None and task.delay.only
    first, refused = None, InfeasibleError(f"No such plan of {task.request.graph.name} fits.")
    try:
        first = ordinary()
    except (InfeasibleError, InputError) as error:
        refused = error  # type: ignore[assignment]
    task = replace(task, ordinary=first)
    candidates = sorted((plan for family in families for plan in family(task)), key=seconds_of)
    fitting = [plan for plan in candidates if plan.fits and (plan.cyclic is not None or not only)]
    if not fitting and (first is None or (only and candidates)):
        raise _with_least_memory(candidates, refused) if isinstance(refused, InfeasibleError) else refused
    if first is None:
        return with_others(fitting, runners_up)
    quicker = [plan for plan in fitting if only or seconds_of(plan) < seconds_of(first) * (1.0 - _ROUNDING)]
    others = [plan for plan in candidates if not any(plan is other for other in quicker)]
    return with_others([*quicker, first, *others], runners_up) if candidates else first


def _with_least_memory(plans: Sequence[Plan], error: InfeasibleError) -> InfeasibleError:
    """The error, with the plan of other families that needs least memory."""
    if not plans:
        return error
    least = min(plans, key=_peak)
    more = f"Another way needs {format_budget(_peak(least), up=True)} at least: {summary(least)}."
    smallest = [] if error.smallest_budget is None else [error.smallest_budget]
    return InfeasibleError(f"{error} {more}", min([_peak(least), *smallest]))


def _peak(plan: Plan) -> int:
    return plan.prediction.peak_memory if plan.prediction else 0


def with_others(plans: Sequence[Plan], wanted: int) -> Plan:
    """The first of some plans, with the others as its alternatives, then theirs; up to ``wanted``."""
    best, listed = plans[0], dict[str, Alternative]()
    for plan in reversed(plans):
        without = "without delay: " if best.cyclic is not None and plan.cyclic is None else ""
        ends = (plan.provenance.least_seconds, plan.provenance.most_seconds) if plan.provenance else (0.0, 0.0)
        plain = Alternative(without + summary(plan), seconds_of(plan), _peak(plan), bool(plan.fits), *ends)
        listed[summary(plan)] = plain
    for other in (alternative for plan in plans for alternative in plan.alternatives):
        listed.setdefault(other.summary, other)
    del listed[summary(best)]
    searched = [listed.pop(summary(plan)) for plan in plans[1:] if summary(plan) in listed]
    kept = [*searched, *listed.values()][: max(wanted, 0)]
    kept.sort(key=lambda other: (not other.fits, other.step_seconds))
    return replace(best, alternatives=tuple(kept))


def seconds_of(plan: Plan | None) -> float:
    """Of a step; infinite without a plan or a prediction."""
    return plan.prediction.step_seconds if plan is not None and plan.prediction else inf


def with_one_device(plan: Plan, task: PlanTask) -> Plan:
    """The plan, with a note where one device with no strategy at all is predicted to take less and fits.

    Args:
        plan: found, on all devices.
        task: what was planned.
    """
    if plan.devices == 1 or plan.provenance is None or task.request.cluster is not None:
        return plan
    graph, quickest = task.request.graph, plan
    for count in sorted({1, plan.microbatches}):
        alone = plan_of(
            graph, devices=1, global_batch=task.request.global_batch, microbatches=count,
            cuts=(0, len(graph.layers)), strategies=[Strategy()] * len(graph.layers),
        )  # fmt: skip
        try:
            alone = price_plan(task.session.pricer, replace(alone, mode=task.session.mode))
        except InputError:
            continue
        alone = replace(alone, provenance=plan.provenance)
        quickest = min(quickest, alone, key=seconds_of) if alone.fits else quickest
    if seconds_of(quickest) > (1.0 - _WORTH) * seconds_of(plan):
        return plan
    seconds = f"{format_seconds(seconds_of(quickest))} instead of {format_seconds(seconds_of(plan))}"
    measured = task.session.profile.origin.kind.value == "measured"  # for so many devices and no other number
    how = "profile and train with one process" if measured else "use one device (--gpus 1)"
    note = f"a single device is predicted to be faster ({seconds}): {how}"
    return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))
