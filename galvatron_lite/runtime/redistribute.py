"""Moving an activation from one layout on the stage to another, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.layout import Layout, Rectangle, Route, route


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves activations between layouts of a stage.

    Attributes:
        group: all ranks of the stage; None for a stage of one rank.
        place: this rank's place in the stage.
    """

    group: dist.ProcessGroup | None
    place: int

    def __call__(self, tensor: Tensor, source: Layout, target: Layout, rows: int) -> Tensor:
        """The tensor in another layout.

        Args:
            tensor: this rank's share: (rows, ...) or (rows, tokens, ...).
            source: the layout it is in.
            target: the layout it is to be in.
            rows: of the whole micro-batch.

        Returns:
            This rank's share in the target layout. The gradient goes the way back: the gradient of a share that
            several ranks hold is complete on each of them.
        """
        if source == target or self.group is None:
            return tensor
        moved: Tensor = _Redistribute.apply(tensor, self, source, target, rows)  # type: ignore[no-untyped-call]
        return moved

    def move(self, tensor: Tensor, source: Layout, target: Layout, rows: int) -> Tensor:
        """The same without autograd."""
        flat = tensor if tensor.dim() > 1 else tensor.unsqueeze(1)
        way = route(source, target, rows, flat.shape[1] * source.sequence, self.place)
        moved = _cut(flat, way.wanted.within(way.held)).clone() if way.local else self._exchange(flat, way)
        return moved if tensor.dim() > 1 else moved.squeeze(1)

    def _exchange(self, tensor: Tensor, way: Route) -> Tensor:
        """All-to-all of the pieces, as bytes: gloo does not know every dtype."""
        rest = tensor.shape[2:]
        item = rest.numel() * tensor.element_size()
        sent = torch.cat([_cut(tensor, piece.within(way.held)).flatten() for piece in way.sends if piece.items])
        received = sent.new_empty(sum(piece.items for piece in way.receives) * rest.numel())
        dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8),
            [piece.items * item for piece in way.receives], [piece.items * item for piece in way.sends],
            group=self.group,
        )  # fmt: skip
        return _assemble(received, way, rest)


def _cut(tensor: Tensor, piece: Rectangle) -> Tensor:
    return tensor[piece.top : piece.bottom, piece.left : piece.right]


def _assemble(received: Tensor, way: Route, rest: torch.Size) -> Tensor:
    """The wanted rectangle from the pieces, which lie one after the other by sender."""
    wanted = way.wanted
    result = received.new_empty((wanted.bottom - wanted.top, wanted.right - wanted.left, *rest))
    pieces = [piece for piece in way.receives if piece.items]
    parts = torch.split(received, [piece.items * rest.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        place = _cut(result, piece.within(wanted))
        place.copy_(part.view(place.shape))
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mover: Mover, source: Layout, target: Layout, rows: int) -> Tensor:
        ctx.way = (mover, source, target, rows)
        return mover.move(tensor, source, target, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mover, source, target, rows = ctx.way
        return mover.move(gradient, target, source, rows), None, None, None, None
