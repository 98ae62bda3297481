"""``galvatron diagnose``, ``checkpoint`` and ``adapt``: look at a run, its checkpoints and its decisions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import check_folder, print_json
from galvatron_lite.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from galvatron_lite.diagnose.diagnosis import CollectiveRow, Diagnosis
    from galvatron_lite.diagnose.findings import Finding
    from galvatron_lite.runtime.checkpoint.manifest import Manifest
    from galvatron_lite.runtime.monitor.decide import Replayed

_Checkpoints = Annotated[Path, typer.Argument(help="Folder of one or several checkpoints.")]


def diagnose_command(
    run: Path = typer.Argument(
        ..., help="Folder that auto_parallelize(..., log=FOLDER) wrote, or traces of torch.profiler."
    ),
    profile: Path | None = typer.Option(
        None, "--profile", help="Profile that the plan was made from, if it is not found."
    ),
    plan: Path | None = typer.Option(None, "--plan", help="Plan file, if RUN holds only traces."),
    update: Path | None = typer.Option(None, "--update", help="Write the profile, corrected by the run, to this file."),
    as_json: options.Json = False,
) -> None:
    """Find where a training run differs from its prediction."""
    from galvatron_lite.api_profile import profile_of
    from galvatron_lite.diagnose.diagnosis import correct_profile, diagnose, open_source, profile_beside
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.profiler.store import read_profile, write_profile

    check_folder("--update", update)
    source = open_source(run, None if plan is None else read_plan(plan))
    priced_with = read_profile(profile) if profile is not None else profile_beside(source)
    priced_with = priced_with or profile_of(source.plan, named=False)
    diagnosis = diagnose(source, priced_with)
    changed: tuple[str, ...] = ()
    if update is not None:
        corrected, changed = correct_profile(priced_with, source)
        write_profile(corrected, update)
    if as_json:
        print_json(asdict(diagnosis) | {"corrected": list(changed)})
        return
    print_diagnosis(diagnosis)
    for line in changed:
        typer.echo(f"Corrected {line}.")
    if update is not None:
        typer.echo(f"Written to {update}: plan anew with galvatron plan --profile {update}.")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the findings, the most expensive first."""
    from galvatron_lite.diagnose.findings import rank_words

    slowed = diagnosis.untraced is not None and diagnosis.untraced < diagnosis.seconds
    seconds = diagnosis.untraced if slowed and diagnosis.untraced is not None else diagnosis.seconds
    text = f"{format_seconds(seconds)} a step, predicted {format_seconds(diagnosis.predicted)}"
    source = "traces" if diagnosis.traced else "the log"
    looked = "without the profiler" if slowed else f"{diagnosis.steps} steps, from {source}"
    typer.echo(f"{text} ({seconds / diagnosis.predicted - 1.0:+.0%}); {looked}.")
    if slowed:
        typer.echo(
            f"Causes are of {diagnosis.steps} steps, from traces. The profiler slows them: they took "
            f"{format_seconds(diagnosis.seconds)}, and it has a part in every figure below."
        )
    for line in _lines(diagnosis.findings):
        typer.echo(line)
    typer.echo(f"Not explained: {_signed(diagnosis.unexplained)} a step.")
    for row in diagnosis.memory:
        text = f"{format_bytes(row.measured)}, predicted {format_bytes(row.predicted)}"
        typer.echo(f"Memory on {rank_words(*row.ranks)}: {text}.")
    for collective in diagnosis.collectives:
        typer.echo(_collective(collective))
    for note in diagnosis.notes:
        typer.echo(f"Note: {note}")


def _collective(row: CollectiveRow) -> str:
    """The time of the collectives of one kind and group."""
    ranks, calls = ", ".join(map(str, row.ranks[:4])), f"{row.calls:g} x {row.collective.value}"
    ranks += f", … {row.ranks[-1]}" if len(row.ranks) > 4 else ""
    return (
        f"{calls} of ranks {ranks}: {format_bytes(row.bytes)} in {format_seconds(row.seconds)} a step "
        f"({format_bytes(round(row.bandwidth))}/s of the bus), predicted {format_seconds(row.predicted)}; rank "
        f"{row.slowest} comes last, the others wait {format_seconds(row.waited)}."
    )


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """What costs more than predicted, each advice only once; then what costs less."""
    if not findings:
        yield "No cause costs or saves as much as a fiftieth of a step."
    first_numbers: dict[str, int] = {}
    for number, finding in enumerate((finding for finding in findings if finding.seconds > 0), start=1):
        advice = finding.advice
        yield f"{number:>2}. {_line(finding)}"
        yield f"    {advice}" if advice not in first_numbers else f"    As for {first_numbers[advice]}."
        first_numbers.setdefault(advice, number)
    quicker = [finding for finding in findings if finding.seconds <= 0]
    if quicker:
        yield "Quicker than predicted (nothing to mend; --update corrects the profile):"
    yield from (f"    {_line(finding)}" for finding in quicker)


