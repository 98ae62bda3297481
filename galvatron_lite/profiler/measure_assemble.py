"""From finished tasks to a profile."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from galvatron_lite import __version__
from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.files import from_data
from galvatron_lite.profiler.measure_hardware import with_throughput
from galvatron_lite.profiler.measure_overhead import BlockingCost
from galvatron_lite.profiler.measure_scope import EDGES, Scope, layer_key, layer_settings
from galvatron_lite.profiler.measure_tasks import Results
from galvatron_lite.profiler.schema import (
    PROFILE_VERSION,
    CollectiveFit,
    CollectivePoint,
    HostOverhead,
    LayerPoint,
    OptimizerCost,
    Origin,
    OriginKind,
    Overlap,
    Profile,
    Throughput,
)
from galvatron_lite.units import ITEM_BYTES

Array = NDArray[np.float64]
_ROUNDS = 25
_SLOWEST = 1e-15


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """``latency + slope * size``."""

    latency: float  # seconds, >= 0
    slope: float  # seconds per byte, > 0
    residual: float  # median of |predicted - measured| / measured

    def __call__(self, size: float) -> float:
        """Seconds for a size."""
        return self.latency + self.slope * size


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LatencyFit:
    """The line of least relative error, little moved by outliers.

    Relative errors, since small and large messages matter alike; iteratively reweighted least squares towards least
    absolute deviation (Schlossmacher, JASA 68, 1973); a negative latency is set to 0 and the slope fitted alone.

    Args:
        sizes: bytes; at least one, not all zero.
        seconds: measured, > 0.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weights = np.ones_like(y)
    for _ in range(_ROUNDS):
        latency, slope = _weighted(x, y, weights / y**2)
        errors = np.abs(latency + slope * x - y) / y
        weights = 1.0 / np.maximum(errors, 1e-6)
    return LatencyFit(latency, slope, float(np.median(errors)))


def _weighted(x: Array, y: Array, weights: Array) -> tuple[float, float]:
    """Weighted least squares; both results are kept physical."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread, along = weights @ (x - mean_x) ** 2, weights @ ((x - mean_x) * (y - mean_y))
    slope = float(along / spread) if spread > 0 else 0.0
    latency = float(mean_y) - slope * float(mean_x)
    if latency < 0 or spread <= 0:
        return 0.0, max(float(weights @ (x * y) / (weights @ (x * x))), _SLOWEST)
    return (latency, slope) if slope > 0 else (float(mean_y), _SLOWEST)


def fit_collectives(points: Sequence[CollectivePoint]) -> tuple[CollectiveFit, ...]:
    """One straight line for every collective and shape of group."""
    groups: dict[tuple[object, ...], list[CollectivePoint]] = defaultdict(list)
    for point in points:
        groups[(point.collective, point.group, point.stride, point.siblings)].append(point)
    return tuple(_fit_group(group) for group in groups.values())


def _fit_group(points: list[CollectivePoint]) -> CollectiveFit:
    line = fit_line([point.size for point in points], [point.seconds for point in points])
    first = points[0]
    return CollectiveFit(
        collective=first.collective,
        group=first.group,
        stride=first.stride,
        siblings=first.siblings,
        latency=line.latency,
        bandwidth=1.0 / line.slope,
        residual=line.residual,
    )


def assemble(name: str, scope: Scope, results: Results) -> Profile:
    """The profile from the results of all tasks."""
    layers, communication = _layer_points(scope, results), _communication(results)
    throughput = from_data(Throughput, results["throughput"], "throughput")
    fits = fit_collectives(communication)
    measured = with_throughput(scope.cluster, throughput, scope.graph.precision)
    return Profile(
        version=PROFILE_VERSION,
        name=name,
        graph=scope.graph,
        cluster=with_links(measured, fits),
        origin=_origin(scope, median(point.spread for point in layers)),
        communication_origin=_origin(scope, 0.0) if fits else Origin(OriginKind.ESTIMATED, "levels of the cluster"),
        layers=layers,
        optimizer=from_data(OptimizerCost, results["optimizer"], "optimizer"),
        collectives=communication,
        fits=fits,
        overlap=from_data(Overlap, results["overlap"], "overlap"),
        overhead=_overhead(results),
        throughput=throughput,
        gather_precision=scope.graph.precision,
        reduce_precision=scope.parameter_precision,
        parameter_precision=scope.parameter_precision,
        copied_bytes=(0 if scope.graph.precision == scope.parameter_precision else ITEM_BYTES[scope.graph.precision]),
        versions=software(),
    )


def with_links(cluster: Cluster, fits: tuple[CollectiveFit, ...]) -> Cluster:
    """The cluster, its innermost level with the latency and bandwidth of a message between neighbours as measured."""
    near = [fit for fit in fits if fit.collective is Collective.SEND_RECV and fit.stride == 1]
    if not near or cluster.levels[0].size < 2:
        return cluster
    inner = replace(
        cluster.levels[0],
        latency=near[0].latency,
        bandwidth=near[0].bandwidth,
        contention=1.0,
        efficiency=1.0,
        source="measured",
    )
    return replace(cluster, levels=(inner, *cluster.levels[1:]))


def software() -> tuple[tuple[str, str], ...]:
    """Versions of what was measured with."""
    return (("galvatron_lite", __version__), ("torch", torch.__version__), ("python", platform.python_version()))


def _layer_points(scope: Scope, results: Results) -> tuple[LayerPoint, ...]:
    blocks = [results[layer_key(setting)] for setting in layer_settings(scope)]
    edges = [point for key, pair in results.items() if key.startswith(f"{EDGES}/") for point in pair]
    return tuple(from_data(LayerPoint, one, "layers") for one in [*blocks, *edges] if one is not None)


def _communication(results: Results) -> tuple[CollectivePoint, ...]:
    names = tuple(f"{collective.value}/" for collective in Collective)
    points = [point for key, value in results.items() if key.startswith(names) for point in value]
    return tuple(from_data(CollectivePoint, one, "collectives") for one in points)


def _origin(scope: Scope, spread: float) -> Origin:
    processes = f"{scope.world} process{'es' if scope.world > 1 else ''}"
    source = f"{scope.cluster.device.name}, {scope.device.type}, {processes}"
    date = datetime.now(UTC).date().isoformat()
    return Origin(OriginKind.MEASURED, source, date, scope.rule.least, spread)


def _overhead(results: Results) -> HostOverhead:
    own = from_data(HostOverhead, results["overhead"], "overhead")
    waiting = from_data(BlockingCost, results["waiting"], "waiting")
    return replace(own, tensor=waiting.fixed, tensor_per_byte=waiting.per_byte)
