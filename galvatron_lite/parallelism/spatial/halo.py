"""The borders of pictures that ranks share: borrowed of the neighbours, and their gradients returned to them.

Sides are taken in turn, outermost first, and what is sent along one holds what arrived along those before it; so
corners arrive without messages of their own. Gradients go back in the opposite order and are added where the border
came from, which is the exact adjoint. No autograd here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.line import Arrival, Line
from galvatron_lite.parallelism.spatial.windows import (
    Range,
    Window,
    borrows,
    interior,
    lends,
    needed,
    output_range,
    own_range,
    refusal,
    travels,
)

Box = tuple[Range, ...]
"""Places along the sides of a halo, in their order."""


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a picture and the window that slides along it.

    Attributes:
        dim: of the picture.
        extent: of the whole picture.
        line: the ranks that share it.
        window: of mode "constant".
    """

    dim: int
    extent: int
    line: Line
    window: Window

    @property
    def shared(self) -> tuple[Window, int, int]:
        """What the functions of ``windows`` ask for, but the rank."""
        return self.window, self.extent, self.line.size

    @property
    def outputs(self) -> Range:
        """This rank's outputs."""
        return output_range(*self.shared, self.line.rank)

    @property
    def own(self) -> Range:
        """This rank's share."""
        return own_range(self.extent, self.line.size, self.line.rank)

    @property
    def needed(self) -> Range:
        """What this rank's outputs need, with places outside the picture."""
        return needed(self.window, self.extent, self.outputs)

    @property
    def interior(self) -> Range:
        """This rank's outputs that need its own share only."""
        return interior(*self.shared, self.line.rank)


class Part(NamedTuple):
    """Some of a picture, and the places it holds along the sides of a halo."""

    tensor: Tensor
    places: Box


@dataclass(frozen=True, slots=True)
class Halo:
    """What a layer's windows need along the sides of a picture."""

    sides: tuple[Side, ...]

    @property
    def own(self) -> Box:
        """This rank's share."""
        return tuple(side.own for side in self.sides)

    @property
    def needed(self) -> Box:
        """What this rank's outputs need, with places outside the picture."""
        return tuple(side.needed for side in self.sides)

    @property
    def travelling(self) -> tuple[int, ...]:
        """Sides along which there is something to send; the same on every rank."""
        return tuple(index for index, side in enumerate(self.sides) if travels(*side.shared))

    def borders(self) -> tuple[Box, ...]:
        """What this rank borrows, in the order in which it arrives."""
        return tuple(box for index in self.travelling for _, box in self.loans(index, given=False))

    def loans(self, index: int, given: bool) -> tuple[tuple[int, Box], ...]:
        """Who lends along a side: what this rank gives to whom, or takes of whom.

        Along sides taken before, that is what outputs need (and has arrived), along later ones the rank's own share.
        """
        side = self.sides[index]
        found = (lends if given else borrows)(*side.shared, side.line.rank)
        before = tuple(_inside(one) for one in self.sides[:index])
        after = tuple(one.own for one in self.sides[index + 1 :])
        return tuple((peer, (*before, places, *after)) for peer, (places,) in found)


def checked(sides: Sequence[Side], layer: str) -> Halo:
    """The halo of a layer.

    Raises:
        InputError: ranks cannot share the picture under these windows; says why.
    """
    for side in sides:
        reason = refusal(*side.shared)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {side.dim} shared by {side.line.size}", side.extent, remedy)
    return Halo(tuple(sides))


def _inside(side: Side) -> Range:
    """What this rank's outputs need of the picture."""
    start, stop = side.needed
    return max(start, 0), min(stop, side.extent)


@dataclass(frozen=True, slots=True)
class Coming:
    """Borders on their way.

    Attributes:
        here: this rank's share and the borders of sides taken before.
        border: what is to come.
        arrival: when it is here.
    """

    here: tuple[Part, ...]
    border: tuple[Part, ...] = ()
    arrival: Arrival | None = None

    def wait(self) -> tuple[Part, ...]:
        """This rank's share, and then all borders in their order."""
        if self.arrival is not None:
            self.arrival.wait()
        return self.here + self.border


def borrow(share: Tensor, halo: Halo) -> Coming:
    """Start borrowing what a rank's outputs need; all sides but the last have come on return."""
    coming = Coming((Part(share, halo.own),))
    for index in halo.travelling:
        here = coming.wait()
        sent = [(peer, laid(here, halo, box).contiguous()) for peer, box in halo.loans(index, given=True)]
        wanted = [(peer, _empty(share, halo, box)) for peer, box in halo.loans(index, given=False)]
        boxes = [box for _, box in halo.loans(index, given=False)]
        border = tuple(Part(tensor, box) for (_, tensor), box in zip(wanted, boxes, strict=True))
        coming = Coming(here, border, halo.sides[index].line.exchange(sent, wanted))
    return coming


