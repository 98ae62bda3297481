"""Measuring layers on a share of the pixels or of the channels: which shares, pictures cut to them, weights sliced.

Where devices share pixels, each runs the layer on its part of every picture. That is measured at one sample, cut along
the longest side; the borders that neighbours lend are left out, as they are priced by themselves. Where they share
channels, each runs the layer with a slice of its weights; the first device's runs alone, without collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.cost import BY
from galvatron_lite.parallelism.channel.parts import ChannelPlan, divides, splits_channels
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import from_local, image_specs, to_local
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial.grids import Grid, laid_on, sensible_grids, splits_pixels
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from galvatron_lite.profiler.segments import SegmentCall

WHOLE: Grid = (1, 1, 1)
WAYS = (2, 4, 8)
"""Devices whose shares are measured, however many there are here; between them, and below, time is a straight line."""
_PICTURE = 2  # dims of samples and channels, before those of the sides


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
    degrees = grid[len(grid) - _sides(kind) :]
    return map_tensors(value, lambda tensor: _cut(tensor, degrees))


def on_share(block: nn.Module, call: SegmentCall, kind: LayerKind, grid: Grid) -> nn.Module:
    """The block, changed to work on the first device's pixels as training does, without the other devices."""
    groups = tuple(ShapeOnlyAxisGroup(degree) if degree > 1 else None for degree in grid)
    plain, sides = block.forward, _sides(kind)
    wholes = [tensor.shape for tensor in tensors_of((call.args, call.kwargs))]

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = iter(wholes)

        def marked(tensor: Tensor) -> Tensor:
            whole = next(shapes)
            if len(whole) != _PICTURE + sides or not tensor.is_floating_point():
                return tensor
            return from_local(tensor.view_as(tensor), image_specs(whole, groups), PIXELS_RULES)

        given, named = map_tensors((args, kwargs), marked)
        return map_tensors(plain(*given, **named), to_local)

    block.forward = run
    return block


def _sides(kind: LayerKind) -> int:
    return sum(extent > 0 for extent in (kind.dims.depth, kind.dims.height, kind.dims.width))


def _cut(tensor: Tensor, degrees: Sequence[int]) -> Tensor:
    if tensor.dim() != _PICTURE + len(degrees) or not tensor.is_floating_point():
        return tensor
    for dim, degree in enumerate(degrees, _PICTURE):
        tensor = tensor.narrow(dim, *share(tensor.shape[dim], degree, 0))
    return tensor.contiguous()


def measured_slices(kind: LayerKind, degrees: Sequence[int]) -> Iterator[tuple[str, int]]:
    """How the channels of a kind of layer are measured: ``filters`` or ``channels``, and devices that share them."""
    for by in BY:
        if splits_channels(kind, by):
            yield from ((by, degree) for degree in degrees if degree > 1 and divides(kind, by, degree))


@dataclass(frozen=True, slots=True)
class Slicing:
    """The first device's slice of a layer."""

    plan: ChannelPlan | None = None  # how channels are shared; None: they are not

    def slice(self, layer: nn.Module) -> None:
        """Slice a layer's weights in place; it then runs without the other devices."""
        if self.plan is not None:
            shard_channels(layer, self.plan, ShapeOnlyAxisGroup(self.plan.degree))

    def entering(self, value: Any) -> Any:
        """Arguments as the device gets them: its channels of every tensor, where inputs are shared."""
        if self.plan is None or self.plan.by != "channels":
            return value
        return map_tensors(value, self._share_of)

    def _share_of(self, tensor: Tensor) -> Tensor:
        if self.plan is None or tensor.dim() < _PICTURE or not tensor.is_floating_point():
            return tensor
        return tensor.narrow(1, *share(tensor.shape[1], self.plan.degree, 0)).contiguous()


UNSLICED = Slicing()  # the whole layer
