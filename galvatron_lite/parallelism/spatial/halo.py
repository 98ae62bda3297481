"""Halo exchange: ranks that split images receive borders from their neighbours and return their gradients.

Sides are exchanged in turn, outermost first. What is sent along a side includes what arrived along the sides before, so
corners need no messages of their own. Gradients return in the opposite order and are added where the borders came from,
the exact adjoint. No autograd here.

To save host time in calls, all ranges are computed once for each layer and image (``halo_sides``).
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
    exchanges_halo,
    input_range,
    interior,
    output_extent,
    output_range,
    received_ranges,
    sent_ranges,
    shard_range,
    window_refusal,
)

Amount = int | Sequence[int]
"""A number for all sides, or one for each, as torch takes them."""


class Strip(NamedTuple):
    """Rows (planes, columns) along a side that a rank sends to another, or receives."""

    peer: int
    start: int  # first row: of sent ones in the shard, of received ones in the input of its outputs
    length: int


@dataclass(frozen=True, slots=True)
class HaloSide:
    """A side of an image that is sharded or unevenly padded, and what the outputs of a rank need along it."""

    dim: int  # of the image
    window: SideWindow
    exchanges: bool  # whether any rank receives borders: then all take part
    sent: tuple[Strip, ...]
    received: tuple[Strip, ...]  # in order of position
    below: int  # how many of them are before the shard
    padding: tuple[int, int]  # positions that outputs need before and after the image
    used: tuple[int, int] | None  # start and length of the part of the shard that outputs need; None: all of it
    start: int  # first position of the shard
    held: int  # positions of the shard
    needed: Range  # positions that outputs depend on, with padding
    outputs: Range
    interior: Range  # outputs that need only the shard
    # of sides before this one, whose padding is not sent: dim, padding before and after, and the length between
    unsent_padding: tuple[tuple[int, int, int, int], ...]


class Halo(NamedTuple):
    """What a layer's windows need along the sides of an image that are sharded or unevenly padded."""

    sides: tuple[HaloSide, ...]  # outermost first
    groups: tuple[AxisGroup, ...]  # that shard each side


_ALONE = ShapeOnlyAxisGroup(1, 0)
"""The group of a side that is not sharded."""

Shard = tuple[int, int, int]
"""Dim, size of its group, and this rank's index: a spec without its group, which caches must not keep alive."""


def shards_in(specs: ShardSpecs) -> tuple[Shard, ...]:
    """Return the key of sharded dims in caches."""
    return tuple([(spec.dim, spec.group.size, spec.group.rank) for spec in specs])


def halo_of(sides: tuple[HaloSide, ...], specs: ShardSpecs) -> Halo:
    """Return the halo of a sharded image."""
    if len(sides) == len(specs):
        return Halo(sides, tuple([spec.group for spec in specs]))
    groups = {spec.dim: spec.group for spec in specs}
    return Halo(sides, tuple([groups.get(side.dim, _ALONE) for side in sides]))


@lru_cache(maxsize=1024)
def halo_sides(
    extents: tuple[int, ...], windows: tuple[SideWindow, ...], shards: tuple[Shard, ...], layer: str
) -> tuple[HaloSide, ...]:
    """Return the sides that are sharded, or padded in a way that torch does not offer.

    Args:
        extents: of the global image.
        windows: along its sides.
        shards: of its dims.
        layer: for errors.

    Raises:
        InputError: ranks cannot split the image under these windows.
    """
    uneven = {dim: (1, 0) for dim, window in enumerate(windows, PIXELS) if window.before != window.after}
    ranks = uneven | {dim: (degree, rank) for dim, degree, rank in shards}
    for dim, (degree, _) in sorted(ranks.items()):
        reason = window_refusal(windows[dim - PIXELS], extents[dim - PIXELS], degree)
        if reason:
            remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
            raise InputError(f"{layer}: extent of dim {dim} shared by {degree}", extents[dim - PIXELS], remedy)
    sides: list[HaloSide] = []
    for dim, (degree, rank) in sorted(ranks.items()):
        sides.append(_side(dim, windows[dim - PIXELS], extents[dim - PIXELS], degree, rank, sides))
    return tuple(sides)


def _side(dim: int, window: SideWindow, extent: int, degree: int, rank: int, before: Sequence[HaloSide]) -> HaloSide:
    low, high = shard_range(extent, degree, rank)
    outputs = output_range(window, extent, degree, rank)
    start, stop = input_range(window, extent, outputs)
    used = min(max(start - low, 0), high - low), max(min(stop, high), low) - low
    sent, received = sent_ranges(window, extent, degree, rank), received_ranges(window, extent, degree, rank)
    return HaloSide(
        dim,
        window,
        exchanges_halo(window, extent, degree),
        tuple(Strip(peer, first - low, last - first) for peer, (first, last) in sent),
        tuple(Strip(peer, first - start, last - first) for peer, (first, last) in received),
        sum(peer < rank for peer, _ in received),
        (max(min(stop, 0) - start, 0), max(stop - max(start, extent), 0)),
        None if used == (0, high - low) else (used[0], max(used[1] - used[0], 0)),
        low,
        high - low,
        (start, stop),
        outputs,
        interior(window, extent, degree, rank),
        tuple(
            (side.dim, *side.padding, side.needed[1] - side.needed[0] - sum(side.padding))
            for side in before
            if any(side.padding)
        ),
    )


def specs_after(specs: ShardSpecs, windows: Sequence[SideWindow]) -> ShardSpecs:
    """Return how the outputs of windows are sharded."""
    return tuple(
        [ShardSpec(spec.dim, output_extent(windows[spec.dim - PIXELS], spec.extent), spec.group) for spec in specs]
    )


