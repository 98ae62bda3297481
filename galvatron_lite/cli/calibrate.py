"""``galvatron calibrate``: constants corrected by one's runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, progress_bar, wide_console

if TYPE_CHECKING:
    from galvatron_lite.validate.calibrate import CalibrationResult

_UNCHANGED = "Calibration does not help: runs that it did not see are predicted no better. The constants stay."


def calibrate_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Files of runs, one JSON object a line, and folders that log= wrote.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder that the constants are written to.")],
    calibration: options.Calibration = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was learnt as JSON.")] = False,
) -> None:
    """Correct the constants of estimates by your runs, and say what was learnt and how sure it is."""
    from galvatron_lite.calibration.store import load_calibration, write_calibration
    from galvatron_lite.validate.calibrate import calibrate, read_observations

    base = load_calibration(calibration)
    with progress_bar("Calibrating", quiet=as_json) as move:
        found, skipped = read_observations(runs, base)
        source = f"{len(found)} runs of {', '.join(path.name for path in runs)}"
        made = calibrate(found, base, skipped=skipped, source=source, progress=move)
    write_calibration(made.calibration, output)
    if as_json:
        print_json(
            {
                "kind": made.kind, "runs": made.runs, "settings": made.settings, "before": made.before,
                "after": made.after, "left_out": made.left_out, "skipped": made.skipped, "folder": str(output),
                "constants": [
                    {name: getattr(one, name) for name in ("name", "before", "value", "low", "high", "told")}
                    for one in made.constants
                ],
            }
        )  # fmt: skip
    else:
        _print(made, output)


def _print(made: CalibrationResult, folder: Path) -> None:
    console = wide_console()
    for reason, count in made.skipped.items():
        console.print(f"{count} rows not used: {reason}")
    console.print(f"{made.runs} runs of {made.settings} settings", style="bold")
    table = plain_table("constants", "error on runs left out")
    for kind, error in made.left_out.items():
        table.add_row(kind + (" (taken)" if kind == made.kind else ""), f"{error:.1%}")
    console.print(table)
    if made.constants:
        table = plain_table("constant", "before", "now", "one deviation", "runs tell")
        for one in made.constants:
            table.add_row(
                one.name, f"{one.before:.3g}", f"{one.value:.3g}", f"{one.low:.3g} to {one.high:.3g}", f"{one.told:.0%}"
            )
        console.print(table)
        console.print("runs tell: how much of the uncertainty of a constant the runs took away.", style="dim")
        console.print(f"On these runs themselves the error falls from {made.before:.1%} to {made.after:.1%}.")
    else:
        console.print(_UNCHANGED)
    if made.constants and len(made.models) == 1:
        console.print("All runs are of one model: for plans of others, keep the constants as they were.")
    console.print(f"Written to {folder}.")
