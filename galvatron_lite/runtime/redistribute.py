"""Moving an activation from one way to lie on the stage to another, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.layout import AxisSplit, Box, Route, route
from galvatron_lite.runtime.piecewise import move_pieces

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves activations between splits on a stage."""

    group: dist.ProcessGroup | None  # all ranks of the stage; None for a stage of one rank
    place: int  # this rank's place in the stage

    def __call__(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """The tensor split another way.

        Args:
            tensor: this rank's box of it, a plain tensor.
            source: how it is split.
            target: how it is to be split.
            shape: of the whole tensor.

        Returns:
            This rank's box under the target. The gradient goes the way back: the gradient of a box that several ranks
            hold is complete on each of them.
        """
        if source == target or self.group is None:
            return tensor
        moved: Tensor = _Redistribute.apply(tensor, self, source, target, shape)  # type: ignore[no-untyped-call]
        return moved

    def move(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """The same without autograd."""
        if source.pieced is not None or target.pieced is not None:
            return move_pieces(tensor, source, target, shape, self.place, self.group)
        way = route(source, target, shape, self.place)
        if way.local:
            return cut_box(tensor, way.wanted.within(way.held)).clone(memory_format=torch.contiguous_format)
        return self._exchange(tensor, way)

    def _exchange(self, tensor: Tensor, way: Route) -> Tensor:
        """All-to-all of the pieces, as bytes: gloo does not know every dtype."""
        pieces = [cut_box(tensor, piece.within(way.held)).flatten() for piece in way.sends if piece.items]
        sent = torch.cat(pieces) if pieces else tensor.new_empty(0)
        arriving = [piece for piece in way.receives if piece.items]
        # what comes from one rank alone is in order already; no view, so that code behind may change it in place
        received = tensor.new_empty(way.wanted.shape if len(arriving) <= 1 else way.wanted.items)
        item = tensor.element_size()
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8), sent.view(torch.uint8),
            [piece.items * item for piece in way.receives], [piece.items * item for piece in way.sends],
            group=self.group,
        )  # fmt: skip
        return received if len(arriving) <= 1 else _assemble(received, way.wanted, arriving)


def cut_box(tensor: Tensor, piece: Box) -> Tensor:
    """Part of a tensor, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in piece.ranges)]


def _assemble(received: Tensor, wanted: Box, pieces: Sequence[Box]) -> Tensor:
    """The wanted box from pieces that lie one after the other."""
    result = received.new_empty(wanted.shape)
    parts = torch.split(received, [piece.items for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        cut_box(result, piece.within(wanted)).copy_(part.view(piece.shape))
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mover: Mover, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        ctx.way = (mover, source, target, shape)
        return mover.move(tensor, source, target, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mover, source, target, shape = ctx.way
        return mover.move(gradient, target, source, shape), None, None, None, None
