"""Colours, markers and words of the figure of predictions. No torch here.

Families differ in colour and in shape, six colours by seven shapes: readers who cannot tell two colours apart have the
shapes. Colours are after M. Okabe and K. Ito, "Color Universal Design" (jfly.uni-koeln.de/color), darkened on light
ground and lightened on dark ground so that marks stand out from it by a contrast of 3 or more (WCAG 2.2, 1.4.11).
"""

from __future__ import annotations

from xml.sax.saxutils import escape

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
