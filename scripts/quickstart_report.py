"""Print the quickstart's table from the plan and what training measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from galvatron_lite.plans.io import read_plan
from galvatron_lite.units import format_bytes, format_seconds


def report(plan_file: Path, result_file: Path) -> None:
    """Predicted beside measured."""
    plan, found = read_plan(plan_file), json.loads(result_file.read_text())
    prediction = plan.prediction
    if prediction is None:
        raise SystemExit(f"{plan_file} carries no prediction")
    table = Table(
        "", "predicted", "measured", "error", title=f"Trained {found['steps']} steps of {found['batch']} samples"
    )
    seconds, peak = prediction.step_seconds, prediction.peak_memory
    table.add_row(
        "step time",
        format_seconds(seconds),
        f"{format_seconds(found['seconds'])} (median of {found['repetitions']}, spread {found['spread']:.0%})",
        f"{seconds / found['seconds'] - 1:+.1%}",
    )
    table.add_row("peak memory", format_bytes(peak), format_bytes(found["peak"]), f"{peak / found['peak'] - 1:+.1%}")
    table.add_row("loss, nats a byte", f"before: {found['before']:.3f}", f"after: {found['after']:.3f}", "")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    report(Path(sys.argv[1]), Path(sys.argv[2]))
