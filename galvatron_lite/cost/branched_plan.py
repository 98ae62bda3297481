"""A plan with branches on devices of their own, checked and with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cost.branched import PartCost, PartPricer, device_memory, on_devices, step_seconds
from galvatron_lite.cost.forward_only import step_flops
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.step import breakdown, straggling
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.branch.assign import BranchSite
from galvatron_lite.parallelism.branch.find import Branch, trunk_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.notes import placed_branches
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, MemoryBreakdown, Plan, Prediction


def price_branched(pricer: LayerPricer, plan: Plan) -> Plan:
    """The plan with its prediction, the memory of its fullest device, and time and memory of every branch.

    Raises:
        InputError: it does not fit the model or the cluster, or its numbers do not divide.
    """
    parts = PartPricer(pricer)
    trunk, branches = parts_of(parts, plan)
    places = {layer.name: place for place, layer in enumerate(pricer.profile.graph.layers)}
    context = pricer.profile.cluster.device.context
    fullest = max(
        (
            device_memory(places, trunk, branches, device, plan.microbatches, context, parts.training)
            for device in range(plan.devices)
        ),
        key=lambda memory: memory.total,
    )
    stage = replace(plan.stages[0], memory=fullest, microbatch_seconds=sum(trunk.seconds[:2]), device="")
    placed = [_branch_figures(one, part, plan.microbatches) for one, part in zip(plan.branches, branches, strict=True)]
    prediction = _prediction(parts, plan, trunk, branches, fullest)
    return replace(plan, stages=(stage,), branches=tuple(placed), prediction=prediction)


def parts_of(parts: PartPricer, plan: Plan) -> tuple[PartCost, list[PartCost]]:
    """The trunk and the branches of a plan, each on its devices.

    Raises:
        InputError: see ``price_branched``.
    """
    graph = parts.pricer.profile.graph
    placed = placed_branches(graph, plan)
    _check(parts, plan)
    layers = [layer.name for layer in trunk_of(graph, placed)]
    strategies = expanded(plan.stages[0].runs, layers, "stages.0")
    spread = is_spread(strategies, plan)
    world = plan.devices if spread else 1
    site = BranchSite(plan.devices, world, world, spread, plan.microbatch)
    trunk = parts.price(layers, strategies, range(plan.devices), site, plan.microbatches)
    return trunk, [
        _branch(parts, plan, one, branch, spread, number)
        for number, (one, branch) in enumerate(zip(plan.branches, placed, strict=True))
    ]


def _branch(parts: PartPricer, plan: Plan, one: BranchPlacement, branch: Branch, spread: bool, number: int) -> PartCost:
    strategies = expanded(one.runs, branch.layers, f"branches.{number}")
    for strategy in dict.fromkeys(strategies):
        if strategy.devices != one.devices or plan.microbatch % strategy.batch_degree:
            remedy = f"{one.name} has {one.devices} devices and micro-batches of {plan.microbatch} samples."
            raise InputError(f"branches.{number}, strategy", str(strategy), remedy)
    site = BranchSite(plan.devices, one.devices, strategies[0].batch_degree, spread, plan.microbatch)
    place = range(one.first, one.first + one.devices)
    return parts.with_moves(parts.price(branch.layers, strategies, place, site, plan.microbatches))


def is_spread(strategies: Sequence[Strategy], plan: Plan) -> bool:
    """Whether a trunk shares the samples among all devices; else each works on all of them.

    Raises:
        InputError: it does neither.
    """
    for strategy in dict.fromkeys(strategies):
        if strategy not in (Strategy(data=plan.devices, recompute=strategy.recompute), Strategy()):
            remedy = f"Layers outside branches have data {plan.devices}, or no degree: every device does all of them."
            raise InputError("stages.0, strategy", str(strategy), remedy)
    shared = {strategy.data for strategy in strategies}
    if len(shared) > 1:
        raise InputError("stages.0, strategy", ", ".join(map(str, strategies)), "They share the samples alike.")
    if shared == {plan.devices} and plan.microbatch % plan.devices:
        remedy = f"{plan.devices} devices cannot share {plan.microbatch} samples evenly."
        raise InputError("stages.0, strategy", str(strategies[0]), remedy)
    return shared == {plan.devices}


def expanded(runs: Sequence[LayerRun], layers: Sequence[str], field: str) -> list[Strategy]:
    """The strategy of every layer of a part, in order.

    Raises:
        InputError: the runs are not of these layers.
    """
    strategies: list[Strategy] = []
    for run in runs:
        own = layers[len(strategies) : len(strategies) + run.count]
        if not own or (own[0], own[-1], len(own)) != (run.first, run.last, run.count):
            said = f"{own[0]} .. {own[-1]}" if own else f"nothing after {len(layers)} layers"
            raise InputError(f"{field}.runs", f"{run.first} .. {run.last}", f"The part goes on with {said}.")
        strategies += [run.strategy] * run.count
    if len(strategies) != len(layers):
        raise InputError(f"{field}.runs", len(strategies), f"The part has {len(layers)} layers: {', '.join(layers)}.")
    return strategies


def _check(parts: PartPricer, plan: Plan) -> None:
    """Whether groups lie in the world, and those of a region are the same or apart."""
    if len(plan.stages) != 1:
        raise InputError("stages", len(plan.stages), "A plan with branches has one stage: the layers outside them.")
    if not parts.pricer.profile.cluster.alike:
        raise InputError("branches", len(plan.branches), "Branches are placed on devices of one type only.")
    ranges = {one.name: range(one.first, one.first + one.devices) for one in plan.branches}
    for name, place in ranges.items():
        if not len(place) or place.start < 0 or place.stop > plan.devices:
            remedy = f"The plan has devices 0 to {plan.devices - 1}; a branch has at least one."
            raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)
    for region in parts.regions:
        own = {branch.name: ranges[branch.name] for branch in region.branches if branch.name in ranges}
        for name, place in own.items():
            if any(other != place and set(other) & set(place) for other in own.values()):
                remedy = "Branches beside each other have the same devices, or none in common."
                raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)


def by_region(parts: PartPricer, plan: Plan, branches: Sequence[PartCost]) -> list[list[PartCost]]:
    """The branches of each region that a plan places some of."""
    own = {one.name: part for one, part in zip(plan.branches, branches, strict=True)}
    found = [[own[branch.name] for branch in region.branches if branch.name in own] for region in parts.regions]
    return [branches for branches in found if branches]


def _branch_figures(one: BranchPlacement, part: PartCost, microbatches: int) -> BranchPlacement:
    """A branch with its own time and memory, without what moves in and out."""
    passes = sum(part.seconds[:2]) - part.moved
    memory = stage_memory(part.cost.layers, 1, microbatches, 0, 0)
    return replace(one, memory=memory, seconds=microbatches * passes)


def _prediction(
    parts: PartPricer, plan: Plan, trunk: PartCost, branches: Sequence[PartCost], fullest: MemoryBreakdown
) -> Prediction:
    profile = parts.pricer.profile
    calling = parts.calling(placed_branches(profile.graph, plan))
    host = profile.overhead.step + plan.microbatches * calling
    work = step_seconds(trunk, by_region(parts, plan, branches), plan.microbatches, calling)
    alone = work + profile.overhead.step
    seconds = alone * straggling(profile, plan.devices)
    busy = [[part.cost for part in (trunk, *own)] for own in on_devices(branches, plan.devices)]
    samples = plan.global_batch / seconds
    return Prediction(
        step_seconds=seconds,
        time=breakdown(busy, plan.microbatches, seconds, host + seconds - alone),
        samples_per_second=samples,
        tokens_per_second=samples * profile.graph.sequence,
        mfu=step_flops(profile) * samples / profile.cluster.peak(profile.graph.precision, plan.devices),
        peak_memory=fullest.total,
    )
