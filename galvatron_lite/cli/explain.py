"""``galvatron explain``: why a plan is as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, progress_bar, wide_console
from galvatron_lite.units import format_budget, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.analysis.explanation import Explanation, MemoryPrice, Neighbour, RunChoice, TimeAccount, Trust


_SHOWN_RUNS = 8
"""Runs of layers that are shown with their neighbours; of more the ones that take most of the step."""


def print_explanation(explanation: Explanation) -> None:
    """Everything an explanation says, the most asked-for first."""
    console = wide_console()
    console.print(explanation.headline, style="bold")
    console.print(f"{_step(explanation)}\n")
    _print_bounds(console, explanation)
    _print_price(console, explanation.price)
    _print_time(console, explanation.time)
    _print_runs(console, explanation)
    _print_runners_up(console, explanation)
    _print_what_ifs(console, explanation)
    _print_trust(console, explanation.trust)
    for line in explanation.left_out:
        console.print(f"Not said: {line}.")
    for line in explanation.notes:
        console.print(f"Note: {line}.")


def _step(explanation: Explanation) -> str:
    line = (
        f"{format_seconds(explanation.step_seconds)} a step, {format_count(explanation.samples_per_second)} samples/s"
    )
    if explanation.best_step_seconds is None:
        return f"{line}."
    lost = explanation.step_seconds - explanation.best_step_seconds
    if lost <= 1e-6 * explanation.step_seconds:
        return f"{line}: no plan within its budget was found to be faster."
    return f"{line}: {format_seconds(lost)} more than the fastest plan found within its budget."


def signed_seconds(seconds: float) -> str:
    """``+12 ms``, ``-3.1 s``, ``0``."""
    return "0" if abs(seconds) < 5e-8 else f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def signed_bytes(size: int) -> str:
    """``+1.2 GiB``, ``-30 MiB``, ``0``."""
    return f"{'+' if size > 0 else ''}{format_bytes(size)}" if size else "0"


def _print_bounds(console: Console, explanation: Explanation) -> None:
    if not explanation.bounds:
        return
    console.print("What binds", style="bold")
    for bound in explanation.bounds:
        console.print(f"  {'binds  ' if bound.binds else '       '} {bound.said}")
    console.print()


def _print_price(console: Console, price: MemoryPrice | None) -> None:
    if price is None:
        return
    console.print("Price of memory", style="bold")
    among = ", among plans of this pipeline, micro-batches and schedule" if price.same_shape else ""
    sure = "" if price.proven else f" (not proven: either plan may be {price.gap:.2%} from the fastest)"
    console.print(
        f"  {format_budget(price.added_bytes)} more on every device saves {_saved(price)}{among}; "
        f"now {format_seconds(price.step_seconds)} with {format_budget(price.budget_bytes)}{sure}"
    )
    for step in price.steps:
        saved = _against(step.step_seconds, price.step_seconds)
        console.print(f"  from {format_budget(step.budget_bytes, up=True)}: {saved}  {step.summary}")
    if price.less_bytes:
        lost = price.less_step_seconds
        then = "no plan fits" if lost is None else _against(lost, price.step_seconds)
        console.print(f"  with {format_budget(price.less_bytes)} less: {then}")
    console.print()


def _saved(price: MemoryPrice) -> str:
    saved = price.step_seconds - price.then_step_seconds
    if saved <= 0:
        return "nothing"
    each = "" if price.added_bytes == 2**30 else f" ({format_seconds(price.seconds_per_gib)} a GiB)"
    return f"{format_seconds(saved)} a step{each}"


def _against(seconds: float, now: float) -> str:
    """A step time beside the one now: as much less or more, which rounding would hide."""
    return "as long" if seconds == now else f"{signed_seconds(seconds - now)}"


def _print_time(console: Console, time: TimeAccount | None) -> None:
    from galvatron_lite.analysis.explanation import TimeClass

    if time is None:
        return
    known = {"shared out": "; classes of operation shared out by data sheets", "": ""}.get(time.operations, "")
    console.print(f"Where the step goes (devices of group {time.group}, the busiest{known})", style="bold")
    table = plain_table("", "", "", "")
    for what in TimeClass:
        parts = [part for part in time.parts if part.what is what]
        if parts:
            names = [
                f"{part.name} {format_seconds(part.seconds)}"
                + (f" + {format_seconds(part.hidden_seconds)} hidden" if part.hidden_seconds > 0 else "")
                for part in parts
            ]
            seconds = time.seconds_of(what)
            table.add_row(
                f"  {what.value}", format_seconds(seconds), f"{seconds / time.step_seconds:.1%}", ", ".join(names)
            )
    console.print(table)
    console.print()


def _print_runs(console: Console, explanation: Explanation) -> None:
    if not explanation.runs:
        return
    console.print("What was chosen, and what it buys (all else equal)", style="bold")
    largest = sorted(explanation.runs, key=lambda run: -run.step_seconds * len(run.stages))[:_SHOWN_RUNS]
    table = plain_table("", "step", "a device", "")
    for run in (run for run in explanation.runs if run in largest):
        table.add_row(f"{_layers(run)}: {run.strategy}", format_seconds(run.step_seconds), "", _where(run, explanation))
        for cells in _rows(run):
            table.add_row(*cells)
    console.print(table)
    if len(explanation.runs) > len(largest):
        console.print(f"… {len(explanation.runs) - len(largest)} more runs of layers in --json")
    console.print()


def _layers(run: RunChoice) -> str:
    return run.first if run.layers == 1 else f"{run.first} … {run.last} ({run.layers})"


def _where(run: RunChoice, explanation: Explanation) -> str:
    if len(explanation.memory) == 1:
        return ""
    numbers = run.stages
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} … {numbers[-1]} ({len(numbers)})"


def _rows(run: RunChoice) -> Iterator[tuple[str, str, str, str]]:
    for other in run.neighbours:
        fits = "" if other.fits else "does not fit"
        yield f"  {_named(other)}", signed_seconds(other.added_step_seconds), signed_bytes(other.added_bytes), fits


def _named(other: Neighbour) -> str:
    return f"{'without ' if other.off else ''}{other.dimension}: {other.strategy}"


def _print_runners_up(console: Console, explanation: Explanation) -> None:
    if not explanation.runners_up:
        return
    console.print("Runner-up in each dimension (quick searches, not proven)", style="bold")
    table = plain_table("", "here", "instead", "loses", "memory", "plan")
    for other in explanation.runners_up:
        cells = (other.dimension, other.chosen, other.instead, signed_seconds(other.added_step_seconds))
        size = format_bytes(other.peak_bytes)
        table.add_row(f"  {cells[0]}", *cells[1:], size if other.fits else f"{size}: does not fit", other.summary)
    console.print(table)
    console.print()


def _print_what_ifs(console: Console, explanation: Explanation) -> None:
    if not explanation.what_ifs:
        return
    console.print("What if (each planned anew)", style="bold")
    open_ = any(other.gap for other in explanation.what_ifs)
    table = plain_table("", "step", "samples/s", "memory", *["may be quicker by"] * open_, "plan")
    for other in explanation.what_ifs:
        if other.step_seconds is None or other.samples_per_second is None or other.peak_bytes is None:
            table.add_row(f"  {other.change}", *["–"] * (3 + open_), other.why)
            continue
        rate = format_count(other.samples_per_second)
        gain = "" if other.gain is None else f" ({other.gain:+.1%})"
        table.add_row(
            f"  {_change_label(other.change, other.devices, other.batch, explanation)}",
            format_seconds(other.step_seconds),
            f"{rate}{gain}", format_bytes(other.peak_bytes),
            *[_gap(other.gap)] * open_, other.summary,
        )  # fmt: skip
    console.print(table)
    console.print()


def _gap(gap: float) -> str:
    return "0, proven" if not gap else f"{gap:.2%}" if gap >= 1e-4 else "under 0.01%"


def _change_label(change: str, devices: int, batch: int, explanation: Explanation) -> str:
    more = [f"{devices} devices"] * (devices != explanation.devices) + [f"batch {batch}"] * (batch != explanation.batch)
    return f"{change} ({', '.join(more)})" if more else change


def _print_trust(console: Console, trust: Trust) -> None:
    console.print("How sure", style="bold")
    spread = f", spread of repetitions {trust.spread:.1%}" if trust.spread else ""
    console.print(f"  layers: {trust.layers}, {trust.layers_source}{spread}")
    residual = "" if trust.links_residual is None else f", fitted lines off by {trust.links_residual:.0%} (median)"
    console.print(f"  links: {trust.communication}, {trust.communication_source}{residual}")
    for own in trust.constants:
        fitted = f"fitted to {own.rows} published runs, off by {own.residual:.1%} on them" if own.rows else "not fitted"
        console.print(f"  constants {own.name}: {fitted}")
    if trust.error is not None:
        console.print(f"  off by {trust.error:.1%} on average: {trust.error_of}")
    for line in trust.missing:
        console.print(f"  not known: {line}")


def explain_command(
    plan: Annotated[
        Path, typer.Argument(help="Plan file: ours, written by hand (docs/evaluate.md), or Hetu-Galvatron's JSON.")
    ],
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: options.Gpus = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    mem: options.Memory = None,
    no_what_if: Annotated[
        bool, typer.Option("--no-what-if", help="Plan nothing anew: no runner-ups, no what-ifs; answers at once.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, max=1e6, help="For planning anew; what there is no time for is said.")
    ] = 120.0,
    fix: options.Fix = None,
    forbid: options.Forbid = None,
    schedule: options.Schedule = None,
    allow_delay: options.AllowDelay = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Explain a plan: what limits it, and what each choice gains.

    Also where the time goes, and what would change the plan. Searches again with --fix, --forbid and --schedule: give
    those that the plan was made with.
    """
    from galvatron_lite import api_plans

    setup = options.arguments(
        model=model, cluster=cluster, gpus=gpus, sequence=sequence, precision=precision, mem=mem, fix=fix or (),
        forbid=forbid or (), schedules=schedule, allow_delay=allow_delay,
    )  # fmt: skip
    with progress_bar("Planning again", quiet=as_json) as progress:
        setup["progress"] = progress
        explanation = api_plans.explain(plan, profile, what_if=not no_what_if, seconds=seconds, **setup)
    if as_json:
        print_json(explanation)
    else:
        print_explanation(explanation)
