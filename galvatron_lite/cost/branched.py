"""What a plan costs whose branches have devices of their own.

The trunk and every branch are priced as stages by themselves. In each region the groups of devices work side by side,
so that forward takes as long as the slowest group's branches with what moves in and out, then backward; besides, the
host of every device puts off the calls of all branches. A step ends when the device with most work once a step is done.
With several micro-batches each goes through all of it, one after another. A device holds the trunk and the branches
that live on it: the moments of ``cost.memory`` over their layers in the model's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.cost.forward_only import step_flops
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import breakdown, price_stages, straggling
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.branch.cost import BranchSite, BranchTraffic, border_of, buffer_bytes, messages, moves
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions, part_of, trunk_of
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import placed_branches
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, MemoryBreakdown, Plan, Prediction


@dataclass(frozen=True, slots=True)
class PartCost:
    """A branch, or the trunk, on its devices."""

    layers: tuple[Layer, ...]  # in order
    strategies: tuple[Strategy, ...]  # of each
    cost: StageCost  # of one stage that holds them, what moves in and out included
    first: int  # first, devices: consecutive devices
    devices: int
    border: BranchTraffic  # what enters and leaves
    site: BranchSite  # where it works
    # seconds of a micro-batch that what moves in and out takes, host time of messages included; part of ``cost``
    moved: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Of a micro-batch's forward and backward, and once a step."""
        return self.cost.times.forward, self.cost.times.backward, self.cost.step

    def on(self, device: int) -> bool:
        """Whether it works on a device."""
        return self.first <= device < self.first + self.devices


