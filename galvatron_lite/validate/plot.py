"""The figure of predictions as SVG: predicted against measured step times, and by family how far off they are.

To the left every scored step, both axes logarithmic, with the line of equality and bands of 10 and 25 % around it. To
the right a row a family, which is the legend too: its mark and name, its runs, a tick at predicted / measured of each,
a bar at their median and a line below the middle half, and the median of absolute errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from xml.sax.saxutils import escape

from galvatron_lite.svg import KINDS, Scale, caption, colour, decades, document, mark, rounded
from galvatron_lite.validate.results import Judged, Predicted
from galvatron_lite.validate.rows import PublishedRun

BANDS = (0.25, 0.10)
"""Relative errors that the bands show, widest first."""

OTHERS = "others"
"""Families beyond those that marks can tell apart, together."""

_SIDE, _LEFT, _TOP, _ROW = 560, 62, 86, 17
_NAMES = _LEFT + _SIDE + 34
_TICKS, _WIDTH = _NAMES + 208, 250
_FIGURES = _TICKS + _WIDTH + 52
_CROWDED = 150
"""Points of a family above which they are drawn lighter."""

Point = tuple[float, float]
"""Measured and predicted seconds."""


def scatter(judged: Iterable[Judged], key: Callable[[PublishedRun], str] = lambda run: run.family) -> str:
    """The figure of all scored step times as SVG, by family or another key; it fits light and dark pages."""
    series = _series(judged, key)
    height = _TOP + max(_SIDE, _ROW * len(series)) + 56
    return document(
        _FIGURES + 12,
        height,
        "Predicted against measured seconds a training step",
        [*_heading(series), *_plane(series), *_rows(series)],
        _words(series),
    )


def _series(judged: Iterable[Judged], key: Callable[[PublishedRun], str]) -> dict[str, list[Point]]:
    """Points by name, in the order names first appear."""
    found: dict[str, list[Point]] = defaultdict(list)
    for one in judged:
        if one.time is not None and isinstance(one.outcome, Predicted) and one.measured is not None:
            measured = one.measured.step_seconds or 0.0
            if measured > 0 and one.outcome.step_seconds > 0:
                found[key(one.run)].append((measured, one.outcome.step_seconds))
    if len(found) <= KINDS:
        return dict(found)
    largest = sorted(found, key=lambda name: -len(found[name]))[: KINDS - 1]
    kept = {name: points for name, points in found.items() if name in largest}
    return kept | {OTHERS: [point for name, points in found.items() if name not in largest for point in points]}


def _ratios(points: Iterable[Point]) -> list[float]:
    return [predicted / measured for measured, predicted in points]


def _summary(series: Mapping[str, Sequence[Point]]) -> str:
    ratios = [ratio for points in series.values() for ratio in _ratios(points)]
    if not ratios:
        return "no step time is scored"
    shares = (
        f"{100 * sum(abs(r - 1) <= b for r in ratios) / len(ratios):.0f} % within {100 * b:.0f} %"
        for b in reversed(BANDS)
    )
    return f"{len(ratios):,} training runs: {', '.join(shares)}"


def _words(series: Mapping[str, Sequence[Point]]) -> str:
    """What a screen reader says."""
    errors = "; ".join(f"{name} ({len(points)} runs): {_error(points)}" for name, points in series.items())
    return f"{_summary(series)}. Median absolute error by group: {errors}."


def _heading(series: Mapping[str, Sequence[Point]]) -> list[str]:
    bold = ' font-size="15" font-weight="600"'
    return [
        caption(_LEFT, 26, "Predicted against measured seconds a training step", more=bold),
        caption(_LEFT, 46, _summary(series), kind="soft"),
        caption(_LEFT, 64, "bands: 10 % and 25 % either way; ticks at an edge lie beyond it", kind="soft"),
    ]


def _plane(series: Mapping[str, Sequence[Point]]) -> list[str]:
    """The scatter; families of many runs first, so that they do not cover the others."""
    low, high = rounded(value for points in series.values() for point in points for value in point)
    across, upwards = Scale(low, high, _LEFT, _LEFT + _SIDE), Scale(low, high, _TOP + _SIDE, _TOP)
    places = {name: place for place, name in enumerate(series)}
    marks = [
        f'<g class="c{colour(places[name])}" fill-opacity="{0.5 if len(points) > _CROWDED else 0.85}">'
        f"<title>{escape(name)}</title>"
        + "".join(mark(places[name], across.at(measured), upwards.at(predicted)) for measured, predicted in points)
        + "</g>"
        for name, points in sorted(series.items(), key=lambda item: -len(item[1]))
    ]
    return [*_bands(across, upwards), *_grid(across, upwards), *marks]


def _bands(across: Scale, upwards: Scale) -> list[str]:
    """Areas of errors up to ``BANDS``, and the line of equality."""
    low, high = across.low, across.high
    areas = []
    for error, kind in zip(BANDS, ("far", "near"), strict=True):
        above, below = 1 + error, 1 - error
        corners = [
            (low, low), (low, low * above), (high / above, high),
            (high, high), (high, high * below), (low / below, low),
        ]  # fmt: skip
        path = "L".join(f"{across.at(x):.1f} {upwards.at(y):.1f}" for x, y in corners)
        areas.append(f'<path class="{kind}" d="M{path}z"/>')
    ends = f"M{_LEFT} {_TOP + _SIDE}L{_LEFT + _SIDE} {_TOP}"
    return [*areas, f'<path class="one" d="{ends}"/>']


def _grid(across: Scale, upwards: Scale) -> list[str]:
    right, bottom = _LEFT + _SIDE, _TOP + _SIDE
    lines = [f'<path class="grid" d="M{_LEFT} {_TOP}H{right}V{bottom}H{_LEFT}z"/>']
    for value in decades(across.low, across.high):
        x, y, name = across.at(value), upwards.at(value), f"{value:,g}"
        lines.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}"/>')
        lines += [caption(x, bottom + 18, name, "middle", "soft"), caption(_LEFT - 7, y + 4, name, "end", "soft")]
    turned = f' transform="rotate(-90 18 {_TOP + _SIDE / 2})"'
    return [
        *lines,
        caption(_LEFT + _SIDE / 2, bottom + 40, "measured, seconds a step", "middle"),
        caption(18, _TOP + _SIDE / 2, "predicted, seconds a step", "middle", more=turned),
    ]


def _rows(series: Mapping[str, Sequence[Point]]) -> list[str]:
    """The legend, with each family's errors."""
    scale, bottom = Scale(0.5, 2.0, _TICKS, _TICKS + _WIDTH), _TOP + _ROW * len(series)
    lines = [
        caption(_NAMES + 12, _TOP - 10, "family (runs)", kind="soft"),
        caption(_TICKS + _WIDTH / 2, _TOP - 10, "predicted / measured", "middle", "soft"),
        caption(_FIGURES, _TOP - 10, "median error", "end", "soft"),
    ]
    for error, kind in zip(BANDS, ("far", "near"), strict=True):
        left, right = scale.at(1 - error), scale.at(1 + error)
        lines.append(f'<path class="{kind}" d="M{left:.1f} {_TOP}H{right:.1f}V{bottom}H{left:.1f}z"/>')
    for value, name in ((0.5, "½"), (0.75, "−25 %"), (1.0, "1"), (1.25, "+25 %"), (2.0, "2")):
        x = scale.at(value)
        lines.append(f'<path class="{"one" if value == 1 else "grid"}" d="M{x:.1f} {_TOP}V{bottom}"/>')
        lines.append(caption(x, bottom + 16, name, "middle", "soft"))
    for place, (name, points) in enumerate(series.items()):
        lines += _row(place, name, points, scale)
    return lines


