"""Figures of a step's timeline: what each group of devices does, and the memory of a device over time.

Where passes are too narrow to be seen one by one, columns of the picture say what groups mostly do in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise

from markupsafe import Markup

from galvatron_lite.cost.timeline import GroupTimeline, Timeline
from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.svg import area, boxes, byte_marks, byte_words, element, figure, marks, second_words, text
from galvatron_lite.units import format_bytes

STEP_WIDTH, _STEP_LEFT, _STEP_RIGHT = 1000.0, 70.0, 8.0
_STEP_COLUMNS = 460
_NARROW = 2.0  # width of a mean pass below which passes are not drawn one by one
_MOST = 6000  # passes that are drawn one by one, at most
_MOSTLY, _IDLE = 0.85, 0.35
KINDS = ("forward", "backward", "weight", "mixed", "communication", "optimizer", "host")
Interval = tuple[str, float, float]  # kind, start and end in seconds


def overview(step: Timeline, name: str) -> Markup:
    """The picture of a step."""
    rows, height = len(step.groups), row_height(len(step.groups))
    scale = (STEP_WIDTH - _STEP_LEFT - _STEP_RIGHT) / step.span
    found: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in KINDS}
    whole = one_by_one(step)
    for group in step.groups:
        y = group.group * height + 1
        own = intervals(group) if whole else columns(group, step.span)
        for kind, start, end in (*own, *([("host", step.span - step.host, step.span)] if step.host else [])):
            found[kind].append((_STEP_LEFT + start * scale, y, (end - start) * scale, height - min(2.0, height / 4)))
    bottom = rows * height + 4
    drawn = [element("path", d=boxes(places), class_=f"pass-{kind}") for kind, places in found.items() if places]
    label = f"Timeline of a step of {name}: {rows} groups of devices; the table below says the same in figures."
    return figure(
        STEP_WIDTH, bottom + 24, label,
        element("rect", x=_STEP_LEFT, y=0, width=step.span * scale, height=bottom - 2, class_="ground"),
        *drawn, *_names(step.groups, height), *axis(step.span, scale, bottom), class_="overview",
    )  # fmt: skip


def row_height(rows: int) -> float:
    """Height of a group's row."""
    return next(height for most, height in ((8, 26.0), (16, 20.0), (32, 13.0), (64, 9.0), (10**9, 6.0)) if rows <= most)


def one_by_one(step: Timeline) -> bool:
    """Whether every pass can be seen."""
    count = sum(len(group.passes) for group in step.groups)
    return count <= _MOST and (STEP_WIDTH - _STEP_LEFT) * len(step.groups) / count >= _NARROW


def _names(groups: Sequence[GroupTimeline], height: float) -> Iterator[Markup]:
    every = next(count for count in (1, 2, 4, 8, 16, 32, 64) if count * height >= 11 or count == 64)
    for group in groups[::every]:
        words = f"stage {group.stages[0]}" if len(group.stages) == 1 else f"group {group.group}"
        yield text(_STEP_LEFT - 8, group.group * height + max(height / 2 + 4, 9), words, anchor="end")


def axis(most: float, scale: float, y: float) -> list[Markup]:
    """The axis of seconds."""
    places = marks(most, 6)
    words = second_words(places)
    drawn = []
    for value, word in zip(places, words, strict=True):
        x = _STEP_LEFT + value * scale
        drawn.append(element("path", d=f"M{x:.1f} {y - 2:.1f}v4", class_="tick"))
        anchor = "start" if value == 0.0 else "end" if x > STEP_WIDTH - 60 else "middle"
        drawn.append(text(x, y + 14, word, anchor=anchor))
    return drawn


def intervals(group: GroupTimeline) -> Iterator[Interval]:
    """What a group does, one by one."""
    for one in group.passes:
        yield one.what.value, one.start, one.free
    for closing in group.closing:
        yield closing.name, closing.start, closing.end


def columns(group: GroupTimeline, span: float, count: int = _STEP_COLUMNS) -> Iterator[Interval]:
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