@dataclass(slots=True)
class PartPricer:
    """Prices parts of one profile's model; pricers of parts are remembered."""

    pricer: LayerPricer  # of the profile
    regions: tuple[BranchRegion, ...] = field(init=False)  # where the model falls into branches
    _pricers: dict[tuple[str, ...], LayerPricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Looks for branches."""
        self.regions = find_regions(self.pricer.profile.graph)

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return not self.pricer.profile.forward_only

    def of(self, layers: Sequence[str]) -> LayerPricer:
        """The pricer of a part of the model."""
        names = tuple(layers)
        if names not in self._pricers:
            profile = self.pricer.profile
            self._pricers[names] = LayerPricer(replace(profile, graph=part_of(profile.graph, set(names))))
        return self._pricers[names]

    def price(
        self, layers: Sequence[str], strategies: Sequence[Strategy], place: range, site: BranchSite, microbatches: int
    ) -> PartCost:
        """A part on consecutive devices.

        Args:
            layers: names, in order.
            strategies: of each.
            place: its devices.
            site: where it works.
            microbatches: a step.

        Raises:
            InputError: the profile has no figures for a strategy.
        """
        pricer, graph = self.of(layers), self.pricer.profile.graph
        shape = Shape(site.devices, 1, microbatches, site.microbatch)
        cost = (
            price_stages(pricer, shape, [len(layers)], strategies)[0]
            if layers
            else StageCost((), StageTimes(0.0, 0.0), 0.0, 0.0, MemoryBreakdown())
        )
        part_layers = pricer.profile.graph.layers if layers else ()
        return PartCost(
            part_layers, tuple(strategies), cost, place.start, len(place), border_of(graph, set(layers)), site
        )

    def with_moves(self, part: PartCost) -> PartCost:
        """The same with what moves in and out of a branch."""
        sent = moves(part.border, part.site, self.training)
        links = self.pricer.links
        ahead, back = (
            sum(links.seconds(one) for one in sent if one.moment is moment)
            for moment in (Moment.FORWARD, Moment.BACKWARD)
        )
        host = messages(part.border, part.site) * self.pricer.profile.overhead.pipeline
        ahead_host, back_host = (host, host) if self.training else (2 * host, 0.0)
        times = part.cost.times
        times = replace(
            times, forward=times.forward + ahead + ahead_host, backward=times.backward + back + back_host
        )  # fmt: skip
        cost = replace(part.cost, times=times, moving=part.cost.moving + ahead + back)
        return replace(part, cost=cost, moved=ahead + back + 2 * host)

    def calling(self, branches: Iterable[Branch]) -> float:
        """Seconds of a micro-batch that the host of every device takes to put off the calls of some branches.

        A branch is called at each of its roots, at the least; what is below a root that is no module of its own, such
        as a list, may be called more often.
        """
        return sum(max(len(branch.roots), 1) for branch in branches) * self.pricer.profile.overhead.branch


def on_devices(parts: Sequence[PartCost], devices: int) -> list[tuple[PartCost, ...]]:
    """What each device works on; devices that work on the same are told once."""
    return list(dict.fromkeys(tuple(part for part in parts if part.on(device)) for device in range(devices)))


def step_seconds(
    trunk: PartCost, regions: Sequence[Sequence[PartCost]], microbatches: int, calling: float = 0.0
) -> float:
    """Seconds of a step, without what the host does once.

    Args:
        trunk: all layers outside branches.
        regions: the branches of each, with what moves.
        microbatches: a step.
        calling: seconds of a micro-batch that the host takes for the calls (``PartPricer.calling``).
    """
    passes = [
        trunk.seconds[phase] + sum(_slowest(branches, phase) for branches in regions) for phase in (0, 1)
    ]  # fmt: skip
    every = [part for branches in regions for part in branches]
    once = max(sum(part.seconds[2] for part in on_device) for on_device in on_devices(every, trunk.devices))
    return microbatches * (sum(passes) + calling) + trunk.seconds[2] + once


def _slowest(branches: Sequence[PartCost], phase: int) -> float:
    """Seconds of the slowest group of a region in a phase."""
    groups: dict[int, float] = {}
    for part in branches:
        groups[part.first] = groups.get(part.first, 0.0) + part.seconds[phase]
    return max(groups.values(), default=0.0)


def device_memory(
    places: dict[str, int],
    trunk: PartCost,
    branches: Sequence[PartCost],
    device: int,
    microbatches: int,
    context: int,
    training: bool,
) -> MemoryBreakdown:
    """Bytes on a device: the trunk and the branches that live there, with what goes in and out of all branches.

    Args:
        places: of the layers in the model, by name.
        trunk, branches: priced.
        device: its number.
        microbatches: a step.
        context: bytes taken before the first tensor.
        training: whether there are gradients.
    """
    here = [part for part in branches if part.on(device)]
    buffers = sum(buffer_bytes(part.border, part.site, part.on(device), training) for part in branches)
    return stage_memory(merged(places, [trunk, *here]), 1, microbatches, buffers, context)


def merged(places: dict[str, int], parts: Sequence[PartCost]) -> list[LayerCost]:
    """Costs of the layers of some parts, in the model's order."""
    pairs = (pair for part in parts for pair in zip(part.layers, part.cost.layers, strict=True))
    return [cost for _, cost in sorted(pairs, key=lambda pair: places[pair[0].name])]


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
    placed = [
        _branch_figures(branch, part, plan.microbatches) for branch, part in zip(plan.branches, branches, strict=True)
    ]
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
    spread = strategy_with(Layout(batch=plan.devices))
    for strategy in dict.fromkeys(strategies):
        if strategy.split != spread and strategy != Strategy():
            remedy = f"Layers outside branches have data {plan.devices}, or no degree: every device does all of them."
            raise InputError("stages.0, strategy", str(strategy), remedy)
    shared = {strategy.devices for strategy in strategies}
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
        covered = layers[len(strategies) : len(strategies) + run.count]
        if not covered or (covered[0], covered[-1], len(covered)) != (run.first, run.last, run.count):
            covered_text = f"{covered[0]} .. {covered[-1]}" if covered else f"nothing after {len(layers)} layers"
            raise InputError(f"{field}.runs", f"{run.first} .. {run.last}", f"The part goes on with {covered_text}.")
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
    ranges = {branch.name: range(branch.first, branch.first + branch.devices) for branch in plan.branches}
    for name, place in ranges.items():
        if not len(place) or place.start < 0 or place.stop > plan.devices:
            remedy = f"The plan has devices 0 to {plan.devices - 1}; a branch has at least one."
            raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)
    for region in parts.regions:
        branch_ranges = {branch.name: ranges[branch.name] for branch in region.branches if branch.name in ranges}
        for name, place in branch_ranges.items():
            if any(other != place and set(other) & set(place) for other in branch_ranges.values()):
                remedy = "Branches beside each other have the same devices, or none in common."
                raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)


def by_region(parts: PartPricer, plan: Plan, branches: Sequence[PartCost]) -> list[list[PartCost]]:
    """The branches of each region that a plan places some of."""
    by_name = {branch.name: part for branch, part in zip(plan.branches, branches, strict=True)}
    regions = [
        [by_name[branch.name] for branch in region.branches if branch.name in by_name] for region in parts.regions
    ]
    return [branches for branches in regions if branches]


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
    busy = [[part.cost for part in (trunk, *on_device)] for on_device in on_devices(branches, plan.devices)]
    samples = plan.global_batch / seconds
    return Prediction(
        step_seconds=seconds,
        time=breakdown(busy, plan.microbatches, seconds, host + seconds - alone),
        samples_per_second=samples,
        tokens_per_second=samples * profile.graph.sequence,
        mfu=step_flops(profile) * samples / profile.cluster.peak(profile.graph.precision, plan.devices),
        peak_memory=fullest.total,
    )
