"""The figure of an answer as SVG: its points, joined in their order, and the one that is the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from galvatron_lite.analysis.answers import Answer, answer_text
from galvatron_lite.analysis.sweeps import BestBatch, Cheapest, Fewest
from galvatron_lite.svg import Scale, caption, document
from galvatron_lite.units import format_bytes, format_count, format_duration, format_seconds

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 616, 58, 348
_MARGIN = 1.08  # factor by which axes go on beyond the outermost points


@dataclass(frozen=True, slots=True)
class _LogAxis:
    name: str  # what it shows
    write: Callable[[float], str]  # a value for people


@dataclass(frozen=True, slots=True)
class _PointMark:
    x: float  # x, y: values, above 0
    y: float
    words: str  # told where the reader points at it
    chosen: bool = False  # whether it is the answer
    faint: bool = False  # whether it is told for comparison only


def figure(answer: Answer) -> str:
    """The figure of an answer as SVG; it fits light and dark pages."""
    across, up, marks, stairs = _drawn(answer)
    if not marks:
        return _svg(answer_text(answer).sentence, [])
    right = _scale([mark.x for mark in marks], _LEFT, _RIGHT)
    top = _scale([mark.y for mark in marks], _BOTTOM, _TOP)
    line = [mark for mark in marks if not mark.faint]
    path = _path([(right.at(mark.x), top.at(mark.y)) for mark in line], stairs)
    return _svg(
        answer_text(answer).sentence,
        [
            *_grid(across, up, right, top, marks),
            f'<path class="t0" stroke-width="1.5" d="{path}"/>',
            *(_dot(mark, right.at(mark.x), top.at(mark.y)) for mark in marks),
        ],
    )


def _drawn(answer: Answer) -> tuple[_LogAxis, _LogAxis, list[_PointMark], bool]:
    if isinstance(answer, Cheapest):
        kept, best = {cost.point.devices for cost in answer.frontier}, answer.answer
        marks = [
            _PointMark(cost.seconds, cost.cost, f"{cost.point.devices} GPUs: {cost.cost:,.4g}, "
                 f"{format_duration(cost.seconds)}", cost == best, cost.point.devices not in kept)
            for cost in sorted(answer.costs, key=lambda cost: cost.seconds)
        ]  # fmt: skip
        return _LogAxis("time of the run", format_duration), _LogAxis("cost", "{:,.3g}".format), marks, False
    planned = [point for point in answer.points if point.plan is not None]
    if isinstance(answer, BestBatch):
        marks = [
            _PointMark(p.batch, p.rate, f"batch {p.batch}: {format_count(p.rate)} samples/s", p == answer.best)
            for p in planned
        ]
        return _LogAxis("batch", format_count), _LogAxis("samples/s", format_count), marks, False
    if isinstance(answer, Fewest):
        marks = [
            _PointMark(p.devices, p.seconds, f"{p.devices} GPUs: {format_seconds(p.seconds)}", p == answer.answer)
            for p in planned
        ]
        return _LogAxis("GPUs", format_count), _LogAxis("seconds a step", format_seconds), marks, False
    marks = [
        _PointMark(p.peak, p.seconds, f"{format_bytes(p.peak)}: {format_seconds(p.seconds)}")
        for p in sorted(planned, key=lambda p: p.peak)
    ]
    return _LogAxis("memory of the fullest GPU", format_bytes), _LogAxis("seconds a step", format_seconds), marks, True


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    return Scale(min(values) / _MARGIN, max(values) * _MARGIN, start, end)


def _path(places: Sequence[tuple[float, float]], stairs: bool) -> str:
    """A line through the places; in steps where a plan is the best until the next one fits."""
    first, *others = places
    moves = (f"H{x:.1f}V{y:.1f}" if stairs else f"L{x:.1f} {y:.1f}" for x, y in others)
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(moves)


def _dot(mark: _PointMark, x: float, y: float) -> str:
    size, kind = (6, "c1") if mark.chosen else (4, "soft" if mark.faint else "c0")
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{escape(mark.words)}</title></circle>'


def _grid(across: _LogAxis, up: _LogAxis, right: Scale, top: Scale, marks: Sequence[_PointMark]) -> list[str]:
    lines = [f'<path class="grid" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    for value, x in _apart([mark.x for mark in marks], right, 64):
        lines.append(caption(x, _BOTTOM + 18, across.write(value), "middle", "soft"))
    for value, y in _apart([mark.y for mark in marks], top, 22):
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        lines.append(caption(_LEFT - 8, y + 4, up.write(value), "end", "soft"))
    lines.append(caption((_LEFT + _RIGHT) / 2, _HEIGHT - 12, across.name, "middle"))
    return [*lines, caption(_LEFT - 8, _TOP - 12, up.name, "middle")]


def _apart(values: Sequence[float], scale: Scale, least: float) -> list[tuple[float, float]]:
    """Values with their places, those left out that lie less than ``least`` pixels from the one before."""
    kept: list[tuple[float, float]] = []
    for value in sorted(set(values)):
        place = scale.at(value)
        if not kept or abs(place - kept[-1][1]) >= least:
            kept.append((value, place))
    return kept


def _svg(sentence: str, lines: Sequence[str]) -> str:
    heading = caption(16, 24, sentence if len(sentence) < 100 else sentence[:97] + "…", more=' font-weight="600"')
    return document(_WIDTH, _HEIGHT, sentence, [heading, *lines])
