"""Where the time of a step goes, and when memory is fullest.

The account is of the busiest group of devices, as in ``cost.step.breakdown``: compute, exposed communication, updates,
host work, and waiting for other stages or for the slowest of many devices. Its parts add up to the predicted step.
``cost`` knows only what all communication of a layer adds to its compute. Here blocking communication is listed by
cause, and what overlap leaves exposed is divided among the causes in proportion to the seconds that could be hidden.
Layers that were measured as a unit are divided into classes of operation by rooflines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from galvatron_lite.analysis.explanation import StageMemory, TimeAccount, TimeClass, TimePart
from galvatron_lite.calibration.store import constants_for_device, load_calibration
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.communication import GATHER, hidden_share, moment_of, overlapped_seconds
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.stage import Shape, StageCost, sharing_of
from galvatron_lite.cost.step import (
    groups_of,
    hidden_send_share,
    price_staged,
    price_stages,
    shape_of,
    straggling,
    strategies_of,
)
from galvatron_lite.cost.timeline import GroupTimeline, timeline, untimed
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.channel.parts import kind_under
from galvatron_lite.parallelism.expert.cost import rank_load
from galvatron_lite.parallelism.pipeline.cost import NAME as PIPELINE
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.parallelism.spatial.cost import samples_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import layer_ranges, pipeline_of
from galvatron_lite.plans.schema import Plan, Prediction
from galvatron_lite.profiler.estimate import stack_constants
from galvatron_lite.profiler.machine import Machine, machine_of
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.stacks.catalog import GALVATRON

REDISTRIBUTION, SHARED, OFFLOAD = "redistribution", "shared parameters", "host memory"
BUBBLE, SLOWEST = "other stages (bubble)", "the slowest of many devices"
FORWARD, BACKWARD, STEP = Moment.FORWARD.value, Moment.BACKWARD.value, Moment.STEP.value
_ROUNDING = 1e-9  # share of a step below which a difference is rounding
_MOST_PASSES = 4096  # of a step whose peak is searched for, if fewer micro-batches have the same peak


def explained_in_parts(plan: Plan) -> bool:
    """Whether a plan has only stages in the model's order; other plans are priced as a unit."""
    return not plan.branches and plan.cyclic is None


@dataclass(frozen=True)
class PricedStages:
    """A plan in stages, and its cost."""

    pricer: LayerPricer  # of the profile, in the plan's mode
    plan: Plan  # with its prediction
    prediction: Prediction  # the plan's
    strategies: tuple[Strategy, ...]  # of every layer of the model
    shape: Shape  # pipeline, micro-batches and schedule
    stages: tuple[StageCost, ...]  # in the order of the model

    @cached_property
    def groups(self) -> list[list[StageCost]]:
        """The stages that each group of devices runs."""
        return groups_of(self.shape, self.stages)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Indices of the layers of each stage."""
        return layer_ranges(self.plan)

    @cached_property
    def busiest(self) -> int:
        """Number of the group of devices that works longest, which ``TimeBreakdown`` is of."""

        def work(group: int) -> tuple[float, float]:
            stages = self.groups[group]
            return sum(cost.times.total for cost in stages), sum(cost.step for cost in stages)

        return max(range(self.shape.stages), key=work)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Numbers of the stages that a group of devices runs, in the order of its chunks."""
        return pipeline_of(self.plan).stages_of(group)

    def group_of(self, stage: int) -> int:
        """Number of the group of devices that runs a stage."""
        return pipeline_of(self.plan).group_of(stage)

    def pricer_of(self, stage: int) -> LayerPricer:
        """The pricer of a stage's devices."""
        return self.pricer.of_group(self.shape.stage_devices, self.group_of(stage))

    def sharing_of_layer(self, stage: int, index: int) -> ParameterSharing:
        """How a layer of a stage shares its parameters."""
        same_devices = {layer for number in self.stages_of(self.group_of(stage)) for layer in self.ranges[number]}
        return sharing_of(self.pricer.profile.graph, same_devices).get(index, ALONE)


def price_in_parts(pricer: LayerPricer, plan: Plan) -> PricedStages:
    """Price every stage of a plan for which ``explained_in_parts`` holds."""
    priced = price_staged(pricer, plan)
    strategies = tuple(strategies_of(plan, pricer.profile))
    shape = shape_of(plan, strategies)
    stages = tuple(price_stages(pricer, shape, list(map(len, layer_ranges(plan))), strategies))
    assert priced.prediction is not None
    return PricedStages(pricer, priced, priced.prediction, strategies, shape, stages)


Key = tuple[TimeClass, str]
Item = tuple[Key, float, float]
"""A class and a name, its seconds of the step, and seconds of communication hidden behind compute."""


