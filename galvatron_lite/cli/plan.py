"""``galvatron plan``: search the fastest plan that fits, or answer another question about plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import typer

from galvatron_lite.cli import options as opts
from galvatron_lite.cli.terminal import check_folder, plain_table, print_json, search_progress, wide_console, written
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
    from galvatron_lite.plans.phases import PhasedPlan
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanRequest

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
"""The command and its sub-commands; it plans if no sub-command is named."""


@plan_app.callback(invoke_without_command=True)
def plan_command(
    context: typer.Context,
    mem: str = typer.Option("95%", "--mem", help="Memory budget per GPU: 40GB (decimal), 40GiB (binary) or 80%."),
    batch: int | None = typer.Option(
        None, "--batch", help="Global batch size in samples. Default: 8 per GPU (32 for images)."
    ),
    gpus: opts.Gpus = None,
    cluster: opts.Cluster = None,
    model: str | None = typer.Option(
        None,
        "--model",
        help="Model name (llama2-7b), YAML file, config.json of transformers or FILE.py:FACTORY, to estimate.",
        autocompletion=opts.complete_models,
    ),
    profile: Path | None = typer.Option(
        None, "--profile", help="Profile to plan from. Default: the most recent one in profiles/."
    ),
    sequence: opts.Sequence = None,
    image: str | None = typer.Option(None, "--image", help="Image size in pixels, for image models: 512x1024."),
    precision: opts.Precision = None,
    best: int | None = typer.Option(None, "--best", min=0, help="Number of runners-up. Default: 5."),
    certify: bool = typer.Option(
        False, "--certify", help="Also solve the search as an integer linear program and compare."
    ),
    tolerance: str = typer.Option(
        "1%",
        "--tolerance",
        help="How much slower than the optimum the plan may be in exchange for simplicity. 0: the optimum.",
    ),
    margin: str | None = typer.Option(
        None, "--margin", help="Share of the budget to keep free. Default: the usual error of predicted memory."
    ),
    calibration: opts.Calibration = None,
    as_json: opts.Json = False,
    output: opts.Output = None,
    verbose: opts.Verbose = False,
    trainable: opts.Trainable = None,
    freeze: opts.Freeze = None,
    fix: opts.Fix = None,
    forbid: opts.Forbid = None,
    schedules: opts.Schedule = None,
    backend: opts.Backend = "galvatron",
    target: opts.For = None,
    mode: opts.Mode = "training",
    allow_delay: opts.AllowDelay = False,
    best_batch: bool = opts.ask(False, "--best-batch", help="Which batch size has the highest throughput?"),
    max_batch: int | None = opts.ask(
        None, "--max-batch", help="Largest batch size to try with --best-batch. Default: 64 per GPU."
    ),
    fewest: bool = opts.ask(
        False, "--fewest", help="What is the smallest number of GPUs, up to --gpus, that fits the model?"
    ),
    step: str | None = opts.ask(None, "--step", help="How few GPUs reach this step time? 2s, 300ms."),
    rate: str | None = opts.ask(None, "--rate", help="How few GPUs reach this many samples/s? 1000, 2K."),
    tokens: str | None = opts.ask(None, "--tokens", help="How few GPUs reach this many tokens/s? 1M."),
    price: float | None = opts.ask(
        None, "--price", help="Which number of GPUs is cheapest at this price per GPU-hour?"
    ),
    tokens_total: str | None = opts.ask(
        None, "--tokens-total", help="Length of the run in tokens, with --price. Default: 1M."
    ),
    samples_total: str | None = opts.ask(None, "--samples-total", help="Length of the run in samples, with --price."),
    steps: str | None = opts.ask(None, "--steps", help="Length of the run in steps, with --price."),
    within: str | None = opts.ask(None, "--within", help="Deadline of the run, with --price: 30d."),
    pareto: bool = opts.ask(False, "--pareto", help="What is the fastest plan for each budget up to --mem?"),
    memory_step: str | None = opts.ask(
        None, "--memory-step", help="Smallest difference between budgets, with --pareto. Default: 1/32 of --mem."
    ),
    plot: opts.Plot = None,
    phases: Path | None = opts.ask(
        None, "--phases", help="Plan each phase of a run from this file (docs/adapting.md)."
    ),
    layers: int | None = opts.shape(None, "--layers", help="Number of layers."),
    hidden: int | None = opts.shape(None, "--hidden", help="Hidden size."),
    heads: int | None = opts.shape(None, "--heads", help="Number of attention heads."),
    kv_heads: int | None = opts.shape(None, "--kv-heads", help="Number of key-value heads."),
    ffn: int | None = opts.shape(None, "--ffn", help="Hidden size of the MLP."),
    vocab: int | None = opts.shape(None, "--vocab", help="Vocabulary size."),
    gated: bool = opts.shape(False, "--gated", help="Use a gated MLP, as Llama does."),
    tied: bool = opts.shape(False, "--tied", help="The output head shares the embedding."),
    arch: str | None = opts.shape(None, "--arch", help="Architecture: decoder (default), encoder, moe, vit …"),
    experts: int | None = opts.shape(None, "--experts", help="Number of experts (moe)."),
    topk: int | None = opts.shape(None, "--topk", help="Experts per token (moe)."),
) -> None:
    """Find the fastest plan that fits the memory budget."""
    if context.invoked_subcommand is None:
        _run(SimpleNamespace(**locals()))


def _run(options: SimpleNamespace) -> None:
    """Parse the request, search what it resolves to, and show the result."""
    from galvatron_lite.request import PlanRequest

    question = _question(vars(options))
    _check(options, question)
    setup = {**opts.arguments(vars(options)), "shape": _shape_flags(options)}
    with search_progress(quiet=options.as_json) as progress:
        request = PlanRequest.parse(options.profile, cast("Any", {**setup, "progress": progress}))
        result = _search(options, question, request)
    _show(options, question, request, result)


def _show(options: SimpleNamespace, question: str, request: PlanRequest, result: Plan | PhasedPlan | Answer) -> None:
    from galvatron_lite.plans.phases import PhasedPlan
    from galvatron_lite.plans.schema import Plan

    if isinstance(result, PhasedPlan):
        _show_phases(options, result)
    elif isinstance(result, Plan):
        _show_plan(options, result, _source(options, request), request.resolved.profile)
    else:
        _show_answer(options, result, _source(options, request, question), request.resolved.profile)


def _source(options: SimpleNamespace, request: PlanRequest, question: str = "") -> str:
    """The profile that a plan is made from, in words."""
    profile = request.resolved.profile
    name = "the shape given" if request.shape else profile.name
    if not request.shape and options.profile is None and options.model is None:
        name += " (the last profile made here)"
    source = f"{name}: {profile.origin.kind.value}, "
    source += ", ".join(filter(None, (profile.origin.source, profile.origin.date)))
    if options.profile is not None and options.cluster is not None:
        source += f"; communication {profile.communication_origin.source}"
    if profile.stack:
        source += f", as {profile.stack} runs it"
    graph = profile.graph
    if graph.trainable < graph.parameters:
        source += f", {format_count(graph.trainable)} of {format_count(graph.parameters)} parameters train"
    if request.estimated and options.precision is None and options.verbose:
        source += ", precision chosen automatically (--precision overrides it)"
    if question and options.precision is None and not profile.cluster.alike:
        source += "; fewer GPUs, all of one type, in their own best precision"
    return source


_TARGETS = ("step", "rate", "tokens")
_QUESTIONS = ("best_batch", "fewest", *_TARGETS, "price", "pareto")
_DETAILS = {
    "max_batch": ("best_batch",),
    "tokens_total": ("price",), "samples_total": ("price",), "steps": ("price",), "within": ("price",),
    "memory_step": ("pareto",),
    "plot": _QUESTIONS,
}  # fmt: skip
"""Options that belong to a question, and the questions that they belong to."""


def _question(options: Mapping[str, Any]) -> str:
    """The option of the question; empty: the fastest plan."""
    values = {name: options[name] for name in (*_QUESTIONS, *_DETAILS)}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    # --fewest together with a target means the same as the target alone.
    has_target = not values.keys().isdisjoint(_TARGETS)
    questions = [name for name in _QUESTIONS if name in values and not (name == "fewest" and has_target)]
    if len(questions) > 1:
        remedy = f"{_flag(questions[0])} asks something else: ask one thing."
        raise InputError(_flag(questions[1]), values[questions[1]], remedy)
    for name, belongs_to in _DETAILS.items():
        if name in values and set(questions).isdisjoint(belongs_to):
            raise InputError(_flag(name), values[name], f"It belongs to {' or '.join(map(_flag, belongs_to))}.")
    return questions[0] if questions else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(options: SimpleNamespace, question: str) -> None:
    """Refuse options that exclude each other, and files that cannot be written, before the search."""
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
    """The options of the model's shape that are set, as text."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "arch", "experts", "topk")
    values = {name: getattr(options, name) for name in names}
    values |= {"gated_mlp": options.gated, "tied_embeddings": options.tied}
    return {name: str(value).lower() for name, value in values.items() if value not in (None, False)}


