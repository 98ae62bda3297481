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

Cut = tuple[tuple[int, int, int], ...]
"""Dims of a tensor, with the start and the length to which each is narrowed."""

Extents = tuple[tuple[int, int], ...]
"""Dims of a tensor, and how far it extends along each."""


class Loan(NamedTuple):
    """A box of an image that a rank lends to another, or borrows."""

    peer: int
    cut: Cut  # where it is in what the rank holds and needs
    extents: Extents


Loans = tuple[Loan, ...]


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
    """What a rank holds, needs and makes along sides of an image, worked out once: its time counts in every call."""

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
    # of ``extended``, in which ``held``, ``needed`` and what lies outside the image are cut out
    extents: Extents
    held_cut: Cut
    needed_cut: Cut
    outside: tuple[Cut, ...]


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
    places = halo_places(tuple(extents), tuple(windows), tuple(map(shard_of, specs)), layer)
    return with_groups(places, specs)


Shard = tuple[int, int, int]
"""A dim that is shared, by how many ranks, and which of them this one is."""


def shard_of(spec: ShardSpec) -> Shard:
    """A spec without its group, which no cache may keep alive."""
    return spec.dim, spec.group.size, spec.group.rank


def with_groups(places: HaloPlaces, specs: Sequence[ShardSpec]) -> Halo:
    """The halo of a sharded image, from its places."""
    groups = {spec.dim: spec.group for spec in specs}
    return Halo(places, tuple([groups.get(dim, _ALONE) for dim in places.dims]))


@lru_cache(maxsize=1024)
def halo_places(
    extents: tuple[int, ...], windows: tuple[SideWindow, ...], shards: tuple[Shard, ...], layer: str
) -> HaloPlaces:
    """Places of ``halo_of``, which says what is raised."""
    ranks = {dim: (degree, rank) for dim, degree, rank in shards}
    uneven = {dim: (1, 0) for dim, one in enumerate(windows, PIXELS) if one.before != one.after}
    sides = tuple(
        HaloSide(dim, extents[dim - PIXELS], windows[dim - PIXELS], *place)
        for dim, place in sorted((uneven | ranks).items())
    )
    for side in sides:
        reason = refusal(side.window, side.extent, side.degree)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {side.dim} shared by {side.degree}", side.extent, remedy)
    shares = [(one.window, one.extent, one.degree, one.rank) for one in sides]
    outputs = tuple(output_range(*share) for share in shares)
    every = tuple(needed(one.window, one.extent, made) for one, made in zip(sides, outputs, strict=True))
    held = tuple(shard_range(one.extent, one.degree, one.rank) for one in sides)
    inside = tuple((max(start, 0), min(stop, one.extent)) for one, (start, stop) in zip(sides, every, strict=True))

    dims = tuple(side.dim for side in sides)
    extended = tuple((min(low, start), max(high, stop)) for (low, high), (start, stop) in zip(held, every, strict=True))

    def loans(index: int, lists: Sequence[tuple[int, Range]]) -> Loans:
        boxes = [(peer, (*inside[:index], places, *held[index + 1 :])) for peer, places in lists]
        return tuple(Loan(peer, _cut(dims, extended, box), _extents(dims, box)) for peer, box in boxes)

    return HaloPlaces(
        sides, dims, held, every, extended, outputs,
        interior=tuple(interior(*share) for share in shares),
        travelling=tuple(index for index, one in enumerate(sides) if travels(one.window, one.extent, one.degree)),
        lent=tuple(loans(index, lends(*share)) for index, share in enumerate(shares)),
        borrowed=tuple(loans(index, borrows(*share)) for index, share in enumerate(shares)),
        extents=_extents(dims, extended),
        held_cut=_cut(dims, extended, held),
        needed_cut=_cut(dims, extended, every),
        outside=tuple(_cut(dims, extended, box) for box in _outside(sides, extended)),
    )  # fmt: skip


def _extents(dims: Sequence[int], box: Box) -> Extents:
    return tuple((dim, stop - start) for dim, (start, stop) in zip(dims, box, strict=True))


