"""Plans, profiles and answers as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron_lite.cli.terminal import plain_table, print_json, wide_console
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.branch.find import Branch, Region, find_regions
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
)
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from galvatron_lite.analysis.answers import Answer, AnswerText
    from galvatron_lite.plans.schema import Alternative, Plan, Provenance
    from galvatron_lite.profiler.schema import LayerPoint, Profile


def accuracy(profile: Profile) -> str:
    """How far off estimated costs of this kind of model are, as published runs tell; nothing of measured ones."""
    from galvatron_lite.analysis.expected_error import expected_error
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if profile.origin.kind is not OriginKind.ESTIMATED:
        return ""
    found = expected_error(profile.graph, load_calibration())
    if found.error is None:
        return f"estimated from data sheets; the error of such step times was not measured for {found.models}"
    return f"estimated step times of {found.models} are off by {found.error:.0%} on average ({found.source})"


@dataclass(frozen=True, slots=True)
class BranchFigures:
    """What a branch takes on one device, its layers one after another."""

    branch: Branch  # of the model
    parameters: int  # items
    # forward and backward of one sample; None where the profile has no figures of some layer
    seconds: tuple[float, float] | None


def shown_point(profile: Profile, kind: str) -> LayerPoint | None:
    """The figures of a kind of layer that tables show: of the fewest whole samples, not split; None: there are none."""
    points = [entry for entry in profile.layers if entry.kind == kind]
    return next((entry for entry in points if entry.samples >= 1), next(iter(points), None))


def figures_of(profile: Profile, region: Region) -> Iterator[BranchFigures]:
    """Of every branch of a region."""
    graph = profile.graph
    for branch in region.branches:
        kinds = [graph.kind_of(layer) for layer in graph.layers if layer.name in branch.layers]
        points = [shown_point(profile, kind.name) for kind in kinds]
        known = [point for point in points if point is not None and point.samples == 1]
        seconds = sum(point.forward for point in known), sum(point.backward for point in known)
        items = sum(kind.parameters.total for kind in kinds)
        yield BranchFigures(branch, items, seconds if len(known) == len(points) else None)


def print_branches(console: Console, profile: Profile) -> None:
    """The branches of a model, for one sample on one device, and what they could gain; nothing where it has none."""
    regions = find_regions(profile.graph)
    if not regions:
        return
    titles = ("branch", "layers", "parameters", "forward", "backward", "reads", "gives")
    table = plain_table(*titles)
    for one in (one for region in regions for one in figures_of(profile, region)):
        times = [format_seconds(time) for time in one.seconds or ()] or ["", ""]
        traffic = format_bytes(one.branch.input_bytes), format_bytes(one.branch.output_bytes)
        items = format_count(one.parameters)
        table.add_row(one.branch.name, str(len(one.branch.layers)), items, *times, *traffic)
    console.print(table)
    for region in regions:
        names, gain = ", ".join(branch.name for branch in region.branches), best_gain(profile, region)
        at_most = f": at the same time at most {gain:.2f}x as fast as one after the other" if gain else ""
        console.print(f"Independent of one another: {names}{at_most}.")


def best_gain(profile: Profile, region: Region) -> float:
    """The sum of its branches' times, of one sample, over the longest; 0 where it is not known."""
    own = [one.seconds for one in figures_of(profile, region)]
    times = [sum(seconds) for seconds in own if seconds is not None]
    return sum(times) / max(times) if len(times) == len(own) and max(times) > 0 else 0.0


def print_answer(answer: Answer, source: str, accuracy: str) -> None:
    """The table of an answer, the answer in a sentence, and what it is exact over.

    Args:
        answer: to a question.
        source: what its costs come from.
        accuracy: how far off they may be; nothing is said where it is empty.
    """
    from galvatron_lite.analysis.answers import answer_text

    told = answer_text(answer)
    console = wide_console()
    console.print(f"From {source}.\n")
    table = plain_table(*told.columns)
    for row in told.rows:
        table.add_row(*row)
    console.print(table)
    console.print()
    if not _failed(answer, told):
        console.print(told.sentence, style="bold")
    for note in (*told.notes, accuracy):
        if note:
            console.print(note)


