"""The timeline of all groups of devices as a still picture: what a page without a script and a print show. No torch.

Where passes are too narrow to be seen one by one, columns of the picture say what groups mostly do in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from galvatron_lite.cost.timeline import GroupTimeline, Timeline
from galvatron_lite.report.scales import marks, second_words
from galvatron_lite.report.svg import boxes, element, figure, text

WIDTH, _LEFT, _RIGHT = 1000.0, 70.0, 8.0
_COLUMNS = 460
_NARROW = 2.0
"""Width of a mean pass below which passes are not drawn one by one."""
_MOST = 6000
"""Passes that are drawn one by one, at most."""
_MOSTLY, _IDLE = 0.85, 0.35
KINDS = ("forward", "backward", "weight", "mixed", "communication", "optimizer", "host")
Interval = tuple[str, float, float]
"""Kind, start and end in seconds."""


def overview(step: Timeline, name: str) -> Markup:
    """The picture of a step."""
    rows, height = len(step.groups), row_height(len(step.groups))
    scale = (WIDTH - _LEFT - _RIGHT) / step.span
    found: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in KINDS}
    whole = one_by_one(step)
    for group in step.groups:
        y = group.group * height + 1
        own = intervals(group) if whole else columns(group, step.span)
        for kind, start, end in (*own, *_host(step)):
            found[kind].append((_LEFT + start * scale, y, (end - start) * scale, height - min(2.0, height / 4)))
    bottom = rows * height + 4
    drawn = [element("path", d=boxes(places), class_=f"pass-{kind}") for kind, places in found.items() if places]
    label = f"Timeline of a step of {name}: {rows} groups of devices; the table below says the same in figures."
    return figure(
        WIDTH, bottom + 24, label,
        element("rect", x=_LEFT, y=0, width=WIDTH - _LEFT - _RIGHT, height=bottom - 2, class_="ground"),
        *drawn, *_names(step.groups, height), *axis(step.span, scale, bottom), class_="overview",
    )  # fmt: skip


def _host(step: Timeline) -> list[Interval]:
    """The host work that ends a step, of all groups."""
    return [("host", step.span - step.host, step.span)] if step.host else []


def row_height(rows: int) -> float:
    """Height of a group's row."""
    return next(height for most, height in ((8, 26.0), (16, 20.0), (32, 13.0), (64, 9.0), (10**9, 6.0)) if rows <= most)


def one_by_one(step: Timeline) -> bool:
    """Whether every pass can be seen."""
    count = sum(len(group.passes) for group in step.groups)
    return count <= _MOST and (WIDTH - _LEFT) * len(step.groups) / count >= _NARROW


def _names(groups: Sequence[GroupTimeline], height: float) -> Iterator[Markup]:
    """Names of rows, as many as there is room for."""
    every = next(count for count in (1, 2, 4, 8, 16, 32, 64) if count * height >= 11 or count == 64)
    for group in groups[::every]:
        words = f"stage {group.stages[0]}" if len(group.stages) == 1 else f"group {group.group}"
        yield text(_LEFT - 8, group.group * height + max(height / 2 + 4, 9), words, anchor="end")


def axis(most: float, scale: float, y: float) -> list[Markup]:
    """The axis of seconds."""
    places = marks(most, 6)
    words = second_words(places)
    drawn = []
    for value, word in zip(places, words, strict=True):
        x = _LEFT + value * scale
        drawn.append(element("path", d=f"M{x:.1f} {y - 2:.1f}v4", class_="tick"))
        anchor = "start" if value == 0.0 else "end" if x > WIDTH - 60 else "middle"
        drawn.append(text(x, y + 14, word, anchor=anchor))
    return drawn


def intervals(group: GroupTimeline) -> Iterator[Interval]:
    """What a group does, one by one."""
    for one in group.passes:
        yield one.what.value, one.start, one.free
    for closing in group.closing:
        yield closing.name, closing.start, closing.end


def columns(group: GroupTimeline, span: float, count: int = _COLUMNS) -> Iterator[Interval]:
    """What a group mostly does in each of so many parts of the step; like neighbours as one; waiting is left out."""
    width = span / count
    busy: list[dict[str, float]] = [{} for _ in range(count)]
    for kind, start, end in intervals(group):
        for place in range(int(start / width), min(int(end / width), count - 1) + 1):
            within = min(end, (place + 1) * width) - max(start, place * width)
            busy[place][kind] = busy[place].get(kind, 0.0) + max(within, 0.0)
    place = 0
    for kind, same in groupby(_mostly(one, width) for one in busy):
        length = len(list(same))
        if kind:
            yield kind, place * width, (place + length) * width
        place += length


def _mostly(busy: dict[str, float], width: float) -> str:
    """What most of a column is; empty for waiting."""
    total = sum(busy.values())
    if total < _IDLE * width:
        return ""
    most = max(busy, key=lambda kind: busy[kind])
    return most if busy[most] >= _MOSTLY * total else "mixed"
