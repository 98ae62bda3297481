"""``galvatron explain``: why a plan is as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import plain_table, print_json, progress_bar, wide_console
from galvatron_lite.units import format_budget, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.analysis.explanation import Explanation, MemoryPrice, RunChoice, TimeAccount, Trust, WhatIf


_SHOWN_RUNS = 8
"""Runs of layers that are shown with their neighbours; of more the ones that take most of the step."""


def _print_explanation(explanation: Explanation) -> None:
    console = wide_console()
    console.print(explanation.headline, style="bold")
    console.print(f"{_step(explanation)}\n")
    if explanation.bounds:
        console.print("What limits the step", style="bold")
        for bound in explanation.bounds:
            console.print(f"  {'limits ' if bound.binds else '       '} {bound.said}")
        console.print()
    if explanation.price is not None:
        _print_price(console, explanation.price)
    if explanation.time is not None:
        _print_time(console, explanation.time)
    if explanation.runs:
        _print_runs(console, explanation)
    if explanation.runners_up:
        _print_runners_up(console, explanation)
    if explanation.what_ifs:
        _print_what_ifs(console, explanation)
    _print_trust(console, explanation.trust)
    for line in explanation.left_out:
        console.print(f"Skipped: {line}.")
    for line in explanation.notes:
        console.print(f"Note: {line}.")


def _step(explanation: Explanation) -> str:
    rate = format_count(explanation.samples_per_second)
    line = f"{format_seconds(explanation.step_seconds)} a step, {rate} samples/s"
    if explanation.best_step_seconds is None:
        return f"{line}."
    lost = explanation.step_seconds - explanation.best_step_seconds
    if lost <= 1e-6 * explanation.step_seconds:
        return f"{line}: the search finds no faster plan within its budget."
    return f"{line}: {format_seconds(lost)} more than the fastest plan within its budget."


def _signed_seconds(seconds: float) -> str:
    return "0" if abs(seconds) < 5e-8 else f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _signed_bytes(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_bytes(size)}" if size else "0"


def _print_price(console: Console, price: MemoryPrice) -> None:
    def against(seconds: float) -> str:
        return "as long" if seconds == price.step_seconds else _signed_seconds(seconds - price.step_seconds)

    console.print("Price of memory", style="bold")
    saved = price.step_seconds - price.then_step_seconds
    words = "nothing" if saved <= 0 else f"{format_seconds(saved)} a step"
    if saved > 0 and price.added_bytes != 2**30:
        words += f" ({format_seconds(price.seconds_per_gib)} a GiB)"
    among = ", among plans of this pipeline, micro-batches and schedule" if price.same_shape else ""
    sure = "" if price.proven else f" (not proven: either plan may be {price.gap:.2%} from the fastest)"
    console.print(
        f"  {format_budget(price.added_bytes)} more on every device saves {words}{among}; "
        f"now {format_seconds(price.step_seconds)} with {format_budget(price.budget_bytes)}{sure}"
    )
    for step in price.steps:
        budget = format_budget(step.budget_bytes, up=True)
        console.print(f"  from {budget}: {against(step.step_seconds)}  {step.summary}")
    if price.less_bytes:
        lost = price.less_step_seconds
        then = "no plan fits" if lost is None else against(lost)
        console.print(f"  with {format_budget(price.less_bytes)} less: {then}")
    console.print()


def _print_time(console: Console, time: TimeAccount) -> None:
    from galvatron_lite.analysis.explanation import TimeClass

    note = "; classes of operation shared out by data sheets" if time.operations == "shared out" else ""
    console.print(f"Where the step goes (devices of group {time.group}, the busiest{note})", style="bold")
    table = plain_table("", "", "", "")
    for what in TimeClass:
        parts = [part for part in time.parts if part.what is what]
        names = [
            f"{part.name} {format_seconds(part.seconds)}"
            + (f" + {format_seconds(part.hidden_seconds)} hidden" if part.hidden_seconds > 0 else "")
            for part in parts
        ]
        if parts:
            seconds = time.seconds_of(what)
            share = f"{seconds / time.step_seconds:.1%}"
            table.add_row(f"  {what.value}", format_seconds(seconds), share, ", ".join(names))
    console.print(table)
    console.print()


def _print_runs(console: Console, explanation: Explanation) -> None:
    console.print("What each choice gains (all else equal)", style="bold")
    largest = sorted(explanation.runs, key=lambda run: -run.step_seconds * len(run.stages))[:_SHOWN_RUNS]
    table = plain_table("", "step", "a device", "")
    for run in (run for run in explanation.runs if run in largest):
        layers = run.first if run.layers == 1 else f"{run.first} … {run.last} ({run.layers})"
        where = "" if len(explanation.memory) == 1 else _stages(run)
        table.add_row(f"{layers}: {run.strategy}", format_seconds(run.step_seconds), "", where)
        for other in run.neighbours:
            name = f"  {'without ' if other.off else ''}{other.dimension}: {other.strategy}"
            fits = "" if other.fits else "does not fit"
            table.add_row(name, _signed_seconds(other.added_step_seconds), _signed_bytes(other.added_bytes), fits)
    console.print(table)
    if len(explanation.runs) > len(largest):
        console.print(f"… {len(explanation.runs) - len(largest)} more runs of layers in --json")
    console.print()


def _stages(run: RunChoice) -> str:
    first, last = run.stages[0], run.stages[-1]
    return f"stage {first}" if len(run.stages) == 1 else f"stages {first} … {last} ({len(run.stages)})"


def _print_runners_up(console: Console, explanation: Explanation) -> None:
    console.print("Runner-up in each dimension (quick searches, not proven)", style="bold")
    table = plain_table("", "here", "instead", "loses", "memory", "plan")
    for other in explanation.runners_up:
        size = format_bytes(other.peak_bytes) + ("" if other.fits else ": does not fit")
        loses = _signed_seconds(other.added_step_seconds)
        table.add_row(f"  {other.dimension}", other.chosen, other.instead, loses, size, other.summary)
    console.print(table)
    console.print()


def _print_what_ifs(console: Console, explanation: Explanation) -> None:
    console.print("What if (a search for each)", style="bold")
    unproven = any(other.gap for other in explanation.what_ifs)
    table = plain_table("", "step", "samples/s", "memory", *["may be quicker by"] * unproven, "plan")
    for other in explanation.what_ifs:
        if other.step_seconds is None or other.samples_per_second is None or other.peak_bytes is None:
            table.add_row(f"  {other.change}", *["–"] * (3 + unproven), other.why)
            continue
        rate = format_count(other.samples_per_second) + ("" if other.gain is None else f" ({other.gain:+.1%})")
        gap = "0, proven" if not other.gap else f"{other.gap:.2%}" if other.gap >= 1e-4 else "under 0.01%"
        table.add_row(
            f"  {_change(other, explanation)}", format_seconds(other.step_seconds), rate,
            format_bytes(other.peak_bytes), *[gap] * unproven, other.summary,
        )  # fmt: skip
    console.print(table)
    console.print()


def _change(other: WhatIf, explanation: Explanation) -> str:
    more = [f"{other.devices} devices"] * (other.devices != explanation.devices)
    more += [f"batch {other.batch}"] * (other.batch != explanation.batch)
    return f"{other.change} ({', '.join(more)})" if more else other.change


def _print_trust(console: Console, trust: Trust) -> None:
    console.print("Prediction accuracy", style="bold")
    spread = f", spread of repetitions {trust.spread:.1%}" if trust.spread else ""
    console.print(f"  layers: {trust.layers}, {trust.layers_source}{spread}")
    residual = "" if trust.links_residual is None else f", fitted lines off by {trust.links_residual:.0%} (median)"
    console.print(f"  links: {trust.communication}, {trust.communication_source}{residual}")
    for constants in trust.constants:
        fit = f"fitted to {constants.rows} published runs, off by {constants.residual:.1%} on them"
        console.print(f"  constants {constants.name}: {fit if constants.rows else 'not fitted'}")
    if trust.error is not None:
        console.print(f"  off by {trust.error:.1%} on average: {trust.error_of}")
    for line in trust.missing:
        console.print(f"  not known: {line}")


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
    no_what_if: Annotated[
        bool, typer.Option("--no-what-if", help="Search for nothing: no runner-ups, no what-ifs; answers at once.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0, max=1e6, help="For these searches; what there is no time for is skipped."),
    ] = 120.0,
    fix: options.Fix = None,
    forbid: options.Forbid = None,
    schedules: options.Schedule = None,
    allow_delay: options.AllowDelay = False,
    as_json: options.Json = False,
) -> None:
    """Explain a plan: what limits it, and what each choice gains.

    Also where the time goes, and what would change the plan. Searches again with --fix, --forbid and --schedule: give
    those that the plan was made with.
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
