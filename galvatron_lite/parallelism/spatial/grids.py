"""Pictures on grids of devices: the pixels of each device, its halo, and the grids that a layer can use.

Every extent is split by ``parallelism.shares``, evenly or not: the first device of a side holds the most pixels of
every picture and is the slowest. Pixels that outputs need beyond those of their device are its halo, which neighbours
send. Only direct neighbours do, so a halo may not be larger than what they hold, and every device holds at least one
pixel of every picture.

Windows are described along one side of a picture, with positions counted in the global picture. Output o of a window
reads the positions o*s - before + d*j for j in [0, k). A transposed window is the adjoint: position i adds to the
outputs i*s - before + d*j.
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

PeerRange = tuple[int, Range]
"""Another rank, and the positions that it sends or receives."""


@dataclass(frozen=True, slots=True)
class SideWindow:
    """A window along one side, with the arguments of convolutions and pools in ``torch.nn.functional``."""

    kernel: int = 1
    stride: int = 1
    before: int = 0  # padding before the picture
    after: int = 0  # padding after the picture; of a transposed window, less its output padding
    dilation: int = 1
    ceil: bool = False  # whether an incomplete last output counts if it begins in the picture or before it (pools)
    transposed: bool = False  # see the module

    @property
    def reach(self) -> int:
        """Positions from the first that it reads to the last."""
        return self.dilation * (self.kernel - 1) + 1


def output_extent(window: SideWindow, extent: int) -> int:
    """Return the number of outputs along a side of ``extent`` positions, as torch counts them; 0 or less for none."""
    if window.transposed:
        return (extent - 1) * window.stride - window.before - window.after + window.reach
    free = extent + window.before + window.after - window.reach
    outputs = (free + (window.stride - 1 if window.ceil else 0)) // window.stride + 1
    return outputs - (window.ceil and (outputs - 1) * window.stride >= extent + window.before)


def shard_range(extent: int, degree: int, rank: int) -> Range:
    """Return the positions that a rank holds."""
    start, length = share(extent, degree, rank)
    return start, start + length


def output_range(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """Return the outputs of a rank."""
    return shard_range(output_extent(window, extent), degree, rank)


def input_range(window: SideWindow, extent: int, outputs: Range) -> Range:
    """Return the positions that outputs depend on.

    They include padding outside the picture, which a transposed window does not have. Only for a transposed window the
    range may be empty.
    """
    first, last = outputs[0], outputs[1] - 1
    if not window.transposed:
        return first * window.stride - window.before, last * window.stride - window.before + window.reach
    start = max(-((window.reach - 1 - window.before - first) // window.stride), 0)
    stop = min((last + window.before) // window.stride + 1, extent)
    return min(start, extent), max(stop, min(start, extent))


def crop(window: SideWindow, outputs: Range, inputs: Range) -> tuple[int, int]:
    """Return how many results to cut before and after those of a transposed window on ``inputs`` without padding.

    Negative numbers count outputs that no input adds to.
    """
    first = inputs[0] * window.stride - window.before
    last = first + (inputs[1] - inputs[0] - 1) * window.stride + window.reach
    return outputs[0] - first, last - outputs[1]


@lru_cache(maxsize=4096)
def received_ranges(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[PeerRange, ...]:
    """Return the positions of other ranks that a rank's outputs need, by rank."""
    inputs = input_range(window, extent, output_range(window, extent, degree, rank))
    ranges = ((peer, _overlap(inputs, shard_range(extent, degree, peer))) for peer in range(degree) if peer != rank)
    return tuple((peer, positions) for peer, positions in ranges if positions[0] < positions[1])


