"""Scores of published runs as lines and as data, with notes on rows that are not scored and units that look wrong.

The figure shows every scored step, both axes logarithmic, with the line of equality and bands of 10 and 25 % around
it, and a legend of families: mark, name, number of runs, and the median of absolute errors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from math import log
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

from galvatron_lite.svg import KINDS as MARKS
from galvatron_lite.svg import Scale, caption, colour, decades, document, mark, rounded
from galvatron_lite.validate.checks import assumptions, taken_otherwise
from galvatron_lite.validate.results import Mean, Predicted, ScoredRun, Scores, SkipError
from galvatron_lite.validate.rows import KINDS, NOT_USED, PublishedRun, parse_rows, read_lines

IMPLAUSIBLE = 20.0
"""Factor between prediction and measurement beyond which a unit is the likelier reason."""

FAILED = "ran out of memory, so that there is no figure"
_SHOWN = 5


def read_file(path: Path) -> tuple[tuple[PublishedRun, ...], tuple[str, ...]]:
    """All runs of a file (``-``: standard input) in order, and what is odd about it, for people: lines that hold no
    run, names that repeat, fields passed over; see ``read_runs``."""
    rows = list(parse_rows(read_lines(path), str(path)))
    runs = tuple(run for _, run in rows)
    passed = {name for data, _ in rows for name in (data or {}) if name not in KINDS}
    broken = [str(run.line) for data, run in rows if data is None]
    repeated = [name for name, count in Counter(run.run_id for run in runs).items() if count > 1]
    unread = []
    for name in sorted(passed - set(NOT_USED)):
        near = get_close_matches(name.lower(), KINDS, 1, 0.75)
        unread.append(f"{name} (meant {near[0]}?)" if near else name)
    by_family = {
        "lines that are no JSON object, each counted as a row not scored": broken,
        "run_id given more than once, all of them counted": repeated,
        "fields passed over": unread,
    }
    return runs, tuple(f"{note}: {_some(names)}" for note, names in by_family.items() if names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:60] for name in names[:_SHOWN]) + more


def _factor(one: ScoredRun) -> float:
    """By which predicted and measured values differ most, of time or of memory, as a logarithm."""
    return max(abs(log(max(ratio, 1e-12))) for ratio in (one.time, one.memory) if ratio is not None)


def implausible(judged: Iterable[ScoredRun]) -> list[str]:
    """A hint about units where predictions are off by more than ``IMPLAUSIBLE`` times."""
    odd = [one.run.run_id for one in judged if one.scored and _factor(one) > log(IMPLAUSIBLE)]
    units = "iter_time_s is in seconds, peak_mem_gb in GiB, throughputs a second"
    message = f"off by more than {IMPLAUSIBLE:.0f} times, check the units ({units})"
    return [f"{message}: {_some(odd)}"] if odd else []


def unscored(judged: Iterable[ScoredRun]) -> list[dict[str, object]]:
    """Every row that is not scored, in order: ``run_id``, ``line``, ``reason``, ``detail``."""
    failed = SkipError(FAILED, "oom: True, and neither time nor memory measured.")
    missing = [
        (one.run, one.outcome if isinstance(one.outcome, SkipError) else failed) for one in judged if not one.scored
    ]
    return [
        {"run_id": run.run_id, "line": run.line, "reason": why.reason, "detail": why.detail} for run, why in missing
    ]


def unscored_rows(judged: Iterable[ScoredRun], count: int) -> list[str]:
    """Lines for people on the first rows that are not scored."""
    # Of those that were graded so on purpose nothing can be mended: they come last.
    rows = sorted(unscored(judged), key=lambda row: "grade C" in str(row["reason"]))
    lines = [f"not scored: line {row['line']}, {row['run_id']}: {row['reason']}. {row['detail']}" for row in rows]
    more = f"... and {len(rows) - count} more not scored (--skipped N, --json)"
    return [*lines[:count], more] if len(rows) > count else lines


def unscored_lines(scores: Mapping[str, Scores]) -> list[str]:
    """A line for each family with rows that are not scored: how many, and why."""
    lines = []
    for name, family in scores.items():
        missing = family.rows - family.scored
        reasons = family.skipped | {FAILED: missing - sum(family.skipped.values())}
        reasons_text = "; ".join(f"{reason} ({count})" for reason, count in reasons.items() if count > 0)
        lines += [f"{name}: {missing} of {family.rows} not scored: {reasons_text}"] if reasons_text else []
    return lines


def assumed(judged: Iterable[ScoredRun]) -> dict[str, int]:
    """What was taken for scored rows without their saying so, with the number of rows, most frequent first."""
    return dict(Counter(text for one in judged if one.scored for text in assumptions(one.run)).most_common())


def passed_over(judged: Iterable[ScoredRun]) -> list[str]:
    """Lines for people: what scored rows state and is passed over, most frequent first."""
    every = Counter(text for one in judged if one.scored for text in taken_otherwise(one.run)).most_common()
    lines = [f"{text} ({count} row{'s' * (count > 1)})" for text, count in every[:_SHOWN]]
    return [*lines, *([f"... and {len(every) - _SHOWN} more such (--json)"] if len(every) > _SHOWN else [])]


def as_data(
    scores: Mapping[str, Scores], means: Mapping[str, Mean], judged: Iterable[ScoredRun], worst: int
) -> dict[str, object]:
    """Scores as plain data: ``families``, the ``means`` by name and, where asked for, the ``worst`` runs."""
    data: dict[str, object] = {"families": {name: _rounded(asdict(family)) for name, family in scores.items()}}
    data |= {name: _rounded(mean) for name, mean in means.items()}
    return data | ({"worst": [worst_data(worst_run) for worst_run in worst_runs(judged, worst)]} if worst else {})


def _rounded(figures: Mapping[str, object]) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def worst_runs(judged: Iterable[ScoredRun], count: int) -> list[ScoredRun]:
    """The runs whose predicted and measured values differ by the largest factors, of time or of memory."""
    return sorted((one for one in judged if one.scored), key=_factor, reverse=True)[:count]


def worst_data(one: ScoredRun) -> dict[str, object]:
    """One run with its breakdown, as plain data."""
    assert isinstance(one.outcome, Predicted)
    assert one.measured is not None
    return {
        "run_id": one.run.run_id,
        "line": one.run.line,
        "family": one.run.family,
        "measured_s": one.measured.step_seconds,
        "predicted_s": one.outcome.step_seconds,
        "measured_bytes": one.measured.peak_memory,
        "predicted_bytes": one.outcome.peak_memory,
        "time": _rounded(asdict(one.outcome.time)),
        "memory": asdict(one.outcome.memory),
        "assumed": assumptions(one.run),
    }


def worst_lines(one: ScoredRun) -> list[str]:
    """What there is to say of one run: its plan, its error, its breakdown."""
    assert isinstance(one.outcome, Predicted)
    assert one.measured is not None
    run, outcome, measured = one.run, one.outcome, one.measured
    degrees = [f"{name}{value}" for name in ("dp", "tp", "pp", "cp", "ep") if (value := getattr(run, name) or 1) > 1]
    batch = f"micro {run.micro_batch or 'not stated'}, batch {run.global_batch or 'not stated'}"
    place = f"{run.n_gpus} x {run.gpu}, {' '.join(degrees) or 'one device'}"
    lines = [f"{run.run_id}  {run.model or 'model not named'}, {place}, {batch}, {run.framework}"]
    figures = (
        ("time", outcome.step_seconds, measured.step_seconds, one.time, outcome.time, 1.0, " s", ".4g"),
        ("memory", outcome.peak_memory, measured.peak_memory, one.memory, outcome.memory, 2.0**30, "", ".2f"),
    )
    for name, predicted, known, ratio, parts, unit, suffix, form in figures:
        if known is not None:
            off = "" if ratio is None else f" ({100 * ratio - 100:+.0f} %)"
            values = " measured ".join(f"{value / unit:{form}}{suffix or ' GiB'}," for value in (predicted, known))
            split = ((part, value / unit) for part, value in asdict(parts).items() if value)
            parts_text = ", ".join(f"{part} {value:.3g}{suffix}" for part, value in split)
            lines.append(f"  {name} {values.removesuffix(',')}{off}: {parts_text}")
    taken = assumptions(run)
    return [*lines, *(["  assumed: " + "; ".join(taken)] if taken else [])]


BANDS = (0.25, 0.10)  # relative errors that the bands show, widest first
OTHERS = "others"  # families beyond those that marks can tell apart, together
_SIDE, _LEFT, _TOP, _ROW, _NAMES = 560, 62, 86, 17, 656
_CROWDED = 150  # points of a family above which they are drawn lighter

Point = tuple[float, float]  # measured and predicted seconds
Series = Mapping[str, Sequence[Point]]


def scatter(judged: Iterable[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family) -> str:
    """The figure of all scored step times as SVG, by family or another key; it fits light and dark pages."""
    series = _series(judged, key)
    title, errors = "Predicted against measured seconds a training step", _errors(*series.values())
    within = (f"{100 * sum(error <= band for error in errors) / len(errors):.0f} % within {100 * band:.0f} %"
              for band in reversed(BANDS))  # fmt: skip
    summary = f"{len(errors):,} training runs: {', '.join(within)}" if errors else "no step time is scored"
    medians = {name: f"{100 * median(_errors(points)):.1f} %" for name, points in series.items()}
    parts = [
        caption(_LEFT, 26, title, more=' font-size="15" font-weight="600"'),
        caption(_LEFT, 46, summary, kind="soft"),
        caption(_LEFT, 64, "bands: 10 % and 25 % either way", kind="soft"),
        *_plane(series),
        caption(_NAMES + 12, _TOP - 10, "family (runs)", kind="soft"),
        caption(_NAMES + 268, _TOP - 10, "median error", "end", "soft"),
    ]
    for place, (name, points) in enumerate(series.items()):
        top, big = _TOP + _ROW * place, f'transform="translate({_NAMES + 2} {_TOP + _ROW * place + 8.5}) scale(1.4)"'
        parts.append(f'<g class="c{colour(place)}" {big}>{mark(place, 0, 0)}</g>')
        parts.append(caption(_NAMES + 12, top + 12.5, f"{name} ({len(points)})"))
        parts.append(caption(_NAMES + 268, top + 12.5, medians[name], "end"))
    legend = "; ".join(f"{name} ({len(points)} runs): {medians[name]}" for name, points in series.items())
    words = f"{summary}. Median absolute error by group: {legend}."
    return document(_NAMES + 280, _TOP + max(_SIDE, _ROW * len(series)) + 56, title, parts, words)


def _series(judged: Iterable[ScoredRun], key: Callable[[PublishedRun], str]) -> Series:
    series: dict[str, list[Point]] = defaultdict(list)
    for one in judged:
        if one.time and isinstance(one.outcome, Predicted) and one.measured is not None:
            series[key(one.run)].append((one.measured.step_seconds or 0.0, one.outcome.step_seconds))
    if len(series) <= MARKS:
        return series
    largest = sorted(series, key=lambda name: -len(series[name]))[: MARKS - 1]
    kept = {name: points for name, points in series.items() if name in largest}
    return kept | {OTHERS: [point for name, points in series.items() if name not in largest for point in points]}


def _errors(*series: Sequence[Point]) -> list[float]:
    return [abs(predicted / measured - 1) for points in series for measured, predicted in points]


def _plane(series: Series) -> Iterator[str]:
    """The scatter; families of many runs first, so that they do not cover the others."""
    low, high = rounded(value for points in series.values() for point in points for value in point)
    across, upwards = Scale(low, high, _LEFT, _LEFT + _SIDE), Scale(low, high, _TOP + _SIDE, _TOP)
    right, bottom, middle = _LEFT + _SIDE, _TOP + _SIDE, _TOP + _SIDE / 2
    for error, kind in zip(BANDS, ("far", "near"), strict=True):
        above, below = 1 + error, 1 - error
        corners = [
            (low, low), (low, low * above), (high / above, high),
            (high, high), (high, high * below), (low / below, low),
        ]  # fmt: skip
        path = "L".join(f"{across.at(x):.1f} {upwards.at(y):.1f}" for x, y in corners)
        yield f'<path class="{kind}" d="M{path}z"/>'
    yield f'<path class="one" d="M{_LEFT} {bottom}L{right} {_TOP}"/>'
    yield f'<path class="grid" d="M{_LEFT} {_TOP}H{right}V{bottom}H{_LEFT}z"/>'
    for value in decades(low, high):
        x, y, name = across.at(value), upwards.at(value), f"{value:,g}"
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}"/>'
        yield caption(x, bottom + 18, name, "middle", "soft") + caption(_LEFT - 7, y + 4, name, "end", "soft")
    yield caption(_LEFT + _SIDE / 2, bottom + 40, "measured, seconds a step", "middle")
    turned = f' transform="rotate(-90 18 {middle})"'
    yield caption(18, middle, "predicted, seconds a step", "middle", more=turned)
    places = {name: place for place, name in enumerate(series)}
    for name, points in sorted(series.items(), key=lambda item: -len(item[1])):
        yield f'<g class="c{colour(places[name])}" fill-opacity="{0.5 if len(points) > _CROWDED else 0.85}">'
        yield f"<title>{escape(name)}</title>"
        yield from (mark(places[name], across.at(measured), upwards.at(predicted)) for measured, predicted in points)
        yield "</g>"
