"""Moving tensors between the trunk's ranks and a branch's, forward, and their gradients back.

A move is two nodes of autograd: one where a rank gives what it holds, one where it gets what it wants, which may be
much later. So a rank never waits for what it does not need yet. Backward runs the nodes in the opposite order: where a
tensor arrived its gradient is sent; where it departed its gradient is awaited. Within a process autograd runs the node
that was made last first, so what was received last before a branch ran is answered before that branch's backward
begins. What one rank did after another's message it undoes before it answers that message: no circle of waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.mailbox import pack, packed_bytes, unpack
from galvatron_lite.runtime.activations.layout import Box, Boxes, Route, cut_box, route_boxes

_TAGS = 2**30


class BranchChannel:
    """Sends and receives for the branches of a model; every rank makes one together.

    Forward and backward have a process group each: messages of one do not wait for the other's.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        ranks, self._timeout = list(range(dist.get_world_size())), timedelta(seconds=timeout)
        self._groups = [dist.new_group(ranks, group_desc=name) for name in ("branches", "branches backward")]
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

    def expect(self, size: int, peer: int, tag: int, backward: bool) -> tuple[int, Tensor, dist.Work | None]:
        """Start receiving so many bytes from a peer."""
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        return peer, message, dist.irecv(message, peer, group=self._groups[backward], tag=tag)

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Wait for a transfer."""
        try:
            if work is not None:
                work.wait(self._timeout)
        except RuntimeError as cause:
            seconds = self._timeout.total_seconds()
            why = f"That rank is gone or was silent for {seconds:g} s; its own output says why."
            raise LaunchError(f"Waited for {what}, which did not come ({cause}). {why}") from cause

    def finish(self) -> None:
        """Wait until everything sent has been taken; raises what ``wait`` does."""
        while self._sending:
            work, _ = self._sending.popleft()
            self.wait(work, "another rank to take what was sent to it")


class Shipment:
    """Several tensors on their way from the ranks that hold them to those that want them: one message a pair."""

    def __init__(
        self,
        channel: BranchChannel,
        tag: int,
        what: str,
        tensors: Sequence[tuple[Route, torch.dtype]],
        backward: bool = False,
    ) -> None:
        self._channel, self._tag, self._what, self._backward = channel, tag, what, backward
        self._routes, self._dtypes = [route for route, _ in tensors], [dtype for _, dtype in tensors]
        self._arrived: list[list[tuple[Box, Tensor]]] = [[] for _ in self._routes]
        self._parcels: list[tuple[int, Tensor, dist.Work | None]] | None = None

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start sending this rank's parts of the tensors, and keep what it wants itself."""
        device = self._channel.device
        flags = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device=device)
        for peer in range(self._channel.world):
            parts = [
                (number, piece, self._part(tensor, number, piece))
                for number, (tensor, route) in enumerate(zip(tensors, self._routes, strict=True))
                for piece in route.sends[peer]
            ]
            if peer == self._channel.rank:
                for number, piece, part in parts:
                    if tensors[number] is not None:
                        # a copy, as code may change in place what arrives
                        kept = part if self._backward else part.clone(memory_format=torch.contiguous_format)
                        self._arrived[number].append((piece, kept))
            elif parts:
                message = pack([*(part for *_, part in parts), *([flags] if self._backward else ())], device)
                self._channel.send(message, peer, self._tag, self._backward)

    def expect(self) -> None:
        """Start receiving, if that was not done before."""
        if self._parcels is None:
            likes = {peer: self._likes(peer) for peer in range(self._channel.world) if peer != self._channel.rank}
            self._parcels = [
                self._channel.expect(packed_bytes(every), peer, self._tag, self._backward)
                for peer, every in likes.items()
                if every
            ]

    def collect(self) -> list[Tensor | None]:
        """What this rank wants of each tensor; None for a gradient that nobody has."""
        self.expect()
        for peer, message, work in self._parcels or ():
            self._channel.wait(work, f"{self._what} from rank {peer}")
            values = unpack(message, self._likes(peer))
            flags = values.pop().tolist() if self._backward else [1] * len(self._routes)
            for (number, piece), value in zip(self._arriving(peer), values, strict=True):
                if flags[number]:
                    self._arrived[number].append((piece, value))
        arrived, self._arrived, self._parcels = self._arrived, [[] for _ in self._routes], []
        return [self._joined(number, parts) for number, parts in enumerate(arrived)]

    def _part(self, tensor: Tensor | None, number: int, piece: Box) -> Tensor:
        """A piece of a tensor; zeros of a gradient that is missing."""
        if tensor is None:
            return torch.zeros(piece.shape, dtype=self._dtypes[number], device=self._channel.device)
        return cut_box(tensor.detach(), piece.within(self._routes[number].held[0])).to(self._dtypes[number])

    def _arriving(self, peer: int) -> list[tuple[int, Box]]:
        return [(number, piece) for number, route in enumerate(self._routes) for piece in route.receives[peer]]

    def _likes(self, peer: int) -> list[Tensor]:
        """Tensors shaped like those of a peer's message; the last one says which gradients there are."""
        likes = [
            torch.empty(piece.shape, dtype=self._dtypes[number], device="meta")
            for number, piece in self._arriving(peer)
        ]
        flags = torch.empty(len(self._routes), dtype=torch.uint8, device="meta")
        return [*likes, flags] if likes and self._backward else likes

    def _joined(self, number: int, parts: Sequence[tuple[Box, Tensor]]) -> Tensor | None:
        (wanted,) = self._routes[number].wanted
        if not parts and (wanted.items or self._backward):
            return None
        if len(parts) == 1 and parts[0][0] == wanted:
            return parts[0][1]
        joined = torch.zeros(wanted.shape, dtype=self._dtypes[number], device=self._channel.device)
        for piece, part in parts:
            cut_box(joined, piece.within(wanted)).copy_(part)
        return joined


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor of a move, as a rank takes part in it; the same in every pass."""

    dtype: torch.dtype
    there: Route
    back: Route | None  # of its gradient; None: no gradient comes back

    @classmethod
    def of(
        cls, dtype: torch.dtype, before: tuple[Boxes, ...], after: tuple[Boxes, ...], differentiable: bool, rank: int
    ) -> TensorMove:
        """That of a rank.

        Args:
            before: by rank of the world, what it holds; ranks that hold the same have complete gradients.
            after: by rank, what it wants.
            differentiable: whether its gradient comes back.
        """
        back = route_boxes(after, before, rank) if differentiable else None
        return cls(dtype, route_boxes(before, after, rank), back)


class BranchTransfer:
    """A move of several tensors. Every rank makes it, in the same order, whether it gives, gets, both or neither."""

    def __init__(self, channel: BranchChannel, what: str, moves: Sequence[TensorMove]) -> None:
        self._device, self.moves, tag = channel.device, moves, channel.next_tag()
        there = [(one.there, one.dtype) for one in moves]
        back = [(one.back, one.dtype) for one in moves if one.back is not None]
        self.there = Shipment(channel, tag, what, there)
        self.back = Shipment(channel, tag, f"the gradient of {what}", back, backward=True)
        self.anchored = bool(back) and torch.is_grad_enabled()

    def depart(self, tensors: Sequence[Tensor], tokens: Sequence[Tensor] = ()) -> Tensor:
        """Start sending what this rank holds; a token for ``arrive``, through which gradients find their way.

        Args:
            tokens: of arrivals whose gradients must be sent even where nothing that departs depends on what arrived.
        """
        token: Tensor = _Depart.apply(self._anchor(), self, *tensors, *tokens)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, tokens: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """What this rank wants, once it is here, and a token for ``depart``.

        Args:
            tokens: of departures whose gradients are known only when those of what arrives here were sent.
        """
        *arrived, token = _Arrive.apply(self._anchor(), self, *tokens)  # type: ignore[no-untyped-call]
        return arrived, token

    def _anchor(self) -> Tensor:
        """Without data; makes results ask for gradients."""
        return torch.empty(0, device=self._device, requires_grad=self.anchored)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: BranchTransfer, *tensors: Tensor) -> Tensor:
        ctx.transfer, ctx.tokens = transfer, len(tensors) - len(transfer.moves)
        transfer.there.send(tensors[: len(transfer.moves)])
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        transfer: BranchTransfer = ctx.transfer
        gradients = iter(transfer.back.collect())
        sent = (None if one.back is None else next(gradients) for one in transfer.moves)
        return None, None, *sent, *[None] * ctx.tokens


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: BranchTransfer, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer, ctx.tokens = transfer, len(tokens)
        ctx.set_materialize_grads(False)
        # the same storage, but no view, which autograd would not let others change; forward, every tensor is there
        arrived = tuple(tensor.data for tensor in transfer.there.collect() if tensor is not None)
        still = [tensor for tensor, one in zip(arrived, transfer.moves, strict=True) if one.back is None]
        token = anchor.clone()
        ctx.mark_non_differentiable(*still, *([] if transfer.anchored else [token]))
        return *arrived, token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        transfer: BranchTransfer = ctx.transfer
        pairs = zip(gradients[:-1], transfer.moves, strict=True)
        transfer.back.send([gradient for gradient, one in pairs if one.back is not None])
        nothing: tuple[None, ...] = (None,) * (2 + ctx.tokens)
        return nothing
