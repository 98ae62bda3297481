"""Every pass of a predicted step: when a group of devices runs it, and what the group holds meanwhile. No torch here.

Seconds and order are those by which ``cost.step`` prices the plan, and memory is that of ``cost.pass_memory``. All
seconds are multiplied by the factor for the slowest of many devices, so that the step ends when the prediction says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.pass_memory import GroupMemory, MemoryCourse
from galvatron_lite.cost.schedule import pass_seconds, program_of
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import (
    config_of,
    groups_of,
    hidden_send_share,
    order_of,
    price_stages,
    shape_of,
    straggling,
    strategies_of,
)
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig, group_of, stage_at
from galvatron_lite.parallelism.pipeline.table import step_work
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.plans.schema import MemoryBreakdown, Plan
from galvatron_lite.profiler.schema import Profile


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A pass of a micro-batch; seconds from the step's beginning."""

    what: Pass  # of a zero-bubble schedule ``BACKWARD`` is only the gradient of the input
    stage: int  # index in the order of the model
    microbatch: int  # index
    start: float  # start, end: of compute, with exposed communication inside the stage
    end: float
    free: float  # when the group goes on: after the part of the send that occupies it
    arrives: float  # when the next stage has the tensor that is sent; ``end`` if nothing is sent


@dataclass(frozen=True, slots=True)
class Send:
    """A send of a boundary tensor, or of its gradient, from one group of devices to another."""

    what: Pass  # the pass whose result it is
    microbatch: int  # index
    stage: int  # stage, target: stages that send and receive
    target: int
    source_group: int  # source_group, target_group: groups that send and receive
    target_group: int
    start: float  # start, end: seconds from the step's beginning
    end: float


