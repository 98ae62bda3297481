"""What one stage of a pipeline costs: its layers, redistribution between them, and sends to neighbouring stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.forward_only import passes_with_moves
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Sharding, Tie
from galvatron_lite.model.sides import sides_of
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.pipeline.cost import NAME, boundary_bytes, buffer_bytes, stride_between, transfer
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.registry import REFUSING, run_fields
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, MemoryBreakdown, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import activation_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """The choices of a plan that hold for all of its layers."""

    devices: int  # world size
    stages: int  # pipeline degree: groups of devices
    microbatches: int  # a step
    microbatch: int  # samples of a micro-batch
    schedule: Schedule = DEFAULT_SCHEDULE
    virtual: int = 1  # stages of each group; the plan has ``stages * virtual`` stages

    @property
    def stage_devices(self) -> int:
        """Devices of a stage."""
        return self.devices // self.stages


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage."""

    layers: tuple[LayerCost, ...]
    times: StageTimes  # of a micro-batch
    step: float  # seconds once a step after the last backward: exposed gradient communication, update, host
    moving: float  # seconds of redistribution of a micro-batch in both passes; part of ``times``
    memory: MemoryBreakdown  # bytes on one device, with all stages that its devices run; empty before that is known
    buffers: int = 0  # bytes of send and receive buffers
    # by layer, of a micro-batch: bytes that gradients of weights are made from, between the gradient of the input and
    # that of the weights; and the output gradients among them. Zero-bubble schedules only
    pending: tuple[int, ...] = ()
    output_gradients: tuple[int, ...] = ()
    carried: int = 0  # bytes of a micro-batch of copies of tensors that were made in earlier stages


def price_stage(
    pricer: LayerPricer,
    shape: Shape,
    stage: int,
    inside: range,
    strategies: Sequence[Strategy],
    same_devices: Container[int],
) -> StageCost:
    """Price a stage, without its memory.

    Args:
        pricer: of the profile; for the types of devices see ``LayerPricer.of_group``.
        shape: of the plan.
        stage: index in the order of the model.
        inside: indices of its layers in the graph.
        strategies: of all layers of the model (those of neighbouring stages price the boundaries).
        same_devices: indices of all layers that its devices run.

    Raises:
        InputError: the profile has no points for a strategy.
    """
    graph = pricer.profile.graph
    sharings = sharing_of(graph, same_devices)
    group_pricer = pricer.of_group(shape.stage_devices, group_of(shape.schedule, shape.stages, stage))
    costs = tuple(
        _layer_cost(group_pricer, shape, index, strategies[index], sharings.get(index, ALONE)) for index in inside
    )
    moving = _moving(group_pricer, shape, inside, strategies)
    left_bytes, left_seconds = _boundary(pricer, shape, stage, inside.start, strategies)
    right_bytes, right_seconds = _boundary(pricer, shape, stage + 1, inside.stop, strategies)
    overhead = group_pricer.profile.overhead
    neighbours = (inside.start > 0) + (inside.stop < len(strategies))
    fixed = moving + neighbours * overhead.pipeline + overhead.microbatch / 2
    times = StageTimes(
        forward=sum(cost.forward_seconds for cost in costs) + fixed,
        backward=sum(cost.backward_seconds for cost in costs) + fixed,
        send_forward=right_seconds,
        send_backward=left_seconds,
        weight=sum(cost.weight for cost in costs),
    )
    waiting = [_pending(pricer, shape, index, strategies[index]) for index in inside if shape.schedule.splits_backward]
    borrowed, buffered = graph.borrowed(inside), not pricer.profile.unbuffered
    return StageCost(
        layers=costs,
        times=times,
        step=sum(cost.step_seconds for cost in costs),
        moving=2 * moving,
        memory=MemoryBreakdown(),
        buffers=buffer_bytes(left_bytes, right_bytes, shape.microbatches, shape.schedule, counted=buffered),
        pending=tuple(pending for pending, _ in waiting),
        output_gradients=tuple(gradients for _, gradients in waiting),
        carried=boundary_bytes(borrowed, shape.microbatch, strategies[inside.start]) if borrowed else 0,
    )


