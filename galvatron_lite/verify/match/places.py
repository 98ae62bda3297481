"""Messages of every rank of the world, derived from the run of one rank of each role.

A rank sends what the recorded rank of its role sends, over the groups and to the partners that correspond to its own
position. Ranks of a stage are row-major over the degrees of a strategy (``parallelism.strategy.Strategy``), so groups
along the same degrees are translations of one another: a smallest rank, and the same offsets from it. A group over
several stages keeps its position in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron_lite.verify.schema import NOBODY, Message, MessageType, RoleRun

PAIRED = (MessageType.SEND, MessageType.RECEIVE)
PIPELINE = "pipeline"  # prefix of the purposes of groups between stages

Ranks = tuple[int, ...]
Group = tuple[str, Ranks]  # purpose and ranks of a process group


@dataclass(frozen=True, slots=True)
class RoleMessages:
    """Messages of the recorded rank of a role."""

    run: RoleRun
    groups: tuple[Group, ...]  # each once, in the order of use
    group_indices: tuple[int, ...]  # by message: index in ``groups``
    peer_indices: tuple[int, ...]  # by message: index of the partner or root in the group; -1: none
    # by message between two ranks: number of the first message of its batch; -1: starts alone
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankMessages:
    """Messages of any rank of a role."""

    rank: int
    role: RoleMessages
    groups: tuple[Group | None, ...]  # that correspond to ``role.groups``; None: this rank has no such group
    shifts: tuple[int, ...]  # by group: index of this rank in it, less that of the recorded rank in its group

    @property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which they start, as the recorded rank gave them."""
        return self.role.run.messages

    def group_of(self, number: int) -> Group:
        """Return the group of a message."""
        group = self.groups[self.role.group_indices[number]]
        assert group is not None
        return group

    def peer_of(self, number: int) -> int:
        """Return the partner of a message, or the root of a collective; ``NOBODY``: there is none."""
        index, ranks = self.role.peer_indices[number], self.group_of(number)[1]
        if index < 0:
            return NOBODY
        shift = self.shifts[self.role.group_indices[number]] if self.messages[number].kind in PAIRED else 0
        return ranks[(index + shift) % len(ranks)]


def role_messages(run: RoleRun) -> RoleMessages:
    """Index the groups, partners and batches of a run."""
    groups: dict[Group, int] = {}
    group_indices = [groups.setdefault((message.purpose, message.ranks), len(groups)) for message in run.messages]
    peer_indices = [
        message.ranks.index(message.peer) if message.peer in message.ranks else -1 for message in run.messages
    ]
    return RoleMessages(run, tuple(groups), tuple(group_indices), tuple(peer_indices), _batches(run.messages))


def _batches(messages: Sequence[Message]) -> tuple[int, ...]:
    """Find messages between ranks that start together (``batch_isend_irecv``).

    They follow one another on one group, and none is waited for before the last. Pipelines start each message alone.
    """
    batches: list[int] = []
    first, awaited, previous_group = NOBODY, 0, None
    for number, message in enumerate(messages):
        can_batch = message.kind in PAIRED and not message.purpose.startswith(PIPELINE)
        group = (message.purpose, message.ranks) if can_batch else None
        if group is None:
            first = NOBODY
        elif first == NOBODY or group != previous_group or awaited <= number:
            first, awaited = number, len(messages)
        previous_group = group
        if message.waited != NOBODY:
            awaited = min(awaited, message.waited)
        batches.append(first)
    return tuple(batches)


def rank_messages(role: RoleMessages, rank: int, width: int) -> RankMessages:
    """Translate the messages of a role to one of its ranks, in stages of ``width`` ranks."""
    recorded = role.run.rank
    groups: list[Group | None] = []
    shifts: list[int] = []
    for purpose, ranks in role.groups:
        moved = moved_group(ranks, recorded, rank, width)
        groups.append(None if moved is None else (purpose, moved))
        shifts.append(0 if moved is None or recorded not in ranks else moved.index(rank) - ranks.index(recorded))
    return RankMessages(rank, role, tuple(groups), tuple(shifts))


def moved_group(ranks: Ranks, source: int, target: int, width: int) -> Ranks | None:
    """Return the group that is to rank ``target`` what ``ranks`` is to rank ``source``; None if there is none.

    Args:
        ranks: of the group of ``source``.
        source: a rank of the world.
        target: a rank of the world.
        width: ranks of a stage.
    """
    if source == target:
        return ranks
    stages = {rank // width for rank in ranks}
    offset = target % width - source % width
    if len(ranks) == len(stages) * width:  # entire stages
        stage_offset = (target // width - source // width) * width
        moved: Ranks | None = tuple(rank + stage_offset for rank in ranks) if len(stages) == 1 else ranks
    elif len(stages) == 1:
        moved = _moved_in_stage(ranks, target, width)
    else:
        fits = all(0 <= rank % width + offset < width for rank in ranks)
        moved = tuple(rank + offset for rank in ranks) if fits else None
    return moved if moved is not None and target in moved else None


def _moved_in_stage(ranks: Ranks, target: int, width: int) -> Ranks | None:
    least, position = min(ranks), target % width
    dims = _dims_of(sorted(rank - least for rank in ranks))
    if dims is None:
        return None
    first = target - sum(position // stride % size * stride for stride, size in dims)
    return tuple(first + rank - least for rank in ranks)


def _dims_of(offsets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return strides and sizes, innermost first, of the dims that span these offsets; None if no dims do."""
    dims: list[tuple[int, int]] = []
    spanned = [0]
    while len(spanned) < len(offsets):
        stride = offsets[len(spanned)]
        if dims and stride % (dims[-1][0] * dims[-1][1]):
            return None
        inner, size = len(spanned), 2
        while size * inner < len(offsets) and offsets[size * inner] == size * stride:
            size += 1
        dims.append((stride, size))
        spanned = [number * stride + offset for number in range(size) for offset in spanned]
    return dims if spanned == list(offsets) else None
