"""``galvatron plan``: the fastest plan that fits, and the other questions to the planner."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options as opts
from galvatron_lite.cli.terminal import NO_PLAN, interruptible, plain_table, print_json, search_progress, wide_console
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes, format_count, format_duration, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from galvatron_lite.cli.options import QuestionOptions
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanArguments


def refuse_beside_phases(question: str, **options: object) -> None:
    """Refuse options that are of a single plan."""
    for name, value in {**({question: True} if question else {}), **options}.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')}", value, "It is not for a run in phases: leave out --phases.")


def plan_in_phases(
    path: Path, profile_at: Callable[[int | None], Profile], setup: PlanArguments, output: Path | None, as_json: bool
) -> None:
    """Plan the phases of a file, print and write the answer."""
    import typer

    from galvatron_lite import api
    from galvatron_lite.plans.phases import write_phased_plan

    with search_progress(quiet=as_json) as progress:
        asked: PlanArguments = {**setup, "progress": progress}
        found = api.plan_phases(path, profile_at, **asked)
    if output is not None:
        write_phased_plan(found, output)
    if as_json:
        print_json(found, seconds=found.seconds)
        return
    _print(found)
    if output is not None:
        typer.echo(f"Written to {output}.")


def _print(phased_plan: PhasedPlan) -> None:
    from galvatron_lite.search.result import summary

    console = wide_console()
    first = phased_plan.phases[0].plan
    of = first.provenance.profile_origin if first.provenance else "unknown"
    console.print(f"{first.model} on {first.devices} devices in {len(phased_plan.phases)} phases", style="bold")
    console.print(f"Costs {of}; switches estimated.\n")
    names = ("phase", "steps", "batch", "sequence", "step", "memory", "takes")
    table = plain_table(*names)
    for phase in phased_plan.phases:
        table.add_row(*_row(phase))
    console.print(table)
    console.print()
    for phase in phased_plan.phases:
        console.print(f"{phase.name}: {summary(phase.plan)}{_change(phase)}")
    console.print(f"\nThe run: {format_duration(phased_plan.seconds)}{_beside(phased_plan)}.")


def _row(phase: PlannedPhase) -> tuple[str, ...]:
    prediction = phase.plan.prediction
    step, peak = (0.0, 0) if prediction is None else (prediction.step_seconds, prediction.peak_memory)
    counts = (format_count(phase.steps), str(phase.plan.global_batch), str(phase.sequence))
    return (phase.name, *counts, format_seconds(step), format_bytes(peak), format_duration(phase.seconds))


def _change(phase: PlannedPhase) -> str:
    """The switch before a phase, in words; empty where there is none."""
    switch = phase.switch
    if switch is None:
        return ""
    return f" (after a switch of {format_seconds(switch.seconds)}, {format_bytes(switch.received)} to each device)"


def _beside(phased_plan: PhasedPlan) -> str:
    """How that compares with never switching, and with always."""
    single, always = phased_plan.single_seconds, phased_plan.always_seconds
    one = "no one plan fits all phases" if single is None else f"{format_duration(single)} under one plan throughout"
    every = "" if always is None else f", {format_duration(always)} with the fastest plan in every phase"
    return f" ({one}{every})"


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
        str | None,
        typer.Option(
            "--model", help="Name (llama2-7b), YAML file, transformers' config.json or FILE.py:FACTORY; estimated."
        ),
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
    verbose: opts.Verbose = False,
    fix: opts.Fix = None,
    forbid: opts.Forbid = None,
    schedule: opts.Schedule = None,
    backend: opts.Backend = "galvatron",
    mode: opts.Mode = "training",
    allow_delay: opts.AllowDelay = False,
    best_batch: opts.BestBatch = False,
    max_batch: opts.MaxBatch = None,
    fewest: opts.Fewest = False,
    step: opts.Step = None,
    rate: opts.Rate = None,
    tokens: opts.Tokens = None,
    price: opts.Price = None,
    tokens_total: opts.TokensTotal = None,
    samples_total: opts.SamplesTotal = None,
    steps: opts.Steps = None,
    within: opts.Within = None,
    pareto: opts.Pareto = False,
    memory_step: opts.MemoryStep = None,
    plot: opts.Plot = None,
    phases: opts.Phases = None,
    layers: opts.Layers = None,
    hidden: opts.Hidden = None,
    heads: opts.Heads = None,
    kv_heads: opts.KvHeads = None,
    ffn: opts.Ffn = None,
    vocab: opts.Vocab = None,
    gated: opts.Gated = False,
    tied: opts.Tied = False,
    arch: opts.Arch = None,
    experts: opts.Experts = None,
    topk: opts.Topk = None,
) -> None:
    """Choose how every layer is split, so that a step is as fast as the memory budget allows."""
    if context.invoked_subcommand is not None:
        return
    from galvatron_lite import api

    options = opts.QuestionOptions(
        best_batch, max_batch, fewest, step, rate, tokens, price, tokens_total, samples_total, steps, within, pareto,
        memory_step, plot,
    )  # fmt: skip
    _check(options, certify, best, output)
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    kind = {"gated_mlp": gated, "tied_embeddings": tied, "arch": arch, "experts": experts, "topk": topk}
    flags = opts.set_flags(**shape, **kind)

    @cache
    def profile_of(devices: int | None, tokens: int | None = sequence) -> Profile:
        made = _model(model, flags, tokens, image, cluster, precision, devices)
        return api.find_profile(
            profile, model=made, cluster=cluster, gpus=devices, sequence=tokens, precision=precision
        )  # fmt: skip

    setup: PlanArguments = {
        "mem": mem, "batch": batch, "fix": fix or (), "forbid": forbid or (), "schedules": schedule, "backend": backend,
        "mode": mode, "allow_delay": allow_delay, "margin": margin,
    }  # fmt: skip
    if phases is not None:
        refuse_beside_phases(options.question, certify=certify or None, best=best)
        estimated = bool(flags) or model is not None
        asked: PlanArguments = {**setup, "sequence": sequence}
        plan_in_phases(phases, lambda tokens: profile_of(gpus, tokens if estimated else None), asked, output, as_json)
        return
    with interruptible(NO_PLAN):
        known = profile_of(gpus)
    named = _named(known, bool(flags), profile, model)
    source = _source(known, named, best=(bool(flags) or model is not None) and precision is None and verbose)
    if options.question and precision is None and not known.cluster.alike:
        source += "; fewer GPUs, all of one type, in their own best"
    if options.question:
        _answer(options, profile_of, {**setup, "gpus": gpus}, source, output, as_json)
    else:
        _plan(known, setup, source, output, as_json, certify, best, tolerance, verbose)


def _check(options: QuestionOptions, certify: bool, best: int | None, output: Path | None) -> None:
    """Refuse options that do not go together, and files that cannot be written, before anything is searched."""
    from galvatron_lite.cli.tables import check_output
    from galvatron_lite.svg import check_target

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
    """The model by its name, with pictures of a size where one is given, or by the shape that flags give."""
    from galvatron_lite import api

    if image is not None:
        return opts.pictured(model, image, api.precision_on(cluster, precision, gpus))
    if not flags:
        return model
    if model is not None:
        raise InputError("--model", model, f"Give a model or its shape (--{', --'.join(flags)}), not both.")
    return opts.graph(flags | opts.set_flags(seq=sequence), api.precision_on(cluster, precision, gpus))


def _plan(
    profile: Profile, setup: PlanArguments, source: str, output: Path | None, as_json: bool, certify: bool,
    best: int | None, tolerance: str, verbose: bool,
) -> None:  # fmt: skip
    from galvatron_lite import api
    from galvatron_lite.cli.plan_output import RUNNERS_UP, print_plan
    from galvatron_lite.cli.tables import accuracy
    from galvatron_lite.plans.io import write_plan

    with search_progress(quiet=as_json) as progress:
        asked: PlanArguments = {**setup, "progress": progress}
        runners_up = api.RUNNERS_UP if best is None else best
        found = api.plan(profile, certify=certify, runners_up=runners_up, tolerance=tolerance, **asked)
    if output is not None:
        write_plan(found, output)
    if as_json:
        print_json(found)
        return
    print_plan(found, source, accuracy(profile), verbose, RUNNERS_UP if best is None else best)
    if found.provenance is not None and found.provenance.certificate:
        typer.echo(f"Certificate: {found.provenance.certificate}")
    _say_where(output)


def _answer(
    options: QuestionOptions,
    profile_of: Callable[[int | None], Profile],
    setup: PlanArguments,
    source: str,
    output: Path | None,
    as_json: bool,
) -> None:
    from galvatron_lite.cli.tables import accuracy, print_answer, print_answer_json, require_answer, write_answer

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


def _named(costs: Profile, by_shape: bool, profile: Path | None, model: str | None) -> str:
    if by_shape:
        return "the shape given"
    last = " (the last profile made here)" if profile is None and model is None else ""
    return f"{costs.name}{last}"


def _source(profile: Profile, named: str, *, best: bool) -> str:
    """Where the costs come from; ``best``: in the best precision of the devices, as none was asked for."""
    origin = profile.origin
    dated = f", {origin.date}" if origin.date else ""
    chosen = ", the best it trains in (--precision for another)" if best else ""
    return f"{named}: {origin.kind.value}, {origin.source}{dated}{chosen}"


def _say_where(output: Path | None) -> None:
    if output is not None:
        typer.echo(f"Written to {output}.")
