"""The table of a step: what every group of devices does, in order. Planner and runtime read the same.

Pure: no torch, no communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.greedy import whole_step
from galvatron_lite.parallelism.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    ScheduleConfig,
    group_of,
    stage_at,
)
from galvatron_lite.parallelism.pipeline.times import PassOrder, even_order

Table = tuple[tuple[Action, ...], ...]
"""By group of devices: its passes, in order."""
Link = tuple[Pass, int, int]
"""Messages of forward (or backward) passes from one group to another; they arrive in the order they were sent."""
ROOM = 2
"""Messages of a link that may be under way before the sender waits: one that is sent, and one not yet asked for."""


def actions_of(course: ScheduleConfig, order: PassOrder | None = None) -> Table:
    """What every group of devices does in a step.

    Args:
        course: of the pipeline.
        order: what a zero-bubble order is made from; passes that all take as long if not given.
    """
    if course.schedule.splits_backward:
        order = order or even_order(course.groups * course.virtual)
        return tuple(worked.actions for worked in whole_step(order, course))
    return tuple(
        course.schedule.actions(course.groups, group, course.microbatches, course.virtual)
        for group in range(course.groups)
    )


def receiver(course: ScheduleConfig, group: int, action: Action) -> tuple[int, Action] | None:
    """The group, and its action, that a pass's result is for; None where nothing waits for it in another stage."""
    target = _neighbour(course, group, action, 1)
    if target is None:
        return None
    place = group_of(course.schedule, course.groups, target)
    return place, Action(action.what, action.microbatch, target // course.groups)


def sender(course: ScheduleConfig, group: int, action: Action) -> int | None:
    """The group that makes what a pass needs of another stage; None where it needs nothing."""
    source = _neighbour(course, group, action, -1)
    return None if source is None else group_of(course.schedule, course.groups, source)


def _neighbour(course: ScheduleConfig, group: int, action: Action, step: int) -> int | None:
    """The stage that a pass goes to (``step`` 1) or comes from (-1)."""
    stage = stage_at(course.schedule, course.groups, group, action.chunk)
    other = stage + (step if action.what is Pass.FORWARD else -step)
    outside = action.what is Pass.WEIGHT or not 0 <= other < course.groups * course.virtual
    return None if outside else other


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How stages are spread over groups of devices, and in which order they work."""

    schedule: Schedule  # order of passes
    groups: int  # of devices
    virtual: int = 1  # stages of each group
    order: PassOrder | None = None  # what a zero-bubble order is made from; None: passes that all take as long

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are made in passes of their own."""
        return self.schedule.splits_backward

    def course(self, microbatches: int) -> ScheduleConfig:
        """Of a step of so many micro-batches."""
        return ScheduleConfig(self.schedule, self.groups, self.virtual, microbatches)

    def group_of(self, stage: int) -> int:
        """The group of devices that runs a stage."""
        return group_of(self.schedule, self.groups, stage)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """The stages of a group, in the order of the model."""
        return tuple(stage_at(self.schedule, self.groups, group, chunk) for chunk in range(self.virtual))


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """What one group of devices does in a step."""

    course: ScheduleConfig  # of the pipeline
    group: int  # which
    actions: tuple[Action, ...]  # in order
    # by link that ends here: the actions that its messages are for, in the order they are sent
    arriving: dict[Link, tuple[Action, ...]]
    room: int  # messages of a link that may be under way before the sender waits


@lru_cache(maxsize=64)
def rank_schedule(pipeline: Pipeline, microbatches: int, group: int, *, forward_only: bool = False) -> RankSchedule:
    """What a group does in a step.

    Args:
        pipeline: all groups.
        microbatches: of the step.
        group: which.
        forward_only: leave out all but forward passes.

    Raises:
        InputError: the groups wait for one another in a circle.
    """
    course = pipeline.course(microbatches)
    table = actions_of(course, pipeline.order)
    if forward_only:
        table = tuple(tuple(action for action in actions if action.what is Pass.FORWARD) for actions in table)
    arriving: dict[Link, list[Action]] = {}
    for source, actions in enumerate(table):
        for action in actions:
            target = receiver(course, source, action)
            if target is not None and target[0] == group != source:
                arriving.setdefault((action.what, source, group), []).append(target[1])
    messages = {link: tuple(wanted) for link, wanted in arriving.items()}
    return RankSchedule(course, group, table[group], messages, room_of(course, table))


def room_of(course: ScheduleConfig, table: Table) -> int:
    """The fewest messages under way on a link (a power of two) with which a step comes to its end.

    Raises:
        InputError: the groups wait for one another in a circle, however many there are.
    """
    room = ROOM
    while not ends(course, table, room):
        room *= 2
        if room > 2 * ROOM * len(table) * course.virtual * course.microbatches:
            raise InputError(
                "schedule", course.schedule.value, f"Its passes wait for one another in a circle: {course}."
            )
    return room


def ends(course: ScheduleConfig, table: Sequence[Sequence[Action]], room: int) -> bool:
    """Whether all groups come to the end of their actions where a message that is sent waits for those before it.

    A group stands still before a pass whose input was not sent, and behind one whose result cannot be sent as ``room``
    messages are on its link that the receiver has not asked for. It asks for messages in the order they are sent, when
    it needs one of them.
    """
    links: dict[Link, deque[Action]] = {}
    done: set[tuple[int, Action]] = set()
    places, unsent = [0] * len(table), [False] * len(table)

    def advances(group: int) -> bool:
        action = table[group][places[group]]
        target = receiver(course, group, action)
        if not unsent[group]:
            if not _is_ready(course, group, action, done) or not _take(course, group, action, links):
                return False
            done.add((group, action))
        if target is not None and target[0] != group:
            link = links.setdefault((action.what, group, target[0]), deque())
            unsent[group] = len(link) >= room
            if unsent[group]:
                return False
            link.append(target[1])
        places[group] += 1
        return True

    advanced = True
    while advanced:
        advanced = False
        for group, actions in enumerate(table):
            while places[group] < len(actions) and advances(group):
                advanced = True
    return all(place == len(actions) for place, actions in zip(places, table, strict=True))


def _is_ready(course: ScheduleConfig, group: int, action: Action, done: set[tuple[int, Action]]) -> bool:
    """Whether what a pass needs of its own group is there."""
    before = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHT: Pass.BACKWARD}.get(action.what)
    if before is not None and (group, Action(before, action.microbatch, action.chunk)) not in done:
        return False
    if sender(course, group, action) != group:
        return True
    step = -1 if action.what is Pass.FORWARD else 1
    return (group, Action(action.what, action.microbatch, action.chunk + step)) in done


def _take(course: ScheduleConfig, group: int, action: Action, links: dict[Link, deque[Action]]) -> bool:
    """Ask for the message of a pass, and those before it; returns whether it was sent."""
    source = sender(course, group, action)
    if source is None or source == group:
        return True
    link = links.get((action.what, source, group))
    if link is None or action not in link:
        return False
    while link.popleft() != action:
        pass
    return True
