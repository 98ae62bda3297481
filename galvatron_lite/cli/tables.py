"""Plans, profiles and answers as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron_lite.cli.terminal import plain_table, wide_console
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from galvatron_lite.analysis.answers import Answer, AnswerText
    from galvatron_lite.profiler.schema import LayerPoint, Profile


def accuracy(profile: Profile) -> str:
    """How far off estimated costs of this kind of model are, as published runs tell; nothing of measured ones."""
    from galvatron_lite.analysis.explanation import expected_error
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if profile.origin.kind is not OriginKind.ESTIMATED:
        return ""
    found = expected_error(profile.graph, load_calibration())
    if found.error is None:
        return f"the error of estimated step times is unknown for {found.models}"
    return f"estimated step times of {found.models} are off by {found.error:.0%} on average ({found.source})"


@dataclass(frozen=True, slots=True)
class _BranchFigures:
    branch: Branch  # of the model
    parameters: int  # items
    # forward and backward of one sample; None where the profile has no figures of some layer
    seconds: tuple[float, float] | None


def _shown_point(profile: Profile, kind: str) -> LayerPoint | None:
    """The figures of a kind of layer that tables show: of the fewest whole samples, not split; None: there are none."""
    points = [entry for entry in profile.layers if entry.kind == kind]
    return next((entry for entry in points if entry.samples >= 1), next(iter(points), None))


def figures_of(profile: Profile, region: BranchRegion) -> Iterator[_BranchFigures]:
    """Of every branch of a region."""
    graph = profile.graph
    for branch in region.branches:
        kinds = [graph.kind_of(layer) for layer in graph.layers if layer.name in branch.layers]
        points = [_shown_point(profile, kind.name) for kind in kinds]
        known = [point for point in points if point is not None and point.samples == 1]
        seconds = sum(point.forward for point in known), sum(point.backward for point in known)
        items = sum(kind.parameters.total for kind in kinds)
        yield _BranchFigures(branch, items, seconds if len(known) == len(points) else None)


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


def best_gain(profile: Profile, region: BranchRegion) -> float:
    """The sum of its branches' times, of one sample, over the longest; 0 where it is not known."""
    own = [one.seconds for one in figures_of(profile, region)]
    times = [sum(seconds) for seconds in own if seconds is not None]
    return sum(times) / max(times) if len(times) == len(own) and max(times) > 0 else 0.0


def print_answer(answer: Answer, source: str, accuracy: str) -> None:
    """The table of an answer, the answer in a sentence, and what it is exact over."""
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
    from galvatron_lite.analysis.sweeps import ParetoFront

    return text.chosen is None and answer.complete and not isinstance(answer, ParetoFront)


def print_profile(profile: Profile, where: str) -> None:
    """A profile in short: the machine, each kind of layer, branches, the links, the fits' residuals."""
    console = wide_console()
    graph, origin = profile.graph, profile.origin
    mixed = any(kind.routing.choices for kind in graph.kinds.values())
    active = f" ({format_count(graph.active_parameters)} of a token)" if mixed else ""
    console.print(
        f"{profile.name}: {format_count(graph.parameters)} parameters{active} in {len(graph.layers)} layers, "
        f"{' and '.join(f'{group.count} x {group.device.name}' for group in profile.cluster.groups)}",
        style="bold",
    )
    console.print(
        f"{origin.kind.value}: {origin.source}; {len(profile.layers)} layer points, spread {origin.spread:.1%}"
    )
    names = ("kind", "layers", "samples", "forward", "backward", "kept")
    table = plain_table(*names)
    for kind in graph.kinds:
        point = _shown_point(profile, kind)
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
