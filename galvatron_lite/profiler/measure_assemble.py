"""From finished tasks to a profile."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median

import torch

from galvatron_lite import __version__
from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.files import from_data
from galvatron_lite.profiler.fit import fit_collectives
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
        copied_bytes=_copied(scope),
        versions=software(),
    )


def _copied(scope: Scope) -> int:
    """Bytes of an item of a copy of a weight, where compute is in another precision than parameters."""
    return 0 if scope.graph.precision == scope.parameter_precision else ITEM_BYTES[scope.graph.precision]


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
