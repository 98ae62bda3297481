"""``galvatron compare``: plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, wide_console
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from galvatron_lite.analysis.explanation import Compared, Comparison


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
    mem: options.Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare plans of one model, all priced with the same profile."""
    from galvatron_lite import api_plans

    setup = options.arguments(model=model, cluster=cluster, gpus=gpus, sequence=sequence, precision=precision, mem=mem)
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
    from dataclasses import fields

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
