"""Looks layers up in a profile: piecewise linear between the samples that were measured or estimated."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil

from galvatron_lite.model.graph import Recompute
from galvatron_lite.profiler.schema import LayerPoint

PointKey = tuple[str, int, bool, Recompute]
"""Kind, tensor degree, sequence parallel, recompute choice."""


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer costs one device at a number of samples; see ``LayerPoint``.

    Attributes:
        forward, backward: seconds.
        kept, working, forward_working: bytes.
    """

    forward: float
    backward: float
    kept: int
    working: int
    forward_working: int


def index_points(points: tuple[LayerPoint, ...]) -> dict[PointKey, tuple[LayerPoint, ...]]:
    """Points by what was run, ascending in samples; of equal ones the last counts."""
    groups: dict[PointKey, dict[int, LayerPoint]] = {}
    for point in points:
        key = (point.kind, point.tensor, point.sequence_parallel, point.recompute)
        groups.setdefault(key, {})[point.samples] = point
    return {key: tuple(group[samples] for samples in sorted(group)) for key, group in groups.items()}


def figures_at(points: tuple[LayerPoint, ...], samples: float) -> LayerFigures:
    """Figures at a number of samples: a straight line through the two nearest points, in proportion where there is one.

    Outside the points the line goes on; it never falls below zero nor, left of the points, below proportion.
    """
    if len(points) == 1:
        first, share = points[0], samples / points[0].samples
        return _mix(first, first, 0.0, share)
    place = bisect_left([point.samples for point in points], samples)
    right = min(max(place, 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    weight = (samples - low.samples) / (high.samples - low.samples)
    return _mix(low, high, weight, samples / points[0].samples if place == 0 else 1.0)


def _mix(low: LayerPoint, high: LayerPoint, weight: float, share: float) -> LayerFigures:
    def value(at_low: float, at_high: float) -> float:
        proportional = at_low * share if share < 1 or low is high else 0.0
        line = 0.0 if low is high else at_low + weight * (at_high - at_low)
        return max(line, proportional, 0.0)

    return LayerFigures(
        value(low.forward, high.forward),
        value(low.backward, high.backward),
        ceil(value(low.kept, high.kept) - 1e-6),
        ceil(value(low.working, high.working) - 1e-6),
        ceil(value(low.forward_working, high.forward_working) - 1e-6),
    )