def _cut(dims: Sequence[int], places: Box, box: Box) -> Cut:
    """Where a box is in a tensor that holds ``places`` along dims."""
    every = zip(dims, places, box, strict=True)
    return tuple((dim, want[0] - have[0], want[1] - want[0]) for dim, have, want in every if have != want)


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


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Whether the channels of an image lie innermost (``channels_last``)."""
    last = _CHANNELS_LAST.get(tensor.dim())
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
    return _narrowed(tensor, _cut(dims, places, box))


def _narrowed(tensor: Tensor, cut: Cut) -> Tensor:
    for dim, start, length in cut:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def box_shape(shape: Sequence[int], dims: Sequence[int], box: Box) -> list[int]:
    """The shape of the places of a box."""
    return _with_extents(shape, _extents(dims, box))


def _with_extents(shape: Sequence[int], extents: Extents) -> list[int]:
    result = list(shape)
    for dim, extent in extents:
        result[dim] = extent
    return result


@dataclass(slots=True)
class Borrowing:
    """An image whose borders are under way."""

    image: Tensor  # of ``places.extended``
    halo: Halo
    borders: list[Tensor]  # that have arrived or will, in order
    arrival: Arrival | None = None
    coming: Sequence[tuple[Cut, Tensor]] = ()

    def region(self, box: Box) -> Tensor:
        """The places of a box that are here."""
        return region(self.image, self.halo.places.dims, self.halo.places.extended, box)

    def arrive(self) -> Tensor:
        """What the rank's outputs need, once it is here."""
        if self.arrival is not None:
            self.arrival.wait()
        for cut, border in self.coming:
            _narrowed(self.image, cut).copy_(border)
        self.arrival, self.coming = None, ()
        return _narrowed(self.image, self.halo.places.needed_cut)


def borrow(shard: Tensor, halo: Halo, fill: float = 0.0) -> Borrowing:
    """Start borrowing what a rank's outputs need; all sides but the last have arrived on return.

    Args:
        shard: of the image.
        halo: of the layer.
        fill: of places outside the image.
    """
    places = halo.places
    borrowing = Borrowing(_extended(shard, places, fill), halo, [])
    for index in places.travelling:
        borrowing.arrive()
        lent, borrowed = places.lent[index], places.borrowed[index]
        borrowing.arrival, borrowing.coming = _exchange(borrowing.image, halo.groups[index], lent, borrowed)
        borrowing.borders += [border for _, border in borrowing.coming]
    return borrowing


def _exchange(
    tensor: Tensor, group: AxisGroup, sent: Loans, received: Loans
) -> tuple[Arrival, list[tuple[Cut, Tensor]]]:
    """Start sending boxes of a tensor along a side, and receiving others."""
    shape = tensor.shape
    parcels = [(loan.peer, _narrowed(tensor, loan.cut).contiguous()) for loan in sent]
    buffers = [(loan.peer, tensor.new_empty(_with_extents(shape, loan.extents))) for loan in received]
    arrival = group.exchange(parcels, buffers)
    return arrival, [(loan.cut, buffer) for loan, (_, buffer) in zip(received, buffers, strict=True)]


def _extended(shard: Tensor, places: HaloPlaces, fill: float) -> Tensor:
    """An image of all that a rank holds or needs, with room for borders; the shard itself where that is all."""
    if not places.held_cut:
        return shard
    shape = _with_extents(shard.shape, places.extents)
    image = torch.empty(shape, dtype=shard.dtype, device=shard.device, memory_format=layout_of(shard))
    _narrowed(image, places.held_cut).copy_(shard)
    for cut in places.outside:
        _narrowed(image, cut).fill_(fill)
    return image


def with_borders(shard: Tensor, halo: Halo, borders: Sequence[Tensor]) -> Tensor:
    """What a rank's outputs need, from its shard and the borders that it borrowed."""
    places = halo.places
    cuts = [loan.cut for index in places.travelling for loan in places.borrowed[index]]
    image = Borrowing(_extended(shard, places, 0.0), halo, [], coming=list(zip(cuts, borders, strict=True)))
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

    def start() -> tuple[Arrival, list[tuple[Cut, Tensor]]] | None:
        if not left:
            return None
        index = left.pop()
        return _exchange(total, halo.groups[index], places.borrowed[index], places.lent[index])

    first = start()

    def finish() -> Tensor:
        under_way = first
        while under_way is not None:
            arrival, lent = under_way
            arrival.wait()
            for cut, part in lent:
                _narrowed(total, cut).add_(part)
            under_way = start()
        held = _narrowed(total, places.held_cut)
        return held.contiguous(memory_format=layout_of(total))

    return finish
