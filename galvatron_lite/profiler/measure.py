"""Measures a profile: all measurements in a fixed order on every rank, resumable, written by rank 0."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from galvatron_lite import __version__
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.cluster.probe import probe
from galvatron_lite.files import from_data, to_data
from galvatron_lite.model.batch import LossFn, batch_size
from galvatron_lite.model.blocks import BlockNames
from galvatron_lite.model.graph import LayerKind, ModelGraph, Role
from galvatron_lite.model.trace.meta import precision_of
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.profiler.measure_bench import BranchTimer, LayerBench
from galvatron_lite.profiler.measure_hardware import (
    group_shapes,
    make_group,
    measure_collective,
    measure_optimizer,
    measure_overlap,
    measure_throughput,
    with_throughput,
)
from galvatron_lite.profiler.measure_layers import first_share, measured_channel_splits, measured_grids
from galvatron_lite.profiler.measure_overhead import Line
from galvatron_lite.profiler.schema import (
    PROFILE_VERSION,
    CollectiveFit,
    CollectivePoint,
    HostOverhead,
    LayerPoint,
    LayerSetting,
    OptimizerCost,
    Origin,
    OriginKind,
    Overlap,
    PlanNeeds,
    Profile,
    Throughput,
)
from galvatron_lite.profiler.store import data_hash, journal_path, save_profile, unwritable
from galvatron_lite.profiler.timing import (
    BRIEF_RULE,
    DEFAULT_RULE,
    Journal,
    MeasureTask,
    Progress,
    Results,
    TimingRule,
    from_first_rank,
    is_first_rank,
    run_tasks,
)
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.world import join, pick_device

USUAL_SAMPLES = 16
"""Most samples on a device that are measured by default; beyond them time grows linearly."""
EDGES = "before and after"  # first part of the key of points of the layers before and after the blocks
_ROUNDS = 25
_MIN_SLOPE = 1e-15  # seconds a byte
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured, and where."""

    graph: ModelGraph  # the model
    parameter_precision: str  # precision of the user's parameters
    samples: tuple[int, ...]  # numbers of samples on the device, ascending
    degrees: tuple[int, ...]  # tensor-parallel degrees
    world: int  # processes that measure together
    cluster: Cluster  # their machines; points that exceed a device's memory are not run
    device: torch.device  # device of this process
    rule: TimingRule  # how long to time one point
    unsplit: bool = False  # whether shares of a sample's pixels are left out, for plans of one device