def _pending(pricer: LayerPricer, shape: Shape, index: int, strategy: Strategy) -> tuple[int, int]:
    """Bytes that the gradients of a layer's weights are made from: inputs and output gradients of its matmuls and
    convolutions; and of the output gradients alone.

    Matmuls that read one tensor (queries, keys and values; gate and up) hold it once. A tensor group splits the wider
    side: the columns of a matmul that widens, the inner dim of a matmul that narrows.
    """
    if strategy.parameter_shards > 1:  # ZeRO-2 and 3 reduce gradients when backward ends: nothing waits
        return 0, 0
    graph, inputs, outputs = pricer.profile.graph, 0.0, 0.0
    operators = graph.kind_of(graph.layers[index]).operators
    for matmuls in _matmuls_by_input(operators):
        first = matmuls[0]
        rows, inner, _ = first.shape
        read, written = first.count * inner, sum(matmul.count * matmul.shape[-1] for matmul in matmuls)
        split = 1 if first.sharding is Sharding.NONE else lines_of(strategy).matmuls.size
        inputs += rows * (read if read < written else read / split)
        outputs += rows * (written / split if read < written else written)
    for operator in operators:
        if operator.kind is OperatorClass.CONVOLUTION and operator.weight_bytes and not operator.frozen:
            sides = sides_of(operator)
            inputs += operator.count * operator.shape[0] * prod(side.extent for side in sides)
            outputs += operator.count * operator.shape[1] * prod(side.output for side in sides)
    item = shape.microbatch / strategy.token_degree * activation_bytes(graph.precision)
    return round((inputs + outputs) * item), round(outputs * item)


def _matmuls_by_input(operators: Sequence[Operator]) -> Iterable[Sequence[Operator]]:
    """Matmuls with trainable weights, grouped by the tensor that they read.

    If that is unknown, consecutive matmuls of one width read the same tensor.
    """
    groups = defaultdict[tuple[int, Sharding], list[Operator]](list)
    previous_width: tuple[int, ...] = ()
    run = 0
    for operator in operators:
        trains = operator.kind is OperatorClass.MATMUL and operator.weight_bytes > 0 and not operator.frozen
        width = operator.shape[:2] if trains else ()
        run, previous_width = run - (width != previous_width), width
        if trains:
            groups[operator.reads or run, operator.sharding].append(operator)
    return groups.values()


def _layer_cost(
    pricer: LayerPricer, shape: Shape, index: int, strategy: Strategy, sharing: ParameterSharing
) -> LayerCost:
    layer = pricer.profile.graph.layers[index]
    cost = pricer.price(layer.kind, strategy, shape.microbatch, shape.stages, sharing)
    if cost is None:
        reason = _refusal(pricer.profile.graph.kinds[layer.kind], strategy)
        remedy = reason or _missing_points(pricer.profile, layer.kind, strategy)
        raise InputError(f"strategy of {layer.name}", str(strategy), remedy)
    return cost.with_split_backward() if shape.schedule.splits_backward else cost


def _refusal(kind: LayerKind, strategy: Strategy) -> str:
    """Why a layer cannot be split by a strategy, and what it offers; empty if no dimension refuses."""
    for dimension in REFUSING:
        reason = dimension.refusal(kind, getattr(strategy, dimension.degree))
        if getattr(strategy, dimension.degree) > 1 and reason:
            offered = ", ".join(str(choice[dimension.degree]) for choice in dimension.choices(kind, strategy.devices))
            return f"{dimension.degree}: {reason}; it offers {offered}."
    return ""


def _missing_points(profile: Profile, kind: str, strategy: Strategy) -> str:
    """What the profile has of a kind of layer, for an error about a strategy that it has no points for."""
    points = [point for point in profile.layers if point.kind == kind]
    for name in run_fields():
        profiled = dict.fromkeys(getattr(point, name) for point in points)
        if getattr(strategy, name) not in profiled:
            return f"The profile has figures of {kind} with {name} {', '.join(map(str, profiled))} only."
    return f"The profile has no figures of {kind} for it."


