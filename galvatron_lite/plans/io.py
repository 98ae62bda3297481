"""Reading, checking and writing plans, and whether a backend can train with a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import from_data, read_data, write_value
from galvatron_lite.parallelism.backends import BACKENDS, Backend, check_mode
from galvatron_lite.parallelism.cyclic.rules import device_count
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import ADDED, DEGREES, Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, LayerRun, Plan
from galvatron_lite.units import ITEM_BYTES


def read_plan(path: Path | str) -> Plan:
    """Read and check a plan from a YAML or JSON file.

    Raises:
        FileFormatError: missing, corrupt, truncated, or of another version.
        InputError: readable, but its numbers contradict one another.
    """
    return plan_in(read_data(Path(path)), Path(path))


def plan_in(data: Any, path: Path) -> Plan:
    """Parse and check the content of a file as a plan; see ``read_plan``."""
    from galvatron_lite.plans.written import spelled_out

    refuse_phases(data, path)
    version = data.get("version") if isinstance(data, dict) else None
    if version != PLAN_VERSION:
        remedy = f"This release reads plans of version {PLAN_VERSION}. Make the plan anew."
        if isinstance(data, dict) and "version" not in data and data.keys() & {"runs", "stages"}:
            command = f"galvatron evaluate {path} --profile PROFILE -o priced.yaml"
            remedy = f"A plan written by hand is held against the model and priced first: {command}; "
            remedy += "then give priced.yaml."
        raise FileFormatError(f"{path}, version", version, remedy)
    return check_plan(from_data(Plan, spelled_out(data, str(path)), str(path)), str(path))


def is_phased(data: object) -> bool:
    """Whether the content of a file is a plan in phases."""
    return isinstance(data, dict) and "phases" in data


def refuse_phases(data: Any, path: Path) -> None:
    """Raise ``InputError`` for a plan in phases."""
    if is_phased(data):
        remedy = (
            "It holds the plans of several phases, and one is needed. Copy what stands under the plan: of a phase into "
            "a file of its own, or plan the phase alone: galvatron plan --batch BATCH --seq TOKENS -o FILE."
        )
        raise InputError(f"{path}, phases", data["phases"] and f"{len(data['phases'])} phases", remedy)


@contextmanager
def file_named(plan: object) -> Iterator[None]:
    """Name the file of a plan in errors on its parts (``plan.stages[1]: layers``) that are raised in the context."""
    try:
        yield
    except InputError as error:
        part = error.field.removeprefix("plan.")
        if part == error.field or not isinstance(plan, str | Path):
            raise
        raise InputError(f"{plan}, {part}", error.value, error.remedy) from error


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as YAML, or JSON if the name ends so, atomically."""
    write_value(path, plan)


def check_plan(plan: Plan, field: str = "plan") -> Plan:
    """Return the plan if its numbers agree with one another.

    Raises:
        InputError: names the first number that does not fit, and what would.
    """
    _check_counts(plan, field)
    for number, stage in enumerate(plan.stages):
        name = f"{field}, stages.{number}"
        if not stage.runs and not plan.branches:
            raise InputError(f"{name}, runs", "none", "A stage has at least one layer.")
        # Beside branches every device may run the other layers on all samples.
        unsplit = plan.branches and all(run.strategy == Strategy() for run in stage.runs)
        devices = 1 if unsplit else plan.stage_devices
        for index, run in enumerate(stage.runs):
            _check_run(plan, run, f"{name}.runs.{index}", devices, "each stage")
    if plan.branches:
        _check_branches(plan, field)
    return plan


