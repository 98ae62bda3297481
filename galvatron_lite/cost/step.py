"""What a plan costs that is divided into stages: step time, memory, and where both go.

Also what every kind of plan needs: its strategies, the slow-down of many devices, and its prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import log2

from galvatron_lite.cost.forward_only import step_flops
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.cost.pass_memory import GroupMemory
from galvatron_lite.cost.schedule import OrderedStep, closed_form, group_ends, run_ordered
from galvatron_lite.cost.stage import Shape, StageCost, price_stage
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.pipeline.cost import NAME as PIPELINE
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight, fills, stride_between
from galvatron_lite.parallelism.pipeline.schedule import Moments, ScheduleConfig, group_of, most_of, stage_at
from galvatron_lite.parallelism.pipeline.times import PassOrder
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, MemoryBreakdown, Plan, Prediction, TimeBreakdown
from galvatron_lite.profiler.schema import Profile


def price_staged(pricer: LayerPricer, plan: Plan) -> Plan:
    """Return the plan with its prediction, and memory and seconds of every stage; without branches or delay.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    costs = price_stages(pricer, shape, [sum(run.count for run in stage.runs) for stage in plan.stages], strategies)
    stages = tuple(
        replace(
            stage,
            memory=cost.memory,
            microbatch_seconds=cost.times.forward + cost.times.backward,
            device=_device_of(pricer, shape, index),
        )
        for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True))
    )
    order = order_of(pricer.profile, costs) if shape.schedule.splits_backward and shape.stages > 1 else None
    return replace(plan, stages=stages, prediction=predict(pricer.profile, plan, shape, costs), order=order)


def _device_of(pricer: LayerPricer, shape: Shape, stage: int) -> str:
    """The type of a stage's devices; empty if all of the cluster are of one type, or the stage has several."""
    group_pricer = pricer.of_group(shape.stage_devices, group_of(shape.schedule, shape.stages, stage))
    return "" if group_pricer is pricer else group_pricer.profile.cluster.device.name


def device_memory(plan: Plan) -> tuple[MemoryBreakdown, ...]:
    """Return the predicted bytes on one device of each group, first ranks first, of an evaluated plan."""
    first_stages = [stage_at(plan.schedule, plan.pipeline, group, 0) for group in range(plan.pipeline)]
    return tuple(plan.stages[stage].memory for stage in first_stages)


def strategies_of(plan: Plan, profile: Profile) -> list[Strategy]:
    """Return the strategy of every layer of the model, in order.

    Raises:
        InputError: the plan's layers are not the model's, or a replica gets fewer samples than the model runs on.
    """
    graph = profile.graph
    runs = [run for stage in plan.stages for run in stage.runs]
    strategies = strategies_of_runs(
        runs, [layer.name for layer in graph.layers], "stages.runs", f"The model {graph.name}"
    )
    least = profile.least_samples
    for strategy in dict.fromkeys(strategies):
        samples = plan.microbatch // strategy.batch_degree
        if 0 < samples < least:
            remedy = f"A replica gets {samples} a micro-batch, and the model trains on {least} or more."
            raise InputError("microbatches", plan.microbatches, remedy)
    return strategies


def strategies_of_runs(runs: Sequence[LayerRun], layers: Sequence[str], field: str, subject: str) -> list[Strategy]:
    """Return the strategy of every layer of runs, in order.

    Args:
        runs: of consecutive layers.
        layers: names that the runs must have.
        field: of the plan, for errors.
        subject: what has these layers, for errors.

    Raises:
        InputError: the runs are not of these layers.
    """
    strategies: list[Strategy] = []
    for run in runs:
        covered = layers[len(strategies) : len(strategies) + run.count]
        if not covered or (covered[0], covered[-1], len(covered)) != (run.first, run.last, run.count):
            follows = f"goes on with {covered[0]} .. {covered[-1]}" if covered else f"has only {len(layers)} layers"
            raise InputError(field, f"{run.first} .. {run.last}", f"{subject} {follows}.")
        strategies.extend([run.strategy] * run.count)
    if len(strategies) != len(layers):
        raise InputError(field, len(strategies), f"{subject} has {len(layers)} layers; plan them all.")
    return strategies


def shape_of(plan: Plan, strategies: Sequence[Strategy]) -> Shape:
    """Return the shape of a plan.

    Raises:
        InputError: its numbers do not divide.
    """
    virtual, required = plan.virtual_stages, plan.schedule.virtual_stages
    if virtual < 1 or len(plan.stages) % virtual or not plan.stages:
        raise InputError("virtual_stages", virtual, f"It must divide the {len(plan.stages)} stages.")
    if required is not None and virtual != required:
        remedy = f"Schedule {plan.schedule.value} runs {required} a group of devices."
        raise InputError("virtual_stages", virtual, remedy)
    for field, total, parts in (
        ("devices", plan.devices, plan.pipeline),
        ("microbatches", plan.global_batch, plan.microbatches),
    ):
        if parts < 1 or total % parts:
            raise InputError(field, total, f"It must be divisible by {parts}.")
    shape = Shape(plan.devices, plan.pipeline, plan.microbatches, plan.microbatch, plan.schedule, virtual)
    for strategy in set(strategies):
        if strategy.devices != shape.stage_devices:
            raise InputError("strategy", str(strategy), f"A stage has {shape.stage_devices} devices; use them all.")
        if shape.microbatch % strategy.batch_degree:
            raise InputError("microbatches", plan.microbatches, f"{shape.microbatch} samples do not divide: {strategy}")
    return shape


