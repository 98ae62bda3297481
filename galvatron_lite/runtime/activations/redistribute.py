"""Moving an activation from one way to lie on the stage to another, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.activations.layout import AxisSplit, Box, Boxes, route

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxExchange:
    """Moves activations between splits on a stage."""

    group: dist.ProcessGroup | None  # all ranks of the stage; None for a stage of one rank
    place: int  # this rank's place in the stage

    def __call__(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """The tensor split another way.

        Returns:
            This rank's part under the target. The gradient goes the way back: the gradient of a part that several ranks
            hold is complete on each of them.
        """
        if source == target or self.group is None:
            return tensor
        moved: Tensor = _Redistribute.apply(tensor, self, source, target, shape)  # type: ignore[no-untyped-call]
        return moved

    def move(self, tensor: Tensor, source: AxisSplit, target: AxisSplit, shape: Shape) -> Tensor:
        """The same without autograd: an all-to-all of boxes."""
        way, dims = route(source, target, shape, self.place), (source.pieced or 0, target.pieced or 0)
        if way.local:
            part = cut_box(tensor, way.wanted[0].within(way.held[0]))
            return part.clone(memory_format=torch.contiguous_format)
        parts = [_part(tensor, way.held, dims[0], box).flatten() for box in chain(*way.sends)]
        sent = torch.cat(parts) if parts else tensor.new_empty(0)
        arriving = list(chain(*way.receives))
        extents = list(way.wanted[0].shape)
        extents[dims[1]] = sum(box.shape[dims[1]] for box in way.wanted)
        # one box is in order already; no view, so that code behind may change it in place
        alone = len(arriving) <= 1 and len(way.wanted) == 1
        received = tensor.new_empty(extents if alone else sum(box.items for box in arriving))
        item = tensor.element_size()
        incoming, outgoing = (
            [item * sum(box.items for box in boxes) for boxes in every] for every in (way.receives, way.sends)
        )
        # as bytes: gloo does not know every dtype
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8), sent.view(torch.uint8), incoming, outgoing, group=self.group
        )
        if alone:
            return received
        result = received.new_empty(extents)
        for box, part in zip(arriving, torch.split(received, [box.items for box in arriving]), strict=True):
            _part(result, way.wanted, dims[1], box).copy_(part.view(box.shape))
        return result


def cut_box(tensor: Tensor, piece: Box) -> Tensor:
    """Part of a tensor, as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in piece.ranges)]


def _part(tensor: Tensor, held: Boxes, dim: int, box: Box) -> Tensor:
    """A box of what a rank holds, as a view; the boxes that it holds lie one behind the other along a dim."""
    before = 0
    for one in held:
        if one.meet(box) == box:
            ranges = list(box.within(one).ranges)
            ranges[dim] = (ranges[dim][0] + before, ranges[dim][1] + before)
            return cut_box(tensor, Box(tuple(ranges)))
        before += one.shape[dim]
    raise AssertionError("a box that is sent is held")


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, mover: BoxExchange, source: AxisSplit, target: AxisSplit, shape: Shape
    ) -> Tensor:
        ctx.way = (mover, source, target, shape)
        return mover.move(tensor, source, target, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mover, source, target, shape = ctx.way
        return mover.move(gradient, target, source, shape), None, None, None, None
