"""Scores of published runs as lines, data and a figure, with notes on rows that are not scored or have odd units.

The figure shows all scored step times on logarithmic axes, with the line of equality, bands of 10 and 25 % around it,
and a legend of families: mark, name, number of runs, and median absolute error.
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
from galvatron_lite.validate.results import Mean, ScoredRun, Scores, SkipError
from galvatron_lite.validate.rows import KINDS, NOT_USED, PublishedRun, parse_rows, read_lines

IMPLAUSIBLE = 20.0
"""Factor between prediction and measurement beyond which a unit is probably wrong."""

FAILED = "ran out of memory, so that there is no figure"
_SHOWN = 5


def read_file(path: Path) -> tuple[tuple[PublishedRun, ...], tuple[str, ...]]:
    """Return all runs of a file (``-``: standard input) in order, and notes on odd lines, names and fields."""
    rows = list(parse_rows(read_lines(path), str(path)))
    runs = tuple(run for _, run in rows)
    passed = {name for data, _ in rows for name in (data or {}) if name not in KINDS}
    broken = [str(run.line) for data, run in rows if data is None]
    repeated = [name for name, count in Counter(run.run_id for run in runs).items() if count > 1]
    unread = []
    for name in sorted(passed - set(NOT_USED)):
        near = get_close_matches(name.lower(), KINDS, 1, 0.75)
        unread.append(f"{name} (meant {near[0]}?)" if near else name)
    notes = {
        "lines that are no JSON object, each counted as a row not scored": broken,
        "run_id given more than once, all of them counted": repeated,
        "fields passed over": unread,
    }
    return runs, tuple(f"{note}: {_first_names(names)}" for note, names in notes.items() if names)


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:60] for name in names[:_SHOWN]) + more


def _log_error(scored: ScoredRun) -> float:
    """Return the larger of the logarithmic errors of time and memory."""
    return max(abs(log(max(ratio, 1e-12))) for ratio in (scored.time, scored.memory) if ratio is not None)


def implausible(judged: Iterable[ScoredRun]) -> list[str]:
    """Return a hint about units if predictions are off by more than ``IMPLAUSIBLE`` times."""
    odd = [scored.run.run_id for scored in judged if scored.scored and _log_error(scored) > log(IMPLAUSIBLE)]
    units = "iter_time_s is in seconds, peak_mem_gb in GiB, throughputs a second"
    message = f"off by more than {IMPLAUSIBLE:.0f} times, check the units ({units})"
    return [f"{message}: {_first_names(odd)}"] if odd else []


def unscored(judged: Iterable[ScoredRun]) -> list[dict[str, object]]:
    """Return ``run_id``, ``line``, ``reason`` and ``detail`` of each row that is not scored, in order."""
    failed = SkipError(FAILED, "oom: True, and neither time nor memory measured.")
    rows = list[dict[str, object]]()
    for scored in judged:
        if not scored.scored:
            skip = scored.outcome if isinstance(scored.outcome, SkipError) else failed
            run = scored.run
            rows.append({"run_id": run.run_id, "line": run.line, "reason": skip.reason, "detail": skip.detail})
    return rows


def unscored_rows(judged: Iterable[ScoredRun], count: int) -> list[str]:
    """Return lines for people on the first ``count`` rows that are not scored."""
    # Rows of grade C cannot be mended, so they come last.
    rows = sorted(unscored(judged), key=lambda row: "grade C" in str(row["reason"]))
    lines = [f"not scored: line {row['line']}, {row['run_id']}: {row['reason']}. {row['detail']}" for row in rows]
    more = f"... and {len(rows) - count} more not scored (--skipped N, --json)"
    return [*lines[:count], more] if len(rows) > count else lines


def unscored_lines(scores: Mapping[str, Scores]) -> list[str]:
    """Return a line for each family with rows that are not scored: their number and the reasons."""
    lines = []
    for name, family in scores.items():
        missing = family.rows - family.scored
        reasons = family.skipped | {FAILED: missing - sum(family.skipped.values())}
        reasons_text = "; ".join(f"{reason} ({count})" for reason, count in reasons.items() if count > 0)
        lines += [f"{name}: {missing} of {family.rows} not scored: {reasons_text}"] if reasons_text else []
    return lines


def assumed(judged: Iterable[ScoredRun]) -> dict[str, int]:
    """Return the assumptions about scored rows with the number of rows, most frequent first."""
    lines = (line for scored in judged if scored.scored for line in assumptions(scored.run))
    return dict(Counter(lines).most_common())


def passed_over(judged: Iterable[ScoredRun]) -> list[str]:
    """Return lines for people on ignored fields of scored rows, most frequent first."""
    texts = (text for scored in judged if scored.scored for text in taken_otherwise(scored.run))
    counts = Counter(texts).most_common()
    lines = [f"{text} ({count} row{'s' * (count > 1)})" for text, count in counts[:_SHOWN]]
    return [*lines, *([f"... and {len(counts) - _SHOWN} more such (--json)"] if len(counts) > _SHOWN else [])]


def as_data(
    scores: Mapping[str, Scores], means: Mapping[str, Mean], judged: Iterable[ScoredRun], worst: int
) -> dict[str, object]:
    """Return scores as plain data: ``families``, the ``means`` by name and, if ``worst`` > 0, the worst runs."""
    data: dict[str, object] = {"families": {name: _rounded(asdict(family)) for name, family in scores.items()}}
    data |= {name: _rounded(mean) for name, mean in means.items()}
    return data | ({"worst": [worst_data(worst_run) for worst_run in worst_runs(judged, worst)]} if worst else {})


def _rounded(figures: Mapping[str, object]) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def worst_runs(judged: Iterable[ScoredRun], count: int) -> list[ScoredRun]:
    """Return the runs whose predicted and measured values, of time or memory, differ by the largest factors."""
    return sorted((scored for scored in judged if scored.scored), key=_log_error, reverse=True)[:count]


def worst_data(scored: ScoredRun) -> dict[str, object]:
    """Return a run and its breakdown as plain data."""
    run, (predicted, measured) = scored.run, scored.figures
    return {
        "run_id": run.run_id,
        "line": run.line,
        "family": run.family,
        "measured_s": measured.step_seconds,
        "predicted_s": predicted.step_seconds,
        "measured_bytes": measured.peak_memory,
        "predicted_bytes": predicted.peak_memory,
        "time": _rounded(asdict(predicted.time)),
        "memory": asdict(predicted.memory),
        "assumed": assumptions(run),
    }


def worst_lines(scored: ScoredRun) -> list[str]:
    """Return lines for people on a run: its plan, its error, its breakdown."""
    run, (outcome, measured) = scored.run, scored.figures
    degrees = [f"{name}{value}" for name in ("dp", "tp", "pp", "cp", "ep") if (value := getattr(run, name) or 1) > 1]
    batch = f"micro {run.micro_batch or 'not stated'}, batch {run.global_batch or 'not stated'}"
    place = f"{run.n_gpus} x {run.gpu}, {' '.join(degrees) or 'one device'}"
    lines = [f"{run.run_id}  {run.model or 'model not named'}, {place}, {batch}, {run.framework}"]
    figures = (
        ("time", outcome.step_seconds, measured.step_seconds, scored.time, outcome.time, 1.0, " s", ".4g"),
        ("memory", outcome.peak_memory, measured.peak_memory, scored.memory, outcome.memory, 2.0**30, "", ".2f"),
    )
    for name, predicted, actual, ratio, parts, unit, suffix, form in figures:
        if actual is not None:
            off = "" if ratio is None else f" ({100 * ratio - 100:+.0f} %)"
            values = " measured ".join(f"{value / unit:{form}}{suffix or ' GiB'}," for value in (predicted, actual))
            split = ((part, value / unit) for part, value in asdict(parts).items() if value)
            parts_text = ", ".join(f"{part} {value:.3g}{suffix}" for part, value in split)
            lines.append(f"  {name} {values.removesuffix(',')}{off}: {parts_text}")
    assumed_lines = assumptions(run)
    return [*lines, *(["  assumed: " + "; ".join(assumed_lines)] if assumed_lines else [])]


BANDS = (0.25, 0.10)  # relative errors of the bands, widest first
OTHERS = "others"  # the families beyond the number of different marks
_SIDE, _LEFT, _TOP, _ROW, _NAMES = 560, 62, 86, 17, 656
_CROWDED = 150  # points of a family above which they are drawn lighter

Point = tuple[float, float]  # measured and predicted seconds
Series = Mapping[str, Sequence[Point]]


def scatter(judged: Iterable[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family) -> str:
    """Return the figure of all scored step times as SVG, by family or another key, for light and dark pages."""
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
    for scored in judged:
        if scored.time:
            predicted, measured = scored.figures
            series[key(scored.run)].append((measured.step_seconds or 0.0, predicted.step_seconds))
    if len(series) <= MARKS:
        return series
    largest = sorted(series, key=lambda name: -len(series[name]))[: MARKS - 1]
    kept = {name: points for name, points in series.items() if name in largest}
    return kept | {OTHERS: [point for name, points in series.items() if name not in largest for point in points]}


def _errors(*series: Sequence[Point]) -> list[float]:
    return [abs(predicted / measured - 1) for points in series for measured, predicted in points]


def _plane(series: Series) -> Iterator[str]:
    """Draw the scatter plot; families of many runs first, so that they do not cover the others."""
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
