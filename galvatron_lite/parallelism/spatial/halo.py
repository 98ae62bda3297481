"""The borders of images that ranks share: borrowed from the neighbours, and their gradients returned to them.

Sides are taken in turn, outermost first, and what is sent along one holds what arrived along those before it, so
corners need no messages of their own. Gradients go back in the opposite order and are added where the border came
from, which is the exact adjoint. No autograd here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    held: Box  # its shard
    needed: Box  # what its outputs need, with places outside the image
    outputs: Box
    interior: Box  # outputs that need its own shard only
    travelling: tuple[int, ...]  # sides along which something is sent, by number; the same on every rank
    # by side, what it lends to whom: of sides before, what outputs need (it has arrived); of later ones, its shard
    lent: tuple[Loans, ...]
    borrowed: tuple[Loans, ...]  # what it borrows, likewise

    def borders(self) -> tuple[Box, ...]:
        """What is borrowed, in the order in which it arrives."""
        return tuple(box for index in self.travelling for _, box in self.borrowed[index])


@dataclass(frozen=True, slots=True)
class Halo:
    """What a layer's windows need along the sides of an image that are shared, or padded unevenly."""

    places: HaloPlaces
    groups: tuple[AxisGroup, ...]  # that share each side

    @property
    def sides(self) -> Sides:
        """The sides."""
        return self.places.sides


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
        held,
        every,
        outputs,
        interior=tuple(interior(*share) for share in shares),
        travelling=tuple(index for index, one in enumerate(sides) if travels(one.window, one.extent, one.degree)),
        lent=tuple(boxes(index, lends(*share)) for index, share in enumerate(shares)),
        borrowed=tuple(boxes(index, borrows(*share)) for index, share in enumerate(shares)),
    )


def sides_after(sides: Sides) -> Sides:
    """The sides of what the windows make."""
    return tuple(one._replace(extent=output_extent(one.window, one.extent), window=SideWindow()) for one in sides)


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


class ImagePart(NamedTuple):
    """Some of an image, and the places it holds along the sides of a halo."""

    tensor: Tensor
    places: Box


@dataclass(frozen=True, slots=True)
class Borrowing:
    """Borders under way."""

    here: tuple[ImagePart, ...]  # this rank's shard and the borders of sides taken before
    border: tuple[ImagePart, ...] = ()
    arrival: Arrival | None = None

    def wait(self) -> tuple[ImagePart, ...]:
        """This rank's shard, and then all borders in their order."""
        if self.arrival is not None:
            self.arrival.wait()
        return self.here + self.border


def borrow(shard: Tensor, halo: Halo) -> Borrowing:
    """Start borrowing what a rank's outputs need; all sides but the last have arrived on return."""
    places = halo.places
    borrowing = Borrowing((ImagePart(shard, places.held),))
    for index in places.travelling:
        here = borrowing.wait()
        sent = [(peer, assemble(here, halo.sides, box).contiguous()) for peer, box in places.lent[index]]
        border = tuple(ImagePart(_empty(shard, halo.sides, box), box) for _, box in places.borrowed[index])
        wanted = [(peer, part.tensor) for (peer, _), part in zip(places.borrowed[index], border, strict=True)]
        borrowing = Borrowing(here, border, halo.groups[index].exchange(sent, wanted))
    return borrowing


def borrowed_image(shard: Tensor, halo: Halo, fill: float = 0.0) -> Tensor:
    """What a rank's outputs need; places outside the image are filled."""
    return assemble(borrow(shard, halo).wait(), halo.sides, halo.places.needed, fill)


def assemble(parts: Sequence[ImagePart], sides: Sides, box: Box, fill: float = 0.0) -> Tensor:
    """An image of the places of a box, put together; a view where the first part holds them all.

    Args:
        parts: that hold all places of the box inside the image.
        sides: those that boxes are about.
        box: the places wanted.
        fill: of places outside the image.
    """
    first = parts[0]
    short = [
        index for index, (have, want) in enumerate(zip(first.places, box, strict=True)) if _meet(have, want) != want
    ]
    if not short:
        return _view(first, sides, box)
    if len(short) == 1:
        return _joined(parts, sides, box, short[0], fill)
    result = ImagePart(_empty(first.tensor, sides, box, layout_of(first.tensor)), box)
    for part in parts:
        common = _common(part.places, box)
        if common is not None:
            _view(result, sides, common).copy_(_view(part, sides, common))
    for outside in _outside(sides, box):
        _view(result, sides, outside).fill_(fill)
    return result.tensor


