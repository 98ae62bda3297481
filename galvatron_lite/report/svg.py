"""SVG as markup whose texts and attributes are escaped. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

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


def boxes(places: Iterable[tuple[float, float, float, float]]) -> str:
    """Path data of many rectangles (x, y, width, height), to be drawn as one."""
    return "".join(
        f"M{_written(x)} {_written(y)}h{_written(width)}v{_written(height)}h{_written(-width)}z"
        for x, y, width, height in places
    )


def area(tops: Sequence[Point], floor: Sequence[Point]) -> str:
    """Path data of what lies between an upper line and a lower one."""
    return f"M{_line(tops)}L{_line(list(reversed(floor)))}z"


def path(points: Sequence[Point]) -> str:
    """Path data of a line."""
    return f"M{_line(points)}"


def _line(points: Sequence[Point]) -> str:
    return "L".join(f"{_written(x)} {_written(y)}" for x, y in points)


def _written(value: object) -> str:
    """A number with one decimal at most."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"
    return str(value)
