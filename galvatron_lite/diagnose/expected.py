"""Step times by rank in one form, from logs and from the prediction, so that both can be compared."""

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


class Where(StrEnum):
    """Where in a step communication is waited for."""

    LAYERS = "inside layers"
    GRADIENTS = "sums of gradients"
    CHECK = "the check behind every step"
    OPTIMIZER = "handing out updated parameters"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of a mean step on a rank; they add up to ``seconds``."""

    rank: int  # in the world
    seconds: float  # of a step
    steps: int  # that the figures are of
    # by layer; of a trace without communication, of a log with it
    forward: Mapping[str, float] = field(default_factory=dict)
    # the same; of a log under an empty name alone, for all layers together
    backward: Mapping[str, float] = field(default_factory=dict)
    # that nothing hides, by where it is and its kind (``all_reduce``)
    communication: Mapping[tuple[Where, str], float] = field(default_factory=dict)
    optimizer: float = 0.0  # the update
    waiting: float = 0.0  # for other stages of a pipeline
    other: float = 0.0  # all else: host work, what is outside layers, an idle device
    between: float = 0.0  # seconds between steps, not part of ``seconds``
    traced: bool = False  # whether it is from a trace
    # what a trace calls the groups of ranks, by kind of communication
    groups: Mapping[str, str] = field(default_factory=dict)
    layered: bool = True  # whether forward passes were told apart by layer
    parted: bool = True  # whether the parts of a step were told apart

    def exposed(self, where: Where) -> float:
        """Seconds of communication of all kinds at a place."""
        return sum(seconds for (place, _), seconds in self.communication.items() if place is where)

    def kinds(self, where: Where) -> dict[str, float]:
        """Seconds by kind at a place, the longest first."""
        seconds_of = {kind: seconds for (place, kind), seconds in self.communication.items() if place is where}
        return dict(sorted(seconds_of.items(), key=lambda item: -item[1]))


def times_logged(records: Sequence[RankRecord], passes: int) -> RankTimes:
    """What the log of a rank tells, under a plan of so many micro-batches.

    Forward passes of blocks are told apart, each of them with its communication; backward is one figure.
    """
    with_steps = [record for record in records if record.steps]

    def middle(figures: Iterable[float]) -> float:
        """The median of records: a slow moment of the machine is not the run."""
        values = list(figures)
        return median(values) if values else 0.0

    seconds = {part: middle(record.parts.get(part, 0.0) for record in with_steps) for part in StepPart}
    names = dict.fromkeys(name for record in with_steps for name in record.layers)
    layers = {
        name: passes * median(record.layers[name] for record in with_steps if name in record.layers) for name in names
    }  # fmt: skip
    forward = {**layers, "": max(seconds[StepPart.FORWARD] - sum(layers.values()), 0.0)}
    communication = {(Where.GRADIENTS, ""): seconds[StepPart.GRADIENTS], (Where.CHECK, ""): seconds[StepPart.CHECK]}
    total, between = (middle(getattr(one, name) for one in with_steps) for name in ("seconds", "between"))
    parted = any(record.parts.keys() - {StepPart.OTHER} for record in with_steps)
    backward = {"": seconds[StepPart.BACKWARD] + seconds[StepPart.WEIGHT]}
    return RankTimes(
        records[0].rank, total, sum(record.steps for record in with_steps), forward, backward,
        {key: own for key, own in communication.items() if own}, seconds[StepPart.OPTIMIZER], seconds[StepPart.WAITING],
        seconds[StepPart.OTHER], between, layered=bool(layers), parted=parted,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayersExpected:
    """A run of layers of one strategy; seconds a step on one device."""

    run: LayerRun  # of the plan
    stage: int  # it is of
    layers: tuple[Layer, ...]  # of the run
    forward: float  # forward, backward: compute; ``backward`` with what is computed again
    backward: float
    forward_communication: float  # forward_communication, backward_communication: that compute does not hide
    backward_communication: float


@dataclass(frozen=True, slots=True)
class GroupExpected:
    """The devices of one place in the pipeline; seconds a step."""

    ranks: range  # of the world
    layers: tuple[LayersExpected, ...]  # that they run
    gradients: float  # communication once a step that nothing hides
    optimizer: float  # the update
    other: float  # fixed host time
    waiting: float  # for other groups

    @property
    def inside(self) -> float:
        """Seconds of communication inside layers."""
        return sum(layer.forward_communication + layer.backward_communication for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Expected:
    """A plan as its profile prices it."""

    plan: Plan  # priced
    seconds: float  # of a step
    groups: tuple[GroupExpected, ...]  # of devices

    def group_of(self, rank: int) -> GroupExpected:
        """The group that a rank is of."""
        return next(group for group in self.groups if rank in group.ranks)


def expect(profile: Profile, plan: Plan) -> Expected:
    """What a plan in stages is predicted to do."""
    if not explained_in_parts(plan):
        remedy = "What a step's time goes to is only told apart for plans in stages; look at the steps' times alone."
        raise InputError("plan", "cyclic" if plan.cyclic is not None else "branches", remedy)
    priced = price_in_parts(LayerPricer(for_mode(profile, plan.mode)), plan)
    groups = tuple(_group(priced, number) for number in range(plan.pipeline))
    return Expected(priced.plan, priced.prediction.step_seconds, groups)


def _group(priced: PricedStages, number: int) -> GroupExpected:
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
    return GroupExpected(ranks, layers, gradients, optimizer, other, waiting)


def _layers(priced: PricedStages, stage: int) -> Iterator[LayersExpected]:
    """The runs of a stage."""
    start, begin = priced.ranges[stage].start, 0
    for run in priced.plan.stages[stage].runs:
        own = priced.stages[stage].layers[begin : begin + run.count]
        layers = priced.pricer.profile.graph.layers[start + begin : start + begin + run.count]
        begin += run.count
        sums = (
            sum(one.forward for one in own), sum(one.backward + one.recompute for one in own),
            sum(one.forward_exposed for one in own), sum(one.backward_exposed for one in own),
        )  # fmt: skip
        yield LayersExpected(run, stage, layers, *(priced.plan.microbatches * sum_ for sum_ in sums))
