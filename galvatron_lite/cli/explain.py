"""``galvatron explain``: what limits a plan, and what each of its choices gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import print_json, print_table, progress_bar, wide_console

if TYPE_CHECKING:
    from galvatron_lite.analysis.explanation import Explanation

_SHOWN_RUNS = 8  # runs of layers that are shown, those that take most of the step


def explain_command(
    plan: options.PlanFile,
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: options.Gpus = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    mem: options.Memory = None,
    no_what_if: bool = typer.Option(
        False, "--no-what-if", help="Skip the searches for runners-up and what-ifs, and answer at once."
    ),
    seconds: float = typer.Option(
        120.0, "--seconds", min=0, max=1e6, help="Time limit of these searches in seconds; the rest is skipped."
    ),
    fix: options.Fix = None,
    forbid: options.Forbid = None,
    schedules: options.Schedule = None,
    allow_delay: options.AllowDelay = False,
    as_json: options.Json = False,
) -> None:
    """Explain a plan: what limits it, and what each choice gains.

    Shows where the time goes and what would change the plan.

    Pass the --fix, --forbid and --schedule options that the plan was made with: it searches again with them.
    """
    setup = options.arguments(locals())
    from galvatron_lite import api_plans

    with progress_bar("Planning again", quiet=as_json) as progress:
        setup["progress"] = progress
        explanation = api_plans.explain(plan, profile, what_if=not no_what_if, seconds=seconds, **setup)
    if as_json:
        print_json(explanation)
    else:
        _print_explanation(explanation)


def _print_explanation(explanation: Explanation) -> None:
    from galvatron_lite.analysis.tables import price_lines, step_line, tables, trust_lines

    console = wide_console()

    def section(title: str, lines: list[str]) -> None:
        if lines:
            console.print(title, style="bold")
            console.print("\n".join(f"  {line}" for line in lines), end="\n\n")

    console.print(explanation.headline, style="bold")
    console.print(f"{step_line(explanation)}\n")
    bounds = [f"{'limits ' if bound.binds else '       '} {bound.said}" for bound in explanation.bounds]
    section("What limits the step", bounds)
    section("Price of memory", [] if explanation.price is None else list(price_lines(explanation.price)))
    for table in tables(explanation, _SHOWN_RUNS):
        console.print(table.title, style="bold")
        choices = table.title.startswith("What each")
        print_table(console, table, "" if choices else "  ")
        if choices and len(explanation.runs) > _SHOWN_RUNS:
            console.print(f"… {len(explanation.runs) - _SHOWN_RUNS} more runs of layers in --json")
        console.print()
    section("Prediction accuracy", list(trust_lines(explanation.trust)))
    for line in explanation.left_out:
        console.print(f"Skipped: {line}.")
    for line in explanation.notes:
        console.print(f"Note: {line}.")
