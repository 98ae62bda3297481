"""Whether the messages of all ranks of the world meet, as they would on the cluster.

Every rank does what its role was seen to do, with its own groups and partners (``places``). A collective happens once
all ranks of its group have come to it, in the order in which each starts those of the group; a message from rank to
rank once both have. A rank starts a message when all that it waited for before have happened: sends wait for their
receivers, as NCCL's may. So what passes here goes on wherever messages are not lost, however little is buffered. The
world is played rank by rank until all have ended, two messages that meet do not fit, or nobody can go on.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.match.places import PAIRED, RankRole, Stream, role_of, script_of
from galvatron_lite.verify.match.words import MOST, rank_list, where
from galvatron_lite.verify.schema import NOBODY, Check, Message, MessageType, RoleRun, Verdict

OBJECT = "object"  # dtype of what is pickled: its size may differ from rank to rank
_ROOTED = (MessageType.BROADCAST, MessageType.REDUCE, MessageType.GATHER, MessageType.SCATTER)
_SUMMED = (MessageType.ALL_REDUCE, MessageType.REDUCE_SCATTER, MessageType.REDUCE)
FIT = "messages fit"
PROGRESS = "no rank waits for ever"

Text = tuple[str, list[str]]  # A sentence, and more lines
Direction = tuple[int, int, int]  # sender, receiver and tag of a message from rank to rank
Meeting = tuple[int, Direction | None, int]
"""The number of a group, the direction of a message from rank to rank or None, and its number among those."""


@dataclass(slots=True, eq=False)
class StartedMessage:
    """A message that a rank of the world has started."""

    role: RankRole  # of the rank
    number: int  # of the rank's messages
    meeting: Meeting  # where it meets those of other ranks
    # messages of a rank that go one after the other: those of a group, but for single ones from rank to rank, which go
    # in order with those of the same partner only
    lane: Hashable
    batch: list[StartedMessage] = field(default_factory=list)  # the messages that it starts with
    done: bool = False  # whether it has happened

    @property
    def message(self) -> Message:
        """As its role gave it."""
        return self.role.messages[self.number]

    @property
    def exact(self) -> bool:
        """Whether the rank lies where the recorded one does, so that parts of unlike sizes are its own."""
        return self.role.shifts[self.role.script.lines[self.number]] == 0


def _shape(one: StartedMessage) -> Hashable:
    message = one.message
    loose = message.dtype == OBJECT or message.kind in (MessageType.BARRIER, MessageType.ALL_TO_ALL)
    return () if loose else message.shape


def _place_in_model(one: StartedMessage) -> Hashable:
    return one.message.layer, one.message.microbatch


Look = Callable[[StartedMessage], Hashable]
_LOOKS: tuple[tuple[str, Look], ...] = (
    ("are of other kinds", lambda one: one.message.kind),
    ("have other dtypes", lambda one: one.message.dtype),
    ("have other shapes", _shape),
    ("have other roots", lambda one: one.role.peer(one.number) if one.message.kind in _ROOTED else NOBODY),
    ("sum in other ways", lambda one: one.message.operator if one.message.kind in _SUMMED else ""),
)
"""How messages of one collective may differ, in words, and by what that is seen."""

Mismatch = tuple[str, list[StartedMessage], StartedMessage]
"""How messages that meet differ, in words, those of the fewest, and one of those of the most."""


def _collective_mismatch(group: Sequence[StartedMessage]) -> Mismatch | None:
    """Why the messages of all ranks of a group, in the group's order, are not one collective; None: they are."""
    for what, look in _LOOKS:
        if mismatch := _differing(what, look, group):
            return mismatch
    if group[0].message.kind is MessageType.ALL_TO_ALL and (mismatch := _parts_mismatch(group)):
        return mismatch
    stages = {one.role.script.run.stage for one in group}
    if len(stages) > 1 or not all(one.message.layer for one in group):
        return None
    return _differing("are of other layers or micro-batches", _place_in_model, group)  # ranks come in other orders


def _differing(what: str, look: Look, group: Sequence[StartedMessage]) -> Mismatch | None:
    seen = [look(one) for one in group]
    usual = Counter(seen).most_common(1)[0][0]
    odd = [one for one, value in zip(group, seen, strict=True) if value != usual]
    return (what, odd, group[seen.index(usual)]) if odd else None


def _parts_mismatch(group: Sequence[StartedMessage]) -> Mismatch | None:
    """Of an all-to-all: what one rank has for another is what that one waits for."""
    sent = [_parts(one.message.sent, one.message, len(group)) for one in group]
    taken = [_parts(one.message.taken, one.message, len(group)) for one in group]
    for i, sender in enumerate(group):
        for j, receiver in enumerate(group):
            exact = (sender.exact or len(set(sent[i])) == 1) and (receiver.exact or len(set(taken[j])) == 1)
            if exact and sent[i][j] != taken[j][i]:
                return "cut what they exchange in other ways", [sender], receiver
    return None


