"""What one pipeline stage costs: its layers, the redistribution between them, its sends, its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.forward_only import passes_with_moves
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Sharding, Tie
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.pipeline.cost import (
    NAME,
    boundary_bytes,
    buffer_bytes,
    chunks_in_flight,
    fills,
    stride_between,
    transfer,
)
from galvatron_lite.parallelism.pipeline.schedule import Moments, group_of, most_of
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.registry import REFUSING, run_fields
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, MemoryBreakdown, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import activation_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What is chosen once for the whole plan."""

    devices: int  # world size
    stages: int  # pipeline degree: groups of devices
    microbatches: int  # a step
    microbatch: int  # samples of one
    schedule: Schedule = DEFAULT_SCHEDULE  # order of micro-batches
    virtual: int = 1  # stages of each group of devices; the plan has ``stages * virtual`` of them

    @property
    def stage_devices(self) -> int:
        """Devices of one stage."""
        return self.devices // self.stages


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage."""

    layers: tuple[LayerCost, ...]  # the cost of each
    times: StageTimes  # seconds of one micro-batch
    step: float  # seconds once a step after the last backward: exposed gradient communication, update, host
    moving: float  # seconds of redistribution a micro-batch, both passes; part of ``times``
    memory: MemoryBreakdown  # bytes on one device: of all stages that its devices run
    buffers: int = 0  # bytes of its send and receive buffers
    # by layer: bytes of one micro-batch between the gradient of the input and that of the weights; zero-bubble
    # schedules only
    pending: tuple[int, ...] = ()
    output_gradients: tuple[int, ...] = ()  # by layer: those of ``pending`` that its backward makes
    carried: int = 0  # bytes of one micro-batch that its devices keep as copies of tensors made in earlier stages


def price_stage(
    pricer: LayerPricer, shape: Shape, stage: int, inside: range, strategies: Sequence[Strategy]
) -> StageCost:
    """Cost of stage ``stage`` that holds the layers at ``inside``, with its memory if its devices run no other.

    Args:
        pricer: of the profile; the stage's own devices are asked for (``LayerPricer.of_group``).
        shape: of the plan.
        stage: its number in the order of the model, 0 first.
        inside: places of its layers in the graph.
        strategies: of all layers of the model (those of neighbouring stages price the boundaries).

    Raises:
        InputError: the profile holds no point for a strategy.
    """
    cost = price_chunk(pricer, shape, stage, inside, strategies, inside)
    held = chunks_in_flight(shape.schedule, shape.stages, stage, shape.microbatches, 1)
    context = pricer.of_group(shape.stage_devices, stage).profile.cluster.device.context
    return replace(cost, memory=held_memory(shape, [cost], held, context))


def held_memory(shape: Shape, costs: Sequence[StageCost], held: Moments, context: int) -> MemoryBreakdown:
    """Memory of devices that run these stages with so many micro-batches in flight (``cost.memory.group_memory``)."""
    buffers = sum(cost.buffers for cost in costs)
    filled = len(costs) == 1 and fills(shape.schedule, held[0][1][0], shape.microbatches)
    chunks = [cost.layers for cost in costs]
    memory = group_memory(chunks, held, shape.microbatches, buffers, context, filled=filled)
    copies = sum(count * cost.carried for count, cost in zip(most_of(held), costs, strict=True))
    return replace(memory, activations=memory.activations + copies)


def price_chunk(
    pricer: LayerPricer,
    shape: Shape,
    stage: int,
    inside: range,
    strategies: Sequence[Strategy],
    beside: Container[int],
) -> StageCost:
    """``price_stage`` without memory; ``beside``: places of all layers of the same devices."""
    shared = sharing_of(pricer.profile.graph, beside)
    group_pricer = pricer.of_group(shape.stage_devices, group_of(shape.schedule, shape.stages, stage))
    costs = tuple(
        _layer_cost(group_pricer, shape, place, strategies[place], shared.get(place, ALONE)) for place in inside
    )
    moving = _moving(group_pricer, shape, inside, strategies)
    left = _boundary(pricer, shape, stage, inside.start, strategies)
    right = _boundary(pricer, shape, stage + 1, inside.stop, strategies)
    overhead = group_pricer.profile.overhead
    host = (inside.start > 0) + (inside.stop < len(strategies))
    fixed = moving + host * overhead.pipeline + overhead.microbatch / 2
    times = StageTimes(
        sum(cost.forward_seconds for cost in costs) + fixed,
        sum(cost.backward_seconds for cost in costs) + fixed,
        right[1],
        left[1],
        sum(cost.weight for cost in costs),
    )
    split = shape.schedule.splits_backward
    waiting = [_pending(pricer, shape, place, strategies[place]) for place in inside] if split else []
    pending, formed = (tuple(sizes) for sizes in zip(*waiting, strict=True)) if split else ((), ())
    step = sum(cost.step_seconds for cost in costs)
    borrowed = pricer.profile.graph.borrowed(inside)
    carried = boundary_bytes(borrowed, shape.microbatch, strategies[inside.start]) if borrowed else 0
    held, counted = (shape.microbatches, shape.schedule), not pricer.profile.unbuffered
    buffers = buffer_bytes(left[0], right[0], *held, counted=counted)
    return StageCost(costs, times, step, 2 * moving, MemoryBreakdown(), buffers, pending, formed, carried)


def _pending(pricer: LayerPricer, shape: Shape, place: int, strategy: Strategy) -> tuple[int, int]:
    """Bytes that the gradients of a layer's weights are made from: inputs and output gradients of its matmuls and
    convolutions; and of the gradients alone.

    Matmuls of one tensor (queries, keys and values; gate and up) hold it once. A tensor group shares the wider side:
    columns of what widens, the inner dim of what narrows again.
    """
    if strategy.parameter_shards > 1:  # ZeRO-2 and 3 reduce gradients when backward ends: nothing waits
        return 0, 0
    graph, inputs, outputs = pricer.profile.graph, 0.0, 0.0
    operators = graph.kind_of(graph.layers[place]).operators
    for reader in _readers(operators):
        rows, inner, _ = reader[0].shape
        read, written = reader[0].count * inner, sum(operator.count * operator.shape[-1] for operator in reader)
        split = 1 if reader[0].sharding is Sharding.NONE else lines_of(strategy).matmuls.size
        inputs += rows * (read if read < written else read / split)
        outputs += rows * (written / split if read < written else written)
    for one in operators:
        if one.kind is OperatorClass.CONVOLUTION and one.weight_bytes and not one.frozen:
            windows = sides_of(one)
            inputs += one.count * one.shape[0] * prod(window.extent for window in windows)
            outputs += one.count * one.shape[1] * prod(window.output for window in windows)
    each = shape.microbatch / strategy.token_degree * activation_bytes(graph.precision)
    return round((inputs + outputs) * each), round(outputs * each)


def _readers(operators: Sequence[Operator]) -> Iterable[Sequence[Operator]]:
    """Matmuls with weights that train, by the tensor that they read; where that is not known, those of one width behind
    one another read one."""
    readers = defaultdict[tuple[int, Sharding], list[Operator]](list)
    before: tuple[int, ...] = ()
    run = 0
    for operator in operators:
        trains = operator.kind is OperatorClass.MATMUL and operator.weight_bytes > 0 and not operator.frozen
        width = operator.shape[:2] if trains else ()
        run, before = run - (width != before), width
        if trains:
            readers[operator.reads or run, operator.sharding].append(operator)
    return readers.values()


def _layer_cost(
    pricer: LayerPricer, shape: Shape, place: int, strategy: Strategy, sharing: ParameterSharing
) -> LayerCost:
    layer = pricer.profile.graph.layers[place]
    cost = pricer.price(layer.kind, strategy, shape.microbatch, shape.stages, sharing)
    if cost is None:
        why = _refused(pricer.profile.graph.kinds[layer.kind], strategy)
        remedy = why or _profiled(pricer.profile, layer.kind, strategy)
        raise InputError(f"strategy of {layer.name}", str(strategy), remedy)
    return cost.with_split_backward() if shape.schedule.splits_backward else cost


def _refused(kind: LayerKind, strategy: Strategy) -> str:
    """Why a layer cannot be split as a strategy says, and what it offers; empty where nothing is known against it."""
    for dimension in REFUSING:
        why = dimension.refusal(kind, getattr(strategy, dimension.degree))
        if getattr(strategy, dimension.degree) > 1 and why:
            offered = ", ".join(str(choice[dimension.degree]) for choice in dimension.choices(kind, strategy.devices))
            return f"{dimension.degree}: {why}; it offers {offered}."
    return ""


def _profiled(profile: Profile, kind: str, strategy: Strategy) -> str:
    """What a profile has figures of a kind of layer for, to say beside a strategy that it has none for."""
    points = [point for point in profile.layers if point.kind == kind]
    for name in run_fields():
        held = dict.fromkeys(getattr(point, name) for point in points)
        if getattr(strategy, name) not in held:
            return f"The profile has figures of {kind} with {name} {', '.join(map(str, held))} only."
    return f"The profile has no figures of {kind} for it."


def _moving(pricer: LayerPricer, shape: Shape, inside: range, strategies: Sequence[Strategy]) -> float:
    """Seconds of redistribution in one pass: of all that enters the stage, and of what goes between its layers."""
    graph, first = pricer.profile.graph, inside.start
    pairs = [(first - 1, first, graph.crossing(first))] if first else []
    return sum(
        pricer.redistribution(size, shape.microbatch, strategies[left], strategies[right])
        for left, right, size in (*pairs, *graph.exchanges(inside))
    )


def _boundary(
    pricer: LayerPricer, shape: Shape, stage: int, cut: int, strategies: Sequence[Strategy]
) -> tuple[int, float]:
    """Bytes a device sends over the boundary before layer ``cut``, where stage ``stage`` begins, and the seconds.

    Zero at the model's ends and between stages of the same devices.
    """
    graph = pricer.profile.graph
    if cut in (0, len(graph.layers)):
        return 0, 0.0
    groups = [group_of(shape.schedule, shape.stages, side) for side in (stage - 1, stage)]
    if groups[0] == groups[1]:
        return 0, 0.0
    size = boundary_bytes(graph.crossing(cut), shape.microbatch, strategies[cut - 1])
    return size, transfer_seconds(pricer, size, strategies[cut - 1], shape, (groups[0], groups[1]))


def transfer_seconds(pricer: LayerPricer, size: int, sender: Strategy, shape: Shape, groups: tuple[int, int]) -> float:
    """Seconds of one device's send of a boundary tensor from one group of devices to another.

    Where several devices hold copies of the tensor and the stack scatters it, each sends its part and
    the receivers gather the parts among themselves (Narayanan et al. 2021, section 4.1). Between devices of two types
    the slower links count.
    """
    profile = pricer.profile
    left, right = (pricer.of_group(shape.stage_devices, group) for group in groups)
    links = left.links if left is right else pricer.links
    stride = stride_between(*groups, shape.stage_devices, profile.cluster.levels[0].size)
    times = passes_with_moves(profile)
    copies = layout_of(sender).copies
    if not profile.scattered_sends or copies == 1:
        return times * links.seconds(transfer(size, shape.stage_devices, stride))
    gathered = Communication(
        Collective.ALL_GATHER, size, RankGroup(copies, 1, shape.stage_devices // copies), Moment.FORWARD,
        overlaps=False, cause=NAME,
    )  # fmt: skip
    part = transfer(-(-size // copies), shape.stage_devices, stride)
    return times * (links.seconds(part) + right.links.seconds(gathered))


def sharing_of(graph: ModelGraph, inside: Container[int]) -> dict[int, ParameterSharing]:
    """What sharing means for the layers of one stage; layers that share nothing are absent.

    Args:
        graph: the model.
        inside: places of the stage's layers; with virtual stages, of all layers of its devices.
    """
    if not graph.ties:
        return {}
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    result: dict[int, ParameterSharing] = {}
    for tie in graph.ties:
        for index in (place[tie.first], place[tie.second]):
            if index in inside:
                result[index] = _joined(result.get(index, ParameterSharing()), tie, place, index, inside)
    return result


def _joined(
    sharing: ParameterSharing, tie: Tie, place: dict[str, int], index: int, inside: Container[int]
) -> ParameterSharing:
    first, second = place[tie.first], place[tie.second]
    if first in inside and second in inside:
        return replace(sharing, grouped=sharing.grouped or tie.parameters > 0)
    copies = index == second
    return replace(
        sharing,
        copied=sharing.copied + tie.parameters * copies,
        frozen=sharing.frozen + tie.frozen * copies,
        exchanged=sharing.exchanged + tie.parameters - tie.frozen,
    )


def tied_groups(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Places of layers that share parameters, directly or through others: each group has one strategy."""
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    groups: list[set[int]] = []
    for tie in graph.ties:
        joined = {place[tie.first], place[tie.second]}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
