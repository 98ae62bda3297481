"""Transfers of tensors between the ranks of the trunk and those of a branch, and of their gradients in backward.

A transfer is two nodes of autograd: departure, which starts sending the tensors that a rank holds, and arrival, which
waits for the tensors that it needs, perhaps much later. So a rank never waits for tensors that it does not need yet.
Backward runs the nodes in the opposite order: an arrival sends the gradients, a departure waits for them. Within a
process autograd runs nodes in the opposite order of their creation. So the gradients of a branch's inputs are sent
right after its backward, and each rank reverses its order of messages, which excludes deadlocks.
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
    """Sends and receives messages for the branches of a model. All ranks create it together.

    Forward and backward have separate process groups, so that their messages do not wait for each other.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        ranks, self._timeout = list(range(dist.get_world_size())), timedelta(seconds=timeout)
        self._groups = [dist.new_group(ranks, group_desc=name) for name in ("branches", "branches backward")]
        self.rank, self.world, self.device = dist.get_rank(), len(ranks), device
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._tag = 0

    def next_tag(self) -> int:
        """Return the tag of the next transfer. It is equal on all ranks, which create transfers in the same order."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def send(self, message: Tensor, peer: int, tag: int, backward: bool) -> None:
        """Start sending a message of bytes."""
        work = dist.isend(message, peer, group=self._groups[backward], tag=tag)
        self._sending.append((work, message))

    def expect(self, size: int, peer: int, tag: int, backward: bool) -> tuple[int, Tensor, dist.Work | None]:
        """Start receiving ``size`` bytes from a peer; return the peer, the buffer and the work to wait for."""
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        return peer, message, dist.irecv(message, peer, group=self._groups[backward], tag=tag)

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Wait for a message; raise ``LaunchError``, with its description ``what``, if it does not come in time."""
        try:
            if work is not None:
                work.wait(self._timeout)
        except RuntimeError as cause:
            seconds = self._timeout.total_seconds()
            why = f"That rank is gone or was silent for {seconds:g} s; its own output says why."
            raise LaunchError(f"Waited for {what}, which did not come ({cause}). {why}") from cause

    def finish(self) -> None:
        """Wait until all messages sent were received; raise what ``wait`` does."""
        while self._sending:
            work, _ = self._sending.popleft()
            self.wait(work, "another rank to take what was sent to it")


class Shipment:
    """Several tensors that ranks send to others, in one message for each pair of ranks; gradients may be missing."""

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
        self._messages: list[tuple[int, Tensor, dist.Work | None]] | None = None

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start sending this rank's boxes of the tensors, and copy those that it needs itself."""
        device = self._channel.device
        flags = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device=device)
        for peer in range(self._channel.world):
            boxes = [
                (number, box, self._items(tensor, number, box))
                for number, (tensor, route) in enumerate(zip(tensors, self._routes, strict=True))
                for box in route.sends[peer]
            ]
            if peer == self._channel.rank:
                for number, box, items in boxes:
                    if tensors[number] is not None:
                        # a copy, as the receiver may change it in place
                        copy = items if self._backward else items.clone(memory_format=torch.contiguous_format)
                        self._arrived[number].append((box, copy))
            elif boxes:
                message = pack([*(items for *_, items in boxes), *([flags] if self._backward else ())], device)
                self._channel.send(message, peer, self._tag, self._backward)

    def expect(self) -> None:
        """Start receiving, unless it has started already."""
        if self._messages is None:
            likes = {peer: self._likes(peer) for peer in range(self._channel.world) if peer != self._channel.rank}
            self._messages = [
                self._channel.expect(packed_bytes(tensors), peer, self._tag, self._backward)
                for peer, tensors in likes.items()
                if tensors
            ]

    def collect(self) -> list[Tensor | None]:
        """Return this rank's box of each tensor; None for a gradient that no rank has."""
        self.expect()
        for peer, message, work in self._messages or ():
            self._channel.wait(work, f"{self._what} from rank {peer}")
            values = unpack(message, self._likes(peer))
            flags = values.pop().tolist() if self._backward else [1] * len(self._routes)
            for (number, box), value in zip(self._boxes_from(peer), values, strict=True):
                if flags[number]:
                    self._arrived[number].append((box, value))
        arrived, self._arrived, self._messages = self._arrived, [[] for _ in self._routes], []
        return [self._joined(number, boxes) for number, boxes in enumerate(arrived)]

    def _items(self, tensor: Tensor | None, number: int, box: Box) -> Tensor:
        """The items of a box of a tensor; zeros for a missing gradient."""
        if tensor is None:
            return torch.zeros(box.shape, dtype=self._dtypes[number], device=self._channel.device)
        return cut_box(tensor.detach(), box.within(self._routes[number].held[0])).to(self._dtypes[number])

    def _boxes_from(self, peer: int) -> list[tuple[int, Box]]:
        return [(number, box) for number, route in enumerate(self._routes) for box in route.receives[peer]]

    def _likes(self, peer: int) -> list[Tensor]:
        """Tensors shaped like those of the message of a peer; the last one of gradients flags those that exist."""
        boxes = self._boxes_from(peer)
        likes = [torch.empty(box.shape, dtype=self._dtypes[number], device="meta") for number, box in boxes]
        flags = torch.empty(len(self._routes), dtype=torch.uint8, device="meta")
        return [*likes, flags] if likes and self._backward else likes

    def _joined(self, number: int, boxes: Sequence[tuple[Box, Tensor]]) -> Tensor | None:
        (wanted,) = self._routes[number].wanted
        if not boxes and (wanted.items or self._backward):
            return None
        if len(boxes) == 1 and boxes[0][0] == wanted:
            return boxes[0][1]
        joined = torch.zeros(wanted.shape, dtype=self._dtypes[number], device=self._channel.device)
        for box, items in boxes:
            cut_box(joined, box.within(wanted)).copy_(items)
        return joined


