"""What a plan costs whose branches run on separate groups of devices.

The trunk (the layers outside branches) and every branch are priced as stages. In each region the groups of devices run
side by side: forward takes as long as the slowest group's branches with what moves in and out, and so does backward.
The host of every device also defers the calls of all branches. A step ends when the device with most work once a step
is done. Micro-batches pass through all of it one after another. A device holds the trunk and the branches that it runs:
the moments of ``cost.memory`` over their layers in the model's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import breakdown, prediction_of, price_stages, straggling, strategies_of_runs
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.branch.cost import BranchSite, BranchTraffic, border_of, buffer_bytes, messages, moves
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions, part_of, trunk_of
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import placed_branches
from galvatron_lite.plans.schema import BranchPlacement, MemoryBreakdown, Plan, Prediction


@dataclass(frozen=True, slots=True)
class PartCost:
    """A branch, or the trunk, on its devices."""

    layers: tuple[Layer, ...]  # in order
    strategies: tuple[Strategy, ...]  # of each layer
    cost: StageCost  # of one stage with these layers, with what moves in and out
    first: int  # first, devices: consecutive devices
    devices: int
    border: BranchTraffic  # what enters and leaves
    site: BranchSite
    # seconds of a micro-batch of what moves in and out, with the host time of messages; part of ``cost``
    moved: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of forward and of backward of a micro-batch, and once a step."""
        return self.cost.times.forward, self.cost.times.backward, self.cost.step

    def runs_on(self, device: int) -> bool:
        """Whether it runs on a device."""
        return self.first <= device < self.first + self.devices


