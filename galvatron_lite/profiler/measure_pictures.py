"""Measuring layers on a share of the pixels: which shares, and pictures cut to them.

Where devices share pixels, each runs the layer on its part of every picture. That is measured at one sample, cut along
the longest side; the borders that neighbours lend are left out, as they are priced by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from galvatron_lite.model.batch import map_tensors
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial.grids import Grid, laid_on, sensible_grids, splits_pixels

WHOLE: Grid = (1, 1, 1)
WAYS = (2, 4, 8)
"""Devices whose shares are measured, however many there are here; between them, and below, time is a straight line."""
_PICTURE = 2
"""Dims of samples and channels, before those of the sides."""


def measured_grids(kind: LayerKind) -> tuple[Grid, ...]:
    """The grids on whose first device a kind of layer is measured."""
    if not splits_pixels(kind):
        return ()
    grids = (sensible_grids(kind, ways) for ways in WAYS)
    return tuple(found[0] for found in grids if found)


def share_on(kind: LayerKind, grid: Grid) -> float:
    """Samples that the first device of a grid works on, of one sample."""
    return laid_on(kind, grid).share


def cut_pictures(value: Any, kind: LayerKind, grid: Grid) -> Any:
    """Arguments or a batch with the first device's pixels of every picture (samples, channels, sides ...)."""
    if grid == WHOLE:
        return value
    sides = sum(extent > 0 for extent in (kind.dims.depth, kind.dims.height, kind.dims.width))
    degrees = grid[len(grid) - sides :]
    return map_tensors(value, lambda tensor: _cut(tensor, degrees))


def _cut(tensor: Tensor, degrees: Sequence[int]) -> Tensor:
    if tensor.dim() != _PICTURE + len(degrees) or not tensor.is_floating_point():
        return tensor
    for dim, degree in enumerate(degrees, _PICTURE):
        tensor = tensor.narrow(dim, *share(tensor.shape[dim], degree, 0))
    return tensor.contiguous()
