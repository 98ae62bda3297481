"""Forecasts by the planner's cost model from data sheets.

Compute is estimated for the shape on a device, communication counts if it is exposed, and memory is the peak of a
step. A method scales as far as a layer can be split among all devices of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import busy_seconds, groups_of, price_stages, straggling
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, OperatorClass
from galvatron_lite.oracle.rows import (
    HYBRIDS,
    IN_TURN,
    CommunicationSeconds,
    Forecast,
    ForecastRow,
    Limit,
    LongestCommunication,
    Method,
    RowQuestion,
    StrategyLine,
    balanced_runs,
    limit_by_count,
    strategy_line,
)
from galvatron_lite.oracle.strategies import (
    LayerChoice,
    choose_strategies,
    degree_of,
    method_of,
    total_redistribution_seconds,
    widest_strategies,
)
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack

WIDEST = 512  # most devices that split the channels of convolutions
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # numbers of samples on a device that are estimated
MOST = 4096  # most devices for which limits are determined
SHARING = (Method.SPATIAL, Method.FILTER, Method.CHANNEL, *HYBRIDS)
"""Methods in which devices split layers."""


@dataclass(slots=True)
class ClusterCosts:
    """Costs of a model on a cluster of any number of devices, cached."""

    cluster: str  # name or path
    profile: Profile  # for the largest number of devices
    free: bool = False  # whether flows never share an adapter
    _alone: ClusterCosts | None = None
    _pricers: dict[int, LayerPricer] = field(default_factory=dict)

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.profile.graph

    def pricer(self, devices: int) -> LayerPricer:
        """Return the prices on the first ``devices`` devices."""
        if devices not in self._pricers:
            cluster = load_cluster(self.cluster, devices)
            self._pricers[devices] = LayerPricer(
                self.profile.on(_with_adapter_per_device(cluster) if self.free else cluster)
            )
        return self._pricers[devices]

    @property
    def alone(self) -> ClusterCosts:
        """The costs if each device had its own adapter; the difference to the real ones is congestion."""
        if self._alone is None:
            self._alone = ClusterCosts(self.cluster, self.profile, free=True)
        return self._alone


def _with_adapter_per_device(cluster: Cluster) -> Cluster:
    """Return the cluster with an adapter for each device of a node, each as fast as a real one."""
    near, *far = cluster.levels
    wider = []
    for level in far:
        lanes = max(near.size, level.lanes)
        wider.append(replace(level, bandwidth=level.bandwidth / level.lanes * lanes, lanes=lanes, contention=1.0))
    return replace(cluster, levels=(near, *wider))


def cluster_costs(
    graph: ModelGraph, cluster: str, devices: int, precision: str, batch: int, stack: Stack = GALVATRON
) -> ClusterCosts:
    """Return the costs of a model from data sheets, for up to ``devices`` devices."""
    return ClusterCosts(cluster, profile_on(graph, load_cluster(cluster, devices), precision, batch, stack))


def profile_on(
    graph: ModelGraph,
    cluster: Cluster,
    precision: str,
    batch: int,
    stack: Stack,
    calibration: Calibration | None = None,
) -> Profile:
    """Estimate the profile of a model, with channels split by up to ``WIDEST`` devices.

    Splits of channels are only estimated within a node, so the nodes are widened for the estimate.
    """
    near, *far = cluster.levels
    flat = replace(cluster, levels=(replace(near, size=max(near.size, WIDEST)), *far))
    profile = estimate_profile(
        graph, flat, precision=precision, name=graph.name, samples=sorted({*SAMPLES, batch}),
        optimizer=stack.optimizer, stack=stack, calibration=calibration,
    )  # fmt: skip
    return profile.on(cluster)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Priced stages of a strategy."""

    shape: Shape  # shape of the plan
    costs: tuple[StageCost, ...]  # one for each stage
    moved: CommunicationSeconds  # of a step
    duplicated: float = 0.0  # share of compute that several devices repeat


