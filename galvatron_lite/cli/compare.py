"""``galvatron evaluate`` and ``compare``: predict the cost of plans, and how they differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import print_json, print_table, wide_console, written
from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.analysis.explanation import Comparison


def evaluate_command(
    plan: options.PlanFile,
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: options.Gpus = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    mem: str | None = typer.Option(
        None, "--mem", help="Memory budget per GPU to compare with: 40GB, 40GiB or 80%. Default: 95%."
    ),
    calibration: options.Calibration = None,
    target: str | None = typer.Option(
        None, "--for", help="PLAN is a settings file of megatron, nemo, torchtitan, deepspeed or accelerate."
    ),
    as_json: options.Json = False,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> None:
    """Predict the step time and memory of a plan."""
    setup = options.arguments(locals())
    from galvatron_lite import api
    from galvatron_lite.cli.plan_output import accuracy, print_plan
    from galvatron_lite.plans.describe import fits_line
    from galvatron_lite.plans.io import check_runs, write_plan
    from galvatron_lite.request import PlanRequest

    evaluation, used = api.evaluated(plan, PlanRequest.parse(profile, setup), setup)
    if output is not None:
        write_plan(evaluation, output)
    if as_json:
        print_json(evaluation, fits=evaluation.fits)
        return
    source = f"{used.name}: {used.origin.kind.value}, {used.origin.source}"
    print_plan(evaluation, source, accuracy(used), verbose)
    typer.echo(fits_line(evaluation))
    if evaluation.provenance is not None and evaluation.provenance.stack:
        typer.echo(f"Priced as {evaluation.provenance.stack} runs it.")
    else:
        try:
            check_runs(evaluation)
            typer.echo("galvatron can run it: yes")
        except InputError as error:
            typer.echo(f"galvatron can run it: no. {error}")
    written(output)


def compare_command(
    plans: list[Path] = typer.Argument(
        ...,
        help="Two or more plan files: of `galvatron plan`, by hand (docs/evaluate.md), or JSON of Hetu-Galvatron.",
    ),
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: options.Gpus = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    mem: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Compare plans of one model, predicted from the same profile."""
    setup = options.arguments(locals())
    from galvatron_lite import api_plans

    comparison = api_plans.compare(list(plans), profile, **setup)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: Comparison) -> None:
    from galvatron_lite.analysis.tables import comparison_tables

    console = wide_console()
    console.print(f"{comparison.model}, all priced with {comparison.basis}", style="bold")
    for plan in comparison.plans:
        console.print(f"  {plan.name}: {plan.headline}")
    for table in comparison_tables(comparison):
        console.print(f"\n{table.title}" if table.title else "")
        if not table.title:
            print_table(console, table)
    console.print()
    for buys in comparison.buys:
        console.print(f"{buys.name} against {comparison.plans[0].name}: {buys.said}.")
    for note in comparison.notes:
        console.print(f"Note: {note}.")
