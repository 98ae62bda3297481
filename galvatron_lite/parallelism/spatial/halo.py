"""The borders of images that ranks share: borrowed from the neighbours, and their gradients returned to them.

Sides are taken in turn, outermost first, and what is sent along one holds what arrived along those before it, so
corners need no messages of their own. Gradients go back in the opposite order and are added where the border came
from, which is the exact adjoint. No autograd here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.groups import Arrival, AxisGroup, ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    PIXELS,
    Call,
    ShardSpec,
    ShardSpecs,
    from_local,
    global_shape,
    locals_only,
)
from galvatron_lite.parallelism.shares import Range
from galvatron_lite.parallelism.spatial.windows import (
    SideWindow,
    borrows,
    interior,
    lends,
    needed,
    output_extent,
    output_range,
    refusal,
    shard_range,
    stays,
    travels,
)

Amount = int | Sequence[int]
"""One number for all sides, or one a side, as torch takes them."""

Box = tuple[Range, ...]
"""Places along sides of an image, in their order."""

Loans = tuple[tuple[int, Box], ...]
"""What ranks of a group lend or borrow."""


class HaloSide(NamedTuple):
    """A side of an image, the window that slides along it, and the ranks that share it."""

    dim: int  # of the image
    extent: int  # of the global image
    window: SideWindow
    degree: int
    rank: int  # this one


Sides = tuple[HaloSide, ...]
"""Outermost first."""


@dataclass(frozen=True, slots=True)
class HaloPlaces:
    """What a rank holds, needs and makes along sides of an image."""

    sides: Sides
    dims: tuple[int, ...]  # of the image, that the sides are
    held: Box  # its shard
    needed: Box  # what its outputs need, with places outside the image
    extended: Box  # the smallest box with what it holds and what it needs
    outputs: Box
    interior: Box  # outputs that need its own shard only
    travelling: tuple[int, ...]  # sides along which something is sent, by number; the same on every rank
    # by side, what it lends to whom: of sides before, what outputs need (it has arrived); of later ones, its shard
    lent: tuple[Loans, ...]
    borrowed: tuple[Loans, ...]  # what it borrows, likewise


@dataclass(frozen=True, slots=True)
class Halo:
    """What a layer's windows need along the sides of an image that are shared, or padded unevenly."""

    places: HaloPlaces
    groups: tuple[AxisGroup, ...]  # that share each side


_ALONE = ShapeOnlyAxisGroup(1, 0)
"""The group of a side that is not shared."""


def halo_of(extents: Sequence[int], windows: Sequence[SideWindow], specs: Sequence[ShardSpec], layer: str) -> Halo:
    """The halo of windows that slide along the sides of an image.

    Raises:
        InputError: ranks cannot share the image under these windows; says why.
    """
    groups = {spec.dim: spec.group for spec in specs}
    groups |= {dim: _ALONE for dim, one in enumerate(windows, PIXELS) if one.before != one.after and dim not in groups}
    dims = sorted(groups)
    sides = tuple(
        HaloSide(dim, extents[dim - PIXELS], windows[dim - PIXELS], groups[dim].size, groups[dim].rank) for dim in dims
    )
    for side in sides:
        reason = refusal(side.window, side.extent, side.degree)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {side.dim} shared by {side.degree}", side.extent, remedy)
    return Halo(_places(sides), tuple(groups[dim] for dim in dims))


