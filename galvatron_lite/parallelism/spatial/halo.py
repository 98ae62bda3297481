"""The borders of images that ranks share: borrowed from the neighbours, and their gradients returned to them.

Sides are taken in turn, outermost first, and what is sent along one holds what arrived along those before it, so
corners need no messages of their own. Gradients go back in the opposite order and are added where the border came
from, which is the exact adjoint. No autograd here.

All places are worked out once for each layer and image (``halo_sides``): host time counts in every call.
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
from galvatron_lite.parallelism.sharded.collectives import resized
from galvatron_lite.parallelism.sharded.groups import Arrival, AxisGroup, ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import PIXELS, ShardSpec, ShardSpecs, global_shape
from galvatron_lite.parallelism.shares import Range
from galvatron_lite.parallelism.spatial.grids import (
    SideWindow,
    borrows,
    interior,
    lends,
    needed,
    output_extent,
    output_range,
    shard_range,
    travels,
    window_refusal,
)

Amount = int | Sequence[int]
"""One number for all sides, or one a side, as torch takes them."""


class Strip(NamedTuple):
    """Rows (planes, columns) of a side that a rank lends to another, or borrows."""

    peer: int
    start: int  # of what it lends: in its shard; of what it borrows: in what its outputs need
    length: int


@dataclass(frozen=True, slots=True)
class HaloSide:
    """A side of an image that is shared or padded unevenly, and what a rank's outputs need along it."""

    dim: int  # of the image
    window: SideWindow
    travels: bool  # whether any rank borrows: then all take part
    lent: tuple[Strip, ...]
    borrowed: tuple[Strip, ...]  # in order of places
    below: int  # how many of them lie before the shard
    outside: tuple[int, int]  # places that outputs need before and behind the image
    used: tuple[int, int] | None  # start and length of what outputs need of the shard; None: all of it
    start: int  # first place of the shard
    held: int  # places of it
    needed: Range  # places that outputs depend on, those outside included
    outputs: Range
    interior: Range  # outputs that need the shard alone
    # sides before this one whose places outside the image are not sent: dim, places before and behind, places between
    framed: tuple[tuple[int, int, int, int], ...]


class Halo(NamedTuple):
    """What a layer's windows need along the sides of an image that are shared, or padded unevenly."""

    sides: tuple[HaloSide, ...]  # outermost first
    groups: tuple[AxisGroup, ...]  # that share each side


_ALONE = ShapeOnlyAxisGroup(1, 0)
"""The group of a side that is not shared."""

Shard = tuple[int, int, int]
"""A dim that is shared, by how many ranks, and which of them this one is: a spec without its group, which no cache may
keep alive."""


def shards_in(specs: ShardSpecs) -> tuple[Shard, ...]:
    """The key of sharded dims in caches."""
    return tuple([(spec.dim, spec.group.size, spec.group.rank) for spec in specs])


def halo_of(sides: tuple[HaloSide, ...], specs: ShardSpecs) -> Halo:
    """The halo of a sharded image from its sides."""
    if len(sides) == len(specs):
        return Halo(sides, tuple([spec.group for spec in specs]))
    groups = {spec.dim: spec.group for spec in specs}
    return Halo(sides, tuple([groups.get(side.dim, _ALONE) for side in sides]))


@lru_cache(maxsize=1024)
def halo_sides(
    extents: tuple[int, ...], windows: tuple[SideWindow, ...], shards: tuple[Shard, ...], layer: str
) -> tuple[HaloSide, ...]:
    """The sides along which windows need more than a rank's shard, or other pads than torch offers.

    Args:
        extents: of the global image.
        windows: that slide along its sides.
        shards: of its dims.
        layer: for messages.

    Raises:
        InputError: ranks cannot share the image under these windows; says why.
    """
    uneven = {dim: (1, 0) for dim, window in enumerate(windows, PIXELS) if window.before != window.after}
    places = uneven | {dim: (degree, rank) for dim, degree, rank in shards}
    for dim, (degree, _) in sorted(places.items()):
        reason = window_refusal(windows[dim - PIXELS], extents[dim - PIXELS], degree)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {dim} shared by {degree}", extents[dim - PIXELS], remedy)
    sides: list[HaloSide] = []
    for dim, place in sorted(places.items()):
        sides.append(_side(dim, windows[dim - PIXELS], extents[dim - PIXELS], *place, sides))
    return tuple(sides)


