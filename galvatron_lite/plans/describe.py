"""A plan as lines and rows for people, and notes on how a model trains under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph
from galvatron_lite.parallelism.branch.find import Branch, find_regions, trunk_of
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.parallelism.cyclic.simulation import unevenness
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import (
    BranchPlacement,
    LayerRun,
    MemoryBreakdown,
    Mode,
    Plan,
    Provenance,
    Stage,
    TimeBreakdown,
    TrainedBy,
)
from galvatron_lite.units import format_bytes, format_count, format_seconds

_BAR = 24  # characters of a memory bar
_LEAST_MERGED = 3  # consecutive equal stages from which they are shown as one
_MOST_STRATEGIES = 3  # in the line of a plan
_MOST_BARS, _END_BARS = 8, 3  # of more groups of stages, those at each end and the fullest one
_PRINTED_NAMES = {"context": "driver context"}  # as context alone is a way to parallelise
_SAME_SIZE = 0.02  # share by which a published model and a module of that name may differ (biases, padded vocabulary)
_UNEVEN = 0.005  # share by which the slowest stage must be slower than the mean for a note
_RULES = {
    CyclicRule.V1: "CDP-v1: every micro-batch uses the parameters of the step before",
    CyclicRule.V2: "CDP-v2: micro-batch i of {count} uses the newest parameters of stage j where i + j > {count}, else "
    "those of the step before",
}


@dataclass(frozen=True, slots=True)
class StageRow:
    """One run of layers of a stage, or of consecutive equal stages, as text."""

    stage: str  # numbers of the stages and the type of their devices; empty for all runs but the first
    layers: str
    strategy: str


def headline(plan: Plan) -> str:
    """The plan in a line: devices, pipeline, micro-batches."""
    stages = len(plan.stages)
    pipeline = f"{stages} stages ({plan.schedule.value})" if stages > 1 else "no pipeline"
    if plan.virtual_stages > 1:
        groups = stages // plan.virtual_stages
        pipeline = f"pipeline of {groups}, {plan.virtual_stages} stages each ({plan.schedule.value})"
    if plan.branches:
        count = f"{len(plan.branches)} branches" if len(plan.branches) > 1 else "1 branch"
        pipeline = f"{count} on devices of their own"
    if plan.cyclic is not None:
        pipeline = f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}) in {stages} stages"
    return (
        f"{plan.model} on {plan.devices} device{'s' * (plan.devices > 1)}: {pipeline}, "
        f"batch {plan.global_batch} in {plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} "
        f"of {plan.microbatch}, {plan.precision}{', trained by DeepSpeed' * (plan.backend is TrainedBy.DEEPSPEED)}"
    )


def plan_line(plan: Plan) -> str:
    """The plan in a line: its headline, the strategies of most layers, predicted time and memory."""
    layers = Counter[str]()
    for run in (run for stage in plan.stages for run in stage.runs):
        layers[str(run.strategy)] += run.count
    most = ", ".join(f"{name} ({count})" for name, count in layers.most_common(_MOST_STRATEGIES))
    parts = [headline(plan), most + ", …" * (len(layers) > _MOST_STRATEGIES)]
    if plan.prediction is not None and plan.provenance is not None:
        fullest = fullest_of(plan.stages, plan.provenance)
        budget = plan.provenance.budget_of(fullest)
        memory = f"{format_bytes(fullest.memory.total)} of {format_bytes(budget)} a device"
        seconds = f"{format_seconds(plan.prediction.step_seconds)} a {_step_name(plan)}"
        parts.append(f"predicted {seconds}, {memory} (costs {plan.provenance.profile_origin})")
    return "; ".join(parts)


def _step_name(plan: Plan) -> str:
    return "pass" if plan.mode is Mode.INFERENCE else "step"


def fits_line(plan: Plan) -> str:
    """Whether the plan is within its budget, with the figures of the fullest stage; empty without a prediction."""
    if plan.provenance is None or plan.prediction is None:
        return ""
    fullest = fullest_of(plan.stages, plan.provenance)
    figures = f"{format_bytes(fullest.memory.total)} of {format_bytes(plan.provenance.budget_of(fullest))}"
    if plan.fits:
        return f"fits: yes, {figures}"
    return f"fits: no, {figures}; too full: stage {', '.join(map(str, plan.overfull))}"


def time_line(plan: Plan) -> str:
    """The predicted step time and its parts in a line; empty without a prediction."""
    if plan.prediction is None:
        return ""
    total = plan.prediction.step_seconds
    parts = [f"{name} {seconds / total:.0%}" for name, seconds in time_parts(plan.prediction.time)]
    return f"{format_seconds(total)} a {_step_name(plan)}: " + ", ".join(parts)


def time_parts(time: TimeBreakdown) -> list[tuple[str, float]]:
    """The parts of a step in seconds, largest first, without those of 0."""
    parts = [(field.name, float(getattr(time, field.name))) for field in fields(time)]
    return sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])


def memory_parts(memory: MemoryBreakdown) -> list[tuple[str, int]]:
    """The parts of memory in bytes, largest first, without those of 0."""
    parts = [(_PRINTED_NAMES.get(field.name, field.name), int(getattr(memory, field.name))) for field in fields(memory)]
    return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def stage_groups(plan: Plan) -> list[range]:
    """Numbers of all stages in order; three or more consecutive stages with the same strategies are one group."""
    splits = [(stage.device, *(run.strategy for run in stage.runs)) for stage in plan.stages]
    groups: list[range] = []
    for _, equal in groupby(range(len(plan.stages)), key=splits.__getitem__):
        numbers = list(equal)
        merged = len(numbers) >= _LEAST_MERGED
        groups += [range(numbers[0], numbers[-1] + 1)] if merged else [range(number, number + 1) for number in numbers]
    return groups


def group_label(group: range) -> str:
    """``3``, or ``3 … 62 (60)`` for several stages."""
    return str(group[0]) if len(group) == 1 else f"{group[0]} … {group[-1]} ({len(group)})"


def stage_rows(plan: Plan) -> list[StageRow]:
    """A row for each run of layers of each group of stages."""
    rows = []
    for group in stage_groups(plan):
        stages = [plan.stages[number] for number in group]
        for index, run in enumerate(stages[0].runs):
            label = "" if index else " ".join(filter(None, (group_label(group), stages[0].device)))
            rows.append(StageRow(label, _layers([stage.runs[index] for stage in stages]), str(run.strategy)))
    return rows


def _layers(runs: Sequence[LayerRun]) -> str:
    """The layers of a run, or of the runs at the same place of several equal stages."""
    first, counts = runs[0], sorted({run.count for run in runs})
    if len(runs) == 1:
        return first.first if first.count == 1 else f"{first.first} … {first.last} ({first.count})"
    each = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{first.first} … {runs[-1].last} ({each} a stage)"


def branch_rows(plan: Plan) -> list[StageRow]:
    """A row for each run of layers of each branch; the first has the branch's devices, seconds and memory."""
    rows = []
    for branch in plan.branches:
        figures = f", {format_seconds(branch.seconds)}, {format_bytes(branch.memory.total)}" if branch.seconds else ""
        for index, run in enumerate(branch.runs):
            label = "" if index else f"{branch.name}: {device_range(branch)}{figures}"
            rows.append(StageRow(label, _layers([run]), str(run.strategy)))
    return rows


