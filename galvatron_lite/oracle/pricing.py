"""One strategy on a number of devices, priced by the planner's cost model from data sheets.

Compute is at the shape that a device works on, communication that compute hides costs nothing, and memory is the
worst moment of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.groups import busy_seconds, groups_of, price_stages
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import group_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import straggling
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph
from galvatron_lite.oracle.rows import CommunicationSeconds, ForecastRow, Loudest, Method, least_runs
from galvatron_lite.oracle.strategies import Chosen, RowQuestion, family_of, moving_seconds, picked
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack

WIDEST = 512  # devices among which the channels of convolutions are split at most
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # samples a device that are estimated


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
            found = load_cluster(self.cluster, devices)
            self._pricers[devices] = LayerPricer(self.profile.on(_unshared(found) if self.free else found))
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
    """A model's figures from data sheets, with channels shared by up to ``WIDEST`` devices; see ``machine_of``."""
    found = estimate_profile(
        graph,
        _flat(cluster),
        precision=precision,
        name=graph.name,
        samples=sorted({*SAMPLES, batch}),
        optimizer=stack.optimizer,
        stack=stack,
        calibration=calibration,
    )
    return found.on(cluster)


def _flat(cluster: Cluster) -> Cluster:
    """The cluster with wide nodes: slices of convolutions are estimated within a node only, whatever its links."""
    near, *far = cluster.levels
    return replace(cluster, levels=(replace(near, size=max(near.size, WIDEST)), *far))


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Stages with what of their seconds is what."""

    shape: Shape  # of the plan
    costs: tuple[StageCost, ...]  # of the stages
    moved: CommunicationSeconds  # seconds of a step
    alike: float = 0.0  # share of compute that several devices do alike


def lay_out_model(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    """The stages of a question's strategy, priced."""
    in_turn = question.kind in (Method.PIPELINE, Method.LAYER)
    return _pipeline(pricer, question) if in_turn else _stage(pricer, question)


