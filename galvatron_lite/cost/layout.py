"""How the boundary tensors of a layer lie on the devices of a stage, and which devices exchange them."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.parallelism.strategy import Strategy

Layout = tuple[int, int, int, int, bool]
"""How boundary tensors lie on a stage's devices: ways that samples are split, ways that the tokens or pixels of a
sample are, devices that hold the same or share it once more, how the parts are cut (``NEAR``, ``CHANNELS``, or
``GRID`` and the planes and rows of a grid of pixels), and whether those devices share (tokens or channels) rather than
hold the same."""
NEAR = 0
CHANNELS = 1
"""By channels."""
GRID = CHANNELS
"""By pixels: what is added is planes * ``PLANE`` + rows of the grid of devices."""
PLANE = 2**10
"""More than there are rows of a grid."""


def layout(strategy: Strategy) -> Layout:
    """How a strategy's boundary tensors lie."""
    batch, context, tensor = strategy.batch_degree, strategy.context, strategy.tensor
    if strategy.spatial * strategy.slices == 1:
        return batch, context, tensor, NEAR, strategy.sequence_parallel
    split = strategy.channels > 1
    pixels = GRID + strategy.depth * PLANE + strategy.height
    cut = pixels if strategy.spatial > 1 else CHANNELS if split else NEAR
    return batch, context * strategy.spatial, tensor * strategy.slices, cut, strategy.sequence_parallel or split


def of_layout(layout: Layout) -> Strategy:
    """A strategy of a layout."""
    data, context, tensor, cut, shared = layout
    if cut > GRID:
        planes, rows = divmod(cut - GRID, PLANE)
        return Strategy(data=data, depth=planes, height=rows, width=context // planes // rows, filters=tensor)
    if cut == CHANNELS:
        return Strategy(data=data, context=context, channels=tensor)
    return Strategy(data=data, context=context, tensor=tensor, sequence_parallel=shared)


def exchanging(left: IntArray, right: IntArray) -> IntArray:
    """Consecutive devices within which layouts differ: 1 where they are the same.

    Layouts (b, c, t) and (b', c', t') put the samples in order on runs of lcm(c t, c' t') devices, whether by tokens,
    pixels or channels.

    Args:
        left: (..., 5) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    runs = np.lcm(left[..., 1] * left[..., 2], right[..., 1] * right[..., 2])
    size: IntArray = np.where((left == right).all(axis=-1), 1, runs)
    return size


def received(left: IntArray, right: IntArray) -> FloatArray:
    """Share of a tensor that a device gets from others when it goes to another layout: the device that gets most, the
    mean of going there (in forward) and back (in backward, where every device that holds a part has its gradient).

    Each device keeps what it has of what it is to have, which is told from boxes of samples, tokens, pixels and
    channels, device by device.

    Args:
        left: (..., 5) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    runs = exchanging(left, right)
    devices = np.arange(int(runs.max(initial=1)))
    boxes = [_boxes(own[..., None, :], devices) for own in (left, right)]
    common = _volume(np.maximum(boxes[0][0], boxes[1][0]), np.minimum(boxes[0][1], boxes[1][1]))
    there, back = ((_volume(*box) - common).max(axis=-1) for box in reversed(boxes))
    return np.where(runs == 1, 0.0, np.maximum((there + back) / 2, 0.0))


def _boxes(layout: IntArray, device: IntArray) -> tuple[FloatArray, FloatArray]:
    """(6, ...): where what a device holds begins and ends along samples, tokens, planes, rows, columns and channels,
    each of which is 1 long."""
    _, context, tensor, cut, shared = np.moveaxis(layout, -1, 0)
    grid, channels = cut > GRID, cut == CHANNELS
    planes, rows = np.where(grid, np.divmod(cut - GRID, PLANE), 1)
    place, slot = device // tensor % context, device % tensor
    columns = np.where(grid, context // (planes * rows), 1)
    split = np.where((shared > 0) & ~channels, tensor, 1)
    one, zero = np.ones_like(place), np.zeros_like(place)
    ways = (
        layout[..., 0] * one,
        np.where(grid, 1, context * split),
        planes, rows, columns, np.where(channels, tensor, 1),
    )  # fmt: skip
    index = (
        device // (context * tensor) * one,
        np.where(grid, 0, place * split + np.where(split > 1, slot, 0)),
        np.where(grid, place // (rows * columns), 0),
        np.where(grid, place // columns % rows, 0),
        np.where(grid, place % columns, 0),
        np.where(channels, slot, 0),
    )
    spans = [
        np.broadcast_arrays(zero, number / count, (number + 1) / count)[1:]
        for number, count in zip(index, ways, strict=True)
    ]
    return np.array([start for start, _ in spans]), np.array([stop for _, stop in spans])


def _volume(start: FloatArray, stop: FloatArray) -> FloatArray:
    volume: FloatArray = np.prod(np.maximum(stop - start, 0.0), axis=0)
    return volume