def _parts(parts: tuple[int, ...], message: Message, size: int) -> tuple[int, ...]:
    return parts or (prod(message.shape) // size,) * size


def _pair_mismatch(sent: StartedMessage, taken: StartedMessage) -> Mismatch | None:
    """Why what one rank sends is not what another receives; None: it is."""
    one, other = sent.message, taken.message
    if one.dtype != other.dtype:
        return "have other dtypes", [sent], taken
    if one.shape != other.shape:
        return "have other shapes", [sent], taken
    if NOBODY not in (one.microbatch, other.used) and one.microbatch != other.used:
        return "are of other micro-batches", [sent], taken
    return None


@dataclass(slots=True)
class _Actor:
    """A rank on its way: its next message, and how many of those that it must wait for have not happened."""

    role: RankRole
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
        return self.next == len(self.role.messages) and not self.owed


class Replay:
    """Plays the world, and holds how that ended.

    Attributes:
        actors: by rank, how far it came.
        misfit: what met and does not fit, or whose group a rank does not have, in words; None: all that met fits.
    """

    def __init__(self, roles: Mapping[int, RankRole]) -> None:
        numbers: dict[Stream | None, int] = {}
        self.actors = {
            rank: _Actor(role, [numbers.setdefault(stream, len(numbers)) for stream in role.streams])
            for rank, role in roles.items()
        }
        self._members = [stream[1] for stream in numbers if stream is not None]
        # by group: its ranks that have no such group
        self._strangers = [
            [rank for rank in ranks if number not in self.actors[rank].groups]
            for number, ranks in enumerate(self._members)
        ]
        self._present: dict[Meeting, list[StartedMessage]] = defaultdict(list)
        self.misfit: Text | None = None
        self._ready = deque(roles)

    @property
    def open(self) -> list[StartedMessage]:
        """Messages that never happened."""
        return [one for actor in self.actors.values() for one in actor.open.values()]

    def run(self) -> None:
        """Play until all have ended, two messages do not fit, or nobody can go on."""
        while self._ready and self.misfit is None:
            self._go(self.actors[self._ready.popleft()])

    def _go(self, actor: _Actor) -> None:
        role, script = actor.role, actor.role.script
        while not actor.owed and actor.next < len(role.messages) and self.misfit is None:
            number = actor.next
            message, line = role.messages[number], script.lines[number]
            direction: Direction | None = None
            lane: Hashable = line
            if message.kind in PAIRED:
                other = role.peer(number)
                ends = (role.rank, other) if message.kind is MessageType.SEND else (other, role.rank)
                direction = (*ends, message.tag)
                lane = (line, other) if script.batches[number] == NOBODY else line
            actor.counts[line, direction] += 1
            meeting = (actor.groups[line], direction, actor.counts[line, direction])
            actor.open[number] = started = StartedMessage(role, number, meeting, lane)
            if message.waited != NOBODY:
                actor.later[max(message.waited, number + 1)] += 1
            actor.next += 1
            self._start(actor, started)
            actor.owed += actor.later.pop(actor.next, 0)

    def _start(self, actor: _Actor, message: StartedMessage) -> None:
        group, direction, _ = message.meeting
        if strangers := [rank for rank in self._strangers[group] if direction is None or rank in direction[:2]]:
            self.misfit = self._missing_group(message, strangers)
            return
        queue, batch = actor.lanes[message.lane], actor.role.script.batches[message.number]
        if queue and batch != NOBODY and actor.batches.get(message.lane) == batch:
            message.batch = queue[-1]
        else:
            queue.append(message.batch)
        actor.batches[message.lane] = batch
        message.batch.append(message)
        if queue[0] is message.batch:
            self._meet(message)

    def _meet(self, message: StartedMessage) -> None:
        present = self._present[message.meeting]
        present.append(message)
        if len(present) < len(self._wanted(message)):
            return
        if not _same_message(present) and (mismatch := self._mismatch(present)):
            self.misfit = _mismatch_text(mismatch, message)
            return
        del self._present[message.meeting]
        for one in present:
            self._happen(one)

    def _wanted(self, message: StartedMessage) -> tuple[int, ...]:
        """The ranks that a message needs, in the order of its group; the sender before the receiver."""
        group, direction, _ = message.meeting
        return self._members[group] if direction is None else direction[:2]

    def _mismatch(self, present: Sequence[StartedMessage]) -> Mismatch | None:
        wanted = self._wanted(present[0])
        if present[0].meeting[1] is None:
            return _collective_mismatch(sorted(present, key=lambda one: wanted.index(one.role.rank)))
        sent, taken = sorted(present, key=lambda one: one.message.kind is MessageType.RECEIVE)
        return _pair_mismatch(sent, taken)

    def _happen(self, message: StartedMessage) -> None:
        message.done = True
        actor = self.actors[message.role.rank]
        del actor.open[message.number]
        waited = message.message.waited
        if waited != NOBODY:
            waited = max(waited, message.number + 1)
            if waited <= actor.next:
                actor.owed -= 1
            else:
                actor.later[waited] -= 1
        if not actor.owed:
            self._ready.append(message.role.rank)
        queue = actor.lanes[message.lane]
        if queue and queue[0] is message.batch and all(one.done for one in message.batch):
            queue.popleft()
            for one in list(queue[0]) if queue else ():
                self._meet(one)

    def _missing_group(self, message: StartedMessage, strangers: Sequence[int]) -> Text:
        """A message of a group that some of its ranks do not have."""
        role, (purpose, ranks) = message.role, message.role.stream(message.number)
        use = f"{'do' if len(strangers) > 1 else 'does'} not use"
        lines = [_described(role, message.number)]
        for rank in strangers[:MOST]:
            groups = [one[1] for one in self.actors[rank].role.streams if one is not None and one[0] == purpose]
            has = "; ".join(map(rank_list, groups)) or "none"
            lines.append(f"rank {rank}'s groups for {purpose}: {has}")
        sentence = f"Rank {role.rank} uses the group of {rank_list(ranks)} ({purpose}), which {rank_list(strangers)}"
        return f"{sentence} {use}.", lines

    def deadlock(self) -> Text:
        """Ranks that wait for ever: for one that has ended, or in a circle."""
        waiting = self._waiting()
        for rank, (message, missing) in waiting.items():
            if gone := [one for one in missing if self.actors[one].ended]:
                ends = f"{rank_list(gone)} {'end' if len(gone) > 1 else 'ends'} without it"
                last = [_last_announced(self.actors[one].role, message) for one in gone[:MOST]]
                return f"Rank {rank} waits for ever: {ends}.", [_described(message.role, message.number), *last]
        circle = _circle(waiting)
        lines = [
            f"{_described(waiting[one][0].role, waiting[one][0].number)}, waits for {rank_list(waiting[one][1])}"
            for one in circle
        ]
        return f"Ranks wait for one another for ever: {' → '.join(map(str, (*circle, circle[0])))}.", lines

    def _waiting(self) -> Waiting:
        waiting: Waiting = {}
        for rank, actor in self.actors.items():
            held = [one for one in actor.open.values() if NOBODY != one.message.waited <= actor.next]
            for head in (head for message in held for head in self._heads(message)):
                if missing := self._missing(head):
                    waiting[rank] = head, missing
                    break
        return waiting

    def _heads(self, message: StartedMessage) -> Iterator[StartedMessage]:
        """What a message waits for on its own rank, where others are before it; else itself."""
        for queue in self.actors[message.role.rank].lanes.values():
            if any(message in batch for batch in queue):
                yield from (one for one in queue[0] if not one.done)
                return
        yield message

    def _missing(self, message: StartedMessage) -> list[int]:
        there = {one.role.rank for one in self._present[message.meeting]}
        return [rank for rank in self._wanted(message) if rank not in there]

    def unmatched(self) -> Text:
        """Messages that nobody waits for, and that never arrive."""
        left = self.open
        kind, missing = left[0].message.kind, self._missing(left[0])
        verbs = {MessageType.SEND: "never receives it", MessageType.RECEIVE: "never sends it"}
        partners = rank_list(missing) if missing else "its partners"
        more = f" ({len(left)} messages in all)" * (len(left) > 1)
        sentence = f"Rank {left[0].role.rank} has a {kind} left at the end of the step: {partners} "
        lines = [_described(one.role, one.number) for one in left[:MOST]]
        return f"{sentence}{verbs.get(kind, 'never gives it')}{more}.", lines


Waiting = dict[int, tuple[StartedMessage, list[int]]]
"""By rank: a message that it waits for, and the ranks that do not come to it."""


def _same_message(messages: Sequence[StartedMessage]) -> bool:
    """Whether all are one message of one role, which fits itself; parts of an all-to-all may still differ."""
    first = messages[0]
    return first.message.kind is not MessageType.ALL_TO_ALL and all(
        one.number == first.number and one.role.script is first.role.script for one in messages
    )


def _circle(waiting: Waiting) -> list[int]:
    path: list[int] = []
    rank = next(iter(waiting))
    while rank not in path:
        path.append(rank)
        rank = next(one for one in waiting[rank][1] if one in waiting)
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    return [*circle[first:], *circle[:first]]


def _mismatch_text(mismatch: Mismatch, last: StartedMessage) -> Text:
    """Messages that met and do not fit; ``last`` was the last of them to come."""
    what, odd, other = mismatch
    _, direction, count = last.meeting
    purpose, ranks = last.role.stream(last.number)
    names = rank_list([one.role.rank for one in odd])
    common = (
        f"What {names} and rank {other.role.rank} give one another" if direction else f"What {names} and others give"
    )
    lines = [_described(one.role, one.number) for one in odd[:MOST]]
    return (
        f"{common} as message {count} of {rank_list(ranks)} ({purpose}) {what}.",
        [f"expected: {_described(other.role, other.number)}", *lines],
    )


def _described(role: RankRole, number: int) -> str:
    """A message of a rank: ``rank 2 (stage 0, forward): all-reduce of (64,) float32 over ranks 0, 2 (gradients)``."""
    message, (purpose, ranks) = role.messages[number], role.stream(number)
    of = "" if message.kind is MessageType.BARRIER else f" of {message.shape} {message.dtype}"
    if message.kind in PAIRED:
        direction = "to" if message.kind is MessageType.SEND else "from"
        ends = f" {direction} rank {role.peer(number)} ({purpose})"
    else:
        ends = f" over {rank_list(ranks)}{f' ({purpose})' if purpose else ''}"
    parts = f", parts {message.sent}" if message.sent else ""
    return f"rank {role.rank} ({where(role.script.run.stage, message)}): {message.kind}{of}{ends}{parts}"


def _last_announced(role: RankRole, message: StartedMessage) -> str:
    """The last message of a rank in the group of a message that it does not come to."""
    stream = message.role.stream(message.number)
    numbers = [number for number, line in enumerate(role.script.lines) if role.streams[line] == stream]
    if not numbers:
        return f"rank {role.rank} gives nothing there"
    count = f"{len(numbers)} message{'s' if len(numbers) > 1 else ''}"
    return f"rank {role.rank} gives {count} there, the last: {_described(role, numbers[-1])}"


def match(runs: Sequence[RoleRun], plan: Plan) -> list[Check]:
    """Replay the messages of all ranks from the runs of one rank of each role.

    As in NCCL, messages of one group happen one after the other on each rank, those from rank to rank that start alone
    in order with the ones of the same partner.
    """
    scripts = [script_of(run) for run in runs]
    roles = {rank: role_of(script, rank, plan.stage_devices) for script in scripts for rank in script.run.ranks}
    if unknown := [rank for rank in range(plan.devices) if rank not in roles]:
        sentence = f"Of {rank_list(unknown)} it is not known what they do."
        return [Check(name, Verdict.SKIPPED, sentence) for name in (FIT, PROGRESS)]
    lost = next((role for role in roles.values() if None in role.streams), None)
    if lost is not None:
        return _misfit(_lost_text(lost))
    replay = Replay(roles)
    replay.run()
    if replay.misfit is not None:
        return _misfit(replay.misfit)
    if not all(actor.ended for actor in replay.actors.values()):
        fit = Check(FIT, Verdict.PASSED, "What comes to its partners fits; not all does.")
        return [fit, _failed(PROGRESS, replay.deadlock())]
    count = sum(message.times for role in roles.values() for message in role.messages)
    groups = len({stream for role in roles.values() for stream in role.streams})
    fit = Check(FIT, Verdict.PASSED, f"All {count} messages of {len(roles)} ranks in {groups} groups fit.")
    if replay.open:
        return [fit, _failed(PROGRESS, replay.unmatched())]
    return [fit, Check(PROGRESS, Verdict.PASSED, f"All {len(roles)} ranks come to the end of the step.")]


def _failed(name: str, text: Text) -> Check:
    return Check(name, Verdict.FAILED, text[0], tuple(text[1]))


def _misfit(text: Text) -> list[Check]:
    return [_failed(FIT, text), Check(PROGRESS, Verdict.SKIPPED, "Not known: the messages do not fit.")]


def _lost_text(role: RankRole) -> Text:
    purpose, ranks = role.script.groups[role.streams.index(None)]
    run = role.script.run
    group = f"Rank {run.rank} uses the group of {rank_list(ranks)} ({purpose})"
    sentence = f"{group}; rank {role.rank}, which is to do the same in its own place, has no such group."
    return sentence, [f"role: {run.role}"]
