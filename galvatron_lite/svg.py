"""SVG: elements, marks, colours and axes of all figures.

Series differ in colour and shape, six colours by seven shapes, so that readers can tell them apart without colour.
Colours are after M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), darkened on light background
and lightened on dark background, for a contrast of marks of 3 or more (WCAG 2.2, 1.4.11).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from math import ceil, floor, log10
from pathlib import Path

from markupsafe import Markup, escape

from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis."""

    low: float  # value at the start
    high: float  # value at the end
    start: float  # pixels; may be greater than ``end`` for an axis upwards
    end: float

    def at(self, value: float) -> float:
        """Pixels of a value, clipped to the ends."""
        inside = min(max(value, self.low), self.high)
        return self.start + (self.end - self.start) * log10(inside / self.low) / log10(self.high / self.low)


def rounded(values: Iterable[float]) -> tuple[float, float]:
    """The least and greatest of the positive values, rounded outwards to 1, 2 or 5 times a power of ten."""
    positive = [value for value in values if value > 0] or [0.1, 1.0]
    low, high = _step(min(positive), up=False), _step(max(positive), up=True)
    return (low, high) if low < high else (low / 10, high * 10)


def _step(value: float, *, up: bool) -> float:
    power = floor(log10(value))
    steps = [factor * 10.0**exponent for exponent in (power - 1, power, power + 1) for factor in (1, 2, 5)]
    return min(step for step in steps if step >= value) if up else max(step for step in steps if step <= value)


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``, inclusive."""
    return [10.0**power for power in range(ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9) + 1)]


COLOURS = (
    ("#0072b2", "#56b4e9"), ("#b84a00", "#ff9a5c"), ("#00795a", "#2fd0a2"), ("#a0458a", "#e8a0cf"),
    ("#8a6400", "#f0c44a"), ("#4d5560", "#b7c0ca"),
)  # fmt: skip
"""Colours of marks, on light and on dark background."""

SHAPES = (
    "M-2.7 0a2.7 2.7 0 1 0 5.4 0a2.7 2.7 0 1 0-5.4 0z",
    "M-2.4-2.4h4.8v4.8h-4.8z",
    "M0-3.2L3 2.2H-3z",
    "M0-3.4L3.4 0L0 3.4L-3.4 0z",
    "M0 3.2L3-2.2H-3z",
    "M-1-3.2h2v2.2h2.2v2h-2.2v2.2h-2v-2.2h-2.2v-2h2.2z",
    "M-2.9-1.6L-1.6-2.9L0-1.3L1.6-2.9L2.9-1.6L1.3 0L2.9 1.6L1.6 2.9L0 1.3L-1.6 2.9L-2.9 1.6L-1.3 0z",
)
"""Outlines of marks around the origin: circle, square, triangle, diamond, inverted triangle, plus, cross."""

KINDS = len(COLOURS) * len(SHAPES)
"""Number of series that can be told apart."""

_GROUND = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9aa5b1"),
    "near": ("#cfe0d4", "#1d3a2a"),
    "far": ("#edf1ee", "#15211a"),
}
"""Fills, on light and on dark background."""
_LINES = {"grid": ("#d9dfe5", "#2a313a"), "one": ("#1f2328", "#e6edf3")}
"""Strokes."""


def style() -> str:
    """The style sheet of a figure: light, or dark if the reader's system is."""
    return f"<style>{_rules(0)} @media (prefers-color-scheme:dark){{{_rules(1)}}}</style>"


def _rules(ground: int) -> str:
    fills = {name: pair[ground] for name, pair in _GROUND.items()}
    fills |= {f"c{number}": pair[ground] for number, pair in enumerate(COLOURS)}
    lines = {name: pair[ground] for name, pair in _LINES.items()}
    # Strokes in the colour of a series.
    lines |= {f"t{number}": pair[ground] for number, pair in enumerate(COLOURS)}
    return "".join(f".{name}{{fill:{value}}}" for name, value in fills.items()) + "".join(
        f".{name}{{stroke:{value};fill:none}}" for name, value in lines.items()
    )


def shapes() -> str:
    """Definitions of the outlines of marks."""
    return "<defs>" + "".join(f'<path id="s{number}" d="{shape}"/>' for number, shape in enumerate(SHAPES)) + "</defs>"


def colour(place: int) -> int:
    """Index of the colour of a series."""
    return place % len(COLOURS)


def shape(place: int) -> int:
    """Index of the shape of a series; series of the same colour have different shapes."""
    return place // len(COLOURS) % len(SHAPES)


def mark(place: int, x: float, y: float) -> str:
    """A mark of a series; its colour comes from the group around it."""
    return f'<use href="#s{shape(place)}" x="{x:.1f}" y="{y:.1f}"/>'


def document(width: float, height: float, title: str, parts: Iterable[str], words: str = "") -> str:
    """An SVG file.

    Args:
        width: in pixels.
        height: in pixels.
        title: for screen readers.
        parts: elements.
        words: a longer description for screen readers.
    """
    described = " figure-words" if words else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui,Segoe UI,Helvetica,Arial,sans-serif" font-size="12" role="img" '
            f'aria-labelledby="figure-title{described}">',
            f'<title id="figure-title">{escape_html(title, quote=False)}</title>',
            *([f'<desc id="figure-words">{escape_html(words, quote=False)}</desc>'] if words else []),
            style() + shapes(),
            '<rect class="paper" width="100%" height="100%"/>',
            *parts,
            "</svg>\n",
        ]
    )


