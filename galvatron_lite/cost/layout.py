"""How the boundary tensors of a layer lie on the devices of a stage, and which devices exchange them."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.parallelism.strategy import Strategy, Strided

Layout = tuple[int, int, int, int, bool]
"""How boundary tensors lie on a stage's devices: ways that samples are split, ways that the tokens or pixels of a
sample are, devices that hold the same or share it once more, how the parts are cut (``NEAR``, ``FAR``, ``CHANNELS``, or
``GRID`` and the planes and rows of a grid of pixels), and whether those devices share (tokens or channels) rather than
hold the same."""
NEAR = 0
FAR = 1
"""The parts of a sample lie far apart (strided) with those of other samples between them."""
CHANNELS = 2
"""By channels."""
GRID = CHANNELS
"""By pixels: what is added is planes * ``PLANE`` + rows of the grid of devices."""
PLANE = 2**10
"""More than there are rows of a grid."""


def layout(strategy: Strategy) -> Layout:
    """How a strategy's boundary tensors lie.

    Strided ZeRO ranks change nothing: which samples a rank of data x zero takes is free, so they go by its place.
    """
    batch, context, tensor = strategy.batch_degree, strategy.context, strategy.tensor
    far = strategy.strided is Strided.CONTEXT and context > 1 and batch > 1
    if strategy.spatial * strategy.slices == 1:
        return batch, context, tensor, FAR if far else NEAR, strategy.sequence_parallel
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
    far = cut == FAR
    strided = Strided.CONTEXT if far else Strided.NONE
    return Strategy(data=data, context=context, tensor=tensor, sequence_parallel=shared, strided=strided)


def exchanging(left: IntArray, right: IntArray) -> IntArray:
    """Consecutive devices within which layouts differ: 1 where they are the same.

    Layouts (b, c, t) and (b', c', t') put the samples in order on runs of lcm(c t, c' t') devices, whether by tokens,
    pixels or channels; where both are far and c = c', each part of the samples lies on runs of lcm(t, t'). All devices
    where one is far and the other is not.

    Args:
        left: (..., 5) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    (batch, context, tensor, cut, _), (_, context2, tensor2, cut2, _) = (
        np.moveaxis(left, -1, 0),
        np.moveaxis(right, -1, 0),
    )
    near = np.lcm(context * tensor, context2 * tensor2)
    inside = np.where(context == context2, np.lcm(tensor, tensor2), batch * context * tensor)
    far = cut == FAR
    differ = np.where(far != (cut2 == FAR), batch * context * tensor, np.where(far, inside, near))
    size: IntArray = np.where((left == right).all(axis=-1), 1, differ)
    return size


def received(left: IntArray, right: IntArray) -> FloatArray:
    """Share of a tensor that a device gets from others when it goes to another layout: the device that gets most, the
    mean of going there (in forward) and back (in backward, where every device that holds a part has its gradient).

    Each device keeps what it has of what it is to have, which is told from boxes of samples, tokens, pixels and
    channels, device by device. Where the parts of one of the two lie far apart, it gets all but its share of a run.

    Args:
        left: (..., 5) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    runs = exchanging(left, right)
    far = (left[..., 3] == FAR) | (right[..., 3] == FAR)
    devices = np.arange(int(np.where(far, 1, runs).max(initial=1)))
    boxes = [_boxes(own[..., None, :], devices) for own in (left, right)]
    common = _volume(np.maximum(boxes[0][0], boxes[1][0]), np.minimum(boxes[0][1], boxes[1][1]))
    there, back = ((_volume(*box) - common).max(axis=-1) for box in reversed(boxes))
    size = left[..., 0] * left[..., 1] * left[..., 2]
    share: FloatArray = np.where(far, (runs - 1) / size, (there + back) / 2)
    return np.where(runs == 1, 0.0, np.maximum(share, 0.0))


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
