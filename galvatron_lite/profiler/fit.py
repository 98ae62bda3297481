"""Straight lines through measured communication: ``seconds = latency + size / bandwidth``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint

_ROUNDS = 25
_SLOWEST = 1e-15


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """``latency + slope * size``."""

    latency: float  # seconds, >= 0
    slope: float  # seconds per byte, > 0
    residual: float  # median of |predicted - measured| / measured

    def __call__(self, size: float) -> float:
        """Seconds for a size."""
        return self.latency + self.slope * size


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LatencyFit:
    """The line of least relative error, little moved by outliers.

    Relative errors, since small and large messages matter alike; iteratively reweighted least squares towards least
    absolute deviation (Schlossmacher, JASA 68, 1973); a negative latency is set to 0 and the slope fitted alone.

    Args:
        sizes: bytes; at least one, not all zero.
        seconds: measured, > 0.
    """
    base = [1.0 / value for value in seconds]
    weights = [1.0] * len(base)
    latency, slope = 0.0, _SLOWEST
    for _ in range(_ROUNDS):
        latency, slope = _weighted(sizes, seconds, [b * b * w for b, w in zip(base, weights, strict=True)])
        errors = _errors(sizes, seconds, latency, slope)
        weights = [1.0 / max(error, 1e-6) for error in errors]
    return LatencyFit(latency, slope, median(_errors(sizes, seconds, latency, slope)))


def fit_collectives(points: Sequence[CollectivePoint]) -> tuple[CollectiveFit, ...]:
    """One straight line for every collective and shape of group."""
    groups: dict[tuple[object, ...], list[CollectivePoint]] = defaultdict(list)
    for point in points:
        groups[(point.collective, point.group, point.stride, point.siblings)].append(point)
    return tuple(_fit_group(group) for group in groups.values())


def _fit_group(points: list[CollectivePoint]) -> CollectiveFit:
    line = fit_line([point.size for point in points], [point.seconds for point in points])
    first = points[0]
    return CollectiveFit(
        collective=first.collective,
        group=first.group,
        stride=first.stride,
        siblings=first.siblings,
        latency=line.latency,
        bandwidth=1.0 / line.slope,
        residual=line.residual,
    )


def _errors(sizes: Sequence[float], seconds: Sequence[float], latency: float, slope: float) -> list[float]:
    return [abs(latency + slope * x - y) / y for x, y in zip(sizes, seconds, strict=True)]


def _weighted(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted least squares; both results are kept physical."""
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    along = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    slope = along / spread if spread > 0 else 0.0
    latency = mean_y - slope * mean_x
    if latency < 0 or spread <= 0:
        squares = sum(w * x * x for w, x in zip(weights, xs, strict=True))
        return 0.0, max(sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / squares, _SLOWEST)
    if slope <= 0:
        return mean_y, _SLOWEST
    return latency, slope