def _show_plan(options: SimpleNamespace, plan: Plan, source: str, profile: Profile) -> None:
    from galvatron_lite.cli.plan_output import RUNNERS_UP, accuracy, print_plan
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.export.tools import export
    from galvatron_lite.plans.io import write_plan

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
    runners_up = RUNNERS_UP if options.best is None else options.best
    print_plan(plan, source, accuracy(profile), options.verbose, runners_up)
    if plan.provenance is not None and plan.provenance.certificate:
        typer.echo(f"Certificate: {plan.provenance.certificate}")
    for line in by_hand:
        typer.echo(line)
    written(options.output, "" if options.target is None else f", the settings of {options.target}")


def _show_answer(options: SimpleNamespace, answer: Answer, source: str, profile: Profile) -> None:
    """Print and write the answer to another question, then raise ``InfeasibleError`` if there is none."""
    from galvatron_lite.analysis.answers import answer_text, as_data, figure
    from galvatron_lite.cli.plan_output import accuracy, print_answer
    from galvatron_lite.errors import InfeasibleError
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.io import write_plan

    text = answer_text(answer)
    if options.output is not None and text.chosen is not None and text.chosen.plan is not None:
        write_plan(text.chosen.plan, options.output)
    if options.plot is not None:
        write_text(options.plot, figure(answer))
    if options.as_json:
        print_json(as_data(answer))
    else:
        print_answer(text, source, accuracy(profile))
    if text.failed:
        raise InfeasibleError(text.sentence)
    if not options.as_json:
        written(options.output)
        written(options.plot)


