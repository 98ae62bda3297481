"""From what was measured to a corrected profile. No torch here.

Links: an all-reduce of S bytes between the members of a level takes ``a + f S b`` where the profile says ``a' + S b``;
two sizes give the factor f on the time a byte takes and what the rest takes longer. Devices: the median over groups of
layers of forward time over predicted. Figures are low ranks or
medians of repetitions, so that single slow ones do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from statistics import median

from galvatron_lite.cluster.budget import Budget, as_budget
from galvatron_lite.cluster.cluster import Cluster, Collective, DeviceGroup, RankGroup
from galvatron_lite.cluster.collectives import hops_of
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint, DeviceFigures, LayerPoint, Profile
from galvatron_lite.runtime.adapt.schema import Corrections, LayerGroup, LinkFactor, LinkPoint, StepWindow

_SIZES = (16 * 2**20, 4 * 2**20, 2**20, 2**18)
"""Bytes of the larger message between members of a level: the first that does not take long."""
_LONGEST = 0.01
"""Predicted seconds of the larger message, at most."""
_SMALLER = 16
"""How many times smaller the other message is."""
_ROUNDED = 3
"""Digits of factors: no plan hangs on more, and logs are read by people."""


def link_factors(points: Sequence[LinkPoint], threshold: float) -> tuple[LinkFactor, ...]:
    """The levels that differ from the profile by more than the threshold.

    Args:
        points: of each level at two sizes at least.
        threshold: relative.
    """
    levels = list(dict.fromkeys(point.level for point in points))
    found = [_link_factor(level, [point for point in points if point.level == level]) for level in levels]
    return tuple(factor for factor, strays in found if abs(strays - 1.0) > threshold)


def _link_factor(level: str, points: Sequence[LinkPoint]) -> tuple[LinkFactor, float]:
    """The factor of a level, and how far its largest message is from the prediction."""
    small, large = min(points, key=lambda point: point.size), max(points, key=lambda point: point.size)
    size = max(large.size - small.size, 1)
    line = max(large.predicted - small.predicted, 1e-12) / size
    # noise may make the larger message the quicker one; nothing becomes infinitely fast by that
    per_byte = max((large.seconds - small.seconds) / size / line, 0.05)
    start = max(small.predicted - line * small.size, 0.0)
    more = max(small.seconds - per_byte * line * small.size - start, 0.0)
    return LinkFactor(level, round(per_byte, _ROUNDED), round(more, 6)), large.seconds / large.predicted


def predicted_groups(profile: Profile, plan: Plan) -> dict[str, float]:
    """Seconds of one micro-batch's forward of every run of blocks of a plan, by the name of its first layer."""
    pricer, kinds = LayerPricer(for_mode(profile, plan.mode)), {layer.name: layer for layer in profile.graph.layers}
    found = {}
    for run in (run for stage in plan.stages for run in stage.runs):
        layer = kinds[run.first]
        cost = pricer.price(layer.kind, run.strategy, plan.microbatch, plan.pipeline)
        if layer.role is Role.BLOCK and cost is not None:
            found[run.first] = run.count * cost.forward_seconds
    return found


def device_factors(
    groups: Sequence[LayerGroup], predicted: Mapping[str, float], ranks: int, threshold: float
) -> tuple[float, ...]:
    """Factor on the compute time of each rank; empty where all are as predicted, to the threshold.

    Ranks that are as fast as the median rank, to the threshold, get its factor: what is common to all is one figure.

    Args:
        groups: what was measured.
        predicted: seconds by the name of a group's first layer (``predicted_groups``).
        ranks: of the world.
        threshold: relative.
    """
    own: list[list[float]] = [[] for _ in range(ranks)]
    for group in groups:
        for rank, seconds in zip(group.ranks, group.seconds, strict=True):
            if predicted.get(group.first):
                own[rank].append(seconds / predicted[group.first])
    found = [median(ratios) if ratios else 1.0 for ratios in own]
    common = median(found)
    alike = [common if abs(factor / common - 1.0) <= threshold else factor for factor in found]
    if all(abs(factor - 1.0) <= threshold for factor in alike):
        return ()
    return tuple(round(factor, _ROUNDED) for factor in alike)


def memory_factor(window: StepWindow, predicted: Sequence[int]) -> float:
    """The largest factor over ranks of peak bytes on predicted ones; at least 1.

    Args:
        window: what was measured.
        predicted: bytes of each rank.
    """
    ratios = [peak / own for peak, own in zip(window.memory, predicted, strict=False) if own]
    return round(max([1.0, *ratios]), _ROUNDED)


def corrected(profile: Profile, corrections: Corrections) -> Profile:
    """The profile with links and devices as they were found to be."""
    slower = _with_devices(profile, corrections.devices)
    return _with_links(slower, corrections.links) if corrections.links else slower


def corrected_budget(budget: int | Budget, factor: float) -> Budget:
    """What plans may take by prediction, where devices take ``factor`` times what is predicted."""
    return as_budget(budget).scaled(1.0 / factor)


def _with_links(profile: Profile, links: Sequence[LinkFactor]) -> Profile:
    by_name = {link.level: link for link in links}
    cluster = profile.cluster

    def level_of(level: object) -> LinkFactor:
        return by_name.get(getattr(level, "name", ""), LinkFactor("", 1.0))

    levels = tuple(
        replace(
            level,
            bandwidth=level.bandwidth / level_of(level).per_byte,
            latency=level.latency + level_of(level).latency / _hops(Collective.ALL_REDUCE, level.size),
        )
        for level in cluster.levels
    )
    fits = tuple(_slower_fit(cluster, fit, by_name) for fit in profile.fits)
    points = tuple(_slower_point(cluster, point, by_name, profile.fits) for point in profile.collectives)
    return replace(profile, cluster=replace(cluster, levels=levels), fits=fits, collectives=points)