@dataclass(frozen=True, slots=True)
class TensorMove:
    """The routes of one tensor on this rank; equal in every pass."""

    dtype: torch.dtype
    there: Route
    back: Route | None  # of the gradient; None: there is no gradient

    @classmethod
    def of(
        cls, dtype: torch.dtype, before: tuple[Boxes, ...], after: tuple[Boxes, ...], differentiable: bool, rank: int
    ) -> TensorMove:
        """Compute the routes of a tensor on a rank.

        Args:
            before: boxes that each rank of the world holds. Ranks with the same box all get its full gradient.
            after: boxes that each rank needs.
            differentiable: whether the tensor has a gradient.
        """
        back = route_boxes(after, before, rank) if differentiable else None
        return cls(dtype, route_boxes(before, after, rank), back)


class BranchTransfer:
    """A transfer of several tensors. All ranks create all transfers, in the same order."""

    def __init__(self, channel: BranchChannel, what: str, moves: Sequence[TensorMove]) -> None:
        self._device, self.moves, tag = channel.device, moves, channel.next_tag()
        there = [(move.there, move.dtype) for move in moves]
        back = [(move.back, move.dtype) for move in moves if move.back is not None]
        self.there = Shipment(channel, tag, what, there)
        self.back = Shipment(channel, tag, f"the gradient of {what}", back, backward=True)
        self.anchored = bool(back) and torch.is_grad_enabled()

    def depart(self, tensors: Sequence[Tensor], tokens: Sequence[Tensor] = ()) -> Tensor:
        """Start sending the tensors that this rank holds, and return a token of the departure for ``arrive``.

        Args:
            tensors: held by this rank.
            tokens: of arrivals whose gradients must be sent although no tensor here may depend on what arrived.
        """
        token: Tensor = _Depart.apply(self._anchor(), self, *tensors, *tokens)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, tokens: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Wait for the tensors that this rank needs, and return them with a token of the arrival for ``depart``.

        The gradients of the departures with these tokens depend on the gradients that are sent here.
        """
        *arrived, token = _Arrive.apply(self._anchor(), self, *tokens)  # type: ignore[no-untyped-call]
        return arrived, token

    def _anchor(self) -> Tensor:
        """An empty tensor that makes the results require gradients."""
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
        departed = (None if move.back is None else next(gradients) for move in transfer.moves)
        return None, None, *departed, *[None] * ctx.tokens


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: BranchTransfer, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer, ctx.tokens = transfer, len(tokens)
        ctx.set_materialize_grads(False)
        # ``data`` is no view, as autograd forbids to change views in place; no tensor is None in forward
        arrived = tuple(tensor.data for tensor in transfer.there.collect() if tensor is not None)
        constants = [tensor for tensor, move in zip(arrived, transfer.moves, strict=True) if move.back is None]
        token = anchor.clone()
        ctx.mark_non_differentiable(*constants, *([] if transfer.anchored else [token]))
        return *arrived, token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        transfer: BranchTransfer = ctx.transfer
        pairs = zip(gradients[:-1], transfer.moves, strict=True)
        transfer.back.send([gradient for gradient, move in pairs if move.back is not None])
        return None, None, *[None] * ctx.tokens
