"""Every predicted pass of a step: which group of devices does what when, and what it holds meanwhile. No torch here.

The seconds and the order are those that ``cost.step`` prices a plan by: the event simulation (``cost.schedule``), and
for zero-bubble schedules the simulation that their order is made in (``parallelism.pipeline.table``). Memory is
that of ``cost.memory`` with the micro-batches that are in flight at each pass (``cost.memory``). All seconds
are stretched by the factor for the slowest of many devices, so that the step ends when the prediction says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.pass_memory import GroupMemory, MemoryCourse
from galvatron_lite.cost.schedule import program_of
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import (
    course_of,
    groups_of,
    hidden_share,
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
    """One pass of one micro-batch; seconds from the step's beginning."""

    what: Pass  # forward, backward (of a zero-bubble schedule: the gradient of the input only), or gradients of weights
    stage: int  # in the order of the model
    microbatch: int  # its number
    start: float  # start, end: of the compute, and of all that it waits for inside the stage
    end: float
    free: float  # when the group goes on: after what a send occupies of it
    arrives: float  # when the next stage has what it is sent; ``end`` where nothing is sent


@dataclass(frozen=True, slots=True)
class Send:
    """A boundary tensor, or its gradient, on its way from one group of devices to another."""

    what: Pass  # the pass that it is the result of
    microbatch: int  # its number
    stage: int  # stage, target: stages that send and receive
    target: int
    source_group: int  # source_group, target_group: their groups of devices
    target_group: int
    start: float  # start, end: seconds from the step's beginning to when it is sent and has arrived
    end: float