def _joined(parts: Sequence[ImagePart], sides: Sides, box: Box, index: int, fill: float) -> Tensor:
    """The places of a box whose parts follow one another along one side: one copy."""
    layout = layout_of(parts[0].tensor)
    pieces = [ImagePart(_empty(parts[0].tensor, sides, one, layout).fill_(fill), one) for one in _outside(sides, box)]
    for part in parts:
        common = _common(part.places, box)
        if common is not None:
            view = _view(part, sides, common)
            pieces.append(ImagePart(view if part is parts[0] else view.contiguous(memory_format=layout), common))
    pieces.sort(key=lambda part: part.places[index])
    return torch.cat([part.tensor for part in pieces], sides[index].dim)


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Whether the channels of an image lie innermost (``channels_last``)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@dataclass(frozen=True, slots=True)
class Returning:
    """Gradients of borders on their way to where the borders came from."""

    gradient: ImagePart  # of all places that this rank holds or needs
    halo: Halo
    left: tuple[int, ...]  # sides that are still to be done, in their order; the last one is under way
    lent: tuple[ImagePart, ...] = ()  # gradients of what this rank lent along that side
    arrival: Arrival | None = None

    def wait(self) -> Tensor:
        """The gradient of this rank's shard."""
        sides = self.halo.sides
        if self.arrival is None:
            held = _view(self.gradient, sides, self.halo.places.held)
            return held.contiguous(memory_format=layout_of(self.gradient.tensor))
        self.arrival.wait()
        for part in self.lent:
            _view(self.gradient, sides, part.places).add_(part.tensor)
        return _returning(self.gradient, self.halo, self.left[:-1]).wait()


def give_back(gradient: Tensor, halo: Halo) -> Returning:
    """Start returning the gradients of borders.

    Args:
        gradient: of what this rank's outputs need (``halo.places.needed``); is written to.
        halo: as it was borrowed.
    """
    both = list(zip(halo.places.held, halo.places.needed, strict=True))
    pads = [(max(start - low, 0), max(high - stop, 0)) for (low, high), (start, stop) in both]
    places = tuple((min(start, low), max(high, stop)) for (low, high), (start, stop) in both)
    return _returning(ImagePart(padded(gradient, halo.sides, pads), places), halo, halo.places.travelling)


def _returning(gradient: ImagePart, halo: Halo, left: tuple[int, ...]) -> Returning:
    if not left:
        return Returning(gradient, halo, left)
    index, sides = left[-1], halo.sides
    sent = [(peer, _view(gradient, sides, box).contiguous()) for peer, box in halo.places.borrowed[index]]
    lent = tuple(ImagePart(_empty(gradient.tensor, sides, box), box) for _, box in halo.places.lent[index])
    wanted = [(peer, part.tensor) for (peer, _), part in zip(halo.places.lent[index], lent, strict=True)]
    return Returning(gradient, halo, left, lent, halo.groups[index].exchange(sent, wanted))


def padded(tensor: Tensor, sides: Sides, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after the places of a tensor along each side; places left out where less than zero."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(sides, pads, strict=True):
        place = 2 * (tensor.dim() - 1 - side.dim)
        amounts[place : place + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def shape_of(like: Sequence[int], sides: Sides, box: Box) -> tuple[int, ...]:
    """The shape of an image of the places of a box."""
    shape = list(like)
    for side, (start, stop) in zip(sides, box, strict=True):
        shape[side.dim] = stop - start
    return tuple(shape)


def _empty(like: Tensor, sides: Sides, box: Box, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(shape_of(like.shape, sides, box), dtype=like.dtype, device=like.device, memory_format=layout)


def _view(part: ImagePart, sides: Sides, box: Box) -> Tensor:
    """The places of a box, which the part holds."""
    view = part.tensor
    for side, have, want in zip(sides, part.places, box, strict=True):
        if have != want:
            view = view.narrow(side.dim, want[0] - have[0], want[1] - want[0])
    return view


def _meet(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def _common(one: Box, other: Box) -> Box | None:
    """What two boxes have in common, if anything."""
    common = tuple(_meet(places, others) for places, others in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _outside(sides: Sides, box: Box) -> Iterator[Box]:
    """What of a box lies outside the image."""
    for index, (side, (start, stop)) in enumerate(zip(sides, box, strict=True)):
        for places in ((start, min(stop, 0)), (max(start, side.extent), stop)):
            if places[0] < places[1]:
                yield (*box[:index], places, *box[index + 1 :])
