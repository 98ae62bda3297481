"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from galvatron_lite.plans.describe import (
    branch_rows,
    fullest_of,
    group_label,
    headline,
    memory_bar,
    memory_parts,
    shown_groups,
    stage_rows,
    time_line,
)
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.plans.schema import Alternative, Plan, Provenance
    from galvatron_lite.profiler.schema import Profile


def print_plan(plan: Plan, source: str, accuracy: str = "") -> None:
    """The plan, memory against the budget, where the time goes, and the runner-ups.

    Args:
        plan: what to print.
        source: what its costs come from.
        accuracy: how far off they may be; nothing is said where it is empty.
    """
    from galvatron_lite.cli.console import wide_console

    console = wide_console()
    console.print(headline(plan), style="bold")
    console.print(f"From {source}.\n")
    _print_layers(console, plan)
    _print_memory(console, plan)
    _print_time(console, plan, accuracy)
    _print_alternatives(console, plan)
    for reason in plan.left_out:
        if not _expected(reason):
            console.print(f"Note: {reason}")
    for note in plan.provenance.notes if plan.provenance else ():
        console.print(f"Note: {note}.")


def _expected(reason: str) -> bool:
    """Whether a reason is of every plan: what lies before and after the blocks is small and splits in few ways."""
    said = (": ", " offers", " has no parameters")
    return any(f": {edge}{one}" in reason for edge in ("before", "after") for one in said)


def _print_layers(console: Console, plan: Plan) -> None:
    from rich.table import Table

    table = Table("stage", "layers", "strategy", box=None, pad_edge=False, header_style="bold")
    for row in stage_rows(plan):
        table.add_row(row.stage, row.layers, row.strategy)
    for row in branch_rows(plan):
        table.add_row(row.stage, row.layers, row.strategy)
    console.print(table)
    console.print()


def _print_memory(console: Console, plan: Plan) -> None:
    if plan.prediction is None or plan.provenance is None:
        return
    provenance = plan.provenance
    console.print("Memory on each device of a stage", style="bold")
    fullest = fullest_of(plan.stages, provenance)
    shown = shown_groups(plan, fullest)
    width = max(3, *(len(group_label(group)) for group in shown if group))
    for group in shown:
        console.print(f"  {group_label(group) if group else '…':>{width}} {_bar(plan, provenance, group)}".rstrip())
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_parts(fullest.memory))
    console.print(f"  fullest: {parts}")
    if provenance.margin:
        console.print(
            f"  margin: {provenance.margin:.1%} of the budget is kept free, as measured peaks may be above predictions"
        )
    console.print()


def _bar(plan: Plan, provenance: Provenance, group: range | None) -> str:
    """Memory of the fullest of some stages; nothing for those that are not shown."""
    if group is None:
        return ""
    stage = fullest_of([plan.stages[number] for number in group], provenance)
    return memory_bar(stage, provenance.budget_of(stage)) + " at most" * (len(group) > 1)


def _print_time(console: Console, plan: Plan, accuracy: str) -> None:
    if plan.prediction is None:
        return
    prediction = plan.prediction
    console.print("Time", style="bold")
    console.print(f"  {time_line(plan)}")
    tokens = f", {format_count(prediction.tokens_per_second)} tokens/s" * (
        prediction.tokens_per_second != prediction.samples_per_second
    )
    mfu = f", MFU {prediction.mfu:.1%}" if prediction.mfu else ""
    console.print(f"  {format_count(prediction.samples_per_second)} samples/s{tokens}{mfu}")
    if plan.provenance is not None:
        if plan.provenance.most_seconds:
            console.print(
                f"  {_range(plan.provenance).strip(' ()')} where links between nodes run at half rate, less is hidden "
                "behind compute, or kernels are 10% slower or quicker"
            )
        console.print(f"  search: {_proof(plan.provenance)}; costs {plan.provenance.profile_origin}")
    if accuracy:
        console.print(f"  {accuracy}")
    console.print()


def _proof(provenance: Provenance) -> str:
    from galvatron_lite.plans.schema import Proof

    if provenance.proof is Proof.PROVEN and provenance.gap:
        return f"within {max(provenance.gap, 1e-4):.2%} of the best possible (proven in the closed form)"
    told = f"at most {max(provenance.gap, 1e-4):.2%}"
    gap = f" ({told} from the best)" if provenance.gap else ""
    if provenance.interrupted:
        return f"interrupted; {provenance.proof.value}, at most {provenance.gap:.1%} from the best"
    return f"{provenance.proof.value}{gap}"


def _range(of: Alternative | Provenance) -> str:
    """The least and the most seconds of a step over scenarios; empty where nobody asked."""
    return f" ({format_seconds(of.least_seconds)} to {format_seconds(of.most_seconds)})" if of.most_seconds else ""


def _print_alternatives(console: Console, plan: Plan) -> None:
    from rich.table import Table

    if not plan.alternatives or plan.prediction is None:
        return
    table = Table(
        "runner-up (not proven)",
        "step",
        "slower by",
        "memory",
        "fits",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for other in plan.alternatives:
        slower = other.step_seconds / plan.prediction.step_seconds - 1
        table.add_row(
            other.summary,
            format_seconds(other.step_seconds) + _range(other),
            f"{slower:+.0%}",
            format_bytes(other.peak_memory),
            "yes" if other.fits else "no",
        )
    console.print(table)


def print_profile(profile: Profile, where: str) -> None:
    """A profile in short: the machine, each kind of layer, branches, the links, the fits' residuals."""
    from rich.table import Table

    from galvatron_lite.cli.branches import print_branches, shown_point
    from galvatron_lite.cli.console import wide_console

    console = wide_console()
    graph, origin = profile.graph, profile.origin
    console.print(
        f"{profile.name}: {format_count(graph.parameters)} parameters in {len(graph.layers)} layers, "
        f"{' and '.join(f'{group.count} x {group.device.name}' for group in profile.cluster.groups)}",
        style="bold",
    )
    console.print(
        f"{origin.kind.value}: {origin.source}; {len(profile.layers)} layer points, spread {origin.spread:.1%}"
    )
    names = ("kind", "layers", "samples", "forward", "backward", "kept")
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for kind in graph.kinds:
        point = shown_point(profile, kind)
        count = sum(layer.kind == kind for layer in graph.layers)
        cells = ("", "", "", "") if point is None else (
            f"{float(point.samples):g}", format_seconds(point.forward), format_seconds(point.backward),
            format_bytes(point.kept),
        )  # fmt: skip
        table.add_row(kind, str(count), *cells)
    console.print(table)
    print_branches(console, profile)
    _print_links(console, profile)
    for note in graph.notes:
        console.print(f"Note: {note}")
    console.print(f"Written to {where}.")


def _print_links(console: Console, profile: Profile) -> None:
    from rich.table import Table

    if not profile.fits:
        return
    table = Table(
        "collective", "ranks", "latency", "bandwidth", "residual", box=None, pad_edge=False, header_style="bold"
    )
    for fit in profile.fits:
        ranks = f"{fit.group}" + (f", {fit.stride} apart" if fit.stride > 1 else "")
        speed = f"{format_bytes(fit.bandwidth)}/s"
        table.add_row(fit.collective.value, ranks, format_seconds(fit.latency), speed, f"{fit.residual:.0%}")
    console.print(table)
