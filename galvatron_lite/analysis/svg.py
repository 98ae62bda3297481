"""Logarithmic scales of the figure of predictions. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from galvatron_lite.errors import InputError


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


COLOURS = (
    ("#0072b2", "#56b4e9"), ("#b84a00", "#ff9a5c"), ("#00795a", "#2fd0a2"), ("#a0458a", "#e8a0cf"),
    ("#8a6400", "#f0c44a"), ("#4d5560", "#b7c0ca"),
)  # fmt: skip
"""Of marks, on light and on dark ground."""

SHAPES = (
    "M-2.7 0a2.7 2.7 0 1 0 5.4 0a2.7 2.7 0 1 0-5.4 0z",
    "M-2.4-2.4h4.8v4.8h-4.8z",
    "M0-3.2L3 2.2H-3z",
    "M0-3.4L3.4 0L0 3.4L-3.4 0z",
    "M0 3.2L3-2.2H-3z",
    "M-1-3.2h2v2.2h2.2v2h-2.2v2.2h-2v-2.2h-2.2v-2h2.2z",
    "M-2.9-1.6L-1.6-2.9L0-1.3L1.6-2.9L2.9-1.6L1.3 0L2.9 1.6L1.6 2.9L0 1.3L-1.6 2.9L-2.9 1.6L-1.3 0z",
)
"""Outlines of marks around the origin: circle, square, triangle, diamond, the triangle turned over, plus, cross."""

KINDS = len(COLOURS) * len(SHAPES)
"""Families that can be told apart."""

_GROUND = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9aa5b1"),
    "near": ("#cfe0d4", "#1d3a2a"),
    "far": ("#edf1ee", "#15211a"),
}
"""Fills, on light and on dark ground."""
_LINES = {"grid": ("#d9dfe5", "#2a313a"), "one": ("#1f2328", "#e6edf3")}
"""Strokes."""


def style() -> str:
    """The sheet of the figure: light, and dark where the reader's system asks for it."""
    return f"<style>{_rules(0)} @media (prefers-color-scheme:dark){{{_rules(1)}}}</style>"


def _rules(ground: int) -> str:
    fills = {name: pair[ground] for name, pair in _GROUND.items()}
    fills |= {f"c{number}": pair[ground] for number, pair in enumerate(COLOURS)}
    lines = {name: pair[ground] for name, pair in _LINES.items()}
    # What is drawn in strokes of a family's colour: ticks.
    lines |= {f"t{number}": pair[ground] for number, pair in enumerate(COLOURS)}
    return "".join(f".{name}{{fill:{value}}}" for name, value in fills.items()) + "".join(
        f".{name}{{stroke:{value};fill:none}}" for name, value in lines.items()
    )


def shapes() -> str:
    """The outlines, once, to be used by name."""
    return "<defs>" + "".join(f'<path id="s{number}" d="{shape}"/>' for number, shape in enumerate(SHAPES)) + "</defs>"


def colour(place: int) -> int:
    """Number of a family's colour by its place."""
    return place % len(COLOURS)


def shape(place: int) -> int:
    """Number of a family's shape: families of one colour have different ones."""
    return place // len(COLOURS) % len(SHAPES)


def mark(place: int, x: float, y: float) -> str:
    """One mark of a family; its colour comes from the group around it."""
    return f'<use href="#s{shape(place)}" x="{x:.1f}" y="{y:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "ink", more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{more}>{escape(words)}</text>'


def check_target(path: Path) -> None:
    """Whether an SVG can be written there.

    Raises:
        InputError: the name does not end in ``.svg``, or there is no such folder.
    """
    if path.suffix.lower() != ".svg":
        raise InputError("--plot", str(path), "The figure is SVG: give a name that ends in .svg.")
    if not path.parent.is_dir():
        raise InputError("--plot", str(path), f"There is no folder {path.parent}: make it first.")
