"""What a plan in stages costs: step time and peak memory, with where they go; and the parts of that which every
kind of plan shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import log2

from galvatron_lite.cost.forward_only import step_flops
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.pass_memory import GroupMemory
from galvatron_lite.cost.schedule import OrderedStep, closed_form, group_ends, run_ordered
from galvatron_lite.cost.stage import Shape, StageCost, held_memory, price_chunk
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.pipeline.cost import NAME as PIPELINE
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight, stride_between
from galvatron_lite.parallelism.pipeline.schedule import Moments, ScheduleConfig, group_of, stage_at
from galvatron_lite.parallelism.pipeline.times import PassOrder
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown, Plan, Prediction, TimeBreakdown
from galvatron_lite.profiler.schema import Profile


def price_staged(pricer: LayerPricer, plan: Plan) -> Plan:
    """The plan with its prediction filled in, and memory and seconds of every stage; no branches, no delay.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    costs = price_stages(pricer, shape, sizes, strategies)
    stages = tuple(
        replace(
            stage,
            memory=cost.memory,
            microbatch_seconds=cost.times.forward + cost.times.backward,
            device=device_of(pricer, shape, number),
        )
        for number, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True))
    )
    order = order_of(pricer.profile, costs) if shape.schedule.splits_backward and shape.stages > 1 else None
    return replace(plan, stages=stages, prediction=predict(pricer.profile, plan, shape, costs), order=order)


def device_of(pricer: LayerPricer, shape: Shape, stage: int) -> str:
    """Name of a stage's devices in a cluster of several types; empty where all are alike or it has several."""
    group_pricer = pricer.of_group(shape.stage_devices, group_of(shape.schedule, shape.stages, stage))
    return "" if group_pricer is pricer else group_pricer.profile.cluster.device.name


def device_memory(plan: Plan) -> tuple[MemoryBreakdown, ...]:
    """Predicted bytes on one device of each group, first ranks first, from an evaluated plan."""
    order = [stage_at(plan.schedule, plan.pipeline, group, 0) for group in range(plan.pipeline)]
    return tuple(plan.stages[stage].memory for stage in order)


def strategies_of(plan: Plan, profile: Profile) -> list[Strategy]:
    """The strategy of every layer of the model, in order.

    Raises:
        InputError: the plan's layers are not the model's, or a replica gets fewer samples than the model runs on.
    """
    names = [layer.name for layer in profile.graph.layers]
    strategies: list[Strategy] = []
    for run in (run for stage in plan.stages for run in stage.runs):
        covered = names[len(strategies) : len(strategies) + run.count]
        if not covered or (covered[0], covered[-1], len(covered)) != (run.first, run.last, run.count):
            follows = f"goes on with {covered[0]} .. {covered[-1]}" if covered else f"has only {len(names)} layers"
            raise InputError("stages.runs", f"{run.first} .. {run.last}", f"The model {profile.graph.name} {follows}.")
        strategies.extend([run.strategy] * run.count)
        least, samples = profile.graph.least_samples, plan.microbatch // run.strategy.batch_degree
        if 0 < samples < least:
            remedy = f"A replica gets {samples} a micro-batch, and the model trains on {least} or more (batch norm)."
            raise InputError("microbatches", plan.microbatches, remedy)
    if len(strategies) != len(names):
        raise InputError("stages.runs", len(strategies), f"The model has {len(names)} layers; plan them all.")
    return strategies


def shape_of(plan: Plan, strategies: Sequence[Strategy]) -> Shape:
    """What a plan chooses once for all layers.

    Raises:
        InputError: its numbers do not divide.
    """
    _check_stages(plan)
    stages = plan.pipeline
    for field, total, part in (
        ("devices", plan.devices, stages),
        ("microbatches", plan.global_batch, plan.microbatches),
    ):
        if part < 1 or total % part:
            raise InputError(field, total, f"It must be divisible by {part}.")
    shape = Shape(plan.devices, stages, plan.microbatches, plan.microbatch, plan.schedule, plan.virtual_stages)
    for strategy in set(strategies):
        if strategy.devices != shape.stage_devices:
            raise InputError("strategy", str(strategy), f"A stage has {shape.stage_devices} devices; use them all.")
        if shape.microbatch % strategy.batch_degree:
            raise InputError("microbatches", plan.microbatches, f"{shape.microbatch} samples do not divide: {strategy}")
    return shape


def _check_stages(plan: Plan) -> None:
    virtual = plan.virtual_stages
    if virtual < 1 or len(plan.stages) % virtual or not plan.stages:
        raise InputError("virtual_stages", virtual, f"It must divide the {len(plan.stages)} stages.")
    wanted = plan.schedule.virtual_stages
    if wanted is not None and virtual != wanted:
        raise InputError("virtual_stages", virtual, f"Schedule {plan.schedule.value} runs {wanted} a group of devices.")


def predict(profile: Profile, plan: Plan, shape: Shape, costs: Sequence[StageCost]) -> Prediction:
    """Step time and memory of priced stages."""
    host = profile.overhead.step
    groups = groups_of(shape, costs)
    ends = busy_seconds(profile, shape, costs)
    steps = [sum(cost.step for cost in group) for group in groups]
    alone = max(end + step for end, step in zip(ends, steps, strict=True)) + host
    seconds = alone * straggling(profile, plan.devices)
    samples = plan.global_batch / seconds
    return Prediction(
        step_seconds=seconds,
        time=breakdown(groups, shape.microbatches, seconds, host + seconds - alone),
        samples_per_second=samples,
        tokens_per_second=samples * profile.graph.sequence,
        mfu=step_flops(profile) * samples / profile.cluster.peak(profile.graph.precision, plan.devices),
        peak_memory=max(cost.memory.total for cost in costs),
    )


