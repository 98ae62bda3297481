"""How a plan is executed: whether a backend trains by it, and the order of its stages' passes."""

from __future__ import annotations

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import BACKENDS, Backend, check_mode
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Plan


def check_runs(plan: Plan, backend: Backend | None = None) -> Plan:
    """The plan itself, once the backend can train with it, or run forward passes where it is for inference.

    Raises:
        InputError: a mode, strategy or schedule that it does not run, a pipeline in inference, layers that differ in
            what it does to all alike.
    """
    backend = BACKENDS[plan.backend] if backend is None else backend
    _check_kind(plan, backend)
    parts = [(f"stages.{number}", stage.runs) for number, stage in enumerate(plan.stages)]
    parts += [(f"branches.{number}", one.runs) for number, one in enumerate(plan.branches)]
    for part, runs in parts:
        for run in runs:
            if not backend.runs(run.strategy):
                place = f"plan, {part}, strategy of {run.first}"
                raise InputError(place, str(run.strategy), f"{backend.name} cannot train with it, only price it.")
    _check_alike(plan, backend)
    _check_asked(plan, backend)
    return plan


def _check_asked(plan: Plan, backend: Backend) -> None:
    asked = backend.asked(plan.schedule) if len(plan.stages) > 1 else ()
    for number, stage in enumerate(plan.stages):
        for run in stage.runs:
            for name, value in asked:
                if getattr(run.strategy, name) != value:
                    place = f"plan, stages.{number}, strategy of {run.first}"
                    remedy = f"Under {plan.schedule} {backend.name} needs {name} {value}; "
                    remedy += f"{DEFAULT_SCHEDULE} takes it as it is."
                    raise InputError(place, str(run.strategy), remedy)


def _check_kind(plan: Plan, backend: Backend) -> None:
    check_mode(plan.mode, backend, "plan, mode")
    if len(plan.stages) > 1 and plan.mode not in backend.pipelines:
        remedy = f"{backend.name} runs no pipelines in {plan.mode.value}, only prices them: plan with --fix pp=1."
        raise InputError("plan, stages", len(plan.stages), remedy)
    if len(plan.stages) > 1 and plan.cyclic is None and plan.schedule not in backend.schedules:
        known = ", ".join(schedule.value for schedule in backend.schedules)
        raise InputError("plan, schedule", plan.schedule.value, f"{backend.name} trains with {known}.")
    if (plan.branches or plan.cyclic is not None) and not backend.beside:
        what = "branches" if plan.branches else "cyclic"
        raise InputError(f"plan, {what}", "given", f"{backend.name} trains with all layers one after the other alone.")


def _check_alike(plan: Plan, backend: Backend) -> None:
    """A layer without parameters may be plain beside sharded ones: it has nothing to shard or to keep elsewhere."""
    runs = [run for stage in plan.stages for run in stage.runs]
    sharded = [run for run in runs if run.strategy.zero_stage or run.strategy.offloads_states] or runs
    for name in backend.uniform:
        for run in sharded:
            value, first = getattr(run.strategy, name), getattr(sharded[0].strategy, name)
            if value != first:
                remedy = f"{backend.name} does the same to all layers, and {sharded[0].first} has {first}."
                raise InputError(f"plan, {name} of {run.first}", value, remedy)


def pipeline_of(plan: Plan) -> Pipeline:
    """How the stages of a plan are spread, and in which order they work."""
    return Pipeline(plan.schedule, plan.pipeline, plan.virtual_stages, plan.order)