def _line(finding: Finding) -> str:
    stage = f"stage {finding.stage}: " if finding.stage >= 0 else ""
    measured, predicted = format_seconds(finding.measured), format_seconds(finding.predicted)
    cause = "" if finding.where.startswith(finding.cause.value) else f"{finding.cause.value}: "
    return f"{_signed(finding.seconds)}  {cause}{stage}{finding.where}: {measured} a step, predicted {predicted}."


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


checkpoint_app = typer.Typer(help="Show, check or export a checkpoint.")


@checkpoint_app.command("show")
def show_command(folder: _Checkpoints) -> None:
    """Show what a checkpoint holds, or list the checkpoints in a folder, newest first."""
    from galvatron_lite.runtime.checkpoint.manifest import checkpoints_of, read_manifest

    several = checkpoints_of(folder)
    for place in several or [folder]:
        typer.echo(f"{place}: {_describe(read_manifest(place))}")


@checkpoint_app.command("check")
def check_command(folder: _Checkpoints) -> None:
    """Compare every file of a checkpoint with its checksum. Exit status 1 if one is damaged."""
    from galvatron_lite.runtime.checkpoint.manifest import check_files, checkpoints_of

    several = checkpoints_of(folder)
    for place in several or [folder]:
        manifest = check_files(place)
        typer.echo(f"{place}: whole, {len(manifest.files)} files, {_describe(manifest)}")


@checkpoint_app.command("export")
def export_command(
    folder: Path = typer.Argument(..., help="Checkpoint folder."),
    target: Path = typer.Argument(..., help="New folder, readable by from_pretrained."),
    largest: str = typer.Option("5GB", "--largest", help="Largest size of one weight file."),
) -> None:
    """Write the weights of a checkpoint as safetensors, readable by transformers."""
    from galvatron_lite.runtime.checkpoint.huggingface import export_safetensors

    for name in export_safetensors(folder, target, largest):
        typer.echo(str(target / name))


def _describe(manifest: Manifest) -> str:
    size = sum(content.bytes for content in manifest.files.values())
    kept = "" if manifest.optimizer is None else f", states of {manifest.optimizer}"
    return f"step {manifest.step}, {manifest.processes} process(es), {format_bytes(size)}{kept}"


adapt_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
"""The command; its sub-commands read the log of ``Adapt(log=...)``."""


@adapt_app.callback()
def adapt_command() -> None:
    """Replay the decisions of a run that adapted its plan."""


@adapt_app.command("replay")
def replay_command(
    log: Path = typer.Argument(..., help="Log of decisions that auto_parallelize(..., adapt=Adapt(log=FILE)) wrote."),
    as_json: options.Json = False,
) -> None:
    """Repeat all decisions of a log. Exit status 1 if one differs."""
    from galvatron_lite.files import to_data
    from galvatron_lite.runtime.monitor.decide import read_log, replay

    replayed = replay(read_log(log))
    for decision in replayed:
        data = {**to_data(decision.again), "same": decision.same}
        typer.echo(json.dumps(data) if as_json else _decision(decision))
    changed = sum(not decision.same for decision in replayed)
    if not as_json:
        outcome = f"{changed} of them otherwise than logged" if changed else "all as logged"
        typer.echo(f"{len(replayed)} decisions, {outcome}.")
    if changed:
        raise typer.Exit(1)


def _decision(decision: Replayed) -> str:
    replayed, logged = decision.again, decision.logged
    text = f"step {replayed.step}: {replayed.action.value}. {replayed.reason}"
    if decision.same:
        return text
    return f"{text}\n  logged: {'nothing' if logged is None else f'{logged.action.value}. {logged.reason}'}"
