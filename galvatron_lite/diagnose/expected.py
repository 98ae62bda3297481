"""Parts of step times by rank, measured (``RankTimes``) and predicted (``ExpectedStep``), for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from galvatron_lite.analysis.step_time import PricedStages, explained_in_parts, price_in_parts
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import RankRecord, StepPart


class WaitPlace(StrEnum):
    """The part of a step in which a rank waits for communication."""

    LAYERS = "inside layers"
    GRADIENTS = "sums of gradients"
    CHECK = "the check behind every step"
    OPTIMIZER = "handing out updated parameters"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of the parts of a mean step on a rank; they add up to ``seconds``."""

    rank: int  # in the world
    seconds: float  # seconds of a step
    steps: int  # steps in the mean
    # by layer; from a trace without communication, from a log with it
    forward: Mapping[str, float] = field(default_factory=dict)
    # by layer; from a log only the sum of all layers, under an empty name
    backward: Mapping[str, float] = field(default_factory=dict)
    # exposed communication by place and kind (``all_reduce``)
    communication: Mapping[tuple[WaitPlace, str], float] = field(default_factory=dict)
    optimizer: float = 0.0  # the update
    waiting: float = 0.0  # for other stages of a pipeline
    other: float = 0.0  # the remainder: host work, code outside layers, an idle device
    between: float = 0.0  # seconds between steps, not part of ``seconds``
    traced: bool = False  # whether the times are from a trace
    groups: Mapping[str, str] = field(default_factory=dict)  # names of groups in a trace, by kind of communication
    has_layers: bool = True  # whether forward is by layer
    has_parts: bool = True  # whether the parts of a step were measured

    def exposed(self, where: WaitPlace) -> float:
        """Return the seconds of all communication at a place."""
        return sum(seconds for (place, _), seconds in self.communication.items() if place is where)

    def kinds(self, where: WaitPlace) -> dict[str, float]:
        """Return the seconds of communication at a place by kind, the longest first."""
        seconds_of = {kind: seconds for (place, kind), seconds in self.communication.items() if place is where}
        return dict(sorted(seconds_of.items(), key=lambda item: -item[1]))


def times_from_log(records: Sequence[RankRecord], passes: int) -> RankTimes:
    """Return the times of a rank's log under a plan with ``passes`` micro-batches.

    A log has forward by block, including communication, and a single figure for backward.
    """
    with_steps = [record for record in records if record.steps]

    def middle(figures: Iterable[float]) -> float:
        """Return the median, so that a slow moment of the machine does not count."""
        values = list(figures)
        return median(values) if values else 0.0

    seconds = {part: middle(record.parts.get(part, 0.0) for record in with_steps) for part in StepPart}
    names = dict.fromkeys(name for record in with_steps for name in record.layers)
    layers = {
        name: passes * median(record.layers[name] for record in with_steps if name in record.layers) for name in names
    }  # fmt: skip
    forward = {**layers, "": max(seconds[StepPart.FORWARD] - sum(layers.values()), 0.0)}
    communication = {
        (WaitPlace.GRADIENTS, ""): seconds[StepPart.GRADIENTS],
        (WaitPlace.CHECK, ""): seconds[StepPart.CHECK],
    }
    total, between = (middle(getattr(record, name) for record in with_steps) for name in ("seconds", "between"))
    has_parts = any(record.parts.keys() - {StepPart.OTHER} for record in with_steps)
    backward = {"": seconds[StepPart.BACKWARD] + seconds[StepPart.WEIGHT]}
    return RankTimes(
        records[0].rank, total, sum(record.steps for record in with_steps), forward, backward,
        {key: spent for key, spent in communication.items() if spent}, seconds[StepPart.OPTIMIZER],
        seconds[StepPart.WAITING], seconds[StepPart.OTHER], between, has_layers=bool(layers), has_parts=has_parts,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpectedLayers:
    """Predicted seconds of a run of layers with one strategy, in a step on one device."""

    run: LayerRun
    stage: int
    layers: tuple[Layer, ...]
    forward: float  # compute
    backward: float  # compute, with recomputation
    forward_communication: float  # exposed
    backward_communication: float  # exposed


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """Predicted seconds of a step on the devices that share the same stages."""

    ranks: range  # in the world
    layers: tuple[ExpectedLayers, ...]
    gradients: float  # exposed communication once a step
    optimizer: float  # the update
    other: float  # fixed host time
    waiting: float  # for other groups

    @property
    def inside(self) -> float:
        """Seconds of exposed communication inside layers."""
        return sum(layer.forward_communication + layer.backward_communication for layer in self.layers)


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """Predicted seconds of a step of a plan."""

    plan: Plan  # priced
    seconds: float  # seconds of a step
    groups: tuple[ExpectedGroup, ...]

    def group_of(self, rank: int) -> ExpectedGroup:
        """Return the group of a rank."""
        return next(group for group in self.groups if rank in group.ranks)


def expect(profile: Profile, plan: Plan) -> ExpectedStep:
    """Predict the parts of a step of a plan."""
    if not explained_in_parts(plan):
        remedy = "What a step's time goes to is only told apart for plans in stages; look at the steps' times alone."
        raise InputError("plan", "cyclic" if plan.cyclic is not None else "branches", remedy)
    priced = price_in_parts(LayerPricer(for_mode(profile, plan.mode)), plan)
    groups = tuple(_group(priced, number) for number in range(plan.pipeline))
    return ExpectedStep(priced.plan, priced.prediction.step_seconds, groups)


def _group(priced: PricedStages, number: int) -> ExpectedGroup:
    plan, overhead, stages = priced.plan, priced.pricer.profile.overhead, priced.stages_of(number)
    layers = tuple(layer for stage in stages for layer in _layers(priced, stage))
    each = [cost for stage in stages for cost in priced.stages[stage].layers]
    gradients, optimizer = sum(cost.step_exposed for cost in each), sum(cost.update for cost in each)
    other = sum(priced.stages[stage].moving for stage in stages) * plan.microbatches
    other += sum(plan.microbatches * cost.host + cost.step_host for cost in each)
    other += len(stages) * plan.microbatches * overhead.microbatch + overhead.step
    work = other + gradients + optimizer
    for layer in layers:
        work += layer.forward + layer.backward + layer.forward_communication + layer.backward_communication
    ranks = range(number * plan.stage_devices, (number + 1) * plan.stage_devices)
    waiting = max(priced.prediction.step_seconds - work, 0.0) if plan.pipeline > 1 else 0.0
    return ExpectedGroup(ranks, layers, gradients, optimizer, other, waiting)


def _layers(priced: PricedStages, stage: int) -> Iterator[ExpectedLayers]:
    """Yield the predicted runs of layers of a stage."""
    start, begin = priced.ranges[stage].start, 0
    for run in priced.plan.stages[stage].runs:
        costs = priced.stages[stage].layers[begin : begin + run.count]
        layers = priced.pricer.profile.graph.layers[start + begin : start + begin + run.count]
        begin += run.count
        sums = (
            sum(cost.forward for cost in costs), sum(cost.backward + cost.recompute for cost in costs),
            sum(cost.forward_exposed for cost in costs), sum(cost.backward_exposed for cost in costs),
        )  # fmt: skip
        yield ExpectedLayers(run, stage, layers, *(priced.plan.microbatches * seconds for seconds in sums))
