"""``galvatron verify``: whether a plan does what it says, tested without its cluster."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron_lite.capture.named import find_factory, is_factory
from galvatron_lite.cli.terminal import interruptible, plain_table, print_json, progress_bar, wide_console
from galvatron_lite.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.plans.schema import MemoryBreakdown, Plan
    from galvatron_lite.verify.schema import Message, RoleRun, Verification


_STYLES = {"passed": "green", "differs": "yellow", "failed": "bold red", "skipped": "yellow"}


def _print_verification(verification: Verification, plan: Plan, moments: bool) -> None:
    console = wide_console()
    _verdicts(console, verification)
    if not verification.roles:
        return
    role = max(verification.roles, key=lambda run: run.peak.total)
    _memory(console, role, plan)
    _messages(console, role)
    if moments:
        _moments(console, role)


def _verdicts(console: Console, verification: Verification) -> None:
    from rich.text import Text

    table = plain_table("check", "verdict", "")
    for check in verification.checks:
        table.add_row(Text(check.name), Text(check.verdict.value, style=_STYLES[check.verdict.value]), Text(check.said))
    console.print(table)
    for check in verification.checks:
        if check.details:
            console.print(f"\n{check.name}", style="bold")
            for line in check.details:
                console.print(f"  {line}")


def _predicted_memory(plan: Plan, group: int) -> MemoryBreakdown | None:
    from galvatron_lite.parallelism.pipeline.schedule import group_of

    if plan.prediction is None:
        return None
    own = [
        stage.memory
        for number, stage in enumerate(plan.stages)
        if group_of(plan.schedule, plan.pipeline, number) == group
    ]
    return max(own, key=lambda memory: memory.total)


def _memory(console: Console, role: RoleRun, plan: Plan) -> None:

    predicted = _predicted_memory(plan, role.stage)
    table = plain_table("memory at its worst", "dry run", "predicted")
    names = [one.name for one in fields(role.peak) if one.name != "context"]
    for name in names:
        own, other = getattr(role.peak, name), None if predicted is None else getattr(predicted, name)
        if own or other:
            table.add_row(name, format_bytes(own), "" if other is None else format_bytes(other))
    whole = None if predicted is None else predicted.total - predicted.context
    off = "" if not whole else f" ({(role.peak.total - role.peak.context) / whole - 1:+.1%})"
    total = format_bytes(role.peak.total - role.peak.context) + off
    table.add_row("together", total, "" if whole is None else format_bytes(whole))
    console.print(f"\nThe fullest of {_roles(role)}", style="bold")
    console.print(table)


def _arriving(one: Message) -> int:
    """Bytes of what this rank is sent; of another message nothing, where it gives nothing."""
    from galvatron_lite.verify.schema import MessageType

    bits = "".join(filter(str.isdigit, one.dtype))
    return prod(one.shape) * (int(bits) // 8 if bits else 1) if one.kind is MessageType.RECEIVE else 0


def _roles(role: RoleRun) -> str:
    played = f"rank {role.rank}" if len(role.ranks) == 1 else f"rank {role.rank} (and {len(role.ranks) - 1} like it)"
    return f"all roles: {played}, stage {role.stage}" + (f", {role.role}" if role.role else "")


def _messages(console: Console, role: RoleRun) -> None:
    from galvatron_lite.verify.schema import During

    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for one in role.messages:
        if one.phase is not During.SETUP:
            key = one.kind.value, one.purpose, len(one.ranks)
            count, size = sums.get(key, (0, 0))
            sums[key] = count + 1, size + (one.bytes or _arriving(one))
    if not sums:
        console.print("\nIt sends nothing in a step.")
        return
    table = plain_table("messages a step", "for", "ranks", "count", "bytes")
    for (kind, purpose, ranks), (count, size) in sorted(sums.items(), key=lambda item: -item[1][1]):
        table.add_row(kind, purpose, str(ranks), format_count(count), format_bytes(size))
    console.print()
    console.print(table)


def _moments(console: Console, role: RoleRun) -> None:
    from rich.table import Table

    table = Table("phase", "micro-batch", "layer", "memory", "activations", box=None, header_style="bold")
    for one in role.samples:
        number = str(one.microbatch) if one.microbatch >= 0 else ""
        sizes = format_bytes(one.memory.total), format_bytes(one.memory.activations)
        table.add_row(one.phase.value, number, one.layer, *sizes)
    console.print()
    console.print(table)


def verify_command(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="FILE.py:FACTORY returning the model, (model, batch) or (model, batch, loss_fn); or a name "
            "(gpt-tiny, llama3-70b); what the plan was made from if not given.",
        ),
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a sample, for a model by name.")] = None,
    checks: Annotated[
        str | None, typer.Option("--checks", help="Some of the checks, with commas between; all if not given.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Profile to price messages with; the one the plan was made from if not given."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="The most that numbers starts; 4, or 8 where the plan needs them.")
    ] = None,
    moments: Annotated[
        bool, typer.Option("--steps", help="Show memory of the fullest role step by step, layer after layer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check a plan without its cluster.

    Runs it without data and compares with its predictions: one verdict a check. Exit status 1 if a check fails.
    """
    import os

    # processes of our own and tensors without storages make torch warn of what nobody here can act on
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from galvatron_lite.api_plans import verify_plan
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.verify.schema import Checks, checks_named

    wanted, given = tuple(Checks) if checks is None else checks_named(checks), read_plan(plan)
    with interruptible("interrupted"), progress_bar("Verifying", quiet=as_json, lines=True) as progress:
        found = verify_plan(
            given, _target(model), sequence=sequence, checks=wanted, processes=processes, progress=progress,
            profile=profile,
        )  # fmt: skip
    if as_json:
        print_json(found, passed=found.passed)
    else:
        _print_verification(found, given, moments)
    if not found.passed:
        raise typer.Exit(1)


def _target(model: str | None) -> Any:
    return model if model is None or not is_factory(model) else find_factory(model)
