"""Corrected profiles from measurements.

Links: an all-reduce of S bytes between the members of a level takes ``a + f S b`` where the profile says ``a' + S b``;
two sizes give the factor f on the time a byte takes and the additional latency. Devices: the median over groups of
layers of measured over predicted forward time. Measurements are low ranks or medians of repetitions, so that single
slow ones do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from statistics import median

from galvatron_lite.cluster.cluster import Collective, DeviceGroup, RankGroup
from galvatron_lite.cluster.collectives import hops_of
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint, DeviceFigures, LayerPoint, Profile
from galvatron_lite.runtime.monitor.schema import Corrections, LayerGroup, LinkFactor, LinkPoint, StepWindow

_SIZES = (16 * 2**20, 4 * 2**20, 2**20, 2**18)
"""Bytes of the larger message between members of a level: the first that does not take long."""
_LONGEST = 0.01
"""Predicted seconds of the larger message, at most."""
_SMALLER = 16
"""How many times smaller the other message is."""
_DIGITS = 3
"""Of factors: no plan depends on more, and logs are read by people."""


def link_factors(points: Sequence[LinkPoint], threshold: float) -> tuple[LinkFactor, ...]:
    """The levels that differ from the profile by more than a relative threshold; each is measured at two sizes."""
    factors = []
    for level in dict.fromkeys(point.level for point in points):
        level_points = [point for point in points if point.level == level]
        small, large = min(level_points, key=lambda point: point.size), max(level_points, key=lambda point: point.size)
        if abs(large.seconds / large.predicted - 1.0) > threshold:
            factors.append(_link_factor(level, small, large))
    return tuple(factors)


def _link_factor(level: str, small: LinkPoint, large: LinkPoint) -> LinkFactor:
    size = max(large.size - small.size, 1)
    slope = max(large.predicted - small.predicted, 1e-12) / size
    # noise may make the larger message the quicker one; that makes nothing infinitely fast
    per_byte = max((large.seconds - small.seconds) / size / slope, 0.05)
    start = max(small.predicted - slope * small.size, 0.0)
    latency = max(small.seconds - per_byte * slope * small.size - start, 0.0)
    return LinkFactor(level, round(per_byte, _DIGITS), round(latency, 6))


def predicted_groups(profile: Profile, plan: Plan) -> dict[str, float]:
    """Seconds of one micro-batch's forward of every run of blocks of a plan, by the name of its first layer."""
    pricer, layers = LayerPricer(for_mode(profile, plan.mode)), {layer.name: layer for layer in profile.graph.layers}
    seconds = {}
    for run in (run for stage in plan.stages for run in stage.runs):
        layer = layers[run.first]
        cost = pricer.price(layer.kind, run.strategy, plan.microbatch, plan.pipeline)
        if layer.role is Role.BLOCK and cost is not None:
            seconds[run.first] = run.count * cost.forward_seconds
    return seconds


def device_factors(
    groups: Sequence[LayerGroup], predicted: Mapping[str, float], ranks: int, threshold: float
) -> tuple[float, ...]:
    """Factor on the compute time of each rank; empty where all are as predicted, to the threshold.

    Ranks that are as fast as the median rank, to the threshold, get its factor.
    """
    ratios: list[list[float]] = [[] for _ in range(ranks)]
    for group in groups:
        for rank, seconds in zip(group.ranks, group.seconds, strict=True):
            if predicted.get(group.first):
                ratios[rank].append(seconds / predicted[group.first])
    factors = [median(ratio) if ratio else 1.0 for ratio in ratios]
    common = median(factors)
    factors = [common if abs(factor / common - 1.0) <= threshold else factor for factor in factors]
    if all(abs(factor - 1.0) <= threshold for factor in factors):
        return ()
    return tuple(round(factor, _DIGITS) for factor in factors)


def memory_factor(window: StepWindow, predicted: Sequence[int]) -> float:
    """The largest factor over ranks of peak bytes on predicted ones; at least 1."""
    ratios = [peak / bytes_ for peak, bytes_ in zip(window.memory, predicted, strict=False) if bytes_]
    return round(max([1.0, *ratios]), _DIGITS)


def corrected(profile: Profile, corrections: Corrections) -> Profile:
    """The profile with corrected links and devices."""
    slower = _with_devices(profile, corrections.devices)
    return _with_links(slower, corrections.links) if corrections.links else slower


