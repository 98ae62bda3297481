"""Replays the messages of all ranks, as the cluster would carry them out.

Every rank sends what its role was seen to send, over its own groups and to its own partners (``places``). A collective
completes once all ranks of its group have started it, in the order in which each starts those of the group; a message
between two ranks completes once both have. A rank starts a message when all that it waited for before are complete:
sends wait for their receivers, as NCCL's may. So what passes here also passes with buffers of any size. The replay ends
when all ranks have ended, two messages that meet do not fit, or no rank can go on.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.match.places import PAIRED, Group, RankMessages, rank_messages, role_messages
from galvatron_lite.verify.match.words import MOST, rank_list, where
from galvatron_lite.verify.schema import NOBODY, Check, Message, MessageType, RoleRun, Verdict

OBJECT = "object"  # dtype of pickled values, whose size may differ from rank to rank
_ROOTED = (MessageType.BROADCAST, MessageType.REDUCE, MessageType.GATHER, MessageType.SCATTER)
_SUMMED = (MessageType.ALL_REDUCE, MessageType.REDUCE_SCATTER, MessageType.REDUCE)
FIT = "messages fit"
PROGRESS = "no rank waits for ever"

Text = tuple[str, list[str]]  # a sentence, and further lines
Direction = tuple[int, int, int]  # sender, receiver and tag of a message between two ranks
MessageKey = tuple[int, Direction | None, int]
"""Equal on all ranks of a message: number of the group, direction (None: a collective), and count among those."""


@dataclass(slots=True, eq=False)
class StartedMessage:
    """A message that a rank has started."""

    owner: RankMessages
    number: int  # among the owner's messages
    key: MessageKey
    # messages with equal queues complete in order on a rank: those of a group, but single messages between two ranks
    # only with those of the same partner
    queue: Hashable
    batch: list[StartedMessage] = field(default_factory=list)  # messages that start together
    complete: bool = False

    @property
    def message(self) -> Message:
        """As the recorded rank gave it."""
        return self.owner.messages[self.number]

    @property
    def has_exact_parts(self) -> bool:
        """Whether the owner is placed in its group as the recorded rank, so that uneven parts apply to it."""
        return self.owner.shifts[self.owner.role.group_indices[self.number]] == 0


def _shape(started: StartedMessage) -> Hashable:
    message = started.message
    may_differ = message.dtype == OBJECT or message.kind in (MessageType.BARRIER, MessageType.ALL_TO_ALL)
    return () if may_differ else message.shape


def _root(started: StartedMessage) -> Hashable:
    return started.owner.peer_of(started.number) if started.message.kind in _ROOTED else NOBODY


Property = Callable[[StartedMessage], Hashable]
_PROPERTIES: tuple[tuple[str, Property], ...] = (
    ("are of other kinds", lambda started: started.message.kind),
    ("have other dtypes", lambda started: started.message.dtype),
    ("have other shapes", _shape),
    ("have other roots", _root),
    ("sum in other ways", lambda started: started.message.operator if started.message.kind in _SUMMED else ""),
)
"""Properties that all messages of a collective share, and how a difference is described."""

Mismatch = tuple[str, list[StartedMessage], StartedMessage]
"""Description of a difference, the messages that differ from most, and one of those that most agree with."""


def _collective_mismatch(started: Sequence[StartedMessage]) -> Mismatch | None:
    """Return how the messages of a group, in its order of ranks, differ; None if they are one collective."""
    for difference, property_of in _PROPERTIES:
        if mismatch := _difference(difference, property_of, started):
            return mismatch
    if started[0].message.kind is MessageType.ALL_TO_ALL and (mismatch := _parts_mismatch(started)):
        return mismatch
    stages = {each.owner.role.run.stage for each in started}
    if len(stages) > 1 or not all(each.message.layer for each in started):
        return None  # stages reach a group's messages in other layers
    return _difference(
        "are of other layers or micro-batches", lambda each: (each.message.layer, each.message.microbatch), started
    )


def _difference(difference: str, property_of: Property, started: Sequence[StartedMessage]) -> Mismatch | None:
    values = [property_of(each) for each in started]
    usual = Counter(values).most_common(1)[0][0]
    outliers = [each for each, value in zip(started, values, strict=True) if value != usual]
    return (difference, outliers, started[values.index(usual)]) if outliers else None


def _parts_mismatch(started: Sequence[StartedMessage]) -> Mismatch | None:
    """Return two ranks of an all-to-all of which one sends another size than the other receives."""
    sent = [_parts(each.message.sent, each.message, len(started)) for each in started]
    taken = [_parts(each.message.taken, each.message, len(started)) for each in started]
    for i, sender in enumerate(started):
        for j, receiver in enumerate(started):
            sender_known = sender.has_exact_parts or len(set(sent[i])) == 1
            receiver_known = receiver.has_exact_parts or len(set(taken[j])) == 1
            if sender_known and receiver_known and sent[i][j] != taken[j][i]:
                return "cut what they exchange in other ways", [sender], receiver
    return None


def _parts(parts: tuple[int, ...], message: Message, size: int) -> tuple[int, ...]:
    return parts or (prod(message.shape) // size,) * size


def _pair_mismatch(sent: StartedMessage, taken: StartedMessage) -> Mismatch | None:
    """Return how what a rank sends differs from what its partner receives; None if it does not."""
    source, target = sent.message, taken.message
    if source.dtype != target.dtype:
        return "have other dtypes", [sent], taken
    if source.shape != target.shape:
        return "have other shapes", [sent], taken
    if NOBODY not in (source.microbatch, target.used) and source.microbatch != target.used:
        return "are of other micro-batches", [sent], taken
    return None


@dataclass(slots=True)
class _RankProgress:
    """How far a rank has come."""

    owner: RankMessages
    groups: list[int]  # by group of the owner: its number in the world
    next: int = 0  # message to start
    awaited: int = 0  # incomplete messages that ``next`` waits for
    # by message: how many incomplete ones it will wait for
    awaited_later: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    incomplete: dict[int, StartedMessage] = field(default_factory=dict)  # by number
    queues: dict[Hashable, deque[list[StartedMessage]]] = field(default_factory=lambda: defaultdict(deque))
    last_batches: dict[Hashable, int] = field(default_factory=dict)  # by queue
    counts: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def has_ended(self) -> bool:
        """Whether all messages were started, and all that the rank waits for are complete."""
        return self.next == len(self.owner.messages) and not self.awaited


class Replay:
    """Carries out the messages of all ranks.

    Attributes:
        ranks: by rank, its progress.
        mismatch: why messages that met do not fit, or a rank lacks a group; None: all that met fit.
    """

    def __init__(self, owners: Mapping[int, RankMessages]) -> None:
        numbers: dict[Group | None, int] = {}
        self.ranks = {
            rank: _RankProgress(owner, [numbers.setdefault(group, len(numbers)) for group in owner.groups])
            for rank, owner in owners.items()
        }
        self._members = [group[1] for group in numbers if group is not None]
        # by group: those of its ranks that do not have it
        self._lacking = [
            [rank for rank in ranks if number not in self.ranks[rank].groups]
            for number, ranks in enumerate(self._members)
        ]
        self._present: dict[MessageKey, list[StartedMessage]] = defaultdict(list)
        self.mismatch: Text | None = None
        self._ready = deque(owners)

    @property
    def incomplete(self) -> list[StartedMessage]:
        """Messages that never completed."""
        return [started for progress in self.ranks.values() for started in progress.incomplete.values()]

    def run(self) -> None:
        """Run until all ranks have ended, two messages do not fit, or no rank can go on."""
        while self._ready and self.mismatch is None:
            self._advance(self.ranks[self._ready.popleft()])

    def _advance(self, progress: _RankProgress) -> None:
        owner, role = progress.owner, progress.owner.role
        while not progress.awaited and progress.next < len(owner.messages) and self.mismatch is None:
            number = progress.next
            message, group = owner.messages[number], role.group_indices[number]
            direction: Direction | None = None
            queue: Hashable = group
            if message.kind in PAIRED:
                peer = owner.peer_of(number)
                ends = (owner.rank, peer) if message.kind is MessageType.SEND else (peer, owner.rank)
                direction = (*ends, message.tag)
                queue = (group, peer) if role.batches[number] == NOBODY else group
            progress.counts[group, direction] += 1
            key = (progress.groups[group], direction, progress.counts[group, direction])
            progress.incomplete[number] = started = StartedMessage(owner, number, key, queue)
            if message.waited != NOBODY:
                progress.awaited_later[max(message.waited, number + 1)] += 1
            progress.next += 1
            self._start(progress, started)
            progress.awaited += progress.awaited_later.pop(progress.next, 0)

    def _start(self, progress: _RankProgress, started: StartedMessage) -> None:
        group, direction, _ = started.key
        if lacking := [rank for rank in self._lacking[group] if direction is None or rank in direction[:2]]:
            self.mismatch = self._missing_group_text(started, lacking)
            return
        queue, batch = progress.queues[started.queue], progress.owner.role.batches[started.number]
        if queue and batch != NOBODY and progress.last_batches.get(started.queue) == batch:
            started.batch = queue[-1]
        else:
            queue.append(started.batch)
        progress.last_batches[started.queue] = batch
        started.batch.append(started)
        if queue[0] is started.batch:
            self._arrive(started)

    def _arrive(self, started: StartedMessage) -> None:
        """Let a message meet those of its partners; complete them once all are present."""
        present = self._present[started.key]
        present.append(started)
        if len(present) < len(self._partners(started)):
            return
        if not _are_same_message(present) and (mismatch := self._mismatch_of(present)):
            self.mismatch = _mismatch_text(mismatch, started)
            return
        del self._present[started.key]
        for each in present:
            self._complete(each)

    def _partners(self, started: StartedMessage) -> tuple[int, ...]:
        """Return the ranks of a message, in the order of its group; the sender before the receiver."""
        group, direction, _ = started.key
        return self._members[group] if direction is None else direction[:2]

    def _mismatch_of(self, present: Sequence[StartedMessage]) -> Mismatch | None:
        partners = self._partners(present[0])
        if present[0].key[1] is None:
            return _collective_mismatch(sorted(present, key=lambda started: partners.index(started.owner.rank)))
        sent, taken = sorted(present, key=lambda started: started.message.kind is MessageType.RECEIVE)
        return _pair_mismatch(sent, taken)

    def _complete(self, started: StartedMessage) -> None:
        started.complete = True
        progress = self.ranks[started.owner.rank]
        del progress.incomplete[started.number]
        waited = started.message.waited
        if waited != NOBODY:
            waited = max(waited, started.number + 1)
            if waited <= progress.next:
                progress.awaited -= 1
            else:
                progress.awaited_later[waited] -= 1
        if not progress.awaited:
            self._ready.append(started.owner.rank)
        queue = progress.queues[started.queue]
        if queue and queue[0] is started.batch and all(each.complete for each in started.batch):
            queue.popleft()
            for following in list(queue[0]) if queue else ():
                self._arrive(following)

    def _missing_group_text(self, started: StartedMessage, lacking: Sequence[int]) -> Text:
        owner, (purpose, ranks) = started.owner, started.owner.group_of(started.number)
        verb = f"{'do' if len(lacking) > 1 else 'does'} not use"
        lines = [_described(owner, started.number)]
        for rank in lacking[:MOST]:
            groups = [group[1] for group in self.ranks[rank].owner.groups if group is not None and group[0] == purpose]
            used = "; ".join(map(rank_list, groups)) or "none"
            lines.append(f"rank {rank}'s groups for {purpose}: {used}")
        group = f"Rank {owner.rank} uses the group of {rank_list(ranks)} ({purpose})"
        return f"{group}, which {rank_list(lacking)} {verb}.", lines

    def deadlock(self) -> Text:
        """Describe why ranks wait for ever: for a rank that has ended, or in a circle."""
        waiting = self._waiting()
        for rank, (started, missing) in waiting.items():
            if ended := [partner for partner in missing if self.ranks[partner].has_ended]:
                ends = f"{rank_list(ended)} {'end' if len(ended) > 1 else 'ends'} without it"
                last = [_last_in_group(self.ranks[partner].owner, started) for partner in ended[:MOST]]
                return f"Rank {rank} waits for ever: {ends}.", [_described(started.owner, started.number), *last]
        circle = _circle(waiting)
        lines = []
        for rank in circle:
            started, missing = waiting[rank]
            lines.append(f"{_described(started.owner, started.number)}, waits for {rank_list(missing)}")
        return f"Ranks wait for one another for ever: {' → '.join(map(str, (*circle, circle[0])))}.", lines

    def _waiting(self) -> Waiting:
        waiting: Waiting = {}
        for rank, progress in self.ranks.items():
            awaited = [each for each in progress.incomplete.values() if NOBODY != each.message.waited <= progress.next]
            for head in (head for started in awaited for head in self._heads(started)):
                if missing := self._missing(head):
                    waiting[rank] = head, missing
                    break
        return waiting

    def _heads(self, started: StartedMessage) -> Iterator[StartedMessage]:
        """Yield the messages at the head of the queue that a message is in; itself if it is in none."""
        for queue in self.ranks[started.owner.rank].queues.values():
            if any(started in batch for batch in queue):
                yield from (each for each in queue[0] if not each.complete)
                return
        yield started

    def _missing(self, started: StartedMessage) -> list[int]:
        present = {each.owner.rank for each in self._present[started.key]}
        return [rank for rank in self._partners(started) if rank not in present]

    def unmatched(self) -> Text:
        """Describe messages that no rank waits for, and that never complete."""
        left = self.incomplete
        kind, missing = left[0].message.kind, self._missing(left[0])
        verbs = {MessageType.SEND: "never receives it", MessageType.RECEIVE: "never sends it"}
        partners = rank_list(missing) if missing else "its partners"
        more = f" ({len(left)} messages in all)" * (len(left) > 1)
        sentence = f"Rank {left[0].owner.rank} has a {kind} left at the end of the step: {partners} "
        lines = [_described(started.owner, started.number) for started in left[:MOST]]
        return f"{sentence}{verbs.get(kind, 'never gives it')}{more}.", lines


Waiting = dict[int, tuple[StartedMessage, list[int]]]
"""By rank: a message that it waits for, and the ranks that have not started it."""


def _are_same_message(present: Sequence[StartedMessage]) -> bool:
    """Whether all are one message of one role, which fits itself; parts of an all-to-all may still differ."""
    first = present[0]
    return first.message.kind is not MessageType.ALL_TO_ALL and all(
        started.number == first.number and started.owner.role is first.owner.role for started in present
    )


def _circle(waiting: Waiting) -> list[int]:
    path: list[int] = []
    rank = next(iter(waiting))
    while rank not in path:
        path.append(rank)
        rank = next(partner for partner in waiting[rank][1] if partner in waiting)
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    return [*circle[first:], *circle[:first]]


def _mismatch_text(mismatch: Mismatch, last: StartedMessage) -> Text:
    """Describe messages that met and do not fit; ``last`` is the last that arrived."""
    difference, outliers, usual = mismatch
    _, direction, count = last.key
    purpose, ranks = last.owner.group_of(last.number)
    names = rank_list([started.owner.rank for started in outliers])
    messages = (
        f"What {names} and rank {usual.owner.rank} give one another" if direction else f"What {names} and others give"
    )
    lines = [_described(started.owner, started.number) for started in outliers[:MOST]]
    return (
        f"{messages} as message {count} of {rank_list(ranks)} ({purpose}) {difference}.",
        [f"expected: {_described(usual.owner, usual.number)}", *lines],
    )


def _described(owner: RankMessages, number: int) -> str:
    """``rank 2 (stage 0, forward): all-reduce of (64,) float32 over ranks 0, 2 (gradients)``."""
    message, (purpose, ranks) = owner.messages[number], owner.group_of(number)
    tensor = "" if message.kind is MessageType.BARRIER else f" of {message.shape} {message.dtype}"
    if message.kind in PAIRED:
        direction = "to" if message.kind is MessageType.SEND else "from"
        ends = f" {direction} rank {owner.peer_of(number)} ({purpose})"
    else:
        ends = f" over {rank_list(ranks)}{f' ({purpose})' if purpose else ''}"
    parts = f", parts {message.sent}" if message.sent else ""
    return f"rank {owner.rank} ({where(owner.role.run.stage, message)}): {message.kind}{tensor}{ends}{parts}"


def _last_in_group(owner: RankMessages, started: StartedMessage) -> str:
    """Describe the last message of a rank in the group of a message that it never starts."""
    group = started.owner.group_of(started.number)
    numbers = [number for number, index in enumerate(owner.role.group_indices) if owner.groups[index] == group]
    if not numbers:
        return f"rank {owner.rank} gives nothing there"
    count = f"{len(numbers)} message{'s' if len(numbers) > 1 else ''}"
    return f"rank {owner.rank} gives {count} there, the last: {_described(owner, numbers[-1])}"


def match(runs: Sequence[RoleRun], plan: Plan) -> list[Check]:
    """Replay the messages of all ranks from the runs of one rank of each role.

    As in NCCL, messages of a group complete in order on each rank; messages between two ranks that start alone, in
    order with those of the same partner.
    """
    roles = [role_messages(run) for run in runs]
    owners = {rank: rank_messages(role, rank, plan.stage_devices) for role in roles for rank in role.run.ranks}
    if unknown := [rank for rank in range(plan.devices) if rank not in owners]:
        sentence = f"No run stands for {rank_list(unknown)}, so their messages are not known."
        return [Check(name, Verdict.SKIPPED, sentence) for name in (FIT, PROGRESS)]
    lacking = next((owner for owner in owners.values() if None in owner.groups), None)
    if lacking is not None:
        return _mismatched(_no_such_group_text(lacking))
    replay = Replay(owners)
    replay.run()
    if replay.mismatch is not None:
        return _mismatched(replay.mismatch)
    if not all(progress.has_ended for progress in replay.ranks.values()):
        fit = Check(FIT, Verdict.PASSED, "Messages that meet fit, but ranks wait for ever before all have met.")
        return [fit, _failed(PROGRESS, replay.deadlock())]
    count = sum(message.times for owner in owners.values() for message in owner.messages)
    groups = len({group for owner in owners.values() for group in owner.groups})
    fit = Check(FIT, Verdict.PASSED, f"All {count} messages of {len(owners)} ranks in {groups} groups fit.")
    if replay.incomplete:
        return [fit, _failed(PROGRESS, replay.unmatched())]
    return [fit, Check(PROGRESS, Verdict.PASSED, f"All {len(owners)} ranks come to the end of the step.")]


def _failed(name: str, text: Text) -> Check:
    return Check(name, Verdict.FAILED, text[0], tuple(text[1]))


def _mismatched(text: Text) -> list[Check]:
    return [_failed(FIT, text), Check(PROGRESS, Verdict.SKIPPED, "Not known: the messages do not fit.")]


def _no_such_group_text(lacking: RankMessages) -> Text:
    run = lacking.role.run
    purpose, ranks = lacking.role.groups[lacking.groups.index(None)]
    group = f"Rank {run.rank} uses the group of {rank_list(ranks)} ({purpose})"
    sentence = f"{group}; rank {lacking.rank}, which is to do the same in its own place, has no such group."
    return sentence, [f"role: {run.role}"]
