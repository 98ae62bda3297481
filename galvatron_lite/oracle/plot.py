"""Draws a forecast as SVG: epochs over GPUs, and the breakdown of each strategy's epoch and memory.

The upper plot shows seconds of an epoch of all strategies on logarithmic axes. Below, each strategy has a panel: bars
of the shares of an epoch (so that 1 and 1,024 GPUs are comparable), and bars of the memory of a device with a line at
its capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from xml.sax.saxutils import escape

from galvatron_lite.oracle.rows import Forecast, ForecastRow, StrategyLine
from galvatron_lite.svg import COLOURS, Scale, caption, colour, decades, document, mark
from galvatron_lite.units import format_bytes, format_duration

_WIDTH, _MARGIN = 1040, 24
_LEFT, _RIGHT, _TOP, _DEEP = 84, 736, 84, 300
_COLUMNS, _GAP = 4, 22
_BARS, _MEMORY, _PANEL = 120, 62, 292
_FIRST = _DEEP + 112
_SMALL, _BOLD = ' font-size="10"', ' font-weight="600"'

PARTS = (("compute", 0), ("communication", 1), ("weight update", 2), ("waiting, host", 5))
"""Parts of an epoch and the numbers of their colours."""


def figure(forecast: Forecast) -> str:
    """Return the figure of a forecast as SVG, for light and dark pages."""
    lines = [line for line in forecast.lines if line.complete]
    height = _FIRST + ceil(len(lines) / _COLUMNS) * _PANEL + 8
    title = f"{forecast.model} on {forecast.cluster}: an epoch of {forecast.samples:,} samples ({forecast.formulas})"
    kind, timed = forecast.origin.split(":")[0], "a sample" if forecast.formulas == "paradl" else "layers"
    parts = [
        caption(_MARGIN, 30, title, more=' font-size="15" font-weight="600"'),
        caption(_MARGIN, 50, f"Seconds of {timed} are {kind}; the rest is worked out.", kind="soft"),
        *_epochs(lines),
        *_legend(),
        *(part for place, line in enumerate(lines) for part in _panel(line, place)),
    ]
    ends = [(line.strategy, line.complete[-1]) for line in lines]
    words = " ".join(f"{name}: {format_duration(row.epoch)} on {row.devices:,} GPUs." for name, row in ends)
    return document(_WIDTH, height, title, parts, words)


def _epochs(lines: Sequence[StrategyLine]) -> Iterator[str]:
    rows = [row for line in lines for row in line.complete]
    if not rows:
        return
    counts, seconds = sorted({row.devices for row in rows}), [row.epoch for row in rows]
    across = Scale(counts[0] / 1.15, counts[-1] * 1.15, _LEFT, _RIGHT)
    up = Scale(min(seconds) / 1.15, max(seconds) * 1.15, _DEEP, _TOP)
    yield f'<path class="grid" d="M{_LEFT} {_TOP}V{_DEEP}H{_RIGHT}"/>'
    for value in decades(up.low, up.high):
        yield f'<path class="grid" d="M{_LEFT} {up.at(value):.1f}H{_RIGHT}"/>'
        yield caption(_LEFT - 8, up.at(value) + 4, f"{value:,.0f} s" if value >= 1 else f"{value:g} s", "end", "soft")
    for count in counts:
        yield caption(across.at(count), _DEEP + 18, f"{count:,}", "middle", "soft")
    yield caption((_LEFT + _RIGHT) / 2, _DEEP + 38, "GPUs", "middle")
    yield caption(_LEFT - 8, _TOP - 12, "epoch", "end")
    names = _apart([(up.at(line.complete[-1].epoch), place) for place, line in enumerate(lines)], 17)
    for place, line in enumerate(lines):
        points = [(across.at(row.devices), up.at(row.epoch)) for row in line.complete]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield f'<path class="t{colour(place)}" stroke-width="1.6" d="{path}"/>'
        for row, (x, y) in zip(line.complete, points, strict=True):
            yield _sign(place, x, y, f"{line.strategy}, {row.devices:,} GPUs: {format_duration(row.epoch)}")
        (x, y), last, name = points[-1], line.complete[-1], names[place]
        yield f'<path class="grid" d="M{x + 6:.1f} {y:.1f}L{_RIGHT + 26} {name:.1f}"/>'
        yield _sign(place, _RIGHT + 36, name)
        yield caption(_RIGHT + 46, name + 4, f"{line.strategy}, {format_duration(last.epoch)} on {last.devices:,}")


def _sign(place: int, x: float, y: float, words: str = "") -> str:
    """Return the mark of a strategy; adjacent strategies differ in colour and shape."""
    title = f"<title>{escape(words)}</title>" if words else ""
    return f'<g class="c{colour(place)}">{title}{mark(place * len(COLOURS), x, y)}</g>'


def _apart(places: Sequence[tuple[float, int]], least: float) -> dict[int, float]:
    """Return the heights of labels, moved down if they would overlap, and up if they would leave the plot."""
    moved: dict[int, float] = {}
    before = _TOP - least
    for place, name in sorted(places):
        before = moved[name] = max(place, before + least)
    below = _DEEP + 24.0
    for name in sorted(moved, key=lambda one: -moved[one]):
        below = moved[name] = min(moved[name], below)
        below -= least
    return moved


def _legend() -> Iterator[str]:
    x, y = float(_MARGIN), _FIRST - 28.0
    for title, wide, keys in (
        ("Of an epoch:", 96, PARTS),
        ("Memory of a GPU:", 148, (("fits", 3), ("does not fit", 4))),
    ):
        yield caption(x, y, title, more=_BOLD)
        x += wide
        for name, number in keys:
            yield _rectangle(number, x, y - 10, 11, 11)
            yield caption(x + 17, y, name)
            x += 40 + 6.6 * len(name)
        x += 16


def _rectangle(number: int, x: float, y: float, wide: float, high: float) -> str:
    return f'<rect class="c{number}" x="{x:.1f}" y="{y:.2f}" width="{wide:.1f}" height="{high:.2f}"/>'


def _panel(line: StrategyLine, place: int) -> Iterator[str]:
    """Draw the bars of a strategy: shares of its epochs, and memory of a device against its capacity."""
    width = (_WIDTH - 2 * _MARGIN - (_COLUMNS - 1) * _GAP) / _COLUMNS
    left, top = _MARGIN + place % _COLUMNS * (width + _GAP), float(_FIRST + place // _COLUMNS * _PANEL)
    yield _sign(place, left + 5, top - 4)
    yield caption(left + 15, top, line.strategy, more=_BOLD)
    step, x, y = (width - 30) / max(len(line.rows), 1), left + 30, top + 18
    wide, end = min(step * 0.76, 34), x + step * len(line.rows)
    for share in (0, 0.5, 1):
        at = y + _BARS * (1 - share)
        yield f'<path class="grid" d="M{x:.1f} {at:.1f}H{end:.1f}"/>'
        yield caption(x - 5, at + 4, f"{share:.0%}", "end", "soft", _SMALL)
    capacity, fullest = line.complete[0].capacity, max(line.complete, key=lambda row: row.memory)
    most = max(min(fullest.memory, 2 * capacity), 1.12 * capacity)
    base = y + _BARS + 30 + _MEMORY
    period = max(1, ceil(36 / step))  # bars from one label of GPUs to the next
    for number, row in enumerate(line.rows):
        bar = x + number * step + (step - wide) / 2
        if not row.problem:
            yield from _epoch_bar(row, bar, y + _BARS, wide)
            high = _MEMORY * min(row.memory / most, 1)
            words = f"{row.devices:,} GPUs: {format_bytes(row.memory)} of {format_bytes(row.capacity)}"
            rectangle = _rectangle(3 if row.fits else 4, bar, base - high, wide, high)
            yield f"<g><title>{escape(words)}</title>{rectangle}</g>"
        if number % period == 0 or (number == len(line.rows) - 1 and number % period > period / 2):
            yield caption(bar + wide / 2, base + 15, f"{row.devices:,}", "middle", "soft", _SMALL)
    limit = base - _MEMORY * capacity / most
    yield f'<path class="grid" d="M{x:.1f} {base:.1f}H{end:.1f}"/>'
    yield f'<path class="one" stroke-dasharray="4 3" d="M{x:.1f} {limit:.1f}H{end:.1f}"/>'
    above = base - _MEMORY - 5
    yield caption(end, above, f"GPU: {format_bytes(capacity)}", "end", "soft", _SMALL)
    yield caption(x, above, f"peak {format_bytes(fullest.memory)}", "start", "soft", _SMALL)
    missing = [number for number, row in enumerate(line.rows) if row.problem]
    if missing and missing[-1] - missing[0] == len(missing) - 1 and len(missing) * step > 60:
        beyond = line.rows[missing[0]].problem.startswith("beyond") and line.limit.devices
        words = f"{line.limit.devices:,} at most" if beyond else "cannot run"
        yield caption(x + (missing[0] + len(missing) / 2) * step, y + _BARS / 2, words, "middle", "soft")


def _epoch_bar(row: ForecastRow, x: float, y: float, wide: float) -> Iterator[str]:
    """Draw a stacked bar, compute lowest, with its figures as a tooltip."""
    seconds = (row.compute, row.moved.total, row.update, row.waiting + row.other)
    named = [(name, number, part) for (name, number), part in zip(PARTS, seconds, strict=True) if part]
    words = ", ".join(f"{name} {format_duration(part)}" for name, _, part in named)
    yield f"<g><title>{escape(f'{row.devices:,} GPUs: {format_duration(row.epoch)}: {words}')}</title>"
    for _, number, part in named:
        high = _BARS * part / row.epoch
        y -= high
        if high >= 0.05:
            yield _rectangle(number, x, y, wide, high)
    yield "</g>"
