"""A plan in words and rows, and what its reader should know of the model under it."""

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

_BAR = 24
_ALIKE = 3  # stages that do the same and are shown as one, at the least
_MANY = 8  # memory bars at most; of more, as many of each end as ``_ENDS``, and the fullest
_ENDS = 3
_SHOWN = {"context": "driver context"}
"""Parts of the memory that have another name in print: to a reader, context alone is a way to parallelise."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One run of layers of one stage, or of several that do the same, in words."""

    # numbers of the stages, from 0, with its devices where they are of several types; empty for further runs
    stage: str
    layers: str  # names of the layers
    strategy: str  # what they do


def headline(plan: Plan) -> str:
    """The whole plan in a line: devices, pipeline, micro-batches."""
    stages = len(plan.stages)
    pipeline = f"{stages} stages ({plan.schedule.value})" if stages > 1 else "no pipeline"
    if plan.virtual_stages > 1:
        groups = stages // plan.virtual_stages
        pipeline = f"pipeline of {groups}, {plan.virtual_stages} stages each ({plan.schedule.value})"
    several = f"{len(plan.branches)} branches" if len(plan.branches) > 1 else "1 branch"
    pipeline = f"{several} on devices of their own" if plan.branches else pipeline
    if plan.cyclic is not None:
        pipeline = f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}) in {stages} stages"
    return (
        f"{plan.model} on {plan.devices} device{'s' * (plan.devices > 1)}: {pipeline}, "
        f"batch {plan.global_batch} in {plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} "
        f"of {plan.microbatch}, {plan.precision}{', trained by DeepSpeed' * (plan.backend is TrainedBy.DEEPSPEED)}"
    )


def stage_groups(plan: Plan) -> list[range]:
    """Numbers of consecutive stages that do the same with their layers, all stages in order.

    Fewer than three alike stay apart.
    """
    does = [(stage.device, *(run.strategy for run in stage.runs)) for stage in plan.stages]
    same = groupby(range(len(plan.stages)), key=does.__getitem__)
    groups: list[range] = []
    for numbers in (list(alike) for _, alike in same):
        merges = len(numbers) >= _ALIKE
        groups += [range(numbers[0], numbers[-1] + 1)] if merges else [range(number, number + 1) for number in numbers]
    return groups


def stage_rows(plan: Plan) -> list[StageRow]:
    """Every run of layers of every stage; stages that do the same have one row for all of them."""
    rows = []
    for group in stage_groups(plan):
        stages = [plan.stages[number] for number in group]
        labels = [" ".join(filter(None, (group_label(group), stages[0].device)))] + [""] * (len(stages[0].runs) - 1)
        rows += [
            StageRow(label, _layers([stage.runs[place] for stage in stages]), str(stages[0].runs[place].strategy))
            for place, label in enumerate(labels[: len(stages[0].runs)])
        ]
    return rows


def branch_rows(plan: Plan) -> list[StageRow]:
    """Every run of layers of every branch with devices of its own; the first of each says where it is, what it takes
    and what it holds."""
    rows = []
    for branch in plan.branches:
        figures = f", {format_seconds(branch.seconds)}, {format_bytes(branch.memory.total)}" if branch.seconds else ""
        labels = [f"{branch.name}: {device_range(branch)}{figures}"] + [""] * (len(branch.runs) - 1)
        rows += [
            StageRow(label, _layers([run]), str(run.strategy)) for label, run in zip(labels, branch.runs, strict=True)
        ]
    return rows


def device_range(branch: BranchPlacement) -> str:
    """``device 3``, or ``devices 4 … 7``."""
    last = branch.first + branch.devices - 1
    return f"device {last}" if branch.devices == 1 else f"devices {branch.first} … {last}"


def group_label(group: range) -> str:
    """``3``, or ``3 … 62 (60)`` for several stages."""
    return str(group[0]) if len(group) == 1 else f"{group[0]} … {group[-1]} ({len(group)})"


