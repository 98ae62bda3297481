"""How pictures lie on grids of devices: whose pixels are whose, what is borrowed, which grids will do.

Every extent is shared by the rule of ``parallelism.shares``, whether it divides or not: the first device of a side
holds the most pixels of every picture, and so is the slowest. What outputs need beyond their device's own pixels is
borrowed (``spatial.windows``). Only direct neighbours lend, so it may not be more than they hold, and everybody holds a
pixel at least of every picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from galvatron_lite.arrays import Flag, Real, Whole
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.model.sides import SIDES, Side
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pictures import Extents, KindKey, Window, extents_of, is_picture, windows_of
from galvatron_lite.parallelism.shares import Range, share

# Windows that slide along a side of an image which ranks share: what each rank needs for its outputs, and from whom.
#
# Pure arithmetic on one side. Inputs and outputs are shared by ``shares.share``; places are counted in the global
# image. Output o of a window reads the places o*s - before + d*j for j in [0, k). A transposed window is the adjoint:
# place i adds to the outputs i*s - before + d*j.


Loan = tuple[int, Range]
"""A rank, and the places that it lends or borrows."""


@dataclass(frozen=True, slots=True)
class SideWindow:
    """A window along one side, as ``torch.nn.functional`` describes convolutions and pools."""

    kernel: int = 1  # places it reads
    stride: int = 1  # places from one output to the next
    before: int = 0  # places outside the image that the first output begins with
    after: int = 0  # the same behind the image. Of a transposed window: padding less output padding
    dilation: int = 1  # from one place it reads to the next
    ceil: bool = False  # an incomplete last output that begins in the image, or before it, counts (pools)
    transposed: bool = False  # see the module

    @property
    def reach(self) -> int:
        """Places from the first one it reads to the last."""
        return self.dilation * (self.kernel - 1) + 1


def output_extent(window: SideWindow, extent: int) -> int:
    """Outputs along a side of ``extent`` places (as torch counts them); 0 or less where there are none."""
    if window.transposed:
        return (extent - 1) * window.stride - window.before - window.after + window.reach
    free = extent + window.before + window.after - window.reach
    outputs = (free + (window.stride - 1 if window.ceil else 0)) // window.stride + 1
    return outputs - (window.ceil and (outputs - 1) * window.stride >= extent + window.before)


def shard_range(extent: int, degree: int, rank: int) -> Range:
    """The places that a rank holds."""
    start, length = share(extent, degree, rank)
    return start, start + length


def output_range(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """The outputs of a rank."""
    return shard_range(output_extent(window, extent), degree, rank)


def needed(window: SideWindow, extent: int, outputs: Range) -> Range:
    """The places that outputs depend on: also those outside the image, but of a transposed window, which has none.

    The result is not empty unless the window is transposed.
    """
    first, last = outputs[0], outputs[1] - 1
    if not window.transposed:
        return first * window.stride - window.before, last * window.stride - window.before + window.reach
    start = max(-((window.reach - 1 - window.before - first) // window.stride), 0)
    stop = min((last + window.before) // window.stride + 1, extent)
    return min(start, extent), max(stop, min(start, extent))


def crop(window: SideWindow, outputs: Range, inputs: Range) -> tuple[int, int]:
    """Of a transposed window that ran on ``inputs`` without padding: places to leave out before and after.

    Less than zero: outputs that get nothing.
    """
    first = inputs[0] * window.stride - window.before
    last = first + (inputs[1] - inputs[0] - 1) * window.stride + window.reach
    return outputs[0] - first, last - outputs[1]


@lru_cache(maxsize=4096)
def borrows(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """The places of other ranks that a rank's outputs need; by rank."""
    wanted = needed(window, extent, output_range(window, extent, degree, rank))
    both = ((peer, _overlap(wanted, shard_range(extent, degree, peer))) for peer in range(degree) if peer != rank)
    return tuple((peer, places) for peer, places in both if places[0] < places[1])