def measure_profile(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    cluster: Cluster | None = None,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    precision: str | None = None,
    max_samples: int | None = None,
    tensor_degrees: Sequence[int] | None = None,
    name: str | None = None,
    folder: Path | str = Path("profiles"),
    progress: Progress | None = None,
    resume: bool = True,
    remember: bool = True,
    device: str = "auto",
    rule: TimingRule = DEFAULT_RULE,
    brief: bool = False,
    graph: ModelGraph | None = None,
    branch_seconds: BranchTimer | None = None,
    find_needs: Callable[[ModelGraph], PlanNeeds] | None = None,
) -> Profile:
    """Measure what a model's layers and the links of this world cost, and write the profile.

    Call it in a single process or, under torchrun, on every rank. A journal beside the profile keeps each finished
    point, so that an interrupted call resumes. Rank 0 writes.

    Args:
        model: an ``nn.Module`` (perhaps on meta; it is not changed) or a function that makes it.
        batch: example batch; rows are repeated if more samples are measured than it has.
        cluster: the machines of this world; default: probed.
        loss_fn: see ``model.batch.loss_of``.
        blocks: names of the repeated blocks, if they are not discovered.
        precision: precision of compute; default: that of the parameters.
        max_samples: the largest number of samples on a device; default: the batch's, at most 16.
        tensor_degrees: degrees to measure; default: all that the world and the model allow.
        name: name of the profile; default: the model's.
        folder: where profiles are kept.
        progress: called on rank 0 with (done, total, label).
        resume: whether to resume from a journal.
        remember: whether this becomes the last profile if there is one already.
        device: ``auto``, ``cpu`` or ``cuda``.
        rule: how long to time one point.
        brief: measure quickly for plans of one device: the fewest and the most samples, and no shares of pixels.
        graph: the model's graph, if it was traced already.
        branch_seconds: measures the host seconds of a call of a branch; default: an estimate.
        find_needs: finds what plans of the model keep to; every rank calls it, before the measurements.

    Raises:
        InputError: ``folder`` cannot be written.
    """
    place = pick_device(device)
    if "RANK" in os.environ:
        join(place)
    built = model if isinstance(model, nn.Module) else model()
    if graph is None:
        graph = trace(built, batch, loss_fn=loss_fn, blocks=blocks, precision=precision)
    needs = PlanNeeds() if find_needs is None else find_needs(graph)
    machine = from_first_rank(cluster or probe(_world(), place.type))
    counts = sample_counts(max_samples or min(batch_size(batch), USUAL_SAMPLES))
    counts = tuple(count for count in counts if count >= graph.least_samples) or (graph.least_samples,)
    rule = BRIEF_RULE if brief and rule is DEFAULT_RULE else rule
    scope = Scope(
        graph=graph,
        parameter_precision=precision_of(built),
        samples=tuple(dict.fromkeys((counts[0], counts[-1]))) if brief else counts,
        degrees=tuple(tensor_degrees or divisors(_world())),
        world=_world(),
        cluster=machine,
        device=place,
        rule=rule,
        unsplit=brief,
    )
    tasks = make_tasks(scope, LayerBench(built, graph, batch, loss_fn, place, rule, branch_seconds))
    title, root = name or graph.name, Path(folder)
    if (refused := from_first_rank(unwritable(root) if is_first_rank() else None)) is not None:
        raise refused
    journal = _open_journal(journal_path(root, machine_name(machine), title), scope, resume)
    profile = replace(assemble(title, scope, run_tasks(tasks, journal, progress)), needs=needs)
    if journal is not None:
        save_profile(profile, root, machine_name(machine), remember=remember)
        journal.remove()
    from_first_rank(None)  # wait until the files are written
    return profile


def sample_counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to and including ``most``."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))


def machine_name(cluster: Cluster) -> str:
    """Return the name of the folder for profiles of a machine."""
    host = cluster.fingerprint.get("host", "")[:6]
    return " ".join(part for part in (cluster.device.name, f"x{cluster.devices}", host) if part)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _open_journal(path: Path, scope: Scope, resume: bool) -> Journal | None:
    """Return rank 0's journal; it begins anew if the model, settings, machine or software changed."""
    if not is_first_rank():
        return None
    fingerprint = scope.cluster.fingerprint
    identity = [to_data(scope.graph), scope.samples, scope.degrees, fingerprint, str(scope.device), software()]
    return Journal(path, data_hash(identity), resume)


def _kinds(scope: Scope, *roles: Role) -> dict[str, LayerKind]:
    return {layer.kind: scope.graph.kind_of(layer) for layer in scope.graph.layers if layer.role in roles}


def layer_settings(scope: Scope) -> list[LayerSetting]:
    """Return all points of blocks: splits of pixels and channels first, then ascending numbers of samples."""
    kinds = _kinds(scope, Role.BLOCK)
    splits = [*_pixel_settings(scope, kinds), *channel_settings(scope, kinds)]
    return [setting._replace(recompute=choice) for setting in splits for choice in kinds[setting.kind].kept] + [
        LayerSetting(name, samples, degree, shared, recompute)
        for samples in scope.samples
        for name, kind in kinds.items()
        for degree in scope.degrees
        if degree == 1 or kind.tensor_degrees % degree == 0
        for shared in (False, True)
        if not shared or (degree > 1 and kind.sequence_parallel and kind.dims.sequence % degree == 0)
        for recompute in kind.kept
    ]


def before_settings(scope: Scope) -> list[LayerSetting]:
    """Return the points of the layer before the blocks on shares of a sample's pixels."""
    return list(_pixel_settings(scope, _kinds(scope, Role.BEFORE)))


def _pixel_settings(scope: Scope, kinds: Mapping[str, LayerKind]) -> Iterator[LayerSetting]:
    """Yield the points on shares of a sample's pixels."""
    for name, kind in kinds.items():
        for grid in () if scope.unsplit else measured_grids(kind):
            yield LayerSetting(name, first_share(kind, grid), grid=grid)