def laid(parts: Sequence[Part], halo: Halo, box: Box, fill: float = 0.0) -> Tensor:
    """A picture of the places of a box, put together; a view where one part holds them all.

    Args:
        parts: what is known; places inside the picture that no part holds are not set.
        halo: whose sides are meant.
        box: the places wanted.
        fill: of places outside the picture.
    """
    first = parts[0]
    if all(_meet(places, wanted) == wanted for places, wanted in zip(first.places, box, strict=True)):
        return _view(first, halo, box)
    made = Part(_empty(first.tensor, halo, box, layout_of(first.tensor)), box)
    for part in parts:
        common = tuple(_meet(places, wanted) for places, wanted in zip(part.places, box, strict=True))
        if all(start < stop for start, stop in common):
            _view(made, halo, common).copy_(_view(part, halo, common))
    for outside in _outside(halo, box):
        _view(made, halo, outside).fill_(fill)
    return made.tensor


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Whether the channels of a picture lie innermost (``channels_last``)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@dataclass(frozen=True, slots=True)
class Returning:
    """Gradients of borders on their way to where the borders came from.

    Attributes:
        gradient: of all places that this rank holds or needs.
        halo: whose sides are meant.
        left: sides that are still to be done, in their order; the last one is under way.
        lent: gradients of what this rank lent along that side.
        arrival: when they are here.
    """

    gradient: Part
    halo: Halo
    left: tuple[int, ...]
    lent: tuple[Part, ...] = ()
    arrival: Arrival | None = None

    def wait(self) -> Tensor:
        """The gradient of this rank's share."""
        if self.arrival is None:
            own = _view(self.gradient, self.halo, self.halo.own)
            return own.contiguous(memory_format=layout_of(self.gradient.tensor))
        self.arrival.wait()
        for part in self.lent:
            _view(self.gradient, self.halo, part.places).add_(part.tensor)
        return _returning(self.gradient, self.halo, self.left[:-1]).wait()


def give_back(gradient: Tensor, halo: Halo) -> Returning:
    """Start returning the gradients of borders.

    Args:
        gradient: of what this rank's outputs need (``halo.needed``); is written to.
        halo: as it was borrowed.
    """
    pads = [
        (max(start - side.own[0], 0), max(side.own[1] - stop, 0))
        for side, (start, stop) in zip(halo.sides, halo.needed, strict=True)
    ]
    places = tuple(
        (start - before, stop + after) for (start, stop), (before, after) in zip(halo.needed, pads, strict=True)
    )
    return _returning(Part(padded(gradient, halo, pads), places), halo, halo.travelling)


def padded(tensor: Tensor, halo: Halo, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after the places of a tensor along each side of a halo; places left out where less than zero."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(halo.sides, pads, strict=True):
        place = 2 * (tensor.dim() - 1 - side.dim)
        amounts[place : place + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def _returning(gradient: Part, halo: Halo, left: tuple[int, ...]) -> Returning:
    if not left:
        return Returning(gradient, halo, left)
    sent = [(peer, _view(gradient, halo, box).contiguous()) for peer, box in halo.loans(left[-1], given=False)]
    lent = halo.loans(left[-1], given=True)
    wanted = [(peer, _empty(gradient.tensor, halo, box)) for peer, box in lent]
    parts = tuple(Part(tensor, box) for (_, tensor), (_, box) in zip(wanted, lent, strict=True))
    return Returning(gradient, halo, left, parts, halo.sides[left[-1]].line.exchange(sent, wanted))


def shape_of(like: Sequence[int], halo: Halo, box: Box) -> tuple[int, ...]:
    """The shape of a picture of the places of a box."""
    lengths = {side.dim: stop - start for side, (start, stop) in zip(halo.sides, box, strict=True)}
    return tuple(lengths.get(dim, extent) for dim, extent in enumerate(like))


def _empty(like: Tensor, halo: Halo, box: Box, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    shape = shape_of(like.shape, halo, box)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _view(part: Part, halo: Halo, box: Box) -> Tensor:
    """The places of a box, which the part holds."""
    view = part.tensor
    for side, (first, _), (start, stop) in zip(halo.sides, part.places, box, strict=True):
        view = view.narrow(side.dim, start - first, stop - start)
    return view


def _meet(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def _outside(halo: Halo, box: Box) -> Iterator[Box]:
    """What of a box lies outside the picture."""
    for index, (side, (start, stop)) in enumerate(zip(halo.sides, box, strict=True)):
        for places in ((start, min(stop, 0)), (max(start, side.extent), stop)):
            if places[0] < places[1]:
                yield (*box[:index], places, *box[index + 1 :])
