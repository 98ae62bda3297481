"""The world's messages, played rank by rank until all have ended, two that meet do not fit, or nobody can go on."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from galvatron_lite.verify.match.places import PAIRED, RankRole, Stream
from galvatron_lite.verify.schema import NOBODY, Message, MessageType

OBJECT = "object"  # dtype of what is pickled: its size may differ from rank to rank
_ROOTED = (MessageType.BROADCAST, MessageType.REDUCE, MessageType.GATHER, MessageType.SCATTER)
_SUMMED = (MessageType.ALL_REDUCE, MessageType.REDUCE_SCATTER, MessageType.REDUCE)


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message as a rank of the world gives it."""

    rank: int  # that gives it
    stage: int  # of the rank
    message: Message  # as its role gave it
    peer: int = NOBODY  # the rank that it goes to or comes from, or the root of a collective
    exact: bool = True  # whether the rank lies where the recorded one does, so that parts of unlike sizes are its own


@dataclass(frozen=True, slots=True)
class MessageMismatch:
    """Messages that meet and are not one."""

    what: str  # differs
    odd: tuple[RankMessage, ...]  # those of the fewest
    other: RankMessage  # one of those of the most


def collective_mismatch(spoken: Sequence[RankMessage]) -> MessageMismatch | None:
    """Why the messages of all ranks of a group, in the group's order, are not one collective; None: they are."""
    for what, look in _LOOKS:
        if mismatch := _mismatch_in(what, look, spoken):
            return mismatch
    uneven = _parts_mismatch(spoken) if spoken[0].message.kind is MessageType.ALL_TO_ALL else None
    return uneven or _order_mismatch(spoken)


def pair_mismatch(sent: RankMessage, taken: RankMessage) -> MessageMismatch | None:
    """Why what one rank sends is not what another receives; None: it is."""
    for what in ("dtype", "shape"):
        if getattr(sent.message, what) != getattr(taken.message, what):
            return MessageMismatch(what, (sent,), taken)
    comparable = NOBODY not in (sent.message.microbatch, taken.message.used)
    if comparable and sent.message.microbatch != taken.message.used:
        return MessageMismatch("micro-batch", (sent,), taken)
    return None


def _shape(one: RankMessage) -> Hashable:
    message = one.message
    loose = message.dtype == OBJECT or message.kind is MessageType.BARRIER
    return () if loose or message.kind is MessageType.ALL_TO_ALL else message.shape


_LOOKS: tuple[tuple[str, Callable[[RankMessage], Hashable]], ...] = (
    ("kind", lambda one: one.message.kind),
    ("dtype", lambda one: one.message.dtype),
    ("shape", _shape),
    ("root", lambda one: one.peer if one.message.kind in _ROOTED else NOBODY),
    ("operator", lambda one: one.message.operator if one.message.kind in _SUMMED else ""),
)


def _order_mismatch(spoken: Sequence[RankMessage]) -> MessageMismatch | None:
    """Why messages that look alike belong to other layers or micro-batches: their ranks come in other orders."""
    stages = {one.stage for one in spoken}
    unknown = any(not one.message.layer for one in spoken)
    return (
        None
        if len(stages) > 1 or unknown
        else _mismatch_in("layer", lambda one: (one.message.layer, one.message.microbatch), spoken)
    )


def _mismatch_in(
    what: str, look: Callable[[RankMessage], Hashable], spoken: Sequence[RankMessage]
) -> MessageMismatch | None:
    seen = [look(one) for one in spoken]
    if len(set(seen)) == 1:
        return None
    usual = Counter(seen).most_common(1)[0][0]
    odd = tuple(one for one, value in zip(spoken, seen, strict=True) if value != usual)
    return MessageMismatch(what, odd, spoken[seen.index(usual)])


