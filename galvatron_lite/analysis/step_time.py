"""Where the time of a step goes and when memory is fullest; the parts of the time add up to the predicted step.

The account is of the busiest group of devices, as in ``cost.step.breakdown``: compute, exposed communication, updates,
host work, and waiting for other stages or for the slowest of many devices. ``cost.communication`` gives what all
communication of a layer adds to its compute. Here blocking communication is listed by cause, and what overlap leaves
exposed is divided in proportion to the seconds that could have been hidden, as nothing tells which of several
concurrent messages waited. Where layers were measured as a whole, rooflines divide their time into classes of
operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from galvatron_lite.analysis.explanation import StageMemory, TimeAccount, TimeClass, TimePart
from galvatron_lite.calibration.store import constants_for_device, load_calibration
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.cost.communication import GATHER, hidden_share, moment_of, together
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.stage import Shape, StageCost, sharing_of
from galvatron_lite.cost.step import (
    busy_seconds,
    groups_of,
    price_staged,
    price_stages,
    shape_of,
    straggling,
    strategies_of,
)
from galvatron_lite.cost.step import hidden_share as hidden_sends
from galvatron_lite.cost.timeline import GroupTimeline, timeline, untimed
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.channel.parts import sliced_kind
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


def explained_in_parts(plan: Plan) -> bool:
    """Whether a plan is one of stages in the model's order, the only kind whose price is taken apart."""
    return not plan.branches and plan.cyclic is None


@dataclass(frozen=True)
class PricedStages:
    """A plan in stages and its price."""

    pricer: LayerPricer  # of the profile, in the plan's mode
    plan: Plan  # with its prediction
    prediction: Prediction  # the plan's
    strategies: tuple[Strategy, ...]  # of every layer of the model
    shape: Shape  # what the plan chooses once
    stages: tuple[StageCost, ...]  # the cost of each, in the order of the model

    @cached_property
    def groups(self) -> list[list[StageCost]]:
        """The stages that each group of devices runs."""
        return groups_of(self.shape, self.stages)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Places in the model of the layers of each stage."""
        return layer_ranges(self.plan)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """Seconds from the step's beginning to the end of each group's last backward."""
        return busy_seconds(self.pricer.profile, self.shape, self.stages)

    @cached_property
    def busiest(self) -> int:
        """Number of the group of devices that works longest, whose time ``TimeBreakdown`` is of."""

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

    def sharing_of_layer(self, stage: int, place: int) -> ParameterSharing:
        """What sharing parameters means for a layer of a stage."""
        beside = {place for number in self.stages_of(self.group_of(stage)) for place in self.ranges[number]}
        return sharing_of(self.pricer.profile.graph, beside).get(place, ALONE)


def taken_apart(pricer: LayerPricer, plan: Plan) -> PricedStages:
    """A plan in stages, priced."""
    done = price_staged(pricer, plan)
    strategies = tuple(strategies_of(plan, pricer.profile))
    shape = shape_of(plan, strategies)
    stages = tuple(price_stages(pricer, shape, list(map(len, layer_ranges(plan))), strategies))
    assert done.prediction is not None
    return PricedStages(pricer, done, done.prediction, strategies, shape, stages)


FORWARD, BACKWARD, STEP = Moment.FORWARD.value, Moment.BACKWARD.value, Moment.STEP.value


def _caused(
    pricer: LayerPricer, kind: str, strategy: Strategy, microbatch: int, cost: LayerCost, times: int
) -> dict[str, tuple[float, float]]:
    """Seconds of a step of so many micro-batches, exposed and in all, that a layer communicates, by cause: what the
    dimensions say. Copies to host memory and shared parameters are left out."""
    sent = pricer.work(pricer.profile.graph.kinds[kind], strategy, microbatch).communications
    total: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    hiding: dict[str, dict[str, float]] = {moment: defaultdict(float) for moment in (FORWARD, BACKWARD, STEP, GATHER)}
    for one, timed in zip(sent, pricer.links.timed(sent), strict=True):
        share, moment, seconds = hidden_share(one, pricer.profile.hidden), moment_of(one), float(timed)
        total[one.cause] += seconds * (1 if one.moment is Moment.STEP else times)
        exposed[one.cause] += (1.0 - share) * seconds * (1 if moment in (STEP, GATHER) else times)
        hiding[moment][one.cause] += share * seconds
    overlap, forward, backward = pricer.profile.overlap, cost.forward, cost.backward + cost.recompute
    sums = {moment: sum(by_cause.values()) for moment, by_cause in hiding.items()}
    ahead, back = together(forward, sums[FORWARD], overlap), together(backward, sums[BACKWARD], overlap)
    added = {
        FORWARD: times * (ahead - forward),
        BACKWARD: times * (back - backward),
        STEP: together(backward, sums[BACKWARD] + sums[STEP], overlap) - back,
        GATHER: together(forward, sums[FORWARD] + sums[GATHER], overlap) - ahead,
    }
    for moment, by_cause in hiding.items():
        for cause, seconds in by_cause.items():
            if sums[moment]:
                exposed[cause] += float(added[moment]) * seconds / sums[moment]
    return {cause: (exposed[cause], seconds) for cause, seconds in total.items()}


NAMES = {
    OperatorClass.MATMUL: "matmul",
    OperatorClass.ATTENTION: "attention",
    OperatorClass.CONVOLUTION: "convolution",
    OperatorClass.MEMORY: "memory-bound",
}
OTHER = "other"
Shares = Mapping[str, float]  # share of a pass's compute by class of operation; they add up to 1


@dataclass
class Operations:
    """Shares of the classes of operation of layers on the devices of a pricer; answers are remembered."""

    pricer: LayerPricer  # of the layers' devices
    _seen: dict[tuple[str, Strategy, int], tuple[Shares, Shares]] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """How seconds by class of operation are known."""
        return "estimated" if self.pricer.profile.origin.kind is OriginKind.ESTIMATED else "shared out"

    def shares(self, kind: str, strategy: Strategy, microbatch: int) -> tuple[Shares, Shares]:
        """Shares of forward and of backward of a layer of a kind."""
        key = (kind, strategy, microbatch)
        if key not in self._seen:
            self._seen[key] = self._new(self.pricer.profile.graph.kinds[kind], strategy, microbatch)
        return self._seen[key]

    def _new(self, kind: LayerKind, strategy: Strategy, microbatch: int) -> tuple[Shares, Shares]:
        forward: dict[str, float] = defaultdict(float)
        backward: dict[str, float] = defaultdict(float)
        samples, load = float(samples_of(kind, strategy, microbatch)), rank_load(kind, strategy.expert)
        by = next((by for by in ("filters", "channels") if getattr(strategy, by) > 1), None)
        sliced = kind if by is None else sliced_kind(kind, by, getattr(strategy, by))
        if (machine := self._machine) is None:
            return {OTHER: 1.0}, {OTHER: 1.0}
        for operator in sliced.operators:
            seconds = operator_seconds(
                machine, operator, samples, strategy.tensor, strategy.sequence_parallel, strategy.expert, load
            )
            forward[NAMES[operator.kind]] += seconds.forward
            backward[NAMES[operator.kind]] += seconds.backward
        return _shares(forward), _shares(backward)

    @cached_property
    def _machine(self) -> Machine | None:
        """The device at the model's precision; None where the data sheet has no figures for it."""
        profile, calibration = self.pricer.profile, load_calibration()
        device = profile.cluster.device
        reached = constants_for_device(calibration, device.name, device.source)
        try:
            return machine_of(device, profile.graph.precision, reached, stack_constants(GALVATRON, calibration))
        except InputError:
            return None