def channel_settings(scope: Scope, kinds: Mapping[str, LayerKind]) -> Iterator[LayerSetting]:
    """Yield the points of layers whose channels are split."""
    for samples, (name, kind) in product(scope.samples[::2], kinds.items()):
        for by, degree in measured_channel_splits(kind, scope.degrees):
            yield LayerSetting(name, samples, by=by, shares=degree)


def layer_key(setting: LayerSetting) -> str:
    """Return the key of the task that measures a block."""
    sequence = "+sp" if setting.sequence_parallel else ""
    channels = f"/{setting.by} {setting.shares}" if setting.by else ""
    split = f"tensor {setting.tensor}{sequence}{channels}"
    return f"{setting.kind}/samples {setting.samples}/{split}/recompute {setting.recompute}"


def make_tasks(scope: Scope, bench: LayerBench) -> list[MeasureTask]:
    """Return all measurements of a profile, in the same order on every rank."""
    device, rule = scope.device, scope.rule
    tasks: list[MeasureTask] = []

    def add(key: str, run: Callable[..., Any], *args: Any, label: str = "") -> None:
        tasks.append(MeasureTask(key, label or key.replace("/", " "), lambda _: _plain(run(*args))))

    add("throughput", measure_throughput, device, scope.graph.precision, rule)
    for setting in layer_settings(scope):
        key = layer_key(setting)
        tasks.append(MeasureTask(key, key.replace("/", " "), partial(_measure_block, setting, bench, scope)))
    for samples, degree in product(scope.samples, scope.degrees):
        add(f"{EDGES}/samples {samples}/tensor {degree}", bench.measure_edges, samples, degree)
    for setting in before_settings(scope):
        add(f"{EDGES}/pixels {setting.samples}", bench.measure_stem, setting)
    for setting in channel_settings(scope, _kinds(scope, Role.BEFORE, Role.AFTER)):
        key = f"{EDGES}/{setting.kind}/samples {setting.samples}/{setting.by} {setting.shares}"
        add(key, bench.measure_sliced_edge, setting)
    add("optimizer", measure_optimizer, device, rule)
    add("overlap", measure_overlap, device, rule)
    add("overhead", bench.measure_overhead, max(scope.samples), label="overhead of the runtime")
    add("waiting", bench.measure_waiting, max(scope.samples), label="waiting at collectives")
    group = cache(make_group)
    for shape, kind in product(group_shapes(scope.world), Collective):
        if kind is not Collective.SEND_RECV or shape.size == 2:
            key = f"{kind}/{shape.size} ranks {shape.stride} apart"
            add(key, lambda k=kind, s=shape: measure_collective(k, s, group(s), device, rule=rule))
    return tasks


def _measure_block(setting: LayerSetting, bench: LayerBench, scope: Scope, results: Mapping[str, Any]) -> Any:
    """Measure a point as plain data; no point if fewer samples show that it exceeds the device's memory, as then no
    plan can use it."""
    keys = {n: layer_key(setting._replace(samples=n)) for n in scope.samples if n < setting.samples}
    fewer = max((n for n, key in keys.items() if key in results), default=None)
    if fewer is not None:
        smaller = results[keys[fewer]]
        if not smaller or smaller[0]["working"] * setting.samples / fewer >= scope.cluster.device.memory:
            return []
    return _plain(bench.measure_block(setting))


def _plain(points: Any) -> Any:
    return [to_data(point) for point in points] if isinstance(points, (list, tuple)) else to_data(points)


def assemble(name: str, scope: Scope, results: Results) -> Profile:
    """Return the profile from the results of all tasks."""
    measured = [results[layer_key(setting)] for setting in layer_settings(scope)]
    measured += [points for key, points in results.items() if key.startswith(f"{EDGES}/")]
    layers = tuple(from_data(LayerPoint, point, "layers") for points in measured for point in points)
    kinds = tuple(f"{collective.value}/" for collective in Collective)
    points = [point for key, value in results.items() if key.startswith(kinds) for point in value]
    communication = tuple(from_data(CollectivePoint, point, "collectives") for point in points)
    throughput = from_data(Throughput, results["throughput"], "throughput")
    waiting = from_data(Line, results["waiting"], "waiting")
    overhead = from_data(HostOverhead, results["overhead"], "overhead")
    fits = fit_collectives(communication)
    precision, parameters = scope.graph.precision, scope.parameter_precision
    return Profile(
        version=PROFILE_VERSION,
        name=name,
        graph=scope.graph,
        cluster=with_links(with_throughput(scope.cluster, throughput, precision), fits),
        origin=_origin(scope, median(point.spread for point in layers)),
        communication_origin=_origin(scope, 0.0) if fits else Origin(OriginKind.ESTIMATED, "levels of the cluster"),
        layers=layers,
        optimizer=from_data(OptimizerCost, results["optimizer"], "optimizer"),
        collectives=communication,
        fits=fits,
        overlap=from_data(Overlap, results["overlap"], "overlap"),
        overhead=replace(overhead, tensor=waiting.fixed, tensor_per_byte=waiting.slope),
        throughput=throughput,
        gather_precision=precision,
        reduce_precision=parameters,
        parameter_precision=parameters,
        copied_bytes=0 if precision == parameters else ITEM_BYTES[precision],
        versions=software(),
    )