@dataclass(slots=True)
class PartPricer:
    """Prices parts of a profile's model; their pricers are remembered."""

    pricer: LayerPricer  # of the profile
    regions: tuple[BranchRegion, ...] = field(init=False)  # of the model
    _pricers: dict[tuple[str, ...], LayerPricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the branches."""
        self.regions = find_regions(self.pricer.profile.graph)

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return not self.pricer.profile.forward_only

    def of(self, layers: Sequence[str]) -> LayerPricer:
        """Return the pricer of a part of the model."""
        names = tuple(layers)
        if names not in self._pricers:
            profile = self.pricer.profile
            self._pricers[names] = LayerPricer(replace(profile, graph=part_of(profile.graph, set(names))))
        return self._pricers[names]

    def price(
        self, layers: Sequence[str], strategies: Sequence[Strategy], place: range, site: BranchSite, microbatches: int
    ) -> PartCost:
        """Price a part on consecutive devices.

        Args:
            layers: names, in order.
            strategies: of each layer.
            place: its devices.
            site: see ``BranchSite``.
            microbatches: a step.

        Raises:
            InputError: the profile has no points for a strategy.
        """
        pricer, border = self.of(layers), border_of(self.pricer.profile.graph, set(layers))
        if not layers:
            cost = StageCost((), StageTimes(0.0, 0.0), 0.0, 0.0, MemoryBreakdown())
            return PartCost((), (), cost, place.start, len(place), border, site)
        shape = Shape(site.devices, 1, microbatches, site.microbatch)
        (cost,) = price_stages(pricer, shape, [len(layers)], strategies)
        part_layers = pricer.profile.graph.layers
        return PartCost(part_layers, tuple(strategies), cost, place.start, len(place), border, site)

    def with_moves(self, part: PartCost) -> PartCost:
        """Add what moves in and out of a branch."""
        links, sent = self.pricer.links, moves(part.border, part.site, self.training)
        forward, backward = (
            sum(links.seconds(communication) for communication in sent if communication.moment is moment)
            for moment in (Moment.FORWARD, Moment.BACKWARD)
        )
        host = messages(part.border, part.site) * self.pricer.profile.overhead.pipeline
        forward_host, backward_host = (host, host) if self.training else (2 * host, 0.0)
        times = part.cost.times
        times = replace(
            times,
            forward=times.forward + forward + forward_host,
            backward=times.backward + backward + backward_host,
        )
        cost = replace(part.cost, times=times, moving=part.cost.moving + forward + backward)
        return replace(part, cost=cost, moved=forward + backward + 2 * host)

    def calling(self, branches: Iterable[Branch]) -> float:
        """Return the seconds of a micro-batch in which the host of every device defers the calls of some branches.

        A branch is called at least once at each of its roots; modules below a root that is no module itself, such as a
        list, may be called more often.
        """
        return sum(max(len(branch.roots), 1) for branch in branches) * self.pricer.profile.overhead.branch


def price_branched(pricer: LayerPricer, plan: Plan) -> Plan:
    """Return the plan with its prediction, the memory of its fullest device, and time and memory of every branch.

    Raises:
        InputError: it does not fit the model or the cluster, or its numbers do not divide.
    """
    parts = PartPricer(pricer)
    trunk, branches = _price_parts(parts, plan)
    order = {layer.name: index for index, layer in enumerate(pricer.profile.graph.layers)}
    fullest = max(
        (_device_memory(parts, plan, order, trunk, branches, device) for device in range(plan.devices)),
        key=lambda memory: memory.total,
    )
    stage = replace(plan.stages[0], memory=fullest, microbatch_seconds=sum(trunk.seconds[:2]), device="")
    placed = tuple(
        replace(
            placement,
            memory=stage_memory(part.cost.layers, 1, plan.microbatches, 0, 0),
            seconds=plan.microbatches * (sum(part.seconds[:2]) - part.moved),
        )
        for placement, part in zip(plan.branches, branches, strict=True)
    )
    prediction = _predict(parts, plan, trunk, branches, fullest.total)
    return replace(plan, stages=(stage,), branches=placed, prediction=prediction)


def _price_parts(parts: PartPricer, plan: Plan) -> tuple[PartCost, list[PartCost]]:
    """The trunk and the branches of a plan, each on its devices."""
    graph = parts.pricer.profile.graph
    branches = placed_branches(graph, plan)
    _check(parts, plan)
    layers = [layer.name for layer in trunk_of(graph, branches)]
    strategies = strategies_of_runs(plan.stages[0].runs, layers, "stages.0.runs", "The part")
    spread = _is_spread(strategies, plan)
    world = plan.devices if spread else 1
    site = BranchSite(plan.devices, world, world, spread, plan.microbatch)
    trunk = parts.price(layers, strategies, range(plan.devices), site, plan.microbatches)
    return trunk, [_price_branch(parts, plan, index, branch, spread) for index, branch in enumerate(branches)]


def _price_branch(parts: PartPricer, plan: Plan, index: int, branch: Branch, spread: bool) -> PartCost:
    placement, field_name = plan.branches[index], f"branches.{index}"
    strategies = strategies_of_runs(placement.runs, branch.layers, f"{field_name}.runs", "The part")
    for strategy in dict.fromkeys(strategies):
        if strategy.devices != placement.devices or plan.microbatch % strategy.batch_degree:
            remedy = f"{placement.name} has {placement.devices} devices and micro-batches of {plan.microbatch} samples."
            raise InputError(f"{field_name}, strategy", str(strategy), remedy)
    site = BranchSite(plan.devices, placement.devices, strategies[0].batch_degree, spread, plan.microbatch)
    return parts.with_moves(parts.price(branch.layers, strategies, _devices_of(placement), site, plan.microbatches))


def _is_spread(strategies: Sequence[Strategy], plan: Plan) -> bool:
    """Whether a trunk splits the samples over all devices; if not, each device processes all of them.

    Raises:
        InputError: it does neither.
    """
    spread = strategy_with(Layout(batch=plan.devices))
    for strategy in dict.fromkeys(strategies):
        if strategy.split != spread and strategy != Strategy():
            remedy = f"Layers outside branches have data {plan.devices}, or no degree: every device does all of them."
            raise InputError("stages.0, strategy", str(strategy), remedy)
    degrees = {strategy.devices for strategy in strategies}
    if len(degrees) > 1:
        raise InputError("stages.0, strategy", ", ".join(map(str, strategies)), "They share the samples alike.")
    if degrees == {plan.devices} and plan.microbatch % plan.devices:
        remedy = f"{plan.devices} devices cannot share {plan.microbatch} samples evenly."
        raise InputError("stages.0, strategy", str(strategies[0]), remedy)
    return degrees == {plan.devices}


def _devices_of(placement: BranchPlacement) -> range:
    return range(placement.first, placement.first + placement.devices)


def _check(parts: PartPricer, plan: Plan) -> None:
    """Refuse groups outside the world, and groups of a region that overlap in part."""
    if len(plan.stages) != 1:
        raise InputError("stages", len(plan.stages), "A plan with branches has one stage: the layers outside them.")
    if not parts.pricer.profile.cluster.alike:
        raise InputError("branches", len(plan.branches), "Branches are placed on devices of one type only.")
    places = {placement.name: _devices_of(placement) for placement in plan.branches}
    for name, place in places.items():
        if not len(place) or place.start < 0 or place.stop > plan.devices:
            remedy = f"The plan has devices 0 to {plan.devices - 1}; a branch has at least one."
            raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)
    for region in parts.regions:
        beside = {branch.name: places[branch.name] for branch in region.branches if branch.name in places}
        for name, place in beside.items():
            if any(other != place and set(other) & set(place) for other in beside.values()):
                remedy = "Branches beside each other have the same devices, or none in common."
                raise InputError(f"branches, {name}", f"devices {place.start} to {place.stop - 1}", remedy)


def _device_memory(
    parts: PartPricer,
    plan: Plan,
    order: dict[str, int],
    trunk: PartCost,
    branches: Sequence[PartCost],
    device: int,
) -> MemoryBreakdown:
    """Bytes on a device: of the trunk, of its branches, and of what goes in and out of all branches.

    ``order`` has the indices of the model's layers by name.
    """
    held = [trunk, *(part for part in branches if part.runs_on(device))]
    layers = [pair for part in held for pair in zip(part.layers, part.cost.layers, strict=True)]
    costs = [cost for _, cost in sorted(layers, key=lambda pair: order[pair[0].name])]
    buffers = sum(buffer_bytes(part.border, part.site, part.runs_on(device), parts.training) for part in branches)
    return stage_memory(costs, 1, plan.microbatches, buffers, parts.pricer.profile.cluster.device.context)


def _predict(
    parts: PartPricer, plan: Plan, trunk: PartCost, branches: Sequence[PartCost], peak_memory: int
) -> Prediction:
    profile, microbatches = parts.pricer.profile, plan.microbatches
    calling = parts.calling(placed_branches(profile.graph, plan))
    by_name = {placement.name: part for placement, part in zip(plan.branches, branches, strict=True)}
    regions = [
        [by_name[branch.name] for branch in region.branches if branch.name in by_name] for region in parts.regions
    ]
    forward, backward = (
        trunk.seconds[phase] + sum(_slowest_group(region, phase) for region in regions if region) for phase in (0, 1)
    )
    placed = [part for region in regions for part in region]
    branch_step = max(
        sum(part.seconds[2] for part in on_device) for on_device in _parts_by_device(placed, plan.devices)
    )
    work = microbatches * (forward + backward + calling) + trunk.seconds[2] + branch_step
    even = work + profile.overhead.step
    seconds = even * straggling(profile, plan.devices)
    groups = [[part.cost for part in (trunk, *on_device)] for on_device in _parts_by_device(branches, plan.devices)]
    host = profile.overhead.step + microbatches * calling
    time = breakdown(groups, microbatches, seconds, host + seconds - even)
    return prediction_of(profile, plan, seconds, time, peak_memory)


def _slowest_group(branches: Sequence[PartCost], phase: int) -> float:
    """Seconds of the slowest group of a region; ``phase``: index into ``PartCost.seconds``."""
    groups: dict[int, float] = {}
    for part in branches:
        groups[part.first] = groups.get(part.first, 0.0) + part.seconds[phase]
    return max(groups.values())


def _parts_by_device(parts: Sequence[PartCost], devices: int) -> list[tuple[PartCost, ...]]:
    """The distinct sets of parts that devices run."""
    return list(dict.fromkeys(tuple(part for part in parts if part.runs_on(device)) for device in range(devices)))
