"""What plans with branches on devices of their own have in common at one number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.budget import bytes_on
from galvatron_lite.cost.branched import PartCost, PartPricer
from galvatron_lite.cost.memory import resting, stage_memory
from galvatron_lite.parallelism.branch.assign import Option, Phases
from galvatron_lite.parallelism.branch.cost import BranchSite, BranchTraffic, border_of, buffer_bytes
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.shapes import Request

Strategies = tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class BranchCourse:
    """A number of micro-batches."""

    request: Request  # what is planned
    parts: PartPricer  # prices parts of the model
    count: int  # micro-batches of a step

    @property
    def microbatch(self) -> int:
        """Samples of one."""
        return self.request.global_batch // self.count

    @property
    def spread(self) -> bool:
        """Whether all devices share the samples in the trunk; else every one works on all of them."""
        shared = Strategy(data=self.request.devices)
        return self.microbatch % self.request.devices == 0 and self.request.fixed.allows(shared)

    @property
    def trunk_strategy(self) -> Strategy:
        """What layers outside branches do."""
        return Strategy(data=self.request.devices) if self.spread else Strategy()

    @property
    def context(self) -> int:
        """Bytes taken on a device before the first tensor."""
        return self.parts.pricer.profile.cluster.device.context

    def trunk(self, apart: Sequence[BranchRegion]) -> PartCost:
        """All layers but those of some regions, on all devices."""
        taken = {name for region in apart for name in region.layers}
        names = [layer.name for layer in self.request.graph.layers if layer.name not in taken]
        world = self.request.devices if self.spread else 1
        site = BranchSite(self.request.devices, world, world, self.spread, self.microbatch)
        strategies = [self.trunk_strategy] * len(names)
        return self.parts.price(names, strategies, range(self.request.devices), site, self.count)

    def in_trunk(self, region: BranchRegion) -> float:
        """Seconds of a step that a region takes as part of the trunk: its branches one after another everywhere."""
        rest = [other for other in self.parts.regions if other is not region]
        return sum(self.phases(self.trunk(rest))) - sum(self.phases(self.trunk(self.parts.regions)))

    def calling(self, region: BranchRegion) -> float:
        """Seconds of a step that the host takes to put off the calls of a region's branches."""
        return self.count * self.parts.calling(region.branches)

    def phases(self, part: PartCost) -> Phases:
        """Seconds of a step: forward, backward, and what is done once."""
        forward, backward, once = part.seconds
        return self.count * forward, self.count * backward, once

    def placed(self, branch: Branch, devices: int, strategies: Strategies) -> PartCost:
        """A branch on so many devices, with what moves in and out."""
        site = self._site(devices, strategies[0].batch_degree)
        return self.parts.with_moves(self.parts.price(branch.layers, strategies, range(devices), site, self.count))

    def _site(self, devices: int, sharing: int) -> BranchSite:
        return BranchSite(self.request.devices, devices, sharing, self.spread, self.microbatch)

    def room(self) -> tuple[int, int]:
        """Bytes that branches may hold on a device beside the trunk, and those that the trunk works with."""
        trunk = self.trunk(self.parts.regions)
        held, working = self._memory(trunk)
        outside = self._site(1, 1)
        sent = sum(
            self._buffers(self._border(branch), outside, holds_input=False)
            for region in self.parts.regions
            for branch in region.branches
        )
        return bytes_on(self.request.budget, "") - self.context - held - sent, working

    def option(self, branch: Branch, devices: int, strategies: Strategies, least: int) -> Option:
        """A branch on so many devices as one of its options; ``least``: bytes that the trunk works with."""
        part = self.placed(branch, devices, strategies)
        held, working = self._memory(part)
        entering = self._buffers(part.border, part.site, holds_input=True) - self._buffers(
            part.border, part.site, holds_input=False
        )
        return Option(self.phases(part), held + entering, max(working, least))

    def _memory(self, part: PartCost) -> tuple[int, int]:
        """Bytes that a part holds while others run, and those beyond them while it runs itself."""
        costs = part.cost.layers
        held = sum(int(resting(cost, self.count)) + cost.kept + cost.gathered for cost in costs)
        peak = stage_memory(costs, 1, self.count, 0, 0).total if costs else 0
        return held, max(peak - held, 0)

    def _border(self, branch: Branch) -> BranchTraffic:
        return border_of(self.parts.pricer.profile.graph, set(branch.layers))

    def _buffers(self, border: BranchTraffic, site: BranchSite, holds_input: bool) -> int:
        return buffer_bytes(border, site, holds_input, self.parts.training)

    def of_branch(self, branch: Branch, devices: int, room: int) -> Request:
        """What is searched of a branch by itself, within so many bytes."""
        graph = self.parts.of(branch.layers).profile.graph
        fixed = replace(self.request.fixed, pipeline=1, microbatches=self.count)
        return replace(self.request, graph=graph, devices=devices, budget=room + self.context, fixed=fixed)
