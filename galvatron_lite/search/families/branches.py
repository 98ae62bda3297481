"""Plans whose branches have devices of their own.

Every branch is searched by itself, exactly, on each number of devices that a group may have: one stage of its layers,
within the memory that the trunk leaves. The branches of a region are then assigned to groups
(``parallelism.branch.cost``), and the complete plan is priced (``cost.branched``). Regions that are no quicker so stay
in the trunk, unless none is. Micro-batches are as few as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import microbatch_counts
from galvatron_lite.search.tables import Memo
from galvatron_lite.units import format_seconds

Strategies = tuple[Strategy, ...]
Choices = dict[int, dict[Option, Strategies]]
"""By devices of a group: the options of a branch, and the strategies of each."""
_SMALL = 8
"""Devices up to which groups may have any size; of more, sizes that divide them."""


class BranchCourse:
    """Plans with branches apart at one number of micro-batches."""

    def __init__(self, request: Request, parts: PartPricer, count: int) -> None:
        self.request, self.parts, self.count = request, parts, count
        self.microbatch = request.global_batch // count
        self.context = parts.pricer.profile.cluster.device.context  # bytes on a device before the first tensor
        shared = strategy_with(Layout(batch=request.devices))
        # whether all devices share the samples in the trunk; else each works on all of them
        self.spread = self.microbatch % request.devices == 0 and request.fixed.allows(shared)
        self.trunk_strategy = shared if self.spread else strategy_with(Layout())
        self._memo = Memo()

    def trunk(self, apart: Sequence[BranchRegion]) -> PartCost:
        """All layers but those of some regions, on all devices."""
        taken = {name for region in apart for name in region.layers}
        names = [layer.name for layer in self.request.graph.layers if layer.name not in taken]
        world = self.request.devices if self.spread else 1
        site = BranchSite(self.request.devices, world, world, self.spread, self.microbatch)
        strategies = [self.trunk_strategy] * len(names)
        return self.parts.price(names, strategies, range(self.request.devices), site, self.count)

    def gain(self, region: BranchRegion, apart: float) -> float:
        """Seconds of a step that a region saves on devices of its own over being part of the trunk: there its branches
        run one after another everywhere, but the host puts off no calls.

        Args:
            region: of the model.
            apart: seconds that it takes on devices of its own.
        """
        rest = [other for other in self.parts.regions if other is not region]
        inside = sum(self.phases(self.trunk(rest))) - sum(self.phases(self.trunk(self.parts.regions)))
        return inside - apart - self.count * self.parts.calling(region.branches)

    def phases(self, part: PartCost) -> Phases:
        """Seconds of a step: forward, backward, and once a step."""
        forward, backward, once = part.seconds
        return self.count * forward, self.count * backward, once

    def room(self) -> tuple[int, int]:
        """Bytes that branches may hold on a device beside the trunk, and those that the trunk works with."""
        held, working = self._memory(self.trunk(self.parts.regions))
        outside = self._site(1, 1)
        sent = sum(
            self._buffers(border_of(self.parts.pricer.profile.graph, set(branch.layers)), outside, holds_input=False)
            for region in self.parts.regions
            for branch in region.branches
        )
        return bytes_on(self.request.budget, "") - self.context - held - sent, working

    def options(self, branch: Branch, room: int, working: int, beside: int) -> Choices:
        """The options of a branch: the quickest within all of the room, and within an even share of it.

        Args:
            branch: of the model.
            room: bytes that the branches of a device may take.
            working: bytes that the trunk needs while it works.
            beside: branches that may share the room.
        """
        options: Choices = {}
        most = self.request.devices
        sizes = range(1, most) if most <= _SMALL else divisors(most)[:-1]  # one at least is left to another group
        for devices in sizes:
            searched = [self._searched(branch, devices, size) for size in (room, room // beside)]
            for strategies in dict.fromkeys(searched):
                if strategies is not None:
                    option = self._option(branch, devices, strategies, working)
                    options.setdefault(devices, {})[option] = strategies
        return options

    def _option(self, branch: Branch, devices: int, strategies: Strategies, least: int) -> Option:
        site = self._site(devices, strategies[0].batch_degree)
        part = self.parts.with_moves(self.parts.price(branch.layers, strategies, range(devices), site, self.count))
        held, working = self._memory(part)
        entering = self._buffers(part.border, part.site, holds_input=True)
        entering -= self._buffers(part.border, part.site, holds_input=False)
        return Option(self.phases(part), held + entering, max(working, least))

    def _searched(self, branch: Branch, devices: int, room: int) -> Strategies | None:
        """The quickest strategies of a branch within some bytes; branches that are alike are searched once."""
        if room < 1:
            return None
        pricer = self.parts.of(branch.layers)
        fixed = replace(self.request.fixed, pipeline=1, microbatches=self.count)
        prices: Memo = self._memo.once(branch.layers, Memo)
        request = replace(
            self.request, graph=pricer.profile.graph, devices=devices, budget=room + self.context, fixed=fixed,
            prices=prices,
        )  # fmt: skip
        pins = tuple(fixed.pins_of(name) for name in branch.layers)

        def searched() -> Strategies | None:
            solved = search(request, pricer)
            return None if solved is None else tuple(solved.partition.strategies) or None

        return self._memo.once((likeness(request.graph), pins, devices, room), searched)

    def _site(self, devices: int, sharing: int) -> BranchSite:
        return BranchSite(self.request.devices, devices, sharing, self.spread, self.microbatch)

    def _memory(self, part: PartCost) -> tuple[int, int]:
        """Bytes that a part holds while others run, and those beyond them while it runs itself."""
        costs = part.cost.layers
        held = sum(int(resting(cost, self.count)) + cost.kept + cost.gathered for cost in costs)
        peak = stage_memory(costs, 1, self.count, 0, 0).total if costs else 0
        return held, max(peak - held, 0)

    def _buffers(self, border: BranchTraffic, site: BranchSite, holds_input: bool) -> int:
        return buffer_bytes(border, site, holds_input, self.parts.training)


def likeness(graph: ModelGraph) -> tuple[object, ...]:
    """Equal for graphs of equal layers with equal tensors between them."""
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
    assignment: Assignment  # of its branches to groups of devices
    choices: tuple[Choices, ...]  # of each branch
    gain: float  # see ``BranchCourse.gain``

    def placements(self, course: BranchCourse) -> Iterator[BranchPlacement]:
        """Where each branch is, group by group."""
        for group in self.assignment.groups:
            for number, option in group.branches:
                branch = self.region.branches[number]
                strategies = self.choices[number][group.devices][option]
                layers = course.parts.of(branch.layers).profile.graph.layers
                runs = runs_of(layers, strategies)
                yield BranchPlacement(branch.name, branch.roots, group.first, group.devices, runs)


def branch_plans(task: PlanTask) -> list[Plan]:
    """The best plan with branches on devices of their own; none where the model has none or pins exclude it."""
    request = task.request
    fixed = request.fixed  # several devices of one type are needed
    piped = fixed.pipeline not in (None, 1) or fixed.schedule is not None or fixed.virtual is not None
    excluded = "branches" in fixed.forbidden or (task.delay is not None and task.delay.only)
    excluded |= bool(task.session.profile.folded)  # branches have other samples than the trunk
    if request.devices == 1 or request.cluster or piped or excluded or not may_branch(request.graph):
        return []
    parts = PartPricer(task.session.pricer)
    best: Plan | None = None
    for count in microbatch_counts(request.global_batch, request.fixed) if parts.regions else ():
        plan = _best_at(task, BranchCourse(request, parts, count))
        if best is not None and (plan is None or _rank(plan) >= _rank(best)):
            break
        best = plan or best
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
    for region in course.parts.regions:
        choices = tuple(course.options(branch, room, working, len(region.branches)) for branch in region.branches)
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
