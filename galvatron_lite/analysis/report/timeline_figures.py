"""Figures of the memory of a device over the timeline of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

from markupsafe import Markup

from galvatron_lite.cost.timeline import GroupTimeline, Timeline
from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.svg import Frame, area, byte_marks, byte_words, element, figure, marks, second_words
from galvatron_lite.units import format_bytes

WIDTH, HEIGHT, MARGINS = 480.0, 190.0, (62.0, 12.0, 16.0, 22.0)
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
    frame = Frame(WIDTH, HEIGHT, MARGINS, step.span, 1.06 * max(group.peak.memory.total, budget))
    steps = _steps(group, step.span)
    lines = [[frame.at(at, size) for at, size in line] for line in _stacked(steps)]
    below = [[frame.at(0.0, 0.0), frame.at(step.span, 0.0)], *lines[:-1]]
    drawn = [
        element("path", element("title", f"{name}"), d=area(line, under), class_=f"memory-{name}")
        for name, line, under in zip(ORDER, lines, below, strict=True)
        if any(getattr(memory, name) for _, memory in steps)
    ]
    words = f"{format_bytes(group.peak.memory.total)} at the peak"
    label = f"Memory of a device of {name_of(group)} over a step: {words}" + (
        f", of {format_bytes(budget)}." if budget else "."
    )
    sizes, seconds = byte_marks(frame.y_end), marks(step.span, 4)
    axes = [*frame.horizontal(sizes, byte_words(sizes)), *frame.below(seconds, second_words(seconds))]
    limit = frame.limit(budget, "budget") if budget else []
    return MemoryCurve(name_of(group), figure(WIDTH, HEIGHT, label, *axes, *drawn, *limit))


def name_of(group: GroupTimeline) -> str:
    """A group of devices by the stages it runs."""
    return f"stage{'s' * (len(group.stages) > 1)} {', '.join(map(str, group.stages))}"


Level = tuple[float, MemoryBreakdown]  # from when on, and what there is


def _levels(group: GroupTimeline) -> list[Level]:
    found = [(0.0, group.resting)]
    for one, during, after in zip(group.passes, group.during, group.after, strict=True):
        found += [(one.start, during), (one.end, after)]
    found += [(closing.start, closing.memory) for closing in group.closing]
    return found


def _steps(group: GroupTimeline, span: float) -> list[Level]:
    """The levels, or of many the greatest in each column of the picture; the last goes on to the end."""
    found = _levels(group)
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
