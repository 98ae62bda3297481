"""What changes hands: tensors by name, where their items lie before and after, and the messages that move them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.layout import Box
from galvatron_lite.runtime.pieces import Held, ItemRun, part_of
from galvatron_lite.runtime.switch.routes import Everyone, receives, sends

MESSAGE_BYTES = 64 * 2**20
"""Of whole tensors that travel together: few messages, and little memory for them."""


@dataclass(frozen=True, slots=True)
class HeldItems:
    """Items of a tensor that this rank holds."""

    tensor: Tensor
    chunk: ItemRun


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What a rank tells the others of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype  # of its items
    boxes: tuple[Box, ...]  # that the rank has


class Hold:
    """The tensors of this rank, in one of the two plans.

    Args:
        held: what it holds; several of one name where parts of the rank share it.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self.parts: dict[str, list[HeldItems]] = {}
        self.told: dict[str, TensorReport] = {}
        for one in held:
            self.parts.setdefault(one.name, []).extend(HeldItems(one.tensor, chunk) for chunk in one.chunks)
            boxes = tuple(part.chunk.whole for part in self.parts[one.name])
            self.told[one.name] = TensorReport(one.shape, one.tensor.dtype, boxes)

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """This rank's tensors of some names."""
        return [part.tensor for name in names for part in self.parts.get(name, ())]


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor that changes hands."""

    name: str  # of it
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype  # of its items
    before: Everyone  # what every rank holds
    after: Everyone  # what every rank is to hold

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return Box(tuple((0, extent) for extent in self.shape)).items * self.dtype.itemsize

    def back(self) -> MovedTensor:
        """The way back."""
        return MovedTensor(self.name, self.shape, self.dtype, self.after, self.before)


def turns(items: Sequence[MovedTensor], largest: int = MESSAGE_BYTES) -> Iterator[list[MovedTensor]]:
    """Items of one dtype that travel together: of at most so many bytes, or one alone."""
    for dtype in dict.fromkeys(item.dtype for item in items):
        chosen, size = list[MovedTensor](), 0
        for item in (item for item in items if item.dtype == dtype):
            if chosen and size + item.nbytes > largest:
                yield chosen
                chosen, size = [], 0
            chosen.append(item)
            size += item.nbytes
        if chosen:
            yield chosen


def message_bytes(items: Sequence[MovedTensor]) -> int:
    """Bytes of what this rank sends to others and receives from them in one turn."""
    rank = dist.get_rank()
    legs = ((item, leg) for item in items for way in (sends, receives) for leg in way(item.before, item.after, rank))
    return sum(leg.box.items * item.dtype.itemsize for item, leg in legs if leg.peer != rank)


def move(items: Sequence[MovedTensor], source: Hold, target: Hold, device: torch.device) -> int:
    """Carry items of one dtype from where they lie to where they are to lie; all ranks of the world call it.

    Args:
        items: to be carried.
        source: this rank's tensors of the plan that is left.
        target: those of the other plan.
        device: of this rank's messages.

    Returns:
        Bytes that this rank sent to others.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    incoming: list[list[Tensor]] = [[] for _ in range(world)]
    for item in items:
        for leg in sends(item.before, item.after, rank):
            outgoing[leg.peer].append(_view(_holding(source.parts[item.name], leg.box), leg.box))
        for leg in receives(item.before, item.after, rank):
            incoming[leg.peer].append(_view(target.parts[item.name][leg.place], leg.box))
    for here, there in zip(outgoing[rank], incoming[rank], strict=True):
        there.copy_(here)
    outgoing[rank], incoming[rank] = [], []
    if world == 1 or all(item.before == item.after for item in items):
        return 0
    return _exchange(outgoing, incoming, items[0].dtype, device)


def _holding(parts: Sequence[HeldItems], box: Box) -> HeldItems:
    """The first part that has the items of a box; those that a rank holds may be more than are sent from."""
    return next(part for part in parts if part.chunk.whole.meet(box) == box)


def _view(part: HeldItems, box: Box) -> Tensor:
    """The items of a box of the whole tensor, in this rank's."""
    inside = box.within(part.chunk.whole)
    ranges = zip(inside.ranges, part.chunk.local.ranges, strict=True)
    return part_of(part.tensor, Box(tuple((start + first, stop + first) for (start, stop), (first, _) in ranges)))


def _exchange(
    outgoing: Sequence[list[Tensor]], incoming: Sequence[list[Tensor]], dtype: torch.dtype, device: torch.device
) -> int:
    """All-to-all, as bytes: gloo does not know every dtype."""
    sizes = [[sum(one.numel() for one in to) for to in way] for way in (outgoing, incoming)]
    pieces = [one.reshape(-1).to(device) for to in outgoing for one in to]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    received = torch.empty(sum(sizes[1]), dtype=dtype, device=device)
    ways = [[size * dtype.itemsize for size in way] for way in sizes]
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), ways[1], ways[0])
    places = [one for come in incoming for one in come]
    for place, values in zip(places, torch.split(received, [one.numel() for one in places]), strict=True):
        place.copy_(values.view(place.shape))
    return sent.nbytes


def items_of(
    before: Sequence[Mapping[str, TensorReport]], after: Sequence[Mapping[str, TensorReport]]
) -> list[MovedTensor]:
    """Every tensor of two plans that a rank wants after, in the order in which ranks name them; alike on every rank.

    Args:
        before: what each rank holds.
        after: what each is to hold.
    """
    first: dict[str, TensorReport] = {}
    for told in (*before, *after):
        for name, one in told.items():
            first.setdefault(name, one)
    return [
        MovedTensor(name, one.shape, one.dtype, *(_boxes(name, ranks) for ranks in (before, after)))
        for name, one in first.items()
        if any(name in told for told in after)
    ]


def _boxes(name: str, ranks: Sequence[Mapping[str, TensorReport]]) -> Everyone:
    return tuple(told[name].boxes if name in told else () for told in ranks)
