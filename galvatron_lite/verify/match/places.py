"""What every rank of the world sends, from what one rank of each role does.

A rank does what the recorded rank of its role does, with the groups and partners that belong to its own place. Ranks of
a stage are row-major over the degrees of a strategy (``parallelism.strategy.Strategy``), so the groups that differ in
some of them are all alike: a smallest rank, and the same steps from it. A group over several stages keeps its place in
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.verify.schema import NOBODY, Message, MessageType, RoleRun

PAIRED = (MessageType.SEND, MessageType.RECEIVE)
PIPELINE = "pipeline"  # what the purposes of groups between stages begin with

Ranks = tuple[int, ...]
Stream = tuple[str, Ranks]  # A process group: what it is for, and its ranks


@dataclass(frozen=True, slots=True)
class Script:
    """What one role does."""

    run: RoleRun  # what was recorded
    groups: tuple[Stream, ...]  # the recorded rank's groups, each once
    lines: tuple[int, ...]  # by message: number of its group
    places: tuple[int, ...]  # by message: its partner's or root's place in the group; -1 where it has none
    # by message from rank to rank: number of the batch that it starts with; -1 where it starts alone
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankRole:
    """What one rank of the world does."""

    rank: int  # which
    script: Script  # of its role
    # its own groups, in the order of the script's; None: no group of its own is like that one
    streams: tuple[Stream | None, ...]
    shifts: tuple[int, ...]  # by group: this rank's place in it less the recorded rank's in its own

    @property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which they start, as the recorded rank gave them."""
        return self.script.run.messages

    def stream(self, number: int) -> Stream:
        """The group of a message."""
        stream = self.streams[self.script.lines[number]]
        assert stream is not None
        return stream

    def peer(self, number: int) -> int:
        """The rank that a message goes to or comes from, or the root of a collective; ``NOBODY``: there is none."""
        place, ranks = self.script.places[number], self.stream(number)[1]
        if place < 0:
            return NOBODY
        shift = self.shifts[self.script.lines[number]] if self.messages[number].kind in PAIRED else 0
        return ranks[(place + shift) % len(ranks)]


def script_of(run: RoleRun) -> Script:
    """What a role does."""
    groups: dict[Stream, int] = {}
    lines = [groups.setdefault((message.purpose, message.ranks), len(groups)) for message in run.messages]
    places = [message.ranks.index(message.peer) if message.peer in message.ranks else -1 for message in run.messages]
    return Script(run, tuple(groups), tuple(lines), tuple(places), _batches(run.messages))


def _batches(messages: Sequence[Message]) -> tuple[int, ...]:
    """Messages from rank to rank that start one after the other on a group, none waited for before the last, are a
    batch (``batch_isend_irecv``), but in a pipeline, which starts each alone."""
    batches: list[int] = []
    first, awaited, group = NOBODY, 0, None
    for number, message in enumerate(messages):
        batched = message.kind in PAIRED and not message.purpose.startswith(PIPELINE)
        stream = (message.purpose, message.ranks) if batched else None
        if stream is None:
            first = NOBODY
        elif first == NOBODY or stream != group or awaited <= number:
            first, awaited = number, len(messages)
        group = stream
        awaited = awaited if message.waited == NOBODY else min(awaited, message.waited)
        batches.append(first)
    return tuple(batches)


def role_of(script: Script, rank: int, width: int) -> RankRole:
    """What one rank of a role does, in stages of so many ranks."""
    source = script.run.rank
    streams: list[Stream | None] = []
    shifts: list[int] = []
    for purpose, ranks in script.groups:
        moved = moved_group(ranks, source, rank, width)
        streams.append(None if moved is None else (purpose, moved))
        shifts.append(0 if moved is None or source not in ranks else moved.index(rank) - ranks.index(source))
    return RankRole(rank, script, tuple(streams), tuple(shifts))


def moved_group(ranks: Ranks, source: int, target: int, width: int) -> Ranks | None:
    """The group that is to rank ``target`` what ``ranks`` is to rank ``source``; None where there is none."""
    if source == target:
        return ranks
    stages = {rank // width for rank in ranks}
    by = target % width - source % width  # places further
    if len(ranks) == len(stages) * width:  # all of these stages
        stage = (target // width - source // width) * width
        moved: Ranks | None = tuple(rank + stage for rank in ranks) if len(stages) == 1 else ranks
    elif len(stages) == 1:
        moved = _in_stage(ranks, target, width)
    else:
        fits = all(0 <= rank % width + by < width for rank in ranks)
        moved = tuple(rank + by for rank in ranks) if fits else None
    return moved if moved is not None and target in moved else None


def _in_stage(ranks: Ranks, target: int, width: int) -> Ranks | None:
    least, place = min(ranks), target % width
    steps = _steps_of(sorted(rank - least for rank in ranks))
    if steps is None:
        return None
    first = target - sum(place // stride % size * stride for stride, size in steps)
    return tuple(first + rank - least for rank in ranks)


def _steps_of(offsets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Strides and sizes of the dims whose sums are these offsets, innermost first; None where there are none."""
    steps: list[tuple[int, int]] = []
    sums = [0]
    while len(sums) < len(offsets):
        stride = offsets[len(sums)]
        if steps and stride % (steps[-1][0] * steps[-1][1]):
            return None
        inner, size = len(sums), 2
        while size * inner < len(offsets) and offsets[size * inner] == size * stride:
            size += 1
        steps.append((stride, size))
        sums = [number * stride + one for number in range(size) for one in sums]
    return steps if sums == list(offsets) else None