WIDTH, HEIGHT = 480.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 16.0, 22.0
_COLUMNS = 200
_ALL, _FEW = 8, 4  # so many groups are all drawn; of more, a few
ORDER = ("context", "parameters", "optimizer", "gradients", "activations", "communication", "temporary")
"""From the bottom up: what stays lies under what comes and goes."""
PLACES = tuple([field.name for field in fields(MemoryBreakdown)].index(name) for name in ORDER)


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory of a group, drawn."""

    title: str  # which group
    picture: Markup  # of it


def shown_groups(step: Timeline) -> list[GroupTimeline]:
    """The groups that are drawn: all, or of many the first, the fullest, the middle one and the last."""
    groups = step.groups
    if len(groups) <= _ALL:
        return list(groups)
    fullest = max(range(len(groups)), key=lambda number: groups[number].peak.memory.total)
    return [groups[number] for number in sorted({0, fullest, len(groups) // 2, len(groups) - 1})][: _FEW + 1]


def course_of(group: GroupTimeline, step: Timeline, budget: int) -> MemoryCurve:
    """The memory of one group over a step."""
    top = 1.06 * max(group.peak.memory.total, budget)
    right, low = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    across, up = (right - _LEFT) / step.span, (low - _TOP) / top
    steps = _steps(group, step.span)
    lines = [[(_LEFT + at * across, low - size * up) for at, size in line] for line in _stacked(steps)]
    floor = [(_LEFT, low), (right, low)]
    below = [floor, *lines[:-1]]
    drawn = [
        element("path", element("title", f"{name}"), d=area(line, under), class_=f"memory-{name}")
        for name, line, under in zip(ORDER, lines, below, strict=True)
        if any(getattr(memory, name) for _, memory in steps)
    ]
    words = f"{format_bytes(group.peak.memory.total)} at the peak"
    label = f"Memory of a device of {name_of(group)} over a step: {words}" + (
        f", of {format_bytes(budget)}." if budget else "."
    )
    return MemoryCurve(
        name_of(group),
        figure(WIDTH, HEIGHT, label, *_grid(step.span, top, across, up), *drawn, *_limit(budget, low - budget * up)),
    )


def name_of(group: GroupTimeline) -> str:
    """A group of devices by the stages it runs."""
    return f"stage{'s' * (len(group.stages) > 1)} {', '.join(map(str, group.stages))}"


def _limit(budget: int, y: float) -> list[Markup]:
    if not budget:
        return []
    line = element("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", class_="limit")
    return [line, text(WIDTH - _RIGHT, y - 3, "budget", anchor="end", class_="limit-word")]


def _grid(span: float, top: float, across: float, up: float) -> list[Markup]:
    drawn, low = [], HEIGHT - _BOTTOM
    sizes = byte_marks(top)
    for value, word in zip(sizes, byte_words(sizes), strict=True):
        y = low - value * up
        drawn += [element("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", class_="grid"),
                  text(_LEFT - 6, y + 4, word, anchor="end")]  # fmt: skip
    seconds = marks(span, 4)
    for value, word in zip(seconds, second_words(seconds), strict=True):
        x = _LEFT + value * across
        anchor = "start" if value == 0.0 else "end" if x > WIDTH - 40 else "middle"
        drawn.append(text(x, HEIGHT - 6, word, anchor=anchor))
    return drawn


Level = tuple[float, MemoryBreakdown]  # from when on, and what there is


def levels(group: GroupTimeline) -> list[Level]:
    """What a group's devices hold from when on."""
    found = [(0.0, group.resting)]
    for one, during, after in zip(group.passes, group.during, group.after, strict=True):
        found += [(one.start, during), (one.end, after)]
    found += [(closing.start, closing.memory) for closing in group.closing]
    return found


def _steps(group: GroupTimeline, span: float) -> list[Level]:
    """The levels, or of many the greatest in each column of the picture; the last goes on to the end."""
    found = levels(group)
    if len(found) > 2 * _COLUMNS:
        found = _greatest(found, span)
    kept = [found[0]]
    kept += [level for before, level in pairwise(found) if level[1] != before[1]]
    return [*kept, (span, found[-1][1])]


def _greatest(levels: list[Level], span: float) -> list[Level]:
    width = span / _COLUMNS
    columns: dict[int, MemoryBreakdown] = {}
    for (start, memory), (end, _) in zip(levels, [*levels[1:], (span, levels[-1][1])], strict=True):
        last = max(int(start / width), int(end / width - 1e-9))
        for place in range(int(start / width), min(last, _COLUMNS - 1) + 1):
            known = columns.get(place)
            columns[place] = memory if known is None or memory.total > known.total else known
    return [(place * width, columns[place]) for place in sorted(columns)]


def _stacked(steps: list[Level]) -> list[list[tuple[float, int]]]:
    """By part, from the bottom up, the corners of its upper line."""
    lines = []
    for place in range(len(ORDER)):
        line: list[tuple[float, int]] = []
        for at, memory in steps:
            size = sum(getattr(memory, name) for name in ORDER[: place + 1])
            if line and line[-1][1] != size:
                line.append((at, line[-1][1]))
            if not line or line[-1][1] != size:
                line.append((at, size))
        lines.append([*line, (steps[-1][0], line[-1][1])])
    return lines