def predict(profile: Profile, plan: Plan, shape: Shape, costs: Sequence[StageCost]) -> Prediction:
    """Predict step time and memory from the costs of stages.

    The passes of a step are simulated. Every group of devices ends its last backward and then does its work once a
    step; the step ends with the last of them. Fixed host time, and waiting for the slowest device, are added.
    """
    host = profile.overhead.step
    groups = groups_of(shape, costs)
    steps = [sum(cost.step for cost in group) for group in groups]
    ends = busy_seconds(profile, shape, costs)
    even = max(end + step for end, step in zip(ends, steps, strict=True)) + host
    seconds = even * straggling(profile, plan.devices)
    time = breakdown(groups, shape.microbatches, seconds, host + seconds - even, hidden_send_share(profile))
    return prediction_of(profile, plan, seconds, time, max(cost.memory.total for cost in costs))


def prediction_of(profile: Profile, plan: Plan, seconds: float, time: TimeBreakdown, peak_memory: int) -> Prediction:
    """Return a prediction with the rates that follow from the seconds of a step."""
    samples = plan.global_batch / seconds
    return Prediction(
        step_seconds=seconds,
        time=time,
        samples_per_second=samples,
        tokens_per_second=samples * profile.graph.sequence,
        mfu=step_flops(profile) * samples / profile.cluster.peak(profile.graph.precision, plan.devices),
        peak_memory=peak_memory,
    )


def straggling(profile: Profile, devices: int) -> float:
    """Return the factor on the step time for the slowest of many devices.

    It grows with each doubling of nodes, and of the devices in a node.
    """
    node = profile.cluster.levels[0].size
    near = 1.0 + profile.sharing * log2(min(devices, node))
    return near * (1.0 + profile.straggling * max(log2(devices / node), 0.0))


