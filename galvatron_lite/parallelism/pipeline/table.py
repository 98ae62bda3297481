"""The table of a step: the passes of each group of devices, in order, for both planner and runtime. No torch here.

Zero-bubble pipelines (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241) split backward: B, the
gradient of the input, is sent on at once; W, the gradient of the weights, fills gaps. The paper finds orders by a
heuristic search within a memory limit (section 3.1; p micro-batches a group for ``zb-1p``, 2p for ``zb-2p``; ``zb-v`` p
with two half stages a group). Here each group is greedy under the same limit: B first, then F if the limit allows it,
else W, unless another pass is due soon. Like the paper, we take the best of several such rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    ScheduleConfig,
    group_of,
    stage_at,
)
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes, even_order

_ROUNDS = 4
"""Rounds of ``groups`` micro-batches that are simulated; after them all groups are busy without gaps."""
_PATIENCE = (0.0, 0.5)
"""The rules: W starts only in gaps of at least this many of its durations."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The passes of a group of devices in a step."""

    actions: tuple[Action, ...]  # its passes, in order
    starts: tuple[float, ...]  # seconds from the step's beginning to the start of each
    span: float  # seconds from its first pass to its last


@dataclass(slots=True)
class _Group:
    """The state of a group of devices in the simulation: passes that may start, by chunk, and what is in memory."""

    virtual: int
    forwards: list[deque[tuple[float, int]]] = field(init=False)
    backwards: list[deque[tuple[float, int]]] = field(init=False)
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    actions: list[Action] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    saved: list[int] = field(init=False)
    pending: list[int] = field(init=False)
    free: float = 0.0
    begin: float = -1.0

    def __post_init__(self) -> None:
        self.forwards = [deque() for _ in range(self.virtual)]
        self.backwards = [deque() for _ in range(self.virtual)]
        self.saved, self.pending = [0] * self.virtual, [0] * self.virtual

    def choose(self, now: float, room: float, share: float, least: float) -> tuple[Pass, int] | None:
        """The pass to start now, of later chunks first; room is left for one pass of each later chunk."""
        for chunk in reversed(range(self.virtual)):
            if self.backwards[chunk] and self.backwards[chunk][0][0] <= now:
                return Pass.BACKWARD, chunk
        used = sum(self.saved) + share * sum(self.pending)
        for chunk in reversed(range(self.virtual)):
            kept_free = self.virtual - 1 - chunk
            if self.forwards[chunk] and self.forwards[chunk][0][0] <= now and used + 1 + kept_free <= room:
                return Pass.FORWARD, chunk
        return (Pass.WEIGHT, self.weights[0][0]) if self.weights and self.gap(now, used, room) >= least else None

    def gap(self, now: float, used: float, room: float) -> float:
        """Seconds until a pass arrives that could start then; infinite if none is in flight."""
        firsts = [queue[0][0] for queue in self.backwards if queue]
        firsts += [
            queue[0][0] for chunk, queue in enumerate(self.forwards) if queue and used + self.virtual - chunk <= room
        ]
        return min(firsts, default=inf) - now

    def start(self, now: float, chosen: tuple[Pass, int], times: StageTimes, hidden: float) -> tuple[float, int] | None:
        """Run a pass; return when its result arrives, and its micro-batch; None for W."""
        what, chunk = chosen
        self.begin = now if self.begin < 0.0 else self.begin
        self.starts.append(now)
        if what is Pass.WEIGHT:
            self.actions.append(Action(what, self.weights.popleft()[1], chunk))
            self.pending[chunk] -= 1
            self.free = now + times.weight
            return None
        forward = what is Pass.FORWARD
        queue, seconds, send = (
            (self.forwards[chunk], times.forward, times.send_forward)
            if forward
            else (self.backwards[chunk], times.backward - times.weight, times.send_backward)
        )
        index = queue.popleft()[1]
        self.actions.append(Action(what, index, chunk))
        self.free = now + seconds + (1.0 - hidden) * send
        self.saved[chunk] += 1 if forward else -1
        if not forward:
            self.pending[chunk] += 1
            self.weights.append((chunk, index))
        return self.free + hidden * send, index

    @property
    def worked(self) -> GroupWork:
        return GroupWork(tuple(self.actions), tuple(self.starts), self.free - self.begin)


def step_work(order: PassOrder, course: ScheduleConfig) -> tuple[GroupWork, ...]:
    """Return the passes of each group of devices in a step, by the best rule of ``shown_rounds``."""
    shown = shown_of(course)
    if shown == course:
        return shown_rounds(order, course)
    rules = [(_longest(_simulated(order, shown, rule)), rule) for rule in _PATIENCE]
    return _simulated(order, course, min(rules)[1])


def shown_of(course: ScheduleConfig) -> ScheduleConfig:
    """Limit the micro-batches to those that are simulated to choose a rule, and to price a step."""
    return replace(course, microbatches=min(course.microbatches, _ROUNDS * course.groups))


@lru_cache(maxsize=256)
def shown_rounds(order: PassOrder, course: ScheduleConfig) -> tuple[GroupWork, ...]:
    """Return the passes of each group in the first rounds of a step, by the best rule."""
    return min((_simulated(order, shown_of(course), rule) for rule in _PATIENCE), key=_longest)


def _longest(groups: tuple[GroupWork, ...]) -> float:
    return max(group.span for group in groups)