def _moving(pricer: LayerPricer, shape: Shape, inside: range, strategies: Sequence[Strategy]) -> float:
    """Seconds of redistribution in one pass: of what enters the stage, and of what goes between its layers."""
    graph, first = pricer.profile.graph, inside.start
    entering = [(first - 1, first, graph.crossing(first))] if first else []
    return sum(
        pricer.redistribution(size, shape.microbatch, strategies[left], strategies[right])
        for left, right, size in (*entering, *graph.exchanges(inside))
    )


def _boundary(
    pricer: LayerPricer, shape: Shape, stage: int, cut: int, strategies: Sequence[Strategy]
) -> tuple[int, float]:
    """Bytes that a device sends over the boundary before layer ``cut``, where ``stage`` begins, and the seconds.

    0 at the model's ends, and between stages of the same devices.
    """
    graph = pricer.profile.graph
    if cut in (0, len(graph.layers)):
        return 0, 0.0
    left, right = (group_of(shape.schedule, shape.stages, side) for side in (stage - 1, stage))
    if left == right:
        return 0, 0.0
    size = boundary_bytes(graph.crossing(cut), shape.microbatch, strategies[cut - 1])
    return size, transfer_seconds(pricer, size, strategies[cut - 1], shape, (left, right))


def transfer_seconds(pricer: LayerPricer, size: int, sender: Strategy, shape: Shape, groups: tuple[int, int]) -> float:
    """Return the seconds of one device's send of a boundary tensor from one group of devices to another.

    If several devices hold copies of the tensor and the stack scatters it, each sends its part and the receivers gather
    the parts (Narayanan et al. 2021, section 4.1). Between devices of two types the slower links count.

    Args:
        pricer: of the profile.
        size: bytes.
        sender: strategy of the last layer of the sending stage.
        shape: of the plan.
        groups: that send and receive.
    """
    profile = pricer.profile
    left, right = (pricer.of_group(shape.stage_devices, group) for group in groups)
    links = left.links if left is right else pricer.links
    stride = stride_between(*groups, shape.stage_devices, profile.cluster.levels[0].size)
    passes, copies = passes_with_moves(profile), layout_of(sender).copies
    if not profile.scattered_sends or copies == 1:
        return passes * links.seconds(transfer(size, shape.stage_devices, stride))
    receivers = RankGroup(copies, 1, shape.stage_devices // copies)
    gather = Communication(Collective.ALL_GATHER, size, receivers, Moment.FORWARD, overlaps=False, cause=NAME)
    part = transfer(-(-size // copies), shape.stage_devices, stride)
    return passes * (links.seconds(part) + right.links.seconds(gather))


def sharing_of(graph: ModelGraph, inside: Container[int]) -> dict[int, ParameterSharing]:
    """Return what layers of a stage share with others, by index; layers that share no parameters are absent.

    Args:
        graph: the model.
        inside: indices of all layers that the stage's devices run.
    """
    if not graph.ties:
        return {}
    indices = {layer.name: index for index, layer in enumerate(graph.layers)}
    sharings: dict[int, ParameterSharing] = {}
    for tie in graph.ties:
        ends = indices[tie.first], indices[tie.second]
        grouped = all(index in inside for index in ends)
        for index in ends:
            if index in inside:
                sharing = sharings.get(index, ParameterSharing())
                sharings[index] = _with_tie(sharing, tie, grouped=grouped, copies=index == ends[1])
    return sharings


def _with_tie(sharing: ParameterSharing, tie: Tie, *, grouped: bool, copies: bool) -> ParameterSharing:
    """Add a tie; ``grouped``: of two layers of the stage; ``copies``: whether the layer is the second one."""
    if grouped:
        return replace(sharing, grouped=sharing.grouped or tie.parameters > 0)
    return replace(
        sharing,
        copied=sharing.copied + tie.parameters * copies,
        frozen=sharing.frozen + tie.frozen * copies,
        exchanged=sharing.exchanged + tie.parameters - tie.frozen,
    )


def tied_groups(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Return groups of layers that share parameters, directly or through others; a group has one strategy."""
    indices = {layer.name: index for index, layer in enumerate(graph.layers)}
    groups: list[set[int]] = []
    for tie in graph.ties:
        ends = {indices[tie.first], indices[tie.second]}
        apart = [group for group in groups if not group & ends]
        groups = [*apart, ends.union(*(group for group in groups if group & ends))]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
