"""A plan in words and rows, for whoever prints it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from galvatron_lite.plans.schema import LayerRun, MemoryBreakdown, Plan, Stage, TimeBreakdown
from galvatron_lite.units import format_bytes, format_seconds

_BAR = 24
_SHOWN = {"context": "driver context"}
"""Parts of the memory that have another name in print: to a reader, context alone is a way to parallelise."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One run of layers of one stage, in words.

    Attributes:
        stage: number of the stage, from 0, with its devices where they are of several types; empty for its second and
            later runs.
        layers: names of the layers.
        strategy: what they do.
    """

    stage: str
    layers: str
    strategy: str


def headline(plan: Plan) -> str:
    """The whole plan in a line: devices, pipeline, micro-batches."""
    stages = len(plan.stages)
    pipeline = f"{stages} stages ({plan.schedule.value})" if stages > 1 else "no pipeline"
    return (
        f"{plan.model} on {plan.devices} device{'s' * (plan.devices > 1)}: {pipeline}, "
        f"batch {plan.global_batch} in {plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} "
        f"of {plan.microbatch}, {plan.precision}"
    )


def stage_rows(plan: Plan) -> list[StageRow]:
    """Every run of layers of every stage."""
    rows = []
    for number, stage in enumerate(plan.stages):
        labels = [" ".join(filter(None, (str(number), stage.device)))] + [""] * (len(stage.runs) - 1)
        rows += [
            StageRow(label, _layers(run), str(run.strategy)) for label, run in zip(labels, stage.runs, strict=True)
        ]
    return rows


def memory_bar(stage: Stage, budget: int) -> str:
    """Memory of a stage's devices as a bar against the budget, with both figures."""
    share = stage.memory.total / budget if budget else 0.0
    full = min(_BAR, round(share * _BAR))
    bar = "█" * full + "·" * (_BAR - full)
    return f"{bar} {format_bytes(stage.memory.total)} of {format_bytes(budget)} ({share:.0%})"


def memory_parts(memory: MemoryBreakdown) -> list[tuple[str, int]]:
    """What fills the memory, largest first; parts that are zero left out. Bytes."""
    parts = [(_SHOWN.get(field.name, field.name), int(getattr(memory, field.name))) for field in fields(memory)]
    return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def fits_line(plan: Plan) -> str:
    """Whether a priced plan is within its budget, with both figures of the fullest stage; empty for one without."""
    made_from = plan.provenance
    if made_from is None or plan.prediction is None:
        return ""
    fullest = max(plan.stages, key=lambda stage: stage.memory.total / made_from.budget_of(stage))
    figures = f"{format_bytes(fullest.memory.total)} of {format_bytes(made_from.budget_of(fullest))}"
    if plan.fits:
        return f"fits: yes, {figures}"
    return f"fits: no, {figures}; too full: stage {', '.join(map(str, plan.overfull))}"


def time_parts(time: TimeBreakdown) -> list[tuple[str, float]]:
    """Where the step's time goes, largest first; parts that are zero left out. Seconds."""
    parts = [(field.name, float(getattr(time, field.name))) for field in fields(time)]
    return sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])


def time_line(plan: Plan) -> str:
    """The predicted step time and its parts in a line; empty for a plan without a prediction."""
    if plan.prediction is None:
        return ""
    total = plan.prediction.step_seconds
    parts = [f"{name} {seconds / total:.0%}" for name, seconds in time_parts(plan.prediction.time)]
    return f"{format_seconds(total)} a step: " + ", ".join(parts)


def _layers(run: LayerRun) -> str:
    return run.first if run.count == 1 else f"{run.first} … {run.last} ({run.count})"
