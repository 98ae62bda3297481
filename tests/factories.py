"""Small random models, clusters and profiles for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Recompute, Role, SplitDims, TensorSplit, Tie
from galvatron_lite.profiler.schema import (
    PROFILE_VERSION,
    HostOverhead,
    LayerPoint,
    OptimizerCost,
    Origin,
    OriginKind,
    Overlap,
    Profile,
)

ORIGIN = Origin(OriginKind.ESTIMATED, "a test")


def make_cluster(devices: int = 4, context: int = 0, bandwidth: float = 1e9, latency: float = 1e-6) -> Cluster:
    """One node of equal devices."""
    device = Device("cpu", 2**30, 1e10, {"fp32": 1e11}, context=context, source="test")
    return Cluster("test", (DeviceGroup(device, devices),), (Level("node", devices, bandwidth, latency),))


def make_kind(
    name: str,
    parameters: int,
    *,
    tensor_degrees: int = 1,
    recompute: Sequence[Recompute] = (Recompute.NONE,),
    boundary: int = 1000,
    whole: int = 0,
) -> LayerKind:
    """A kind of layer; ``parameters`` are split by tensor parallelism, ``whole`` are not."""
    empty = TensorSplit()
    return LayerKind(
        name,
        TensorSplit(parameters, 0, whole),
        (),
        dict.fromkeys(recompute, empty),
        empty,
        empty,
        boundary,
        boundary,
        SplitDims(sequence=8),
        tensor_degrees=tensor_degrees,
        tensor_collectives=4 if tensor_degrees > 1 else 0,
        sequence_parallel=tensor_degrees > 1,
    )


def make_graph(kinds: Sequence[LayerKind], order: Sequence[str], ties: Sequence[Tie] = ()) -> ModelGraph:
    """Layers ``l0``, ``l1``, ... of the kinds in ``order``; ``before`` and ``after`` are such roles."""
    roles = {"before": Role.BEFORE, "after": Role.AFTER}
    layers = [Layer(f"l{place}", name, roles.get(name, Role.BLOCK)) for place, name in enumerate(order)]
    return ModelGraph("test", tuple(layers), {kind.name: kind for kind in kinds}, 8, "fp32", ties=tuple(ties))


def make_profile(
    graph: ModelGraph,
    points: Sequence[LayerPoint],
    cluster: Cluster,
    *,
    optimizer: OptimizerCost | None = None,
    overlap: Overlap | None = None,
    overhead: HostOverhead | None = None,
) -> Profile:
    """An fp32 profile whose communication comes from the cluster's levels."""
    return Profile(
        PROFILE_VERSION,
        "test",
        graph,
        cluster,
        ORIGIN,
        ORIGIN,
        tuple(points),
        optimizer or OptimizerCost("adamw", 8, 1e-9),
        overlap=overlap or Overlap(1.1, 1.2),
        overhead=overhead or HostOverhead(),
        gather_precision="fp32",
    )


def random_points(kind: LayerKind, draw: random.Random, samples: Sequence[int] = (1, 2, 4, 8)) -> list[LayerPoint]:
    """Points of a kind for every tensor degree up to 4 and its recompute choices, growing with the samples."""
    points = []
    degrees = [degree for degree in (1, 2, 4) if kind.tensor_degrees % degree == 0]
    for tensor in degrees:
        for shared in (False, True) if tensor > 1 else (False,):
            for recompute in kind.kept:
                points.extend(_curve(kind.name, tensor, shared, recompute, draw, samples))
    return points


def _curve(
    kind: str, tensor: int, shared: bool, recompute: Recompute, draw: random.Random, samples: Sequence[int]
) -> list[LayerPoint]:
    forward, factor = draw.uniform(1e-4, 1e-3) / tensor, draw.uniform(1.5, 2.5)
    again = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.3, Recompute.FULL: 1.0}[recompute]
    share = {Recompute.NONE: 1.0, Recompute.SELECTIVE: 0.5, Recompute.FULL: 0.1}[recompute]
    kept = draw.uniform(500, 5000) * share / tensor
    extra, ahead = draw.uniform(0, 3000), draw.uniform(0, 2000)
    return [
        LayerPoint(
            kind, count, tensor, shared, recompute,
            forward * count + 1e-5, (factor + again) * forward * count + 1e-5,
            int(kept * count), int((kept + extra) * count), int((kept + ahead) * count),
        )
        for count in samples
    ]  # fmt: skip


def random_profile(
    draw: random.Random, *, devices: int = 4, blocks: int = 3, alike: bool = False, tied: bool = False
) -> Profile:
    """A random model of ``before``, blocks and ``after`` with a random profile.

    Args:
        draw: the source of randomness.
        devices: of the cluster.
        blocks: how many.
        alike: whether all blocks are of one kind; two kinds take turns at random otherwise.
        tied: whether ``before`` and ``after`` share parameters.
    """
    choices = [Recompute.NONE, *draw.sample([Recompute.SELECTIVE, Recompute.FULL], draw.randint(0, 2))]
    names = ["block0"] if alike else ["block0", "block1"]
    degree = draw.choice([1, 2, 4])
    kinds = [
        make_kind("before", draw.randint(0, 800), boundary=draw.randint(100, 800), tensor_degrees=degree),
        make_kind("after", draw.randint(1, 800), boundary=draw.randint(100, 800), tensor_degrees=degree),
        *(
            make_kind(
                name, draw.randint(100, 2000), tensor_degrees=degree, recompute=choices,
                boundary=draw.randint(100, 3000), whole=draw.randint(0, 50),
            )
            for name in names
        ),
    ]  # fmt: skip
    order = ["before", *(draw.choice(names) for _ in range(blocks)), "after"]
    ties = [Tie("l0", f"l{blocks + 1}", draw.randint(1, 800))] if tied else []
    graph = make_graph(kinds, order, ties)
    points = [point for kind in kinds for point in random_points(kind, draw)]
    cluster = make_cluster(devices, draw.choice([0, 1000]), draw.choice([1e7, 1e8, 1e9]), draw.choice([0.0, 1e-5]))
    optimizer = OptimizerCost("adamw", 8, draw.choice([0.0, 1e-8]), 0.0, draw.choice([0.0, 8.0]), draw.choice([0, 1]))
    overhead = HostOverhead(*(draw.choice([0.0, 1e-5]) for _ in range(4)))
    if overhead.pipeline:
        overhead = replace(overhead, split_product=1e-5, split_share=0.1)
    slow = Overlap(draw.uniform(1, 2), draw.uniform(1, 2))
    return make_profile(graph, points, cluster, optimizer=optimizer, overlap=slow, overhead=overhead)
