"""When the messages of several ranks are one: what must be alike, and how it is told where it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

from galvatron_lite.verify.schema import NOBODY, Message, MessageType

OBJECT = "object"
"""dtype of what is pickled: its size may differ from rank to rank."""
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
        if found := _mismatch_in(what, look, spoken):
            return found
    uneven = _parts_mismatch(spoken) if spoken[0].message.kind is MessageType.ALL_TO_ALL else None
    return uneven or _order_mismatch(spoken)


def pair_mismatch(sent: RankMessage, taken: RankMessage) -> MessageMismatch | None:
    """Why what one rank sends is not what another receives; None: it is."""
    for what in ("dtype", "shape"):
        if getattr(sent.message, what) != getattr(taken.message, what):
            return MessageMismatch(what, (sent,), taken)
    known = NOBODY not in (sent.message.microbatch, taken.message.used)
    if known and sent.message.microbatch != taken.message.used:
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
    given = [_parts(one.message.sent, one.message, size) for one in spoken]
    taken = [_parts(one.message.taken, one.message, size) for one in spoken]
    for i, sender in enumerate(spoken):
        for j, receiver in enumerate(spoken):
            known = (sender.exact or _even(given[i])) and (receiver.exact or _even(taken[j]))
            if known and given[i][j] != taken[j][i]:
                return MessageMismatch("parts", (sender,), receiver)
    return None


def _parts(parts: tuple[int, ...], message: Message, size: int) -> tuple[int, ...]:
    return parts or (prod(message.shape) // size,) * size


def _even(parts: tuple[int, ...]) -> bool:
    return len(set(parts)) == 1
