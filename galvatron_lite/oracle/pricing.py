"""Strategies on numbers of devices, priced by the planner's cost model from data sheets, and the table of them.

Compute is at the shape that a device works on, communication that compute hides costs nothing, and memory is the
worst moment of a step. A strategy scales as far as some layer can still be split among all devices of a group.
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
    least_runs,
    limit_by_count,
    line_of,
)
from galvatron_lite.oracle.strategies import Chosen, degree_of, family_of, moving_seconds, options, picked
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack

WIDEST = 512  # devices among which the channels of convolutions are split at most
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # samples a device that are estimated
MOST = 4096  # devices up to which limits are looked for
SHARING = (Method.SPATIAL, Method.FILTER, Method.CHANNEL, *HYBRIDS)
"""Words for devices that share layers."""


@dataclass(slots=True)
class ClusterCosts:
    """A model's costs on a cluster of any number of devices; answers are remembered."""

    cluster: str  # name or path
    profile: Profile  # of the largest number of devices asked for
    free: bool = False  # whether flows never share an adapter
    _alone: ClusterCosts | None = None
    _pricers: dict[int, LayerPricer] = field(default_factory=dict)

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.profile.graph

    def pricer(self, devices: int) -> LayerPricer:
        """Prices on the first so many devices."""
        if devices not in self._pricers:
            cluster = load_cluster(self.cluster, devices)
            self._pricers[devices] = LayerPricer(self.profile.on(_unshared(cluster) if self.free else cluster))
        return self._pricers[devices]

    @property
    def alone(self) -> ClusterCosts:
        """The same where every device has an adapter of its own: what the real one takes longer is congestion."""
        if self._alone is None:
            self._alone = ClusterCosts(self.cluster, self.profile, free=True)
        return self._alone


def _unshared(cluster: Cluster) -> Cluster:
    """As many adapters in a node as it has devices, each as fast as one of the real ones."""
    near, *far = cluster.levels
    wider = []
    for level in far:
        lanes = max(near.size, level.lanes)
        wider.append(replace(level, bandwidth=level.bandwidth / level.lanes * lanes, lanes=lanes, contention=1.0))
    return replace(cluster, levels=(near, *wider))


def machine_of(
    graph: ModelGraph, cluster: str, devices: int, precision: str, batch: int, stack: Stack = GALVATRON
) -> ClusterCosts:
    """The costs of a model from data sheets, for up to so many devices."""
    return ClusterCosts(cluster, profile_on(graph, load_cluster(cluster, devices), precision, batch, stack))


def profile_on(
    graph: ModelGraph,
    cluster: Cluster,
    precision: str,
    batch: int,
    stack: Stack,
    calibration: Calibration | None = None,
) -> Profile:
    """A model's figures from data sheets, with channels shared by up to ``WIDEST`` devices.

    Slices of convolutions are estimated within a node only, whatever its links: the nodes are widened for that.
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
    """Priced stages."""

    shape: Shape  # of the plan
    costs: tuple[StageCost, ...]  # of the stages
    moved: CommunicationSeconds  # seconds of a step
    alike: float = 0.0  # share of compute that several devices do alike


def lay_out_model(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    """The stages of a question's strategy, priced.

    Raises:
        InputError: a batch that does not divide, a strategy that a layer has no figures for, more stages than layers.
    """
    return _pipeline(pricer, question) if question.kind in IN_TURN else _single_stage(pricer, question)


def _single_stage(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    graph, chosen, profile = pricer.profile.graph, picked(pricer, question), pricer.profile
    layers = [_price(pricer, question, layer, strategy) for layer, strategy in zip(graph.layers, chosen, strict=True)]
    moving = moving_seconds(pricer, question, chosen)
    each = (moving + profile.overhead.microbatch) / 2
    times = StageTimes(
        sum(layer.forward_seconds for layer in layers) + each, sum(layer.backward_seconds for layer in layers) + each
    )
    memory = group_memory([layers], ((0, (1,)),), 1, 0, profile.cluster.device.context)
    cost = StageCost(tuple(layers), times, sum(layer.step_seconds for layer in layers), moving, memory)
    inner = sum(layer.forward_exposed + layer.backward_exposed for layer in layers)
    moved = CommunicationSeconds(gradients=sum(layer.step_exposed for layer in layers), gather=moving)
    moved = replace(moved, halo=inner) if _by_pixels(question) else replace(moved, layers=inner)
    alike = sum(_work(layer) for layer, strategy in zip(layers, chosen, strict=True) if strategy.alike > 1)
    shape = Shape(question.devices, 1, 1, question.global_batch)
    return LayerLayout(shape, (cost,), moved, alike / max(sum(map(_work, layers)), 1e-30))


def _work(layer: LayerCost) -> float:
    return layer.forward + layer.backward + layer.recompute


def _by_pixels(question: RowQuestion) -> bool:
    if question.strategy is not None:
        return family_of(question.strategy) is Method.SPATIAL
    return question.kind in (Method.SPATIAL, Method.DATA_SPATIAL)


def _price(pricer: LayerPricer, question: RowQuestion, layer: Layer, chosen: Chosen) -> LayerCost:
    """Where a group works alike, each of its devices has all of the group's samples."""
    batch = question.global_batch * chosen.alike
    if batch % chosen.strategy.batch_degree:
        raise InputError("--batch", question.batch, f"{batch} samples do not divide over {chosen.strategy}.")
    cost = pricer.price(layer.kind, chosen.strategy, batch, 1)
    if cost is None:
        raise InputError("--strategy", str(chosen.strategy), f"{layer.name} has no figures for it.")
    return cost


