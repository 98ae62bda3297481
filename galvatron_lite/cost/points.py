"""Looks up what a layer costs in a profile.

A profile has points: seconds and bytes of a kind of layer at some numbers of samples. Between points the figures are
linear. ``figures_at`` looks up one layer; ``Curves`` looks up many strategies of one kind of layer at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, Flag, FloatArray, IntArray, Real, Whole, largest, never, up, where
from galvatron_lite.parallelism.axes import SLICES
from galvatron_lite.parallelism.ranks import Either
from galvatron_lite.parallelism.registry import dimensions, run_fields
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import LayerPoint

RUN = run_fields()
"""Fields of strategies that change what one device runs of a layer; points have the same fields."""
PointKey = tuple[Any, ...]
"""A kind of layer, and the values of ``RUN``."""
Points = Mapping[PointKey, Sequence[LayerPoint]]
FIGURES = ("forward", "backward", "kept", "working", "forward_working")
"""Fields of ``LayerFigures``; points have the same fields."""

_UNSPLIT = Strategy()
# the last fields of ``RUN``: points of the unsplit layer stand in for those that a profile lacks
_STAND_IN = tuple(
    getattr(_UNSPLIT, name) for dimension in dimensions() if dimension.stands_in for name in dimension.runs
)
_SLICES = frozenset(axis.degree for dimension in dimensions() for axis in dimension.axes if axis.part in SLICES)
_LARGEST_DEGREE = 2**14  # more ways than any layer is split along one axis
_run_values = attrgetter(*RUN)
_point_values = attrgetter("samples", *FIGURES)


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer costs one device at a number of samples, see ``LayerPoint``; arrays under several strategies."""

    forward: Real  # forward, backward: seconds
    backward: Real
    kept: Whole  # kept, working, forward_working: bytes
    working: Whole
    forward_working: Whole

    def with_edges(self, saved: Whole, backward: Whole, forward: Whole) -> LayerFigures:
        """Add bytes that are saved from forward to backward, and transient bytes of each pass."""
        if never(saved):
            return self
        working, forward_working = self.working + saved + backward, self.forward_working + saved + forward
        return LayerFigures(self.forward, self.backward, self.kept + saved, working, forward_working)

    def scaled(self, factor: float) -> LayerFigures:
        """Multiply all seconds by a factor."""
        if factor == 1.0:
            return self
        forward, backward = factor * self.forward, factor * self.backward
        return LayerFigures(forward, backward, self.kept, self.working, self.forward_working)


def index_points(points: tuple[LayerPoint, ...]) -> dict[PointKey, tuple[LayerPoint, ...]]:
    """Group points by key, ascending in samples; of points with equal samples the last counts."""
    groups: dict[PointKey, dict[float, LayerPoint]] = {}
    for point in points:
        groups.setdefault(key_of(point.kind, point), {})[point.samples] = point
    return {key: tuple(group[samples] for samples in sorted(group)) for key, group in groups.items()}


def key_of(kind: str, strategy: Strategy | LayerPoint) -> PointKey:
    """Return the key of the points of a kind of layer under a strategy."""
    return (kind, *_run_values(strategy))


def points_of(points: Points, key: PointKey) -> Sequence[LayerPoint] | None:
    """Return the points of a key, or those that stand in for them (``Dimension.stands_in``); None if there are none."""
    return points.get(key) or points.get((*key[: len(key) - len(_STAND_IN)], *_STAND_IN))


def slices_of(key: PointKey) -> int:
    """Count the devices that work on the same samples."""
    return prod(value for name, value in zip(RUN, key[1:], strict=True) if name in _SLICES)


def figures_at(points: Sequence[LayerPoint], samples: float) -> LayerFigures:
    """Interpolate figures at a number of samples: a line through the two nearest points.

    A single point is scaled. Beyond the points the line goes on, but never below zero and, on the left, never below the
    first point in proportion to its samples.
    """
    right = min(max(bisect_left(points, samples, key=attrgetter("samples")), 1), len(points) - 1)
    low, high = points[max(right - 1, 0)], points[right]
    single = len(points) == 1
    weight = 0.0 if single else (samples - low.samples) / (high.samples - low.samples)
    share = samples / points[0].samples if single or samples <= points[0].samples else 1.0
    return _figures([_interpolated(getattr(low, name), getattr(high, name), weight, share, single) for name in FIGURES])


