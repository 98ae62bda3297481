"""Step times by rank in one form, from logs and from the prediction, so that both can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from statistics import median

from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import price_stages, shape_of, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.read import RecordedRun
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
        found = {kind: seconds for (place, kind), seconds in self.communication.items() if place is where}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def times_logged(run: RecordedRun) -> list[RankTimes]:
    """What a run's log tells of each rank, under the plan that was last in force.

    Forward passes of blocks are told apart, each of them with its communication; backward is one figure.
    """
    passes = run.plan.microbatches
    return [_of_rank(records, passes) for records in run.ranks if records]


def _of_rank(records: Sequence[RankRecord], passes: int) -> RankTimes:
    known = [record for record in records if record.steps]

    def mean(figure: Callable[[RankRecord], float]) -> float:
        """Median over records: a slow moment of the machine is not the run."""
        return median(figure(record) for record in known) if known else 0.0

    seconds = {part: mean(lambda record, part=part: record.parts.get(part, 0.0)) for part in StepPart}  # type: ignore[misc]
    names = dict.fromkeys(name for record in known for name in record.layers)
    layers = {
        name: passes * median(record.layers[name] for record in known if name in record.layers) for name in names
    }  # fmt: skip
    blocks = sum(layers.values())
    forward = (
        {**layers, "": max(seconds[StepPart.FORWARD] - blocks, 0.0)} if layers else {"": seconds[StepPart.FORWARD]}
    )
    communication = {(Where.GRADIENTS, ""): seconds[StepPart.GRADIENTS], (Where.CHECK, ""): seconds[StepPart.CHECK]}
    whole = mean(lambda record: record.seconds)
    parted = any(record.parts.keys() - {StepPart.OTHER} for record in known)
    backward = {"": seconds[StepPart.BACKWARD] + seconds[StepPart.WEIGHT]}
    return RankTimes(
        records[0].rank, whole, sum(record.steps for record in known), forward, backward,
        {key: own for key, own in communication.items() if own}, seconds[StepPart.OPTIMIZER], seconds[StepPart.WAITING],
        seconds[StepPart.OTHER], mean(lambda record: record.between), layered=bool(layers), parted=parted,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayersExpected:
    """A run of layers of one strategy; seconds a step on one device."""

    run: LayerRun  # of the plan
    stage: int  # it is of
    names: tuple[str, ...]  # of its layers
    kinds: tuple[str, ...]  # of its layers, in the same order
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
        return sum(one.forward_communication + one.backward_communication for one in self.layers)


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
    if plan.cyclic is not None or plan.branches:
        remedy = "What a step's time goes to is only told apart for plans in stages; look at the steps' times alone."
        raise InputError("plan", "cyclic" if plan.cyclic is not None else "branches", remedy)
    pricer = LayerPricer(for_mode(profile, plan.mode))
    priced = price_plan(pricer, plan)
    assert priced.prediction is not None
    strategies = strategies_of(plan, profile)
    shape = shape_of(plan, strategies)
    costs = price_stages(pricer, shape, [sum(run.count for run in stage.runs) for stage in plan.stages], strategies)
    seconds = priced.prediction.step_seconds
    return Expected(priced, seconds, _groups(profile, plan, shape, costs, seconds))


def _groups(
    profile: Profile, plan: Plan, shape: Shape, costs: Sequence[StageCost], seconds: float
) -> tuple[GroupExpected, ...]:
    owned: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for stage in range(len(plan.stages)):
        owned[group_of(shape.schedule, shape.stages, stage)].append(stage)
    found = []
    for number, stages in enumerate(owned):
        layers = tuple(one for stage in stages for one in _layers(profile, plan, stage, costs[stage]))
        each = [cost for stage in stages for cost in costs[stage].layers]
        moving = sum(costs[stage].moving for stage in stages) * plan.microbatches
        gradients = sum(cost.step_exposed for cost in each)
        optimizer = sum(cost.update for cost in each)
        host = sum(plan.microbatches * cost.host + cost.step_host for cost in each)
        fixed = len(stages) * plan.microbatches * profile.overhead.microbatch + profile.overhead.step
        work = moving + gradients + optimizer + host + fixed
        for one in layers:
            work += one.forward + one.backward + one.forward_communication + one.backward_communication
        ranks = range(number * plan.stage_devices, (number + 1) * plan.stage_devices)
        waiting = max(seconds - work, 0.0) if plan.pipeline > 1 else 0.0
        found.append(GroupExpected(ranks, layers, gradients, optimizer, host + fixed + moving, waiting))
    return tuple(found)


def _layers(profile: Profile, plan: Plan, stage: int, cost: StageCost) -> list[LayersExpected]:
    """The runs of a stage."""
    before = sum(run.count for other in plan.stages[:stage] for run in other.runs)
    ends = list(accumulate(run.count for run in plan.stages[stage].runs))
    found = []
    for run, end in zip(plan.stages[stage].runs, ends, strict=True):
        own: Sequence[LayerCost] = cost.layers[end - run.count : end]
        layers = profile.graph.layers[before + end - run.count : before + end]
        found.append(
            LayersExpected(
                run, stage, tuple(layer.name for layer in layers), tuple(layer.kind for layer in layers),
                plan.microbatches * sum(one.forward for one in own),
                plan.microbatches * sum(one.backward + one.recompute for one in own),
                plan.microbatches * sum(one.forward_exposed for one in own),
                plan.microbatches * sum(one.backward_exposed for one in own),
            )
        )  # fmt: skip
    return found
