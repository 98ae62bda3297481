"""What the groups of devices of a pipeline cost: each runs one stage, or several virtual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.simulation import OrderedStep, group_ends, run_ordered
from galvatron_lite.cost.stage import Shape, StageCost, held_memory, price_chunk
from galvatron_lite.cost.timeline_memory import GroupMemory
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.pipeline.cost import NAME as PIPELINE
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight, stride_between
from galvatron_lite.parallelism.pipeline.schedule import Moments, ScheduleConfig, group_of, stage_at
from galvatron_lite.parallelism.pipeline.times import PassOrder
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.profiler.schema import Profile


def price_stages(
    pricer: LayerPricer,
    shape: Shape,
    sizes: Sequence[int],
    strategies: Sequence[Strategy],
    *,
    ordered: bool = True,
    memory: bool = True,
) -> list[StageCost]:
    """Costs of all stages, in the order of the model; equal ones are priced once.

    Args:
        pricer: of one profile.
        shape: of the plan.
        sizes: layers of each stage.
        strategies: of all layers of the model.
        ordered: whether passes of split backward are put in order, for the memory that they need then; if not, it is
            that of the micro-batches that the schedule allows.
        memory: whether the memory of their devices is worked out too.
    """
    ends = list(accumulate(sizes))
    ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    known: dict[object, StageCost] = {}
    keys = _content(pricer, strategies)
    costs: list[StageCost] = []
    for stage, inside in enumerate(ranges):
        around = keys[max(inside.start - 1, 0) : inside.stop + 1]
        edges = (inside.start == 0, inside.stop == len(strategies), *_passed(pricer.profile.graph, inside))
        key = (around, edges, _neighbours(pricer, shape, stage))
        if key not in known:
            beside = inside if shape.virtual == 1 else _places(shape, stage, ranges)
            known[key] = price_chunk(pricer, shape, stage, inside, strategies, beside)
        costs.append(known[key])
    return _with_memory(pricer, shape, costs, ordered) if memory else costs


def _passed(graph: ModelGraph, inside: range) -> tuple[object, ...]:
    """What goes between the layers of a stage where that is more than from one to the next, and what it keeps."""
    if not graph.tensors:
        return ()
    pairs = tuple((left - inside.start, right - inside.start, size) for left, right, size in graph.exchanges(inside))
    return graph.borrowed(inside), pairs


def _neighbours(pricer: LayerPricer, shape: Shape, stage: int) -> tuple[object, ...]:
    """What lies between a stage's devices and those of the stages before and after it, and of which types they are."""
    node = pricer.profile.cluster.levels[0].size
    groups = [group_of(shape.schedule, shape.stages, other) for other in (stage - 1, stage, stage + 1)]
    left, right = (
        0 if other == groups[1] else stride_between(other, groups[1], shape.stage_devices, node)
        for other in (groups[0], groups[2])
    )
    size, cluster = shape.stage_devices, pricer.profile.cluster
    return left, right, *(cluster.type_of(range(group * size, (group + 1) * size)) for group in groups)


def _content(pricer: LayerPricer, strategies: Sequence[Strategy]) -> tuple[tuple[object, ...], ...]:
    """What the cost of each layer depends on; a layer that shares parameters is like no other."""
    graph = pricer.profile.graph
    tied = {name for tie in graph.ties for name in (tie.first, tie.second)}
    sizes = graph.crossings() if graph.tensors else (0,) * len(graph.layers)
    numbers: dict[Strategy, int] = {}
    known: dict[int, int] = {}
    for strategy in strategies:
        if id(strategy) not in known:
            known[id(strategy)] = numbers.setdefault(strategy, len(numbers))
    return tuple(
        (layer.kind, known[id(strategy)], layer.name if layer.name in tied else "", sizes[place])
        for place, (layer, strategy) in enumerate(zip(graph.layers, strategies, strict=True))
    )


def _places(shape: Shape, stage: int, ranges: Sequence[range]) -> frozenset[int]:
    """Places of all layers that the devices of a stage hold."""
    own = _own_stages(shape, group_of(shape.schedule, shape.stages, stage))
    return frozenset(place for other in own for place in ranges[other])


def _with_memory(pricer: LayerPricer, shape: Shape, costs: Sequence[StageCost], ordered: bool) -> list[StageCost]:
    """With the memory of the devices that run each stage."""
    result = list(costs)
    run = ordered_step(pricer.profile, shape, costs) if ordered and shape.schedule.splits_backward else None
    known: dict[object, MemoryBreakdown] = {}
    for group in range(shape.stages):
        own = _own_stages(shape, group)
        context = pricer.of_group(shape.stage_devices, group).profile.cluster.device.context
        key = (group if run else _held(shape, group), tuple(id(costs[stage]) for stage in own))
        if key not in known:
            stages = [costs[stage] for stage in own]
            known[key] = (
                limit_memory(shape, group, stages, context)
                if run is None
                else GroupMemory(shape, stages, context).peak(run.actions[group])
            )
        for stage in own:
            result[stage] = replace(costs[stage], memory=known[key])
    return result


def limit_memory(shape: Shape, group: int, costs: Sequence[StageCost], context: int) -> MemoryBreakdown:
    """Memory of a group that runs these stages, with as many micro-batches in flight as its schedule allows."""
    return held_memory(shape, costs, _held(shape, group), context)


def _held(shape: Shape, group: int) -> Moments:
    return chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)


def _own_stages(shape: Shape, group: int) -> list[int]:
    return [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]


def groups_of(shape: Shape, costs: Sequence[StageCost]) -> list[list[StageCost]]:
    """The stages that each group of devices runs."""
    return [[costs[stage] for stage in _own_stages(shape, group)] for group in range(shape.stages)]


def ordered_step(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> OrderedStep:
    """The passes of priced stages, in the order that their seconds ask for."""
    return run_ordered(order_of(profile, costs), course_of(shape))


def order_of(profile: Profile, costs: Sequence[StageCost]) -> PassOrder:
    """What the order of passes is made from where it depends on their seconds."""
    kept = sum(layer.kept + layer.returning for cost in costs for layer in cost.layers)
    share = round(sum(sum(cost.pending) for cost in costs) / kept, 3) if kept else 1.0
    return PassOrder(tuple(cost.times for cost in costs), hidden_share(profile), min(share, 1.0))


def busy_seconds(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Seconds from the step's beginning to the end of each group's last backward.

    From each group's first pass where steps follow one another without waiting for all groups.
    """
    if shape.schedule.splits_backward:
        step = ordered_step(profile, shape, costs)
        return step.spans if profile.steps_overlap else step.ends
    return group_ends([cost.times for cost in costs], course_of(shape), hidden_share(profile))


def course_of(shape: Shape) -> ScheduleConfig:
    """What the event graph of a shape depends on."""
    return ScheduleConfig(shape.schedule, shape.stages, shape.virtual, shape.microbatches)


def hidden_share(profile: Profile) -> float:
    """Share of a pipeline transfer that the sender's compute hides: none unless the profile says so."""
    return profile.hidden.get(PIPELINE, 0.0)
