"""The figure of a forecast as SVG: epochs over GPUs, and what each strategy's epoch and memory are made of.

Above, seconds of an epoch of every strategy, both axes logarithmic. Below, a panel a strategy: bars of what an epoch is
made of (shares, so that bars of 1 and 1,024 GPUs can be read alike) and under them bars of a device's memory, with a
line at what the device has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

PARTS = (("compute", 0), ("communication", 1), ("weight update", 2), ("waiting, host", 5))
"""What an epoch is made of, with the numbers of its colours."""


def figure(forecast: Forecast) -> str:
    """The figure of a forecast; it fits light and dark pages."""
    lines = [line for line in forecast.lines if line.complete]
    rows = ceil(len(lines) / _COLUMNS)
    height = _FIRST + rows * _PANEL + 8
    title = f"{forecast.model} on {forecast.cluster}: an epoch of {forecast.samples:,} samples ({forecast.formulas})"
    parts = [
        caption(_MARGIN, 30, title, more=' font-size="15" font-weight="600"'),
        caption(_MARGIN, 50, _origin(forecast), kind="soft"),
        *_epochs(lines),
        *_legend(),
        *(part for place, line in enumerate(lines) for part in _panel(line, place)),
    ]
    return document(_WIDTH, height, title, parts, _words(lines))


def _origin(forecast: Forecast) -> str:
    kind = forecast.origin.split(":")[0]
    return f"Seconds of {'a sample' if forecast.formulas == 'paradl' else 'layers'} are {kind}; the rest is worked out."


def _words(lines: Sequence[StrategyLine]) -> str:
    return " ".join(
        f"{line.strategy}: {format_duration(line.complete[-1].epoch)} on {line.complete[-1].devices:,} GPUs."
        for line in lines
    )


def _epochs(lines: Sequence[StrategyLine]) -> Iterator[str]:
    rows = [row for line in lines for row in line.complete]
    if not rows:
        return
    across = _scale([row.devices for row in rows], _LEFT, _RIGHT)
    up = _scale([row.epoch for row in rows], _DEEP, _TOP)
    yield f'<path class="grid" d="M{_LEFT} {_TOP}V{_DEEP}H{_RIGHT}"/>'
    for value in decades(up.low, up.high):
        yield f'<path class="grid" d="M{_LEFT} {up.at(value):.1f}H{_RIGHT}"/>'
        yield caption(_LEFT - 8, up.at(value) + 4, (f"{value:,.0f} s" if value >= 1 else f"{value:g} s"), "end", "soft")
    for count in sorted({row.devices for row in rows}):
        yield caption(across.at(count), _DEEP + 18, f"{count:,}", "middle", "soft")
    yield caption((_LEFT + _RIGHT) / 2, _DEEP + 38, "GPUs", "middle")
    yield caption(_LEFT - 8, _TOP - 12, "epoch", "end")
    names = _apart([(up.at(line.complete[-1].epoch), place) for place, line in enumerate(lines)], 17)
    for place, line in enumerate(lines):
        yield from _curve(line, place, across, up, names[place])


def _curve(line: StrategyLine, place: int, across: Scale, up: Scale, name: float) -> Iterator[str]:
    points = [(across.at(row.devices), up.at(row.epoch)) for row in line.complete]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    yield f'<path class="t{colour(place)}" stroke-width="1.6" d="{path}"/>'
    yield f'<g class="c{colour(place)}">'
    for row, (x, y) in zip(line.complete, points, strict=True):
        words = f"{line.strategy}, {row.devices:,} GPUs: {format_duration(row.epoch)}"
        yield f"<g><title>{escape(words)}</title>{_sign(place, x, y)}</g>"
    yield "</g>"
    x, y = points[-1]
    yield f'<path class="grid" d="M{x + 6:.1f} {y:.1f}L{_RIGHT + 26} {name:.1f}"/>'
    yield f'<g class="c{colour(place)}">{_sign(place, _RIGHT + 36, name)}</g>'
    last = line.complete[-1]
    yield caption(_RIGHT + 46, name + 4, f"{line.strategy}, {format_duration(last.epoch)} on {last.devices:,}")


def _sign(place: int, x: float, y: float) -> str:
    """A strategy's mark: neighbours have both another colour and another shape."""
    return mark(place * len(COLOURS), x, y)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    low, high = min(values), max(values)
    return Scale(low / 1.15, high * 1.15, start, end)


