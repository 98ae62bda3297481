"""Messages of pieces of tensors from rank to rank, which travel while both work on other things."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.runtime.layout import Box, Route
from galvatron_lite.runtime.redistribute import cut_box

_ALIGNED = 16
"""Bytes; a piece begins at a multiple of it, so that it can be read as any dtype."""
_TAGS = 2**30


class BranchChannel:
    """What sends and receives for the branches of a model; every rank makes one together.

    Forward and backward have a process group each: messages of one do not wait for the other's.

    Args:
        device: of this rank.
        timeout: seconds after which a message that does not come is an error.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        ranks, self._timeout = list(range(dist.get_world_size())), timedelta(seconds=timeout)
        names = ("branches", "branches backward")
        self._groups = tuple(dist.new_group(ranks, group_desc=name) for name in names)
        self.rank, self.world, self.device = dist.get_rank(), len(ranks), device
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._tag = 0

    def next_tag(self) -> int:
        """The number of the next shipment; the same on every rank, as all ask for it in the same order."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def send(self, message: Tensor, peer: int, tag: int, backward: bool) -> None:
        """Start sending bytes."""
        work = dist.isend(message, peer, group=self._groups[backward], tag=tag)
        self._sending.append((work, message))

    def expect(self, size: int, peer: int, tag: int, backward: bool) -> Parcel:
        """Start receiving so many bytes."""
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        work = dist.irecv(message, peer, group=self._groups[backward], tag=tag)
        return Parcel(message, work, peer, self._timeout)

    def finish(self) -> None:
        """Wait until everything sent has been taken.

        Raises:
            LaunchError: a rank that is to take it is gone.
        """
        while self._sending:
            work, _ = self._sending.popleft()
            _wait(work, "another rank to take what was sent to it", self._timeout)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes on their way here from a peer."""

    message: Tensor
    work: dist.Work | None
    peer: int
    timeout: timedelta

    def open(self, what: str) -> Tensor:
        """The bytes, once they are here."""
        _wait(self.work, f"{what} from rank {self.peer}", self.timeout)
        return self.message


def _wait(work: dist.Work | None, what: str, timeout: timedelta) -> None:
    try:
        if work is not None:
            work.wait(timeout)
    except RuntimeError as cause:
        why = f"That rank is gone or was silent for {timeout.total_seconds():g} s; its own output says why."
        raise LaunchError(f"Waited for {what}, which did not come ({cause}). {why}") from cause


class Shipment:
    """Several tensors on their way from the ranks that hold them to those that want them: one message a pair of ranks.

    Args:
        post: of this rank.
        tag: the same on every rank, and of this shipment alone.
        what: it is, for errors.
        routes: this rank's part in the move of each tensor.
        dtypes: of the tensors.
        backward: whether tensors are gradients, any of which may be missing (None).
    """

    def __init__(
        self,
        post: BranchChannel,
        tag: int,
        what: str,
        routes: Sequence[Route],
        dtypes: Sequence[torch.dtype],
        backward: bool = False,
    ) -> None:
        self._post, self._tag, self._what, self._backward = post, tag, what, backward
        self._routes, self._dtypes = tuple(routes), tuple(dtypes)
        self._own: list[Tensor | None] = [None] * len(self._routes)
        self._parcels: list[Parcel] | None = None

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start sending this rank's parts of the tensors, and keep what it wants itself."""
        for peer in range(self._post.world):
            pieces = [way.sends[peer] for way in self._routes]
            if peer != self._post.rank and any(piece.items for piece in pieces):
                self._post.send(self._packed(tensors, pieces), peer, self._tag, self._backward)
        self._own = [self._kept(tensor, way) for tensor, way in zip(tensors, self._routes, strict=True)]

    def expect(self) -> None:
        """Start receiving, if that was not done before."""
        if self._parcels is None:
            sizes = {peer: self._size([way.receives[peer] for way in self._routes]) for peer in range(self._post.world)}
            self._parcels = [
                self._post.expect(size, peer, self._tag, self._backward)
                for peer, size in sizes.items()
                if size and peer != self._post.rank
            ]

    def collect(self) -> list[Tensor | None]:
        """What this rank wants of each tensor; None for a gradient that nobody has."""
        self.expect()
        found: list[list[tuple[Box, Tensor]]] = [[] for _ in self._routes]
        for number, own in enumerate(self._own):
            if own is not None:
                found[number].append((self._routes[number].receives[self._post.rank], own))
        for parcel in self._parcels or ():
            for number, piece, part in self._opened(parcel):
                found[number].append((piece, part))
        self._own, self._parcels = [None] * len(self._routes), []
        return [self._joined(number, parts) for number, parts in enumerate(found)]

    def _kept(self, tensor: Tensor | None, way: Route) -> Tensor | None:
        """This rank's part for itself; a copy, as code may change in place what arrives."""
        piece = way.sends[self._post.rank]
        if tensor is None or not piece.items:
            return None
        part = cut_box(tensor, piece.within(way.held)).detach()
        return part if self._backward else part.clone(memory_format=torch.contiguous_format)

    def _packed(self, tensors: Sequence[Tensor | None], pieces: Sequence[Box]) -> Tensor:
        message = torch.zeros(self._size(pieces), dtype=torch.uint8, device=self._post.device)
        start = 0
        for tensor, way, piece, dtype in zip(tensors, self._routes, pieces, self._dtypes, strict=True):
            if piece.items and tensor is not None:
                place = message[start : start + piece.items * dtype.itemsize].view(dtype).view(piece.shape)
                place.copy_(cut_box(tensor.detach(), piece.within(way.held)))
            start += _bytes(piece, dtype)
        if self._backward:
            there = [tensor is not None for tensor in tensors]
            message[-len(there) :] = torch.tensor(there, dtype=torch.uint8, device=self._post.device)
        return message

    def _size(self, pieces: Sequence[Box]) -> int:
        """Bytes of a message; nothing where no piece has items."""
        if not any(piece.items for piece in pieces):
            return 0
        held = sum(_bytes(piece, dtype) for piece, dtype in zip(pieces, self._dtypes, strict=True))
        return held + len(pieces) * self._backward

    def _opened(self, parcel: Parcel) -> list[tuple[int, Box, Tensor]]:
        message, start, found = parcel.open(self._what), 0, []
        flags = message[-len(self._routes) :].tolist() if self._backward else [1] * len(self._routes)
        for number, (way, dtype) in enumerate(zip(self._routes, self._dtypes, strict=True)):
            piece = way.receives[parcel.peer]
            if piece.items:
                data = message[start : start + piece.items * dtype.itemsize]
                start += _bytes(piece, dtype)
                if flags[number]:
                    found.append((number, piece, data.view(dtype).view(piece.shape)))
        return found

    def _joined(self, number: int, parts: Sequence[tuple[Box, Tensor]]) -> Tensor | None:
        wanted = self._routes[number].wanted
        if not parts:
            empty = not wanted.items and not self._backward
            return torch.empty(wanted.shape, dtype=self._dtypes[number], device=self._post.device) if empty else None
        if len(parts) == 1 and parts[0][0] == wanted:
            return parts[0][1]
        whole = torch.zeros(wanted.shape, dtype=self._dtypes[number], device=self._post.device)
        for piece, part in parts:
            cut_box(whole, piece.within(wanted)).copy_(part)
        return whole


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _bytes(piece: Box, dtype: torch.dtype) -> int:
    return _padded(piece.items * dtype.itemsize)
