"""Drawing in SVG: elements, marks, colours and axes of every figure.

Series differ in colour and in shape, six colours by seven shapes: readers who cannot tell two colours apart have the
shapes. Colours are after M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), darkened on light
ground and lightened on dark ground so that marks have a contrast of 3 or more (WCAG 2.2, 1.4.11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from math import ceil, floor, log10
from pathlib import Path

from markupsafe import Markup, escape

from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, logarithmic."""

    low: float  # low, high: values at the ends
    high: float
    start: float  # start, end: pixels there; ``start`` may be the greater (upwards)
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


def document(width: float, height: float, title: str, parts: Iterable[str], words: str = "") -> str:
    """A figure as a file: ``title`` and ``words`` are what a screen reader says, ``parts`` what is drawn."""
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
    """Whether an SVG can be written there."""
    if path.suffix.lower() != ".svg":
        raise InputError("--plot", str(path), "The figure is SVG: give a name that ends in .svg.")
    if not path.parent.is_dir():
        raise InputError("--plot", str(path), f"There is no folder {path.parent}: make it first.")


Point = tuple[float, float]


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element; text children and attribute values are escaped.

    Args:
        tag: name of the element.
        children: elements, or text.
        attributes: underscores become hyphens, a last one is left out (``class_``); None: the attribute is left out.
    """
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    words = "".join(f' {name}="{escape(_written(value))}"' for name, value in given)
    inner = "".join(str(escape(child)) for child in children)
    return Markup(f"<{tag}{words}>{inner}</{tag}>" if inner else f"<{tag}{words}/>")


def figure(width: float, height: float, label: str, *children: object, class_: str = "") -> Markup:
    """A picture that screen readers read as one, by its label.

    Args:
        width, height: in its own units; it is as wide as its place allows.
        label: what it shows, in a sentence.
        children: elements.
        class_: of the style sheet.
    """
    return element(
        "svg", *children, viewBox=f"0 0 {_written(width)} {_written(height)}", role="img", aria_label=label,
        class_=class_ or None,
    )  # fmt: skip


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text."""
    return element("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    """A rectangle; its title is shown where the reader points at it."""
    told = (element("title", title),) if title else ()
    return element("rect", *told, x=x, y=y, width=max(width, 0.0), height=height, class_=class_)


def area(tops: Sequence[Point], floor: Sequence[Point]) -> str:
    """Path data of what lies between an upper line and a lower one."""
    return f"M{_line(tops)}L{_line(list(reversed(floor)))}z"


def path(points: Sequence[Point]) -> str:
    """Path data of a line."""
    return f"M{_line(points)}"


def _line(points: Sequence[Point]) -> str:
    return "L".join(f"{_written(x)} {_written(y)}" for x, y in points)


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"
    return str(value)


_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def marks(most: float, count: int = 5, base: float = 1.0) -> list[float]:
    """Round values from 0 to at most ``most``, about so many.

    Args:
        most: the end of the axis.
        count: about how many.
        base: what round is a multiple of: 2**30 for sizes.
    """
    if most <= 0.0:
        return [0.0]
    rough = most / base / count
    unit = 10.0 ** floor(log10(rough))
    step = next(step for step in _STEPS if step * unit >= rough * (1 - 1e-9)) * unit * base
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]


def byte_marks(most: float, count: int = 4) -> list[float]:
    """``marks`` of a size, round in the unit it is written in."""
    base = next(base for base in (2.0**40, 2.0**30, 2.0**20, 2.0**10, 1.0) if most >= base or base == 1.0)
    return marks(most, count, base)


def _same_unit(values: list[float], write: Callable[[float], str]) -> list[str]:
    words = [write(value) for value in values]
    return ["0" if value == 0.0 else word for value, word in zip(values, words, strict=True)]


def second_words(values: list[float]) -> list[str]:
    """Seconds at an axis."""
    return _same_unit(values, lambda value: format_seconds(float(f"{value:.6g}")))


def byte_words(values: list[float]) -> list[str]:
    """Sizes at an axis, without ``.0``."""
    return _same_unit(values, lambda value: format_bytes(value).replace(".0 ", " "))


@dataclass(frozen=True, slots=True)
class Frame:
    """A figure with two linear axes, drawn in its own units."""

    width: float
    height: float
    margins: tuple[float, float, float, float]  # left, right, top, bottom
    x_end: float  # values at the right and at the top
    y_end: float
    x_start: float = 0.0  # values at the left and at the bottom
    y_start: float = 0.0

    def at(self, x: float, y: float) -> Point:
        """The place of a value."""
        left, right, top, bottom = self.margins
        across = (self.width - left - right) / (self.x_end - self.x_start)
        up = (self.height - top - bottom) / (self.y_end - self.y_start)
        return left + (x - self.x_start) * across, self.height - bottom - (y - self.y_start) * up

    def horizontal(self, values: Sequence[float], words: Sequence[str]) -> list[Markup]:
        """Lines of the grid at values of the upward axis, with their words."""
        drawn = []
        for value, word in zip(values, words, strict=True):
            left, y = self.at(self.x_start, value)
            line = element("path", d=f"M{left} {y:.1f}H{self.width - self.margins[1]}", class_="grid")
            drawn += [line, text(left - 6, y + 4, word, anchor="end")]
        return drawn

    def below(self, values: Sequence[float], words: Sequence[str]) -> list[Markup]:
        """Words at values of the lower axis; those at the ends stay within the figure."""
        drawn = []
        for value, word in zip(values, words, strict=True):
            x, y = self.at(value, self.y_start)
            anchor = "start" if value == self.x_start else "end" if x > self.width - 40 else "middle"
            drawn.append(text(x, y + 16, word, anchor=anchor))
        return drawn

    def limit(self, value: float, word: str) -> list[Markup]:
        """A line across the figure at a value of the upward axis, with a word above it."""
        (left, y), right = self.at(self.x_start, value), self.width - self.margins[1]
        line = element("path", d=f"M{left} {y:.1f}H{right}", class_="limit")
        return [line, text(right, y - 3, word, anchor="end", class_="limit-word")]


def percent(share: float) -> str:
    """A share: ``4.2 %``, ``37 %``."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def change(share: float) -> str:
    """A share by which something differs, with its sign: ``+4.2 %``."""
    return ("+" if share > 0 else "−" if share < 0 else "±") + percent(abs(share))
