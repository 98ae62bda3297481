"""Plans whose branches have devices of their own: a way to plan (``ways``).

Every branch is searched by itself, exactly, on each number of devices that a group may have: one stage of its layers,
within the memory that the trunk leaves. The branches of a region are then assigned to groups
(``parallelism.branch.assign``), and the plan is priced as a whole (``cost.branched_plan``). Regions that are no quicker
so stay in the trunk, unless all are. Micro-batches are as few as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from galvatron_lite.cost.branched import PartPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.branch.assign import Assignment, assign
from galvatron_lite.parallelism.branch.find import BranchRegion
from galvatron_lite.plans.notes import plan_notes
from galvatron_lite.plans.schema import PLAN_VERSION, BranchPlacement, Plan, Proof, Schedule, Stage
from galvatron_lite.profiler.schema import spread_note
from galvatron_lite.search.branch_course import BranchCourse
from galvatron_lite.search.branch_notes import branch_notes
from galvatron_lite.search.branch_options import BranchOptions, Choices
from galvatron_lite.search.programme.ilp_branches import certify_assignment
from galvatron_lite.search.result import provenance, runs_of
from galvatron_lite.search.space import microbatch_counts
from galvatron_lite.search.ways import PlanTask, seconds_of


@dataclass(frozen=True, slots=True)
class _Split:
    """A region whose branches have devices of their own."""

    region: BranchRegion  # of the model
    assigned: Assignment  # its branches to groups
    choices: tuple[Choices, ...]  # of each branch
    gain: float  # seconds of a step that it takes less than as part of the trunk
    certificate: str = ""  # what an integer programme said of the assignment; empty where none was asked

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
    if not _open(task) or not may_branch(request.graph):
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


def _open(task: PlanTask) -> bool:
    """Whether devices and pins leave room for it: several of one type; no pipeline, no schedule, no delay alone."""
    request, fixed = task.request, task.request.fixed
    pinned = fixed.pipeline not in (None, 1) or fixed.schedule is not None or fixed.virtual is not None
    refused = "branches" in fixed.forbidden or (task.delay is not None and task.delay.only)
    return request.devices > 1 and request.cluster is None and not pinned and not refused


def _rank(plan: Plan) -> tuple[bool, float]:
    """Plans that fit first, then by time."""
    return not plan.fits, seconds_of(plan)


def _best_at(task: PlanTask, course: BranchCourse) -> Plan | None:
    """The quickest plan that fits at a number of micro-batches, else the quickest; None where there is none."""
    if not course.request.fixed.allows(course.trunk_strategy):
        return None
    try:
        splits = list(_splits(course, task.certify))
    except InputError:  # the profile has no figures for the trunk
        return None
    worth = [split for split in splits if split.gain > 0] or sorted(splits, key=lambda split: -split.gain)[:1]
    sets = [worth, splits] if len(worth) < len(splits) else [worth]
    return min((_priced(task, course, chosen) for chosen in sets if chosen), key=_rank, default=None)


def _splits(course: BranchCourse, certify: bool) -> Iterator[_Split]:
    """Every region whose branches fit on devices of their own, with the quickest assignment."""
    room, working = course.room()
    node = course.parts.pricer.profile.cluster.levels[0].size
    options = BranchOptions(course)
    for region in course.parts.regions:
        choices = tuple(options.of(branch, room, working, len(region.branches)) for branch in region.branches)
        jobs = [{devices: tuple(own) for devices, own in choice.items()} for choice in choices]
        found = assign(jobs, course.request.devices, room, node, least=2)
        if found is not None:
            said = certify_assignment(found, jobs, course.request.devices, room, node, 2) if certify else ""
            yield _Split(region, found, choices, course.in_trunk(region) - found.seconds - course.calling(region), said)
            room -= max(sum(option.held for _, option in group.branches) for group in found.groups)


def _priced(task: PlanTask, course: BranchCourse, chosen: Sequence[_Split]) -> Plan:
    """The plan of some regions' branches on their groups, with its prediction."""
    request, graph = course.request, course.request.graph
    trunk = course.trunk([split.region for split in chosen])
    plan = Plan(
        PLAN_VERSION,
        graph.name,
        request.devices,
        request.global_batch,
        course.count,
        Schedule.ONE_F_ONE_B,
        graph.precision,
        (Stage(runs_of(trunk.layers, trunk.strategies)),),
        branches=tuple(one for split in chosen for one in split.placements(course)),
        mode=task.session.mode,
    )
    priced = price_plan(course.parts.pricer, plan)
    made_from = provenance(task.session.profile, task.budget, 0.0)
    said = "; ".join(filter(None, (split.certificate for split in chosen)))
    return replace(priced, provenance=replace(made_from, certificate=said))


def _described(task: PlanTask, plan: Plan) -> Plan:
    """A priced plan with what is to be said of it."""
    made_from, ordinary = plan.provenance, task.ordinary
    unsure = spread_note(task.session.profile.origin)
    notes = (*branch_notes(plan, ordinary), *plan_notes(task.request.graph, plan), *unsure)
    return replace(
        plan,
        provenance=None if made_from is None else replace(made_from, notes=notes, proof=Proof.FEASIBLE),
        left_out=task.backend.leaves_out(task.session.mode) if ordinary is None else ordinary.left_out,
    )
