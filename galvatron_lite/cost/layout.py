"""How much of a boundary tensor devices exchange between layers of different layouts."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.parallelism.layout import Layout

_DIMS = (("batch",), ("tokens", "sequence"), ("planes",), ("rows",), ("columns",), ("channels",))
"""Dims of a boundary tensor, as the fields of ``Layout`` that split them, the outer first."""


def exchange_sizes(left: IntArray, right: IntArray) -> IntArray:
    """Return how many consecutive devices exchange parts of a tensor between two layouts; 1 if these are equal.

    Devices that split each sample r and r' ways keep the samples in order over runs of lcm(r, r') devices, whether they
    split tokens, pixels or channels.

    Args:
        left: (..., 8) layouts, broadcast against ``right``.
        right: (..., 8) layouts.
    """
    runs = np.lcm(left[..., 1:].prod(axis=-1), right[..., 1:].prod(axis=-1))
    sizes: IntArray = np.where((left == right).all(axis=-1), 1, runs)
    return sizes


def received_shares(left: IntArray, right: IntArray) -> FloatArray:
    """Return the share of a tensor that a device receives when the layout changes.

    It is that of the device that receives most: the mean of forward, and of backward, in which every device that holds
    a part of the tensor gets its gradient. A device keeps the intersection of what it holds before and after.

    Args:
        left: (..., 8) layouts, broadcast against ``right``.
        right: (..., 8) layouts.
    """
    sizes = exchange_sizes(left, right)
    devices = np.arange(int(sizes.max(initial=1)))
    (left_starts, left_stops), (right_starts, right_stops) = (
        _boxes(layouts[..., None, :], devices) for layouts in (left, right)
    )
    common = _volume(np.maximum(left_starts, right_starts), np.minimum(left_stops, right_stops))
    forward = (_volume(right_starts, right_stops) - common).max(axis=-1)
    backward = (_volume(left_starts, left_stops) - common).max(axis=-1)
    return np.where(sizes == 1, 0.0, np.maximum((forward + backward) / 2, 0.0))


def _boxes(layouts: IntArray, devices: IntArray) -> tuple[FloatArray, FloatArray]:
    """Starts and stops (6, ...) of what a device holds along each dim, as shares of the dim."""
    starts, stops = [], []
    for names in _DIMS:
        degree, index = np.ones_like(layouts[..., 0]), np.zeros_like(layouts[..., 0])
        for axis in map(Layout._fields.index, names):
            ways = layouts[..., axis]
            coordinate = devices // layouts[..., axis + 1 :].prod(axis=-1) % ways
            degree, index = degree * ways, index * ways + coordinate
        starts.append(index / degree)
        stops.append((index + 1) / degree)
    return np.array(starts), np.array(stops)


def _volume(starts: FloatArray, stops: FloatArray) -> FloatArray:
    volume: FloatArray = np.prod(np.maximum(stops - starts, 0.0), axis=0)
    return volume
