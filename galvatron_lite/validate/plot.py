"""A scatter of predicted against measured step times as SVG, both axes logarithmic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from colorsys import hls_to_rgb
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from galvatron_lite.validate.outcome import Predicted
from galvatron_lite.validate.rows import PublishedRun
from galvatron_lite.validate.scores import Judged

SIDE = 640
_LEFT, _TOP, _BOTTOM, _LEGEND = 64, 32, 48, 230
Point = tuple[float, float]
"""Measured and predicted seconds."""


def scatter(judged: Iterable[Judged], key: Callable[[PublishedRun], str] = lambda run: run.family) -> str:
    """An SVG of every scored step time: measured to the right, predicted upwards, one colour a family.

    The full line is equality, the broken ones are 20 % off either way.
    """
    series: dict[str, list[Point]] = defaultdict(list)
    for one in judged:
        if one.time is not None and isinstance(one.outcome, Predicted) and one.measured is not None:
            series[key(one.run)].append((one.measured.step_seconds or 0.0, one.outcome.step_seconds))
    values = [value for points in series.values() for point in points for value in point] or [0.1, 1.0]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    axes = _Axes(low, max(high, low + 1))
    marks = [
        mark
        for place, points in enumerate(series.values())
        for mark in _marks(points, _colour(place, len(series)), axes)
    ]
    height = max(SIDE + _TOP + _BOTTOM, 18 * len(series) + 2 * _TOP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + SIDE + _LEGEND}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *axes.lines(),
            *marks,
            *_legend({name: len(points) for name, points in series.items()}),
            "</svg>\n",
        ]
    )


class _Axes:
    """Decades from ``low`` to ``high`` on both axes."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def across(self, value: float) -> float:
        """Pixels from the left edge."""
        return _LEFT + SIDE * (log10(value) - self.low) / (self.high - self.low)

    def down(self, value: float) -> float:
        """Pixels from the top edge."""
        return _TOP + SIDE * (1 - (log10(value) - self.low) / (self.high - self.low))

    def lines(self) -> list[str]:
        """Grid, labels, and the lines of equality."""
        grid = [line for decade in range(self.low, self.high + 1) for line in self._decade(decade)]
        middle = _LEFT + SIDE / 2
        return [
            *grid,
            *(self._diagonal(factor, dash) for factor, dash in ((1.0, ""), (0.8, "4 4"), (1.2, "4 4"))),
            _text(middle, _TOP + SIDE + 40, "measured seconds a step", "middle"),
            f'<text transform="translate(16 {_TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">'
            "predicted seconds a step</text>",
        ]

    def _decade(self, decade: int) -> list[str]:
        x, y, name = self.across(10.0**decade), self.down(10.0**decade), f"{10.0**decade:g}"
        right, bottom = _LEFT + SIDE, _TOP + SIDE
        return [
            f'<path d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}" stroke="#ddd" fill="none"/>',
            _text(x, bottom + 18, name, "middle"),
            _text(_LEFT - 6, y + 4, name, "end"),
        ]

    def _diagonal(self, factor: float, dash: str) -> str:
        """Predicted = factor x measured, cut off at the frame."""
        least, most = 10.0**self.low, 10.0**self.high
        start, end = max(least, least / factor), min(most, most / factor)
        ends = (self.across(start), self.down(start * factor), self.across(end), self.down(end * factor))
        x1, y1, x2, y2 = (f"{value:.1f}" for value in ends)
        return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#888" stroke-dasharray="{dash}" fill="none"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _marks(points: Iterable[Point], colour: str, axes: _Axes) -> list[str]:
    return [
        f'<circle cx="{axes.across(measured):.1f}" cy="{axes.down(predicted):.1f}" r="2.5" fill="{colour}" '
        'fill-opacity="0.6"/>'
        for measured, predicted in points
        if measured > 0 and predicted > 0
    ]


def _colour(place: int, count: int) -> str:
    """Hues spread around the circle, every second one darker."""
    red, green, blue = hls_to_rgb(place / max(count, 1), 0.35 if place % 2 else 0.5, 0.8)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _legend(sizes: dict[str, int]) -> list[str]:
    left = _LEFT + SIDE + 16
    return [
        line
        for place, (name, size) in enumerate(sizes.items())
        for line in (
            f'<circle cx="{left}" cy="{_TOP + 18 * place}" r="4" fill="{_colour(place, len(sizes))}"/>',
            _text(left + 10, _TOP + 18 * place + 4, f"{name} ({size})"),
        )
    ]
