"""The borders of pictures that ranks share: borrowed of the neighbours, and their gradients returned to them.

Sides are taken in turn, outermost first, and what is sent along one holds what arrived along those before it; so
corners arrive without messages of their own. Gradients go back in the opposite order and are added where the border
came from, which is the exact adjoint. No autograd here.
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
from galvatron_lite.parallelism.cuts.line import Arrival, Line
from galvatron_lite.parallelism.spatial.windows import (
    Range,
    SideWindow,
    borrows,
    interior,
    lends,
    needed,
    output_extent,
    output_range,
    own_range,
    refusal,
    travels,
)

Box = tuple[Range, ...]
"""Places along sides of a picture, in their order."""

Loans = tuple[tuple[int, Box], ...]
"""What ranks of a line lend or borrow."""


class HaloSide(NamedTuple):
    """A side of a picture, the window that slides along it, and who shares it."""

    dim: int  # of the picture
    extent: int  # of the whole picture
    window: SideWindow  # of mode "constant"
    degree: int  # ranks that share it
    rank: int  # this one


Sides = tuple[HaloSide, ...]
"""Outermost first."""


@dataclass(frozen=True, slots=True)
class Places:
    """What a rank holds, needs and makes along sides of a picture."""

    sides: Sides  # which
    own: Box  # its share
    needed: Box  # what its outputs need, with places outside the picture
    outputs: Box  # what it makes
    interior: Box  # outputs that need its own share only; nothing of transposed windows
    travelling: tuple[int, ...]  # sides along which there is something to send, by number; the same on every rank
    # by side, what it lends to whom: of sides before, what outputs need (it has arrived), of later ones the own share
    given: tuple[Loans, ...]
    taken: tuple[Loans, ...]  # what it borrows, likewise

    def borders(self) -> tuple[Box, ...]:
        """What is borrowed, in the order in which it arrives."""
        return tuple(box for index in self.travelling for _, box in self.taken[index])


@dataclass(frozen=True, slots=True)
class Halo:
    """What a layer's windows need along the sides of a picture, and the ranks that have it."""

    places: Places
    lines: tuple[Line, ...]

    @property
    def sides(self) -> Sides:
        """The sides of the picture that are shared, or padded."""
        return self.places.sides


def checked(sides: Sides, lines: tuple[Line, ...], layer: str) -> Halo:
    """The halo of a layer.

    Raises:
        InputError: ranks cannot share the picture under these windows; says why.
    """
    for side in sides:
        reason = refusal(side.window, side.extent, side.degree)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {side.dim} shared by {side.degree}", side.extent, remedy)
    return Halo(_places(sides), lines)


@lru_cache(maxsize=1024)
def _places(sides: Sides) -> Places:
    """What each rank holds and needs, once for each picture and layer: runs come by again and again."""
    outputs = tuple(output_range(one.window, one.extent, one.degree, one.rank) for one in sides)
    every = tuple(needed(one.window, one.extent, made) for one, made in zip(sides, outputs, strict=True))
    return Places(
        sides,
        own=tuple(own_range(one.extent, one.degree, one.rank) for one in sides),
        needed=every,
        outputs=outputs,
        interior=tuple(_interior(one) for one in sides),
        travelling=tuple(index for index, one in enumerate(sides) if travels(one.window, one.extent, one.degree)),
        given=tuple(_loans(sides, index, every, lending=True) for index in range(len(sides))),
        taken=tuple(_loans(sides, index, every, lending=False) for index in range(len(sides))),
    )


def _interior(side: HaloSide) -> Range:
    return (0, 0) if side.window.transposed else interior(side.window, side.extent, side.degree, side.rank)


def _loans(sides: Sides, index: int, every: Box, lending: bool) -> Loans:
    side = sides[index]
    found = (lends if lending else borrows)(side.window, side.extent, side.degree, side.rank)
    inside = zip(sides[:index], every[:index], strict=True)
    before = tuple((max(start, 0), min(stop, one.extent)) for one, (start, stop) in inside)
    after = tuple(own_range(one.extent, one.degree, one.rank) for one in sides[index + 1 :])
    return tuple((peer, (*before, places, *after)) for peer, (places,) in found)


def sides_after(sides: Sides) -> Sides:
    """The sides of what the windows make."""
    return tuple(one._replace(extent=output_extent(one.window, one.extent), window=SideWindow()) for one in sides)


class ImagePart(NamedTuple):
    """Some of a picture, and the places it holds along the sides of a halo."""

    tensor: Tensor
    places: Box


@dataclass(frozen=True, slots=True)
class Coming:
    """Borders on their way."""

    here: tuple[ImagePart, ...]  # this rank's share and the borders of sides taken before
    border: tuple[ImagePart, ...] = ()  # what is to come
    arrival: Arrival | None = None  # when it is here

    def wait(self) -> tuple[ImagePart, ...]:
        """This rank's share, and then all borders in their order."""
        if self.arrival is not None:
            self.arrival.wait()
        return self.here + self.border


