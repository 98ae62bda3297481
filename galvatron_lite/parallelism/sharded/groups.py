"""Groups of ranks that shard one dim of a tensor: the items of each rank, and messages between ranks.

By default ranks hold consecutive ranges (``shares.share``). Ranks of an ``OrderedGroup`` hold other items:
``MirroredGroup`` an early and a late piece of a sequence, ``FoldedGroup`` the same pieces in every item of dims that
were merged with the sharded dim (samples and tokens, before a matmul or a loss), ``RangeGroup`` the rest of a sliced
dim.
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
"""A rank of the group, and a contiguous tensor to send to it or to receive from it."""

Pieces = tuple[Range, ...]
"""Items of a dim: disjoint ranges."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Messages that have been started."""

    works: Sequence[dist.Work] = ()
    tensors: Any = ()  # kept alive until the messages have arrived

    def wait(self) -> None:
        """Wait until all messages have arrived and sent tensors may be overwritten."""
        for work in self.works:
            work.wait()


class AxisGroup(TensorGroup, Protocol):
    """Ranks that shard one dim of a tensor."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """Start point-to-point messages.

        Args:
            sent: at most one tensor for each rank.
            wanted: receive buffers, at most one for each rank, of the shape and dtype that the peer sends.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessAxisGroup(ProcessTensorGroup):
    """A process group of ``torch.distributed``."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """See ``AxisGroup``; all messages are one batch."""
        group = self.process_group
        messages = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sent]
        messages += [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in wanted]
        return Arrival(dist.batch_isend_irecv(messages) if messages else (), (sent, wanted))


@dataclass(frozen=True, slots=True)
class ShapeOnlyAxisGroup(ShapeOnlyGroup):
    """A group without communication: results have the right shapes, with zeros for the items of other ranks.

    It runs one rank's shard of a layer, to trace or time it on any device including meta.
    """

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:  # noqa: ARG002
        """Fill the buffers with zeros."""
        with torch.no_grad():
            for _, buffer in wanted:
                buffer.zero_()
        return Arrival()


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """Another group with other items on each rank."""

    group: AxisGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """Index of this rank."""
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
        """Return the items of a dim of ``extent`` items that a rank holds, in its order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MirroredGroup(OrderedGroup):
    """Ranks that split the tokens of sequences; see ``shares.mirrored``."""

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        return mirrored(extent, self.size, rank)


@dataclass(frozen=True, slots=True)
class FoldedGroup(OrderedGroup):
    """A sharded dim merged with the dims in front of it."""

    repeats: int  # items of the dims in front

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        period = extent // self.repeats
        held = pieces_of(period, self.group, rank)
        offsets = [number * period for number in range(self.repeats)]
        return tuple((offset + start, offset + stop) for offset in offsets for start, stop in held)


@dataclass(frozen=True, slots=True)
class RangeGroup(OrderedGroup):
    """A range of a sharded dim, whose items stay on their ranks."""

    extent: int  # of the dim
    start: int  # first item of the range

    def pieces(self, extent: int, rank: int) -> Pieces:
        """See ``OrderedGroup``."""
        last = self.start + extent
        held = [(max(low, self.start), min(high, last)) for low, high in pieces_of(self.extent, self.group, rank)]
        return tuple((low - self.start, high - self.start) for low, high in held if low < high)


def pieces_of(extent: int, group: AxisGroup, rank: int) -> Pieces:
    """Return the items of a dim that a rank of a group holds, in its order."""
    if isinstance(group, OrderedGroup):
        return group.pieces(extent, rank)
    start, length = share(extent, group.size, rank)
    return ((start, start + length),)


def shards_of(extent: int, group: AxisGroup) -> tuple[Pieces, ...]:
    """Return the items of every rank."""
    return tuple(pieces_of(extent, group, rank) for rank in range(group.size))


def length_of(pieces: Pieces) -> int:
    """Count the items of pieces."""
    return sum(stop - start for start, stop in pieces)


def take_pieces(tensor: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Concatenate pieces of a tensor; a view if possible."""
    if len(pieces) == 1:
        ((start, stop),) = pieces
        return tensor.narrow(dim, start, stop - start)
    if not pieces:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in pieces], dim)


def merge_pieces(pieces: Sequence[Range]) -> Pieces:
    """Join adjacent pieces."""
    merged: list[Range] = []
    for start, stop in pieces:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@lru_cache(maxsize=1024)
def rank_order(held: tuple[Pieces, ...]) -> Pieces:
    """Return the pieces that put a dim in order again after a concatenation of all ranks' items."""
    positions: list[tuple[Range, int]] = []
    position = 0
    for start, stop in (piece for pieces in held for piece in pieces):
        positions.append(((start, stop), position))
        position += stop - start
    return merge_pieces([(position, position + stop - start) for (start, stop), position in sorted(positions)])


def ordered_dim_after(
    before: Sequence[int], after: Sequence[int], dim: int, extent: int, group: AxisGroup
) -> tuple[int, AxisGroup] | None:
    """Find what a dim sharded by an ``OrderedGroup`` becomes in another shape.

    Items keep their order, so a period of the sharded dim must end where a dim of the new shape ends. The items in
    front of it are separate dims, or merged with it.

    Returns:
        The dim of the new shape and its group; None if the dim cannot stay sharded.
    """
    base, repeats = (group.group, group.repeats) if isinstance(group, FoldedGroup) else (group, 1)
    period, outer = extent // repeats, prod(before[:dim]) * repeats
    for new_dim, length in enumerate(after):
        front = prod(after[:new_dim])
        if length > 1 and front * length == outer * period and front and outer % front == 0:
            merged = outer // front
            return (new_dim, base) if merged == 1 else (new_dim, FoldedGroup(base, merged))
    return None