def _shares(seconds: Mapping[str, float]) -> Shares:
    total = sum(seconds.values())
    return {name: second / total for name, second in seconds.items() if second} if total else {OTHER: 1.0}


REDISTRIBUTION, SHARED, OFFLOAD = "redistribution", "shared parameters", "host memory"
BUBBLE, SLOWEST = "other stages (bubble)", "the slowest of many devices"
_ROUNDING = 1e-9  # share of a step below which what is left over is rounding

Key = tuple[TimeClass, str]
Item = tuple[Key, float, float]
"""What it is, seconds of the step, and those of communication that run behind compute."""


def account(priced: PricedStages) -> TimeAccount:
    """Where the time of a plan's step goes."""
    group = priced.busiest
    operations = Operations(priced.pricer_of(priced.stages_of(group)[0]))
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stage in priced.stages_of(group):
        for key, seconds, hidden in _stage(priced, stage, operations):
            sums[key][0] += seconds
            sums[key][1] += hidden
    for key, seconds in _waiting(priced, sum(busy for busy, _ in sums.values())):
        sums[key][0] += seconds
    parts = [TimePart(*key, seconds, max(hidden, 0.0)) for key, (seconds, hidden) in sums.items()]
    least = _ROUNDING * priced.prediction.step_seconds
    shown = sorted(
        (part for part in parts if part.seconds > 0 or part.hidden_seconds > least),
        key=lambda part: (-part.seconds, part.name),
    )
    return TimeAccount(priced.prediction.step_seconds, group, tuple(shown), operations.origin)


def _waiting(priced: PricedStages, busy: float) -> Iterator[tuple[Key, float]]:
    """What of the step is neither work nor communication of the busiest group: host work once a step, and waiting."""
    profile, seconds = priced.pricer.profile, priced.prediction.step_seconds
    alone = seconds / straggling(profile, priced.plan.devices)
    yield (TimeClass.HOST, "once a step"), profile.overhead.step
    left = alone - profile.overhead.step - busy
    if left > _ROUNDING * seconds:
        yield (TimeClass.WAITING, BUBBLE if len(priced.groups) > 1 else SLOWEST), left
    if seconds - alone > _ROUNDING * seconds:
        yield (TimeClass.WAITING, SLOWEST), seconds - alone