def account(priced: PricedStages) -> TimeAccount:
    """Return where the time of a plan's step goes."""
    group = priced.busiest
    shares = OperationShares(priced.pricer_of(priced.stages_of(group)[0]))
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stage in priced.stages_of(group):
        for key, seconds, hidden in _stage_items(priced, stage, shares):
            sums[key][0] += seconds
            sums[key][1] += hidden
    for key, seconds in _waiting(priced, sum(busy for busy, _ in sums.values())):
        sums[key][0] += seconds
    least = _ROUNDING * priced.prediction.step_seconds
    parts = [
        TimePart(*key, seconds, max(hidden, 0.0))
        for key, (seconds, hidden) in sums.items()
        if seconds > 0 or hidden > least
    ]
    parts.sort(key=lambda part: (-part.seconds, part.name))
    return TimeAccount(priced.prediction.step_seconds, group, tuple(parts), shares.origin)


def _waiting(priced: PricedStages, busy: float) -> Iterator[tuple[Key, float]]:
    """The rest of the step: host work once a step, and waiting. ``busy``: seconds of the busiest group."""
    profile, seconds = priced.pricer.profile, priced.prediction.step_seconds
    alone = seconds / straggling(profile, priced.plan.devices)
    yield (TimeClass.HOST, "once a step"), profile.overhead.step
    left = alone - profile.overhead.step - busy
    if left > _ROUNDING * seconds:
        yield (TimeClass.WAITING, BUBBLE if len(priced.groups) > 1 else SLOWEST), left
    if seconds - alone > _ROUNDING * seconds:
        yield (TimeClass.WAITING, SLOWEST), seconds - alone


def _stage_items(priced: PricedStages, stage: int, shares: OperationShares) -> Iterator[Item]:
    cost, times = priced.stages[stage], priced.shape.microbatches
    for index, layer in zip(priced.ranges[stage], cost.layers, strict=True):
        kind = priced.pricer.profile.graph.layers[index].kind
        forward, backward = shares.of(kind, priced.strategies[index], priced.shape.microbatch)
        for name, share in forward.items():
            yield (TimeClass.COMPUTE, name), times * share * layer.forward, 0.0
        for name, share in backward.items():
            yield (TimeClass.COMPUTE, name), times * share * layer.backward, 0.0
        yield (TimeClass.RECOMPUTE, "computing again"), times * layer.recompute, 0.0
        yield from _communication(priced, stage, index, layer)
        yield (TimeClass.OPTIMIZER, "update"), layer.update, 0.0
        yield (TimeClass.HOST, "layers"), times * layer.host + layer.step_host, 0.0
    yield (TimeClass.COMMUNICATION, REDISTRIBUTION), times * cost.moving, 0.0
    sends = times * (cost.times.send_forward + cost.times.send_backward)
    hidden = hidden_send_share(priced.pricer.profile)
    yield (TimeClass.COMMUNICATION, PIPELINE), (1.0 - hidden) * sends, hidden * sends
    neighbours = (priced.ranges[stage].start > 0) + (priced.ranges[stage].stop < len(priced.strategies))
    handing = 2 * neighbours * priced.pricer_of(stage).profile.overhead.pipeline
    yield (TimeClass.HOST, "sends and receives"), times * handing, 0.0
    layers = sum(layer.forward_seconds + layer.backward_seconds for layer in cost.layers)
    between_layers = float(cost.times.forward + cost.times.backward - layers - cost.moving)
    yield (TimeClass.HOST, "micro-batches"), times * max(between_layers - handing, 0.0), 0.0


def _communication(priced: PricedStages, stage: int, index: int, layer: LayerCost) -> Iterator[Item]:
    """Communication of a layer by cause. What no dimension sends is of shared parameters, or goes to host memory."""
    times, strategy = priced.shape.microbatches, priced.strategies[index]
    kind = priced.pricer.profile.graph.layers[index].kind
    pricer, counted = priced.pricer_of(stage), 0.0
    for cause, (exposed, total) in _by_cause(pricer, kind, strategy, priced.shape.microbatch, layer, times).items():
        counted += exposed
        yield (TimeClass.COMMUNICATION, cause), exposed, total - exposed
    left = times * (layer.forward_exposed + layer.backward_exposed) + layer.step_exposed - counted
    tied = priced.sharing_of_layer(stage, index).exchanged > 0 and priced.shape.stages > 1
    if abs(left) > _ROUNDING * counted or not counted:
        yield (TimeClass.COMMUNICATION, SHARED if tied and not strategy.offloads_activations else OFFLOAD), left, 0.0