def price_layout(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    """Price the stages of a question's strategy.

    Raises:
        InputError: a batch that does not divide, a strategy that a layer has no figures for, more stages than layers.
    """
    return _pipeline(pricer, question) if question.kind in IN_TURN else _single_stage(pricer, question)


def _single_stage(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    graph, chosen, profile = pricer.profile.graph, choose_strategies(pricer, question), pricer.profile
    layers = [_price(pricer, question, layer, strategy) for layer, strategy in zip(graph.layers, chosen, strict=True)]
    moving = total_redistribution_seconds(pricer, question, chosen)
    each = (moving + profile.overhead.microbatch) / 2
    times = StageTimes(
        sum(layer.forward_seconds for layer in layers) + each, sum(layer.backward_seconds for layer in layers) + each
    )
    memory = group_memory([layers], ((0, (1,)),), 1, 0, profile.cluster.device.context)
    cost = StageCost(tuple(layers), times, sum(layer.step_seconds for layer in layers), moving, memory)
    inner = sum(layer.forward_exposed + layer.backward_exposed for layer in layers)
    moved = CommunicationSeconds(gradients=sum(layer.step_exposed for layer in layers), gather=moving)
    moved = replace(moved, halo=inner) if _splits_pixels(question) else replace(moved, layers=inner)
    duplicated = sum(
        _compute_seconds(layer) for layer, strategy in zip(layers, chosen, strict=True) if strategy.duplicates > 1
    )
    shape = Shape(question.devices, 1, 1, question.global_batch)
    return LayerLayout(shape, (cost,), moved, duplicated / max(sum(map(_compute_seconds, layers)), 1e-30))


def _compute_seconds(layer: LayerCost) -> float:
    return layer.forward + layer.backward + layer.recompute


def _splits_pixels(question: RowQuestion) -> bool:
    if question.strategy is not None:
        return method_of(question.strategy) is Method.SPATIAL
    return question.kind in (Method.SPATIAL, Method.DATA_SPATIAL)


def _price(pricer: LayerPricer, question: RowQuestion, layer: Layer, chosen: LayerChoice) -> LayerCost:
    """Price a layer; if a group repeats work, each of its devices has all samples of the group."""
    batch = question.global_batch * chosen.duplicates
    if batch % chosen.strategy.batch_degree:
        raise InputError("--batch", question.batch, f"{batch} samples do not divide over {chosen.strategy}.")
    cost = pricer.price(layer.kind, chosen.strategy, batch, 1)
    if cost is None:
        raise InputError("--strategy", str(chosen.strategy), f"{layer.name} has no figures for it.")
    return cost


def _pipeline(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    """Price runs of layers of about equal time, each on one device, with the batch in segments (GPipe)."""
    graph, stages = pricer.profile.graph, question.devices
    parts = next(parts for parts in range(question.parts, 0, -1) if question.batch % parts == 0)
    shape = Shape(stages, stages, parts, question.batch // parts, Schedule.GPIPE)
    if stages > len(graph.layers):
        remedy = f"{graph.name} has {len(graph.layers)} layers; each stage takes one at least."
        raise InputError("--gpus", stages, remedy)
    costs = [pricer.price(layer.kind, Strategy(), shape.microbatch, stages) for layer in graph.layers]
    sizes = balanced_runs([_compute_seconds(cost) for cost in costs if cost is not None], stages)
    priced = tuple(price_stages(pricer, shape, sizes, [Strategy()] * len(graph.layers)))
    sends = [cost.times.send_forward + cost.times.send_backward for cost in priced]
    seconds = sum(sends) + (shape.microbatches - 1) * max(sends)
    return LayerLayout(shape, priced, CommunicationSeconds(messages=seconds if stages > 1 else 0.0))


def price_row(model_costs: ClusterCosts, question: RowQuestion) -> ForecastRow:
    """Return the figures of a row, or its problem if it cannot be run."""
    row = ForecastRow(question.name, question.devices, question.global_batch, question.iterations)
    try:
        pricer = model_costs.pricer(question.devices)
        layout = price_layout(pricer, question)
    except InputError as error:
        return replace(row, problem=str(error))
    profile, shape, costs = pricer.profile, layout.shape, layout.costs
    groups = groups_of(shape, costs)
    ends = busy_seconds(profile, shape, costs)
    alone = max(end + sum(cost.step for cost in group) for end, group in zip(ends, groups, strict=True))
    slower = straggling(profile, question.devices)
    seconds = max((alone + profile.overhead.step) * slower, reading_seconds(profile, question))
    works = [
        sum(_compute_seconds(layer) for cost in group for layer in cost.layers) * shape.microbatches for group in groups
    ]
    slowest = groups[works.index(max(works))]
    update = sum(layer.update for cost in slowest for layer in cost.layers)
    host = profile.overhead.step + seconds - seconds / slower
    left = max(seconds - max(works) - update - layout.moved.total, 0.0)
    waiting = max(left - host, 0.0) if len(costs) > 1 else 0.0
    count, memory = row.iterations, max((cost.memory for cost in costs), key=lambda memory: memory.total)
    replicated = memory.parameters + memory.gradients + memory.optimizer
    if question.kind in (Method.FILTER, Method.CHANNEL, Method.DATA_FILTER):
        replicated = memory.activations
    elif question.kind in (Method.SERIAL, *IN_TURN):
        replicated = 0
    return replace(
        row,
        compute=count * max(works),
        moved=layout.moved.times(count),
        update=count * update,
        waiting=count * waiting,
        other=count * (left - waiting),
        memory=memory.total,
        capacity=profile.cluster.device.memory,
        replicated=float(replicated),
        longest=_longest_communication(profile.graph, question, costs),
        imbalance=max(works) * len(works) / max(sum(works), 1e-30),
        duplicated=layout.duplicated,
        shared=question.shared,
    )


def reading_seconds(profile: Profile, question: RowQuestion) -> float:
    """Return the seconds in which the first process of a group reads the samples of a step during the step before."""
    rate = profile.pictures.read_rate
    return question.batch / rate if rate and question.width > 1 else 0.0


def _longest_communication(
    graph: ModelGraph, question: RowQuestion, costs: Sequence[StageCost]
) -> LongestCommunication:
    """Return the layers with the longest exposed communication; in a pipeline the last one of the slowest sender."""

    def most(seconds: Sequence[float]) -> str:
        return graph.layers[seconds.index(max(seconds))].name if max(seconds) > 0 else ""

    if len(costs) > 1:
        ends = list(accumulate(len(cost.layers) for cost in costs))
        slow = max(range(len(costs)), key=lambda stage: costs[stage].times.send_forward)
        return LongestCommunication(messages=graph.layers[ends[slow] - 1].name)
    layers = costs[0].layers
    inner = most([layer.forward_exposed + layer.backward_exposed for layer in layers])
    near = _splits_pixels(question)
    return LongestCommunication(
        most([layer.step_exposed for layer in layers]), "" if near else inner, inner if near else ""
    )


def forecast(
    model_costs: ClusterCosts,
    question: RowQuestion,
    words: Sequence[Method],
    strategies: Sequence[Strategy],
    counts: Sequence[int],
) -> Forecast:
    """Return the table; methods that the model does not allow are left out, with a note."""
    graph = model_costs.graph
    kinds = [kind for kind in words if can_split(model_costs, kind)]
    # seconds of compute of an epoch on one device, even if they exceed its memory
    alone = price_row(model_costs, replace(question, kind=Method.SERIAL, devices=1, text=None)).compute
    price = partial(_row, model_costs)
    lines = list[StrategyLine]()
    for kind in kinds:
        of_kind = replace(question, kind=kind)
        lines.append(strategy_line(of_kind, counts, limit_of(model_costs, of_kind), price, alone))
    for strategy in strategies:
        most = question.samples // question.batch * strategy.devices
        limit = Limit(most, f"whole copies of its {strategy.devices} GPUs, B at most the data set")
        lines.append(strategy_line(replace(question, text=strategy), counts, limit, price, alone))
    notes = [f"{graph.precision}, {question.batch} samples a replica"]
    if missing := ", ".join(kind.value for kind in words if kind not in kinds):
        notes.append(f"left out, as no layer of {graph.name} can be split so: {missing}")
    origin = model_costs.profile.origin
    return Forecast(
        graph.name, model_costs.profile.cluster.name, "galvatron", question.samples,
        f"{origin.kind.value}: {origin.source}", tuple(notes), tuple(lines),
    )  # fmt: skip


def _row(model_costs: ClusterCosts, question: RowQuestion, row: ForecastRow) -> ForecastRow:
    """Return a row with the cost of congestion."""
    if problem := _unsplit_reason(model_costs, question):
        return replace(row, iterations=1, problem=problem)
    priced = price_row(model_costs, question)
    if priced.problem or question.devices <= model_costs.profile.cluster.levels[0].size:
        return priced
    free = price_row(model_costs.alone, question)
    return replace(priced, congested=max(priced.moved.total - free.moved.total, 0.0))


def _unsplit_reason(model_costs: ClusterCosts, question: RowQuestion) -> str:
    """Return why devices cannot split layers by a method; empty if they can."""
    kind, width = question.kind, question.width
    if question.text is not None:
        divides = question.devices % question.text.devices == 0
        return "" if divides else f"{question.name} takes {question.text.devices} devices or a multiple"
    if kind not in SHARING or width == 1:
        return ""
    if question.devices % width:
        return f"{kind.value} takes whole groups of {width}; see --group"
    degree = _widest_split(model_costs, kind)
    if width > degree:
        return f"groups of {width} are beyond the {degree} ways in which layers can be split; see --group"
    strategies = (widest_strategies(layer, kind, width, width) for layer in model_costs.graph.kinds.values())
    is_split = any(degree_of(kind, strategy) > 1 for options in strategies for strategy in options)
    return "" if is_split else f"no layer can be split among {width} GPUs"


def can_split(model_costs: ClusterCosts, kind: Method) -> bool:
    """Whether a layer of the model can be split by a method."""
    return kind not in SHARING or _widest_split(model_costs, kind) > 1


def limit_of(model_costs: ClusterCosts, question: RowQuestion) -> Limit:
    """Return the number of devices that a strategy can use."""
    if limit := limit_by_count(question, len(model_costs.graph.layers)):
        return limit
    kind, replicas = question.kind, max(question.samples // question.batch, 1)
    degree = _widest_split(model_costs, kind)
    if kind in HYBRIDS:
        group = min(degree, question.group)
        size = f"groups of {group}" if group == question.group else f"groups of at most {group} (--group)"
        return Limit(replicas * group, f"p <= B x {group}, {size}, B at most the data set")
    return Limit(degree, f"p <= {degree}, the ways in which every layer with convolutions can be split")


def _widest_split(model_costs: ClusterCosts, kind: Method) -> int:
    """Return the largest power of two that splits all kinds of layers with convolutions that can be split at all."""

    def can_split_by(layer: LayerKind, degree: int) -> bool:
        return any(degree_of(kind, strategy) == degree for strategy in widest_strategies(layer, kind, degree, 1))

    degrees = list[int]()
    for layer in model_costs.graph.kinds.values():
        if any(operator.kind is OperatorClass.CONVOLUTION for operator in layer.operators):
            degree = 1
            while degree < MOST and can_split_by(layer, 2 * degree):
                degree *= 2
            degrees += [degree] if degree > 1 else []
    return min(degrees, default=1)
