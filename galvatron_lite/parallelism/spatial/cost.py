"""Spatial parallelism: devices share the pixels of each sample, as a grid of rows and columns.

Each of p = h x w devices holds 1/p of every activation and does 1/p of the work; weights are whole on all, so their
gradients are summed over the spatial ranks too, once a step (``parallelism.ranks``), and ZeRO's shards of states go
over them. Kahira et al. 2021 (arXiv:2104.09075, table 3, "spatial"); the same for ConvNeXt in NVIDIA's and NIO's
multi-camera training (PyTorch pull request 113123).

A window of kernel k and stride s needs k - s rows (columns) that lie with the two neighbours, half on either side:
each sends as many, in forward of the input and in backward of its gradient (Kahira et al., halo(x) and halo(dL/dy)).
What arrived in forward is kept for the gradient of the weights. Columns are sent after rows, with the rows that
arrived. Nothing hides these exchanges.

Sums over all pixels, of a batch normalisation's statistics, of a mean over the picture (``Operator.statistics``), are
all-reduced in either pass. What follows a mean over the picture each device does in full; that is priced as if
shared, as its work is small. A layer of p devices costs what 1/p of a sample costs: the roofline of a convolution
depends on samples x pixels only, so points at shares of a sample are points at the sharded shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.arrays import Real, Whole, is_option, never, up, where
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute
from galvatron_lite.parallelism.base import (
    Chosen,
    Collective,
    Communication,
    DimensionContext,
    LayerWork,
    Moment,
    Room,
    sent,
    sliced,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pictures import Window, is_picture, windows_of
from galvatron_lite.parallelism.ranks import Either, spatial_group


@dataclass(frozen=True, slots=True)
class SpatialDimension:
    """Devices that share the rows (``degree`` "height") or columns ("width") of each sample."""

    name: str = "spatial"
    degree: str = "height"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, and degrees that share every picture of the layer evenly and leave each device what its neighbours
        need."""
        side = 0 if self.degree == "height" else 1
        degrees = [d for d in divisors(devices)[1:] if _shares_evenly(kind, side, d)] if splits_pixels(kind) else []
        return [{self.degree: degree} for degree in (1, *degrees)]

    def allows(self, kind: LayerKind, chosen: Chosen, room: Room) -> bool:
        """Beside data parallelism, ZeRO and recomputation only.

        Sensible: within a node, as it blocks every convolution; and of the grids of as many devices the one with the
        shortest edges, and the one that cuts one side only, the longer, and so sends the fewest messages.
        """
        rows, columns = chosen["height"], chosen["width"]
        if rows * columns == 1:
            return True
        if chosen["context"] * chosen["expert"] * sliced(chosen) > 1:
            return False
        if room.node is None or self.degree == "height":
            return room.near(rows)
        return room.near(rows * columns) and (rows, columns) in _grids(kind, rows * columns)

    def reason(self, kind: LayerKind) -> str:
        """Why pictures whose extents are odd stay whole."""
        if not splits_pixels(kind) or any(_shares_evenly(kind, side, 2) for side in (0, 1)):
            return ""
        height, width = kind.dims.height, kind.dims.width
        return f"spatial: {kind.name}: pictures of {height} x {width} cannot be halved at all of its windows"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """A share of the pixels, exchanges with neighbours and sums over all pixels.

        Must run before recompute (exchanges of what runs again run again).
        """
        if never(strategy.spatial > 1):
            return work
        share = work.samples / strategy.batch_degree * context.activation_item_bytes
        sides = tuple(_edges(kind, strategy, share, side) for side in (0, 1))
        lasting = 2 * sum(edges.size * edges.count for edges in sides)
        return replace(
            work,
            samples=work.samples / strategy.spatial,
            communications=(*work.communications, *sent(*_moved(kind, strategy, sides))),
            edge_bytes=up(where(is_option(strategy.recompute, Recompute.FULL), 0.0, lasting)),
        )