def _stage(priced: PricedStages, stage: int, operations: Operations) -> Iterator[Item]:
    cost, times = priced.stages[stage], priced.shape.microbatches
    for place, layer in zip(priced.ranges[stage], cost.layers, strict=True):
        yield from _compute(priced, place, layer, operations)
        yield from _communication(priced, stage, place, layer)
        yield (TimeClass.OPTIMIZER, "update"), layer.update, 0.0
        yield (TimeClass.HOST, "layers"), times * layer.host + layer.step_host, 0.0
    yield (TimeClass.COMMUNICATION, REDISTRIBUTION), times * cost.moving, 0.0
    sends = times * (cost.times.send_forward + cost.times.send_backward)
    hidden = hidden_sends(priced.pricer.profile)
    yield (TimeClass.COMMUNICATION, PIPELINE), (1.0 - hidden) * sends, hidden * sends
    neighbours = (priced.ranges[stage].start > 0) + (priced.ranges[stage].stop < len(priced.strategies))
    handing = 2 * neighbours * priced.pricer_of(stage).profile.overhead.pipeline
    yield (TimeClass.HOST, "sends and receives"), times * handing, 0.0
    layers = sum(layer.forward_seconds + layer.backward_seconds for layer in cost.layers)
    between = float(cost.times.forward + cost.times.backward - layers - cost.moving)  # what belongs to no layer
    yield (TimeClass.HOST, "micro-batches"), times * max(between - handing, 0.0), 0.0


def _compute(priced: PricedStages, place: int, layer: LayerCost, operations: Operations) -> Iterator[Item]:
    times, kind = priced.shape.microbatches, priced.pricer.profile.graph.layers[place].kind
    forward, backward = operations.shares(kind, priced.strategies[place], priced.shape.microbatch)
    for name, share in forward.items():
        yield (TimeClass.COMPUTE, name), times * share * layer.forward, 0.0
    for name, share in backward.items():
        yield (TimeClass.COMPUTE, name), times * share * layer.backward, 0.0
    yield (TimeClass.RECOMPUTE, "computing again"), times * layer.recompute, 0.0


def _communication(priced: PricedStages, stage: int, place: int, layer: LayerCost) -> Iterator[Item]:
    """Communication of a layer by cause; what no dimension sends is of shared parameters, or goes to host memory."""
    times, kind = priced.shape.microbatches, priced.pricer.profile.graph.layers[place].kind
    strategy, size = priced.strategies[place], priced.shape.microbatch
    counted = 0.0
    for cause, (exposed, total) in _caused(priced.pricer_of(stage), kind, strategy, size, layer, times).items():
        counted += exposed
        yield (TimeClass.COMMUNICATION, cause), exposed, total - exposed
    left = times * (layer.forward_exposed + layer.backward_exposed) + layer.step_exposed - counted
    tied = priced.sharing_of_layer(stage, place).exchanged > 0 and priced.shape.stages > 1
    if abs(left) > _ROUNDING * counted or not counted:
        yield (TimeClass.COMMUNICATION, SHARED if tied and not strategy.offloads_activations else OFFLOAD), left, 0.0


MOST_PASSES = 4096
"""Passes of a step above which the moment is looked for in a step of fewer micro-batches, where it is the same one."""
_WORDS = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHT: "gradients of weights"}


def memory_of(priced: PricedStages, budget: Budget) -> tuple[StageMemory, ...]:
    """Memory of each group of devices at its worst moment."""
    plan, memory = priced.plan, list[StageMemory]()
    timed: Sequence[GroupTimeline | None] = [None] * plan.pipeline
    if not untimed(plan):
        timed = timeline(priced.pricer.profile, _shorter(plan)).groups
    for number, timing in enumerate(timed):
        stages = priced.stages_of(number)
        stage = plan.stages[stages[0]]
        moment = ("", "", -1) if timing is None else _moment(timing)
        used, budgeted = stage.memory.total, budget.of(stage.device)
        memory.append(StageMemory(number, stages, used, budgeted, *moment, stage.memory))
    return tuple(memory)


def _shorter(plan: Plan) -> Plan:
    """The plan with fewer micro-batches of the same size, where that moves no peak of memory."""
    if not plan.schedule.settles or 2 * len(plan.stages) * plan.microbatches <= MOST_PASSES:
        return plan
    count = min(3 * plan.virtual_stages * plan.pipeline, plan.microbatches)
    return replace(plan, microbatches=count, global_batch=count * plan.microbatch)


def _moment(timed: GroupTimeline) -> tuple[str, str, int]:
    peak = timed.peak
    if peak.place < 0:
        return "the optimizer's update", "", -1
    one = timed.passes[peak.place]
    return f"{_WORDS[one.what]} of micro-batch {one.microbatch} in {peak.layer}", peak.layer, one.microbatch