@lru_cache(maxsize=1024)
def _places(sides: Sides) -> HaloPlaces:
    """Worked out once for each image and layer."""
    shares = [(one.window, one.extent, one.degree, one.rank) for one in sides]
    outputs = tuple(output_range(*share) for share in shares)
    every = tuple(needed(one.window, one.extent, made) for one, made in zip(sides, outputs, strict=True))
    held = tuple(shard_range(one.extent, one.degree, one.rank) for one in sides)
    inside = tuple((max(start, 0), min(stop, one.extent)) for one, (start, stop) in zip(sides, every, strict=True))

    def boxes(index: int, loans: Sequence[tuple[int, Range]]) -> Loans:
        return tuple((peer, (*inside[:index], places, *held[index + 1 :])) for peer, places in loans)

    return HaloPlaces(
        sides,
        tuple(side.dim for side in sides),
        held,
        every,
        tuple((min(low, start), max(high, stop)) for (low, high), (start, stop) in zip(held, every, strict=True)),
        outputs,
        interior=tuple(interior(*share) for share in shares),
        travelling=tuple(index for index, one in enumerate(sides) if travels(one.window, one.extent, one.degree)),
        lent=tuple(boxes(index, lends(*share)) for index, share in enumerate(shares)),
        borrowed=tuple(boxes(index, borrows(*share)) for index, share in enumerate(shares)),
    )


def specs_after(specs: Sequence[ShardSpec], windows: Sequence[SideWindow]) -> ShardSpecs:
    """How what windows make of an image is sharded."""
    extents = (output_extent(windows[spec.dim - PIXELS], spec.extent) for spec in specs)
    return tuple(ShardSpec(spec.dim, extent, spec.group) for spec, extent in zip(specs, extents, strict=True))


def per_side(amount: Amount, sides: int) -> tuple[int, ...]:
    """One number a side."""
    numbers = (amount,) if isinstance(amount, int) else tuple(amount)
    return numbers * sides if len(numbers) == 1 else numbers


def check_batched(image: Tensor, sides: int, layer: str) -> None:
    """Refuse an image that is not (samples, channels, and its sides)."""
    if len(global_shape(image)) != PIXELS + sides:
        remedy = "Give (samples, channels, ...): pictures that are shared have a dim of samples."
        raise InputError(f"shape of the input of {layer}", global_shape(image), remedy)