def per_side(amount: Amount, sides: int) -> tuple[int, ...]:
    """Return a number for each side."""
    numbers = (amount,) if isinstance(amount, int) else tuple(amount)
    return numbers * sides if len(numbers) == 1 else numbers


def check_batched(image: Tensor, sides: int, layer: str) -> None:
    """Refuse an image whose shape is not (samples, channels, *sides)."""
    if len(global_shape(image)) != PIXELS + sides:
        remedy = "Give (samples, channels, ...): pictures that are shared have a dim of samples."
        raise InputError(f"shape of the input of {layer}", global_shape(image), remedy)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of an image: contiguous, or with channels last."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = _CHANNELS_LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else torch.contiguous_format


def padded(tensor: Tensor, sides: Sequence[HaloSide], pads: Sequence[tuple[int, int]]) -> Tensor:
    """Pad a tensor with zeros along each side; cut it where ``pads`` are negative."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = [0] * (2 * tensor.dim())
    for side, (before, after) in zip(sides, pads, strict=True):
        position = 2 * (tensor.dim() - 1 - side.dim)
        amounts[position : position + 2] = before, after
    return functional.pad(tensor, amounts).contiguous(memory_format=layout_of(tensor))


def _without_padding(tensor: Tensor, side: HaloSide) -> Tensor:
    """Cut the padding of earlier sides, which is not sent."""
    for dim, before, _, length in side.unsent_padding:
        tensor = tensor.narrow(dim, before, length)
    return tensor


class HaloExchange:
    """An exchange that adds the borders to a shard which a rank's outputs need, side by side.

    After ``__init__`` all borders but those of the last side are in ``image``, and the messages of that have started.

    Args:
        shard: of the image.
        halo: of the layer.
        fill: value of padding.
        saved: borders of an earlier exchange; None to receive them.
    """

    __slots__ = ("_arrival", "_last", "_received", "_saved", "borders", "fill", "image")

    def __init__(self, shard: Tensor, halo: Halo, fill: float = 0.0, saved: Sequence[Tensor] | None = None) -> None:
        self.image, self.fill = shard, fill
        self.borders: list[Tensor] = []  # received ones
        self._saved = saved
        self._arrival: Arrival | None = None
        self._last = halo.sides[-1]
        for side, group in zip(halo.sides, halo.groups, strict=True):
            self._start(side, group)
            if side is not self._last:
                self._extend(side)

    def _start(self, side: HaloSide, group: AxisGroup) -> None:
        self._received: Sequence[Tensor] = ()
        if not side.exchanges:
            return
        if self._saved is not None:
            count = len(side.received)
            self._received, self._saved = self._saved[:count], self._saved[count:]
            return
        image, dim = _without_padding(self.image, side) if side.unsent_padding else self.image, side.dim
        shape = list(image.shape)
        sent, wanted = [], []
        for strip in side.sent:
            sent.append((strip.peer, image.narrow(dim, strip.start, strip.length).contiguous()))
        for strip in side.received:
            shape[dim] = strip.length
            border = image.new_empty(shape)
            self.borders.append(border)
            wanted.append((strip.peer, border))
        self._received = self.borders[len(self.borders) - len(wanted) :]
        self._arrival = group.exchange(sent, wanted)

    def _extend(self, side: HaloSide) -> None:
        image, dim, borders = self.image, side.dim, self._received
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        for padded_dim, low, high, _ in side.unsent_padding:
            amounts = [0, 0] * (image.dim() - 1 - padded_dim) + [low, high]
            borders = [functional.pad(border, amounts, value=self.fill) for border in borders]
        part = image if side.used is None else image.narrow(dim, *side.used)
        parts = [*borders[: side.below], part, *borders[side.below :]]
        before, after = side.padding
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
            out = torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=layout)
            self.image = torch.cat(parts, dim, out=out)

    def finish(self) -> Tensor:
        """Wait for the last borders, and return the input of the rank's outputs."""
        self._extend(self._last)
        return self.image


def return_gradients(gradient: Tensor, halo: Halo) -> Callable[[], Tensor]:
    """Start to return the gradients of borders to the ranks that sent the borders.

    Args:
        gradient: of the input of this rank's outputs; is written to.
        halo: of the exchange.

    Returns:
        A function that waits for the gradients and returns the gradient of this rank's shard.
    """
    layout, steps = layout_of(gradient), _return_by_side(gradient, halo)
    next(steps)

    def finish() -> Tensor:
        *_, shard = steps
        return shard.contiguous(memory_format=layout)

    return finish


def _return_by_side(gradient: Tensor, halo: Halo) -> Iterator[Tensor]:
    """Yield once the messages of a side have started, and last the gradient of the shard."""
    for side, group in zip(reversed(halo.sides), reversed(halo.groups), strict=True):
        dim = side.dim
        first = side.padding[0] + sum(strip.length for strip in side.received[: side.below])
        start, length = side.used or (0, side.held)
        local = gradient.narrow(dim, first, length)
        arrival, wanted = None, list[tuple[int, Tensor]]()
        if side.exchanges:
            image, shard = _without_padding(gradient, side), _without_padding(local, side)
            sent = [(strip.peer, image.narrow(dim, strip.start, strip.length).contiguous()) for strip in side.received]
            wanted = [(strip.peer, shard.new_empty(resized(shard, dim, strip.length))) for strip in side.sent]
            arrival = group.exchange(sent, wanted)
        yield gradient
        gradient = local if side.used is None else padded(local, (side,), [(start, side.held - start - length)])
        if arrival is not None:
            arrival.wait()
        for strip, (_, border) in zip(side.sent, wanted, strict=True):
            _without_padding(gradient, side).narrow(dim, strip.start, strip.length).add_(border)
    yield gradient