def _interpolated(low: Real, high: Real, weight: Real, share: Real, single: Flag) -> Real:
    """Interpolate one figure; see ``figures_at``.

    Args:
        low: the figure of the left point.
        high: of the right point.
        weight: position between both; 0 is left, 1 is right.
        share: samples over those of the first point, if that is at the right or single; else 1.
        single: whether there is one point.
    """
    proportional = where((share < 1) | single, low * share, 0.0)
    line = where(single, 0.0, low + weight * (high - low))
    return largest(line, proportional, 0.0)


def _figures(values: Sequence[Real]) -> LayerFigures:
    forward, backward, *sizes = values
    return LayerFigures(forward, backward, *(up(size - 1e-6) for size in sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """The points of a kind of layer as arrays: R rows, one for each key, with up to P points each."""

    codes: IntArray  # (R,) see ``code_of``; ascending
    samples: FloatArray  # (R, P) ascending; infinite beyond the last point of a row
    counts: IntArray  # (R,) points of each row
    values: FloatArray  # (F, R, P) figures in the order of ``FIGURES``

    @staticmethod
    def of(points: Points) -> Curves:
        """Make the curves of the points of one kind of layer."""
        coded = sorted((int(code_of(row[0])), row) for row in points.values())
        return Curves.stacked([code for code, _ in coded], [row for _, row in coded])

    @staticmethod
    def stacked(codes: Sequence[int], rows: Sequence[Sequence[LayerPoint]]) -> Curves:
        """Make curves of rows of points with ascending codes."""
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        filled = np.arange(max(counts, default=1)) < counts[:, None]
        figures = np.array([_point_values(point) for row in rows for point in row]).reshape(-1, 1 + len(FIGURES))
        samples, values = np.full(filled.shape, np.inf), np.zeros((len(FIGURES), *filled.shape))
        samples[filled], values[:, filled] = figures[:, 0], figures[:, 1:].T
        return Curves(np.array(codes, dtype=np.int64), samples, counts, values)

    def seconds(self, samples: float) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of forward and of backward of every row, (R,) each, at a number of samples."""
        every_row = np.arange(len(self.codes))
        forward, backward = self._interpolate(every_row, np.full(len(self.codes), samples), FIGURES[:2])
        return forward, backward

    def at(self, codes: IntArray, samples: FloatArray) -> tuple[LayerFigures, BoolArray]:
        """Interpolate as ``figures_at``, and tell for which codes there are points; figures of others mean nothing.

        Args:
            codes: (n,) of strategies.
            samples: (n,) samples of each.
        """
        rows, valid = self._rows(codes)
        return _figures(self._interpolate(rows, samples, FIGURES)), valid

    def backward(self, codes: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return the seconds of backward alone; as ``at``."""
        rows, valid = self._rows(codes)
        (seconds,) = self._interpolate(rows, samples, ("backward",))
        return seconds, valid

    def _interpolate(self, rows: IntArray, samples: FloatArray, names: Sequence[str]) -> list[FloatArray]:
        points = self.samples[rows]
        position = (points < samples[:, None]).sum(axis=1)
        single = self.counts[rows] == 1
        right = np.where(single, 0, np.minimum(np.maximum(position, 1), self.counts[rows] - 1))
        left = np.maximum(right - 1, 0)
        index = np.arange(len(rows))
        low, high, first = points[index, left], points[index, right], points[:, 0]
        weight = (samples - low) / np.where(single, 1.0, high - low)
        share = np.where((position == 0) | single, samples / first, 1.0)
        figures = np.array([FIGURES.index(name) for name in names])[:, None]
        ends = zip(self.values[figures, rows, left], self.values[figures, rows, right], strict=True)
        return [_interpolated(*pair, weight, share, single) for pair in ends]

    def _rows(self, codes: IntArray) -> tuple[IntArray, BoolArray]:
        """Find the row of each code, or the row that stands in for it, and tell whether there is either."""
        row = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        present = self.codes[row] == codes
        if present.all():
            return row, present
        digits = _LARGEST_DEGREE ** len(_STAND_IN)
        unsplit = codes - codes % digits + code_of(_UNSPLIT) % digits
        stand_in = np.minimum(np.searchsorted(self.codes, unsplit), len(self.codes) - 1)
        return np.where(present, row, stand_in), present | (self.codes[stand_in] == unsplit)


def code_of(strategy: Either | LayerPoint, **changes: Enum) -> Whole:
    """Encode the values of ``RUN``, with ``changes``, as one number."""
    code: Whole = 0
    for name in RUN:
        value, default = changes.get(name, getattr(strategy, name)), getattr(_UNSPLIT, name)
        options = tuple(type(default)) if isinstance(default, Enum) else ()
        digit = options.index(value) if isinstance(value, Enum) else value
        code = code * (len(options) or (2 if isinstance(default, bool) else _LARGEST_DEGREE)) + digit
    return code