def device_range(branch: BranchPlacement) -> str:
    """``device 3``, or ``devices 4 … 7``."""
    last = branch.first + branch.devices - 1
    return f"device {last}" if branch.devices == 1 else f"devices {branch.first} … {last}"


def fullest_of(stages: Sequence[Stage], provenance: Provenance) -> Stage:
    """The stage that fills the largest share of its budget."""
    return max(stages, key=lambda stage: stage.memory.total / provenance.budget_of(stage))


def shown_groups(plan: Plan, fullest: Stage) -> list[range | None]:
    """The groups of stages that have a memory bar; None for those left out between them."""
    if plan.cyclic is not None and plan.pipeline == 1:
        return [range(len(plan.stages))]  # every device runs all stages
    groups = stage_groups(plan)
    if len(groups) <= _MOST_BARS:
        return list(groups)
    full = next(index for index, group in enumerate(groups) if any(plan.stages[number] is fullest for number in group))
    kept = sorted({*range(_END_BARS), full, *range(len(groups) - _END_BARS, len(groups))})
    shown: list[range | None] = []
    for before, after in zip([-1, *kept], kept, strict=False):
        shown += [None] * (after > before + 1) + [groups[after]]
    return shown


def memory_bar(stage: Stage, budget: int) -> str:
    """The memory of a stage's devices as a bar against the budget, with both figures."""
    share = stage.memory.total / budget if budget else 0.0
    full = min(_BAR, round(share * _BAR))
    bar = "█" * full + "·" * (_BAR - full)
    return f"{bar} {format_bytes(stage.memory.total)} of {format_bytes(budget)} ({share:.0%})"


def placed_branches(graph: ModelGraph, plan: Plan) -> list[Branch]:
    """The branches of the model that a plan places, in the plan's order.

    Raises:
        InputError: the model has no such branch, or it is placed twice.
    """
    regions = find_regions(graph) if plan.branches else ()
    branches = {branch.name: branch for region in regions for branch in region.branches}
    placed: list[Branch] = []
    for number, placement in enumerate(plan.branches):
        field, name = f"branches.{number}.name", placement.name
        if name not in branches:
            has = f"has {', '.join(branches)}" if branches else "has no independent branches"
            raise InputError(field, name, f"The model {graph.name} {has}.")
        if any(name == other.name for other in placed):
            raise InputError(field, name, "It is placed already.")
        placed.append(branches[name])
    return placed


