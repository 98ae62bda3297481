"""``galvatron evaluate`` and ``compare``: what plans cost, and how they differ."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, wide_console, written
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from galvatron_lite.analysis.explanation import Compared, Comparison
    from galvatron_lite.plans.schema import Plan


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
    mem: Annotated[
        str | None,
        typer.Option("--mem", help="Budget a device to hold it against: 40GB, 40GiB or 80%; 95% if not given."),
    ] = None,
    calibration: options.Calibration = None,
    target: Annotated[
        str | None,
        typer.Option("--for", help="PLAN holds settings of megatron, nemo, torchtitan, deepspeed or accelerate."),
    ] = None,
    as_json: options.Json = False,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> None:
    """Predict step time and memory of a given plan."""
    setup = options.arguments(locals())
    from galvatron_lite import api
    from galvatron_lite.cli.plan_output import accuracy, print_plan
    from galvatron_lite.plans.describe import fits_line
    from galvatron_lite.plans.io import write_plan
    from galvatron_lite.request import PlanRequest

    found, known = api.evaluated(plan, PlanRequest.parse(profile, setup), setup)
    if output is not None:
        write_plan(found, output)
    if as_json:
        print_json(found, fits=found.fits)
        return
    print_plan(found, f"{known.name}: {known.origin.kind.value}, {known.origin.source}", accuracy(known), verbose)
    typer.echo(fits_line(found))
    if found.provenance is not None and found.provenance.stack:
        typer.echo(f"Priced as {found.provenance.stack} runs it.")
    else:
        typer.echo(f"galvatron can run it: {_runs(found)}")
    written(output)


def _runs(plan: Plan) -> str:
    from galvatron_lite.plans.execution import check_runs

    try:
        check_runs(plan)
    except InputError as error:
        return f"no. {error}"
    return "yes"


def compare_command(
    plans: Annotated[
        list[Path], typer.Argument(help="Plan files, two or more: ours, by hand (docs/evaluate.md), Hetu-Galvatron's.")
    ],
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
    """Compare plans of one model, all priced with the same profile."""
    setup = options.arguments(locals())
    from galvatron_lite import api_plans

    comparison = api_plans.compare(list(plans), profile, **setup)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: Comparison) -> None:
    console = wide_console()
    console.print(f"{comparison.model}, all priced with {comparison.basis}", style="bold")
    for plan in comparison.plans:
        console.print(f"  {plan.name}: {plan.headline}")
    console.print()
    table = plain_table("", *(plan.name for plan in comparison.plans))
    for name, cells in _figures(comparison):
        table.add_row(name, *cells)
    console.print(table)
    _print_layers(console, comparison)
    console.print()
    for buys in comparison.buys:
        console.print(f"{buys.name} against {comparison.plans[0].name}: {buys.said}.")
    for note in comparison.notes:
        console.print(f"Note: {note}.")


def _figures(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    plans = comparison.plans
    yield "step", [format_seconds(plan.step_seconds) for plan in plans]
    yield "samples/s", [format_count(plan.samples_per_second) for plan in plans]
    if any(_differs(plan) for plan in plans):
        yield "step, as its file says", [_file_prediction(plan) for plan in plans]
    for part in plans[0].time:
        if any(plan.time[part] > 0 for plan in plans):
            yield f"  {part}", [format_seconds(plan.time[part]) for plan in plans]
    yield "memory", [format_bytes(plan.peak_bytes) + ("" if plan.fits else " (does not fit)") for plan in plans]
    for field in fields(plans[0].memory):
        sizes = [int(getattr(plan.memory, field.name)) for plan in plans]
        if any(sizes):
            yield f"  {field.name}", [format_bytes(size) for size in sizes]


def _differs(plan: Compared) -> bool:
    said = plan.said_step_seconds
    return said is not None and abs(said / plan.step_seconds - 1.0) > 1e-6


def _file_prediction(plan: Compared) -> str:
    return "–" if plan.said_step_seconds is None else format_seconds(plan.said_step_seconds)


def _print_layers(console: Console, comparison: Comparison) -> None:
    console.print()
    if not comparison.layers:
        console.print("All layers are split alike.")
        return
    names = [plan.name for plan in comparison.plans]
    table = plain_table("layers that differ", *names)
    for row in comparison.layers:
        label = row.first if row.count == 1 else f"{row.first} … {row.last} ({row.count})"
        table.add_row(label, *row.strategies)
    console.print(table)
