"""Which rank sends which items when a tensor is cut anew, and the messages that carry them.

Each rank holds boxes of a tensor before, and wants boxes of it after. A box that several ranks hold is sent by the rank
that wants it, to itself, or else by its holders in turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.activations.layout import Box
from galvatron_lite.runtime.parameters.pieces import ItemRun, LocalShard, all_of, part_of

MESSAGE_BYTES = 64 * 2**20
"""Bytes of tensors that are sent together: few messages, and little memory for them."""
Boxes = tuple[Box, ...]
"""What one rank holds of a tensor; boxes are equal or disjoint."""
Everyone = tuple[Boxes, ...]
"""The same of all ranks."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Items that go from one rank to another."""

    peer: int  # the other rank; this rank itself where they stay
    place: int  # number of this rank's box that they are in
    box: Box  # of the tensor


@lru_cache(maxsize=4096)
def holders(everyone: Everyone) -> Mapping[Box, tuple[int, ...]]:
    """The ranks that hold each box, in order."""
    ranks: dict[Box, dict[int, None]] = {}
    for rank, boxes in enumerate(everyone):
        for box in boxes:
            ranks.setdefault(box, {})[rank] = None
    return {box: tuple(found) for box, found in ranks.items()}


@lru_cache(maxsize=4096)
def first_only(everyone: Everyone) -> Everyone:
    """The boxes of the first rank that holds each, once."""
    first = {box: ranks[0] for box, ranks in holders(everyone).items()}
    return tuple(
        tuple(box for box in dict.fromkeys(boxes) if first[box] == rank) for rank, boxes in enumerate(everyone)
    )


@lru_cache(maxsize=4096)
def sends(before: Everyone, after: Everyone, rank: int) -> tuple[Leg, ...]:
    """What a rank sends; for each receiver in the order in which ``receives`` lists it there."""
    ranks = holders(before)
    mine = {box: before[rank].index(box) for box in ranks if box in before[rank]}
    return tuple(
        Leg(receiver, place, met)
        for receiver, wanted in enumerate(after)
        for box, place in mine.items()
        if _sender(ranks[box], receiver) == rank
        for target in wanted
        if (met := box.meet(target)).items
    )


@lru_cache(maxsize=4096)
def receives(before: Everyone, after: Everyone, rank: int) -> tuple[Leg, ...]:
    """What a rank receives, by sender in the order in which ``sends`` lists it there."""
    return tuple(
        Leg(_sender(ranks, rank), place, met)
        for box, ranks in holders(before).items()
        for place, target in enumerate(after[rank])
        if (met := box.meet(target)).items
    )


def covers(everyone: Everyone, shape: tuple[int, ...]) -> bool:
    """Whether the ranks together hold all items of a tensor."""
    return sum(box.items for box in holders(everyone)) == all_of(shape).items


def _sender(ranks: tuple[int, ...], receiver: int) -> int:
    return receiver if receiver in ranks else ranks[receiver % len(ranks)]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Items of a tensor that this rank holds."""

    tensor: Tensor
    chunk: ItemRun

    def view(self, box: Box) -> Tensor:
        """The items of a box of the complete tensor."""
        inside = box.within(self.chunk.whole)
        ranges = zip(inside.ranges, self.chunk.local.ranges, strict=True)
        return part_of(self.tensor, Box(tuple((first + start, first + stop) for (start, stop), (first, _) in ranges)))


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What a rank tells the others of a tensor."""

    shape: tuple[int, ...]  # of the complete tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # that the rank has


class LocalTensors:
    """The tensors of this rank in one of the two plans; several of one name where stages of the rank share it."""

    def __init__(self, held: Iterable[LocalShard] = ()) -> None:
        self.parts: dict[str, list[LocalPart]] = {}
        self.reports: dict[str, TensorReport] = {}
        for one in held:
            self.parts.setdefault(one.name, []).extend(LocalPart(one.tensor, chunk) for chunk in one.chunks)
            boxes = tuple(part.chunk.whole for part in self.parts[one.name])
            self.reports[one.name] = TensorReport(one.shape, one.tensor.dtype, boxes)

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
    rank = dist.get_rank()
    legs = (
        (item, leg) for item in items for route in (sends, receives) for leg in route(item.before, item.after, rank)
    )
    return sum(leg.box.items * item.dtype.itemsize for item, leg in legs if leg.peer != rank)


def move(items: Sequence[MovedTensor], source: LocalTensors, target: LocalTensors, device: torch.device) -> int:
    """Copy a load from one plan's tensors to the other's; all ranks call it.

    Returns:
        Bytes that this rank sent to others.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    incoming: list[list[Tensor]] = [[] for _ in range(world)]
    for item in items:
        for leg in sends(item.before, item.after, rank):
            parts = source.parts[item.name]
            part = next(part for part in parts if part.chunk.whole.meet(leg.box) == leg.box)
            outgoing[leg.peer].append(part.view(leg.box))
        for leg in receives(item.before, item.after, rank):
            incoming[leg.peer].append(target.parts[item.name][leg.place].view(leg.box))
    for here, there in zip(outgoing[rank], incoming[rank], strict=True):
        there.copy_(here)
    outgoing[rank], incoming[rank] = [], []
    if world == 1 or all(item.before == item.after for item in items):
        return 0
    return _exchange(outgoing, incoming, items[0].dtype, device)


def _exchange(
    outgoing: Sequence[list[Tensor]], incoming: Sequence[list[Tensor]], dtype: torch.dtype, device: torch.device
) -> int:
    """All-to-all, as bytes: gloo does not support every dtype."""
    sizes = [[sum(view.numel() for view in views) * dtype.itemsize for views in side] for side in (outgoing, incoming)]
    pieces = [view.reshape(-1).to(device) for views in outgoing for view in views]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    received = torch.empty(sum(sizes[1]) // dtype.itemsize, dtype=dtype, device=device)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), sizes[1], sizes[0])
    targets = [view for views in incoming for view in views]
    for view, values in zip(targets, torch.split(received, [view.numel() for view in targets]), strict=True):
        view.copy_(values.view(view.shape))
    return sent.nbytes
