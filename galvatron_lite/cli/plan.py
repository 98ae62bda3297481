"""``galvatron plan``: the fastest plan that fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import shapes

if TYPE_CHECKING:
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile


plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
"""The command and its sub-commands; without one of these it plans."""


@plan_app.callback(invoke_without_command=True)
def plan_command(
    context: typer.Context,
    mem: Annotated[
        str, typer.Option("--mem", help="Memory budget a device: 40GB (decimal), 40GiB (binary) or 80%.")
    ] = "95%",
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples a step over all devices; 8 a device if not given.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices; the whole cluster if not given.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Name (a100-80gb) or YAML file; needed with --model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name (llama2-7b) or YAML file; its costs are estimated.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to plan from; the last one made here if not given.")
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a sample, with --model.")] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="Of compute, with --model; if not given bf16, or the best the devices have."),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve it as an integer programme too, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")] = None,
    layers: shapes.Layers = None,
    hidden: shapes.Hidden = None,
    heads: shapes.Heads = None,
    kv_heads: shapes.KvHeads = None,
    ffn: shapes.Ffn = None,
    vocab: shapes.Vocab = None,
    gated: shapes.Gated = False,
    tied: shapes.Tied = False,
    arch: shapes.Arch = None,
    experts: shapes.Experts = None,
    topk: shapes.Topk = None,
) -> None:
    """Choose how every layer is split, so that a step is as fast as the memory budget allows."""
    if context.invoked_subcommand is not None:
        return
    from galvatron_lite import api
    from galvatron_lite.cli.progress import search_progress
    from galvatron_lite.cli.tables import print_plan
    from galvatron_lite.errors import InputError
    from galvatron_lite.plans.io import write_plan

    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    kind = {"gated_mlp": gated, "tied_embeddings": tied, "arch": arch, "experts": experts, "topk": topk}
    flags = shapes.given(**shape, **kind)
    if flags and model is not None:
        raise InputError("--model", model, f"Give a model or its shape (--{', --'.join(flags)}), not both.")
    if flags:
        flags |= shapes.given(seq=sequence)
        graph: ModelGraph | str | None = shapes.graph(flags, api.precision_on(cluster, precision, gpus))
    else:
        graph = model
    known = api.find_profile(
        profile,
        model=graph,
        cluster=cluster,
        gpus=gpus,
        sequence=sequence,
        precision=precision,
    )
    with search_progress(quiet=as_json) as progress:
        found = api.plan(known, mem=mem, batch=batch, certify=certify, progress=progress)
    if output is not None:
        write_plan(found, output)
    if as_json:
        _print_json(found)
    else:
        source = _source(
            known, _named(known, bool(flags), profile, model), best=graph is not None and precision is None
        )
        print_plan(found, source, _accuracy(known))
        if found.provenance is not None and found.provenance.certificate:
            typer.echo(f"Certificate: {found.provenance.certificate}")
        _say_where(output)


def _named(known: Profile, by_shape: bool, profile: Path | None, model: str | None) -> str:
    """What was planned from, in words."""
    if by_shape:
        return "the shape given"
    last = " (the last profile made here)" if profile is None and model is None else ""
    return f"{known.name}{last}"


def _source(known: Profile, named: str, *, best: bool) -> str:
    """Where the costs come from; ``best``: in the best precision of the devices, as none was asked for."""
    origin = known.origin
    dated = f", {origin.date}" if origin.date else ""
    chosen = ", the best it trains in (--precision for another)" if best else ""
    return f"{named}: {origin.kind.value}, {origin.source}{dated}{chosen}"


def _accuracy(known: Profile) -> str:
    """How far off estimated costs are, as the constants' cross-validation found; nothing of measured ones."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if known.origin.kind is not OriginKind.ESTIMATED:
        return ""
    error = load_calibration().expected_error.get("without_family")
    if error is None:
        return "estimated from data sheets, error not known"
    return f"estimated step times are off by {error:.0%} on average (published runs of software not fitted to)"


def _print_json(found: Plan) -> None:
    import json

    from galvatron_lite.files import to_data

    typer.echo(json.dumps(to_data(found)))


def _say_where(output: Path | None) -> None:
    if output is not None:
        typer.echo(f"Written to {output}.")