def layers_of_parts(graph: ModelGraph, plan: Plan) -> list[tuple[Layer, ...]]:
    """The layers outside all branches, then those of each branch that a plan places, in the plan's order."""
    placed = placed_branches(graph, plan)
    by_name = {layer.name: layer for layer in graph.layers}
    return [trunk_of(graph, placed), *(tuple(by_name[name] for name in branch.layers) for branch in placed)]


def has_batch_norms(kind: LayerKind) -> bool:
    """Whether a kind of layer, captured or of a known shape, takes statistics over the samples of a batch."""
    names = [operator.name.rpartition(".")[2] for operator in kind.operators if operator.statistics]
    return any("batch_norm" in name or name.startswith("norm") for name in names)


def shares_batch(plan: Plan) -> bool:
    """Whether a plan divides the batch among devices or micro-batches."""
    degrees = (run.strategy.batch_degree for stage in plan.stages for run in stage.runs)
    return plan.microbatches > 1 or plan.cyclic is not None or any(degree > 1 for degree in degrees)


def other_size(plan: Plan, parameters: int) -> tuple[str, ...]:
    """A note if a plan was made for a model with another number of parameters."""
    planned = 0 if plan.provenance is None else plan.provenance.parameters
    if not planned or abs(parameters - planned) <= _SAME_SIZE * planned:
        return ()
    sizes = f"a model of {format_count(planned)} parameters, this one has {format_count(parameters)}"
    remedy = "its times and memory are another model's. Profile and plan this one."
    return (f"The plan was made for {sizes}: {remedy}",)


def plan_notes(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """Notes on where training under a plan gives other results than one process."""
    norms, runs = [], [[run for stage in plan.stages for run in stage.runs], *(branch.runs for branch in plan.branches)]
    for part, layers in zip(runs, layers_of_parts(graph, plan), strict=True):
        strategies = [run.strategy for run in part for _ in range(run.count)]
        for layer, strategy in zip(layers, strategies, strict=True):
            if has_batch_norms(graph.kind_of(layer)):
                norms.append(strategy)
    notes = [*_delay_notes(plan), *norm_notes(plan, norms)]
    if graph.compares and shares_batch(plan):
        notes.append(
            f"a number made of all samples decides what {graph.compares} runs, and each share of the batch would "
            "decide by its own: auto_parallelize tries whether that trains otherwise, and then refuses this plan "
            "(--fix dp=1 --fix microbatches=1 keeps the batch whole)"
        )
    return tuple(notes)


def _delay_notes(plan: Plan) -> Iterator[str]:
    """Notes on delayed gradients: the training rule, and what the step time leaves out."""
    if plan.cyclic is None:
        return
    count = len(plan.stages)
    yield f"trains by delayed gradients: the rule changes, {_RULES[plan.cyclic.rule].format(count=count)}"
    if plan.prediction is None:
        return
    # The first backward of the last micro-batch is 2(N - 1) of a step's 2N time steps later than in steady state.
    begins = f"a run begins with {2 * (count - 1)} time steps, "
    begins += f"{format_seconds((count - 1) / count * plan.prediction.step_seconds)}, until all "
    yield f"{begins}{count} micro-batches are under way; the step time is that of all later steps"
    uneven = unevenness([stage.microbatch_seconds for stage in plan.stages])
    if uneven >= _UNEVEN:
        yield f"the slowest of the {count} stages takes {uneven:.0%} longer than they take on average"


def norm_notes(plan: Plan, strategies: Sequence[Strategy]) -> tuple[str, ...]:
    """A note if batch norms take statistics over fewer samples than a step has; none for inference.

    Args:
        plan: the plan.
        strategies: of the layers with batch norms.
    """
    replicas = max((strategy.batch_degree for strategy in strategies), default=1)
    if plan.mode is not Mode.TRAINING or not strategies or replicas * plan.microbatches == 1:
        return ()
    remedies = ["nn.SyncBatchNorm.convert_sync_batchnorm(model) takes those of all replicas"] * (replicas > 1)
    if plan.microbatches > 1 and not plan.cyclic:
        remedies.append("--fix microbatches=1 those of all micro-batches")
    more = f": {', '.join(remedies)}" if remedies else ""
    samples = f"{plan.microbatch // replicas} of the {plan.global_batch} samples of a step"
    return (
        f"batch norms take statistics of as few as {samples}, those of one replica and micro-batch, as under DDP and "
        f"gradient accumulation{more}",
    )