def _search(options: SimpleNamespace, question: str, request: PlanRequest) -> Plan | PhasedPlan | Answer:
    """Search for what is asked: the fastest plan, a plan of every phase, or the answer to a question."""
    from galvatron_lite import api

    def read(name: str, parse: Callable[[str, str], Any]) -> Any:
        text = getattr(options, name)
        return None if text is None else parse(text, _flag(name))

    if options.phases is not None:
        return api.plan_phases(options.phases, request)
    if not question:
        best = api.RUNNERS_UP if options.best is None else options.best
        return api.plan(request, certify=options.certify, runners_up=best, tolerance=options.tolerance)
    if question == "best_batch":
        return api.best_batch(request, max_batch=options.max_batch)
    if question == "pareto":
        return api.pareto_front(request, memory_step=read("memory_step", parse_bytes))
    if question == "price":
        return api.cheapest(
            request, price=options.price, samples=read("samples_total", parse_count),
            tokens=read("tokens_total", parse_count), steps=read("steps", parse_count),
            within=read("within", parse_seconds),
        )  # fmt: skip
    return api.fewest_devices(
        request, step=read("step", parse_seconds), samples=read("rate", parse_count), tokens=read("tokens", parse_count)
    )


def _show_phases(options: SimpleNamespace, plan: PhasedPlan) -> None:
    from galvatron_lite.plans.phases import write_phased_plan

    if options.output is not None:
        write_phased_plan(plan, options.output)
    if options.as_json:
        print_json(plan, seconds=plan.seconds)
    else:
        _print_phases(plan)
        written(options.output)


def _print_phases(plan: PhasedPlan) -> None:
    from galvatron_lite.search.result import summary

    console = wide_console()
    first = plan.phases[0].plan
    origin = first.provenance.profile_origin if first.provenance else "unknown"
    console.print(f"{first.model} on {first.devices} devices in {len(plan.phases)} phases", style="bold")
    console.print(f"Costs {origin}; switches estimated.\n")
    table = plain_table("phase", "steps", "batch", "sequence", "step", "memory", "takes")
    for phase in plan.phases:
        prediction = phase.plan.prediction
        step, peak = (0.0, 0) if prediction is None else (prediction.step_seconds, prediction.peak_memory)
        counts = (format_count(phase.steps), str(phase.plan.global_batch), str(phase.sequence))
        table.add_row(phase.name, *counts, format_seconds(step), format_bytes(peak), format_duration(phase.seconds))
    console.print(table)
    console.print()
    for phase in plan.phases:
        switch = ""
        if phase.switch is not None:
            seconds, size = format_seconds(phase.switch.seconds), format_bytes(phase.switch.received)
            switch = f" (after a switch of {seconds}, {size} to each device)"
        console.print(f"{phase.name}: {summary(phase.plan)}{switch}")
    single, always = plan.single_seconds, plan.always_seconds
    others = "no one plan fits all phases" if single is None else f"{format_duration(single)} under one plan throughout"
    others += "" if always is None else f", {format_duration(always)} with the fastest plan in every phase"
    console.print(f"\nThe run: {format_duration(plan.seconds)} ({others}).")
