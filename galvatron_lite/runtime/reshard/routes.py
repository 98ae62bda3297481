"""Tensors that ranks hold in boxes, and the messages that bring every rank the boxes that it is to hold.

A change of plan, and full tensors on every rank, are such exchanges: each rank reports the boxes that it has and those
that it wants, and all ranks compute the same messages from the reports (``layout.route_boxes``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.activations.layout import (
    Box,
    Boxes,
    Route,
    all_of,
    all_to_all,
    cut_box,
    holders_of,
    route_boxes,
)  # fmt: skip
from galvatron_lite.runtime.parameters.pieces import LocalShard

MESSAGE_BYTES = 64 * 2**20
"""Bytes of tensors that are sent together: few messages, and little memory for them."""
Everyone = tuple[Boxes, ...]
"""What each rank holds of a tensor; boxes are equal or disjoint."""


@lru_cache(maxsize=4096)
def first_only(everyone: Everyone) -> Everyone:
    """The boxes of the first rank that holds each, once."""
    first = {box: ranks[0] for box, ranks in holders_of(everyone).items()}
    return tuple(
        tuple(box for box in dict.fromkeys(boxes) if first[box] == rank) for rank, boxes in enumerate(everyone)
    )


def covers(everyone: Everyone, shape: tuple[int, ...]) -> bool:
    """Whether the ranks together hold all items of a tensor."""
    return sum(box.items for box in holders_of(everyone)) == all_of(shape).items


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What a rank tells the others of a tensor."""

    shape: tuple[int, ...]  # of the complete tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # that the rank has


class LocalTensors:
    """The tensors of this rank in one of the two plans; several of one name where stages of the rank share it."""

    def __init__(self, held: Iterable[LocalShard] = ()) -> None:
        self.parts: dict[str, list[LocalShard]] = {}
        self.reports: dict[str, TensorReport] = {}
        for one in held:
            self.parts.setdefault(one.name, []).extend([one] if one.box.items else [])
            boxes = tuple(part.box for part in self.parts[one.name])
            self.reports[one.name] = TensorReport(one.shape, one.tensor.dtype, boxes)

    def views(self, name: str, box: Box) -> list[Tensor]:
        """The items of a box, in every part that has it."""
        return [cut_box(part.items, box.within(part.box)) for part in self.parts[name] if part.box.meet(box) == box]

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors of some names."""
        return [part.tensor for name in names for part in self.parts.get(name, ())]


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor that is cut anew."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    before: Everyone
    after: Everyone

    @property
    def nbytes(self) -> int:
        """Of the complete tensor."""
        return all_of(self.shape).items * self.dtype.itemsize

    def route(self, rank: int) -> Route:
        """What a rank sends and receives of it."""
        return route_boxes(self.before, self.after, rank)

    def reversed(self) -> MovedTensor:
        """The way back."""
        return replace(self, before=self.after, after=self.before)


def moved_tensors(
    before: Sequence[Mapping[str, TensorReport]], after: Sequence[Mapping[str, TensorReport]]
) -> list[MovedTensor]:
    """Every tensor that a rank wants after, from the reports of all ranks; equal on every rank."""
    first: dict[str, TensorReport] = {}
    for reports in (*before, *after):
        for name, report in reports.items():
            first.setdefault(name, report)
    return [
        MovedTensor(name, report.shape, report.dtype, _boxes(name, before), _boxes(name, after))
        for name, report in first.items()
        if any(name in reports for reports in after)
    ]


def _boxes(name: str, everyone: Sequence[Mapping[str, TensorReport]]) -> Everyone:
    return tuple(reports[name].boxes if name in reports else () for reports in everyone)


def loads_of(items: Sequence[MovedTensor], largest: int = MESSAGE_BYTES) -> Iterator[list[MovedTensor]]:
    """Items of one dtype that are sent together: at most ``largest`` bytes, or a single item."""
    for dtype in dict.fromkeys(item.dtype for item in items):
        load, size = list[MovedTensor](), 0
        for item in (item for item in items if item.dtype == dtype):
            if load and size + item.nbytes > largest:
                yield load
                load, size = [], 0
            load.append(item)
            size += item.nbytes
        if load:
            yield load


def message_bytes(items: Sequence[MovedTensor]) -> int:
    """Bytes that this rank sends to others and receives from them for one load."""
    rank, total = dist.get_rank(), 0
    for item in items:
        route = item.route(rank)
        for peer in range(len(item.before)):
            boxes = (*route.sends[peer], *route.receives[peer]) if peer != rank else ()
            total += sum(box.items for box in boxes) * item.dtype.itemsize
    return total


def move(items: Sequence[MovedTensor], source: LocalTensors, target: LocalTensors, device: torch.device) -> int:
    """Copy a load from one plan's tensors to the other's; all ranks call it.

    Returns:
        Bytes that this rank sent to others.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    incoming: list[list[list[Tensor]]] = [[] for _ in range(world)]
    for item in items:
        route = item.route(rank)
        for peer in range(world):
            outgoing[peer] += [source.views(item.name, box)[0] for box in route.sends[peer]]
            incoming[peer] += [target.views(item.name, box) for box in route.receives[peer]]
    for here, everywhere in zip(outgoing[rank], incoming[rank], strict=True):
        for there in everywhere:
            there.copy_(here)
    outgoing[rank], incoming[rank] = [], []
    if world == 1 or all(item.before == item.after for item in items):
        return 0
    return _exchange(outgoing, incoming, items[0].dtype, device)


def _exchange(
    outgoing: Sequence[list[Tensor]], incoming: Sequence[list[list[Tensor]]], dtype: torch.dtype, device: torch.device
) -> int:
    counts = [sum(views[0].numel() for views in arriving) for arriving in incoming]
    received = torch.empty(sum(counts), dtype=dtype, device=device)
    sent_bytes = all_to_all(outgoing, received, counts)
    targets = [views for arriving in incoming for views in arriving]
    for views, values in zip(targets, torch.split(received, [views[0].numel() for views in targets]), strict=True):
        for view in views:
            view.copy_(values.view(view.shape))
    return sent_bytes
