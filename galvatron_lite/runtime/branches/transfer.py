"""Moving tensors between the trunk's ranks and a branch's, forward, and their gradients back.

A move is two nodes of autograd: one where a rank gives what it holds, one where it gets what it wants, which may be
much later. So a rank never waits for what it does not need yet. Backward runs the nodes in the opposite order: where a
tensor arrived its gradient is sent; where it departed its gradient is awaited. Within a process autograd runs the node
that was made last first, so what was received last before a branch ran is answered before that branch's backward
begins. What one rank did after another's message it undoes before it answers that message: no circle of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.runtime.branches.post import BranchChannel, Shipment
from galvatron_lite.runtime.layout import Box, Route, route_boxes


@dataclass(frozen=True, slots=True)
class Cargo:
    """One tensor of a move."""

    dtype: torch.dtype  # of it
    before: tuple[Box, ...]  # by rank of the world, what it holds; ranks that hold the same have complete gradients
    after: tuple[Box, ...]  # by rank, what it wants
    differentiable: bool  # whether its gradient comes back


@dataclass(frozen=True, slots=True)
class TransferManifest:
    """What a rank sends and receives of some tensors; the same in every pass."""

    cargo: tuple[Cargo, ...]  # the tensors
    there: tuple[Route, ...]  # this rank's part in the move of each
    back: tuple[Route, ...]  # the same of the gradients of those that have some

    @classmethod
    def of(cls, cargo: Sequence[Cargo], rank: int) -> TransferManifest:
        """That of a rank."""
        there = tuple(route_boxes(one.before, one.after, rank) for one in cargo)
        back = tuple(route_boxes(one.after, one.before, rank) for one in cargo if one.differentiable)
        return cls(tuple(cargo), there, back)


class Transfer:
    """A move of several tensors. Every rank makes it, in the same order, whether it gives, gets, both or neither.

    Args:
        post: of this rank.
        what: it is, for errors.
        manifest: of this rank.
    """

    def __init__(self, post: BranchChannel, what: str, manifest: TransferManifest) -> None:
        self.post, self.cargo, tag = post, manifest.cargo, post.next_tag()
        back = [one for one in self.cargo if one.differentiable]
        self.there = Shipment(post, tag, what, manifest.there, [one.dtype for one in self.cargo])
        self.back = Shipment(post, tag, f"the gradient of {what}", manifest.back, [one.dtype for one in back], True)
        self._anchored = bool(back) and torch.is_grad_enabled()

    def depart(self, tensors: Sequence[Tensor]) -> Tensor:
        """Start sending what this rank holds; a token for ``arrive``, through which gradients find their way."""
        token: Tensor = _Depart.apply(self._anchor(), self, *tensors)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """What this rank wants, once it is here.

        Args:
            tokens: of departures whose gradients are known only when those of what arrives here were sent.
        """
        made = _Arrive.apply(self._anchor(), self, *tokens)  # type: ignore[no-untyped-call]
        return list(made)

    def _anchor(self) -> Tensor:
        """Without data; makes results ask for gradients."""
        return torch.empty(0, device=self.post.device, requires_grad=self._anchored)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, transfer: Transfer, *tensors: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.there.send(tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        transfer: Transfer = ctx.transfer
        gradients = iter(transfer.back.collect())
        return None, None, *(next(gradients) if one.differentiable else None for one in transfer.cargo)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, transfer: Transfer, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer, ctx.tokens = transfer, len(tokens)
        ctx.set_materialize_grads(False)
        found = [_without_view(tensor) for tensor in transfer.there.collect()]
        still = [tensor for tensor, one in zip(found, transfer.cargo, strict=True) if not one.differentiable]
        ctx.mark_non_differentiable(*still)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        transfer: Transfer = ctx.transfer
        pairs = zip(gradients, transfer.cargo, strict=True)
        transfer.back.send([gradient for gradient, one in pairs if one.differentiable])
        nothing: tuple[None, ...] = (None,) * (2 + ctx.tokens)
        return nothing


def _without_view(tensor: Tensor | None) -> Tensor:
    """The same storage, but no view, which autograd would not let others change."""
    assert tensor is not None  # forward, every tensor is there
    return tensor.data
