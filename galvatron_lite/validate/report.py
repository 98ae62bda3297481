"""Scores of published runs for people and for programmes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from math import log
from typing import TYPE_CHECKING

from galvatron_lite.validate.legend import POINTER
from galvatron_lite.validate.outcome import Predicted
from galvatron_lite.validate.scores import Judged, Scores
from galvatron_lite.validate.understood import assumptions

if TYPE_CHECKING:
    from rich.console import Console

Mean = Mapping[str, float | int | None]
"""Figures averaged over families."""

_GIB = 2**30
_WIDE = 200
_COLUMNS = (
    ("time %", "time_mape"), ("median", "time_median"), ("bias", "time_bias"), ("memory %", "memory_mape"),
    ("bias", "memory_bias"), ("rank", "spearman"), ("in groups", "group_spearman"), ("regret %", "regret"),
    ("worst", "regret_max"),
)  # fmt: skip
_CORRELATIONS = ("spearman", "group_spearman")


def as_data(
    scores: Mapping[str, Scores], means: Mapping[str, Mean], judged: Iterable[Judged], worst: int
) -> dict[str, object]:
    """Scores as plain data: ``families``, the ``means`` by name and, where asked for, the ``worst`` runs."""
    data: dict[str, object] = {"families": {name: _rounded(asdict(family)) for name, family in scores.items()}}
    data |= {name: _rounded(mean) for name, mean in means.items()}
    return data | ({"worst": [worst_data(one) for one in worst_runs(judged, worst)]} if worst else {})


def _rounded(figures: Mapping[str, object]) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def worst_runs(judged: Iterable[Judged], count: int) -> list[Judged]:
    """The runs whose predicted and measured values differ by the largest factors, of time or of memory."""
    scored = [one for one in judged if one.scored]
    return sorted(scored, key=_factor, reverse=True)[:count]


def _factor(one: Judged) -> float:
    ratios = [ratio for ratio in (one.time, one.memory) if ratio is not None]
    return max(abs(log(max(ratio, 1e-12))) for ratio in ratios)


def worst_data(one: Judged) -> dict[str, object]:
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


def print_scores(scores: Mapping[str, Scores], means: Mapping[str, Mean], by: str) -> None:
    """A table of families with the means below, what was not scored and why, and where the columns are explained."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(by, no_wrap=True)
    for title in ("rows", "scored", *(title for title, _ in _COLUMNS), "over"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, family in scores.items():
        figures = [_number(getattr(family, field), field) for _, field in _COLUMNS]
        table.add_row(name, str(family.rows), str(family.scored), *figures, str(family.overflowing or ""))
    table.add_section()
    # Means over one family are that family's own figures.
    for name, mean in means.items() if len(scores) > 1 else ():
        figures = [_number(mean.get(field), field) for _, field in _COLUMNS]
        totals = [str(mean.get(field, 0)) for field in ("rows", "scored")]
        table.add_row(name.replace("_", " "), *totals, *figures, str(mean.get("overflowing", 0)))
    console = _console()
    console.print(table, "")
    missing = unscored_lines(scores)
    for line in (*missing, *([""] if missing else []), POINTER):
        console.print(line, style="dim")


def unscored_lines(scores: Mapping[str, Scores]) -> list[str]:
    """A line for each family with rows that are not scored: how many, and why."""
    lines = []
    for name, family in scores.items():
        reasons = dict(family.skipped)
        if (failed := family.rows - family.scored - sum(reasons.values())) > 0:
            reasons["ran out of memory, so that there is no figure"] = failed
        if reasons:
            said = "; ".join(f"{reason} ({count})" for reason, count in reasons.items())
            lines.append(f"{name}: {family.rows - family.scored} of {family.rows} not scored: {said}")
    return lines


def _console() -> Console:
    """Lines are cut nowhere: files and pipes get whole rows."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(markup=False, highlight=False, soft_wrap=True, width=_WIDE)


def _number(value: float | int | None, field: str) -> str:
    """Percentages with one digit after the point, correlations with two; never a minus before nought."""
    if value is None:
        return ""
    digits = 2 if field in _CORRELATIONS else 1
    return f"{round(value, digits) + 0.0:.{digits}f}"


def print_worst(judged: Sequence[Judged], count: int) -> None:
    """The runs predicted worst, with where their predicted time and memory go."""
    if not count:
        return
    console = _console()
    console.print("")
    for one in worst_runs(judged, count):
        for line in worst_lines(one):
            console.print(line)


def worst_lines(one: Judged) -> list[str]:
    """What there is to say of one run: its plan, its error, its breakdown."""
    assert isinstance(one.outcome, Predicted)
    assert one.measured is not None
    lines = [f"{one.run.run_id}  {plan_words(one)}"]
    seconds = one.measured.step_seconds
    if seconds is not None:
        held = f"  time {one.outcome.step_seconds:.4g} s, measured {seconds:.4g} s{_off(one.time)}: "
        lines.append(held + _parts(one.outcome.time, 1.0, " s"))
    if one.measured.peak_memory is not None:
        predicted, measured = one.outcome.peak_memory / _GIB, one.measured.peak_memory / _GIB
        held = f"  memory {predicted:.2f} GiB, measured {measured:.2f} GiB{_off(one.memory)}: "
        lines.append(held + _parts(one.outcome.memory, _GIB, ""))
    taken = assumptions(one.run)
    return [*lines, *(["  assumed: " + "; ".join(taken)] if taken else [])]


def _off(ratio: float | None) -> str:
    return "" if ratio is None else f" ({100 * ratio - 100:+.0f} %)"


def plan_words(one: Judged) -> str:
    """The run's model, machine and plan in a line."""
    run = one.run
    degrees = " ".join(
        f"{name}{value}" for name in ("dp", "tp", "pp", "cp", "ep") if (value := getattr(run, name) or 1) > 1
    )
    batch = f"micro {run.micro_batch or 'not stated'}, batch {run.global_batch or 'not stated'}"
    model = run.model or "model not named"
    return f"{model}, {run.n_gpus} x {run.gpu}, {degrees or 'one device'}, {batch}, {run.framework}"


def _parts(breakdown: object, unit: float, suffix: str) -> str:
    named = ((item.name, getattr(breakdown, item.name) / unit) for item in fields(breakdown))  # type: ignore[arg-type]
    return ", ".join(f"{name} {value:.3g}{suffix}" for name, value in named if value)
