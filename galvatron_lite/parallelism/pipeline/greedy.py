"""Zero-bubble pipelines: backward in two parts, ordered as the seconds of the passes ask for.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): B, the gradient of the input, is passed on at
once; W, the gradient of the weights, fills gaps. Their schedules are found by a heuristic search within a limit of
memory (section 3.1; p micro-batches a group for ``zb-1p``, 2p for ``zb-2p``; ``zb-v`` p with two half stages a group).
Here every group is greedy under the same limit: B first, then F where the limit allows it, else W, unless another pass
is due soon; like the paper's, the search takes the best of several such rules. Pure: no torch, no communication.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf

from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig, group_of, stage_at
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes

_ROUNDS = 4
"""Rounds of ``groups`` micro-batches that are simulated; from then on every group is busy without a gap."""
_PATIENCE = (0.0, 0.5)
"""Rules that are tried: W starts only in gaps of at least so many of its own durations."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """What one group of devices did in a step."""

    actions: tuple[Action, ...]  # its passes, in order
    starts: tuple[float, ...]  # seconds from the step's beginning to the start of each
    span: float  # seconds from its first pass to its last


@dataclass(slots=True)
class _Group:
    """One group of devices as the simulation goes on: what may start, by chunk, and what is in memory."""

    virtual: int
    forwards: list[deque[tuple[float, int]]] = field(init=False)
    backwards: list[deque[tuple[float, int]]] = field(init=False)
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    actions: list[Action] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    whole: list[int] = field(init=False)
    pending: list[int] = field(init=False)
    free: float = 0.0
    begin: float = -1.0

    def __post_init__(self) -> None:
        self.forwards = [deque() for _ in range(self.virtual)]
        self.backwards = [deque() for _ in range(self.virtual)]
        self.whole, self.pending = [0] * self.virtual, [0] * self.virtual

    def choose(self, now: float, room: float, share: float, least: float) -> tuple[Pass, int] | None:
        """The pass to start now: of equal ones that of the later chunk; a last place is kept for later chunks."""
        for chunk in reversed(range(self.virtual)):
            if self.backwards[chunk] and self.backwards[chunk][0][0] <= now:
                return Pass.BACKWARD, chunk
        used = sum(self.whole) + share * sum(self.pending)
        for chunk in reversed(range(self.virtual)):
            kept_free = self.virtual - 1 - chunk
            if self.forwards[chunk] and self.forwards[chunk][0][0] <= now and used + 1 + kept_free <= room:
                return Pass.FORWARD, chunk
        return (Pass.WEIGHT, self.weights[0][0]) if self.weights and self.gap(now, used, room) >= least else None

    def gap(self, now: float, used: float, room: float) -> float:
        """Seconds until a pass arrives that could start then; infinite where none is known to be on its way."""
        firsts = [queue[0][0] for queue in self.backwards if queue]
        firsts += [
            queue[0][0] for chunk, queue in enumerate(self.forwards) if queue and used + self.virtual - chunk <= room
        ]
        return min(firsts, default=inf) - now

    def start(self, now: float, chosen: tuple[Pass, int], times: StageTimes, hidden: float) -> tuple[float, int] | None:
        """Work through a pass; returns when its result arrives and for which micro-batch, None for W."""
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
        self.whole[chunk] += 1 if forward else -1
        if not forward:
            self.pending[chunk] += 1
            self.weights.append((chunk, index))
        return self.free + hidden * send, index

    @property
    def worked(self) -> GroupWork:
        return GroupWork(tuple(self.actions), tuple(self.starts), self.free - self.begin)


def whole_step(order: PassOrder, course: ScheduleConfig) -> tuple[GroupWork, ...]:
    """What every group of devices does in a step, by the rule that ``shown_rounds`` found best."""
    shown = shown_of(course)
    if shown == course:
        return shown_rounds(order, course)
    rules = [(_longest(_simulated(order, shown, rule)), rule) for rule in _PATIENCE]
    return _simulated(order, course, min(rules)[1])


def shown_of(course: ScheduleConfig) -> ScheduleConfig:
    """The same with no more micro-batches than are simulated to choose a rule, and to price a step."""
    return replace(course, microbatches=min(course.microbatches, _ROUNDS * course.groups))


@lru_cache(maxsize=256)
def shown_rounds(order: PassOrder, course: ScheduleConfig) -> tuple[GroupWork, ...]:
    """What every group does in the first rounds of a step, by the best rule; then each is busy without a gap."""
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
        result = group.start(now, chosen, order.stages[stage], order.hidden)
        if result is not None:
            _deliver(groups, wakes, course, stage, result, chosen[0] is Pass.FORWARD)
        heappush(wakes, (group.free, place))
    return tuple(group.worked for group in groups)


def _deliver(
    groups: list[_Group],
    wakes: list[tuple[float, int]],
    course: ScheduleConfig,
    stage: int,
    what: tuple[float, int],
    forward: bool,
) -> None:
    """Hand a pass's result to the stage that waits for it; the last forward to its own backward."""
    last = course.groups * course.virtual - 1
    if not forward and stage == 0:
        return
    turns = forward and stage == last
    target = stage if turns else stage + 1 if forward else stage - 1
    place = group_of(course.schedule, course.groups, target)
    queue = groups[place].forwards if forward and not turns else groups[place].backwards
    queue[target // course.groups].append(what)
    heappush(wakes, (what[0], place))