def print_answer_json(answer: Answer) -> None:
    """The same for programmes."""
    from galvatron_lite.analysis.answers import as_data

    print_json(as_data(answer))


def check_output(output: Path | None, question: str) -> None:
    """Whether an answer can be written as a plan."""
    if output is not None and question == "pareto":
        raise InputError("-o", str(output), "--pareto has many plans: take one by its memory: --mem, without --pareto.")
    check_folder("-o", output)


def check_folder(option: str, path: Path | None) -> None:
    """Whether there is a folder to write a file to."""
    if path is not None and not path.parent.is_dir():
        raise InputError(option, str(path), f"There is no folder {path.parent}: make it first.")


def write_answer(answer: Answer, output: Path | None, plot: Path | None) -> None:
    """Write the plan of an answer, and its figure."""
    from galvatron_lite.analysis.answers import answer_text
    from galvatron_lite.analysis.sweep_figure import figure
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.io import write_plan

    chosen = answer_text(answer).chosen
    if output is not None and chosen is not None and chosen.plan is not None:
        write_plan(chosen.plan, output)
    if plot is not None:
        write_text(plot, figure(answer))


def require_answer(answer: Answer) -> None:
    """Where no number of GPUs is enough, that is an error, once what was found has been shown."""
    from galvatron_lite.analysis.answers import answer_text

    told = answer_text(answer)
    if _failed(answer, told):
        raise InfeasibleError(told.sentence)


def _failed(answer: Answer, text: AnswerText) -> bool:
    """Whether everything was looked at and nothing is enough."""
    from galvatron_lite.analysis.sweeps import Front

    return text.chosen is None and answer.complete and not isinstance(answer, Front)


def print_plan(plan: Plan, source: str, accuracy: str = "") -> None:
    """The plan, memory against the budget, where the time goes, and the runner-ups.

    Args:
        plan: what to print.
        source: what its costs come from.
        accuracy: how far off they may be; nothing is said where it is empty.
    """
    console = wide_console()
    console.print(headline(plan), style="bold")
    console.print(f"From {source}.\n")
    _print_layers(console, plan)
    _print_memory(console, plan)
    _print_time(console, plan, accuracy)
    _print_alternatives(console, plan)
    for reason in plan.left_out:
        if not _expected(reason):
            console.print(f"Note: {reason}")
    for note in plan.provenance.notes if plan.provenance else ():
        console.print(f"Note: {note}.")


def _expected(reason: str) -> bool:
    """Whether a reason is of every plan: what lies before and after the blocks is small and splits in few ways."""
    said = (": ", " offers", " has no parameters")
    return any(f": {edge}{one}" in reason for edge in ("before", "after") for one in said)


def _print_layers(console: Console, plan: Plan) -> None:
    table = plain_table("stage", "layers", "strategy")
    for row in stage_rows(plan):
        table.add_row(row.stage, row.layers, row.strategy)
    for row in branch_rows(plan):
        table.add_row(row.stage, row.layers, row.strategy)
    console.print(table)
    console.print()


def _print_memory(console: Console, plan: Plan) -> None:
    if plan.prediction is None or plan.provenance is None:
        return
    provenance = plan.provenance
    console.print("Memory on each device of a stage", style="bold")
    fullest = fullest_of(plan.stages, provenance)
    shown = shown_groups(plan, fullest)
    width = max(3, *(len(group_label(group)) for group in shown if group))
    for group in shown:
        console.print(f"  {group_label(group) if group else '…':>{width}} {_bar(plan, provenance, group)}".rstrip())
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory_parts(fullest.memory))
    console.print(f"  fullest: {parts}")
    if provenance.margin:
        console.print(
            f"  margin: {provenance.margin:.1%} of the budget is kept free, as measured peaks may be above predictions"
        )
    console.print()


