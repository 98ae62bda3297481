"""Whether one device alone would be quicker than the plan: the search itself uses all devices that it is given."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, Plan, Schedule, Stage
from galvatron_lite.search.result import provenance, runs_of
from galvatron_lite.search.ways import PlanTask, seconds_of
from galvatron_lite.units import format_seconds


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
    what = f"one device alone is predicted quicker, {format_seconds(seconds_of(quickest))}"
    note = f"{what} instead of {format_seconds(seconds_of(plan))}: plan for 1 device"
    return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))


def _alone(task: PlanTask, count: int) -> Plan | None:
    """The whole batch on one device in so many micro-batches; None where it does not fit or cannot be priced."""
    request = task.request
    layers = request.graph.layers
    stage = Stage(runs_of(layers, [Strategy()] * len(layers)))
    plan = Plan(
        PLAN_VERSION, request.graph.name, 1, request.global_batch, count, Schedule.ONE_F_ONE_B,
        request.graph.precision, (stage,), mode=task.session.mode,
    )  # fmt: skip
    try:
        priced = price_plan(task.session.pricer, plan)
    except InputError:
        return None
    known = replace(priced, provenance=provenance(task.session.profile, task.budget, 0.0))
    return known if known.fits else None
