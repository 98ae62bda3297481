"""``galvatron plan --phases``: the plan of every phase of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from galvatron_lite.api import Setup
    from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase
    from galvatron_lite.profiler.schema import Profile


def refuse_beside_phases(question: str, **options: object) -> None:
    """Refuse options that are of a single plan.

    Raises:
        InputError: names the first.
    """
    from galvatron_lite.errors import InputError

    for name, value in {**({question: True} if question else {}), **options}.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')}", value, "It is not for a run in phases: leave out --phases.")


def plan_in_phases(
    path: Path, profile_at: Callable[[int | None], Profile], setup: Setup, output: Path | None, as_json: bool
) -> None:
    """Plan the phases of a file, print and write the answer.

    Args:
        path: of the phases.
        profile_at: the profile of so many tokens a sample.
        setup: of the plans.
        output: where to write the plan in phases.
        as_json: whether to print it as JSON.

    Raises:
        InputError: see ``api.plan_phases``.
        InfeasibleError: see there.
    """
    import json

    import typer

    from galvatron_lite import api
    from galvatron_lite.cli.progress import search_progress
    from galvatron_lite.files import to_data
    from galvatron_lite.plans.phases import write_phased_plan

    with search_progress(quiet=as_json) as progress:
        asked: Setup = {**setup, "progress": progress}
        found = api.plan_phases(path, profile_at, **asked)
    if output is not None:
        write_phased_plan(found, output)
    if as_json:
        typer.echo(json.dumps(to_data(found) | {"seconds": found.seconds}))
        return
    _print(found)
    if output is not None:
        typer.echo(f"Written to {output}.")


def _print(found: PhasedPlan) -> None:
    from rich.table import Table

    from galvatron_lite.cli.console import wide_console
    from galvatron_lite.search.result import summary
    from galvatron_lite.units import format_duration

    console = wide_console()
    first = found.phases[0].plan
    of = first.provenance.profile_origin if first.provenance else "unknown"
    console.print(f"{first.model} on {first.devices} devices in {len(found.phases)} phases", style="bold")
    console.print(f"Costs {of}; switches estimated.\n")
    names = ("phase", "steps", "batch", "sequence", "step", "memory", "takes")
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for phase in found.phases:
        table.add_row(*_row(phase))
    console.print(table)
    console.print()
    for phase in found.phases:
        console.print(f"{phase.name}: {summary(phase.plan)}{_change(phase)}")
    console.print(f"\nThe run: {format_duration(found.seconds)}{_beside(found)}.")


def _row(phase: PlannedPhase) -> tuple[str, ...]:
    from galvatron_lite.units import format_bytes, format_count, format_duration, format_seconds

    prediction = phase.plan.prediction
    step, peak = (0.0, 0) if prediction is None else (prediction.step_seconds, prediction.peak_memory)
    counts = (format_count(phase.steps), str(phase.plan.global_batch), str(phase.sequence))
    return (phase.name, *counts, format_seconds(step), format_bytes(peak), format_duration(phase.seconds))


def _change(phase: PlannedPhase) -> str:
    """The switch before a phase, in words; empty where there is none."""
    from galvatron_lite.units import format_bytes, format_seconds

    switch = phase.switch
    if switch is None:
        return ""
    return f" (after a switch of {format_seconds(switch.seconds)}, {format_bytes(switch.received)} to each device)"


def _beside(found: PhasedPlan) -> str:
    """How that compares with never switching, and with always."""
    from galvatron_lite.units import format_duration

    single, always = found.single_seconds, found.always_seconds
    one = "no one plan fits all phases" if single is None else f"{format_duration(single)} under one plan throughout"
    every = "" if always is None else f", {format_duration(always)} with the fastest plan in every phase"
    return f" ({one}{every})"
