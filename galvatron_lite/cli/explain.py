"""``galvatron explain``: why a plan is as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import priced, questions

if TYPE_CHECKING:
    from galvatron_lite.api import Setup


def explain_command(
    plan: Annotated[
        Path, typer.Argument(help="Plan file: ours, written by hand (docs/evaluate.md), or Hetu-Galvatron's JSON.")
    ],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to price with; the one the plan names if not given.")
    ] = None,
    model: priced.Model = None,
    cluster: priced.Cluster = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices of the cluster, with --model.")] = None,
    sequence: priced.Sequence = None,
    precision: priced.Precision = None,
    mem: Annotated[
        str | None, typer.Option("--mem", help="Budget a device: 40GB, 40GiB or 80%; the plan's own if not given.")
    ] = None,
    no_what_if: Annotated[
        bool, typer.Option("--no-what-if", help="Plan nothing anew: no runner-ups, no what-ifs; answers at once.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="For planning anew; what there is no time for is said.")
    ] = 120.0,
    fix: questions.Fix = None,
    forbid: questions.Forbid = None,
    schedule: questions.Schedule = None,
    allow_delay: questions.AllowDelay = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Say why a plan is as it is: what each choice buys, what binds, where the time goes, what would change it.

    Plans anew are made with --fix, --forbid and --schedule: give those that the plan was made with.
    """
    import json

    from galvatron_lite import api_explain
    from galvatron_lite.cli.explained import print_explanation
    from galvatron_lite.cli.progress import progress_bar
    from galvatron_lite.files import to_data

    setup = {"model": model, "cluster": cluster, "gpus": gpus, "sequence": sequence, "precision": precision, "mem": mem}
    asked: Setup = {name: value for name, value in setup.items() if value is not None}  # type: ignore[assignment]
    asked |= {"fix": fix or (), "forbid": forbid or (), "schedules": schedule, "allow_delay": allow_delay}
    with progress_bar("Planning anew", quiet=as_json) as progress:
        asked["progress"] = progress
        told = api_explain.explain(plan, profile, what_if=not no_what_if, seconds=seconds, **asked)
    if as_json:
        typer.echo(json.dumps(to_data(told)))
    else:
        print_explanation(told)
