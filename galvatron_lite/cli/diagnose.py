"""``galvatron diagnose``: where a run and its prediction part ways."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli.terminal import print_json
from galvatron_lite.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from galvatron_lite.diagnose.collectives import CollectiveRow
    from galvatron_lite.diagnose.diagnosis import Diagnosis, DiagnosisInput
    from galvatron_lite.diagnose.findings import Finding
    from galvatron_lite.profiler.schema import Profile


def diagnose_command(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of auto_parallelize(..., log=FOLDER); or a trace of torch.profiler, or a folder."),
    ],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What the plan was made from, where it is not found by itself.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan, with traces alone.")] = None,
    update: Annotated[
        Path | None, typer.Option("--update", help="Write the profile, as the run has shown it to be, to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find where a training run differs from its prediction."""
    from galvatron_lite.cli.tables import check_folder
    from galvatron_lite.diagnose.diagnosis import diagnose, find_profile, open_source
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.profiler.store import read_profile

    check_folder("--update", update)
    source = open_source(run, None if plan is None else read_plan(plan))
    known = find_profile(source) if profile is None else read_profile(profile)
    found = diagnose(source, known)
    changed = () if update is None else _update(known, source, update)
    if as_json:
        print_json(asdict(found) | {"corrected": list(changed)})
        return
    _print(found)
    for line in changed:
        typer.echo(f"Corrected {line}.")
    if update is not None:
        typer.echo(f"Written to {update}: plan anew with galvatron plan --profile {update}.")


def _update(profile: Profile, source: DiagnosisInput, path: Path) -> tuple[str, ...]:
    from galvatron_lite.diagnose.diagnosis import updated
    from galvatron_lite.profiler.store import write_profile

    made, said = updated(profile, source)
    write_profile(made, path)
    return said


def _print(diagnosis: Diagnosis) -> None:
    from galvatron_lite.diagnose.findings import rank_words

    slowed = diagnosis.untraced is not None and diagnosis.untraced < diagnosis.seconds
    seconds = diagnosis.untraced if slowed and diagnosis.untraced is not None else diagnosis.seconds
    told = f"{format_seconds(seconds)} a step, predicted {format_seconds(diagnosis.predicted)}"
    source = "traces" if diagnosis.traced else "the log"
    looked = "without the profiler" if slowed else f"{diagnosis.steps} steps, from {source}"
    typer.echo(f"{told} ({seconds / diagnosis.predicted - 1.0:+.0%}); {looked}.")
    if slowed:
        typer.echo(
            f"Causes are of {diagnosis.steps} steps, from traces. The profiler slows them: they took "
            f"{format_seconds(diagnosis.seconds)}, and it has a part in every figure below."
        )
    for line in _lines(diagnosis.findings):
        typer.echo(line)
    typer.echo(f"Not explained: {_signed(diagnosis.unexplained)} a step.")
    for row in diagnosis.memory:
        told = f"{format_bytes(row.measured)}, predicted {format_bytes(row.predicted)}"
        typer.echo(f"Memory on {rank_words(*row.ranks)}: {told}.")
    for collective in diagnosis.collectives:
        typer.echo(_collective(collective))
    for note in diagnosis.notes:
        typer.echo(f"Note: {note}")


def _collective(row: CollectiveRow) -> str:
    """What collectives of a kind and group took."""
    ranks, calls = ", ".join(map(str, row.ranks[:4])), f"{row.calls:g} x {row.collective.value}"
    ranks += f", … {row.ranks[-1]}" if len(row.ranks) > 4 else ""
    return (
        f"{calls} of ranks {ranks}: {format_bytes(row.bytes)} in {format_seconds(row.seconds)} a step "
        f"({format_bytes(round(row.bandwidth))}/s of the bus), predicted {format_seconds(row.predicted)}; rank "
        f"{row.slowest} comes last, the others wait {format_seconds(row.waited)}."
    )


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """What costs more than predicted, each advice where it is first wanted; then what costs less."""
    if not findings:
        yield "No cause costs or saves as much as a fiftieth of a step."
    given: dict[str, int] = {}
    for number, one in enumerate((one for one in findings if one.seconds > 0), start=1):
        yield f"{number:>2}. {_line(one)}"
        yield f"    {one.advice}" if one.advice not in given else f"    As for {given[one.advice]}."
        given.setdefault(one.advice, number)
    quicker = [one for one in findings if one.seconds <= 0]
    if quicker:
        yield "Quicker than predicted (nothing to mend; --update corrects the profile):"
    yield from (f"    {_line(one)}" for one in quicker)


def _line(one: Finding) -> str:
    stage = f"stage {one.stage}: " if one.stage >= 0 else ""
    measured, predicted = format_seconds(one.measured), format_seconds(one.predicted)
    cause = "" if one.where.startswith(one.cause.value) else f"{one.cause.value}: "
    return f"{_signed(one.seconds)}  {cause}{stage}{one.where}: {measured} a step, predicted {predicted}."


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))
