"""``galvatron plan``: the fastest plan that fits, and the other questions to the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron_lite.cli import options as opts
from galvatron_lite.cli.terminal import NO_PLAN, interruptible, plain_table, print_json, search_progress, wide_console
from galvatron_lite.errors import InputError
from galvatron_lite.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
)

if TYPE_CHECKING:
    from galvatron_lite.analysis.answers import Answer
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanArguments
    from galvatron_lite.stacks.schema import Stack

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
"""The command and its sub-commands; without one of these it plans."""


@plan_app.callback(invoke_without_command=True)
def plan_command(
    context: typer.Context,
    mem: Annotated[
        str, typer.Option("--mem", help="Memory budget a device: 40GB (decimal), 40GiB (binary) or 80%.")
    ] = "95%",
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples a step over all devices; default: 8 a device (32 pictures).")
    ] = None,
    gpus: opts.Gpus = None,
    cluster: opts.Cluster = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Name (llama2-7b), YAML file, transformers' config.json or FILE.py:FACTORY; estimated.",
            autocompletion=opts.complete_models,
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to plan from; default: the last one made here.")
    ] = None,
    sequence: opts.Sequence = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Pixels of a picture, with --model of pictures: 512x1024.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Of compute, with --model; default: bf16, or the devices' best.")
    ] = None,
    best: Annotated[int | None, typer.Option("--best", min=0, help="How many other plans to show; default: 5.")] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve it as an integer programme too, and compare.")
    ] = False,
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", help="How much slower the plan may be, to be simpler; 0: the fastest."),
    ] = "1%",
    margin: Annotated[
        str | None, typer.Option("--margin", help="Share of the budget to keep free; default: the predictions' error.")
    ] = None,
    calibration: opts.Calibration = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")] = None,
    verbose: opts.Verbose = False,
    trainable: opts.Trainable = None,
    freeze: opts.Freeze = None,
    fix: opts.Fix = None,
    forbid: opts.Forbid = None,
    schedule: opts.Schedule = None,
    backend: opts.Backend = "galvatron",
    target: opts.For = None,
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
    """Find the fastest plan that fits the memory budget."""
    options = SimpleNamespace(**locals())
    if context.invoked_subcommand is None:
        _run(options)


def _run(options: SimpleNamespace) -> None:
    from galvatron_lite.request import PlanRequest

    question = _question(vars(options))
    _check(options, question)
    if options.target is not None:
        options.backend = PlanRequest.parse(None, {"backend": options.backend, "target": options.target}).backend
    flags = _shape_flags(options)
    estimated = bool(flags) or options.model is not None

    @cache
    def profile_of(devices: int | None, tokens: int | None = options.sequence) -> Profile:
        from galvatron_lite.api_profile import find_profile

        software, model = _stack_of(options), _model(options, flags, tokens, devices)
        named = {"trainable": options.trainable, "freeze": options.freeze or ()} if model == options.model else {}
        return find_profile(
            options.profile, model=model, cluster=options.cluster, gpus=devices, sequence=tokens,
            precision=options.precision, stack="" if software is None else software.name, **named,
        )  # fmt: skip

    setup = opts.arguments(
        mem=options.mem, batch=options.batch, fix=options.fix or (), forbid=options.forbid or (),
        schedules=options.schedule, backend=options.backend, mode=options.mode, allow_delay=options.allow_delay,
        margin=options.margin,
    )  # fmt: skip
    if options.phases is not None:
        _plan_phases(options, lambda tokens: profile_of(options.gpus, tokens if estimated else None), setup)
        return
    with interruptible(NO_PLAN):
        profile = profile_of(options.gpus)
    last = " (the last profile made here)" if options.profile is None and options.model is None else ""
    source = f"{'the shape given' if flags else profile.name + last}: {profile.origin.kind.value}, "
    source += ", ".join(filter(None, (profile.origin.source, profile.origin.date)))
    if options.profile is not None and options.cluster is not None:
        source += f"; communication {profile.communication_origin.source}"
    if profile.stack:
        source += f", as {profile.stack} runs it"
    graph = profile.graph
    if graph.trainable < graph.parameters:
        source += f", {format_count(graph.trainable)} of {format_count(graph.parameters)} parameters train"
    if estimated and options.precision is None and options.verbose:
        source += ", precision chosen automatically (--precision overrides it)"
    if question:
        if options.precision is None and not profile.cluster.alike:
            source += "; fewer GPUs, all of one type, in their own best precision"
        _answer(options, question, profile_of, setup, source)
    else:
        _plan(options, profile, setup, source)


def _stack_of(options: SimpleNamespace) -> Stack | None:
    """The software that costs are estimated for; None: our own runtime."""
    from galvatron_lite.parallelism.backends import backend_named
    from galvatron_lite.stacks.catalog import STACKS

    return STACKS.get(backend_named(options.backend).stack)


_TARGETS = ("fewest", "step", "rate", "tokens")
_QUESTIONS = ("best_batch", *_TARGETS, "price", "pareto")
_BELONG = {
    "max_batch": ("best_batch",),
    "tokens_total": ("price",), "samples_total": ("price",), "steps": ("price",), "within": ("price",),
    "memory_step": ("pareto",),
    "plot": _QUESTIONS,
}  # fmt: skip
"""Options that say more about a question, and the questions."""


def _question(options: Mapping[str, Any]) -> str:
    """The question that is asked, by its option; empty: the fastest plan."""
    values = {name: options[name] for name in (*_QUESTIONS, *_BELONG)}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    # --fewest beside a target says the same as the target alone
    targets = values.keys() & set(_TARGETS[1:])
    asked = [name for name in _QUESTIONS if name in values and not (name == "fewest" and targets)]
    if len(asked) > 1:
        remedy = f"{_flag(asked[0])} asks something else: ask one thing."
        raise InputError(_flag(asked[1]), values[asked[1]], remedy)
    for name, questions in _BELONG.items():
        if name in values and not set(asked) & set(questions):
            raise InputError(_flag(name), values[name], f"It belongs to {' or '.join(map(_flag, questions))}.")
    return asked[0] if asked else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(options: SimpleNamespace, question: str) -> None:
    """Refuse options that do not go together, and files that cannot be written, before anything is searched."""
    from galvatron_lite.cli.tables import check_folder
    from galvatron_lite.svg import check_target

    if options.output is not None and question == "pareto":
        remedy = "--pareto has many plans: take one by its memory: --mem, without --pareto."
        raise InputError("-o", str(options.output), remedy)
    check_folder("-o", options.output)
    if options.plot is not None:
        check_target(options.plot)
    single = {"--certify": options.certify or None, "--best": options.best}
    for option, value in single.items():
        if question and value is not None:
            raise InputError(option, value, "It belongs to a single plan: not with another question.")
    if options.phases is not None:
        for option, value in {**({_flag(question): True} if question else {}), **single}.items():
            if value is not None:
                raise InputError(option, value, "It is not for a run in phases: leave out --phases.")


def _shape_flags(options: SimpleNamespace) -> dict[str, str]:
    """The flags of a model's shape that were set, as text."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "arch", "experts", "topk")
    values = {name: getattr(options, name) for name in names}
    values |= {"gated_mlp": options.gated, "tied_embeddings": options.tied}
    return {name: str(value).lower() for name, value in values.items() if value not in (None, False)}