def _check_counts(plan: Plan, field: str) -> None:
    stages = len(plan.stages)
    if plan.precision not in ITEM_BYTES:
        raise InputError(f"{field}, precision", plan.precision, f"Choose one of {', '.join(ITEM_BYTES)}.")
    for name in ("devices", "global_batch", "microbatches"):
        if getattr(plan, name) < 1:
            raise InputError(f"{field}, {name}", getattr(plan, name), "It is at least 1.")
    if not plan.stages:
        raise InputError(f"{field}, stages", "none", "A plan has at least one stage.")
    if plan.virtual_stages < 1 or stages % plan.virtual_stages:
        raise InputError(f"{field}, virtual_stages", plan.virtual_stages, f"It must divide the {stages} stages.")
    if plan.global_batch % plan.microbatches:
        remedy = f"It must divide the global batch, {plan.global_batch}."
        raise InputError(f"{field}, microbatches", plan.microbatches, remedy)
    if plan.cyclic is not None or not plan.schedule.executable:
        _check_cyclic(plan, field)
    elif plan.devices % plan.pipeline:
        remedy = f"It must be a multiple of the number of stages, {plan.pipeline}."
        raise InputError(f"{field}, devices", plan.devices, remedy)


def _check_cyclic(plan: Plan, field: str) -> None:
    """Cyclic data parallelism has as many micro-batches as stages; its setting determines the number of devices."""
    count = len(plan.stages)
    if plan.cyclic is None:
        remedy = "It needs cyclic: {rule: cdp-v1 or cdp-v2, setting: single, data, zero or stages}."
        raise InputError(f"{field}, schedule", plan.schedule.value, remedy)
    if plan.schedule.executable or plan.virtual_stages != 1:
        value = f"{plan.schedule.value}, {plan.virtual_stages} virtual stages"
        remedy = f"Cyclic data parallelism: schedule {DELAYED_SCHEDULE}, virtual_stages 1."
        raise InputError(f"{field}, schedule", value, remedy)
    if plan.microbatches != count:
        raise InputError(f"{field}, microbatches", plan.microbatches, f"As many as stages: {count}.")
    needed = device_count(plan.cyclic.setting, count)
    if plan.devices != needed:
        remedy = f"Setting {plan.cyclic.setting.value} with {count} stages takes {needed}."
        raise InputError(f"{field}, devices", plan.devices, remedy)


def _check_branches(plan: Plan, field: str) -> None:
    """Branches on devices of their own need a plan of one stage, and devices of the plan."""
    if len(plan.stages) != 1 or plan.cyclic is not None:
        remedy = "Beside branches there is one stage, that of the layers outside them."
        raise InputError(f"{field}, stages", len(plan.stages), remedy)
    for number, branch in enumerate(plan.branches):
        name = f"{field}, branches.{number}"
        if branch.devices < 1 or branch.first < 0 or branch.first + branch.devices > plan.devices:
            value = f"first {branch.first}, devices {branch.devices}"
            raise InputError(name, value, f"The plan has {plan.devices} devices, numbered from 0.")
        if not branch.runs:
            raise InputError(f"{name}, runs", "none", "A branch has at least one layer.")
        for index, run in enumerate(branch.runs):
            _check_run(plan, run, f"{name}.runs.{index}", branch.devices, branch.name)


def _check_run(plan: Plan, run: LayerRun, field: str, devices: int, owner: str) -> None:
    """Check one run of layers on the ``devices`` of a stage or branch, the ``owner``."""
    strategy = run.strategy
    if run.count < 1:
        raise InputError(f"{field}.count", run.count, "It is at least 1.")
    added = dict(strategy.more)
    if strategy.more != tuple((name, added[name]) for name in ADDED if added.get(name, 1) > 1):
        remedy = f"Give degrees above 1 of added dimensions, in their order: {', '.join(ADDED) or 'there are none'}."
        raise InputError(f"{field}.strategy.more", str(added), remedy)
    for name in ("expert", *DEGREES):
        if getattr(strategy, name) < 1:
            raise InputError(f"{field}.strategy.{name}", getattr(strategy, name), "A degree is at least 1.")
    if strategy.devices != devices:
        factors = " x ".join((*added, *DEGREES[:4], *(name for name in DEGREES[4:] if getattr(strategy, name) > 1)))
        remedy = f"{factors} is {strategy.devices}, but {owner} has {devices} device{'s' * (devices > 1)}."
        raise InputError(f"{field}.strategy", str(strategy), remedy)
    if plan.microbatch % strategy.batch_degree:
        replicas = f"which {strategy.batch_degree} replicas cannot share evenly."
        raise InputError(f"{field}.strategy", str(strategy), f"A micro-batch has {plan.microbatch} samples, {replicas}")
    for name, remedy in (fault for dimension in dimensions() if (fault := dimension.fault(strategy)) is not None):
        raise InputError(f"{field}.strategy.{name}", getattr(strategy, name), remedy)