def _side(dim: int, window: SideWindow, extent: int, degree: int, rank: int, before: Sequence[HaloSide]) -> HaloSide:
    low, high = shard_range(extent, degree, rank)
    outputs = output_range(window, extent, degree, rank)
    start, stop = needed(window, extent, outputs)
    used = min(max(start - low, 0), high - low), max(min(stop, high), low) - low
    loans = borrows(window, extent, degree, rank)
    return HaloSide(
        dim,
        window,
        travels(window, extent, degree),
        tuple(Strip(peer, first - low, last - first) for peer, (first, last) in lends(window, extent, degree, rank)),
        tuple(Strip(peer, first - start, last - first) for peer, (first, last) in loans),
        sum(peer < rank for peer, _ in loans),
        (max(min(stop, 0) - start, 0), max(stop - max(start, extent), 0)),
        None if used == (0, high - low) else (used[0], max(used[1] - used[0], 0)),
        low,
        high - low,
        (start, stop),
        outputs,
        interior(window, extent, degree, rank),
        tuple(
            (one.dim, *one.outside, one.needed[1] - one.needed[0] - sum(one.outside))
            for one in before
            if any(one.outside)
        ),
    )


def specs_after(specs: ShardSpecs, windows: Sequence[SideWindow]) -> ShardSpecs:
    """How what windows make of an image is sharded."""
    return tuple(
        [ShardSpec(spec.dim, output_extent(windows[spec.dim - PIXELS], spec.extent), spec.group) for spec in specs]
    )


def per_side(amount: Amount, sides: int) -> tuple[int, ...]:
    """One number a side."""
    numbers = (amount,) if isinstance(amount, int) else tuple(amount)
    return numbers * sides if len(numbers) == 1 else numbers


def check_batched(image: Tensor, sides: int, layer: str) -> None:
    """Refuse an image that is not (samples, channels, and its sides)."""
    if len(global_shape(image)) != PIXELS + sides:
        remedy = "Give (samples, channels, ...): pictures that are shared have a dim of samples."
        raise InputError(f"shape of the input of {layer}", global_shape(image), remedy)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Whether the channels of an image lie innermost (``channels_last``)."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = _CHANNELS_LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else torch.contiguous_format


