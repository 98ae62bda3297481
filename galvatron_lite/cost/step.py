"""What a whole plan costs: step time and peak memory, with where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.schedule import closed_form
from galvatron_lite.cost.stage import Shape, StageCost, price_stage
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Plan, Prediction, TimeBreakdown
from galvatron_lite.profiler.schema import Profile


def evaluate(profile: Profile, plan: Plan) -> Plan:
    """The plan with its prediction filled in: step time, memory of every stage, and where both go.

    The step time is the closed form of ``cost.schedule`` plus the slowest stage's work once a step plus fixed host
    time: an upper bound of the event simulation, and equal to it without a pipeline.

    Raises:
        InputError: the plan does not fit the profile's model, or its numbers do not divide.
    """
    return price_plan(LayerPricer(profile), plan)


def price_plan(pricer: LayerPricer, plan: Plan) -> Plan:
    """``evaluate`` with a pricer that remembers what it has priced."""
    strategies = strategies_of(plan, pricer.profile)
    shape = _shape(plan, strategies)
    ends = list(accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    costs = [price_stage(pricer, shape, index, inside, strategies) for index, inside in enumerate(ranges)]
    stages = tuple(
        replace(stage, memory=cost.memory, microbatch_seconds=cost.times.forward + cost.times.backward)
        for stage, cost in zip(plan.stages, costs, strict=True)
    )
    return replace(plan, stages=stages, prediction=predict(pricer.profile, plan, shape, costs))


def strategies_of(plan: Plan, profile: Profile) -> list[Strategy]:
    """The strategy of every layer of the model, in order.

    Raises:
        InputError: the plan's layers are not the model's.
    """
    names = [layer.name for layer in profile.graph.layers]
    strategies: list[Strategy] = []
    for run in (run for stage in plan.stages for run in stage.runs):
        covered = names[len(strategies) : len(strategies) + run.count]
        if not covered or (covered[0], covered[-1], len(covered)) != (run.first, run.last, run.count):
            raise InputError(
                "stages.runs", f"{run.first} .. {run.last}", f"The model {profile.graph.name} goes on with {covered}."
            )
        strategies.extend([run.strategy] * run.count)
    if len(strategies) != len(names):
        raise InputError("stages.runs", len(strategies), f"The model has {len(names)} layers; plan them all.")
    return strategies


def _shape(plan: Plan, strategies: Sequence[Strategy]) -> Shape:
    stages = len(plan.stages)
    for field, whole, part in (
        ("devices", plan.devices, stages),
        ("microbatches", plan.global_batch, plan.microbatches),
    ):
        if part < 1 or whole % part:
            raise InputError(field, whole, f"It must be divisible by {part}.")
    shape = Shape(plan.devices, stages, plan.microbatches, plan.microbatch, plan.schedule)
    for strategy in set(strategies):
        if strategy.devices != shape.stage_devices:
            raise InputError("strategy", str(strategy), f"A stage has {shape.stage_devices} devices; use them all.")
        if shape.microbatch % strategy.batch_degree:
            raise InputError("microbatches", plan.microbatches, f"{shape.microbatch} samples do not divide: {strategy}")
    return shape


def predict(profile: Profile, plan: Plan, shape: Shape, costs: Sequence[StageCost]) -> Prediction:
    """Step time and memory of priced stages."""
    host = profile.overhead.step
    work = closed_form([cost.times for cost in costs], shape.microbatches, shape.schedule)
    seconds = work + max(cost.step for cost in costs) + host
    samples = plan.global_batch / seconds
    device = profile.cluster.device
    peak = device.peak.get(profile.graph.precision) or max(device.peak.values())
    return Prediction(
        step_seconds=seconds,
        time=_breakdown(costs, shape.microbatches, seconds, host),
        samples_per_second=samples,
        tokens_per_second=samples * profile.graph.sequence,
        mfu=profile.graph.flops * samples / (peak * plan.devices),
        peak_memory=max(cost.memory.total for cost in costs),
    )


def _breakdown(costs: Sequence[StageCost], microbatches: int, seconds: float, host: float) -> TimeBreakdown:
    """Where the time of the slowest stage goes; what is not its own work is waiting for others."""
    slowest = max(costs, key=lambda cost: (cost.times.total, cost.step))
    layers = slowest.layers
    exposed = sum(layer.forward_exposed + layer.backward_exposed for layer in layers) + slowest.moving
    own = TimeBreakdown(
        forward=microbatches * sum(layer.forward for layer in layers),
        backward=microbatches * sum(layer.backward for layer in layers),
        recompute=microbatches * sum(layer.recompute for layer in layers),
        communication=microbatches * exposed + sum(layer.step_exposed for layer in layers),
        optimizer=sum(layer.update for layer in layers),
        other=microbatches * sum(layer.host for layer in layers) + sum(layer.step_host for layer in layers) + host,
    )
    return replace(own, pipeline=max(seconds - own.total, 0.0))