def borrow(share: Tensor, halo: Halo) -> Coming:
    """Start borrowing what a rank's outputs need; all sides but the last have come on return."""
    coming = Coming((ImagePart(share, halo.places.own),))
    for index in halo.places.travelling:
        here = coming.wait()
        sent = [(peer, assemble(here, halo.sides, box).contiguous()) for peer, box in halo.places.given[index]]
        border = tuple(ImagePart(_empty(share, halo.sides, box), box) for _, box in halo.places.taken[index])
        wanted = [(peer, part.tensor) for (peer, _), part in zip(halo.places.taken[index], border, strict=True)]
        coming = Coming(here, border, halo.lines[index].exchange(sent, wanted))
    return coming


def assemble(parts: Sequence[ImagePart], sides: Sides, box: Box, fill: float = 0.0) -> Tensor:
    """A picture of the places of a box, put together; a view where the first part holds them all.

    Args:
        parts: what is known; that is all places of the box inside the picture.
        sides: those that boxes are about.
        box: the places wanted.
        fill: of places outside the picture.
    """
    first = parts[0]
    short = [
        index for index, (have, want) in enumerate(zip(first.places, box, strict=True)) if _meet(have, want) != want
    ]
    if not short:
        return _view(first, sides, box)
    if len(short) == 1:
        return _joined(parts, sides, box, short[0], fill)
    made = ImagePart(_empty(first.tensor, sides, box, layout_of(first.tensor)), box)
    for part in parts:
        common = _common(part.places, box)
        if common is not None:
            _view(made, sides, common).copy_(_view(part, sides, common))
    for outside in _outside(sides, box):
        _view(made, sides, outside).fill_(fill)
    return made.tensor


def _joined(parts: Sequence[ImagePart], sides: Sides, box: Box, index: int, fill: float) -> Tensor:
    """The places of a box whose parts lie one behind the other along one side: one copy."""
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
    """Whether the channels of a picture lie innermost (``channels_last``)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@dataclass(frozen=True, slots=True)
class Returning:
    """Gradients of borders on their way to where the borders came from."""

    gradient: ImagePart  # of all places that this rank holds or needs
    halo: Halo  # whose sides are meant
    left: tuple[int, ...]  # sides that are still to be done, in their order; the last one is under way
    lent: tuple[ImagePart, ...] = ()  # gradients of what this rank lent along that side
    arrival: Arrival | None = None  # when they are here

    def wait(self) -> Tensor:
        """The gradient of this rank's share."""
        sides = self.halo.sides
        if self.arrival is None:
            own = _view(self.gradient, sides, self.halo.places.own)
            return own.contiguous(memory_format=layout_of(self.gradient.tensor))
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
    both = list(zip(halo.places.own, halo.places.needed, strict=True))
    pads = [(max(start - own, 0), max(end - stop, 0)) for (own, end), (start, stop) in both]
    places = tuple((min(start, own), max(end, stop)) for (own, end), (start, stop) in both)
    return _returning(ImagePart(padded(gradient, halo.sides, pads), places), halo, halo.places.travelling)


def padded(tensor: Tensor, sides: Sides, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after the places of a tensor along each side; places left out where less than zero."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(sides, pads, strict=True):
        place = 2 * (tensor.dim() - 1 - side.dim)
        amounts[place : place + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def _returning(gradient: ImagePart, halo: Halo, left: tuple[int, ...]) -> Returning:
    if not left:
        return Returning(gradient, halo, left)
    index, sides = left[-1], halo.sides
    sent = [(peer, _view(gradient, sides, box).contiguous()) for peer, box in halo.places.taken[index]]
    lent = tuple(ImagePart(_empty(gradient.tensor, sides, box), box) for _, box in halo.places.given[index])
    wanted = [(peer, part.tensor) for (peer, _), part in zip(halo.places.given[index], lent, strict=True)]
    return Returning(gradient, halo, left, lent, halo.lines[index].exchange(sent, wanted))


def shape_of(like: Sequence[int], sides: Sides, box: Box) -> tuple[int, ...]:
    """The shape of a picture of the places of a box."""
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
    """What two boxes have in common, if they do."""
    common = tuple(_meet(places, others) for places, others in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _outside(sides: Sides, box: Box) -> Iterator[Box]:
    """What of a box lies outside the picture."""
    for index, (side, (start, stop)) in enumerate(zip(sides, box, strict=True)):
        for places in ((start, min(stop, 0)), (max(start, side.extent), stop)):
            if places[0] < places[1]:
                yield (*box[:index], places, *box[index + 1 :])
