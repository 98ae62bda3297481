"""Spatial parallelism: devices share the pixels of each sample, as a grid of planes, rows and columns.

Each of p = d x h x w devices holds about 1/p of the activations and does 1/p of the work (``spatial.grids``). Weights
are replicated, so their gradients are summed over the spatial ranks too, once a step (``parallelism.ranks``), and ZeRO
shards states over them. Kahira et al. 2021 (arXiv:2104.09075, table 3, "spatial"); ConvNeXt in NVIDIA's and NIO's
multi-camera training does the same (PyTorch pull request 113123).

In forward the two neighbours send the pixels that a window needs beyond a device's share, and in backward they receive
their gradients (Kahira et al., halo(x) and halo(dL/dy)). Pixels received in forward are saved for the gradient of the
weights. Planes are exchanged first, then rows including received planes, then columns including both. Compute does not
hide these exchanges. If extents do not divide, the device with most pixels counts.

Sums over all pixels (statistics of batch normalisation, means over a picture: ``Operator.statistics``) run along each
side in both passes. Each device runs the operators after a mean over the picture in full; they are priced as shared, as
they are small. A layer on a share of the pixels costs as much as that share of a sample: the roofline of a convolution
depends only on samples x pixels, so points at shares of a sample are points at the sharded shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from types import MappingProxyType

import numpy as np

from galvatron_lite.arrays import Flag, IntArray, Real, Whole, is_option, never, up, where
from galvatron_lite.cluster.cluster import Collective, Device, RankGroup
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.model.sides import SIDES
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    drop_unused,
    slice_degree,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pictures import extents_of
from galvatron_lite.parallelism.ranks import Either, group_along
from galvatron_lite.parallelism.spatial.grids import (
    Grid,
    GridLayout,
    SideTraffic,
    layout_on,
    refusal,
    sensible_grids,
    splits_pixels,
)
from galvatron_lite.parallelism.strategy import Strategies, Strategy

_BORDER = attrgetter(*(item.name for item in fields(SideTraffic)))


@dataclass(frozen=True, slots=True)
class SpatialDimension(Dimension):
    """Devices that share the planes (``degree`` "depth"), rows ("height") or columns ("width") of each sample."""

    name: str = "spatial"
    degree: str = "height"

    axes = (
        MeshAxis("depth", Part.PLANES), MeshAxis("height", Part.ROWS), MeshAxis("width", Part.COLUMNS),
    )  # fmt: skip
    purposes = (Purpose.PIXELS,)
    fields = (
        StrategyField("depth", "depth", (), "devices that share the planes of a volume", splits=True),
        StrategyField("height", "height", (), "devices that share the rows of a picture", splits=True),
        StrategyField("width", "width", (), "devices that share the columns of a picture", splits=True),
    )
    parts = MappingProxyType({"spatial": ("depth", "height", "width")})
    examples = "spatial2x4 (rows x columns; spatial2x2x4: planes x rows x columns)"

    def word(self, strategy: Strategy) -> str:
        """``spatial2x4``, ``spatial2x2x4``."""
        planes = f"{strategy.depth}x" if strategy.depth > 1 else ""
        return f"spatial{planes}{strategy.height}x{strategy.width}" if strategy.spatial > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        return f"pixels shared by {strategy.spatial}" if strategy.spatial > 1 else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        match = re.fullmatch(r"spatial(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)", word, re.ASCII)
        return {"depth": int(match[1] or 1), "height": int(match[2]), "width": int(match[3])} if match else None

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, and degrees that leave each device enough pixels of each picture for itself and its neighbours."""
        side = SIDES.index(self.degree)
        degrees = divisors(devices)[1:] if splits_pixels(kind) else ()
        legal = [degree for degree in degrees if not refusal(kind, side, degree)]
        return [{self.degree: degree} for degree in (1, *legal)]

    def refusal(self, kind: LayerKind, degree: int) -> str:
        """See ``Dimension.refusal``."""
        return refusal(kind, SIDES.index(self.degree), degree)

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:
        """Together only with data parallelism, ZeRO and recomputation.

        Sensible: within a node, as exchanges block each convolution; and, of the grids of as many devices, that with
        the shortest edges and that along one side only, which sends the fewest messages.
        """
        grid = (chosen["depth"], chosen["height"], chosen["width"])
        devices = grid[0] * grid[1] * grid[2]
        if devices == 1:
            return True
        if chosen["context"] * chosen["expert"] * slice_degree(chosen) > 1:
            return False
        if room.node is None or self.degree != SIDES[-1]:
            return room.fits_node(devices)
        return room.fits_node(devices) and grid in sensible_grids(kind, devices)

    def reason(self, kind: LayerKind) -> str:
        """Pictures that are too small."""
        reasons = [refusal(kind, side, 2) for side, extent in enumerate(extents_of(kind)) if extent > 1]
        return f"spatial: {kind.name}: {reasons[0]}" if splits_pixels(kind) and all(reasons) else ""

    def runs_on(self, device: Device, kind: LayerKind, strategy: Either) -> Flag:  # noqa: ARG002
        """Pictures that are large enough for the grid."""
        return shares_pixels(kind, strategy)

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """A share of the pixels, exchanges with neighbours and sums over all pixels.

        Must run before recompute, which repeats exchanges.
        """
        if never(strategy.spatial > 1):
            return work
        samples = work.samples / strategy.batch_degree
        share = samples * context.activation_item_bytes
        lasting = sum(border.items for border in pixels_of(kind, strategy).borders) * share
        moved = exchanges(kind, strategy, share, context.pictures.own_statistics)
        waiting = sum(exchange.count for exchange in moved) * context.host.get("spatial_exchange", 0.0)
        saved = kind.kept[Recompute.NONE].total * samples / strategy.spatial
        working = context.host.get(self.name, 0.0) + context.host.get("spatial_per_byte", 0.0) * saved
        return replace(
            work,
            samples=work.samples / strategy.spatial,
            communications=(*work.communications, *moved),
            edge_bytes=up(where(is_option(strategy.recompute, Recompute.FULL), 0.0, lasting)),
            microbatch_overhead=work.microbatch_overhead + where(strategy.spatial > 1, working, 0.0) + waiting,
        )