@dataclass(frozen=True, slots=True)
class Closing:
    """What a group does once a step, after its last backward."""

    name: str  # ``communication`` (of gradients, that compute does not hide), ``optimizer`` or ``host``
    start: float  # start, end: seconds from the step's beginning
    end: float
    memory: MemoryBreakdown  # bytes on one device meanwhile


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment of a group of devices."""

    memory: MemoryBreakdown  # bytes on one device
    place: int  # of the pass among the group's passes; -1 for the optimizer
    layer: str  # the layer that is computed then; empty for the optimizer


@dataclass(frozen=True, slots=True)
class GroupTimeline:
    """What one group of devices does in a step."""

    group: int  # its number, in the order of the ranks
    ranks: range  # its first to its last
    stages: tuple[int, ...]  # that it runs, in the order of the model
    passes: tuple[TimedPass, ...]  # in order
    during: tuple[MemoryBreakdown, ...]  # bytes on one device at the worst moment of each pass
    after: tuple[MemoryBreakdown, ...]  # bytes on one device from the end of each pass to the next
    resting: MemoryBreakdown  # bytes on one device before the first pass
    closing: tuple[Closing, ...]  # what is done once, in order; what takes no time is left out
    peak: Peak  # the worst moment

    @property
    def begin(self) -> float:
        """Seconds from the step's beginning to the first pass."""
        return self.passes[0].start

    @property
    def end(self) -> float:
        """Seconds from the step's beginning to the group's own end: its last pass and what it does once a step."""
        return self.closing[-1].end if self.closing else self.passes[-1].free

    @property
    def busy(self) -> float:
        """Seconds of work, sends that occupy the group included."""
        closing = sum(one.end - one.start for one in self.closing)
        return sum(pass_.free - pass_.start for pass_ in self.passes) + closing


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step."""

    course: ScheduleConfig  # of the pipeline
    groups: tuple[GroupTimeline, ...]  # of devices, first ranks first
    host: float  # seconds of fixed host work that end the step
    # whether a group begins its next step before others have ended this one (``Profile.steps_overlap``): a step then
    # takes what the busiest group needs, not what passes until all have ended
    overlapping: bool

    @property
    def seconds(self) -> float:
        """Of a step."""
        if self.overlapping:
            return max(group.end - group.begin for group in self.groups) + self.host
        return self.span

    @property
    def span(self) -> float:
        """Seconds from the first pass of any group to the end of the last one, host work included."""
        return max(group.end for group in self.groups) + self.host

    def sends(self) -> Iterator[Send]:
        """What goes between groups of devices, group by group in the order of their passes."""
        course, last = self.course, self.course.groups * self.course.virtual - 1
        for group in self.groups:
            for pass_ in group.passes:
                target = pass_.stage + (1 if pass_.what is Pass.FORWARD else -1)
                if pass_.what is Pass.WEIGHT or not 0 <= target <= last:
                    continue
                place = group_of(course.schedule, course.groups, target)
                if place != group.group:
                    yield Send(
                        pass_.what, pass_.microbatch, pass_.stage, target, group.group, place, pass_.end, pass_.arrives
                    )  # fmt: skip


def timeline(profile: Profile, plan: Plan) -> Timeline:
    """Every pass of a step of a plan, and what devices hold meanwhile.

    Args:
        profile: what the plan is priced by.
        plan: in stages.

    Raises:
        InputError: the plan does not fit the profile's model, its numbers do not divide, or it is of a kind that has no
            such table: cyclic data parallelism, branches on devices of their own, inference.
    """
    why = untimed(plan)
    if why:
        raise InputError("plan", plan.model, why)
    pricer = LayerPricer(for_mode(profile, plan.mode))
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    costs = price_stages(pricer, shape, [sum(run.count for run in stage.runs) for stage in plan.stages], strategies)
    factor = straggling(profile, plan.devices)
    worked = _worked(profile, shape, costs)
    groups = tuple(
        _group(pricer, shape, costs, number, passes, factor)
        for number, passes in enumerate(worked)
    )  # fmt: skip
    overlapping = shape.schedule.splits_backward and profile.steps_overlap
    return Timeline(course_of(shape), groups, profile.overhead.step * factor, overlapping)


def untimed(plan: Plan) -> str:
    """Why a plan has no timeline; empty where it has one."""
    if plan.cyclic is not None:
        return "Cyclic data parallelism has no timeline: its passes go round without a beginning or an end."
    if plan.branches:
        return "Branches on devices of their own have no timeline: they are priced as sums over regions, not as passes."
    if plan.mode != "training":
        return "Inference has no timeline: its passes are forward only, and nothing is kept between them."
    return ""


Done = tuple[Action, int, float]
"""A pass, its stage, and when it starts."""


def _worked(profile: Profile, shape: Shape, costs: Sequence[StageCost]) -> list[list[Done]]:
    """What every group does, and when, in the seconds that the plan is priced by."""
    course = course_of(shape)
    if shape.schedule.splits_backward:
        groups = step_work(order_of(profile, costs), course)
        return [
            [
                (action, stage_at(course.schedule, course.groups, number, action.chunk), start)
                for action, start in zip(group.actions, group.starts, strict=True)
            ]
            for number, group in enumerate(groups)
        ]
    return _simulated([cost.times for cost in costs], course, hidden_share(profile))


def _simulated(stages: Sequence[StageTimes], course: ScheduleConfig, hidden: float) -> list[list[Done]]:
    """``cost.schedule.run`` with the start of every pass."""
    program, count, shown = program_of(course), len(stages), 1.0 - hidden
    clock, ready = [0.0] * course.groups, [0.0] * program.slots
    passes: list[list[Done]] = [[] for _ in range(course.groups)]
    for group, index, slot, source in program.steps:
        start = max(clock[group], ready[source])
        forward, stage = index < count, index % count
        stage_cost = stages[stage]
        seconds, send = (
            (stage_cost.forward, stage_cost.send_forward)
            if forward
            else (stage_cost.backward, stage_cost.send_backward)
        )
        clock[group] = start + (seconds + shown * send)
        ready[slot] = clock[group] + hidden * send
        what = Pass.FORWARD if forward else Pass.BACKWARD
        action = Action(what, (slot - 1) % course.microbatches, stage // course.groups)
        passes[group].append((action, stage, start))
    return passes


def _group(
    pricer: LayerPricer, shape: Shape, costs: Sequence[StageCost], number: int, worked: Sequence[Done], factor: float
) -> GroupTimeline:
    """The timeline of one group of devices."""
    own = groups_of(shape, costs)[number]
    hidden, split = hidden_share(pricer.profile), shape.schedule.splits_backward
    passes = tuple(_pass(done, costs[done[1]].times, hidden, split, factor) for done in worked)
    context = pricer.of_group(shape.stage_devices, number).profile.cluster.device.context
    memory = GroupMemory(shape, own, context)
    course = memory.over([action for action, _, _ in worked])
    stages = tuple(stage_at(shape.schedule, shape.stages, number, chunk) for chunk in range(shape.virtual))
    size = shape.stage_devices
    return GroupTimeline(
        number,
        range(number * size, (number + 1) * size),
        stages,
        passes,
        course.during,
        course.after,
        memory.resting(formed=False),
        _closing(own, memory, passes[-1].free, factor),
        _peak(pricer.profile, costs, memory, course, worked),
    )


def _pass(done: Done, times: StageTimes, hidden: float, split: bool, factor: float) -> TimedPass:
    action, stage, start = done
    seconds, send = {
        Pass.FORWARD: (times.forward, times.send_forward),
        Pass.BACKWARD: (times.backward - (times.weight if split else 0.0), times.send_backward),
        Pass.WEIGHT: (times.weight, 0.0),
    }[action.what]
    end = start + seconds
    moments = (start, end, end + (1.0 - hidden) * send, end + send)
    return TimedPass(action.what, stage, action.microbatch, *(moment * factor for moment in moments))


def _closing(costs: Sequence[StageCost], memory: GroupMemory, begin: float, factor: float) -> tuple[Closing, ...]:
    """What a group does once a step."""
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
    profile: Profile, costs: Sequence[StageCost], memory: GroupMemory, course: MemoryCourse, worked: Sequence[Done]
) -> Peak:
    """The worst moment; of equal ones the optimizer's, as in ``cost.memory.worst_moment``, then the first."""
    place = max(range(len(worked)), key=lambda one: course.during[one].total)
    updating = memory.updating()
    if updating.total >= course.during[place].total:
        return Peak(updating, -1, "")
    action, stage, _ = worked[place]
    first = sum(len(cost.layers) for cost in costs[:stage])
    layer = memory.worst_layer(action, course.held[place])
    return Peak(course.during[place], place, profile.graph.layers[first + layer].name)
