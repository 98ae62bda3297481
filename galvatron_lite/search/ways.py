"""Plans beside those of stages in the model's order: each way to make some is asked, and the quickest plan counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, Alternative, Plan, Stage
from galvatron_lite.search.result import provenance, runs_of, summary
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request
from galvatron_lite.units import format_budget, format_seconds

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Delay:
    """Which rules of delayed gradients the user allows."""

    rule: CyclicRule | None = None  # None: any
    setting: CyclicSetting | None = None  # None: any
    only: bool = False  # whether no other plan is wanted


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What a way is asked for."""

    session: Session  # of the profile and the mode
    request: Request  # what is planned
    backend: Backend  # what is to run the plan
    budget: int | Budget  # bytes a device, or of each type of device
    delay: Delay | None = None  # which rules of delayed gradients the user allows; None: none
    ordinary: Plan | None = None  # the best plan of stages in the model's order; None where none fits
    certify: bool = False  # whether integer programmes are to say the same as the search
    tolerance: float = 0.0  # see ``find_plan``


Way = Callable[[PlanTask], Sequence[Plan]]
"""Plans of one way with their prediction and provenance, whether they fit or not; none where it offers none."""


def with_ways(ordinary: Callable[[], Plan], task: PlanTask, runners_up: int, ways: Sequence[Way]) -> Plan:
    """The quickest plan that fits, the ordinary one of equal ones; the other is among its alternatives.

    Args:
        ordinary: finds the best plan of stages in the model's order.
        task: what is planned.
        runners_up: how many other plans to report.
        ways: to ask besides.

    Raises:
        InfeasibleError: that of the ordinary search with what other ways need, where they have no plan that fits
            either.
        InputError: the same where the ordinary search cannot share out the batch.
    """
    try:
        first = ordinary()
    except (InfeasibleError, InputError) as error:
        found = _plans(ways, task)
        fitting = _wanted(found, task)
        if not fitting:
            raise (_needing(found, error) if isinstance(error, InfeasibleError) else error) from None
        return led(fitting, runners_up)
    found = _plans(ways, replace(task, ordinary=first)) if ways else []
    if not found:
        return first
    only, fitting = task.delay is not None and task.delay.only, _wanted(found, task)
    if only and not fitting:
        raise _needing(found, InfeasibleError(f"No such plan of {first.model} fits."))
    quicker = [plan for plan in fitting if only or seconds_of(plan) < seconds_of(first) * (1.0 - _ROUNDING)]
    others = [plan for plan in found if not any(plan is one for one in quicker)]
    return led([*quicker, first, *others], runners_up)


def _wanted(plans: Sequence[Plan], task: PlanTask) -> list[Plan]:
    """Those that fit; of delayed gradients alone where no others are wanted."""
    only = task.delay is not None and task.delay.only
    return [plan for plan in _fitting(plans) if plan.cyclic is not None or not only]


def _needing(plans: Sequence[Plan], error: InfeasibleError) -> InfeasibleError:
    """The error with the plan of other ways that needs least memory."""
    if not plans:
        return error
    least = min(plans, key=_peak)
    more = f"Another way needs {format_budget(_peak(least), up=True)} at least: {summary(least)}."
    known = [] if error.smallest_budget is None else [error.smallest_budget]
    return InfeasibleError(f"{error} {more}", min([_peak(least), *known]))


def _peak(plan: Plan) -> int:
    return plan.prediction.peak_memory if plan.prediction else 0


def _plans(ways: Sequence[Way], task: PlanTask) -> list[Plan]:
    return sorted((plan for way in ways for plan in way(task)), key=seconds_of)


def _fitting(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.fits]


def led(plans: Sequence[Plan], wanted: int) -> Plan:
    """The first of some plans, with the others told beside it, then their alternatives."""
    told = {summary(plan): _comparison(plan, plans[0]) for plan in reversed(plans)}
    for other in (other for plan in plans for other in plan.alternatives):
        told.setdefault(other.summary, other)
    del told[summary(plans[0])]
    ways, rest = [told.pop(summary(plan)) for plan in plans[1:] if summary(plan) in told], list(told.values())
    kept = [*ways, *rest][: max(wanted, 0)]
    kept.sort(key=lambda other: (not other.fits, other.step_seconds))
    return replace(plans[0], alternatives=tuple(kept))


def _comparison(plan: Plan, beside: Plan) -> Alternative:
    without = "without delay: " if beside.cyclic is not None and plan.cyclic is None else ""
    source = plan.provenance
    ends = (source.least_seconds, source.most_seconds) if source else (0.0, 0.0)
    return Alternative(without + summary(plan), seconds_of(plan), _peak(plan), bool(plan.fits), *ends)


def seconds_of(plan: Plan) -> float:
    """Of a step; infinite without a prediction."""
    return plan.prediction.step_seconds if plan.prediction else float("inf")


def with_one_device(plan: Plan, task: PlanTask) -> Plan:
    """The plan, with a note where one device with no strategy at all is predicted to take less and fits.

    Args:
        plan: found, on all devices.
        task: what was planned.
    """
    if plan.devices == 1 or plan.provenance is None or task.request.cluster is not None:
        return plan
    counts = sorted({1, plan.microbatches})
    quickest = min((one for count in counts if (one := _alone(task, count)) is not None), key=seconds_of, default=None)
    if quickest is None or seconds_of(quickest) >= seconds_of(plan):
        return plan
    seconds = f"{format_seconds(seconds_of(quickest))} instead of {format_seconds(seconds_of(plan))}"
    note = f"a single device is predicted to be faster ({seconds}): use one device (--gpus 1)"
    return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))


def _alone(task: PlanTask, count: int) -> Plan | None:
    """The whole batch on one device in so many micro-batches; None where it does not fit or cannot be priced."""
    request = task.request
    layers = request.graph.layers
    stage = Stage(runs_of(layers, [Strategy()] * len(layers)))
    plan = Plan(
        PLAN_VERSION, request.graph.name, 1, request.global_batch, count, DEFAULT_SCHEDULE,
        request.graph.precision, (stage,), mode=task.session.mode,
    )  # fmt: skip
    try:
        priced = price_plan(task.session.pricer, plan)
    except InputError:
        return None
    known = replace(priced, provenance=provenance(task.session.profile, task.budget, 0.0))
    return known if known.fits else None
