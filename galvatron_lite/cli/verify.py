"""``galvatron verify``: check a plan without its cluster."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from galvatron_lite.capture.named import find_factory, is_factory
from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import interruptible, plain_table, print_json, progress_bar, wide_console
from galvatron_lite.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.verify.schema import Message, RoleRun, Verification


_STYLES = {"passed": "green", "differs": "yellow", "failed": "bold red", "skipped": "yellow"}


def _print_verification(verification: Verification, plan: Plan, moments: bool) -> None:
    from rich.text import Text

    console = wide_console()
    table = plain_table("check", "verdict", "")
    for check in verification.checks:
        table.add_row(Text(check.name), Text(check.verdict.value, style=_STYLES[check.verdict.value]), Text(check.said))
    console.print(table)
    for check in verification.checks:
        if check.details:
            console.print("\n".join((f"\n{check.name}", *(f"  {line}" for line in check.details))))
    if verification.roles:
        role = max(verification.roles, key=lambda run: run.peak.total)
        _print_memory(console, role, plan)
        _print_messages(console, role)
        if moments:
            _print_moments(console, role)


def _print_memory(console: Console, role: RoleRun, plan: Plan) -> None:
    from galvatron_lite.parallelism.pipeline.schedule import group_of

    predicted = None
    if plan.prediction is not None:
        groups = [group_of(plan.schedule, plan.pipeline, number) for number in range(len(plan.stages))]
        stages = [stage for stage, group in zip(plan.stages, groups, strict=True) if group == role.stage]
        predicted = max((stage.memory for stage in stages), key=lambda memory: memory.total)
    table = plain_table("memory at its worst", "dry run", "predicted")
    for name in (item.name for item in fields(role.peak) if item.name != "context"):
        size, other = getattr(role.peak, name), None if predicted is None else getattr(predicted, name)
        if size or other:
            table.add_row(name, format_bytes(size), "" if other is None else format_bytes(other))
    total = role.peak.tensors
    expected = None if predicted is None else predicted.tensors
    off = f" ({total / expected - 1:+.1%})" if expected else ""
    table.add_row("together", format_bytes(total) + off, "" if expected is None else format_bytes(expected))
    ranks = f"rank {role.rank}" + (f" (and {len(role.ranks) - 1} like it)" if len(role.ranks) > 1 else "")
    name = f", {role.role}" if role.role else ""
    console.print(f"\nThe fullest of all roles: {ranks}, stage {role.stage}{name}", style="bold")
    console.print(table)


def _bytes_of(message: Message) -> int:
    """Bytes that a message sends, or that this rank receives."""
    from galvatron_lite.verify.schema import MessageType

    if message.bytes or message.kind is not MessageType.RECEIVE:
        return message.bytes
    bits = "".join(filter(str.isdigit, message.dtype))
    return prod(message.shape) * (int(bits) // 8 if bits else 1)


def _print_messages(console: Console, role: RoleRun) -> None:
    from galvatron_lite.verify.schema import During

    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for message in role.messages:
        if message.phase is not During.SETUP:
            key = message.kind.value, message.purpose, len(message.ranks)
            count, size = sums.get(key, (0, 0))
            sums[key] = count + message.times, size + _bytes_of(message) * message.times
    if not sums:
        console.print("\nIt sends nothing in a step.")
        return
    table = plain_table("messages a step", "for", "ranks", "count", "bytes")
    for (kind, purpose, ranks), (count, size) in sorted(sums.items(), key=lambda item: -item[1][1]):
        table.add_row(kind, purpose, str(ranks), format_count(count), format_bytes(size))
    console.print()
    console.print(table)


def _print_moments(console: Console, role: RoleRun) -> None:
    table = plain_table("phase", "micro-batch", "layer", "memory", "activations")
    for sample in role.samples:
        number = str(sample.microbatch) if sample.microbatch >= 0 else ""
        sizes = format_bytes(sample.memory.total), format_bytes(sample.memory.activations)
        table.add_row(sample.phase.value, number, sample.layer, *sizes)
    console.print()
    console.print(table)


def verify_command(
    plan: options.OurPlan,
    model: str | None = typer.Option(
        None,
        "--model",
        help="FILE.py:FACTORY that returns model, (model, batch) or (model, batch, loss_fn), or a model name. "
        "Default: what the plan was made from.",
    ),
    sequence: options.Sequence = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    checks: str | None = typer.Option(None, "--checks", help="Comma-separated checks to run. Default: all."),
    profile: Path | None = typer.Option(
        None, "--profile", help="Profile to predict communication from. Default: the one the plan was made from."
    ),
    processes: int | None = typer.Option(
        None,
        "--processes",
        help="Largest number of processes for the check `numbers`. Default: 4, or 8 if the plan needs them.",
    ),
    moments: bool = typer.Option(
        False, "--steps", help="Show the memory of the fullest device over one step, layer by layer."
    ),
    calibration: options.Calibration = None,  # noqa: ARG001  its callback chooses the constants
    as_json: options.Json = False,
) -> None:
    """Check a plan without its cluster.

    Runs the plan without data and compares it with its predictions. Exit status 1 if a check fails.
    """
    import os

    # torch warns about tensors without storages, and in the processes of the checks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from galvatron_lite.api_plans import verify_plan
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.verify.schema import Checks, checks_named

    chosen, loaded = tuple(Checks) if checks is None else checks_named(checks), read_plan(plan)
    target: Any = model if model is None or not is_factory(model) else find_factory(model)
    with interruptible("interrupted"), progress_bar("Verifying", quiet=as_json, lines=True) as progress:
        verification = verify_plan(
            loaded, target, sequence=sequence, trainable=trainable, freeze=freeze or (), checks=chosen,
            processes=processes, progress=progress, profile=profile,
        )  # fmt: skip
    if as_json:
        print_json(verification, passed=verification.passed)
    else:
        _print_verification(verification, loaded, moments)
    if not verification.passed:
        raise typer.Exit(1)
