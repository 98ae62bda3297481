"""What a run that leaves it open must have done to fit its devices: it ran, so it did fit.

Tried in the order of what it costs: the optimizer's states sharded over the replicas (ZeRO-1, which moves no more),
selective recomputation in every block, and full recomputation of as few of each stage's first blocks as will do
(Megatron-LM's ``--recompute-method block``). What a run says is never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

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

    first = price(plan)
    for milder in () if fits(first) else _milder(run, plan, graph):
        plan, priced = milder, price(milder)
        if fits(priced):
            return priced
    if fits(first) or not leaves_recompute_open(run.act_ckpt) or not _offers(graph, Recompute.FULL):
        return first
    counts = range(1, max(_blocks(plan, graph)) + 1)
    fewest = bisect_left(counts, True, key=lambda count: fits(price(recomputing(plan, graph, Recompute.FULL, count))))
    return price(recomputing(plan, graph, Recompute.FULL, counts[fewest])) if fewest < len(counts) else first


def _milder(run: PublishedRun, plan: Plan, graph: ModelGraph) -> Iterator[Plan]:
    """Changes that cost little, each on top of those before it."""
    if run.zero_stage is None:
        plan = _changed(plan, graph, lambda strategy, _: _sharded(strategy))
        yield plan
    if leaves_recompute_open(run.act_ckpt) and _offers(graph, Recompute.SELECTIVE):
        yield recomputing(plan, graph, Recompute.SELECTIVE)


def _sharded(strategy: Strategy) -> Strategy:
    if strategy.zero_stage or strategy.data * strategy.context == 1:
        return strategy
    return replace(strategy, data=1, zero=strategy.data, zero_stage=1)


def recomputing(plan: Plan, graph: ModelGraph, choice: Recompute, count: int | None = None) -> Plan:
    """The plan with another recomputation in the first ``count`` blocks of every stage (None: in all of them)."""
    return _changed(
        plan,
        graph,
        lambda strategy, place: replace(strategy, recompute=choice) if count is None or place < count else strategy,
    )


def _changed(plan: Plan, graph: ModelGraph, change: Callable[[Strategy, int], Strategy]) -> Plan:
    """The plan with other strategies of its blocks, by place in the stage; the ends share states alike."""
    layers = iter(graph.layers)
    stages = []
    for stage in plan.stages:
        inside = list(islice(layers, sum(run.count for run in stage.runs)))
        strategies = [run.strategy for run in stage.runs for _ in range(run.count)]
        stages.append(Stage(tuple(layer_runs(inside, _new(inside, strategies, change)))))
    return replace(plan, stages=tuple(stages))


def _new(
    layers: list[Layer], strategies: list[Strategy], change: Callable[[Strategy, int], Strategy]
) -> list[Strategy]:
    made, place = [], 0
    for layer, strategy in zip(layers, strategies, strict=True):
        block = layer.role is Role.BLOCK
        new = change(strategy, place)
        made.append(new if block else replace(new, recompute=strategy.recompute))
        place += block
    return made


def _blocks(plan: Plan, graph: ModelGraph) -> Iterator[int]:
    layers = iter(graph.layers)
    for stage in plan.stages:
        inside = islice(layers, sum(run.count for run in stage.runs))
        yield sum(layer.role is Role.BLOCK for layer in inside)


def _offers(graph: ModelGraph, choice: Recompute) -> bool:
    """Whether all blocks can compute so much again, and keep less if they do."""
    kinds = {layer.kind for layer in graph.layers if layer.role is Role.BLOCK}
    kept = [graph.kinds[kind].kept for kind in kinds]
    return bool(kept) and all(choice in each and each[choice].total < each[Recompute.NONE].total for each in kept)