def padded(tensor: Tensor, sides: Sequence[HaloSide], pads: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after the places of a tensor along each side; places left out where less than zero."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(sides, pads, strict=True):
        place = 2 * (tensor.dim() - 1 - side.dim)
        amounts[place : place + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def _unframed(tensor: Tensor, side: HaloSide) -> Tensor:
    for dim, before, _, length in side.framed:
        tensor = tensor.narrow(dim, before, length)
    return tensor


class Borrowing:
    """An image that gets the borders which a rank's outputs need, side by side.

    Args:
        shard: of the image.
        halo: of the layer.
        fill: of places outside the image.
        kept: borders that have arrived before; None: they are borrowed. All but those of the last side are then in
            ``image``, and the last ones under way.
    """

    __slots__ = ("_arrival", "_coming", "_kept", "_last", "borders", "fill", "image")

    def __init__(self, shard: Tensor, halo: Halo, fill: float = 0.0, kept: Sequence[Tensor] | None = None) -> None:
        self.image, self.fill = shard, fill
        self.borders: list[Tensor] = []
        self._kept = kept
        self._arrival: Arrival | None = None
        self._last = halo.sides[-1]
        for side, group in zip(halo.sides, halo.groups, strict=True):
            self._start(side, group)
            if side is not self._last:
                self._extend(side)

    def _start(self, side: HaloSide, group: AxisGroup) -> None:
        self._coming: Sequence[Tensor] = ()
        if not side.travels:
            return
        if self._kept is not None:
            count = len(side.borrowed)
            self._coming, self._kept = self._kept[:count], self._kept[count:]
            return
        image, dim = _unframed(self.image, side) if side.framed else self.image, side.dim
        shape = list(image.shape)
        sent, wanted = [], []
        for one in side.lent:
            sent.append((one.peer, image.narrow(dim, one.start, one.length).contiguous()))
        for one in side.borrowed:
            shape[dim] = one.length
            border = image.new_empty(shape)
            self.borders.append(border)
            wanted.append((one.peer, border))
        self._coming = self.borders[len(self.borders) - len(wanted) :]
        self._arrival = group.exchange(sent, wanted)

    def _extend(self, side: HaloSide) -> None:
        image, dim, borders = self.image, side.dim, self._coming
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        for framed, low, high, _ in side.framed:
            amounts = [0, 0] * (image.dim() - 1 - framed) + [low, high]
            borders = [functional.pad(border, amounts, value=self.fill) for border in borders]
        part = image if side.used is None else image.narrow(dim, *side.used)
        parts = [*borders[: side.below], part, *borders[side.below :]]
        before, after = side.outside
        if before:
            parts.insert(0, image.new_full(resized(image, dim, before), self.fill))
        if after:
            parts.append(image.new_full(resized(image, dim, after), self.fill))
        if len(parts) == 1:
            self.image = part
        elif (layout := layout_of(image)) is torch.contiguous_format:
            self.image = torch.cat(parts, dim)
        else:
            shape = resized(image, dim, side.needed[1] - side.needed[0])
            room = torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=layout)
            self.image = torch.cat(parts, dim, out=room)

    def arrive(self) -> Tensor:
        """What the rank's outputs need, once it is here."""
        self._extend(self._last)
        return self.image


def give_back(gradient: Tensor, halo: Halo) -> Callable[[], Tensor]:
    """Start returning the gradients of borders to where the borders came from.

    Args:
        gradient: of what this rank's outputs need; is written to.
        halo: as it was borrowed.

    Returns:
        What waits for them, and returns the gradient of this rank's shard.
    """
    layout, steps = layout_of(gradient), _returning(gradient, halo)
    next(steps)

    def finish() -> Tensor:
        *_, shard = steps
        return shard.contiguous(memory_format=layout)

    return finish


def _returning(gradient: Tensor, halo: Halo) -> Iterator[Tensor]:
    """The gradient of the shard at last; before, what is left of it whenever borders of a side are under way."""
    for side, group in zip(reversed(halo.sides), reversed(halo.groups), strict=True):
        dim = side.dim
        first = side.outside[0] + sum(one.length for one in side.borrowed[: side.below])
        start, length = side.used or (0, side.held)
        own = gradient.narrow(dim, first, length)
        arrival, wanted = None, list[tuple[int, Tensor]]()
        if side.travels:
            inside, mine = _unframed(gradient, side), _unframed(own, side)
            sent = [(one.peer, inside.narrow(dim, one.start, one.length).contiguous()) for one in side.borrowed]
            wanted = [(one.peer, mine.new_empty(resized(mine, dim, one.length))) for one in side.lent]
            arrival = group.exchange(sent, wanted)
        yield gradient
        gradient = own if side.used is None else padded(own, (side,), [(start, side.held - start - length)])
        if arrival is not None:
            arrival.wait()
        for one, (_, part) in zip(side.lent, wanted, strict=True):
            _unframed(gradient, side).narrow(dim, one.start, one.length).add_(part)
    yield gradient