def _model(
    options: SimpleNamespace, flags: dict[str, str], sequence: int | None, gpus: int | None
) -> ModelGraph | str | None:
    """The model by its name, with pictures of a size where one is given, or by the shape that flags give."""
    from galvatron_lite.api_profile import precision_on
    from galvatron_lite.model.shapes import build_graph, load_model, load_shape, shape_from_flags
    from galvatron_lite.model.shapes.fields import sizes_of
    from galvatron_lite.model.trainable import Trainable

    model: str | None = options.model
    trainable = Trainable.parse(options.trainable, options.freeze or ())
    if options.image is not None:
        if model is None:
            raise InputError("--image", options.image, "Name the model with --model.")
        precision = precision_on(options.cluster, options.precision, gpus)
        sizes = sizes_of(load_shape(model), model, options.image)
        return load_model(model, overrides=sizes, precision=precision, trainable=trainable)
    if not flags:
        return model
    if model is not None:
        raise InputError("--model", model, f"Give a model or its shape (--{', --'.join(flags)}), not both.")
    precision = precision_on(options.cluster, options.precision, gpus)
    flags = flags | ({} if sequence is None else {"seq": str(sequence)})
    transformer = flags.get("arch", "decoder") in ("decoder", "encoder", "moe")
    needed = ("layers", "hidden", "heads", "vocab", "seq") if transformer else ()
    if missing := ", ".join(_flag(name) for name in needed if name not in flags):
        raise InputError(missing, None, "A model by its shape needs --layers, --hidden, --heads, --vocab and --seq.")
    software = _stack_of(options)
    kernels = None if software is None else software.kernels
    return build_graph(shape_from_flags(flags), precision=precision, kernels=kernels, trainable=trainable)


def _plan(options: SimpleNamespace, profile: Profile, setup: PlanArguments, source: str) -> None:
    """The fastest plan."""
    from galvatron_lite import api
    from galvatron_lite.cli.plan_output import RUNNERS_UP, print_plan
    from galvatron_lite.cli.tables import accuracy
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.export.tools import export
    from galvatron_lite.plans.io import write_plan

    best: int | None = options.best
    runners_up = api.RUNNERS_UP if best is None else best
    with search_progress(quiet=options.as_json) as progress:
        setup["progress"] = progress
        plan = api.plan(profile, certify=options.certify, runners_up=runners_up, tolerance=options.tolerance, **setup)
    by_hand: tuple[str, ...] = ()
    if options.output is not None and options.target is not None:
        settings = export(plan, options.target)
        write_text(options.output, settings.text)
        by_hand = (*(f"Not among the settings of {options.target}: {line}" for line in settings.left_out),
                   *(f"Left to you, {line}" for line in settings.by_hand))  # fmt: skip
    elif options.output is not None:
        write_plan(plan, options.output)
    if options.as_json:
        print_json(plan)
        return
    print_plan(plan, source, accuracy(profile), options.verbose, RUNNERS_UP if best is None else best)
    if plan.provenance is not None and plan.provenance.certificate:
        typer.echo(f"Certificate: {plan.provenance.certificate}")
    for line in by_hand:
        typer.echo(line)
    _print_target(options.output, f", the settings of {options.target}" if options.target is not None else "")


