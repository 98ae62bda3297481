"""What a run that leaves it open must have done to fit its devices: it ran, so it did fit.

Tried in the order of what it costs: the optimizer's states sharded over the replicas (ZeRO-1, which moves no more),
selective recomputation in every block, and full recomputation of as few of each stage's first blocks as will do
(Megatron-LM's ``--recompute-method block``). What a run says is never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, islice

from galvatron_lite.model.graph import Layer, ModelGraph, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Stage, layer_runs
from galvatron_lite.validate.rows import PublishedRun

Price = Callable[[Plan], Plan]


def leaves_recompute_open(text: str | None) -> bool:
    """Whether a run does not say what it computes again."""
    said = (text or "unknown").lower()
    return "unknown" in said or "none stated" in said


def fitting(run: PublishedRun, plan: Plan, graph: ModelGraph, price: Price, capacity: int) -> Plan:
    """The priced plan, changed as little as makes it fit where the run leaves that open; as it is if nothing does."""

    def fits(candidate: Plan) -> bool:
        prediction = candidate.prediction
        return prediction is None or prediction.peak_memory <= capacity

    first, unsaid = price(plan), leaves_recompute_open(run.act_ckpt)
    if fits(first):
        return first
    if run.zero_stage is None:
        plan = _changed(plan, graph, lambda strategy, _: _sharded(strategy))
        if fits(priced := price(plan)):
            return priced
    if unsaid and _offers(graph, Recompute.SELECTIVE):
        plan = recomputing(plan, graph, Recompute.SELECTIVE)
        if fits(priced := price(plan)):
            return priced
    if not unsaid or not _offers(graph, Recompute.FULL):
        return first
    blocks = max(sum(layer.role is Role.BLOCK for layer in layers) for layers, _ in _stages(plan, graph))
    counts = range(1, blocks + 1)
    fewest = bisect_left(counts, True, key=lambda count: fits(price(recomputing(plan, graph, Recompute.FULL, count))))
    return price(recomputing(plan, graph, Recompute.FULL, counts[fewest])) if fewest < len(counts) else first


def _sharded(strategy: Strategy) -> Strategy:
    if strategy.zero_stage or strategy.data * strategy.context == 1:
        return strategy
    return replace(strategy, data=1, zero=strategy.data, zero_stage=1)


def recomputing(plan: Plan, graph: ModelGraph, choice: Recompute, count: int | None = None) -> Plan:
    """The plan with another recomputation in the first ``count`` blocks of every stage (None: in all of them)."""

    def change(strategy: Strategy, place: int) -> Strategy:
        return replace(strategy, recompute=choice) if count is None or place < count else strategy

    return _changed(plan, graph, change)


def _stages(plan: Plan, graph: ModelGraph) -> Iterator[tuple[list[Layer], list[Strategy]]]:
    """Layers and strategies of each stage."""
    layers = iter(graph.layers)
    for stage in plan.stages:
        strategies = [run.strategy for run in stage.runs for _ in range(run.count)]
        yield list(islice(layers, len(strategies))), strategies


def _changed(plan: Plan, graph: ModelGraph, change: Callable[[Strategy, int], Strategy]) -> Plan:
    """The plan with other strategies of its blocks, by place in the stage; the ends share states alike."""
    stages = []
    for layers, strategies in _stages(plan, graph):
        blocks = [layer.role is Role.BLOCK for layer in layers]
        places = accumulate(blocks, initial=0)  # of each layer, by the blocks before it
        changed = [change(strategy, place) for strategy, place in zip(strategies, places, strict=False)]
        kept = zip(blocks, changed, strategies, strict=True)
        changed = [new if block else replace(new, recompute=old.recompute) for block, new, old in kept]
        stages.append(Stage(tuple(layer_runs(layers, changed))))
    return replace(plan, stages=tuple(stages))


def _offers(graph: ModelGraph, choice: Recompute) -> bool:
    """Whether all blocks can compute so much again, and keep less if they do."""
    kinds = {layer.kind for layer in graph.layers if layer.role is Role.BLOCK}
    kept = [graph.kinds[kind].kept for kind in kinds]
    return bool(kept) and all(choice in each and each[choice].total < each[Recompute.NONE].total for each in kept)
