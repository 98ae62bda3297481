"""``galvatron evaluate``: what a given plan costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import print_json
from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile


def evaluate_command(
    plan: Annotated[
        Path, typer.Argument(help="Plan file: ours, written by hand (docs/evaluate.md), or Hetu-Galvatron's JSON.")
    ],
    profile: options.Profile = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Devices, which must be the plan's; the whole cluster if not given.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples a step; the plan's if not given, else in its micro-batches.")
    ] = None,
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    mem: Annotated[
        str | None,
        typer.Option("--mem", help="Budget a device to hold it against: 40GB, 40GiB or 80%; 95% if not given."),
    ] = None,
    calibration: options.Calibration = None,  # noqa: ARG001  its callback chooses the constants
    target: Annotated[
        str | None,
        typer.Option("--for", help="PLAN holds settings of megatron, nemo, torchtitan, deepspeed or accelerate."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the priced plan as JSON.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the priced plan to this file.")] = None,
    verbose: options.Verbose = False,
) -> None:
    """Predict step time and memory of a given plan."""
    from galvatron_lite import api
    from galvatron_lite.api_plans import named_profile
    from galvatron_lite.parallelism.backends import target_named
    from galvatron_lite.plans.io import write_plan

    stack = "" if target is None else target_named(target).stack
    source = named_profile(plan) if profile is None and model is None and target is None else profile
    known = api.find_profile(
        source, model=model, cluster=cluster, gpus=gpus, sequence=sequence, precision=precision, stack=stack
    )
    if target is None:
        found = api.evaluate(plan, known, gpus=gpus, mem=mem, batch=batch)
    else:
        found = api.evaluate(
            plan, profile, model=model, cluster=cluster, gpus=gpus, mem=mem, batch=batch, sequence=sequence,
            precision=precision, target=target,
        )  # fmt: skip
    if output is not None:
        write_plan(found, output)
    _print(found, known, as_json, verbose)
    if output is not None and not as_json:
        typer.echo(f"Written to {output}.")


def _print(plan: Plan, profile: Profile, as_json: bool, verbose: bool) -> None:
    from galvatron_lite.cli.plan_output import print_plan
    from galvatron_lite.cli.tables import accuracy
    from galvatron_lite.plans.describe import fits_line

    if as_json:
        print_json(plan, fits=plan.fits)
        return
    source = f"{profile.name}: {profile.origin.kind.value}, {profile.origin.source}"
    print_plan(plan, source, accuracy(profile), verbose)
    typer.echo(fits_line(plan))
    if plan.provenance is not None and plan.provenance.stack:
        typer.echo(f"Priced as {plan.provenance.stack} runs it.")
    else:
        typer.echo(f"galvatron can run it: {_runs(plan)}")


def _runs(plan: Plan) -> str:
    from galvatron_lite.plans.execution import check_runs

    try:
        check_runs(plan)
    except InputError as error:
        return f"no. {error}"
    return "yes"
