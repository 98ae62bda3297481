"""The ranks that share one dim of a tensor, in order, and what they can send one another. No autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup, TensorGroup

Parcel = tuple[int, Tensor]
"""A rank of the line, and a contiguous tensor that goes to it or comes from it."""


class Arrival(Protocol):
    """Tensors on their way."""

    def wait(self) -> None:
        """Return once all that was wanted is here and all that was sent may be changed."""
        ...


class Line(TensorGroup, Protocol):
    """Ranks along which a tensor is cut: ``rank`` holds the share of that number."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """Start sending tensors to ranks of the line and receiving others from them.

        Args:
            sent: what goes to whom; at most one tensor a rank.
            wanted: buffers that what comes is written to; at most one a rank. What one rank wants of another, that one
                sends, of the same shape and dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Works:
    """Messages of ``torch.distributed`` under way; the tensors are kept until they are there."""

    works: tuple[dist.Work, ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class ProcessLine(ProcessTensorGroup):
    """Processes of ``torch.distributed``; the group's own order is the line's."""

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:
        """Point-to-point messages, all at once."""
        group = self.process_group
        calls = [dist.P2POp(dist.isend, one, group=group, group_peer=peer) for peer, one in sent]
        calls += [dist.P2POp(dist.irecv, one, group=group, group_peer=peer) for peer, one in wanted]
        works = dist.batch_isend_irecv(calls) if calls else []
        return _Works(tuple(works), tuple(one for _, one in (*sent, *wanted)))


@dataclass(frozen=True, slots=True)
class _Nothing:
    def wait(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class ShapeOnlyLine(ShapeOnlyGroup):
    """A line without communication: results have the right shapes, and zeros for what others hold.

    With it one rank's share of a layer runs alone, on any device including meta, to be captured or timed.
    """

    def exchange(self, sent: Sequence[Parcel], wanted: Sequence[Parcel]) -> Arrival:  # noqa: ARG002
        """Fill what is wanted with zeros."""
        with torch.no_grad():
            for _, buffer in wanted:
                buffer.zero_()
        return _Nothing()