def _parts_mismatch(spoken: Sequence[RankMessage]) -> MessageMismatch | None:
    """Of an all-to-all: what one rank has for another is what that one waits for."""
    size = len(spoken)
    parts = [_parts(one.message.sent, one.message, size) for one in spoken]
    taken = [_parts(one.message.taken, one.message, size) for one in spoken]
    for i, sender in enumerate(spoken):
        for j, receiver in enumerate(spoken):
            exact = (sender.exact or _even(parts[i])) and (receiver.exact or _even(taken[j]))
            if exact and parts[i][j] != taken[j][i]:
                return MessageMismatch("parts", (sender,), receiver)
    return None


def _parts(parts: tuple[int, ...], message: Message, size: int) -> tuple[int, ...]:
    return parts or (prod(message.shape) // size,) * size


def _even(parts: tuple[int, ...]) -> bool:
    return len(set(parts)) == 1


Way = tuple[int, int, int]  # sender, receiver and tag of a message from rank to rank
Meeting = tuple[int, Way | None, int]
"""The number of a group, the way of a message from rank to rank or None, and its number among those."""


@dataclass(slots=True, eq=False)
class StartedMessage:
    """A message that a rank has started."""

    rank: int  # that started it
    number: int  # of the rank's messages
    meeting: Meeting  # where it meets those of other ranks
    # messages of a rank that go one after the other: those of a group, but for single ones from rank to rank, which go
    # in order with those of the same partner only
    lane: Hashable
    batch: list[StartedMessage]  # the messages that it starts with
    done: bool = False  # whether it has happened


@dataclass(slots=True)
class _Actor:
    """A rank on its way: its next message, and how many of those that it must wait for have not happened."""

    part: RankRole
    groups: list[int]  # numbers of the role's groups in the world
    next: int = 0
    owed: int = 0
    later: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    open: dict[int, StartedMessage] = field(default_factory=dict)  # by number: messages that have not happened
    lanes: dict[Hashable, deque[list[StartedMessage]]] = field(default_factory=lambda: defaultdict(deque))
    batches: dict[Hashable, int] = field(default_factory=dict)
    counts: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def ended(self) -> bool:
        """Whether all messages were started, and all that were waited for have happened."""
        return self.next == len(self.part.script.messages) and not self.owed


def rank_message(part: RankRole, number: int) -> RankMessage:
    """A message as a rank of the world gives it."""
    line, place, message = part.script.lines[number], part.script.places[number], part.script.messages[number]
    stream, peer = part.streams[line], NOBODY
    if stream is not None and place >= 0:
        peer = stream[1][part.partner(number) if message.kind in PAIRED else place]
    return RankMessage(part.rank, part.script.run.stage, message, peer, part.shifts[line] == 0)


class Replay:
    """Plays the world, and holds how that ended.

    Attributes:
        actors: by rank, how far it came.
        present: by meeting, the messages that came to it, until all have.
        clash: what met and does not fit; None: all that met fits.
        meeting: where the clash is.
        strangers: a message, and ranks of its group that have no such group.
    """

    def __init__(self, parts: Mapping[int, RankRole]) -> None:
        numbers: dict[Stream | None, int] = {}
        self.actors = {
            rank: _Actor(part, [numbers.setdefault(stream, len(numbers)) for stream in part.streams])
            for rank, part in parts.items()
        }
        self.streams = [stream for stream in numbers if stream is not None]
        homes = {rank: set(actor.groups) for rank, actor in self.actors.items()}
        # by group: its ranks that say nothing in it
        self._without = [
            [rank for rank in ranks if number not in homes[rank]] for number, (_, ranks) in enumerate(self.streams)
        ]
        self.present: dict[Meeting, list[StartedMessage]] = defaultdict(list)
        self.clash: MessageMismatch | None = None
        self.meeting: Meeting | None = None
        self.strangers: tuple[StartedMessage, list[int]] | None = None
        self._ready = deque(parts)

    @property
    def open(self) -> list[StartedMessage]:
        """Messages that never happened."""
        return [one for actor in self.actors.values() for one in actor.open.values()]

    def run(self) -> None:
        """Play until all have ended, two messages do not fit, or nobody can go on."""
        while self._ready and not self._stopped:
            self._go(self.actors[self._ready.popleft()])

    @property
    def _stopped(self) -> bool:
        return self.clash is not None or self.strangers is not None

    def _go(self, actor: _Actor) -> None:
        part, script = actor.part, actor.part.script
        while not actor.owed and actor.next < len(script.messages) and not self._stopped:
            number = actor.next
            message, line = script.messages[number], script.lines[number]
            direction: Way | None = None
            lane: Hashable = line
            key: Hashable = line
            if message.kind in PAIRED:
                place = part.partner(number)
                other = self.streams[actor.groups[line]][1][place]
                ends = (part.rank, other) if message.kind is MessageType.SEND else (other, part.rank)
                direction = (*ends, message.tag)
                key = line, direction
                lane = (line, place) if script.batches[number] == NOBODY else line
            actor.counts[key] += 1
            started = StartedMessage(part.rank, number, (actor.groups[line], direction, actor.counts[key]), lane, [])
            actor.open[number] = started
            if message.waited != NOBODY:
                actor.later[max(message.waited, number + 1)] += 1
            actor.next += 1
            self._start(actor, started)
            actor.owed += actor.later.pop(actor.next, 0)

    def _start(self, actor: _Actor, message: StartedMessage) -> None:
        group, direction, _ = message.meeting
        if self._without[group]:
            strangers = [rank for rank in self._without[group] if direction is None or rank in direction[:2]]
            if strangers:
                self.strangers = message, strangers
                return
        queue, batch = actor.lanes[message.lane], actor.part.script.batches[message.number]
        if queue and batch != NOBODY and actor.batches.get(message.lane) == batch:
            message.batch = queue[-1]
        else:
            queue.append(message.batch)
        actor.batches[message.lane] = batch
        message.batch.append(message)
        if queue[0] is message.batch:
            self._meet(message)

    def _meet(self, message: StartedMessage) -> None:
        present = self.present[message.meeting]
        present.append(message)
        group, direction, _ = message.meeting
        if len(present) < (len(self.streams[group][1]) if direction is None else 2):
            return
        clash = None if self._same_message(present) else self._mismatch(present, direction)
        if clash is not None:
            self.clash, self.meeting = clash, message.meeting
            return
        del self.present[message.meeting]
        for one in present:
            self._happen(one)

    def _same_message(self, messages: Sequence[StartedMessage]) -> bool:
        """Whether all are one message of one role, which fits itself; parts of an all-to-all may still differ."""
        first = messages[0]
        script = self.actors[first.rank].part.script
        return script.messages[first.number].kind is not MessageType.ALL_TO_ALL and all(
            message.number == first.number and self.actors[message.rank].part.script is script for message in messages
        )

    def _mismatch(self, found: Sequence[StartedMessage], direction: Way | None) -> MessageMismatch | None:
        spoken = [rank_message(self.actors[one.rank].part, one.number) for one in sorted(found, key=self._place)]
        return collective_mismatch(spoken) if direction is None else pair_mismatch(*spoken)

    def _place(self, message: StartedMessage) -> int:
        group, direction, _ = message.meeting
        if direction is None:
            return self.streams[group][1].index(message.rank)
        return int(self.actors[message.rank].part.script.messages[message.number].kind is MessageType.RECEIVE)

    def _happen(self, message: StartedMessage) -> None:
        message.done = True
        actor = self.actors[message.rank]
        del actor.open[message.number]
        waited = actor.part.script.messages[message.number].waited
        if waited != NOBODY:
            waited = max(waited, message.number + 1)
            if waited <= actor.next:
                actor.owed -= 1
            else:
                actor.later[waited] -= 1
        if not actor.owed:
            self._ready.append(message.rank)
        queue = actor.lanes[message.lane]
        if queue and queue[0] is message.batch and all(one.done for one in message.batch):
            queue.popleft()
            for one in list(queue[0]) if queue else ():
                self._meet(one)
