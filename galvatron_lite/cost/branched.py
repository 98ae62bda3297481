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

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import stage_memory
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.branch.assign import BranchSite, BranchTraffic, border_of, buffer_bytes, messages, moves
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions, part_of
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown


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
    _known: dict[tuple[str, ...], LayerPricer] = field(default_factory=dict)

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
        if names not in self._known:
            profile = self.pricer.profile
            self._known[names] = LayerPricer(replace(profile, graph=part_of(profile.graph, set(names))))
        return self._known[names]

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
        cost = price_stages(pricer, shape, [len(layers)], strategies)[0] if layers else _nothing()
        own = pricer.profile.graph.layers if layers else ()
        return PartCost(own, tuple(strategies), cost, place.start, len(place), border_of(graph, set(layers)), site)

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


def _nothing() -> StageCost:
    """Of a trunk without layers."""
    return StageCost((), StageTimes(0.0, 0.0), 0.0, 0.0, MemoryBreakdown())


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
    once = max(sum(part.seconds[2] for part in own) for own in on_devices(every, trunk.devices))
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
    own = [part for part in branches if part.on(device)]
    buffers = sum(buffer_bytes(part.border, part.site, part.on(device), training) for part in branches)
    return stage_memory(merged(places, [trunk, *own]), 1, microbatches, buffers, context)


def merged(places: dict[str, int], parts: Sequence[PartCost]) -> list[LayerCost]:
    """Costs of the layers of some parts, in the model's order."""
    pairs = (pair for part in parts for pair in zip(part.layers, part.cost.layers, strict=True))
    return [cost for _, cost in sorted(pairs, key=lambda pair: places[pair[0].name])]