def check_runs(plan: Plan, backend: Backend | None = None) -> Plan:
    """Return the plan if a backend, by default the plan's, can train with it, or run it for inference.

    Raises:
        InputError: a mode, strategy or schedule that the backend does not run, a pipeline in inference, or layers that
            differ in a setting that the backend has only once.
    """
    backend = BACKENDS[plan.backend] if backend is None else backend
    _check_kind(plan, backend)
    parts = [(f"stages.{number}", stage.runs) for number, stage in enumerate(plan.stages)]
    parts += [(f"branches.{number}", branch.runs) for number, branch in enumerate(plan.branches)]
    for part, runs in parts:
        for run in runs:
            if not backend.runs(run.strategy):
                field = f"plan, {part}, strategy of {run.first}"
                raise InputError(field, str(run.strategy), f"{backend.name} cannot train with it, only price it.")
    _check_uniform(plan, backend)
    required = backend.required(plan.schedule) if len(plan.stages) > 1 else ()
    for number, stage in enumerate(plan.stages):
        for run in stage.runs:
            for name, value in required:
                if getattr(run.strategy, name) != value:
                    field = f"plan, stages.{number}, strategy of {run.first}"
                    remedy = f"Under {plan.schedule} {backend.name} needs {name} {value}; "
                    remedy += f"{DEFAULT_SCHEDULE} takes it as it is."
                    raise InputError(field, str(run.strategy), remedy)
    return plan


def _check_kind(plan: Plan, backend: Backend) -> None:
    """Check the mode, pipeline, schedule and kind of plan."""
    check_mode(plan.mode, backend, "plan, mode")
    if len(plan.stages) > 1 and plan.mode not in backend.pipelines:
        remedy = f"{backend.name} runs no pipelines in {plan.mode.value}, only prices them: plan with --fix pp=1."
        raise InputError("plan, stages", len(plan.stages), remedy)
    if len(plan.stages) > 1 and plan.cyclic is None and plan.schedule not in backend.schedules:
        schedules = ", ".join(schedule.value for schedule in backend.schedules)
        raise InputError("plan, schedule", plan.schedule.value, f"{backend.name} trains with {schedules}.")
    if (plan.branches or plan.cyclic is not None) and not backend.beside:
        field = f"plan, {'branches' if plan.branches else 'cyclic'}"
        raise InputError(field, "given", f"{backend.name} trains with all layers one after the other alone.")


def _check_uniform(plan: Plan, backend: Backend) -> None:
    """Check settings that are the same for all layers; layers without parameters may be unsplit beside sharded ones."""
    runs = [run for stage in plan.stages for run in stage.runs]
    sharded = [run for run in runs if run.strategy.state_shards > 1 or run.strategy.offloads_states] or runs
    for name in backend.uniform:
        for run in sharded:
            value, first = getattr(run.strategy, name), getattr(sharded[0].strategy, name)
            if value != first:
                remedy = f"{backend.name} does the same to all layers, and {sharded[0].first} has {first}."
                raise InputError(f"plan, {name} of {run.first}", value, remedy)


def pipeline_of(plan: Plan) -> Pipeline:
    """The placement of a plan's stages on groups of devices, and the order of their passes."""
    return Pipeline(plan.schedule, plan.pipeline, plan.virtual_stages, plan.order)


def layer_ranges(plan: Plan) -> tuple[range, ...]:
    """Indices in the model of each stage's layers."""
    ends = list(accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))