def straggling(profile: Profile, devices: int) -> float:
    """Factor on the step time for the slowest of many: it grows with each doubling of nodes, and of those in a node."""
    node = profile.cluster.levels[0].size
    near = 1.0 + profile.sharing * log2(min(devices, node))
    return near * (1.0 + profile.straggling * max(log2(devices / node), 0.0))


def bound_seconds(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> float:
    """What the search optimises: the closed form of ``cost.schedule`` plus the longest work once a step.

    Equal to the step time that ``predict`` gives without a pipeline, else mostly a little more, see ``cost.schedule``.
    """
    times, overlap = [cost.times for cost in costs], profile.steps_overlap
    work = closed_form(times, shape.microbatches, shape.schedule, shape.virtual, steps_overlap=overlap)
    longest = max(sum(cost.step for cost in group) for group in groups_of(shape, costs))
    alone = work + longest + profile.overhead.step
    return alone * straggling(profile, shape.devices)


def breakdown(groups: Sequence[Sequence[StageCost]], microbatches: int, seconds: float, host: float) -> TimeBreakdown:
    """Where the time of the slowest group goes; what is not its own work is waiting for other stages, or, where
    there are none, the host's fixed work for each micro-batch."""
    slowest = max(groups, key=lambda group: (sum(c.times.total for c in group), sum(c.step for c in group)))
    layers = [layer for cost in slowest for layer in cost.layers]
    moving = sum(cost.moving for cost in slowest)
    exposed = sum(layer.forward_exposed + layer.backward_exposed for layer in layers) + moving
    computed = TimeBreakdown(
        forward=microbatches * sum(layer.forward for layer in layers),
        backward=microbatches * sum(layer.backward for layer in layers),
        recompute=microbatches * sum(layer.recompute for layer in layers),
        communication=microbatches * exposed + sum(layer.step_exposed for layer in layers),
        optimizer=sum(layer.update for layer in layers),
        other=microbatches * sum(layer.host for layer in layers) + sum(layer.step_host for layer in layers) + host,
    )
    left = max(seconds - computed.total, 0.0)
    return replace(computed, pipeline=left) if len(groups) > 1 else replace(computed, other=computed.other + left)


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
    cache: dict[object, StageCost] = {}
    keys = _content(pricer, strategies)
    costs: list[StageCost] = []
    for stage, inside in enumerate(ranges):
        around = keys[max(inside.start - 1, 0) : inside.stop + 1]
        edges = (inside.start == 0, inside.stop == len(strategies), *_passed(pricer.profile.graph, inside))
        key = (around, edges, _neighbours(pricer, shape, stage))
        if key not in cache:
            beside = inside if shape.virtual == 1 else _places(shape, stage, ranges)
            cache[key] = price_chunk(pricer, shape, stage, inside, strategies, beside)
        costs.append(cache[key])
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
    stages = _stages_of_group(shape, group_of(shape.schedule, shape.stages, stage))
    return frozenset(place for other in stages for place in ranges[other])


def _with_memory(pricer: LayerPricer, shape: Shape, costs: Sequence[StageCost], ordered: bool) -> list[StageCost]:
    """With the memory of the devices that run each stage."""
    result = list(costs)
    run = ordered_step(pricer.profile, shape, costs) if ordered and shape.schedule.splits_backward else None
    cache: dict[object, MemoryBreakdown] = {}
    for group in range(shape.stages):
        own = _stages_of_group(shape, group)
        context = pricer.of_group(shape.stage_devices, group).profile.cluster.device.context
        key = (group if run else _held(shape, group), tuple(id(costs[stage]) for stage in own))
        if key not in cache:
            stages = [costs[stage] for stage in own]
            cache[key] = (
                limit_memory(shape, group, stages, context)
                if run is None
                else GroupMemory(shape, stages, context).peak(run.actions[group])
            )
        for stage in own:
            result[stage] = replace(costs[stage], memory=cache[key])
    return result


def limit_memory(shape: Shape, group: int, costs: Sequence[StageCost], context: int) -> MemoryBreakdown:
    """Memory of a group that runs these stages, with as many micro-batches in flight as its schedule allows."""
    return held_memory(shape, costs, _held(shape, group), context)


def _held(shape: Shape, group: int) -> Moments:
    return chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)


def _stages_of_group(shape: Shape, group: int) -> list[int]:
    return [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]


def groups_of(shape: Shape, costs: Sequence[StageCost]) -> list[list[StageCost]]:
    """The stages that each group of devices runs."""
    return [[costs[stage] for stage in _stages_of_group(shape, group)] for group in range(shape.stages)]


def ordered_step(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> OrderedStep:
    """The passes of priced stages, in the order that their seconds ask for."""
    return run_ordered(order_of(profile, costs), course_of(shape))


def order_of(profile: Profile, costs: Sequence[StageCost]) -> PassOrder:
    """What the order of passes is made from where it depends on their seconds."""
    kept = sum(layer.kept + layer.offloaded for cost in costs for layer in cost.layers)
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