def shown_groups(plan: Plan, fullest: Stage) -> list[range | None]:
    """Stages to draw a memory bar for: all groups, or of many the ends and that of the fullest; None for what is not
    shown."""
    if plan.cyclic is not None and plan.pipeline == 1:
        return [range(len(plan.stages))]  # every device runs all stages
    groups = stage_groups(plan)
    if len(groups) <= _MANY:
        return list(groups)
    place = next(place for place, group in enumerate(groups) if any(plan.stages[one] is fullest for one in group))
    kept = sorted({*range(_ENDS), place, *range(len(groups) - _ENDS, len(groups))})
    shown: list[range | None] = []
    for before, after in zip([-1, *kept], kept, strict=False):
        shown += [None] * (after > before + 1) + [groups[after]]
    return shown


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


def fullest_of(stages: Sequence[Stage], made_from: Provenance) -> Stage:
    """The stage that fills most of its budget."""
    return max(stages, key=lambda stage: stage.memory.total / made_from.budget_of(stage))


def plan_line(plan: Plan) -> str:
    """The whole plan in a line: how it splits, what most of its layers do, time and memory as predicted."""
    layers = Counter[str]()
    for stage in plan.stages:
        for run in stage.runs:
            layers[str(run.strategy)] += run.count
    most = [f"{name} ({count})" for name, count in layers.most_common(_ALIKE)]
    parts = [headline(plan), ", ".join(most) + ", …" * (len(layers) > _ALIKE)]
    made_from = plan.provenance
    if plan.prediction is not None and made_from is not None:
        full = fullest_of(plan.stages, made_from)
        memory = f"{format_bytes(full.memory.total)} of {format_bytes(made_from.budget_of(full))} a device"
        what = "pass" if plan.mode is Mode.INFERENCE else "step"
        seconds = format_seconds(plan.prediction.step_seconds)
        parts.append(f"predicted {seconds} a {what}, {memory} (costs {made_from.profile_origin})")
    return "; ".join(parts)


def fits_line(plan: Plan) -> str:
    """Whether a priced plan is within its budget, with both figures of the fullest stage; empty for one without."""
    made_from = plan.provenance
    if made_from is None or plan.prediction is None:
        return ""
    fullest = fullest_of(plan.stages, made_from)
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
    return f"{format_seconds(total)} a {'pass' if plan.mode is Mode.INFERENCE else 'step'}: " + ", ".join(parts)


def _layers(runs: Sequence[LayerRun]) -> str:
    """Layers of the runs of stages that do the same; where others lie between, only where they begin."""
    first, counts = runs[0], sorted({run.count for run in runs})
    if len(runs) == 1:
        return first.first if first.count == 1 else f"{first.first} … {first.last} ({first.count})"
    each = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{first.first} … {runs[-1].last} ({each} a stage)"


def placed_branches(graph: ModelGraph, plan: Plan) -> list[Branch]:
    """The branches that a plan places, in its order."""
    regions = find_regions(graph) if plan.branches else ()
    branches = {branch.name: branch for region in regions for branch in region.branches}
    placed: list[Branch] = []
    for number, one in enumerate(plan.branches):
        if one.name not in branches:
            has = f"has {', '.join(branches)}" if branches else "has no independent branches"
            raise InputError(f"branches.{number}.name", one.name, f"The model {graph.name} {has}.")
        if any(one.name == other.name for other in placed):
            raise InputError(f"branches.{number}.name", one.name, "It is placed already.")
        placed.append(branches[one.name])
    return placed


def layers_of_parts(graph: ModelGraph, plan: Plan) -> list[tuple[Layer, ...]]:
    """The layers of the trunk, then those of each branch that a plan places, in its order."""
    placed = placed_branches(graph, plan)
    by_name = {layer.name: layer for layer in graph.layers}
    return [trunk_of(graph, placed), *(tuple(by_name[name] for name in branch.layers) for branch in placed)]


_SAME_SIZE = 0.02
"""Share by which the published shape of a model and the module of that name may differ (biases, padded words)."""


def has_batch_norms(kind: LayerKind) -> bool:
    """Whether a kind of layer takes statistics of all samples that it is given: captured, or of known shapes."""
    last = [operator.name.rpartition(".")[2] for operator in kind.operators if operator.statistics]
    return any("batch_norm" in name or name.startswith("norm") for name in last)


def shares_batch(plan: Plan) -> bool:
    """Whether a plan works on a batch in more than one share."""
    degrees = (run.strategy.batch_degree for stage in plan.stages for run in stage.runs)
    return plan.microbatches > 1 or plan.cyclic is not None or any(degree > 1 for degree in degrees)


