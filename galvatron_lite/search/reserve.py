"""The second attempt where nothing fits: with what the backend uses only on request, as host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from math import inf

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import changed
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.families.family import PlanTask
from galvatron_lite.search.pins import typed_name
from galvatron_lite.search.refusals import infeasible
from galvatron_lite.units import format_bytes


def with_reserve(planned: Callable[..., Plan], task: PlanTask) -> Plan:
    """The plan of a task; where none fits in device memory, the first that fits with the backend's reserve.

    Args:
        planned: makes the plan of a task; ``explain=False`` leaves out what would make a plan fit from its error.
        task: what is planned.

    Raises:
        InfeasibleError: nothing fits either way.
    """
    attempts = [*_with_pins(task)]
    if not attempts:
        return planned(task)
    for attempt in [task, *attempts]:
        try:
            plan = planned(attempt, explain=False)
        except InfeasibleError:
            continue
        return plan if attempt is task else _noted(plan, task)
    try:
        return planned(task)
    except InfeasibleError as error:
        raise _least_demanding(error, attempts) from None


def _least_demanding(error: InfeasibleError, attempts: Sequence[PlanTask]) -> InfeasibleError:
    """The error of a task, or of the attempt with the backend's reserve that needs a smaller budget."""
    least = error
    for attempt in attempts:
        name, value = attempt.request.fixed.strategy[-1]
        means = f" with host memory ({typed_name(name)}={getattr(value, 'value', value)})"
        other = infeasible(attempt.request, attempt.session.pricer, means)
        least = min(least, other, key=lambda one: one.smallest_budget or inf)
    _, _, remedies = str(error).partition("\n")
    return error if least is error else InfeasibleError(f"{least}\n{remedies}".strip(), least.smallest_budget)


def _with_pins(task: PlanTask) -> Iterator[PlanTask]:
    """The task under each use of the backend's reserve in all layers; none where that is decided or does not exist."""
    fixed = task.request.fixed
    decided = {*fixed.forbidden, *(name for name, _ in fixed.pinned), *(name for _, name, _ in fixed.layers)}
    for name, usual in task.backend.reserved.items() if task.session.profile.cluster.device.host_bandwidth else ():
        if name not in decided and isinstance(usual, Enum):
            for value in type(usual):
                if value is not usual:
                    yield replace(task, request=replace(task.request, fixed=fixed.with_pins(((name, value),))))


def _noted(plan: Plan, task: PlanTask) -> Plan:
    need = format_bytes(_reserve_bytes(task.session.pricer, plan, task.backend))
    note = f"Nothing fits in device memory alone: about {need} of each device's data are kept in host memory"
    source = plan.provenance and replace(plan.provenance, notes=(note, *plan.provenance.notes))
    return replace(plan, provenance=source)


def _reserve_bytes(pricer: LayerPricer, plan: Plan, backend: Backend) -> int:
    """Bytes by which the fullest device would need more memory of its own without the backend's reserve."""
    stages = tuple(
        replace(stage, runs=tuple(replace(run, strategy=changed(run.strategy, backend.reserved)) for run in stage.runs))
        for stage in plan.stages
    )
    without = price_plan(pricer, replace(plan, stages=stages))
    return max(a.memory.total - b.memory.total for a, b in zip(without.stages, plan.stages, strict=True))