@lru_cache(maxsize=4096)
def sent_ranges(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[PeerRange, ...]:
    """Return the positions of a rank that the outputs of other ranks need, by rank."""
    others = ((peer, received_ranges(window, extent, degree, peer)) for peer in range(degree) if peer != rank)
    return tuple((peer, positions) for peer, ranges in others for sender, positions in ranges if sender == rank)


def received_counts(window: SideWindow, extent: int, degree: int, rank: int) -> tuple[int, int]:
    """Return how many positions a rank receives from ranks below and above it; backward returns as many gradients."""
    ranges = received_ranges(window, extent, degree, rank)
    below = sum(stop - start for peer, (start, stop) in ranges if peer < rank)
    return below, sum(stop - start for peer, (start, stop) in ranges if peer > rank)


@lru_cache(maxsize=4096)
def exchanges_halo(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether any rank receives positions of others."""
    return any(received_ranges(window, extent, degree, rank) for rank in range(degree))


@lru_cache(maxsize=4096)
def runs_locally(window: SideWindow, extent: int, degree: int) -> bool:
    """Whether every rank's outputs are those of the window on its shard alone."""
    if window.before or window.after:
        return False
    return all(_runs_locally(window, extent, degree, rank) for rank in range(degree))


def _runs_locally(window: SideWindow, extent: int, degree: int, rank: int) -> bool:
    held, outputs = shard_range(extent, degree, rank), output_range(window, extent, degree, rank)
    start, stop = input_range(window, extent, outputs)
    # the last window of a pool may end after the picture
    if start != held[0] or min(stop, extent) > held[1] or outputs[0] >= outputs[1]:
        return False
    if held[1] - held[0] < min(window.reach, extent) and not window.transposed:
        # torch refuses pictures that are smaller than a window
        return False
    if window.transposed:
        return stop == held[1] and crop(window, outputs, held) == (0, 0)
    return output_extent(window, held[1] - held[0]) == outputs[1] - outputs[0]


@lru_cache(maxsize=4096)
def window_refusal(window: SideWindow, extent: int, degree: int) -> str:
    """Explain why ranks cannot split a side under a window; empty if they can.

    They can if every rank has inputs and outputs, and its outputs need positions of the picture, all of which it or its
    neighbours hold.
    """
    outputs = output_extent(window, extent)
    if min(extent, outputs) < degree:
        return f"an extent of {extent} -> {outputs} leaves a rank of {degree} without a share"
    for rank in range(degree):
        start, stop = _overlap(input_range(window, extent, output_range(window, extent, degree, rank)), (0, extent))
        if start >= stop:
            return f"the outputs of rank {rank} of {degree} lie outside the picture of {extent}"
        for peer, (start, stop) in received_ranges(window, extent, degree, rank):
            if abs(peer - rank) > 1:
                return (
                    f"rank {rank} of {degree} needs {stop - start} of rank {peer}'s items of an extent of {extent}:"
                    " more than the share of the rank beside it"
                )
    return ""


def interior(window: SideWindow, extent: int, degree: int, rank: int) -> Range:
    """Return a rank's outputs that need only its shard; may be empty. Always empty for a transposed window."""
    if window.transposed:
        return 0, 0
    start, stop = shard_range(extent, degree, rank)
    first, end = output_range(window, extent, degree, rank)
    low = min(max(-((-start - window.before) // window.stride), first), end)
    high = (stop - window.reach + window.before) // window.stride + 1
    return low, max(min(high, end), low)


def _overlap(first: Range, second: Range) -> Range:
    return max(first[0], second[0]), min(first[1], second[1])


Grid = tuple[int, int, int]
"""Devices along depth, height and width."""


@dataclass(frozen=True, slots=True)
class SideTraffic:
    """What a device exchanges along one side for a sample; under many layouts, arrays."""

    items: Whole = 0  # that it receives in forward for all windows, from both neighbours; the largest of all devices
    sends: Whole = 0  # messages in forward
    returned: Whole = 0  # messages of gradients in backward
    returned_items: Whole = 0  # items of these


@dataclass(frozen=True, slots=True)
class GridLayout:
    """A layer on a grid of devices; on many grids, arrays."""

    share: Real  # of a sample's pixels on the device that holds most
    borders: tuple[SideTraffic, ...]  # along depth, height and width
    legal: Flag  # whether the layer can use the grid


def splits_pixels(kind: LayerKind) -> bool:
    """Whether devices can split the pixels of a layer's pictures."""
    return not _unsplit_reason(KindKey(kind))


@lru_cache(maxsize=4096)
def _unsplit_reason(key: KindKey) -> str:
    """Why devices cannot split the pixels of a layer's pictures; empty if they can.

    A layer without convolutions can take the mean of pixels. A picture that enters a matmul as one row (flattened) is
    full on every device.
    """
    kind = key.kind
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
    """Return the layout of a layer on a grid of devices."""
    return _grid_layout(KindKey(kind), grid)


@lru_cache(maxsize=2**16)
def _grid_layout(key: KindKey, grid: Grid) -> GridLayout:
    windows, extents = windows_of(key.kind.operators), extents_of(key.kind)
    images = [*_images(windows)] or [(1, extents)]
    pixels = sum(channels * prod(image) for channels, image in images)
    held = sum(channels * prod(map(_largest_share, image, grid)) for channels, image in images)
    borders = tuple(_side_traffic(windows, grid, axis) for axis in range(len(SIDES)))
    legal = not any(_refusal(key, axis, degree) for axis, degree in enumerate(grid))
    return GridLayout(held / pixels, borders, legal)


def _images(windows: tuple[Window, ...]) -> Iterator[tuple[int, Extents]]:
    """Channels (of all calls) and extents of the pictures before and after every window."""
    for window in windows:
        for channels, name in zip(window.channels, ("extent", "output"), strict=True):
            depth, height, width = (getattr(side, name) for side in window.sides)
            yield window.count * channels, (depth, height, width)


def _largest_share(extent: int, degree: int) -> int:
    """Pixels of the largest share."""
    return share(extent, degree, 0)[1]


def _side_traffic(windows: tuple[Window, ...], grid: Grid, axis: int) -> SideTraffic:
    if grid[axis] == 1:
        return SideTraffic()
    items = sends = returned = returned_items = 0
    for window in windows:
        pixels, senders = received_pixels(window.sides[axis], grid[axis])
        size = window.count * window.channels[0] * pixels * _edge_pixels(window, grid, axis)
        calls = window.count * senders
        items, sends = items + size, sends + calls
        if window.gradient:
            returned_items, returned = returned_items + size, returned + calls
    return SideTraffic(items, sends, returned, returned_items)


def _edge_pixels(window: Window, grid: Grid, axis: int) -> int:
    """Pixels of one line of the halo, with the halo of the sides before, which arrived earlier, not of those after."""
    sides = enumerate(zip(window.sides, grid, strict=True))
    return prod(
        _with_halo(side, degree) if other < axis else _largest_share(side.extent, degree)
        for other, (side, degree) in sides
        if other != axis
    )


@lru_cache(maxsize=8192)
def _with_halo(side: Side, degree: int) -> int:
    """The most pixels that a device's outputs need, with its halo."""
    if degree == 1:
        return side.extent
    window = window_along(side)
    outputs = (output_range(window, side.extent, degree, rank) for rank in range(degree))
    inputs = (input_range(window, side.extent, positions) for positions in outputs)
    return max(min(stop, side.extent) - max(start, 0) for start, stop in inputs)


@lru_cache(maxsize=8192)
def received_pixels(side: Side, degree: int) -> tuple[int, int]:
    """Return the most pixels that a device receives, and the most neighbours that send it any."""
    counts = [received_counts(window_along(side), side.extent, degree, rank) for rank in range(degree)]
    return max(below + above for below, above in counts), max((below > 0) + (above > 0) for below, above in counts)


@lru_cache(maxsize=8192)
def window_along(side: Side) -> SideWindow:
    """Return the window of an operator along a side."""
    padding = side.padding
    return SideWindow(side.kernel, side.stride, padding, padding, side.dilation, transposed=side.transposed)


def refusal(kind: LayerKind, axis: int, degree: int) -> str:
    """Explain why devices cannot split a side (0 depth, 1 height, 2 width) of a layer's pictures; empty if they can."""
    return _refusal(KindKey(kind), axis, degree)


@lru_cache(maxsize=2**16)
def _refusal(key: KindKey, axis: int, degree: int) -> str:
    if degree == 1:
        return ""
    extent = extents_of(key.kind)[axis]
    if _unsplit_reason(key):
        return _unsplit_reason(key)
    if extent < degree:
        return f"an extent of {extent} leaves a rank of {degree} without a share"
    sides = (window.sides[axis] for window in windows_of(key.kind.operators))
    return next((reason for side in sides if (reason := window_refusal(window_along(side), side.extent, degree))), "")


def sensible_grids(kind: LayerKind, devices: int) -> tuple[Grid, ...]:
    """Return the legal grid with the smallest cut, and that of the grids that split one side, with fewer messages."""
    return _sensible_grids(KindKey(kind), devices)


@lru_cache(maxsize=2**16)
def _sensible_grids(key: KindKey, devices: int) -> tuple[Grid, ...]:
    grids = [
        (depth, height, devices // depth // height)
        for depth in divisors(devices)
        for height in divisors(devices // depth)
    ]
    extents = extents_of(key.kind)
    legal = [grid for grid in grids if not any(_refusal(key, *pair) for pair in enumerate(grid))]
    single = [grid for grid in legal if sum(degree > 1 for degree in grid) == 1]
    best = [min(group, key=lambda grid: (_cut_pixels(extents, grid), grid)) for group in (single, legal) if group]
    return tuple(dict.fromkeys(best))


def _cut_pixels(extents: Extents, grid: Grid) -> int:
    """Pixels along all cuts."""
    pixels = prod(extents)
    return sum((degree - 1) * (pixels // extent) for degree, extent in zip(grid, extents, strict=True))