def pixels_of(kind: LayerKind, strategy: Either) -> GridLayout:
    """Return the layout of a layer on the grid of a strategy, or of many (arrays, cached for each ``Strategies``)."""
    if not isinstance(strategy, Strategies):
        return layout_on(kind, (strategy.depth, strategy.height, strategy.width))
    key = ("pixels", id(kind.operators))
    cached: tuple[object, GridLayout] | None = strategy.cache.get(key)
    if cached is None:
        # the entry holds the operators, so that no other object gets their ``id``
        cached = strategy.cache[key] = (kind.operators, _pixels_of_many(kind, strategy))
    return cached[1]


def _pixels_of_many(kind: LayerKind, many: Strategies) -> GridLayout:
    grids, indices = _grids_of(many)
    layouts = [layout_on(kind, grid) for grid in grids]
    figures = np.array([[_BORDER(border) for border in layout.borders] for layout in layouts]).transpose(1, 2, 0)
    share, legal = np.array([layout.share for layout in layouts]), np.array([layout.legal for layout in layouts])
    borders = tuple(SideTraffic(*side) for side in figures[..., indices])
    return GridLayout(share[indices], borders, legal[indices])


def _grids_of(many: Strategies) -> tuple[list[Grid], IntArray]:
    """The distinct grids of strategies, and the index of each strategy's grid."""
    if "grids" not in many.cache:
        columns = np.column_stack((many.depth, many.height, many.width))
        distinct, indices = np.unique(columns, axis=0, return_inverse=True)
        many.cache["grids"] = [tuple(map(int, grid)) for grid in distinct], indices.reshape(-1)
    grids: tuple[list[Grid], IntArray] = many.cache["grids"]
    return grids


def samples_of(kind: LayerKind, strategy: Either, microbatch: Real) -> Real:
    """Return the samples of a micro-batch on the device with most; fractions if devices share tokens or pixels."""
    if never(strategy.spatial > 1):
        return microbatch / strategy.token_degree
    shared = microbatch / (strategy.batch_degree * strategy.context)
    return shared * where(strategy.spatial > 1, pixels_of(kind, strategy).share, 1.0)


def shares_pixels(kind: LayerKind, strategy: Either) -> Flag:
    """Whether devices can share a layer's pixels as a strategy says; True if it does not share them."""
    unsplit = strategy.spatial == 1
    if never(strategy.spatial > 1) or not splits_pixels(kind):
        return unsplit
    return unsplit | pixels_of(kind, strategy).legal


def strategy_on(grid: Grid) -> Strategy:
    """Return a strategy that only shares pixels on a grid of devices."""
    depth, height, width = grid
    return Strategy(depth=depth, height=height, width=width)


def exchanges(kind: LayerKind, strategy: Either, share: Real, local_norms: bool = False) -> tuple[Communication, ...]:
    """Return the exchanges with neighbours along each side, and the sums over all pixels, all of them blocking.

    Args:
        kind: of the layer.
        strategy: one or many.
        share: samples of one micro-batch x bytes of an activation item.
        local_norms: whether normalisations use statistics of local pixels only.
    """
    return drop_unused(*_exchanges(kind, strategy, pixels_of(kind, strategy).borders, share, local_norms))


def _exchanges(
    kind: LayerKind, strategy: Either, borders: Sequence[SideTraffic], share: Real, local_norms: bool
) -> Iterator[Communication]:
    cut = [name for name in SIDES if not never(getattr(strategy, name) > 1)]
    for name, border in zip(SIDES, borders, strict=True):
        if name not in cut:
            continue
        group = group_along(strategy, name)
        both = (Moment.FORWARD, border.items, border.sends), (Moment.BACKWARD, border.returned_items, border.returned)
        for moment, items, sends in both:
            size = items * share / where(sends > 0, sends, 1)
            yield Communication(Collective.SEND_RECV, size, group, moment, False, sends, "spatial")
    for name in cut:
        yield from _summed(kind, group_along(strategy, name), getattr(strategy, name), local_norms)


def _summed(kind: LayerKind, group: RankGroup, degree: Whole, local_norms: bool) -> Iterator[Communication]:
    """Sums over all pixels along one side.

    Means and variances of normalisations are gathered in forward, and combined on each device (Chan et al. 1983); other
    statistics are all-reduced.
    """
    several = degree > 1
    reduced = [operator for operator in kind.operators if operator.statistics]
    norms = [] if local_norms else [one.statistics * STATISTIC_BYTES for one in reduced if one.weight_bytes]
    means = [operator.statistics * STATISTIC_BYTES for operator in reduced if not operator.weight_bytes]
    gathered, forward, backward = (sum(sizes) / max(len(sizes), 1) for sizes in (norms, means, norms + means))
    for collective, size, moment, count in (
        (Collective.ALL_GATHER, gathered * degree, Moment.FORWARD, len(norms)),
        (Collective.ALL_REDUCE, forward, Moment.FORWARD, len(means)),
        (Collective.ALL_REDUCE, backward, Moment.BACKWARD, len(norms + means)),
    ):
        yield Communication(collective, size, group, moment, False, several * count, "spatial")


STATISTIC_BYTES = 4
"""Statistics are summed in fp32."""