def _with_links(profile: Profile, links: Sequence[LinkFactor]) -> Profile:
    cluster, factors = profile.cluster, {link.level: link for link in links}
    levels, more = [], dict[str, float]()  # seconds that a message over a level takes longer
    for level in cluster.levels:
        link = factors.get(level.name, LinkFactor("", 1.0))
        more[level.name] = link.latency / _messages(Collective.ALL_REDUCE, level.size)
        latency = level.latency + more[level.name]
        levels.append(replace(level, bandwidth=level.bandwidth / link.per_byte, latency=latency))

    def slower(shape: CollectiveFit | CollectivePoint) -> tuple[float, float]:
        """Factor on the time of a byte, and additional seconds, of a collective: its slowest link counts."""
        group = RankGroup(shape.group, shape.stride, shape.siblings)
        hops = () if group.reach >= cluster.devices else hops_of(cluster, group)
        crossed = [hop.level for hop in hops if hop.level in factors]
        per_byte = max((factors[level].per_byte for level in crossed), default=1.0)
        return per_byte, _messages(shape.collective, shape.group) * sum(more[level] for level in crossed)

    fits, points = [], []
    for fit in profile.fits:
        per_byte, seconds = slower(fit)
        fits.append(replace(fit, latency=fit.latency + seconds, bandwidth=fit.bandwidth / per_byte))
    lines = {_key(fit): fit for fit in profile.fits}
    for point in profile.collectives:
        # the share that grows with the bytes, by the straight line through the curve, takes longer
        per_byte, seconds = slower(point)
        line, share = lines.get(_key(point)), 1.0
        if line is not None:
            share = point.size / line.bandwidth / max(line.latency + point.size / line.bandwidth, 1e-12)
        points.append(replace(point, seconds=point.seconds * (1.0 + share * (per_byte - 1.0)) + seconds))
    cluster = replace(cluster, levels=tuple(levels))
    return replace(profile, cluster=cluster, fits=tuple(fits), collectives=tuple(points))


def _key(shape: CollectiveFit | CollectivePoint) -> tuple[Collective, int, int, int]:
    return shape.collective, shape.group, shape.stride, shape.siblings


def _messages(collective: Collective, size: int) -> int:
    """Messages one after the other in a collective of a ring of so many ranks."""
    if collective in (Collective.SEND_RECV, Collective.BROADCAST):
        return 1
    return max((2 if collective is Collective.ALL_REDUCE else 1) * (size - 1), 1)


def _with_devices(profile: Profile, factors: Sequence[float]) -> Profile:
    """A profile with devices of several types, where some ranks are slower than others; else a scaled one."""
    if not factors or not profile.cluster.alike or len(factors) != profile.cluster.devices:
        return profile
    layers = _scaled(profile.layers, max(factors))
    if len(set(factors)) == 1:
        return replace(profile, layers=layers)
    group = profile.cluster.groups[0]
    names = {factor: f"{group.device.name} (time x {factor:g})" for factor in factors}
    runs = [(factor, len(list(run))) for factor, run in groupby(factors)]
    groups = tuple(DeviceGroup(replace(group.device, name=names[factor]), count) for factor, count in runs)
    types = tuple(
        DeviceFigures(name, _scaled(profile.layers, factor), profile.optimizer, profile.overhead)
        for factor, name in names.items()
    )
    return replace(profile, cluster=replace(profile.cluster, groups=groups), layers=layers, types=types)


def _scaled(points: Sequence[LayerPoint], factor: float) -> tuple[LayerPoint, ...]:
    return tuple(replace(point, forward=point.forward * factor, backward=point.backward * factor) for point in points)


def link_probes(profile: Profile) -> list[tuple[RankGroup, tuple[LinkPoint, LinkPoint]]]:
    """The all-reduces, a small and a large one, that measure each level that joins several members.

    They are on the groups that cross the level alone. Their seconds are to be filled in.
    """
    cluster, links = profile.cluster, Links(profile)

    def predicted(group: RankGroup, size: int) -> float:
        return links.seconds(
            Communication(Collective.ALL_REDUCE, size, group, Moment.STEP, overlaps=False, cause="data")
        )

    probes = []
    for place, level in enumerate(cluster.levels):
        if level.size > 1:
            stride = prod(below.size for below in cluster.levels[:place])
            group = RankGroup(level.size, stride, cluster.devices // level.size)
            large = next((size for size in _SIZES if predicted(group, size) <= _LONGEST), _SIZES[-1])
            small = large // _SMALLER
            points = tuple(LinkPoint(level.name, size, 0.0, predicted(group, size)) for size in (small, large))
            probes.append((group, (points[0], points[1])))
    return probes