def _origin(scope: Scope, spread: float) -> Origin:
    processes = f"{scope.world} process{'es' if scope.world > 1 else ''}"
    source = f"{scope.cluster.device.name}, {scope.device.type}, {processes}"
    return Origin(OriginKind.MEASURED, source, datetime.now(UTC).date().isoformat(), scope.rule.least, spread)


def software() -> tuple[tuple[str, str], ...]:
    """Return the versions of the software that measures."""
    return (("galvatron_lite", __version__), ("torch", torch.__version__), ("python", platform.python_version()))


def with_links(cluster: Cluster, fits: tuple[CollectiveFit, ...]) -> Cluster:
    """Return the cluster with the measured latency and bandwidth between neighbours in its innermost level."""
    near = [fit for fit in fits if fit.collective is Collective.SEND_RECV and fit.stride == 1]
    if not near or cluster.levels[0].size < 2:
        return cluster
    inner = replace(
        cluster.levels[0], latency=near[0].latency, bandwidth=near[0].bandwidth, contention=1.0, efficiency=1.0,
        source="measured",
    )  # fmt: skip
    return replace(cluster, levels=(inner, *cluster.levels[1:]))


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """The line ``latency + slope * size``."""

    latency: float  # seconds, >= 0
    slope: float  # seconds per byte, > 0
    residual: float  # median of |predicted - measured| / measured

    def __call__(self, size: float) -> float:
        """Return the seconds for a size in bytes."""
        return self.latency + self.slope * size


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LatencyFit:
    """Fit a line with the least absolute relative error, which is robust to outliers.

    Errors are relative, since small and large messages matter equally. Iteratively reweighted least squares
    (Schlossmacher, JASA 68, 1973); a negative latency is set to 0 and the slope fitted alone.

    Args:
        sizes: bytes; at least one size, not all zero.
        seconds: measurements, > 0.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weights = np.ones_like(y)
    for _ in range(_ROUNDS):
        latency, slope = _weighted(x, y, weights / y**2)
        errors = np.abs(latency + slope * x - y) / y
        weights = 1.0 / np.maximum(errors, 1e-6)
    return LatencyFit(latency, slope, float(np.median(errors)))


def _weighted(x: Array, y: Array, weights: Array) -> tuple[float, float]:
    """Return latency and slope by weighted least squares, bounded to physical values."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread, along = weights @ (x - mean_x) ** 2, weights @ ((x - mean_x) * (y - mean_y))
    slope = float(along / spread) if spread > 0 else 0.0
    latency = float(mean_y) - slope * float(mean_x)
    if latency < 0 or spread <= 0:
        return 0.0, max(float(weights @ (x * y) / (weights @ (x * x))), _MIN_SLOPE)
    return (latency, slope) if slope > 0 else (float(mean_y), _MIN_SLOPE)


def fit_collectives(points: Sequence[CollectivePoint]) -> tuple[CollectiveFit, ...]:
    """Fit a line for each collective and shape of group."""
    groups: dict[tuple[Collective, int, int, int], list[CollectivePoint]] = defaultdict(list)
    for point in points:
        groups[point.collective, point.group, point.stride, point.siblings].append(point)
    lines = {key: fit_line([p.size for p in same], [p.seconds for p in same]) for key, same in groups.items()}
    return tuple(CollectiveFit(*key, line.latency, 1.0 / line.slope, line.residual) for key, line in lines.items())