def on_shards(call: Call, specs: ShardSpecs, windows: Sequence[SideWindow]) -> Tensor | None:
    """A layer that every rank can do on its shard alone; None where ranks need one another, or pad.

    The same on all ranks, and so is what autograd keeps.
    """
    if not all(stays(windows[spec.dim - PIXELS], spec.extent, spec.group.size) for spec in specs):
        return None
    with locals_only():
        result: Tensor = call.function(*call.args, **call.kwargs)
    return from_local(result, specs_after(specs, windows), call.rules)


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Whether the channels of an image lie innermost (``channels_last``)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def padded(tensor: Tensor, sides: Sides, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after the places of a tensor along each side; places left out where less than zero."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(sides, pads, strict=True):
        place = 2 * (tensor.dim() - 1 - side.dim)
        amounts[place : place + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def region(tensor: Tensor, dims: Sequence[int], places: Box, box: Box) -> Tensor:
    """The places of a box in a tensor that holds ``places`` along dims; a view."""
    for dim, have, want in zip(dims, places, box, strict=True):
        if have != want:
            tensor = tensor.narrow(dim, want[0] - have[0], want[1] - want[0])
    return tensor


def box_shape(shape: Sequence[int], dims: Sequence[int], box: Box) -> list[int]:
    """The shape of the places of a box."""
    extents = {dim: stop - start for dim, (start, stop) in zip(dims, box, strict=True)}
    return [extents.get(dim, extent) for dim, extent in enumerate(shape)]


@dataclass(slots=True)
class Borrowing:
    """An image whose borders are under way."""

    image: Tensor  # of ``places.extended``
    halo: Halo
    borders: list[Tensor]  # that have arrived or will, in order
    arrival: Arrival | None = None
    coming: Sequence[tuple[Box, Tensor]] = ()

    def region(self, box: Box) -> Tensor:
        """The places of a box that are here."""
        return region(self.image, self.halo.places.dims, self.halo.places.extended, box)

    def arrive(self) -> Tensor:
        """What the rank's outputs need, once it is here."""
        if self.arrival is not None:
            self.arrival.wait()
        for box, border in self.coming:
            self.region(box).copy_(border)
        self.arrival, self.coming = None, ()
        return self.region(self.halo.places.needed)


def borrow(shard: Tensor, halo: Halo, fill: float = 0.0) -> Borrowing:
    """Start borrowing what a rank's outputs need; all sides but the last have arrived on return.

    Args:
        shard: of the image.
        halo: of the layer.
        fill: of places outside the image.
    """
    places = halo.places
    borrowing = Borrowing(_extended(shard, halo, fill), halo, [])
    for index in places.travelling:
        borrowing.arrive()
        lent, borrowed = places.lent[index], places.borrowed[index]
        borrowing.arrival, borrowing.coming = _exchange(borrowing.image, halo, index, lent, borrowed)
        borrowing.borders += [border for _, border in borrowing.coming]
    return borrowing


def _exchange(
    tensor: Tensor, halo: Halo, index: int, sent: Loans, received: Loans
) -> tuple[Arrival, list[tuple[Box, Tensor]]]:
    """Start sending boxes of a tensor along a side, and receiving others."""
    dims, places = halo.places.dims, halo.places.extended
    parcels = [(peer, region(tensor, dims, places, box).contiguous()) for peer, box in sent]
    buffers = [(peer, tensor.new_empty(box_shape(tensor.shape, dims, box))) for peer, box in received]
    arrival = halo.groups[index].exchange(parcels, buffers)
    return arrival, [(box, buffer) for (_, box), (_, buffer) in zip(received, buffers, strict=True)]


def _extended(shard: Tensor, halo: Halo, fill: float) -> Tensor:
    """An image of all that a rank holds or needs, with room for borders; the shard itself where that is all."""
    places, dims = halo.places, halo.places.dims
    if places.extended == places.held:
        return shard
    shape = box_shape(shard.shape, dims, places.extended)
    image = torch.empty(shape, dtype=shard.dtype, device=shard.device, memory_format=layout_of(shard))
    region(image, dims, places.extended, places.held).copy_(shard)
    for box in _outside(halo.places.sides, places.extended):
        region(image, dims, places.extended, box).fill_(fill)
    return image


def with_borders(shard: Tensor, halo: Halo, borders: Sequence[Tensor]) -> Tensor:
    """What a rank's outputs need, from its shard and the borders that it borrowed."""
    boxes = [box for index in halo.places.travelling for _, box in halo.places.borrowed[index]]
    image = Borrowing(_extended(shard, halo, 0.0), halo, [], coming=list(zip(boxes, borders, strict=True)))
    return image.arrive()


def _outside(sides: Sides, box: Box) -> Iterator[Box]:
    """What of a box lies outside the image."""
    for index, (side, (start, stop)) in enumerate(zip(sides, box, strict=True)):
        for places in ((start, min(stop, 0)), (max(start, side.extent), stop)):
            if places[0] < places[1]:
                yield (*box[:index], places, *box[index + 1 :])


def give_back(gradient: Tensor, halo: Halo) -> Callable[[], Tensor]:
    """Start returning the gradients of borders to where the borders came from.

    Args:
        gradient: of what this rank's outputs need (``halo.places.needed``); is written to.
        halo: as it was borrowed.

    Returns:
        What waits for them, and returns the gradient of this rank's shard.
    """
    places, left = halo.places, list(halo.places.travelling)
    both = zip(places.extended, places.needed, strict=True)
    pads = [(start - low, high - stop) for (low, high), (start, stop) in both]
    total = padded(gradient, places.sides, pads)

    def start() -> tuple[Arrival, list[tuple[Box, Tensor]]] | None:
        if not left:
            return None
        index = left.pop()
        return _exchange(total, halo, index, places.borrowed[index], places.lent[index])

    first = start()

    def finish() -> Tensor:
        under_way = first
        while under_way is not None:
            arrival, lent = under_way
            arrival.wait()
            for box, part in lent:
                region(total, places.dims, places.extended, box).add_(part)
            under_way = start()
        held = region(total, places.dims, places.extended, places.held)
        return held.contiguous(memory_format=layout_of(total))

    return finish
