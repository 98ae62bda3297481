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
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial import windows

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
    if any(one.kind is OperatorClass.CONVOLUTION for one in kind.operators):
        return ""
    first = next((one for one in kind.operators if one.kind is OperatorClass.MATMUL), None)
    flat = first is not None and first.shape[1] != kind.dims.in_channels
    return f"{first.name} takes its picture as one row" if flat and first is not None else ""


def laid_on(kind: LayerKind, grid: Grid) -> GridLayout:
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
    own = window_along(side)
    ranges = (
        windows.needed(own, side.extent, windows.output_range(own, side.extent, degree, rank)) for rank in range(degree)
    )
    return max(min(stop, side.extent) - max(start, 0) for start, stop in ranges)


@lru_cache(maxsize=8192)
def borrowed(side: Side, degree: int) -> tuple[int, int]:
    """The most pixels that a device borrows of both neighbours together, and the most of them that lend it any."""
    loans = [windows.borrowed(window_along(side), side.extent, degree, rank) for rank in range(degree)]
    return max(below + above for below, above in loans), max((below > 0) + (above > 0) for below, above in loans)


@lru_cache(maxsize=8192)
def window_along(side: Side) -> windows.SideWindow:
    """The window that passes along a side."""
    padding = side.padding
    return windows.SideWindow(side.kernel, side.stride, padding, padding, side.dilation, transposed=side.transposed)


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
    return next((said for side in sides if (said := windows.refusal(window_along(side), side.extent, degree))), "")


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
    found = [min(group, key=lambda grid: (_cut(extents, grid), grid)) for group in (single, fits) if group]
    return tuple(dict.fromkeys(found))


def _cut(extents: Extents, grid: Grid) -> int:
    """Pixels along all cuts."""
    whole = prod(extents)
    return sum((degree - 1) * (whole // extent) for degree, extent in zip(grid, extents, strict=True))