@dataclass(frozen=True, slots=True)
class Closing:
    """Work of a group once a step, after its last backward."""

    name: str  # ``communication`` (of gradients, exposed), ``optimizer`` or ``host``
    start: float  # start, end: seconds from the step's beginning
    end: float
    memory: MemoryBreakdown  # bytes on one device meanwhile


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment of a group of devices."""

    memory: MemoryBreakdown  # bytes on one device
    place: int  # index of the pass in the group's passes; -1 for the optimizer
    layer: str  # the layer that runs then; empty for the optimizer


@dataclass(frozen=True, slots=True)
class GroupTimeline:
    """The step of one group of devices."""

    group: int  # index in the order of the ranks
    ranks: range
    stages: tuple[int, ...]  # that it runs, in the order of the model
    passes: tuple[TimedPass, ...]  # in order
    during: tuple[MemoryBreakdown, ...]  # bytes on one device at the worst moment of each pass
    after: tuple[MemoryBreakdown, ...]  # bytes on one device from the end of each pass to the next
    resting: MemoryBreakdown  # bytes on one device before the first pass
    closing: tuple[Closing, ...]  # in order, without what takes no time
    peak: Peak

    @property
    def begin(self) -> float:
        """Seconds from the step's beginning to the first pass."""
        return self.passes[0].start

    @property
    def end(self) -> float:
        """Seconds from the step's beginning to the end of the group's work."""
        return self.closing[-1].end if self.closing else self.passes[-1].free

    @property
    def busy(self) -> float:
        """Seconds of work, with sends that occupy the group."""
        closing = sum(work.end - work.start for work in self.closing)
        return sum(pass_.free - pass_.start for pass_ in self.passes) + closing


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step."""

    course: ScheduleConfig
    groups: tuple[GroupTimeline, ...]  # of devices, first ranks first
    host: float  # seconds of fixed host work that end the step
    # whether a group begins its next step before others have ended this one (``Profile.steps_overlap``): a step then
    # takes as long as the busiest group needs
    overlapping: bool

    @property
    def seconds(self) -> float:
        """Of a step."""
        if self.overlapping:
            return max(group.end - group.begin for group in self.groups) + self.host
        return self.span

    @property
    def span(self) -> float:
        """Seconds from the first pass of any group to the end of the last one, with host work."""
        return max(group.end for group in self.groups) + self.host

    def sends(self) -> Iterator[Send]:
        """Sends between groups of devices, by group in the order of their passes."""
        config, last = self.course, self.course.groups * self.course.virtual - 1
        for group in self.groups:
            for pass_ in group.passes:
                target = pass_.stage + (1 if pass_.what is Pass.FORWARD else -1)
                if pass_.what is Pass.WEIGHT or not 0 <= target <= last:
                    continue
                receiver = group_of(config.schedule, config.groups, target)
                if receiver != group.group:
                    groups = group.group, receiver
                    yield Send(
                        pass_.what, pass_.microbatch, pass_.stage, target, *groups, pass_.end, pass_.arrives
                    )  # fmt: skip


def timeline(profile: Profile, plan: Plan) -> Timeline:
    """Return every pass of a step of a plan, and what devices hold meanwhile.

    Args:
        profile: that prices the plan.
        plan: in stages.

    Raises:
        InputError: the plan does not fit the profile's model, its numbers do not divide, or it is of a kind without
            a table of passes: cyclic data parallelism, branches on separate devices, inference.
    """
    reason = untimed(plan)
    if reason:
        raise InputError("plan", plan.model, reason)
    pricer = LayerPricer(for_mode(profile, plan.mode))
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    costs = price_stages(pricer, shape, [sum(run.count for run in stage.runs) for stage in plan.stages], strategies)
    factor = straggling(profile, plan.devices)
    groups = tuple(
        _group_timeline(pricer, shape, costs, group, starts, factor)
        for group, starts in enumerate(_pass_starts(profile, shape, costs))
    )
    overlapping = shape.schedule.splits_backward and profile.steps_overlap
    return Timeline(config_of(shape), groups, profile.overhead.step * factor, overlapping)


def untimed(plan: Plan) -> str:
    """Explain why a plan has no timeline; empty if it has one."""
    if plan.cyclic is not None:
        return "Cyclic data parallelism has no timeline: its passes go round without a beginning or an end."
    if plan.branches:
        return "Branches on devices of their own have no timeline: they are priced as sums over regions, not as passes."
    if plan.mode != "training":
        return "Inference has no timeline: its passes are forward only, and nothing is kept between them."
    return ""


PassStart = tuple[Action, int, float]
"""A pass, its stage, and its start in seconds."""


def _pass_starts(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> list[list[PassStart]]:
    """The passes of every group, in order."""
    config = config_of(shape)
    if shape.schedule.splits_backward:
        groups = step_work(order_of(profile, costs), config)
        return [
            [
                (action, stage_at(config.schedule, config.groups, number, action.chunk), start)
                for action, start in zip(group.actions, group.starts, strict=True)
            ]
            for number, group in enumerate(groups)
        ]
    return _simulated_starts([cost.times for cost in costs], config, hidden_send_share(profile))


def _simulated_starts(stages: Sequence[StageTimes], config: ScheduleConfig, hidden: float) -> list[list[PassStart]]:
    """``cost.schedule.run`` with the start of every pass."""
    program, (seconds, delays) = program_of(config), pass_seconds(stages, hidden)
    clock, ready = [0.0] * config.groups, [0.0] * program.slots
    starts: list[list[PassStart]] = [[] for _ in range(config.groups)]
    for group, index, slot, source in program.steps:
        start = max(clock[group], ready[source])
        clock[group] = start + seconds[index]
        ready[slot] = clock[group] + delays[index]
        what, stage = Pass.FORWARD if index < len(stages) else Pass.BACKWARD, index % len(stages)
        action = Action(what, (slot - 1) % config.microbatches, stage // config.groups)
        starts[group].append((action, stage, start))
    return starts


def _group_timeline(
    pricer: LayerPricer,
    shape: Shape,
    costs: Sequence[StageCost],
    group: int,
    starts: Sequence[PassStart],
    factor: float,
) -> GroupTimeline:
    group_costs = groups_of(shape, costs)[group]
    hidden, split = hidden_send_share(pricer.profile), shape.schedule.splits_backward
    passes = tuple(_timed_pass(start, costs[start[1]].times, hidden, split, factor) for start in starts)
    context = pricer.of_group(shape.stage_devices, group).profile.cluster.device.context
    memory = GroupMemory(shape, group_costs, context)
    course = memory.over([action for action, _, _ in starts])
    return GroupTimeline(
        group,
        range(group * shape.stage_devices, (group + 1) * shape.stage_devices),
        tuple(stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)),
        passes,
        course.during,
        course.after,
        memory.resting(formed=False),
        _closing(group_costs, memory, passes[-1].free, factor),
        _peak(pricer.profile, costs, memory, course, starts),
    )


def _timed_pass(pass_start: PassStart, times: StageTimes, hidden: float, split: bool, factor: float) -> TimedPass:
    """A pass with its end and send; ``split``: whether gradients of weights are separate passes."""
    action, stage, start = pass_start
    seconds, send = {
        Pass.FORWARD: (times.forward, times.send_forward),
        Pass.BACKWARD: (times.backward - (times.weight if split else 0.0), times.send_backward),
        Pass.WEIGHT: (times.weight, 0.0),
    }[action.what]
    end = start + seconds
    moments = (start, end, end + (1.0 - hidden) * send, end + send)
    return TimedPass(action.what, stage, action.microbatch, *(moment * factor for moment in moments))


def _closing(costs: Sequence[StageCost], memory: GroupMemory, begin: float, factor: float) -> tuple[Closing, ...]:
    """The work of a group once a step, from ``begin``."""
    layers = [layer for cost in costs for layer in cost.layers]
    resting, closing = memory.resting(formed=True), []
    for name, seconds, held in (
        ("communication", sum(layer.step_exposed for layer in layers), resting),
        ("optimizer", sum(layer.update for layer in layers), memory.updating()),
        ("host", sum(layer.step_host for layer in layers), resting),
    ):
        if seconds > 0.0:
            closing.append(Closing(name, begin, begin + seconds * factor, held))
            begin = closing[-1].end
    return tuple(closing)


def _peak(
    profile: Profile, costs: Sequence[StageCost], memory: GroupMemory, course: MemoryCourse, starts: Sequence[PassStart]
) -> Peak:
    """The worst moment; of equal ones the optimizer's (as ``cost.memory.worst_moment``), then the first."""
    worst = max(range(len(starts)), key=lambda index: course.during[index].total)
    updating = memory.updating()
    if updating.total >= course.during[worst].total:
        return Peak(updating, -1, "")
    action, stage, _ = starts[worst]
    first = sum(len(cost.layers) for cost in costs[:stage])
    layer = memory.worst_layer(action, course.held[worst])
    return Peak(course.during[worst], worst, profile.graph.layers[first + layer].name)