def _simulated(order: PassOrder, course: ScheduleConfig, patience: float) -> tuple[GroupWork, ...]:
    groups = [_Group(course.virtual) for _ in range(course.groups)]
    room = course.schedule.limit(course.groups) + 1e-9
    wakes: list[tuple[float, int]] = [(0.0, 0)]
    groups[0].forwards[0].extend((0.0, index) for index in range(course.microbatches))
    while wakes:
        now, place = heappop(wakes)
        group = groups[place]
        if group.free > now:
            continue
        first = group.weights[0][0] if group.weights else 0
        least = patience * order.stages[stage_at(course.schedule, course.groups, place, first)].weight
        chosen = group.choose(now, room, order.share, least)
        if chosen is None:
            continue
        stage = stage_at(course.schedule, course.groups, place, chosen[1])
        result, forward = group.start(now, chosen, order.stages[stage], order.hidden), chosen[0] is Pass.FORWARD
        if result is not None and (forward or stage > 0):
            # to the stage that waits for it; the last forward to its backward
            turns = forward and stage == course.groups * course.virtual - 1
            target = stage if turns else stage + 1 if forward else stage - 1
            reader = group_of(course.schedule, course.groups, target)
            queues = groups[reader].forwards if forward and not turns else groups[reader].backwards
            queues[target // course.groups].append(result)
            heappush(wakes, (result[0], reader))
        heappush(wakes, (group.free, place))
    return tuple(group.worked for group in groups)


Table = tuple[tuple[Action, ...], ...]
"""The passes of each group of devices, in order."""
Link = tuple[Pass, int, int]
"""Messages of forward or backward passes from a group to another, which arrive in the order they were sent."""
ROOM = 2
"""Messages of a link in flight before the sender waits: one that is sent, and one that is not received yet."""


def actions_of(course: ScheduleConfig, order: PassOrder | None = None) -> Table:
    """Return the passes of each group of devices in a step.

    Args:
        course: of the pipeline.
        order: of zero-bubble schedules; by default all passes take equally long.
    """
    if course.schedule.splits_backward:
        order = order or even_order(course.groups * course.virtual)
        return tuple(worked.actions for worked in step_work(order, course))
    return tuple(
        course.schedule.actions(course.groups, group, course.microbatches, course.virtual)
        for group in range(course.groups)
    )


def receiver(course: ScheduleConfig, group: int, action: Action) -> tuple[int, Action] | None:
    """Return the group and the action that receive a pass's result; None if no other stage does."""
    target = _neighbour(course, group, action, 1)
    if target is None:
        return None
    place = group_of(course.schedule, course.groups, target)
    return place, Action(action.what, action.microbatch, target // course.groups)


def sender(course: ScheduleConfig, group: int, action: Action) -> int | None:
    """Return the group that computes a pass's input; None if no other stage does."""
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
    """The stages of a pipeline on groups of devices, and the order of their passes."""

    schedule: Schedule
    groups: int  # of devices
    virtual: int = 1  # stages of each group
    order: PassOrder | None = None  # of zero-bubble schedules; None: all passes take equally long

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in separate passes."""
        return self.schedule.splits_backward

    def course(self, microbatches: int) -> ScheduleConfig:
        """Return the configuration of a step."""
        return ScheduleConfig(self.schedule, self.groups, self.virtual, microbatches)

    def group_of(self, stage: int) -> int:
        """Return the group of devices that runs a stage."""
        return group_of(self.schedule, self.groups, stage)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Return the stages of a group, in the order of the model."""
        return tuple(stage_at(self.schedule, self.groups, group, chunk) for chunk in range(self.virtual))


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """The passes and messages of a group of devices in a step."""

    course: ScheduleConfig
    group: int  # index
    actions: tuple[Action, ...]  # in order
    arriving: dict[Link, tuple[Action, ...]]  # by link to this group: the actions that receive its messages, in order
    room: int  # messages of a link in flight before the sender waits


@lru_cache(maxsize=64)
def rank_schedule(pipeline: Pipeline, microbatches: int, group: int, *, forward_only: bool = False) -> RankSchedule:
    """Return the passes and messages of a group in a step.

    Args:
        pipeline: all groups.
        microbatches: of the step.
        group: index of the group.
        forward_only: only forward passes.

    Raises:
        InputError: the groups deadlock.
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
    messages = {link: tuple(receivers) for link, receivers in arriving.items()}
    return RankSchedule(course, group, table[group], messages, room_of(course, table))


def room_of(course: ScheduleConfig, table: Table) -> int:
    """Return the fewest messages in flight on a link (a power of two) with which a step does not deadlock.

    Raises:
        InputError: the groups deadlock with any number.
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
    """Whether all groups complete their actions if a link delivers messages in order.

    A group waits before a pass whose input was not sent, and after a pass whose result cannot be sent, as the receiver
    has not received ``room`` messages of the link. It receives messages in the order they are sent, up to the message
    that it needs.
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
    """Whether a pass's inputs from its group are computed."""
    before = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHT: Pass.BACKWARD}.get(action.what)
    if before is not None and (group, Action(before, action.microbatch, action.chunk)) not in done:
        return False
    if sender(course, group, action) != group:
        return True
    step = -1 if action.what is Pass.FORWARD else 1
    return (group, Action(action.what, action.microbatch, action.chunk + step)) in done


def _take(course: ScheduleConfig, group: int, action: Action, links: dict[Link, deque[Action]]) -> bool:
    """Receive the message of a pass, and those before it; return whether it was sent."""
    source = sender(course, group, action)
    if source is None or source == group:
        return True
    link = links.get((action.what, source, group))
    if link is None or action not in link:
        return False
    while link.popleft() != action:
        pass
    return True
