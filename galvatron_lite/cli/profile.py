"""``galvatron profile``: measure or estimate the costs of a model's layers, or convert a profile to another device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from galvatron_lite.capture.named import check_function_named, is_factory, load_factory
from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import interruptible, plain_table, print_json, progress_bar, wide_console
from galvatron_lite.limits import SAMPLES
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions
from galvatron_lite.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.profiler.schema import LayerPoint, Profile

INTERRUPTED = "interrupted; finished measurements are kept, the same command goes on from there"


def profile_command(
    model: str = typer.Argument(
        ...,
        help="FILE.py:FACTORY that returns model, (model, batch) or (model, batch, loss_fn); "
        "a model name (gpt-tiny, llama2-7b); or a YAML file.",
    ),
    cluster: str | None = typer.Option(
        None, "--cluster", help="Cluster name (a100-80gb) or YAML file, with --estimate."
    ),
    gpus: int | None = typer.Option(None, "--gpus", help="Number of GPUs, with --estimate."),
    estimate: bool = typer.Option(False, "--estimate", help="Estimate from data sheets instead of measuring."),
    sequence: options.Sequence = None,
    precision: options.Precision = None,
    trainable: options.Trainable = None,
    freeze: options.Freeze = None,
    samples: int | None = typer.Option(
        None, "--max-samples", min=1, max=SAMPLES, help="Largest number of samples to measure on one device."
    ),
    name: str | None = typer.Option(None, "--name", help="Name of the profile. Default: that of the model."),
    folder: options.Folder = options.PROFILES,
    check: bool = typer.Option(
        True, "--check/--no-check", help="Also try which plans train the model like one process, on a small copy."
    ),
    calibration: options.Calibration = None,  # noqa: ARG001  its callback chooses the constants
    as_json: options.Json = False,
) -> None:
    """Measure or estimate what each layer costs.

    Measures on this machine, alone or under torchrun. With --estimate, costs come from data sheets.
    """
    # The allocator warns of every tensor that is older than memory tracking.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from galvatron_lite import api
    from galvatron_lite.profiler.store import last_profile

    check_function_named("model", model)
    target: Any = model
    batch, loss_fn = None, None
    if is_factory(model):
        target, batch, loss_fn = load_factory(model)
    elif not estimate:
        from galvatron_lite.verify.source import build_named

        target = build_named(model, sequence)
    with interruptible(INTERRUPTED), progress_bar("Profiling", quiet=as_json) as progress:
        result = api.profile(
            target, batch, loss_fn=loss_fn, cluster=cluster, gpus=gpus, estimate=estimate, sequence=sequence,
            precision=precision, trainable=trainable, freeze=freeze or (), name=name, folder=folder,
            max_samples=samples, progress=progress, check=check,
        )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        show_profile(result, last_profile(folder), as_json)


def profile_transfer_command(
    profile: Path = typer.Argument(..., help="Measured profile (YAML or JSON)."),
    target: str = typer.Option(..., "--to", help="Target: a cluster (h100, FILE.yaml) or a device (RTX-4090)."),
    gpus: int | None = typer.Option(None, "--gpus", help="Number of GPUs of the target. Default: as in the profile."),
    precision: str | None = typer.Option(
        None, "--precision", help="Precision of matmuls where the profile does not record it: tf32."
    ),
    output: options.ProfileOutput = None,
    folder: options.Folder = options.PROFILES,
    as_json: options.Json = False,
) -> None:
    """Convert a measured profile to another device, using both data sheets."""
    from galvatron_lite.profiler.store import read_profile, save_profile, write_profile
    from galvatron_lite.profiler.transfer import class_ratios, machines, transfer_profile

    source = read_profile(profile)
    cluster = _target_cluster(target, gpus or source.cluster.devices)
    carried = transfer_profile(source, cluster, precision=precision)
    where = output or save_profile(carried, folder, cluster.name)
    if output is not None:
        write_profile(carried, output)
    show_profile(carried, where, as_json)
    if as_json:
        return
    table = plain_table("class", "part here", "seconds there / here")
    ratios = class_ratios(source, *machines(source, cluster, precision))
    total = sum(ratio.here for ratio in ratios)
    for ratio in ratios:
        table.add_row(ratio.kind.value, f"{ratio.here / total:.0%}", f"{ratio.ratio:.2f}")
    wide_console().print(table)


def _target_cluster(target: str, gpus: int) -> Cluster:
    """A cluster by name or file, or for the name of a device its vendor's reference design."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.cluster.catalog import known_clusters, load_cluster, match_device
    from galvatron_lite.cluster.links import cluster_from_links

    device = None if target.lower() in known_clusters() else match_device(target)
    if device is None:
        return load_cluster(target, gpus)
    return cluster_from_links(device, gpus, None, None, None, None, load_calibration())


@dataclass(frozen=True, slots=True)
class _BranchFigures:
    branch: Branch
    parameters: int  # items
    seconds: tuple[float, float] | None  # forward and backward of one sample; None if not all layers were profiled


def _shown_point(profile: Profile, kind: str) -> LayerPoint | None:
    """The point of a kind of layer that tables show: of the fewest samples, at least one; None without any."""
    points = [point for point in profile.layers if point.kind == kind]
    return next((point for point in points if point.samples >= 1), next(iter(points), None))


def figures_of(profile: Profile, region: BranchRegion) -> Iterator[_BranchFigures]:
    """The figures of every branch of a region."""
    graph = profile.graph
    for branch in region.branches:
        kinds = [graph.kind_of(layer) for layer in graph.layers if layer.name in branch.layers]
        points = [_shown_point(profile, kind.name) for kind in kinds]
        measured = [point for point in points if point is not None and point.samples == 1]
        seconds = sum(point.forward for point in measured), sum(point.backward for point in measured)
        items = sum(kind.parameters.total for kind in kinds)
        yield _BranchFigures(branch, items, seconds if len(measured) == len(points) else None)


def print_branches(console: Console, profile: Profile) -> None:
    """Print the branches of a model, for one sample on one device, and what running them at the same time gains."""
    regions = find_regions(profile.graph)
    if not regions:
        return
    table = plain_table("branch", "layers", "parameters", "forward", "backward", "reads", "gives")
    for figures in (figures for region in regions for figures in figures_of(profile, region)):
        branch, items = figures.branch, format_count(figures.parameters)
        times = [format_seconds(time) for time in figures.seconds or ()] or ["", ""]
        traffic = format_bytes(branch.input_bytes), format_bytes(branch.output_bytes)
        table.add_row(branch.name, str(len(branch.layers)), items, *times, *traffic)
    console.print(table)
    for region in regions:
        names, gain = ", ".join(branch.name for branch in region.branches), best_gain(profile, region)
        at_most = f": at the same time at most {gain:.2f}x as fast as one after the other" if gain else ""
        console.print(f"Independent of one another: {names}{at_most}.")


def best_gain(profile: Profile, region: BranchRegion) -> float:
    """The sum of the times of its branches, for one sample, over the longest; 0 if not known."""
    figures = list(figures_of(profile, region))
    times = [sum(branch.seconds) for branch in figures if branch.seconds is not None]
    return sum(times) / max(times) if len(times) == len(figures) and max(times) > 0 else 0.0


def show_profile(profile: Profile, where: Path, as_json: bool = False) -> None:
    """Print a profile in short: the machine, kinds of layers, branches and links; or as JSON."""
    if as_json:
        print_json(profile)
        return
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
    table = plain_table("kind", "layers", "samples", "forward", "backward", "kept")
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
    for note in (*graph.notes, *(f"{note}." for note in profile.needs.notes)):
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
