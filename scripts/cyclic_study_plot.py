"""The figure of ``scripts/cyclic_study`` as SVG: losses, memory over time, what a worker sends at each time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from cyclic_study_memory import Memory
from cyclic_study_messages import Messages
from cyclic_study_tables import Study, runs_of
from cyclic_study_tasks import MICRO_BATCHES, Task, tasks
from cyclic_study_train import POINT, RULES

from galvatron_lite.svg import caption, colour, document, marks

_SIDE, _HIGH, _LEFT, _TOP, _ACROSS, _DOWN = 360, 210, 64, 84, 90, 320
_WIDTH, _HEIGHT = 2 * _SIDE + _LEFT + _ACROSS + 24, _TOP + _DOWN + _HIGH + 104
_LETTER, _GAP = 6.4, 38  # pixels of a letter of the legend, at most, and between two names
_DASHES = ("", "7 3", "2 2.5")
_MIB = 2.0**20
_KIB = 2.0**10

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    name: str  # in the legend
    place: int  # of its colour and mark
    points: list[Point]  # of it
    band: list[Point]  # the least and the greatest around each point; empty: none


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the four."""

    title: str  # above it
    across: str  # what lies along its foot
    lines: list[Line]  # in it


def figure(found: Study) -> str:
    """Four panels; light and dark."""
    panels = [
        *(losses(found, task) for task in tasks()), memory(found.memory[-1]), messages(found.messages[-1]),
    ]  # fmt: skip
    title = caption(
        _LEFT, 26, f"Cyclic data parallelism, {MICRO_BATCHES} workers", more=' font-size="15" font-weight="600"'
    )
    when = caption(_LEFT, 46, f"measured {found.date} on one core; bands: all seeds", kind="soft")
    drawn = (part for place, panel in enumerate(panels) for part in _panel(panel, place))
    words = " ".join(_told(panel) for panel in panels)
    return document(
        _WIDTH, _HEIGHT, "Cyclic data parallelism: losses, memory and messages", (title, when, *drawn), words
    )


def losses(found: Study, task: Task) -> Panel:
    """Training losses at the usual learning rate, means over seeds."""
    rate, lines = task.rates[0], list[Line]()
    for place, rule in enumerate(RULES):
        curves = [one.curve for one in runs_of(found.runs, task.name, rule, rate)]
        every = [(POINT * (number + 0.5), values) for number, values in enumerate(zip(*curves, strict=True))]
        band = [(x, max(values)) for x, values in every] + [(x, min(values)) for x, values in reversed(every)]
        lines.append(Line(rule, place, [(x, fmean(values)) for x, values in every], band))
    return Panel(f"{task.name}: training loss, {task.words}, rate {rate:g}", "training step", lines)


def memory(found: Memory) -> Panel:
    """Bytes kept by autograd, two training steps."""
    every = (("all at once", found.together), ("cycle", found.cyclic), ("cycle, backward first", found.early))
    lines = [
        Line(name, place, steps([value / _MIB for value in values]), []) for place, (name, values) in enumerate(every)
    ]
    return Panel(f"{found.task}: MiB kept by autograd on one device", "time step", lines)


def messages(found: Messages) -> Panel:
    """The most that a worker sends at each time step of two training steps, and an all-reduce at their ends."""
    most = [max(sent) / _KIB for sent in zip(*found.counted, strict=True)]
    ring = [0.0] * (len(most) - 1) + [2 * (MICRO_BATCHES - 1) / MICRO_BATCHES * sum(found.stages) / _KIB]
    every = (("ring all-reduce at the end (calculated)", ring), ("cycle (counted)", most))
    lines = [Line(name, place, steps(2 * values), []) for place, (name, values) in enumerate(every)]
    return Panel(f"{found.task}: KiB that a worker sends, at most", "time step", lines)


def steps(values: Sequence[float]) -> list[Point]:
    """A line that is level within each time step."""
    return [point for number, value in enumerate(values) for point in ((number, value), (number + 1, value))]


def _told(panel: Panel) -> str:
    """What a screen reader says of a panel."""
    lines = "; ".join(f"{one.name} from {one.points[0][1]:.3g} to {one.points[-1][1]:.3g}" for one in panel.lines)
    return f"{panel.title}: {lines}."


def _panel(panel: Panel, place: int) -> list[str]:
    left, top = _LEFT + (place % 2) * (_SIDE + _ACROSS), _TOP + (place // 2) * _DOWN
    points = [point for line in panel.lines for point in (*line.points, *line.band)]
    across = _linear(max(x for x, _ in points), left, left + _SIDE)
    highest = max(y for _, y in points) * 1.05
    upwards = _linear(highest, top + _HIGH, top)
    parts = [
        caption(left, top - 10, panel.title),
        f'<path class="grid" d="M{left} {top}H{left + _SIDE}V{top + _HIGH}H{left}z"/>',
    ]
    for value in marks(highest):
        parts.append(f'<path class="grid" d="M{left} {upwards(value):.1f}H{left + _SIDE}"/>')
        parts.append(caption(left - 7, upwards(value) + 4, f"{value:g}", "end", "soft"))
    for value in marks(max(x for x, _ in points)):
        parts.append(caption(across(value), top + _HIGH + 17, f"{value:g}", "middle", "soft"))
    parts.append(caption(left + _SIDE / 2, top + _HIGH + 35, panel.across, "middle"))
    for line in panel.lines:
        parts += _line(line, across, upwards)
    return parts + _legend(panel, left, top + _HIGH + 54)


def _line(line: Line, across: Callable[[float], float], upwards: Callable[[float], float]) -> list[str]:
    kind = colour(line.place)
    path, band = (
        "L".join(f"{across(x):.1f} {upwards(y):.1f}" for x, y in points) for points in (line.points, line.band)
    )
    shade = [f'<path class="c{kind}" opacity="0.18" d="M{band}z"/>'] if band else []
    return [*shade, _stroke(line.place, f"M{path}")]


def _stroke(place: int, path: str) -> str:
    """Lines differ in colour and in their dashes."""
    dashes = f' stroke-dasharray="{_DASHES[place]}"' if _DASHES[place] else ""
    return f'<path class="t{colour(place)}" stroke-width="1.7"{dashes} d="{path}"/>'


def _legend(panel: Panel, left: float, y: float) -> list[str]:
    """Names beside one another, as many as there is room for."""
    parts, x = list[str](), left + 4
    for line in panel.lines:
        wide = _GAP + _LETTER * len(line.name)
        if x + wide > left + _SIDE:
            x, y = left + 4, y + 16
        parts.append(_stroke(line.place, f"M{x:.1f} {y - 4:.1f}h20"))
        parts.append(caption(x + 25, y, line.name))
        x += wide
    return parts


def _linear(high: float, start: float, end: float) -> Callable[[float], float]:
    """Pixels of a value between 0 and ``high``."""
    return lambda value: start + (end - start) * value / high
