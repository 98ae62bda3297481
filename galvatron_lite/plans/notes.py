"""What the reader of a plan should know of his model under it."""

from __future__ import annotations

from collections.abc import Iterator

from galvatron_lite.model.graph import LayerKind, ModelGraph
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Plan


def has_batch_norms(kind: LayerKind) -> bool:
    """Whether a kind of layer takes statistics of all samples that it is given: captured, or of known shapes."""
    last = [one.name.rpartition(".")[2] for one in kind.operators if one.statistics]
    return any("batch_norm" in name or name.startswith("norm") for name in last)


def plan_notes(graph: ModelGraph, plan: Plan) -> tuple[str, ...]:
    """What results under a plan of a model's own layers are otherwise than those of one process, a line each."""
    norms = [strategy for kind, strategy in _layers(graph, plan) if has_batch_norms(kind)]
    replicas = max((one.batch_degree for one in norms), default=1)
    if not norms or replicas * plan.microbatches == 1:
        return ()
    samples = plan.microbatch // replicas
    ways = [
        *(["nn.SyncBatchNorm.convert_sync_batchnorm(model) takes those of all replicas"] if replicas > 1 else []),
        *(["--fix microbatches=1 those of all micro-batches"] if plan.microbatches > 1 else []),
    ]
    return (
        f"batch norms take statistics of as few as {samples} of the {plan.global_batch} samples of a step, those of "
        f"one replica and micro-batch, as under DDP and gradient accumulation: {', '.join(ways)}",
    )


def _layers(graph: ModelGraph, plan: Plan) -> Iterator[tuple[LayerKind, Strategy]]:
    """Every layer's kind and strategy, in the model's order."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs for _ in range(run.count)]
    for layer, strategy in zip(graph.layers, strategies, strict=True):
        yield graph.kind_of(layer), strategy