def bound_seconds(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> float:
    """Return what the search minimises: the closed form of ``cost.schedule``, plus the longest work once a step.

    It is the step time of ``predict`` without a pipeline, and mostly a little more with one.
    """
    times, overlap = [cost.times for cost in costs], profile.steps_overlap
    passes = closed_form(times, shape.microbatches, shape.schedule, shape.virtual, steps_overlap=overlap)
    step = max(sum(cost.step for cost in group) for group in groups_of(shape, costs))
    return (passes + step + profile.overhead.step) * straggling(profile, shape.devices)


def breakdown(
    groups: Sequence[Sequence[StageCost]], microbatches: int, seconds: float, host: float, hidden: float = 0.0
) -> TimeBreakdown:
    """Break down the step time of the slowest group.

    What is not its work is waiting for other stages or, without any, fixed host work of each micro-batch.

    Args:
        groups: stages of each.
        microbatches: a step.
        seconds: of the step.
        host: seconds of host work once a step, and of waiting for the slowest device.
        hidden: share of a send that the sender's compute hides.
    """
    slowest = max(groups, key=lambda group: (sum(c.times.total for c in group), sum(c.step for c in group)))
    layers = [layer for cost in slowest for layer in cost.layers]
    sends = sum(cost.times.send_forward + cost.times.send_backward for cost in slowest)
    moving = sum(cost.moving for cost in slowest) + (1.0 - hidden) * sends
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
    """Price all stages, in the order of the model; equal stages are priced once.

    Args:
        pricer: of the profile.
        shape: of the plan.
        sizes: layers of each stage.
        strategies: of all layers of the model.
        ordered: whether the memory of schedules that split backward is that of their passes in order; if not, it is
            that of as many micro-batches as the schedule allows.
        memory: whether to compute memory.
    """
    stops = list(accumulate(sizes))
    ranges = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    cache: dict[object, StageCost] = {}
    contents = _layer_contents(pricer, strategies)
    costs: list[StageCost] = []
    for stage, inside in enumerate(ranges):
        around = contents[max(inside.start - 1, 0) : inside.stop + 1]
        edges = (inside.start == 0, inside.stop == len(strategies), *_passed_tensors(pricer.profile.graph, inside))
        key = (around, edges, _surroundings(pricer, shape, stage))
        if key not in cache:
            group = group_of(shape.schedule, shape.stages, stage)
            same_devices = frozenset(index for other in _stages_of_group(shape, group) for index in ranges[other])
            cache[key] = price_stage(pricer, shape, stage, inside, strategies, same_devices)
        costs.append(cache[key])
    return _with_memory(pricer, shape, costs, ordered) if memory else costs


def _layer_contents(pricer: LayerPricer, strategies: Sequence[Strategy]) -> tuple[tuple[object, ...], ...]:
    """What the cost of each layer depends on; a layer that shares parameters is like no other."""
    graph = pricer.profile.graph
    tied = {name for tie in graph.ties for name in (tie.first, tie.second)}
    sizes = graph.crossings() if graph.tensors else (0,) * len(graph.layers)
    numbers: dict[Strategy, int] = {}
    by_identity: dict[int, int] = {}  # hashing a strategy takes long
    for strategy in strategies:
        if id(strategy) not in by_identity:
            by_identity[id(strategy)] = numbers.setdefault(strategy, len(numbers))
    return tuple(
        (layer.kind, by_identity[id(strategy)], layer.name if layer.name in tied else "", sizes[index])
        for index, (layer, strategy) in enumerate(zip(graph.layers, strategies, strict=True))
    )


def _passed_tensors(graph: ModelGraph, inside: range) -> tuple[object, ...]:
    """What a stage carries, and what its layers pass on to layers other than the next."""
    if not graph.tensors:
        return ()
    pairs = tuple((left - inside.start, right - inside.start, size) for left, right, size in graph.exchanges(inside))
    return graph.borrowed(inside), pairs


def _surroundings(pricer: LayerPricer, shape: Shape, stage: int) -> tuple[object, ...]:
    """The links between a stage's devices and those of the stages before and after it, and the types of them all."""
    cluster, size = pricer.profile.cluster, shape.stage_devices
    left, here, right = (group_of(shape.schedule, shape.stages, other) for other in (stage - 1, stage, stage + 1))
    strides = (
        0 if other == here else stride_between(other, here, size, cluster.levels[0].size) for other in (left, right)
    )
    return *strides, *(cluster.type_of(range(group * size, (group + 1) * size)) for group in (left, here, right))


def _with_memory(pricer: LayerPricer, shape: Shape, costs: Sequence[StageCost], ordered: bool) -> list[StageCost]:
    """Add the memory of the devices that run each stage."""
    result = list(costs)
    step = ordered_step(pricer.profile, shape, costs) if ordered and shape.schedule.splits_backward else None
    cache: dict[object, MemoryBreakdown] = {}
    for group in range(shape.stages):
        stages = _stages_of_group(shape, group)
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        key = (group if step else held, tuple(id(costs[stage]) for stage in stages))
        if key not in cache:
            group_costs = [costs[stage] for stage in stages]
            context = pricer.of_group(shape.stage_devices, group).profile.cluster.device.context
            cache[key] = (
                _memory_in_flight(shape, group_costs, held, context)
                if step is None
                else GroupMemory(shape, group_costs, context).peak(step.actions[group])
            )
        for stage in stages:
            result[stage] = replace(costs[stage], memory=cache[key])
    return result


def _memory_in_flight(shape: Shape, costs: Sequence[StageCost], held: Moments, context: int) -> MemoryBreakdown:
    """Memory of a group that runs some stages, with as many micro-batches in flight as its schedule allows."""
    filled = len(costs) == 1 and fills(shape.schedule, held[0][1][0], shape.microbatches)
    chunks, buffers = [cost.layers for cost in costs], sum(cost.buffers for cost in costs)
    memory = group_memory(chunks, held, shape.microbatches, buffers, context, filled=filled)
    carried = sum(count * cost.carried for count, cost in zip(most_of(held), costs, strict=True))
    return replace(memory, activations=memory.activations + carried)


def _stages_of_group(shape: Shape, group: int) -> list[int]:
    return [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]


def groups_of(shape: Shape, costs: Sequence[StageCost]) -> list[list[StageCost]]:
    """Return the stages that each group of devices runs."""
    return [[costs[stage] for stage in _stages_of_group(shape, group)] for group in range(shape.stages)]


def ordered_step(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> OrderedStep:
    """Return a step whose passes are in the order that their seconds lead to."""
    return run_ordered(order_of(profile, costs), config_of(shape))


def order_of(profile: Profile, costs: Sequence[StageCost]) -> PassOrder:
    """Return what determines the order of passes if that depends on their seconds."""
    kept = sum(layer.kept + layer.offloaded for cost in costs for layer in cost.layers)
    share = round(sum(sum(cost.pending) for cost in costs) / kept, 3) if kept else 1.0
    return PassOrder(tuple(cost.times for cost in costs), hidden_send_share(profile), min(share, 1.0))


def busy_seconds(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Return the seconds from the step's beginning to the end of each group's last backward.

    They count from each group's first pass if steps follow one another without waiting for all groups.
    """
    if shape.schedule.splits_backward:
        step = ordered_step(profile, shape, costs)
        return step.spans if profile.steps_overlap else step.ends
    return group_ends([cost.times for cost in costs], config_of(shape), hidden_send_share(profile))


def config_of(shape: Shape) -> ScheduleConfig:
    """Return what the passes of a shape depend on."""
    return ScheduleConfig(shape.schedule, shape.stages, shape.virtual, shape.microbatches)


def hidden_send_share(profile: Profile) -> float:
    """Return the share of a pipeline transfer that the sender's compute hides: 0 unless the profile says otherwise."""
    return profile.hidden.get(PIPELINE, 0.0)