@lru_cache(maxsize=4096)
def lends(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[Loan, ...]:
    """The places of a rank that the outputs of other ranks need; by rank."""
    others = ((peer, borrows(window, extent, degree, peer)) for peer in range(degree) if peer != rank)
    return tuple((peer, places) for peer, loans in others for lender, places in loans if lender == rank)


def borrowed_by(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[int, int]:
    """How many places a rank borrows from ranks below and above it; in backward as many gradients go back."""
    loans = borrows(window, extent, degree, rank)
    below = sum(stop - start for peer, (start, stop) in loans if peer < rank)
    return below, sum(stop - start for peer, (start, stop) in loans if peer > rank)


@lru_cache(maxsize=4096)
def travels(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether any rank borrows."""
    return any(borrows(window, extent, degree, rank) for rank in range(degree))


@lru_cache(maxsize=4096)
def stays(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether every rank's outputs are just those of the window on its own shard."""
    if window.before or window.after:
        return False
    return all(_stays(window, extent, degree, rank) for rank in range(degree))


def _stays(window: SideWindow, extent: int, degree: int, rank: int) -> bool:
    held, outputs = shard_range(extent, degree, rank), output_range(window, extent, degree, rank)
    start, stop = needed(window, extent, outputs)
    # the last window of a pool may end behind the image
    if start != held[0] or min(stop, extent) > held[1] or outputs[0] >= outputs[1]:
        return False
    if held[1] - held[0] < min(window.reach, extent) and not window.transposed:
        # torch refuses images that are smaller than a window, of which the last one may be a part
        return False
    if window.transposed:
        return stop == held[1] and crop(window, outputs, held) == (0, 0)
    return output_extent(window, held[1] - held[0]) == outputs[1] - outputs[0]


@lru_cache(maxsize=4096)
def window_refusal(window: SideWindow, extent: int, degree: int) -> str:
    """Why ranks cannot share a side under a window, or nothing.

    They can where every rank has inputs and outputs, its outputs need some of the image, and what they need lies with
    it and the ranks beside it.
    """
    outputs = output_extent(window, extent)
    if min(extent, outputs) < degree:
        return f"an extent of {extent} -> {outputs} leaves a rank of {degree} without a share"
    for rank in range(degree):
        start, stop = _overlap(needed(window, extent, output_range(window, extent, degree, rank)), (0, extent))
        if start >= stop:
            return f"the outputs of rank {rank} of {degree} lie outside the picture of {extent}"
        for peer, (start, stop) in borrows(window, extent, degree, rank):
            if abs(peer - rank) > 1:
                return (
                    f"rank {rank} of {degree} needs {stop - start} of rank {peer}'s items of an extent of {extent}:"
                    " more than the share of the rank beside it"
                )
    return ""


def interior(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """A rank's outputs that need nothing but its own shard; may be empty. Nothing of a transposed window."""
    if window.transposed:
        return 0, 0
    start, stop = shard_range(extent, degree, rank)
    first, end = output_range(window, extent, degree, rank)
    low = min(max(-((-start - window.before) // window.stride), first), end)
    high = (stop - window.reach + window.before) // window.stride + 1
    return low, max(min(high, end), low)


def _overlap(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


Grid = tuple[int, int, int]
"""Devices along depth, height and width."""


@dataclass(frozen=True, slots=True)
class SideTraffic:
    """What devices exchange along one side in forward, a sample; or each of many layouts (arrays)."""

    items: Whole = 0  # of all windows, in both directions together; the device that borrows most
    sends: Whole = 0  # messages of a device
    returned: Whole = 0  # messages of gradients in backward
    returned_items: Whole = 0  # their items


@dataclass(frozen=True, slots=True)
class GridLayout:
    """A layer on a grid of devices, or on each of many (arrays)."""

    share: Real  # of a sample's pixels on the device that holds most
    borders: tuple[SideTraffic, ...]  # along depth, height and width
    legal: Flag  # whether the grid can be used


def splits_pixels(kind: LayerKind) -> bool:
    """Whether devices may share the pixels of a layer's images."""
    return not _kept_full(KindKey(kind))


@lru_cache(maxsize=4096)
def _kept_full(same: KindKey) -> str:
    """Why devices may not share the pixels of a layer's images; empty where they may.

    A layer without convolutions may take their mean; an image that enters a matmul as one row (a flattened one) is full
    on every device.
    """
    kind = same.kind
    if not is_picture(kind):
        return "it does not work on pictures pixel by pixel and window by window"
    if prod(extents_of(kind)) <= 1:
        return "its picture is one pixel"
    if any(operator.kind is OperatorClass.CONVOLUTION for operator in kind.operators):
        return ""
    first = next((operator for operator in kind.operators if operator.kind is OperatorClass.MATMUL), None)
    flat = first is not None and first.shape[1] != kind.dims.in_channels
    return f"{first.name} takes its picture as one row" if flat and first is not None else ""


def layout_on(kind: LayerKind, grid: Grid) -> GridLayout:
    """A layer on a grid of devices."""
    return _grid_layout(KindKey(kind), grid)


@lru_cache(maxsize=2**16)
def _grid_layout(same: KindKey, grid: Grid) -> GridLayout:
    passing, extents = windows_of(same.kind.operators), extents_of(same.kind)
    images = [*_images(passing)] or [(1, extents)]
    pixels = sum(channels * prod(image) for channels, image in images)
    held = sum(channels * prod(map(_most, image, grid)) for channels, image in images)
    borders = tuple(_border(passing, grid, place) for place in range(len(SIDES)))
    legal = not any(_refusal(same, place, degree) for place, degree in enumerate(grid))
    return GridLayout(held / pixels, borders, legal)


def _images(passing: tuple[Window, ...]) -> Iterator[tuple[int, Extents]]:
    """Channels (of all calls) and extents before and after every window."""
    for window in passing:
        for channels, name in zip(window.channels, ("extent", "output"), strict=True):
            depth, height, width = (getattr(side, name) for side in window.sides)
            yield window.count * channels, (depth, height, width)


def _most(extent: int, degree: int) -> int:
    """Pixels of the largest share."""
    return share(extent, degree, 0)[1]


def _border(passing: tuple[Window, ...], grid: Grid, place: int) -> SideTraffic:
    if grid[place] == 1:
        return SideTraffic()
    items = sends = returned = returned_items = 0
    for window in passing:
        pixels, lenders = borrowed(window.sides[place], grid[place])
        size = window.count * window.channels[0] * pixels * _edge(window, grid, place)
        calls = window.count * lenders
        items, sends = items + size, sends + calls
        if window.gradient:
            returned_items, returned = returned_items + size, returned + calls
    return SideTraffic(items, sends, returned, returned_items)


def _edge(window: Window, grid: Grid, place: int) -> int:
    """Pixels of one line that is borrowed: of the sides before, which have come, what outputs need; of those after, a
    device's own."""
    sides = enumerate(zip(window.sides, grid, strict=True))
    return prod(
        _needed(*pair) if other < place else _most(pair[0].extent, pair[1]) for other, pair in sides if other != place
    )


@lru_cache(maxsize=8192)
def _needed(side: Side, degree: int) -> int:
    """The most pixels that a device's outputs need, borrowed ones among them."""
    if degree == 1:
        return side.extent
    window = window_along(side)
    ranges = (needed(window, side.extent, output_range(window, side.extent, degree, rank)) for rank in range(degree))
    return max(min(stop, side.extent) - max(start, 0) for start, stop in ranges)


@lru_cache(maxsize=8192)
def borrowed(side: Side, degree: int) -> tuple[int, int]:
    """The most pixels that a device borrows of both neighbours together, and the most of them that lend it any."""
    loans = [borrowed_by(window_along(side), side.extent, degree, rank) for rank in range(degree)]
    return max(below + above for below, above in loans), max((below > 0) + (above > 0) for below, above in loans)


@lru_cache(maxsize=8192)
def window_along(side: Side) -> SideWindow:
    """The window that passes along a side."""
    padding = side.padding
    return SideWindow(side.kernel, side.stride, padding, padding, side.dilation, transposed=side.transposed)


def refusal(kind: LayerKind, place: int, degree: int) -> str:
    """Why so many devices cannot share a side (0 depth, 1 height, 2 width) of all pictures of a layer; empty where they
    can."""
    return _refusal(KindKey(kind), place, degree)


@lru_cache(maxsize=2**16)
def _refusal(same: KindKey, place: int, degree: int) -> str:
    if degree == 1:
        return ""
    extent = extents_of(same.kind)[place]
    if _kept_full(same):
        return _kept_full(same)
    if extent < degree:
        return f"an extent of {extent} leaves a rank of {degree} without a share"
    sides = (window.sides[place] for window in windows_of(same.kind.operators))
    return next((reason for side in sides if (reason := window_refusal(window_along(side), side.extent, degree))), "")


def sensible_grids(kind: LayerKind, devices: int) -> tuple[Grid, ...]:
    """Of the grids of so many devices that can be used, the one with the least cut, and the one with the least cut that
    shares one side only and so sends the fewest messages."""
    return _sensible(KindKey(kind), devices)


@lru_cache(maxsize=2**16)
def _sensible(same: KindKey, devices: int) -> tuple[Grid, ...]:
    every = [
        (depth, height, devices // depth // height)
        for depth in divisors(devices)
        for height in divisors(devices // depth)
    ]
    extents = extents_of(same.kind)
    fits = [grid for grid in every if not any(_refusal(same, *pair) for pair in enumerate(grid))]
    single = [grid for grid in fits if sum(degree > 1 for degree in grid) == 1]
    grids = [min(group, key=lambda grid: (_cut(extents, grid), grid)) for group in (single, fits) if group]
    return tuple(dict.fromkeys(grids))


def _cut(extents: Extents, grid: Grid) -> int:
    """Pixels along all cuts."""
    pixels = prod(extents)
    return sum((degree - 1) * (pixels // extent) for degree, extent in zip(grid, extents, strict=True))