def splits_pixels(kind: LayerKind) -> bool:
    """Whether devices may share the pixels of a layer's pictures.

    A layer without convolutions may take their mean; a picture that enters a matmul as one row (a flattened one) is
    whole on every device.
    """
    if not is_picture(kind) or kind.dims.height * kind.dims.width <= 1:
        return False
    if any(one.kind is OperatorClass.CONVOLUTION for one in kind.operators):
        return True
    first = next((one for one in kind.operators if one.kind is OperatorClass.MATMUL), None)
    return first is None or first.shape[1] == kind.dims.in_channels


def _shares_evenly(kind: LayerKind, side: int, degree: int) -> bool:
    """Every window's picture, before and after it, in equal parts, in each of which lies what a neighbour needs."""
    if (kind.dims.height, kind.dims.width)[side] % degree:
        return False
    return all(_fits(window, side, degree) for window in windows_of(kind.operators))


def _fits(window: Window, side: int, degree: int) -> bool:
    extent, stride = window.extent[side], window.stride[side]
    own = extent // degree
    return extent % (degree * stride) == 0 and own >= (window.beyond(side) + 1) // 2


def _grids(kind: LayerKind, devices: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid of rows x columns that cuts the longer side only, and the one with the shortest edges (in pixels)."""
    height, width = kind.dims.height, kind.dims.width
    edges = {rows: (rows - 1) * width + (devices // rows - 1) * height for rows in divisors(devices)}
    shortest = min(edges, key=lambda rows: (edges[rows], -rows))
    return (devices, 1) if height >= width else (1, devices), (shortest, devices // shortest)


@dataclass(frozen=True, slots=True)
class Edges:
    """What a device exchanges with one neighbour along one side.

    Attributes:
        size: bytes of one exchange, the mean over windows.
        count: exchanges in forward.
        back: in backward.
    """

    size: Real
    count: Whole
    back: Whole


def _edges(kind: LayerKind, strategy: Either, share: Real, side: int) -> Edges:
    """Exchanges along rows (side 0) or columns (1); ``share``: samples x bytes of an item."""
    windows = [window for window in windows_of(kind.operators) if window.beyond(side)]
    degrees = (strategy.height, strategy.width)
    split = degrees[side] > 1
    lengths = [_length(window, degrees, side) for window in windows]
    items = sum(
        window.count * window.channels * window.beyond(side) / 2 * length
        for window, length in zip(windows, lengths, strict=True)
    )
    count = sum(window.count for window in windows)
    back = sum(window.count for window in windows if window.gradient)
    return Edges(items * share / max(count, 1), split * count, split * back)


def _length(window: Window, degrees: tuple[Whole, Whole], side: int) -> Real:
    """Pixels of an edge: of rows, a device's columns; of columns, its rows and those that arrived."""
    other = 1 - side
    own = window.extent[other] / degrees[other]
    return own if side == 0 else own + where(degrees[other] > 1, window.beyond(other), 0)


def _moved(kind: LayerKind, strategy: Either, sides: Sequence[Edges]) -> Iterator[Communication]:
    """Exchanges with two neighbours along each side, and sums over all pixels."""
    group = spatial_group(strategy)
    for edges in sides:
        for moment, count in ((Moment.FORWARD, edges.count), (Moment.BACKWARD, edges.back)):
            yield Communication(Collective.SEND_RECV, edges.size, group, moment, False, 2 * count, "spatial")
    sums = [one.statistics for one in kind.operators if one.statistics]
    if sums:
        size, count = STATISTIC_BYTES * sum(sums) / len(sums), (strategy.spatial > 1) * len(sums)
        for moment in (Moment.FORWARD, Moment.BACKWARD):
            yield Communication(Collective.ALL_REDUCE, size, group, moment, False, count, "spatial")


STATISTIC_BYTES = 4
"""Statistics are summed in fp32."""