def _by_cause(
    pricer: LayerPricer, kind: str, strategy: Strategy, microbatch: int, cost: LayerCost, times: int
) -> dict[str, tuple[float, float]]:
    """Seconds of a step, exposed and in total, of what the dimensions of a layer send in ``times`` micro-batches."""
    sent = pricer.work(pricer.profile.graph.kinds[kind], strategy, microbatch).communications
    total: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    hiding: dict[str, dict[str, float]] = {moment: defaultdict(float) for moment in (FORWARD, BACKWARD, STEP, GATHER)}
    for message, timed in zip(sent, pricer.links.timed(sent), strict=True):
        share, moment, seconds = hidden_share(message, pricer.profile.hidden), moment_of(message), float(timed)
        total[message.cause] += seconds * (1 if message.moment is Moment.STEP else times)
        exposed[message.cause] += (1.0 - share) * seconds * (1 if moment in (STEP, GATHER) else times)
        hiding[moment][message.cause] += share * seconds
    overlap, forward, backward = pricer.profile.overlap, cost.forward, cost.backward + cost.recompute
    sums = {moment: sum(by_cause.values()) for moment, by_cause in hiding.items()}
    ahead = overlapped_seconds(forward, sums[FORWARD], overlap)
    back = overlapped_seconds(backward, sums[BACKWARD], overlap)
    added = {
        FORWARD: times * (ahead - forward),
        BACKWARD: times * (back - backward),
        STEP: overlapped_seconds(backward, sums[BACKWARD] + sums[STEP], overlap) - back,
        GATHER: overlapped_seconds(forward, sums[FORWARD] + sums[GATHER], overlap) - ahead,
    }
    for moment, by_cause in hiding.items():
        for cause, seconds in by_cause.items():
            if sums[moment]:
                exposed[cause] += float(added[moment]) * seconds / sums[moment]
    return {cause: (exposed[cause], seconds) for cause, seconds in total.items()}


OPERATION_NAMES = {
    OperatorClass.MATMUL: "matmul",
    OperatorClass.ATTENTION: "attention",
    OperatorClass.CONVOLUTION: "convolution",
    OperatorClass.MEMORY: "memory-bound",
}
OTHER = "other"
Shares = Mapping[str, float]
"""Share of a pass's compute by class of operation; they add up to 1."""


class OperationShares:
    """Shares of the classes of operation in the compute of layers, on the devices of a pricer."""

    def __init__(self, pricer: LayerPricer) -> None:
        self.pricer = pricer
        self.of = cache(self._of)

    @property
    def origin(self) -> str:
        """How seconds by class of operation are known; see ``TimeAccount``."""
        return "estimated" if self.pricer.profile.origin.kind is OriginKind.ESTIMATED else "shared out"

    def _of(self, kind_name: str, strategy: Strategy, microbatch: int) -> tuple[Shares, Shares]:
        """Shares in forward and in backward of a layer."""
        if (machine := self._machine) is None:
            return {OTHER: 1.0}, {OTHER: 1.0}
        kind = self.pricer.profile.graph.kinds[kind_name]
        forward: dict[str, float] = defaultdict(float)
        backward: dict[str, float] = defaultdict(float)
        samples, load = float(samples_of(kind, strategy, microbatch)), rank_load(kind, strategy.expert)
        for operator in kind_under(kind, strategy).operators:
            seconds = operator_seconds(
                machine, operator, samples, strategy.tensor, strategy.sequence_parallel, strategy.expert, load
            )
            forward[OPERATION_NAMES[operator.kind]] += seconds.forward
            backward[OPERATION_NAMES[operator.kind]] += seconds.backward
        return _normalized(forward), _normalized(backward)

    @cached_property
    def _machine(self) -> Machine | None:
        """The device at the model's precision; None if its data sheet has no figures for that."""
        profile, calibration = self.pricer.profile, load_calibration()
        device = profile.cluster.device
        reached = constants_for_device(calibration, device.name, device.source)
        try:
            return machine_of(device, profile.graph.precision, reached, stack_constants(GALVATRON, calibration))
        except InputError:
            return None


def _normalized(seconds: Mapping[str, float]) -> Shares:
    total = sum(seconds.values())
    return {name: second / total for name, second in seconds.items() if second} if total else {OTHER: 1.0}


def memory_of(priced: PricedStages, budget: Budget) -> tuple[StageMemory, ...]:
    """Return the memory of each group of devices at its worst moment."""
    plan, memory = priced.plan, list[StageMemory]()
    timelines: Sequence[GroupTimeline | None] = [None] * plan.pipeline
    if not untimed(plan):
        timelines = timeline(priced.pricer.profile, _with_fewer_microbatches(plan)).groups
    for number, timed in enumerate(timelines):
        stages = priced.stages_of(number)
        stage = plan.stages[stages[0]]
        moment = ("", "", -1) if timed is None else _moment(timed)
        memory.append(StageMemory(number, stages, stage.memory.total, budget.of(stage.device), *moment, stage.memory))
    return tuple(memory)


def _with_fewer_microbatches(plan: Plan) -> Plan:
    """The plan with fewer micro-batches of the same size, if that changes no peak of memory."""
    if not plan.schedule.settles or 2 * len(plan.stages) * plan.microbatches <= _MOST_PASSES:
        return plan
    count = min(3 * plan.virtual_stages * plan.pipeline, plan.microbatches)
    return replace(plan, microbatches=count, global_batch=count * plan.microbatch)


_PASS_NAMES = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHT: "gradients of weights"}


def _moment(timed: GroupTimeline) -> tuple[str, str, int]:
    """The moment of the peak in words, its layer and its micro-batch; see ``StageMemory``."""
    peak = timed.peak
    if peak.place < 0:
        return "the optimizer's update", "", -1
    worst = timed.passes[peak.place]
    return f"{_PASS_NAMES[worst.what]} of micro-batch {worst.microbatch} in {peak.layer}", peak.layer, worst.microbatch
