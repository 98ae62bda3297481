"""Independent branches of a profiled model, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron_lite.parallelism.branch.find import Branch, Region, find_regions
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.profiler.schema import LayerPoint, Profile


@dataclass(frozen=True, slots=True)
class BranchFigures:
    """What a branch takes on one device, its layers one after another.

    Attributes:
        branch: of the model.
        parameters: items.
        seconds: forward and backward of one sample; None where the profile has no figures of some layer.
    """

    branch: Branch
    parameters: int
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
    from rich.table import Table

    regions = find_regions(profile.graph)
    if not regions:
        return
    titles = ("branch", "layers", "parameters", "forward", "backward", "reads", "gives")
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
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