def _apart(places: Sequence[tuple[float, int]], least: float) -> dict[int, float]:
    """Places of names, moved down where they would lie on one another, and up where that leaves the plane."""
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
    yield caption(x, y, "Of an epoch:", more=' font-weight="600"')
    x += 96
    for name, number in PARTS:
        yield f'<rect class="c{number}" x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" rx="2"/>'
        yield caption(x + 17, y, name)
        x += 40 + 6.6 * len(name)
    yield caption(x + 16, y, "Memory of a GPU:", more=' font-weight="600"')
    x += 148
    for name, number in (("fits", 3), ("does not fit", 4)):
        yield f'<rect class="c{number}" x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" rx="2"/>'
        yield caption(x + 17, y, name)
        x += 40 + 6.6 * len(name)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a panel stands: left edge, top, and pixels of a bar and to the next."""

    x: float
    y: float
    wide: float
    step: float


def _panel(line: StrategyLine, place: int) -> Iterator[str]:
    """A strategy's bars: shares of its epochs, then memory."""
    width = (_WIDTH - 2 * _MARGIN - (_COLUMNS - 1) * _GAP) / _COLUMNS
    left = _MARGIN + place % _COLUMNS * (width + _GAP)
    top = float(_FIRST + place // _COLUMNS * _PANEL)
    step = (width - 30) / max(len(line.rows), 1)
    here = _Place(left + 30, top + 18, min(step * 0.76, 34), step)
    yield f'<g class="c{colour(place)}">{_sign(place, left + 5, top - 4)}</g>'
    yield caption(left + 15, top, line.strategy, more=' font-weight="600"')
    yield from _shares(line, here)
    yield from _memories(line, here)
    yield from _counts(line, here)


def _shares(line: StrategyLine, here: _Place) -> Iterator[str]:
    for share in (0, 0.5, 1):
        y = here.y + _BARS * (1 - share)
        yield f'<path class="grid" d="M{here.x:.1f} {y:.1f}h{here.step * len(line.rows):.1f}"/>'
        yield caption(here.x - 5, y + 4, f"{share:.0%}", "end", "soft", ' font-size="10"')
    for number, row in enumerate(line.rows):
        if not row.problem:
            yield from _bar(row, here.x + number * here.step + (here.step - here.wide) / 2, here)


def _bar(row: ForecastRow, x: float, here: _Place) -> Iterator[str]:
    """One stacked bar, compute lowest; it tells its figures where the reader points at it."""
    seconds = (row.compute, row.moved.total, row.update, row.waiting + row.other)
    told = ", ".join(f"{name} {format_duration(part)}" for (name, _), part in zip(PARTS, seconds, strict=True) if part)
    yield f"<g><title>{escape(f'{row.devices:,} GPUs: {format_duration(row.epoch)}: {told}')}</title>"
    y = here.y + _BARS
    for (_, number), part in zip(PARTS, seconds, strict=True):
        high = _BARS * part / row.epoch
        y -= high
        if high >= 0.05:
            yield f'<rect class="c{number}" x="{x:.1f}" y="{y:.2f}" width="{here.wide:.1f}" height="{high:.2f}"/>'
    yield "</g>"


def _memories(line: StrategyLine, here: _Place) -> Iterator[str]:
    """A device's memory, against what it has; bars that go beyond the panel are cut."""
    known = line.complete
    capacity = max(row.capacity for row in known)
    most = max(min(max(row.memory for row in known), 2 * capacity), 1.12 * capacity)
    base = here.y + _BARS + 30 + _MEMORY
    for number, row in enumerate(line.rows):
        if row.problem:
            continue
        high = _MEMORY * min(row.memory / most, 1)
        x = here.x + number * here.step + (here.step - here.wide) / 2
        kind = "c3" if row.fits else "c4"
        told = f"{row.devices:,} GPUs: {format_bytes(row.memory)} of {format_bytes(row.capacity)}"
        yield (
            f'<g><title>{escape(told)}</title><rect class="{kind}" x="{x:.1f}" y="{base - high:.2f}" '
            f'width="{here.wide:.1f}" height="{high:.2f}"/></g>'
        )
    y = base - _MEMORY * capacity / most
    end = here.x + here.step * len(line.rows)
    yield f'<path class="grid" d="M{here.x:.1f} {base:.1f}H{end:.1f}"/>'
    yield f'<path class="one" stroke-dasharray="4 3" d="M{here.x:.1f} {y:.1f}H{end:.1f}"/>'
    above = base - _MEMORY - 5
    yield caption(end, above, f"GPU: {format_bytes(capacity)}", "end", "soft", ' font-size="10"')
    fullest = max(known, key=lambda row: row.memory)
    yield caption(here.x, above, f"peak {format_bytes(fullest.memory)}", "start", "soft", ' font-size="10"')


def _counts(line: StrategyLine, here: _Place) -> Iterator[str]:
    """Numbers of GPUs under the bars, as many as there is room for, and where the strategy ends."""
    y = here.y + _BARS + 30 + _MEMORY + 15
    every = max(1, ceil(36 / here.step))
    for number, row in enumerate(line.rows):
        if number % every == 0 or (number == len(line.rows) - 1 and number % every > every / 2):
            x = here.x + (number + 0.5) * here.step
            yield caption(x, y, f"{row.devices:,}", "middle", "soft", ' font-size="10"')
    missing = [number for number, row in enumerate(line.rows) if row.problem]
    if missing and missing[-1] - missing[0] == len(missing) - 1:
        x = here.x + (missing[0] + len(missing) / 2) * here.step
        beyond = line.rows[missing[0]].problem.startswith("beyond")
        words = f"{line.limit.devices:,} at most" if beyond and line.limit.devices else "cannot run"
        if len(missing) * here.step > 60:
            yield caption(x, here.y + _BARS / 2, words, "middle", "soft", ' font-size="11"')