def _answer(
    options: SimpleNamespace,
    question: str,
    profile_of: Callable[[int | None], Profile],
    setup: PlanArguments,
    source: str,
) -> None:
    """The answer to another question."""
    from galvatron_lite.cli.tables import accuracy, print_answer, require_answer, write_answer

    with search_progress(quiet=options.as_json) as progress:
        answer = _ask(options, question, profile_of, {**setup, "gpus": options.gpus, "progress": progress})
    write_answer(answer, options.output, options.plot)
    if options.as_json:
        from galvatron_lite.analysis.answers import as_data

        print_json(as_data(answer))
    else:
        print_answer(answer, source, accuracy(profile_of(options.gpus)))
    require_answer(answer)
    if not options.as_json:
        _print_target(options.output)
        _print_target(options.plot)


def _ask(
    options: SimpleNamespace, question: str, profile_of: Callable[[int | None], Profile], setup: PlanArguments
) -> Answer:
    from galvatron_lite import api

    def read(name: str, parse: Callable[[str, str], Any]) -> Any:
        text = getattr(options, name)
        return None if text is None else parse(text, _flag(name))

    if question == "best_batch":
        return api.best_batch(profile_of, max_batch=options.max_batch, **setup)
    if question == "pareto":
        return api.pareto_front(profile_of, memory_step=read("memory_step", parse_bytes), **setup)
    if question == "price":
        return api.cheapest(
            profile_of, price=options.price, samples=read("samples_total", parse_count),
            tokens=read("tokens_total", parse_count), steps=read("steps", parse_count),
            within=read("within", parse_seconds), **setup,
        )  # fmt: skip
    return api.fewest_devices(
        profile_of, step=read("step", parse_seconds), samples=read("rate", parse_count),
        tokens=read("tokens", parse_count), **setup,
    )  # fmt: skip


def _print_target(path: Path | None, what: str = "") -> None:
    if path is not None:
        typer.echo(f"Written to {path}{what}.")


def _plan_phases(options: SimpleNamespace, profile_at: Callable[[int | None], Profile], setup: PlanArguments) -> None:
    from galvatron_lite import api
    from galvatron_lite.plans.phases import write_phased_plan

    with search_progress(quiet=options.as_json) as progress:
        asked: PlanArguments = {**setup, "sequence": options.sequence, "progress": progress}
        plan = api.plan_phases(options.phases, profile_at, **asked)
    if options.output is not None:
        write_phased_plan(plan, options.output)
    if options.as_json:
        print_json(plan, seconds=plan.seconds)
        return
    _print_phases(plan)
    _print_target(options.output)


def _print_phases(plan: PhasedPlan) -> None:
    from galvatron_lite.search.result import summary

    console = wide_console()
    first = plan.phases[0].plan
    origin = first.provenance.profile_origin if first.provenance else "unknown"
    console.print(f"{first.model} on {first.devices} devices in {len(plan.phases)} phases", style="bold")
    console.print(f"Costs {origin}; switches estimated.\n")
    table = plain_table("phase", "steps", "batch", "sequence", "step", "memory", "takes")
    for phase in plan.phases:
        table.add_row(*_phase_row(phase))
    console.print(table)
    console.print()
    for phase in plan.phases:
        switch = "" if phase.switch is None else (
            f" (after a switch of {format_seconds(phase.switch.seconds)}, {format_bytes(phase.switch.received)} to "
            "each device)"
        )  # fmt: skip
        console.print(f"{phase.name}: {summary(phase.plan)}{switch}")
    single, always = plan.single_seconds, plan.always_seconds
    others = "no one plan fits all phases" if single is None else f"{format_duration(single)} under one plan throughout"
    others += "" if always is None else f", {format_duration(always)} with the fastest plan in every phase"
    console.print(f"\nThe run: {format_duration(plan.seconds)} ({others}).")


def _phase_row(phase: PlannedPhase) -> tuple[str, ...]:
    prediction = phase.plan.prediction
    step, peak = (0.0, 0) if prediction is None else (prediction.step_seconds, prediction.peak_memory)
    counts = (format_count(phase.steps), str(phase.plan.global_batch), str(phase.sequence))
    return (phase.name, *counts, format_seconds(step), format_bytes(peak), format_duration(phase.seconds))
