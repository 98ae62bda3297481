"""Profiles of changed clusters: links twice as fast, one node more. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Level
from galvatron_lite.errors import GalvatronError
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint, OriginKind, Profile


def with_faster_links(profile: Profile, place: int, factor: float = 2.0) -> Profile:
    """The profile of a cluster whose links of one level carry more bytes a second; latencies stay.

    Measured collectives that go over that level take the latency of the straight line that was fitted to them, and the
    rest of their seconds by the factor less; where there is no line, the cluster's levels stand for them.

    Args:
        profile: of the cluster as it is.
        place: of the level, 0 innermost.
        factor: on its bandwidth.
    """
    cluster = profile.cluster
    groups = tuple(replace(group, levels=_faster(group.levels, place, factor)) for group in cluster.groups)
    faster = replace(cluster, levels=_faster(cluster.levels, place, factor), groups=groups)
    fits = tuple(_fit(fit, factor) if _level_of(cluster, fit) == place else fit for fit in profile.fits)
    points = (_point(point, profile, factor) if _level_of(cluster, point) == place else point
              for point in profile.collectives)  # fmt: skip
    kept = tuple(point for point in points if point is not None)
    return replace(profile.on(faster), fits=fits, collectives=kept)


def _faster(levels: Sequence[Level], place: int, factor: float) -> tuple[Level, ...]:
    return tuple(
        replace(level, bandwidth=level.bandwidth * factor) if number == place else level
        for number, level in enumerate(levels)
    )


def _level_of(cluster: Cluster, measured: CollectiveFit | CollectivePoint) -> int:
    """Place of the level that a group reaches over."""
    reach, inside = (measured.group - 1) * measured.stride, 1
    for place, level in enumerate(cluster.levels):
        inside *= level.size
        if reach < inside:
            return place
    return len(cluster.levels) - 1


def _fit(fit: CollectiveFit, factor: float) -> CollectiveFit:
    return replace(fit, bandwidth=fit.bandwidth * factor)


def _point(point: CollectivePoint, profile: Profile, factor: float) -> CollectivePoint | None:
    key = (point.collective, point.group, point.stride, point.siblings)
    for fit in profile.fits:
        if (fit.collective, fit.group, fit.stride, fit.siblings) == key:
            latency = min(fit.latency, point.seconds)
            return replace(point, seconds=latency + (point.seconds - latency) / factor)
    return None


def with_one_more(profile: Profile) -> Profile | None:
    """The profile of a cluster with one member more at its outermost level (one node); None where nothing says how it
    would be joined. Estimated layers are estimated anew, measured ones stay."""
    cluster = _larger(profile.cluster)
    if cluster is None:
        return None
    if profile.origin.kind is not OriginKind.ESTIMATED:
        return profile.on(cluster)
    anew = estimate_profile(profile.graph, cluster, precision=profile.graph.precision, name=profile.name)
    return replace(anew, origin=profile.origin)


def _larger(cluster: Cluster) -> Cluster | None:
    if not cluster.alike or len(cluster.groups) != 1:
        return None
    *inner, outer = cluster.levels
    if inner:
        count = cluster.devices // outer.size * (outer.size + 1)
        levels = (*inner, replace(outer, size=outer.size + 1))
        return replace(cluster, levels=levels, groups=(replace(cluster.groups[0], count=count),))
    return _from_catalog(cluster)


def _from_catalog(cluster: Cluster) -> Cluster | None:
    """Two nodes like the one there is, joined as its data sheet says."""
    try:
        larger = load_cluster(cluster.name, 2 * cluster.devices)
    except GalvatronError:
        return None
    same = larger.groups[0].device == cluster.device and larger.levels[0] == cluster.levels[0]
    return larger if same and len(larger.levels) > 1 else None
