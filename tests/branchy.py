"""Small models that fall into branches, with profiles: ``before``, towers that read it or the input, ``after``."""

from __future__ import annotations

import random
from collections.abc import Sequence

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Passed, Recompute, Role
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint, OptimizerCost, Profile
from tests.factories import make_cluster, make_kind, make_profile, random_points

SAMPLES = (1, 2, 4, 8)
NO_HOST = HostOverhead(branch=0.0)


def towers(
    sizes: Sequence[int], kinds: dict[str, LayerKind], read: int = 0, given: int = 10, alike: bool = False
) -> ModelGraph:
    """A graph of ``before``, towers ``t0.0``, ``t0.1``, ... of so many layers each, and ``after``, which joins them.

    Args:
        sizes: layers of each tower, all of a kind ``t0``, ``t1``, ...
        kinds: of the layers, ``before`` and ``after`` among them.
        read: bytes a sample that each tower reads of ``before``; 0: it reads the model's input.
        given: bytes a sample that it gives ``after``.
        alike: whether all towers are of kind ``t0``.
    """
    layers = [Layer("before", "before", Role.BEFORE, ("before",))]
    tensors = [Passed("before", tuple(f"t{tower}.0" for tower in range(len(sizes))), read)]
    for tower, size in enumerate(sizes):
        names = [f"t{tower}.{place}" for place in range(size)]
        kind = "t0" if alike else f"t{tower}"
        layers += [Layer(name, kind, Role.BLOCK, (name,)) for name in names]
        tensors += [Passed(a, (b,), given) for a, b in zip(names, [*names[1:], "after"], strict=True)]
    layers.append(Layer("after", "after", Role.AFTER, ("after",)))
    return ModelGraph("towers", tuple(layers), kinds, 8, "fp32", tuple(tensors))


def plain_profile(
    seconds: Sequence[float],
    *,
    parameters: Sequence[int] | None = None,
    cluster: Cluster | None = None,
    read: int = 0,
    given: int = 10,
    fixed: bool = False,
    overhead: HostOverhead = NO_HOST,
) -> Profile:
    """A tower of one layer for each of some seconds of forward a sample, twice as many of backward.

    Args:
        seconds: of one sample, in forward.
        parameters: items of each tower.
        cluster: two devices with quick links if not given.
        read, given: see ``towers``.
        fixed: whether a layer takes as long for any number of samples.
        overhead: of the host.
    """
    items = parameters or [100] * len(seconds)
    kinds = [make_kind(f"t{tower}", size, boundary=given) for tower, size in enumerate(items)]
    kinds += [make_kind("before", 0, boundary=read), make_kind("after", 0, boundary=given)]
    points = [
        LayerPoint(
            f"t{tower}", count, 1, False, Recompute.NONE, work * (1 if fixed else count),
            2 * work * (1 if fixed else count), 5 * count, 9 * count, 7 * count,
        )
        for tower, work in enumerate(seconds)
        for count in SAMPLES
    ]  # fmt: skip
    points += [
        LayerPoint(name, count, 1, False, Recompute.NONE, 0.0, 0.0, 0, 0, 0)
        for name in ("before", "after")
        for count in SAMPLES
    ]
    graph = towers([1] * len(seconds), {kind.name: kind for kind in kinds}, read, given)
    machine = cluster or make_cluster(2, bandwidth=1e12, latency=0.0)
    return make_profile(graph, points, machine, optimizer=OptimizerCost("adamw", 8, 0.0), overhead=overhead)


def random_towers(draw: random.Random, devices: int, count: int, read: int = 0) -> Profile:
    """Towers of one or two random layers, which tensor parallelism may split."""
    kinds = [
        make_kind(f"t{tower}", draw.randint(100, 2000), tensor_degrees=draw.choice([1, 2, 4]), boundary=40)
        for tower in range(count)
    ]
    kinds += [make_kind("before", 0, boundary=read), make_kind("after", draw.randint(0, 50), boundary=40)]
    graph = towers([draw.randint(1, 2) for _ in range(count)], {kind.name: kind for kind in kinds}, read, 40)
    points = [point for kind in kinds for point in random_points(kind, draw, SAMPLES)]
    cluster = make_cluster(devices, 0, draw.choice([1e7, 1e9]), draw.choice([0.0, 1e-5]))
    return make_profile(graph, points, cluster, overhead=HostOverhead(*(draw.choice([0.0, 1e-5]) for _ in range(4))))
