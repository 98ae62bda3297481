"""What each group of devices was predicted to do in a step, cut as measurements are. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import shape_of, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.profiler.schema import Profile


@dataclass(frozen=True, slots=True)
class LayersExpected:
    """A run of layers of one strategy; seconds a step on one device.

    Attributes:
        run: of the plan.
        stage: it is of.
        names: of its layers.
        kinds: of its layers, in the same order.
        forward, backward: compute; ``backward`` with what is computed again.
        forward_communication, backward_communication: that compute does not hide.
    """

    run: LayerRun
    stage: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    forward: float
    backward: float
    forward_communication: float
    backward_communication: float


@dataclass(frozen=True, slots=True)
class GroupExpected:
    """The devices of one place in the pipeline; seconds a step.

    Attributes:
        ranks: of the world.
        layers: that they run.
        gradients: communication once a step that nothing hides.
        optimizer: the update.
        other: fixed host time.
        waiting: for other groups.
    """

    ranks: range
    layers: tuple[LayersExpected, ...]
    gradients: float
    optimizer: float
    other: float
    waiting: float

    @property
    def inside(self) -> float:
        """Seconds of communication inside layers."""
        return sum(one.forward_communication + one.backward_communication for one in self.layers)


@dataclass(frozen=True, slots=True)
class Expected:
    """A plan as its profile prices it.

    Attributes:
        plan: priced.
        seconds: of a step.
        groups: of devices.
    """

    plan: Plan
    seconds: float
    groups: tuple[GroupExpected, ...]

    def group_of(self, rank: int) -> GroupExpected:
        """The group that a rank is of."""
        return next(group for group in self.groups if rank in group.ranks)


def expect(profile: Profile, plan: Plan) -> Expected:
    """What a plan in stages is predicted to do.

    Raises:
        InputError: the plan is cyclic, has branches of their own devices, or is of another model than the profile.
    """
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
        work = sum(_whole(one) for one in layers) + moving + gradients + optimizer + host + fixed
        ranks = range(number * plan.stage_devices, (number + 1) * plan.stage_devices)
        waiting = max(seconds - work, 0.0) if plan.pipeline > 1 else 0.0
        found.append(GroupExpected(ranks, layers, gradients, optimizer, host + fixed + moving, waiting))
    return tuple(found)


def _whole(one: LayersExpected) -> float:
    return one.forward + one.backward + one.forward_communication + one.backward_communication


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
