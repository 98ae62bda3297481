"""Moving an activation of which ranks hold several boxes: tokens that context parallelism shares in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.layout import AxisSplit, Box

Boxes = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class PieceRoute:
    """What one rank sends and receives."""

    held: Boxes  # the boxes that the rank holds before, one behind the other along a dim
    wanted: Boxes  # those it holds after
    sends: tuple[Boxes, ...]  # boxes that go to each rank
    receives: tuple[Boxes, ...]  # boxes that come from each rank


@lru_cache(maxsize=1024)
def piece_route(source: AxisSplit, target: AxisSplit, shape: tuple[int, ...], place: int) -> PieceRoute:
    """The way of the rank at ``place`` from one split of a tensor of that whole shape to another."""
    ranks = range(source.devices)
    before, after = ([split.boxes(rank, shape) for rank in ranks] for split in (source, target))
    holders: dict[Boxes, list[int]] = {}
    for rank, boxes in enumerate(before):
        holders.setdefault(boxes, []).append(rank)

    def sent(sender: int, receiver: int) -> Boxes:
        """Of ranks that hold the same, the receiver itself gives, or one by turns."""
        same = holders[before[sender]]
        if sender != (receiver if receiver in same else same[receiver % len(same)]):
            return ()
        met = [held.meet(wanted) for wanted in after[receiver] for held in before[sender]]
        return tuple(box for box in met if box.items)

    return PieceRoute(
        before[place], after[place], tuple(sent(place, rank) for rank in ranks),
        tuple(sent(rank, place) for rank in ranks),
    )  # fmt: skip


def move_pieces(
    tensor: Tensor,
    source: AxisSplit,
    target: AxisSplit,
    shape: tuple[int, ...],
    place: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """A rank's part of a tensor under another split. No autograd; all ranks of the stage call it together.

    Args:
        tensor: the rank's part.
        source: how the whole is split.
        target: how it is to be split.
        shape: of the whole.
        place: of the rank in the stage.
        group: the ranks of the stage.
    """
    way = piece_route(source, target, shape, place)
    dims = (source.pieced or 0, target.pieced or 0)
    sent = _flat([_part(tensor, way.held, dims[0], box) for boxes in way.sends for box in boxes], tensor)
    received = tensor.new_empty(sum(box.items for boxes in way.receives for box in boxes))
    item = tensor.element_size()
    # as bytes: gloo does not know every dtype
    dist.all_to_all_single(
        received.view(torch.uint8), sent.view(torch.uint8),
        [item * sum(box.items for box in boxes) for boxes in way.receives],
        [item * sum(box.items for box in boxes) for boxes in way.sends],
        group=group,
    )  # fmt: skip
    return _assembled(received, way, dims[1])


def _assembled(received: Tensor, way: PieceRoute, dim: int) -> Tensor:
    extents = list(way.wanted[0].shape)
    extents[dim] = sum(box.shape[dim] for box in way.wanted)
    result = received.new_empty(extents)
    boxes = [box for several in way.receives for box in several]
    for box, part in zip(boxes, torch.split(received, [box.items for box in boxes]), strict=True):
        _part(result, way.wanted, dim, box).copy_(part.view(box.shape))
    return result


def _part(tensor: Tensor, held: Boxes, dim: int, box: Box) -> Tensor:
    """A box of what a rank holds, as a view."""
    before = 0
    for one in held:
        if one.meet(box) == box:
            ranges = list(box.within(one).ranges)
            ranges[dim] = (ranges[dim][0] + before, ranges[dim][1] + before)
            return tensor[tuple(slice(start, stop) for start, stop in ranges)]
        before += one.shape[dim]
    raise AssertionError("a box that is sent is held")


def _flat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts]) if parts else like.new_empty(0)
