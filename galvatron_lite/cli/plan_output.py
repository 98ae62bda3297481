"""Print a plan, in at most 15 lines or in full, and the answer to another question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from galvatron_lite.cli.terminal import plain_table, print_wrapped, wide_console
from galvatron_lite.plans.describe import (
    branch_rows,
    fullest_of,
    group_label,
    headline,
    memory_bar,
    memory_parts,
    shown_groups,
    stage_rows,
    time_line,
    time_parts,
)
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.analysis.answers import AnswerText
    from galvatron_lite.plans.schema import Alternative, Plan, Prediction, Provenance
    from galvatron_lite.profiler.schema import Profile

MOST_LINES = 15  # of the short form
LEAST_ROWS, MOST_NOTES, RUNNERS_UP = 3, 3, 2  # of the short form: rows of layers, notes, runners-up
_COMPUTE = ("forward", "backward", "recompute", "optimizer")
_FULL = 0.97  # share of the usable budget from which memory counts as a bound


def accuracy(profile: Profile) -> str:
    """The error of estimated step times of such models, from published runs; empty for measured profiles."""
    from galvatron_lite.analysis.explanation import expected_error
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if profile.origin.kind is not OriginKind.ESTIMATED:
        return ""
    errors = expected_error(profile.graph, load_calibration())
    if errors.error is None:
        return f"the error of estimated step times is unknown for {errors.models}"
    return f"estimated step times of {errors.models} are off by {errors.error:.0%} on average ({errors.source})"


def print_answer(text: AnswerText, source: str, accuracy: str) -> None:
    """Print the table of an answer, the answer in a sentence, and notes."""
    console = wide_console()
    console.print(f"From {source}.\n")
    table = plain_table(*text.columns)
    for row in text.rows:
        table.add_row(*row)
    console.print(table)
    console.print()
    if not text.failed:
        console.print(text.sentence, style="bold")
    for note in filter(None, (*text.notes, accuracy)):
        console.print(note)


def print_plan(
    plan: Plan, source: str, accuracy: str = "", verbose: bool = False, runners_up: int = RUNNERS_UP
) -> None:
    """Print a plan with its memory, step time and runners-up; ``source``: its profile in words."""
    console = wide_console()
    console.print(headline(plan), style="bold")
    if not verbose:
        _print_short(console, plan, source, accuracy, runners_up)
        return
    console.print(f"From {source}.\n")
    _print_layers(console, plan)
    console.print()
    _print_memory(console, plan)
    _print_time(console, plan, accuracy)
    _print_alternatives(console, plan)
    for reason in plan.left_out:
        if not _expected(reason):
            console.print(f"Note: {reason}")
    for note in plan.provenance.notes if plan.provenance else ():
        console.print(f"Note: {note}.")


def _print_short(console: Console, plan: Plan, source: str, accuracy: str, runners_up: int) -> None:
    lines = [f"{label:<9}  {text}" for label, text in _figures(plan, source, accuracy, runners_up)]
    notes = [f"Note: {note}." for note in (plan.provenance.notes if plan.provenance else ())[:MOST_NOTES]]
    _print_layers(console, plan, max(LEAST_ROWS, MOST_LINES - 2 - len(lines) - len(notes)))
    for line in lines:
        cut = line.startswith("runner-up") and len(line) > console.width
        print_wrapped(console, f"{line[: console.width - 1]}…" if cut else line, 11)
    for note in notes:
        print_wrapped(console, note, 6)


def _figures(plan: Plan, source: str, accuracy: str, runners_up: int) -> Iterator[tuple[str, str]]:
    if plan.prediction is not None and plan.provenance is not None:
        yield "memory", _memory_line(plan, plan.provenance)
        seconds = f"{format_seconds(plan.prediction.step_seconds)}{_range(plan.provenance)}"
        yield "step", f"{seconds}; {_throughput(plan.prediction)}"
        yield "bound by", _bound_line(plan, plan.prediction, plan.provenance)
        yield "search", _proof(plan.provenance, len(plan.stages))
    error = accuracy.partition(" (")[0]
    yield "costs", source.removeprefix(f"{plan.model}: ") + f"; {error}" * bool(error)
    if plan.prediction is not None:
        order = sorted(plan.alternatives, key=lambda other: (not other.fits, other.step_seconds))
        for alternative in order[:runners_up]:
            yield "runner-up", _runner_up(alternative, plan.prediction)


def _memory_line(plan: Plan, provenance: Provenance) -> str:
    fullest = fullest_of(plan.stages, provenance)
    budget = provenance.budget_of(fullest)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_parts(fullest.memory)[:3])
    stage = f" in stage {plan.stages.index(fullest)}" if len(plan.stages) > 1 else ""
    margin = f", {provenance.margin:.1%} kept free" if provenance.margin else ""
    share = fullest.memory.total / budget if budget else 0.0
    return (
        f"{format_bytes(fullest.memory.total)} of {format_bytes(budget)} a device ({share:.0%}{margin}){stage}: {parts}"
    )


def _bound_line(plan: Plan, prediction: Prediction, provenance: Provenance) -> str:
    """What takes most of the step, and whether memory may limit it."""
    parts = time_parts(prediction.time)
    sums: dict[str, float] = {}
    for name, seconds in parts:
        bound = "compute" if name in _COMPUTE else name
        sums[bound] = sums.get(bound, 0.0) + seconds
    fullest = fullest_of(plan.stages, provenance)
    full = fullest.memory.total > _FULL * (1 - provenance.margin) * provenance.budget_of(fullest)
    shares = ", ".join(f"{name} {seconds / prediction.step_seconds:.0%}" for name, seconds in parts[:4])
    return f"{max(sums, key=lambda name: sums[name], default='compute')}{' and memory' * full}: {shares}"


def _runner_up(other: Alternative, prediction: Prediction) -> str:
    change = other.step_seconds / prediction.step_seconds - 1
    fits = "" if other.fits else ", does not fit"
    beside = f"{change:+.0%}" if abs(change) >= 0.005 else "equal"
    seconds = f"{format_seconds(other.step_seconds)}{_range(other)}, {beside}"
    return f"{seconds}, {format_bytes(other.peak_memory)}{fits}: {other.summary}"


def _throughput(prediction: Prediction) -> str:
    several = prediction.tokens_per_second != prediction.samples_per_second
    tokens = f", {format_count(prediction.tokens_per_second)} tokens/s" * several
    mfu = f", MFU {prediction.mfu:.1%}" if prediction.mfu else ""
    return f"{format_count(prediction.samples_per_second)} samples/s{tokens}{mfu}"


def _expected(reason: str) -> bool:
    """Whether a reason is common to all plans: the layers around the blocks are small and split in few ways."""
    endings = (": ", " offers", " has no parameters")
    return any(f": {edge}{ending}" in reason for edge in ("before", "after") for ending in endings)


def _print_layers(console: Console, plan: Plan, most: int | None = None) -> None:
    table = plain_table("stage", "layers", "strategy")
    rows = [*stage_rows(plan), *branch_rows(plan)]
    cut = most is not None and len(rows) > most
    for row in rows[: most - 1] if cut and most else rows:
        table.add_row(row.stage, row.layers, row.strategy)
    if cut and most:
        table.add_row("…", f"{len(rows) - most + 1} more rows: -v")
    console.print(table)


def _print_memory(console: Console, plan: Plan) -> None:
    if plan.prediction is None or plan.provenance is None:
        return
    provenance = plan.provenance
    console.print("Memory on each device of a stage", style="bold")
    fullest = fullest_of(plan.stages, provenance)
    groups = shown_groups(plan, fullest)
    width = max(3, *(len(group_label(group)) for group in groups if group))
    for group in groups:
        console.print(f"  {group_label(group) if group else '…':>{width}} {_bar(plan, provenance, group)}".rstrip())
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_parts(fullest.memory))
    console.print(f"  fullest: {parts}")
    if provenance.margin:
        console.print(
            f"  margin: {provenance.margin:.1%} of the budget is kept free, as measured peaks may be above predictions"
        )
    console.print()


def _bar(plan: Plan, provenance: Provenance, group: range | None) -> str:
    """The memory bar of the fullest stage of a group; empty for stages that are not shown."""
    if group is None:
        return ""
    stage = fullest_of([plan.stages[number] for number in group], provenance)
    return memory_bar(stage, provenance.budget_of(stage)) + " at most" * (len(group) > 1)


def _print_time(console: Console, plan: Plan, accuracy: str) -> None:
    if plan.prediction is None:
        return
    prediction = plan.prediction
    console.print("Time", style="bold")
    console.print(f"  {time_line(plan)}")
    console.print(f"  {_throughput(prediction)}")
    if plan.provenance is not None:
        if plan.provenance.most_seconds:
            console.print(
                f"  {_range(plan.provenance).strip(' ()')} where links between nodes are slower, less is hidden behind "
                "compute, ranks straggle, or kernels are slower or quicker, by as much as published runs differ"
            )
        console.print(f"  search: {_proof(plan.provenance, len(plan.stages))}; costs {plan.provenance.profile_origin}")
    if accuracy:
        console.print(f"  {accuracy}")
    console.print()


def _proof(provenance: Provenance, stages: int) -> str:
    if provenance.interrupted:
        return f"interrupted; {provenance.proof.value}, at most {provenance.gap:.1%} from the best"
    if not provenance.gap:
        return f"{provenance.proof.value}{' by formula, before simulation' * (stages > 1)}"
    return f"within {max(provenance.gap, 1e-4):.2%} of the best possible (proven by formula, before simulation)"


def _range(of: Alternative | Provenance) -> str:
    """The least and the most seconds of a step over all scenarios; empty if not computed."""
    return f" ({format_seconds(of.least_seconds)} to {format_seconds(of.most_seconds)})" if of.most_seconds else ""


def _print_alternatives(console: Console, plan: Plan) -> None:
    if not plan.alternatives or plan.prediction is None:
        return
    table = plain_table("runner-up (not proven)", "step", "beside the plan", "memory", "fits")
    for alternative in plan.alternatives:
        change = alternative.step_seconds / plan.prediction.step_seconds - 1
        table.add_row(
            alternative.summary,
            format_seconds(alternative.step_seconds) + _range(alternative),
            f"{change:+.0%}",
            format_bytes(alternative.peak_memory),
            "yes" if alternative.fits else "no",
        )
    console.print(table)