def _hops(collective: Collective, size: int) -> int:
    """Messages one after the other in a collective of a ring of so many ranks."""
    if collective in (Collective.SEND_RECV, Collective.BROADCAST):
        return 1
    return max((2 if collective is Collective.ALL_REDUCE else 1) * (size - 1), 1)


def _crossed(cluster: Cluster, shape: CollectiveFit | CollectivePoint) -> tuple[int, ...]:
    """Places of the levels that a group of ranks goes over."""
    group, found, inside, block = RankGroup(shape.group, shape.stride, shape.siblings), [], 1, 1
    if group.reach >= cluster.devices or not hops_of(cluster, group):
        return ()
    for place, level in enumerate(cluster.levels):
        block *= level.size
        reached = min(group.size, -(-block // group.stride))
        if reached > inside:
            found.append(place)
        inside = reached
    return tuple(found)


def _factor_on(
    cluster: Cluster, shape: CollectiveFit | CollectivePoint, links: dict[str, LinkFactor]
) -> tuple[float, float]:
    """Factor on the time of a byte, and seconds more, of a collective: the slowest of its links counts."""
    places = [place for place in _crossed(cluster, shape) if cluster.levels[place].name in links]
    factors = [links[cluster.levels[place].name] for place in places]
    per_byte = max((factor.per_byte for factor in factors), default=1.0)
    more = sum(
        factor.latency * _hops(shape.collective, shape.group)
        / _hops(Collective.ALL_REDUCE, cluster.levels[place].size)
        for place, factor in zip(places, factors, strict=True)
    )  # fmt: skip
    return per_byte, more


def _slower_fit(cluster: Cluster, fit: CollectiveFit, links: dict[str, LinkFactor]) -> CollectiveFit:
    per_byte, more = _factor_on(cluster, fit, links)
    return replace(fit, latency=fit.latency + more, bandwidth=fit.bandwidth / per_byte)


def _slower_point(
    cluster: Cluster, point: CollectivePoint, links: dict[str, LinkFactor], fits: Sequence[CollectiveFit]
) -> CollectivePoint:
    """A point whose share that grows with the bytes, by the straight line through its curve, takes longer."""
    per_byte, more = _factor_on(cluster, point, links)
    key = (point.collective, point.group, point.stride, point.siblings)
    fit = next((fit for fit in fits if (fit.collective, fit.group, fit.stride, fit.siblings) == key), None)
    share = 1.0
    if fit is not None:
        share = point.size / fit.bandwidth / max(fit.latency + point.size / fit.bandwidth, 1e-12)
    return replace(point, seconds=point.seconds * (1.0 + share * (per_byte - 1.0)) + more)


def _with_devices(profile: Profile, factors: Sequence[float]) -> Profile:
    """A profile of devices of several types, where some ranks are slower than others; else one scaled."""
    if not factors or not profile.cluster.alike or len(factors) != profile.cluster.devices:
        return profile
    worst = max(factors)
    layers = _scaled(profile.layers, worst)
    if len(set(factors)) == 1:
        return replace(profile, layers=layers)
    group = profile.cluster.groups[0]
    runs = [(factor, len(list(run))) for factor, run in groupby(factors)]
    groups = tuple(DeviceGroup(replace(group.device, name=_named(group, factor)), count) for factor, count in runs)
    types = tuple(
        DeviceFigures(_named(group, factor), _scaled(profile.layers, factor), profile.optimizer, profile.overhead)
        for factor in dict.fromkeys(factors)
    )
    return replace(profile, cluster=replace(profile.cluster, groups=groups), layers=layers, types=types)


def _named(group: DeviceGroup, factor: float) -> str:
    return f"{group.device.name} (time x {factor:g})"


def _scaled(points: Sequence[LayerPoint], factor: float) -> tuple[LayerPoint, ...]:
    return tuple(replace(point, forward=point.forward * factor, backward=point.backward * factor) for point in points)


def members_of(cluster: Cluster) -> list[tuple[str, RankGroup]]:
    """The groups that go over one level alone: the name of each level that joins several, and its groups' shape."""
    shapes = []
    for place, level in enumerate(cluster.levels):
        stride = prod(below.size for below in cluster.levels[:place])
        if level.size > 1:
            shapes.append((level.name, RankGroup(level.size, stride, cluster.devices // level.size)))
    return shapes


def points_of(profile: Profile, sizes_of: Profile | None = None) -> list[tuple[str, tuple[tuple[int, float], ...]]]:
    """The all-reduces that tell how a level is: its name, and bytes and predicted seconds of a small and a large one.

    Args:
        profile: what predicts them.
        sizes_of: whose predictions say how large a message does not take long; the profile itself if not given.
    """
    links, sizing = Links(profile), Links(sizes_of or profile)

    def predicted(on: Links, shape: RankGroup, size: int) -> float:
        one = Communication(Collective.ALL_REDUCE, size, shape, Moment.STEP, overlaps=False, cause="data")
        return on.seconds(one)

    found = []
    for name, shape in members_of(profile.cluster):
        large = next((size for size in _SIZES if predicted(sizing, shape, size) <= _LONGEST), _SIZES[-1])
        found.append((name, tuple((size, predicted(links, shape, size)) for size in (large // _SMALLER, large))))
    return found
