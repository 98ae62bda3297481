"""What devices of a stage exchange between layers whose boundary tensors lie differently."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.parallelism.layout import Layout

_DIMS = (("batch",), ("tokens", "sequence"), ("planes",), ("rows",), ("columns",), ("channels",))
"""Dims of a boundary tensor, by the fields of ``Layout`` that count how many ways each is split, the outer first."""


def exchanging(left: IntArray, right: IntArray) -> IntArray:
    """Consecutive devices within which layouts differ: 1 where they are the same.

    Devices that share samples r and r' ways between them put the samples in order on runs of lcm(r, r') devices,
    whether they share tokens, pixels or channels.

    Args:
        left: (..., 8) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    runs = np.lcm(left[..., 1:].prod(axis=-1), right[..., 1:].prod(axis=-1))
    size: IntArray = np.where((left == right).all(axis=-1), 1, runs)
    return size


def received(left: IntArray, right: IntArray) -> FloatArray:
    """Share of a tensor that a device gets from others when it goes to another layout: the device that gets most, the
    mean of going there (in forward) and back (in backward, where every device that holds a part has its gradient).

    Each device keeps what it has of what it is to have, which is told from boxes of samples, tokens, pixels and
    channels, device by device.

    Args:
        left: (..., 8) layouts, those of ``right`` broadcast against it.
        right: the same.
    """
    runs = exchanging(left, right)
    devices = np.arange(int(runs.max(initial=1)))
    boxes = [_boxes(side[..., None, :], devices) for side in (left, right)]
    common = _volume(np.maximum(boxes[0][0], boxes[1][0]), np.minimum(boxes[0][1], boxes[1][1]))
    there, back = ((_volume(*box) - common).max(axis=-1) for box in reversed(boxes))
    return np.where(runs == 1, 0.0, np.maximum((there + back) / 2, 0.0))


def _boxes(layout: IntArray, device: IntArray) -> tuple[FloatArray, FloatArray]:
    """(6, ...): where what a device holds begins and ends along the dims, each of which is 1 long."""
    starts, stops = [], []
    for names in _DIMS:
        ways, index = np.ones_like(layout[..., 0]), np.zeros_like(layout[..., 0])
        for place in map(Layout._fields.index, names):
            degree = layout[..., place]
            share = device // layout[..., place + 1 :].prod(axis=-1) % degree
            ways, index = ways * degree, index * degree + share
        starts.append(index / ways)
        stops.append((index + 1) / ways)
    return np.array(starts), np.array(stops)


def _volume(start: FloatArray, stop: FloatArray) -> FloatArray:
    volume: FloatArray = np.prod(np.maximum(stop - start, 0.0), axis=0)
    return volume