def _stage(pricer: LayerPricer, question: RowQuestion) -> LayerLayout:
    graph, chosen = pricer.profile.graph, picked(pricer, question)
    layers = [_price(pricer, question, one, own) for one, own in zip(graph.layers, chosen, strict=True)]
    moving = moving_seconds(pricer, question, chosen)
    times = StageTimes(
        sum(one.forward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
        sum(one.backward_seconds for one in layers) + moving / 2 + pricer.profile.overhead.microbatch / 2,
    )
    memory = group_memory([layers], ((0, (1,)),), 1, 0, pricer.profile.cluster.device.context)
    cost = StageCost(tuple(layers), times, sum(one.step_seconds for one in layers), moving, memory)
    inner = sum(one.forward_exposed + one.backward_exposed for one in layers)
    moved = CommunicationSeconds(gradients=sum(one.step_exposed for one in layers), gather=moving)
    moved = replace(moved, halo=inner) if _by_pixels(question) else replace(moved, layers=inner)
    alike = sum(_work(one) for one, own in zip(layers, chosen, strict=True) if own.alike > 1)
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
    parts = max(min(question.segments or stages, question.batch), 1) if question.kind is Method.PIPELINE else 1
    while question.batch % parts:
        parts -= 1
    shape = Shape(stages, stages, parts, question.batch // parts, Schedule.GPIPE)
    if stages > len(graph.layers):
        raise InputError(
            "--gpus", stages, f"{graph.name} has {len(graph.layers)} layers; each stage takes one at least."
        )
    plain = [Strategy()] * len(graph.layers)
    costs = [pricer.price(layer.kind, Strategy(), shape.microbatch, stages) for layer in graph.layers]
    sizes = least_runs([_work(one) for one in costs if one is not None], stages)
    priced = tuple(price_stages(pricer, shape, sizes, plain))
    sends = sum(_sends(cost) for cost in priced) + (shape.microbatches - 1) * max(map(_sends, priced))
    return LayerLayout(shape, priced, CommunicationSeconds(messages=sends if stages > 1 else 0.0))


def _sends(cost: StageCost) -> float:
    return cost.times.send_forward + cost.times.send_backward


def row_of(machine: ClusterCosts, question: RowQuestion) -> ForecastRow:
    """The figures of a row; one that cannot be run says why."""
    row = ForecastRow(
        question.name or question.kind.value, question.devices, question.global_batch,
        ceil(question.samples / question.global_batch),
    )  # fmt: skip
    try:
        pricer = machine.pricer(question.devices)
        priced = lay_out_model(pricer, question)
    except InputError as error:
        return replace(row, problem=str(error))
    return _filled(row, pricer, question, priced)


def _filled(row: ForecastRow, pricer: LayerPricer, question: RowQuestion, priced: LayerLayout) -> ForecastRow:
    """The row with an epoch's seconds: of the slowest group of devices."""
    profile, shape, costs = pricer.profile, priced.shape, priced.costs
    groups = groups_of(shape, costs)
    ends = busy_seconds(profile, shape, costs)
    alone = max(end + sum(one.step for one in group) for end, group in zip(ends, groups, strict=True))
    seconds = (alone + profile.overhead.step) * straggling(profile, question.devices)
    works = [sum(_compute(one) for one in group) * shape.microbatches for group in groups]
    slowest = groups[works.index(max(works))]
    layers = [one for cost in slowest for one in cost.layers]
    update = sum(one.update for one in layers)
    host = profile.overhead.step + seconds - seconds / straggling(profile, question.devices)
    left = max(seconds - max(works) - update - priced.moved.total, 0.0)
    waiting = max(left - host, 0.0) if len(costs) > 1 else 0.0
    count, memory = row.iterations, max((cost.memory for cost in costs), key=lambda one: one.total)
    return replace(
        row,
        compute=count * max(works),
        moved=priced.moved.times(count),
        update=count * update,
        waiting=count * waiting,
        other=count * (left - waiting),
        memory=memory.total,
        capacity=profile.cluster.device.memory,
        replicated=_alike(question, memory),
        loudest=_loudest(profile.graph, question, costs),
        uneven=max(works) * len(works) / max(sum(works), 1e-30),
        twice=priced.alike,
        shared=1 if len(costs) > 1 else question.width,
    )


def _compute(cost: StageCost) -> float:
    return sum(layer.forward + layer.backward + layer.recompute for layer in cost.layers)


def _loudest(graph: ModelGraph, question: RowQuestion, costs: Sequence[StageCost]) -> Loudest:
    """The layers whose communication is exposed longest; of a pipeline the last one of the stage that sends longest."""
    layers = [one for cost in costs for one in cost.layers]
    if len(costs) > 1:
        ends = list(accumulate(len(cost.layers) for cost in costs))
        slow = max(range(len(costs)), key=lambda stage: costs[stage].times.send_forward)
        return Loudest(messages=graph.layers[ends[slow] - 1].name)
    once = _named(graph, [one.step_exposed for one in layers])
    inner = _named(graph, [one.forward_exposed + one.backward_exposed for one in layers])
    near = _by_pixels(question)
    return Loudest(once, "" if near else inner, inner if near else "")


def _named(graph: ModelGraph, seconds: Sequence[float]) -> str:
    most = max(seconds)
    return graph.layers[seconds.index(most)].name if most > 0 else ""


def _alike(question: RowQuestion, memory: MemoryBreakdown) -> float:
    """Bytes that all devices of a group, or all replicas, hold alike: weights, or whole activations."""
    states = memory.parameters + memory.gradients + memory.optimizer
    match question.kind:
        case Method.FILTER | Method.CHANNEL | Method.DATA_FILTER:
            return float(memory.activations)
        case Method.SERIAL | Method.PIPELINE | Method.LAYER:
            return 0.0
    return float(states)
