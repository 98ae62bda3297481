"""Groups of ranks that shard one dim of a tensor: who holds which items, and what ranks can send one another.

By default ranks hold consecutive ranges (``shares.share``). An ``OrderedGroup`` holds other items: ``MirroredGroup`` an
early and a late piece of a sequence each; ``FoldedGroup`` the same pieces again in every item of dims that were merged
with the sharded one (samples and tokens, before a matmul or a loss); ``RangeGroup`` what is left of a sliced dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.parallelism.shares import Range, mirrored, share
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup, TensorGroup

Parcel = tuple[int, Tensor]
"""A rank of the group, and a contiguous tensor that goes to it or comes from it."""

Pieces = tuple[Range, ...]
"""Items of a dim: disjoint ranges."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Messages under way."""

    works: Sequence[dist.Work] = ()
    tensors: Any = ()  # alive until they have arrived

    def wait(self) -> None:
        """Return once everything has arrived and what was sent may be overwritten."""
        for work in self.works:
            work.wait()


class AxisGroup(TensorGroup, Protocol):
    """Ranks that shard a dim of a tensor."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """Start point-to-point messages.

        Args:
            sent: at most one tensor a rank.
            wanted: buffers to receive into, at most one a rank, of the shape and dtype that the peer sends.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessAxisGroup(ProcessTensorGroup):
    """Processes of ``torch.distributed``, in the order of their process group."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """Point-to-point messages, all at once."""
        group = self.process_group
        calls = [dist.P2POp(dist.isend, one, group=group, group_peer=peer) for peer, one in sent]
        calls += [dist.P2POp(dist.irecv, one, group=group, group_peer=peer) for peer, one in wanted]
        return Arrival(dist.batch_isend_irecv(calls) if calls else (), (sent, wanted))


@dataclass(frozen=True, slots=True)
class ShapeOnlyAxisGroup(ShapeOnlyGroup):
    """A group without communication: results have the right shapes, with zeros for what other ranks hold.

    It runs one rank's shard of a layer alone, on any device including meta, to be captured or timed.
    """

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:  # noqa: ARG002
        """Fill the buffers with zeros."""
        with torch.no_grad():
            for _, buffer in wanted:
                buffer.zero_()
        return Arrival()


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """The ranks and messages of another group, with other items on each rank."""

    group: AxisGroup

    @property
    def size(self) -> int:
        """Ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """Index of this one."""
        return self.group.rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``TensorGroup``."""
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
        return self.group.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
        return self.group.reduce_scatter(tensor, dim)

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """See ``AxisGroup``."""
        return self.group.exchange(sent, wanted)

    def pieces(self, extent: int, rank: int) -> Pieces:
        """The items of a dim of that extent that a rank holds, in its order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MirroredGroup(OrderedGroup):
    """Ranks that share the tokens of sequences; see ``shares.mirrored``."""

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        return mirrored(extent, self.size, rank)


@dataclass(frozen=True, slots=True)
class FoldedGroup(OrderedGroup):
    """A sharded dim (of ``group``) merged with dims in front of it."""

    repeats: int  # items of the dims in front

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        period = extent // self.repeats
        held = pieces_of(period, self.group, rank)
        starts = [number * period for number in range(self.repeats)]
        return tuple((begin + start, begin + stop) for begin in starts for start, stop in held)


@dataclass(frozen=True, slots=True)
class RangeGroup(OrderedGroup):
    """A range of the items of a sharded dim (of ``group``), which stay where they are."""

    extent: int  # of the dim
    start: int  # first item of the range

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        last = self.start + extent
        held = [(max(low, self.start), min(high, last)) for low, high in pieces_of(self.extent, self.group, rank)]
        return tuple((low - self.start, high - self.start) for low, high in held if low < high)


def pieces_of(extent: int, group: AxisGroup, rank: int) -> Pieces:
    """The items of a dim that a rank of a group holds, in its order."""
    if isinstance(group, OrderedGroup):
        return group.pieces(extent, rank)
    start, length = share(extent, group.size, rank)
    return ((start, start + length),)


def shards_of(extent: int, group: AxisGroup) -> tuple[Pieces, ...]:
    """The items of every rank."""
    return tuple(pieces_of(extent, group, rank) for rank in range(group.size))


def length_of(pieces: Pieces) -> int:
    """Items in pieces."""
    return sum(stop - start for start, stop in pieces)


def take_pieces(tensor: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Pieces of a tensor, one after the other; a view where possible."""
    if len(pieces) == 1:
        ((start, stop),) = pieces
        return tensor.narrow(dim, start, stop - start)
    if not pieces:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in pieces], dim)


def merge_pieces(pieces: Sequence[Range]) -> Pieces:
    """The same items in fewer pieces."""
    merged: list[Range] = []
    for start, stop in pieces:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@lru_cache(maxsize=1024)
def rank_order(held: tuple[Pieces, ...]) -> Pieces:
    """Where the items of a dim lie, in their order, once the ranks' items are joined rank after rank."""
    places: list[tuple[Range, int]] = []
    position = 0
    for piece in (piece for pieces in held for piece in pieces):
        places.append((piece, position))
        position += piece[1] - piece[0]
    return merge_pieces([(at, at + stop - start) for (start, stop), at in sorted(places)])


def ordered_dim_after(
    before: Sequence[int], after: Sequence[int], dim: int, extent: int, group: AxisGroup
) -> tuple[int, AxisGroup] | None:
    """The dim that a dim sharded by an ``OrderedGroup`` becomes in another shape, and its group there; None: none.

    Items keep their order, so a period of the sharded dim must end where a dim of the new shape ends; the items in
    front of it are dims of their own, or merged with it.
    """
    base, repeats = (group.group, group.repeats) if isinstance(group, FoldedGroup) else (group, 1)
    period, outer = extent // repeats, prod(before[:dim]) * repeats
    for place, length in enumerate(after):
        front = prod(after[:place])
        if length > 1 and front * length == outer * period and front and outer % front == 0:
            times = outer // front
            return (place, base) if times == 1 else (place, FoldedGroup(base, times))
    return None
