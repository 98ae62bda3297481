"""What the reader of a plan should know of his model under it, and the branches that a plan places."""

from __future__ import annotations

from collections.abc import Iterator

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph
from galvatron_lite.parallelism.branch.find import Branch, find_regions, trunk_of
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.parallelism.cyclic.simulation import unevenness
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import format_count, format_seconds


def placed_branches(graph: ModelGraph, plan: Plan) -> list[Branch]:
    """The branches that a plan places, in its order."""
    known = {branch.name: branch for region in find_regions(graph) for branch in region.branches}
    placed: list[Branch] = []
    for number, one in enumerate(plan.branches):
        if one.name not in known:
            has = f"has {', '.join(known)}" if known else "has no independent branches"
            raise InputError(f"branches.{number}.name", one.name, f"The model {graph.name} {has}.")
        if any(one.name == other.name for other in placed):
            raise InputError(f"branches.{number}.name", one.name, "It is placed already.")
        placed.append(known[one.name])
    return placed


def layers_of_parts(graph: ModelGraph, plan: Plan) -> list[tuple[Layer, ...]]:
    """The layers of the trunk, then those of each branch that a plan places, in its order."""
    placed = placed_branches(graph, plan)
    known = {layer.name: layer for layer in graph.layers}
    return [trunk_of(graph, placed), *(tuple(known[name] for name in branch.layers) for branch in placed)]


_SAME_SIZE = 0.02
"""Share by which the published shape of a model and the module of that name may differ (biases, padded words)."""


def has_batch_norms(kind: LayerKind) -> bool:
    """Whether a kind of layer takes statistics of all samples that it is given: captured, or of known shapes."""
    last = [one.name.rpartition(".")[2] for one in kind.operators if one.statistics]
    return any("batch_norm" in name or name.startswith("norm") for name in last)


def plan_notes(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """What results under a plan of a model's own layers are otherwise than those of one process, and what is not run; a
    line each."""
    return (*_delayed(plan), *_normed(graph, plan))


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


def _normed(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    norms = [
        strategy for kind, strategy in (_in_parts if plan.branches else _layers)(graph, plan) if has_batch_norms(kind)
    ]
    replicas = max((one.batch_degree for one in norms), default=1)
    if not norms or replicas * plan.microbatches == 1:
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


def _layers(graph: ModelGraph, plan: Plan) -> Iterator[tuple[LayerKind, Strategy]]:
    strategies = [run.strategy for stage in plan.stages for run in stage.runs for _ in range(run.count)]
    for layer, strategy in zip(graph.layers, strategies, strict=True):
        yield graph.kind_of(layer), strategy


def _in_parts(graph: ModelGraph, plan: Plan) -> Iterator[tuple[LayerKind, Strategy]]:
    """The same of a plan with branches: the trunk's layers, then those of each branch."""
    runs = [plan.stages[0].runs, *(one.runs for one in plan.branches)]
    for own, layers in zip(runs, layers_of_parts(graph, plan), strict=True):
        strategies = [run.strategy for run in own for _ in range(run.count)]
        for layer, strategy in zip(layers, strategies, strict=True):
            yield graph.kind_of(layer), strategy
