"""Corrections of a profile from measurements, and the corrected profile.

Links: the profile predicts ``a' + S b`` seconds for an all-reduce of S bytes within a level, and ``a + f S b`` is
measured; two sizes yield the factor f on the time per byte and the additional latency ``a - a'``. Devices: the factor
on the compute time of a rank is the median of measured over predicted forward time of its layers. Measurements are
medians or low order statistics of repetitions, so single slow ones do not count.
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
"""Candidates for the bytes of the larger message on a level: the first that is predicted to take short enough."""
_LONGEST = 0.01
"""Largest predicted seconds of the larger message."""
_SIZE_RATIO = 16
"""Size of the larger message over that of the smaller one."""
_DIGITS = 3
"""Digits of factors: no plan depends on more, and people read the logs."""


def link_factors(points: Sequence[LinkPoint], threshold: float) -> tuple[LinkFactor, ...]:
    """Return factors for the levels, each measured at two sizes, that deviate by more than a relative threshold."""
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
    # with noise the larger message may be the faster one, so the factor is bounded from below
    per_byte = max((large.seconds - small.seconds) / size / slope, 0.05)
    start = max(small.predicted - slope * small.size, 0.0)
    latency = max(small.seconds - per_byte * slope * small.size - start, 0.0)
    return LinkFactor(level, round(per_byte, _DIGITS), round(latency, 6))


def predicted_groups(profile: Profile, plan: Plan) -> dict[str, float]:
    """Predict the forward seconds of one micro-batch for each run of blocks, by the name of its first layer."""
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
    """Return a factor on the compute time of each rank; empty if all ranks are as predicted, within the threshold.

    Ranks that are as fast as the median rank, within the threshold, get its factor.
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
    """Return the largest ratio over ranks of measured to predicted peak bytes, at least 1."""
    ratios = [peak / bytes_ for peak, bytes_ in zip(window.memory, predicted, strict=False) if bytes_]
    return round(max([1.0, *ratios]), _DIGITS)


def corrected(profile: Profile, corrections: Corrections) -> Profile:
    """Return the profile with corrected links and devices."""
    profile = _with_devices(profile, corrections.devices)
    return _with_links(profile, corrections.links) if corrections.links else profile


def _with_links(profile: Profile, links: Sequence[LinkFactor]) -> Profile:
    cluster, factors = profile.cluster, {link.level: link for link in links}
    levels, latencies = [], dict[str, float]()  # additional seconds of a message over a level
    for level in cluster.levels:
        link = factors.get(level.name, LinkFactor("", 1.0))
        latencies[level.name] = link.latency / _messages(Collective.ALL_REDUCE, level.size)
        latency = level.latency + latencies[level.name]
        levels.append(replace(level, bandwidth=level.bandwidth / link.per_byte, latency=latency))

    def correction(shape: CollectiveFit | CollectivePoint) -> tuple[float, float]:
        """Factor on the time per byte and additional seconds of a collective, whose slowest link counts."""
        group = RankGroup(shape.group, shape.stride, shape.siblings)
        hops = () if group.reach >= cluster.devices else hops_of(cluster, group)
        crossed = [hop.level for hop in hops if hop.level in factors]
        per_byte = max((factors[level].per_byte for level in crossed), default=1.0)
        return per_byte, _messages(shape.collective, shape.group) * sum(latencies[level] for level in crossed)

    fits, points = [], []
    for fit in profile.fits:
        per_byte, seconds = correction(fit)
        fits.append(replace(fit, latency=fit.latency + seconds, bandwidth=fit.bandwidth / per_byte))
    lines = {_key(fit): fit for fit in profile.fits}
    for point in profile.collectives:
        # the factor applies to the share of the time that grows with the bytes, by the straight line fitted
        per_byte, seconds = correction(point)
        line, share = lines.get(_key(point)), 1.0
        if line is not None:
            share = point.size / line.bandwidth / max(line.latency + point.size / line.bandwidth, 1e-12)
        points.append(replace(point, seconds=point.seconds * (1.0 + share * (per_byte - 1.0)) + seconds))
    cluster = replace(cluster, levels=tuple(levels))
    return replace(profile, cluster=cluster, fits=tuple(fits), collectives=tuple(points))


def _key(shape: CollectiveFit | CollectivePoint) -> tuple[Collective, int, int, int]:
    return shape.collective, shape.group, shape.stride, shape.siblings


def _messages(collective: Collective, size: int) -> int:
    """The number of consecutive messages of a collective on a ring of ``size`` ranks."""
    if collective in (Collective.SEND_RECV, Collective.BROADCAST):
        return 1
    return max((2 if collective is Collective.ALL_REDUCE else 1) * (size - 1), 1)


def _with_devices(profile: Profile, factors: Sequence[float]) -> Profile:
    """The profile scaled by the factor of all ranks, or with one type of device per factor if factors differ."""
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
    """Return the all-reduces that measure the links: a small and a large one on each level with several members.

    Their groups cross that level only. Their ``seconds`` are 0, to be replaced by the measured ones.
    """
    cluster, links = profile.cluster, Links(profile)

    def predicted(group: RankGroup, size: int) -> float:
        return links.seconds(
            Communication(Collective.ALL_REDUCE, size, group, Moment.STEP, overlaps=False, cause="data")
        )

    probes = []
    for depth, level in enumerate(cluster.levels):
        if level.size > 1:
            stride = prod(below.size for below in cluster.levels[:depth])
            group = RankGroup(level.size, stride, cluster.devices // level.size)
            largest = next((size for size in _SIZES if predicted(group, size) <= _LONGEST), _SIZES[-1])
            small, large = (
                LinkPoint(level.name, size, 0.0, predicted(group, size)) for size in (largest // _SIZE_RATIO, largest)
            )
            probes.append((group, (small, large)))
    return probes
