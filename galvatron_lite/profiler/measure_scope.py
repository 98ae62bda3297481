"""What a profile of a model on a world is made of, as a list of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.profiler.measure_bench import LayerBench
from galvatron_lite.profiler.measure_hardware import (
    GroupShape,
    group_shapes,
    make_group,
    measure_collective,
    measure_optimizer,
    measure_overlap,
    measure_throughput,
)
from galvatron_lite.profiler.measure_layers import LayerSetting
from galvatron_lite.profiler.measure_pictures import measured_grids, measured_slices, share_on
from galvatron_lite.profiler.measure_tasks import MeasureTask
from galvatron_lite.profiler.timing import TimingRule

EDGES = "before and after"  # first part of the key of what is measured around the blocks


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured, and where."""

    graph: ModelGraph  # the model
    parameter_precision: str  # of the user's parameters
    samples: tuple[int, ...]  # numbers of samples on the device, fewest first
    degrees: tuple[int, ...]  # tensor-parallel degrees
    world: int  # processes that measure together
    cluster: Cluster  # what the world is; what cannot fit its devices is not run
    device: torch.device  # of this process
    rule: TimingRule  # how long to time one point
    # whether samples are only measured whole, and not shares of their pixels: for plans of one device
    whole: bool = False


def layer_settings(scope: Scope) -> list[LayerSetting]:
    """Every point of every kind of block: shares of a sample's pixels, then fewest samples first."""
    kinds = {layer.kind: scope.graph.kind_of(layer) for layer in scope.graph.layers if layer.role is Role.BLOCK}
    shares = [
        LayerSetting(name, share_on(kind, grid), recompute=recompute, grid=grid)
        for name, kind in kinds.items()
        for grid in (() if scope.whole else measured_grids(kind))
        for recompute in kind.kept
    ]
    slices = [
        LayerSetting(name, samples, recompute=recompute, by=by, ways=ways)
        for samples in scope.samples[::2]
        for name, kind in kinds.items()
        for by, ways in measured_slices(kind, scope.degrees)
        for recompute in kind.kept
    ]
    return [*shares, *slices] + [
        LayerSetting(name, samples, degree, shared, recompute)
        for samples in scope.samples
        for name, kind in kinds.items()
        for degree in scope.degrees
        if degree == 1 or kind.tensor_degrees % degree == 0
        for shared in (False, True)
        if not shared or (degree > 1 and kind.sequence_parallel and kind.dims.sequence % degree == 0)
        for recompute in kind.kept
    ]


def make_tasks(scope: Scope, bench: LayerBench) -> list[MeasureTask]:
    """Everything a profile is made of; the same list on every rank."""
    device, rule, precision = scope.device, scope.rule, scope.graph.precision
    tasks = [MeasureTask("throughput", "throughput", lambda _: to_data(measure_throughput(device, precision, rule)))]
    tasks += [_layer_task(setting, bench, scope) for setting in layer_settings(scope)]
    tasks += [_edge_task(samples, degree, bench) for samples in scope.samples for degree in scope.degrees]
    tasks += [_stem_task(setting, bench) for setting in stem_settings(scope)]
    tasks += [_sliced_edge_task(setting, bench) for setting in sliced_edges(scope)]
    tasks += [
        MeasureTask("optimizer", "optimizer", lambda _: to_data(measure_optimizer(device, rule))),
        MeasureTask("overlap", "overlap", lambda _: to_data(measure_overlap(device, rule))),
        MeasureTask("overhead", "overhead of the runtime", lambda _: to_data(bench.measure_overhead())),
        MeasureTask("waiting", "waiting at collectives", lambda _: to_data(bench.measure_waiting(max(scope.samples)))),
    ]
    groups: dict[GroupShape, dist.ProcessGroup | None] = {}
    for shape in group_shapes(scope.world):
        kinds = [kind for kind in Collective if kind is not Collective.SEND_RECV or shape.size == 2]
        tasks += [_collective_task(kind, shape, groups, scope) for kind in kinds]
    return tasks