def _row(place: int, name: str, points: Sequence[Point], scale: Scale) -> list[str]:
    """One family: mark, name, a tick a run, the bar at their median, the median of absolute errors."""
    top = _TOP + _ROW * place
    base, ratios = top + 12.5, _ratios(points)
    ticks = "".join(f"M{x:.1f} {top + 4}v8" for x in sorted({round(scale.at(ratio), 1) for ratio in ratios}))
    left, middle, right = (scale.at(cut) for cut in quantiles(ratios * 2, n=4, method="inclusive"))
    big = f'transform="translate({_NAMES + 2} {top + 8.5}) scale(1.4)"'
    return [
        f'<g class="c{colour(place)}" {big}>{mark(place, 0, 0)}</g>',
        caption(_NAMES + 12, base, f"{name} ({len(points)})"),
        f'<path class="t{colour(place)}" stroke-opacity="{0.3 if len(points) > _CROWDED else 0.6}" d="{ticks}"/>',
        f'<path class="one" stroke-width="1.2" d="M{left:.1f} {top + 14}H{right:.1f}"/>',
        f'<path class="one" stroke-width="2.5" d="M{middle:.1f} {top + 2}v12.5"/>',
        caption(_FIGURES, base, _error(points), "end"),
    ]


def _error(points: Sequence[Point]) -> str:
    return f"{100 * median(abs(ratio - 1) for ratio in _ratios(points)):.1f} %"