def _bar(plan: Plan, provenance: Provenance, group: range | None) -> str:
    """Memory of the fullest of some stages; nothing for those that are not shown."""
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
    tokens = f", {format_count(prediction.tokens_per_second)} tokens/s" * (
        prediction.tokens_per_second != prediction.samples_per_second
    )
    mfu = f", MFU {prediction.mfu:.1%}" if prediction.mfu else ""
    console.print(f"  {format_count(prediction.samples_per_second)} samples/s{tokens}{mfu}")
    if plan.provenance is not None:
        if plan.provenance.most_seconds:
            console.print(
                f"  {_range(plan.provenance).strip(' ()')} where links between nodes run at half rate, less is hidden "
                "behind compute, or kernels are 10% slower or quicker"
            )
        console.print(f"  search: {_proof(plan.provenance)}; costs {plan.provenance.profile_origin}")
    if accuracy:
        console.print(f"  {accuracy}")
    console.print()


def _proof(provenance: Provenance) -> str:
    from galvatron_lite.plans.schema import Proof

    if provenance.proof is Proof.PROVEN and provenance.gap:
        return f"within {max(provenance.gap, 1e-4):.2%} of the best possible (proven in the closed form)"
    told = f"at most {max(provenance.gap, 1e-4):.2%}"
    gap = f" ({told} from the best)" if provenance.gap else ""
    if provenance.interrupted:
        return f"interrupted; {provenance.proof.value}, at most {provenance.gap:.1%} from the best"
    return f"{provenance.proof.value}{gap}"


def _range(of: Alternative | Provenance) -> str:
    """The least and the most seconds of a step over scenarios; empty where nobody asked."""
    return f" ({format_seconds(of.least_seconds)} to {format_seconds(of.most_seconds)})" if of.most_seconds else ""


def _print_alternatives(console: Console, plan: Plan) -> None:
    if not plan.alternatives or plan.prediction is None:
        return
    table = plain_table("runner-up (not proven)", "step", "slower by", "memory", "fits")
    for other in plan.alternatives:
        slower = other.step_seconds / plan.prediction.step_seconds - 1
        table.add_row(
            other.summary,
            format_seconds(other.step_seconds) + _range(other),
            f"{slower:+.0%}",
            format_bytes(other.peak_memory),
            "yes" if other.fits else "no",
        )
    console.print(table)


def print_profile(profile: Profile, where: str) -> None:
    """A profile in short: the machine, each kind of layer, branches, the links, the fits' residuals."""
    console = wide_console()
    graph, origin = profile.graph, profile.origin
    console.print(
        f"{profile.name}: {format_count(graph.parameters)} parameters in {len(graph.layers)} layers, "
        f"{' and '.join(f'{group.count} x {group.device.name}' for group in profile.cluster.groups)}",
        style="bold",
    )
    console.print(
        f"{origin.kind.value}: {origin.source}; {len(profile.layers)} layer points, spread {origin.spread:.1%}"
    )
    names = ("kind", "layers", "samples", "forward", "backward", "kept")
    table = plain_table(*names)
    for kind in graph.kinds:
        point = shown_point(profile, kind)
        count = sum(layer.kind == kind for layer in graph.layers)
        cells = ("", "", "", "") if point is None else (
            f"{float(point.samples):g}", format_seconds(point.forward), format_seconds(point.backward),
            format_bytes(point.kept),
        )  # fmt: skip
        table.add_row(kind, str(count), *cells)
    console.print(table)
    print_branches(console, profile)
    _print_links(console, profile)
    for note in graph.notes:
        console.print(f"Note: {note}")
    console.print(f"Written to {where}.")


def _print_links(console: Console, profile: Profile) -> None:
    if not profile.fits:
        return
    table = plain_table("collective", "ranks", "latency", "bandwidth", "residual")
    for fit in profile.fits:
        ranks = f"{fit.group}" + (f", {fit.stride} apart" if fit.stride > 1 else "")
        speed = f"{format_bytes(fit.bandwidth)}/s"
        table.add_row(fit.collective.value, ranks, format_seconds(fit.latency), speed, f"{fit.residual:.0%}")
    console.print(table)
