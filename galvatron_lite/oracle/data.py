"""Forecasts as plain data, for programmes. No torch here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from galvatron_lite.oracle.bottlenecks import findings
from galvatron_lite.oracle.measured import FORMULAS, Check, mean_accuracy, rankings, scores, software_notes
from galvatron_lite.oracle.rows import Forecast, Line, Row

DIGITS = 12
"""Significant digits of a figure: those that the released oracle prints."""


def rounded(value: Any) -> Any:
    """Plain data with every figure rounded to ``DIGITS``."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """A mapping with every figure rounded."""
    return {name: rounded(item) for name, item in value.items()}


def as_data(forecast: Forecast) -> dict[str, Any]:
    """The forecast and its bottlenecks; seconds and bytes."""
    return {
        "model": forecast.model,
        "cluster": forecast.cluster,
        "formulas": forecast.formulas,
        "samples": forecast.samples,
        "origin": forecast.origin,
        "notes": list(forecast.notes),
        "strategies": [_line(line) for line in forecast.lines],
        "bottlenecks": [rounded(asdict(one) | {"sort": one.sort.value}) for one in findings(forecast)],
    }


def _line(line: Line) -> dict[str, Any]:
    return {"strategy": line.strategy, "limit": asdict(line.limit), "rows": [_row(row) for row in line.rows]}


def _row(row: Row) -> dict[str, Any]:
    told: dict[str, Any] = {"gpus": row.devices, "batch": row.batch}
    if row.problem:
        return told | {"problem": row.problem}
    return told | _plain(
        {
            "iterations": row.iterations,
            "compute": row.compute,
            "communication": row.moved.total,
            "communication_parts": asdict(row.moved),
            "congestion": row.congested,
            "weight_update": row.update,
            "waiting": row.waiting,
            "other": row.other,
            "epoch": row.epoch,
            "iteration": row.iteration,
            "memory": row.memory,
            "capacity": row.capacity,
            "fits": row.fits,
            "largest_batch": row.largest or None,
        }
    )


def checks_data(checks: tuple[Check, ...]) -> dict[str, Any]:
    """Measured rows, what is predicted of them, and how near that is."""
    rows = [
        asdict(check.row)
        | {"strategy": check.row.strategy.value}
        | {"predicted": check.predicted, "accuracy": {way: check.accuracy(way) for way in FORMULAS}}
        | {"problems": check.problems}
        for check in checks
    ]
    by = scores(checks, lambda row: f"{row.origin}: {row.strategy.value} {row.model}")
    return {
        "rows": rounded(rows),
        "scores": [rounded(asdict(score)) for score in by],
        "mean": {way: rounded(mean_accuracy(checks, way)) for way in FORMULAS},
        "rankings": [asdict(one) for one in rankings(checks)],
        "software": software_notes(),
    }
