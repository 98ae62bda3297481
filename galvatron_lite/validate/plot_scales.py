"""Logarithmic scales of the figure of predictions. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, logarithmic.

    Attributes:
        low, high: values at the ends.
        start, end: pixels there; ``start`` may be the greater (upwards).
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Pixels of a value; values beyond an end lie at it."""
        inside = min(max(value, self.low), self.high)
        return self.start + (self.end - self.start) * log10(inside / self.low) / log10(self.high / self.low)


def rounded(values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest of positive values, rounded outwards to 1, 2 or 5 times a power of ten."""
    known = [value for value in values if value > 0] or [0.1, 1.0]
    low, high = _step(min(known), up=False), _step(max(known), up=True)
    return (low, high) if low < high else (low / 10, high * 10)


def _step(value: float, *, up: bool) -> float:
    power = floor(log10(value))
    steps = [factor * 10.0**exponent for exponent in (power - 1, power, power + 1) for factor in (1, 2, 5)]
    return min(step for step in steps if step >= value) if up else max(step for step in steps if step <= value)


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``, both included."""
    return [10.0**power for power in range(ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9) + 1)]
