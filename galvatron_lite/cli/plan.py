"""``galvatron plan``: the fastest plan that fits, and the other questions one can ask of the planner."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import questions, shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from galvatron_lite.api import Setup
    from galvatron_lite.cli.questions import Options
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
        str | None, typer.Option("--model", help="Name (llama2-7b), YAML file or transformers' config.json; estimated.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to plan from; the last one made here if not given.")
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a sample, with --model.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Pixels of a picture, with --model of pictures: 512x1024.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="Of compute, with --model; if not given bf16, or the best the devices have."),
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=0, help="How many other plans to show; 5 if not given.")
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve it as an integer programme too, and compare.")
    ] = False,
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", help="How far from the fastest the plan may be, to be simpler; 0: the fastest."),
    ] = "1%",
    margin: Annotated[
        str | None,
        typer.Option("--margin", help="Share of the budget to keep free; if not given, what predictions are off by."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")] = None,
    fix: questions.Fix = None,
    forbid: questions.Forbid = None,
    schedule: questions.Schedule = None,
    backend: questions.Backend = "galvatron",
    mode: questions.Mode = "training",
    allow_delay: questions.AllowDelay = False,
    best_batch: questions.BestBatch = False,
    max_batch: questions.MaxBatch = None,
    fewest: questions.Fewest = False,
    step: questions.Step = None,
    rate: questions.Rate = None,
    tokens: questions.Tokens = None,
    price: questions.Price = None,
    tokens_total: questions.TokensTotal = None,
    samples_total: questions.SamplesTotal = None,
    steps: questions.Steps = None,
    within: questions.Within = None,
    pareto: questions.Pareto = False,
    memory_step: questions.MemoryStep = None,
    plot: questions.Plot = None,
    phases: questions.Phases = None,
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
    from galvatron_lite.cli.phases import plan_in_phases, refuse_beside_phases
    from galvatron_lite.cli.progress import interruptible

    options = questions.Options(
        best_batch, max_batch, fewest, step, rate, tokens, price, tokens_total, samples_total, steps, within, pareto,
        memory_step, plot,
    )  # fmt: skip
    _check(options, certify, best, output)
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    kind = {"gated_mlp": gated, "tied_embeddings": tied, "arch": arch, "experts": experts, "topk": topk}
    flags = shapes.given(**shape, **kind)

    @cache
    def profile_of(devices: int | None, tokens: int | None = sequence) -> Profile:
        made = _model(model, flags, tokens, image, cluster, precision, devices)
        return api.find_profile(
            profile, model=made, cluster=cluster, gpus=devices, sequence=tokens, precision=precision
        )  # fmt: skip

    setup: Setup = {
        "mem": mem, "batch": batch, "fix": fix or (), "forbid": forbid or (), "schedules": schedule, "backend": backend,
        "mode": mode, "allow_delay": allow_delay, "margin": margin,
    }  # fmt: skip
    if phases is not None:
        refuse_beside_phases(options.question, certify=certify or None, best=best)
        estimated = bool(flags) or model is not None
        asked: Setup = {**setup, "sequence": sequence}
        plan_in_phases(phases, lambda tokens: profile_of(gpus, tokens if estimated else None), asked, output, as_json)
        return
    with interruptible():
        known = profile_of(gpus)
    named = _named(known, bool(flags), profile, model)
    source = _source(known, named, best=(bool(flags) or model is not None) and precision is None)
    if options.question and precision is None and not known.cluster.alike:
        source += "; fewer GPUs, all of one type, in their own best"
    if options.question:
        _answer(options, profile_of, {**setup, "gpus": gpus}, source, output, as_json)
    else:
        _plan(known, setup, source, output, as_json, certify, best, tolerance)


def _check(options: Options, certify: bool, best: int | None, output: Path | None) -> None:
    """Refuse options that do not go together, and files that cannot be written, before anything is searched.

    Raises:
        InputError: names the first.
    """
    from galvatron_lite.analysis.svg import check_target
    from galvatron_lite.cli.answers import check_output
    from galvatron_lite.errors import InputError

    question = options.question
    check_output(output, question)
    if options.plot is not None:
        check_target(options.plot)
    for option, value in (("--certify", certify or None), ("--best", best)):
        if question and value is not None:
            raise InputError(option, value, "It belongs to a single plan: not with another question.")


def _model(
    model: str | None,
    flags: dict[str, str],
    sequence: int | None,
    image: str | None,
    cluster: str | None,
    precision: str | None,
    gpus: int | None,
) -> ModelGraph | str | None:
    """The model by its name, with pictures of a size where one is given, or by the shape that flags give.

    Raises:
        InputError: both, or a size for what takes no pictures.
    """
    from galvatron_lite import api
    from galvatron_lite.errors import InputError

    if image is not None:
        return shapes.pictured(model, image, api.precision_on(cluster, precision, gpus))
    if not flags:
        return model
    if model is not None:
        raise InputError("--model", model, f"Give a model or its shape (--{', --'.join(flags)}), not both.")
    return shapes.graph(flags | shapes.given(seq=sequence), api.precision_on(cluster, precision, gpus))


def _plan(
    known: Profile, setup: Setup, source: str, output: Path | None, as_json: bool, certify: bool, best: int | None,
    tolerance: str,
) -> None:  # fmt: skip
    """The fastest plan."""
    from galvatron_lite import api
    from galvatron_lite.cli.origins import accuracy
    from galvatron_lite.cli.progress import search_progress
    from galvatron_lite.cli.tables import print_plan
    from galvatron_lite.plans.io import write_plan

    with search_progress(quiet=as_json) as progress:
        asked: Setup = {**setup, "progress": progress}
        runners_up = api.RUNNERS_UP if best is None else best
        found = api.plan(known, certify=certify, runners_up=runners_up, tolerance=tolerance, **asked)
    if output is not None:
        write_plan(found, output)
    if as_json:
        _print_json(found)
        return
    print_plan(found, source, accuracy(known))
    if found.provenance is not None and found.provenance.certificate:
        typer.echo(f"Certificate: {found.provenance.certificate}")
    _say_where(output)


def _answer(
    options: Options,
    profile_of: Callable[[int | None], Profile],
    setup: Setup,
    source: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """The answer to another question."""
    from galvatron_lite.cli.answers import print_answer, print_answer_json, require_answer, write_answer
    from galvatron_lite.cli.origins import accuracy
    from galvatron_lite.cli.progress import search_progress

    with search_progress(quiet=as_json) as progress:
        found = options.ask(profile_of, {**setup, "progress": progress})
    write_answer(found, output, options.plot)
    if as_json:
        print_answer_json(found)
    else:
        print_answer(found, source, accuracy(profile_of(setup.get("gpus"))))
    require_answer(found)
    if not as_json:
        _say_where(output)
        _say_where(options.plot)


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


def _print_json(found: Plan) -> None:
    import json

    from galvatron_lite.files import to_data

    typer.echo(json.dumps(to_data(found)))


def _say_where(output: Path | None) -> None:
    if output is not None:
        typer.echo(f"Written to {output}.")