def plan_notes(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """What results under a plan of a model's own layers are otherwise than those of one process, and what is not run; a
    line each."""
    norms = [strategy for kind, strategy in _kinds_of_parts(graph, plan) if has_batch_norms(kind)]
    return (*_delayed(plan), *norm_notes(plan, norms), *_compared(graph, plan))


def _compared(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    if not graph.compares or not shares_batch(plan):
        return ()
    return (
        f"a number made of all samples decides what {graph.compares} runs, and each share of the batch would decide by "
        "its own: auto_parallelize tries whether that trains otherwise, and then refuses this plan (--fix dp=1 --fix "
        "microbatches=1 keeps the batch whole)",
    )


def other_size(plan: Plan, parameters: int) -> tuple[str, ...]:
    """That a plan was made for a model of the same layers and another width, where it was: a sentence, or nothing."""
    known = 0 if plan.provenance is None else plan.provenance.parameters
    if not known or abs(parameters - known) <= _SAME_SIZE * known:
        return ()
    return (
        f"The plan was made for a model of {format_count(known)} parameters, this one has {format_count(parameters)}: "
        "its times and memory are another model's. Profile and plan this one.",
    )


def _delayed(plan: Plan) -> tuple[str, ...]:
    """What changes under delayed gradients, and what the step time does not tell."""
    if plan.cyclic is None:
        return ()
    count = len(plan.stages)
    return (
        f"trains by delayed gradients: the rule changes, {_RULES[plan.cyclic.rule].format(count=count)}",
        *([] if plan.prediction is None else _in_time(plan, plan.prediction.step_seconds)),
    )


_RULES = {
    CyclicRule.V1: "CDP-v1: every micro-batch uses the parameters of the step before",
    CyclicRule.V2: "CDP-v2: micro-batch i of {count} uses the newest parameters of stage j where i + j > {count}, else "
    "those of the step before",
}


def _in_time(plan: Plan, step: float) -> tuple[str, ...]:
    count = len(plan.stages)
    # The first backward of the last micro-batch, 2(N - 1) of a step's 2N time steps later than in steady state.
    begins = f"a run begins with {2 * (count - 1)} time steps, {format_seconds((count - 1) / count * step)}, until all "
    begins += f"{count} micro-batches are under way; the step time is that of all later steps"
    over = unevenness([stage.microbatch_seconds for stage in plan.stages])
    uneven = f"the slowest of the {count} stages takes {over:.0%} longer than they take on average"
    return (begins, uneven) if over >= _UNEVEN else (begins,)


_UNEVEN = 0.005
"""Stages whose slowest one takes longer than the mean by less than this share are called equal."""


def norm_notes(plan: Plan, strategies: Sequence[Strategy]) -> tuple[str, ...]:
    """Of which samples batch norms of layers with these strategies take statistics, where that is not all of a step. In
    inference they take none."""
    replicas = max((strategy.batch_degree for strategy in strategies), default=1)
    if plan.mode is not Mode.TRAINING or not strategies or replicas * plan.microbatches == 1:
        return ()
    samples = plan.microbatch // replicas
    ways = [
        *(["nn.SyncBatchNorm.convert_sync_batchnorm(model) takes those of all replicas"] if replicas > 1 else []),
        *(["--fix microbatches=1 those of all micro-batches"] if plan.microbatches > 1 and not plan.cyclic else []),
    ]
    more = f": {', '.join(ways)}" if ways else ""
    return (
        f"batch norms take statistics of as few as {samples} of the {plan.global_batch} samples of a step, those of "
        f"one replica and micro-batch, as under DDP and gradient accumulation{more}",
    )


def _kinds_of_parts(graph: ModelGraph, plan: Plan) -> Iterator[tuple[LayerKind, Strategy]]:
    """The kind and strategy of each layer: of the trunk's, then of those of each branch."""
    runs = [[run for stage in plan.stages for run in stage.runs], *(branch.runs for branch in plan.branches)]
    for part, layers in zip(runs, layers_of_parts(graph, plan), strict=True):
        strategies = [run.strategy for run in part for _ in range(run.count)]
        for layer, strategy in zip(layers, strategies, strict=True):
            yield graph.kind_of(layer), strategy
