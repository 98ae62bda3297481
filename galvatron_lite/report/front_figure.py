"""Memory against step time: the front, the plan, and runners-up. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from markupsafe import Markup

from galvatron_lite.report.scales import byte_marks, byte_words, marks, second_words
from galvatron_lite.report.svg import element, figure, path, text
from galvatron_lite.units import format_bytes, format_seconds

WIDTH, HEIGHT = 640.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 20.0, 16.0, 46.0
_FAR = 1.6, 2.5
"""Factors on the budget and on the plan's step time beyond which others are left to the table."""
_SIZES = {"front": 4.0, "plan": 7.0, "other": 4.0, "overfull": 4.0}


@dataclass(frozen=True, slots=True)
class Mark:
    """A plan in the figure.

    Attributes:
        memory: bytes on its fullest device.
        seconds: of a step.
        kind: ``plan``, ``front``, ``other`` (a runner-up that fits) or ``overfull``.
        words: told where the reader points at it, and in the table.
    """

    memory: int
    seconds: float
    kind: str
    words: str


def front_figure(shown: Sequence[Mark], budget: int) -> Markup:
    """The figure; marks far beyond the others are left to the table.

    Args:
        shown: at least one, the plan.
        budget: bytes a device may take; 0: not known.
    """
    near = near_marks(shown, budget)
    most = 1.1 * max(budget, *(mark.memory for mark in near))
    quick, slow = _range([mark.seconds for mark in near])
    across, up = (WIDTH - _LEFT - _RIGHT) / most, (HEIGHT - _TOP - _BOTTOM) / (slow - quick)
    low = HEIGHT - _BOTTOM

    def at(mark: Mark) -> tuple[float, float]:
        return _LEFT + mark.memory * across, low - (mark.seconds - quick) * up

    line = [at(mark) for mark in sorted(near, key=lambda mark: -mark.memory) if mark.kind in ("front", "plan")]
    drawn = [element("path", d=path(_stairs(line)), class_="front-line")] if len(line) > 1 else []
    if budget:
        x = _LEFT + budget * across
        drawn += [element("path", d=f"M{x:.1f} {_TOP}V{low}", class_="limit"),
                  text(x - 5, _TOP + 10, "budget", anchor="end", class_="limit-word")]  # fmt: skip
    order = sorted(near, key=lambda mark: mark.kind == "plan")
    drawn += [_mark(mark, *at(mark)) for mark in order]
    label = f"Step time against memory of {len(near)} plans; the table beside it says the same."
    return figure(WIDTH, HEIGHT, label, *_axes(most, (quick, slow), across, up), *drawn)


def near_marks(shown: Sequence[Mark], budget: int) -> list[Mark]:
    """Those that do not take so much that the others could not be told apart."""
    plan = next(mark for mark in shown if mark.kind == "plan")
    return [
        mark for mark in shown
        if mark.kind in ("plan", "front")
        or (mark.memory <= _FAR[0] * max(budget, plan.memory) and mark.seconds <= _FAR[1] * plan.seconds)
    ]  # fmt: skip


def _range(seconds: Sequence[float]) -> tuple[float, float]:
    """Where the axis of seconds begins and ends: at 0 where plans take very unlike times."""
    least, most = min(seconds), max(seconds)
    if least < most / 2:
        return 0.0, 1.12 * most
    room = max(most - least, 0.05 * most)
    return max(least - 0.35 * room, 0.0), most + 0.2 * room


def _mark(mark: Mark, x: float, y: float) -> Markup:
    """Round for plans that fit, a ring for runners-up, a cross for what does not fit, a square for the plan."""
    title = element("title", f"{mark.words}: {format_seconds(mark.seconds)}, {format_bytes(mark.memory)}")
    size = _SIZES[mark.kind]
    if mark.kind == "overfull":
        return element("path", title, d=f"M{x - size:.1f} {y - size:.1f}l8 8m0-8l-8 8", class_="mark-overfull")
    if mark.kind == "plan":
        return element("rect", title, x=x - size, y=y - size, width=2 * size, height=2 * size, class_="mark-plan")
    return element("circle", title, cx=x, cy=y, r=size, class_=f"mark-{mark.kind}")


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """From each plan to the next with less memory: it is the fastest down to there."""
    found = points[:1]
    for (_, above), (x, y) in pairwise(points):
        found += [(x, above), (x, y)]
    return found


def _axes(most: float, between: tuple[float, float], across: float, up: float) -> list[Markup]:
    drawn, low = [], HEIGHT - _BOTTOM
    sizes = byte_marks(most, 5)
    for value, word in zip(sizes, byte_words(sizes), strict=True):
        drawn.append(text(_LEFT + value * across, low + 16, word, anchor="middle"))
    unit = marks(between[1] - between[0], 5)[1]
    seconds = [unit * number for number in range(ceil(between[0] / unit - 1e-9), int(between[1] / unit) + 1)]
    for value, word in zip(seconds, second_words(seconds), strict=True):
        y = low - (value - between[0]) * up
        drawn += [element("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", class_="grid"),
                  text(_LEFT - 6, y + 4, word, anchor="end")]  # fmt: skip
    middle = _LEFT + (WIDTH - _LEFT - _RIGHT) / 2
    return [*drawn, text(middle, HEIGHT - 8, "memory of the fullest device", anchor="middle", class_="axis-word"),
            text(_LEFT, 10, "step time", anchor="end", class_="axis-word")]  # fmt: skip