def stem_settings(scope: Scope) -> list[LayerSetting]:
    """Points of what lies before the blocks on shares of a sample's pixels."""
    if scope.whole:
        return []
    name = next(layer.kind for layer in scope.graph.layers if layer.role is Role.BEFORE)
    kind = scope.graph.kinds[name]
    return [LayerSetting(name, share_on(kind, grid), grid=grid) for grid in measured_grids(kind)]


def sliced_edges(scope: Scope) -> list[LayerSetting]:
    """Points of what lies before and after the blocks with slices of their weights."""
    edges = {layer.kind: scope.graph.kind_of(layer) for layer in scope.graph.layers if layer.role is not Role.BLOCK}
    return [
        LayerSetting(name, samples, by=by, ways=ways)
        for samples in scope.samples[::2]
        for name, kind in edges.items()
        for by, ways in measured_slices(kind, scope.degrees)
    ]


def _layer_task(setting: LayerSetting, bench: LayerBench, scope: Scope) -> MeasureTask:
    def run(results: Mapping[str, Any]) -> Any:
        if not _fits(setting, scope, results):
            return None
        point = bench.measure_block(setting)
        return None if point is None else to_data(point)

    key = layer_key(setting)
    return MeasureTask(key, key.replace("/", " "), run)


def _fits(setting: LayerSetting, scope: Scope, results: Mapping[str, Any]) -> bool:
    """Whether the device can hold it, judged from fewer samples; if not, no plan can use it either."""
    steps: dict[float, int] = {after: before for before, after in pairwise(scope.samples)}
    fewer = steps.get(setting.samples)
    if fewer is None:
        return True
    known = results.get(layer_key(replace(setting, samples=fewer)))
    return known is not None and known["working"] * setting.samples / fewer < scope.cluster.device.memory


def layer_key(setting: LayerSetting) -> str:
    """Key of the task that measures a block under some choices."""
    shared = "+sp" if setting.sequence_parallel else ""
    sliced = f"/{setting.by} {setting.ways}" if setting.by else ""
    ways = f"tensor {setting.tensor}{shared}{sliced}"
    return f"{setting.kind}/samples {setting.samples}/{ways}/recompute {setting.recompute}"


def _edge_task(samples: int, degree: int, bench: LayerBench) -> MeasureTask:
    key = f"{EDGES}/samples {samples}/tensor {degree}"
    return MeasureTask(
        key, key.replace("/", " "), lambda _: [to_data(one) for one in bench.measure_edges(samples, degree)]
    )


def _stem_task(setting: LayerSetting, bench: LayerBench) -> MeasureTask:
    key = f"{EDGES}/pixels {setting.samples}"
    return MeasureTask(
        key, key.replace("/", " "), lambda _: [to_data(one) for one in (bench.measure_stem(setting),) if one]
    )


def _sliced_edge_task(setting: LayerSetting, bench: LayerBench) -> MeasureTask:
    def run(_: Mapping[str, Any]) -> Any:
        point = bench.measure_sliced_edge(setting)
        return [] if point is None else [to_data(point)]

    key = f"{EDGES}/{setting.kind}/samples {setting.samples}/{setting.by} {setting.ways}"
    return MeasureTask(key, key.replace("/", " "), run)


def _collective_task(
    collective: Collective, shape: GroupShape, groups: dict[GroupShape, dist.ProcessGroup | None], scope: Scope
) -> MeasureTask:
    def run(_: Mapping[str, Any]) -> Any:
        if shape not in groups:
            groups[shape] = make_group(shape)
        points = measure_collective(collective, shape, groups[shape], scope.device, rule=scope.rule)
        return [to_data(one) for one in points]

    key = f"{collective}/{shape.size} ranks {shape.stride} apart"
    return MeasureTask(key, key.replace("/", " "), run)
