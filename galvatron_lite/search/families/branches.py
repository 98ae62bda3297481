"""Plans whose branches have devices of their own (``family``).

Every branch is searched by itself, exactly, on each number of devices that a group may have: one stage of its layers,
within the memory that the trunk leaves. The branches of a region are then assigned to groups
(``parallelism.branch.cost``), and the plan is priced as a whole (``cost.branched``). Regions that are no quicker
so stay in the trunk, unless all are. Micro-batches are as few as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from galvatron_lite.cluster.budget import bytes_on
from galvatron_lite.cost.branched import PartCost, PartPricer
from galvatron_lite.cost.memory import resting, stage_memory
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.branch.cost import (
    Assignment,
    BranchSite,
    BranchTraffic,
    Option,
    Phases,
    assign,
    border_of,
    buffer_bytes,
)
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import device_range, plan_notes
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, BranchPlacement, Mode, Plan, Proof, Stage
from galvatron_lite.profiler.schema import spread_note
from galvatron_lite.search.best_first import search
from galvatron_lite.search.families.family import PlanTask, seconds_of
from galvatron_lite.search.result import provenance, runs_of, summary
from galvatron_lite.search.shapes import PriceCache, Request
from galvatron_lite.search.space import microbatch_counts
from galvatron_lite.search.tables import Memo
from galvatron_lite.units import format_seconds

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
        shared = strategy_with(Layout(batch=self.request.devices))
        return self.microbatch % self.request.devices == 0 and self.request.fixed.allows(shared)

    @property
    def trunk_strategy(self) -> Strategy:
        """What layers outside branches do."""
        return strategy_with(Layout(batch=self.request.devices if self.spread else 1))

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

    def gain(self, region: BranchRegion, apart: float) -> float:
        """Seconds of a step that a region takes less on devices of its own, where it takes ``apart``, than as part of
        the trunk: its branches one after another everywhere, and no calls that the host puts off."""
        rest = [other for other in self.parts.regions if other is not region]
        inside = sum(self.phases(self.trunk(rest))) - sum(self.phases(self.trunk(self.parts.regions)))
        return inside - apart - self.count * self.parts.calling(region.branches)

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
            self._buffers(border_of(self.parts.pricer.profile.graph, set(branch.layers)), outside, holds_input=False)
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

    def _buffers(self, border: BranchTraffic, site: BranchSite, holds_input: bool) -> int:
        return buffer_bytes(border, site, holds_input, self.parts.training)


_SMALL = 8
"""Devices up to which groups may have any size; of more, sizes that divide them."""

Choices = Mapping[int, Mapping[Option, Strategies]]
"""By devices of a group what a branch may do, and the strategies that it is."""


@dataclass(slots=True)
class BranchOptions:
    """Options of branches under one course; those of branches that are alike are searched once."""

    course: BranchCourse  # the number of micro-batches
    _memo: Memo = field(default_factory=Memo)

    def of(self, branch: Branch, room: int, working: int, beside: int) -> Choices:
        """What a branch may do: the quickest within all of the room, and within an even share of it.

        Args:
            branch: of the model.
            room: bytes that the branches of a device may take.
            working: bytes of that which the trunk needs while it works.
            beside: branches that may share them.
        """
        options: dict[int, dict[Option, Strategies]] = {}
        most = self.course.request.devices
        sizes = range(1, most) if most <= _SMALL else divisors(most)[:-1]  # one at least is left to another group
        for devices in sizes:
            ways = [self._searched(branch, devices, size) for size in (room, room // beside)]
            for strategies in (fromkey for fromkey in dict.fromkeys(ways) if fromkey is not None):
                option = self.course.option(branch, devices, strategies, working)
                options.setdefault(devices, {})[option] = strategies
        return options

    def _searched(self, branch: Branch, devices: int, room: int) -> Strategies | None:
        if room < 1:
            return None
        course, request_of_course = self.course, self.course.request
        pricer = course.parts.of(branch.layers)
        fixed = replace(request_of_course.fixed, pipeline=1, microbatches=course.count)
        request = replace(
            request_of_course, graph=pricer.profile.graph, devices=devices, budget=room + course.context, fixed=fixed
        )  # fmt: skip
        pins = tuple(request.fixed.pins_of(name) for name in branch.layers)
        figures: PriceCache = self._memo.once(branch.layers, PriceCache)

        def searched() -> Strategies | None:
            solved = search(replace(request, prices=figures), pricer)
            stages = () if solved is None else solved.partition.stages
            return tuple(strategy for stage in stages for strategy in stage.strategies) or None

        return self._memo.once((likeness(request.graph), pins, devices, room), searched)


def likeness(graph: ModelGraph) -> tuple[object, ...]:
    """Equal for parts of equal layers between which the same goes."""
    place = {layer.name: number for number, layer in enumerate(graph.layers)}
    sent = tuple(
        (place[tensor.producer], tuple(place[name] for name in tensor.readers), tensor.size, tensor.borrowed)
        for tensor in graph.tensors
    )
    ties = tuple((place[tie.first], place[tie.second], tie.parameters) for tie in graph.ties)
    return tuple((layer.kind, layer.role) for layer in graph.layers), sent, ties


@dataclass(frozen=True, slots=True)
class _Split:
    region: BranchRegion  # of the model
    assigned: Assignment  # its branches to groups
    choices: tuple[Choices, ...]  # of each branch
    gain: float  # seconds of a step that it takes less than as part of the trunk

    def placements(self, course: BranchCourse) -> Iterator[BranchPlacement]:
        """Where each branch is, group by group."""
        for group in self.assigned.groups:
            for number, option in group.branches:
                branch = self.region.branches[number]
                strategies = self.choices[number][group.devices][option]
                layers = course.parts.of(branch.layers).profile.graph.layers
                runs = runs_of(layers, strategies)
                yield BranchPlacement(branch.name, branch.roots, group.first, group.devices, runs)


def branch_plans(task: PlanTask) -> list[Plan]:
    """The best plan with branches on devices of their own; none where the model has none or it is not asked for."""
    request = task.request
    fixed = request.fixed  # room is needed for it: several devices of one type, no pipeline, no delay alone
    pinned = fixed.pipeline not in (None, 1) or fixed.schedule is not None or fixed.virtual is not None
    refused = "branches" in fixed.forbidden or (task.delay is not None and task.delay.only)
    if request.devices == 1 or request.cluster or pinned or refused or not may_branch(request.graph):
        return []
    parts = PartPricer(task.session.pricer)
    best: Plan | None = None
    for count in microbatch_counts(request.global_batch, request.fixed) if parts.regions else ():
        found = _best_at(task, BranchCourse(request, parts, count))
        if best is not None and (found is None or _rank(found) >= _rank(best)):
            break
        best = found or best
    return [] if best is None else [_described(task, best)]


def may_branch(graph: ModelGraph) -> bool:
    """Whether some layer does not read the one before it; else a path joins any two, and none are branches."""
    edges = set(graph.edges) if graph.tensors else set()
    return bool(edges) and any((left.name, right.name) not in edges for left, right in pairwise(graph.layers))


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, seconds_of(plan)


def _best_at(task: PlanTask, course: BranchCourse) -> Plan | None:
    """The quickest plan that fits at a number of micro-batches, else the quickest; None where there is none."""
    if not course.request.fixed.allows(course.trunk_strategy):
        return None
    try:
        splits = list(_splits(course))
    except InputError:  # the profile has no figures for the trunk
        return None
    worth = [split for split in splits if split.gain > 0] or sorted(splits, key=lambda split: -split.gain)[:1]
    sets = [worth, splits] if len(worth) < len(splits) else [worth]
    return min((_priced(task, course, chosen) for chosen in sets if chosen), key=_rank, default=None)


def _splits(course: BranchCourse) -> Iterator[_Split]:
    """Every region whose branches fit on devices of their own, with the quickest assignment."""
    room, working = course.room()
    node = course.parts.pricer.profile.cluster.levels[0].size
    options = BranchOptions(course)
    for region in course.parts.regions:
        choices = tuple(options.of(branch, room, working, len(region.branches)) for branch in region.branches)
        jobs = [{devices: tuple(seconds) for devices, seconds in choice.items()} for choice in choices]
        assignment = assign(jobs, course.request.devices, room, node, least=2)
        if assignment is not None:
            yield _Split(region, assignment, choices, course.gain(region, assignment.seconds))
            room -= max(sum(option.held for _, option in group.branches) for group in assignment.groups)


def _priced(task: PlanTask, course: BranchCourse, chosen: Sequence[_Split]) -> Plan:
    request, graph = course.request, course.request.graph
    trunk = course.trunk([split.region for split in chosen])
    plan = Plan(
        PLAN_VERSION,
        graph.name,
        request.devices,
        request.global_batch,
        course.count,
        DEFAULT_SCHEDULE,
        graph.precision,
        (Stage(runs_of(trunk.layers, trunk.strategies)),),
        branches=tuple(placement for split in chosen for placement in split.placements(course)),
        mode=task.session.mode,
    )
    priced = price_plan(course.parts.pricer, plan)
    return replace(priced, provenance=provenance(task.session.profile, task.request.budget, 0.0))


def _described(task: PlanTask, plan: Plan) -> Plan:
    """With a line on all branches, and what they gain over the ordinary plan."""
    source, ordinary, gain = plan.provenance, task.ordinary, "no plan without them fits the budget and the pins"
    apart = ", ".join(
        f"{branch.name} on {device_range(branch)} ({format_seconds(branch.seconds)})" for branch in plan.branches
    )
    if ordinary is not None:
        what = "a pass" if plan.mode is Mode.INFERENCE else "a step"
        seconds, other = seconds_of(plan), seconds_of(ordinary)
        otherwise = f"{format_seconds(other)} without ({summary(ordinary)})"
        gain = f"{what} takes {format_seconds(seconds)} instead of {otherwise}: {other / seconds:.2f}x"
    note = f"independent branches run at the same time: {apart}; {gain}"
    notes = (note, *plan_notes(task.request.graph, plan), *spread_note(task.session.profile.origin))
    return replace(
        plan,
        provenance=None if source is None else replace(source, notes=notes, proof=Proof.FEASIBLE),
        left_out=task.backend.leaves_out(task.session.mode) if ordinary is None else ordinary.left_out,
    )