def caption(x: float, y: float, words: str, anchor: str = "start", kind: str = "ink", more: str = "") -> str:
    """A line of text."""
    escaped = escape_html(words, quote=False)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{more}>{escaped}</text>'


def check_target(path: Path) -> None:
    """Raise ``InputError`` if a path is not that of an SVG file in an existing folder."""
    if path.suffix.lower() != ".svg":
        raise InputError("--plot", str(path), "The figure is SVG: give a name that ends in .svg.")
    if not path.parent.is_dir():
        raise InputError("--plot", str(path), f"There is no folder {path.parent}: make it first.")


Point = tuple[float, float]


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Make an element; text children and attribute values are escaped.

    Args:
        tag: name of the element.
        children: elements, or text.
        attributes: by name, with underscores for hyphens, and one at the end for reserved words (``class_``). None:
            the attribute is left out.
    """
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    text = "".join(f' {name}="{escape(_number(value))}"' for name, value in named)
    inner = "".join(str(escape(child)) for child in children)
    return Markup(f"<{tag}{text}>{inner}</{tag}>" if inner else f"<{tag}{text}/>")


def figure(width: float, height: float, label: str, *children: object, class_: str = "") -> Markup:
    """A picture for a page, which screen readers read by its label.

    Args:
        width: in units of the picture, which fills its place on the page.
        height: in the same units.
        label: a sentence.
        children: elements.
        class_: of the style sheet.
    """
    return element(
        "svg", *children, viewBox=f"0 0 {_number(width)} {_number(height)}", role="img", aria_label=label,
        class_=class_ or None,
    )  # fmt: skip


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text."""
    return element("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    """A rectangle; browsers show its title at the pointer."""
    titles = (element("title", title),) if title else ()
    return element("rect", *titles, x=x, y=y, width=max(width, 0.0), height=height, class_=class_)


def area(tops: Sequence[Point], floor: Sequence[Point]) -> str:
    """Path data of the area between an upper and a lower line."""
    return f"M{_line(tops)}L{_line(list(reversed(floor)))}z"


def path(points: Sequence[Point]) -> str:
    """Path data of a line."""
    return f"M{_line(points)}"


def _line(points: Sequence[Point]) -> str:
    return "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"
    return str(value)


_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def marks(most: float, count: int = 5, base: float = 1.0) -> list[float]:
    """Round values for the ticks of an axis, from 0.

    Args:
        most: end of the axis.
        count: approximate number of values.
        base: unit in which values are round: 2**30 for sizes.
    """
    if most <= 0.0:
        return [0.0]
    rough = most / base / count
    unit = 10.0 ** floor(log10(rough))
    step = next(step for step in _STEPS if step * unit >= rough * (1 - 1e-9)) * unit * base
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]


def byte_marks(most: float, count: int = 4) -> list[float]:
    """Ticks of an axis of sizes, round in the unit in which they are written."""
    base = next(base for base in (2.0**40, 2.0**30, 2.0**20, 2.0**10, 1.0) if most >= base or base == 1.0)
    return marks(most, count, base)


def second_words(values: list[float]) -> list[str]:
    """Labels of an axis of seconds."""
    return [format_seconds(float(f"{value:.6g}")) if value else "0" for value in values]


def byte_words(values: list[float]) -> list[str]:
    """Labels of an axis of sizes, without ``.0``."""
    return [format_bytes(value).replace(".0 ", " ") if value else "0" for value in values]


@dataclass(frozen=True, slots=True)
class Frame:
    """A figure with two linear axes."""

    width: float
    height: float
    margins: tuple[float, float, float, float]  # left, right, top, bottom
    x_end: float  # value at the right
    y_end: float  # value at the top
    x_start: float = 0.0  # value at the left
    y_start: float = 0.0  # value at the bottom

    def at(self, x: float, y: float) -> Point:
        """Coordinates of a point."""
        left, right, top, bottom = self.margins
        across = (self.width - left - right) / (self.x_end - self.x_start)
        up = (self.height - top - bottom) / (self.y_end - self.y_start)
        return left + (x - self.x_start) * across, self.height - bottom - (y - self.y_start) * up

    def horizontal(self, values: Sequence[float], words: Sequence[str]) -> list[Markup]:
        """Grid lines with labels at values of the vertical axis."""
        drawn = []
        for value, word in zip(values, words, strict=True):
            left, y = self.at(self.x_start, value)
            line = element("path", d=f"M{left} {y:.1f}H{self.width - self.margins[1]}", class_="grid")
            drawn += [line, text(left - 6, y + 4, word, anchor="end")]
        return drawn

    def below(self, values: Sequence[float], words: Sequence[str]) -> list[Markup]:
        """Labels at values of the horizontal axis, within the figure."""
        drawn = []
        for value, word in zip(values, words, strict=True):
            x, y = self.at(value, self.y_start)
            anchor = "start" if value == self.x_start else "end" if x > self.width - 40 else "middle"
            drawn.append(text(x, y + 16, word, anchor=anchor))
        return drawn

    def limit(self, value: float, word: str) -> list[Markup]:
        """A line across the figure at a value of the vertical axis, with a word above it."""
        (left, y), right = self.at(self.x_start, value), self.width - self.margins[1]
        line = element("path", d=f"M{left} {y:.1f}H{right}", class_="limit")
        return [line, text(right, y - 3, word, anchor="end", class_="limit-word")]


def percent(share: float) -> str:
    """A share as text: ``4.2 %``, ``37 %``."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def change(share: float) -> str:
    """A relative difference as text, with its sign: ``+4.2 %``."""
    return ("+" if share > 0 else "−" if share < 0 else "±") + percent(abs(share))