def _pipeline(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    """Runs of layers of about equal time on a device each, the batch in segments (GPipe)."""
    graph, stages = pricer.profile.graph, question.devices
    parts = next(parts for parts in range(question.parts, 0, -1) if question.batch % parts == 0)
    shape = Shape(stages, stages, parts, question.batch // parts, Schedule.GPIPE)
    if stages > len(graph.layers):
        remedy = f"{graph.name} has {len(graph.layers)} layers; each stage takes one at least."
        raise InputError("--gpus", stages, remedy)
    costs = [pricer.price(layer.kind, Strategy(), shape.microbatch, stages) for layer in graph.layers]
    sizes = least_runs([_work(cost) for cost in costs if cost is not None], stages)
    priced = tuple(price_stages(pricer, shape, sizes, [Strategy()] * len(graph.layers)))
    sends = [cost.times.send_forward + cost.times.send_backward for cost in priced]
    seconds = sum(sends) + (shape.microbatches - 1) * max(sends)
    return LayerLayout(shape, priced, CommunicationSeconds(messages=seconds if stages > 1 else 0.0))


def row_of(machine: ClusterCosts, question: RowQuestion) -> ForecastRow:
    """The figures of a row; one that cannot be run says why."""
    row = ForecastRow(question.name, question.devices, question.global_batch, question.iterations)
    try:
        pricer = machine.pricer(question.devices)
        layout = lay_out_model(pricer, question)
    except InputError as error:
        return replace(row, problem=str(error))
    profile, shape, costs = pricer.profile, layout.shape, layout.costs
    groups = groups_of(shape, costs)
    ends = busy_seconds(profile, shape, costs)
    alone = max(end + sum(cost.step for cost in group) for end, group in zip(ends, groups, strict=True))
    slower = straggling(profile, question.devices)
    seconds = max((alone + profile.overhead.step) * slower, reading_seconds(profile, question))
    works = [sum(_work(layer) for cost in group for layer in cost.layers) * shape.microbatches for group in groups]
    slowest = groups[works.index(max(works))]
    update = sum(layer.update for cost in slowest for layer in cost.layers)
    host = profile.overhead.step + seconds - seconds / slower
    left = max(seconds - max(works) - update - layout.moved.total, 0.0)
    waiting = max(left - host, 0.0) if len(costs) > 1 else 0.0
    count, memory = row.iterations, max((cost.memory for cost in costs), key=lambda one: one.total)
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
        loudest=_loudest(profile.graph, question, costs),
        uneven=max(works) * len(works) / max(sum(works), 1e-30),
        twice=layout.alike,
        shared=question.shared,
    )


def reading_seconds(profile: Profile, question: RowQuestion) -> float:
    """Seconds in which the first process of a group reads a step's samples for all of it, beside the step before."""
    rate = profile.pictures.read_rate
    return question.batch / rate if rate and question.width > 1 else 0.0


def _loudest(graph: ModelGraph, question: RowQuestion, costs: Sequence[StageCost]) -> LongestCommunication:
    """The layers whose communication is exposed longest; of a pipeline the last one of the stage that sends longest."""

    def most(seconds: Sequence[float]) -> str:
        return graph.layers[seconds.index(max(seconds))].name if max(seconds) > 0 else ""

    if len(costs) > 1:
        ends = list(accumulate(len(cost.layers) for cost in costs))
        slow = max(range(len(costs)), key=lambda stage: costs[stage].times.send_forward)
        return LongestCommunication(messages=graph.layers[ends[slow] - 1].name)
    layers = costs[0].layers
    inner = most([layer.forward_exposed + layer.backward_exposed for layer in layers])
    near = _by_pixels(question)
    return LongestCommunication(
        most([layer.step_exposed for layer in layers]), "" if near else inner, inner if near else ""
    )


def forecast(
    machine: ClusterCosts,
    question: RowQuestion,
    words: Sequence[Method],
    strategies: Sequence[Strategy],
    counts: Sequence[int],
) -> Forecast:
    """The table; words that the model does not allow are left out, with a note."""
    graph = machine.graph
    kinds = [kind for kind in words if allows(machine, kind)]
    # seconds of compute of an epoch on one device, whether or not that has the memory
    alone = row_of(machine, replace(question, kind=Method.SERIAL, devices=1, text=None)).compute
    price = partial(_row, machine)
    questions = [replace(question, kind=kind) for kind in kinds]
    lines = [line_of(one, counts, limit_of(machine, one), price, alone) for one in questions]
    for strategy in strategies:
        most = question.samples // question.batch * strategy.devices
        limit = Limit(most, f"whole copies of its {strategy.devices} GPUs, B at most the data set")
        lines.append(line_of(replace(question, text=strategy), counts, limit, price, alone))
    notes = [f"{graph.precision}, {question.batch} samples a replica"]
    if missing := ", ".join(kind.value for kind in words if kind not in kinds):
        notes.append(f"left out, as no layer of {graph.name} can be split so: {missing}")
    origin = machine.profile.origin
    return Forecast(
        graph.name, machine.profile.cluster.name, "galvatron", question.samples,
        f"{origin.kind.value}: {origin.source}", tuple(notes), tuple(lines),
    )  # fmt: skip


def _row(machine: ClusterCosts, question: RowQuestion, row: ForecastRow) -> ForecastRow:
    """A row, with what congestion costs."""
    if problem := _unsplit(machine, question):
        return replace(row, iterations=1, problem=problem)
    priced = row_of(machine, question)
    if priced.problem or question.devices <= machine.profile.cluster.levels[0].size:
        return priced
    free = row_of(machine.alone, question)
    return replace(priced, congested=max(priced.moved.total - free.moved.total, 0.0))


def _unsplit(machine: ClusterCosts, question: RowQuestion) -> str:
    """Why devices make no groups that share layers as the word says; empty where they do."""
    kind, width = question.kind, question.width
    if question.text is not None:
        divides = question.devices % question.text.devices == 0
        return "" if divides else f"{question.name} takes {question.text.devices} devices or a multiple"
    if kind not in SHARING or width == 1:
        return ""
    if question.devices % width:
        return f"{kind.value} takes whole groups of {width}; see --group"
    ways = _widest_split(machine, kind)
    if width > ways:
        return f"groups of {width} are beyond the {ways} ways in which layers can be split; see --group"
    kinds = machine.graph.kinds.values()
    most = max(degree_of(kind, strategy) for one in kinds for strategy in options(one, kind, width, width))
    return "" if most > 1 else f"no layer can be split among {width} GPUs"


def allows(machine: ClusterCosts, kind: Method) -> bool:
    """Whether some layer of the model can be split as a word says."""
    return kind not in SHARING or _widest_split(machine, kind) > 1


def limit_of(machine: ClusterCosts, question: RowQuestion) -> Limit:
    """How many devices a strategy can use."""
    if limit := limit_by_count(question, len(machine.graph.layers)):
        return limit
    kind, replicas = question.kind, max(question.samples // question.batch, 1)
    ways = _widest_split(machine, kind)
    if kind in HYBRIDS:
        group = min(ways, question.group)
        size = f"groups of {group}" if group == question.group else f"groups of at most {group} (--group)"
        return Limit(replicas * group, f"p <= B x {group}, {size}, B at most the data set")
    return Limit(ways, f"p <= {ways}, the ways in which every layer with convolutions can be split")


def _widest_split(machine: ClusterCosts, kind: Method) -> int:
    """The most ways, a power of two, in which every kind of layer with convolutions can be split, of those that can."""

    def most(layer: LayerKind) -> int:
        ways = 1
        while ways < MOST and any(degree_of(kind, option) == 2 * ways for option in options(layer, kind, 2 * ways, 1)):
            ways *= 2
        return ways

    layers = machine.graph.kinds.values()
    convolutions = [
        kind for kind in layers if any(operator.kind is OperatorClass.CONVOLUTION for operator in kind.operators)
    ]
    return min((ways for ways in map(most, convolutions) if ways > 1), default=1)
