"""Print the quickstart's table from the plan and what training measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import format_bytes, format_seconds


def compared(plan: Plan, found: dict[str, Any], title: str, loss: str = "loss") -> Table:
    """Predicted beside measured, as a table."""
    prediction = plan.prediction
    if prediction is None:
        raise SystemExit("the plan carries no prediction")
    table = Table("", "predicted", "measured", "error", title=title)
    seconds, peak = prediction.step_seconds, prediction.peak_memory
    table.add_row(
        "step time",
        format_seconds(seconds),
        f"{format_seconds(found['seconds'])} (median of {found['repetitions']}, spread {found['spread']:.0%})",
        f"{seconds / found['seconds'] - 1:+.1%}",
    )
    table.add_row("peak memory", format_bytes(peak), format_bytes(found["peak"]), f"{peak / found['peak'] - 1:+.1%}")
    table.add_row(loss, f"before: {found['before']:.3f}", f"after: {found['after']:.3f}", "")
    return table


def report(plan_file: Path, result_file: Path) -> None:
    """The quickstart's table."""
    found = json.loads(result_file.read_text())
    title = f"Trained {found['steps']} steps of {found['batch']} samples"
    Console(highlight=False).print(compared(read_plan(plan_file), found, title, "loss, nats a byte"))


if __name__ == "__main__":
    report(Path(sys.argv[1]), Path(sys.argv[2]))
