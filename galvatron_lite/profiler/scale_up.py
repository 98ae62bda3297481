"""A profile measured on few devices, extended to a cluster of many of them.

What each figure of the extended profile is, and by which law:

- layers, the optimizer's update, host overhead and overlap: as measured. They are one device's.
- collectives of groups inside a node, where nodes are as large there: as measured.
- all other collectives: the α-β law of ``cluster.collectives``, seconds = α·steps(n) + bytes·traffic(n) / β with the
  number of steps and the traffic that the algorithm has for n ranks. α and β of each level are the cluster sheet's;
  of levels that were measured here, times the factors with which the law meets what was measured (``factors_of``). A
  level that differs more than ``_ALIKE`` times is another kind of link here, and keeps its sheet's as the levels do
  that were not measured.
- stragglers: step · (1 + s·log2(nodes)). s is the profile's, else the calibrated one of the software: what one node
  measures does not tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.calibration.learn import Vector, learn
from galvatron_lite.calibration.store import constants_for_stack, load_calibration
from galvatron_lite.cluster.cluster import Cluster, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.profiler.schema import CollectiveFit, Origin, OriginKind, Profile
from galvatron_lite.profiler.transfer import device_type
from galvatron_lite.stacks.catalog import GALVATRON

SIZES = (2**17, 2**22, 2**26)
"""Bytes at which the law is held against what was measured: gradients' small tensors to whole buckets."""
_WIDTHS = (0.7, 1.0)
"""Prior widths of the factors on bandwidth and latency, as logarithms: half to twice, a third to three times."""
_NOISE = 0.15  # by which one straight line and the law differ, as a logarithm
_ALIKE = 3.0  # factor by which a link of the sheet's kind may differ from it


@dataclass(frozen=True, slots=True)
class LevelFactor:
    """What was measured of a level beside its sheet."""

    level: str  # its name
    bandwidth: float  # measured over the sheet's
    latency: float
    fits: int  # collectives that it rests on; 0: none crosses the level


def factors_of(profile: Profile, sheet: Sequence[Level]) -> tuple[LevelFactor, ...]:
    """For each level of a sheet, factors on it with which the law meets best what was measured on the profile's
    devices."""
    sizes = [level.size for level in profile.cluster.levels]
    fits = [fit for fit in profile.fits if _top(profile.cluster, fit) < len(sheet)]
    levels = tuple(replace(level, size=size) for level, size in zip(sheet, sizes, strict=False))
    cluster = replace(profile.cluster, levels=levels)
    asked = [(fit, size) for fit in fits for size in SIZES]
    measured = [fit.latency + size / fit.bandwidth for fit, size in asked]

    def predict(places: Vector) -> Vector:
        changed = replace(cluster, levels=_scaled(cluster.levels, places))
        return np.log([_law(changed, fit, size) for fit, size in asked])

    count = len(cluster.levels)
    learnt = learn(predict, measured, np.zeros(2 * count), np.tile(_WIDTHS, count), _NOISE, rounds=6)
    bandwidths, latencies = np.exp(learnt.values).reshape(count, 2).T.tolist()
    crossing = [sum(_top(profile.cluster, fit) == place for fit in fits) for place in range(count)]
    return tuple(
        LevelFactor(level.name, bandwidths[place], latencies[place], crossing[place])
        for place, level in enumerate(cluster.levels)
    )


def _law(cluster: Cluster, fit: CollectiveFit, size: int) -> float:
    return collective_seconds(cluster, fit.collective, size, RankGroup(fit.group, fit.stride, fit.siblings))


def _scaled(levels: Sequence[Level], places: Vector) -> tuple[Level, ...]:
    factors = np.exp(places)
    return tuple(
        replace(level, bandwidth=level.bandwidth * float(factors[2 * at]),
                latency=level.latency * float(factors[2 * at + 1]), start=level.start * float(factors[2 * at + 1]))
        for at, level in enumerate(levels)
    )  # fmt: skip


def _top(cluster: Cluster, fit: CollectiveFit) -> int:
    """The outermost level that a group crosses."""
    block = 1
    for place, level in enumerate(cluster.levels):
        block *= level.size
        if (fit.group - 1) * fit.stride < block:
            return place
    return len(cluster.levels) - 1


def scale_up(profile: Profile, cluster: Cluster) -> Profile:
    """A profile on a cluster of equal devices, as many as there are; see the module.

    Args:
        profile: measured on few devices, or estimated.
        cluster: its sheet.
    """
    moved = profile.on(cluster)
    same = device_type(profile.cluster.device.name) == device_type(cluster.device.name)
    if not profile.fits or not same:
        return replace(moved, fits=(), collectives=(), communication_origin=_unmeasured(profile, cluster))
    levels, said = list(cluster.levels), list[str]()
    factors = {factor.level: factor for factor in factors_of(profile, levels) if factor.fits}
    for place, level in enumerate(levels):
        factor = factors.get(level.name)
        if factor is None:
            said.append(f"{level.name} by its sheet")
        elif not 1 / _ALIKE < factor.bandwidth < _ALIKE:
            said.append(f"{level.name} by its sheet: links here are of another kind (x{factor.bandwidth:.2g})")
        else:
            levels[place] = _corrected(level, factor)
            scaled = f"bandwidth x{factor.bandwidth:.2f}, latency x{factor.latency:.2f} of its sheet"
            said.append(f"{level.name} as measured on {profile.cluster.devices} devices ({scaled})")
    node = profile.cluster.levels[0].size
    kept = node == cluster.levels[0].size
    software = constants_for_stack(load_calibration(), profile.stack or GALVATRON.name)
    straggling = profile.straggling or software.straggling
    said.append(f"stragglers {straggling:.2%} for each doubling of nodes, calibrated")
    return replace(
        moved,
        cluster=replace(cluster, levels=tuple(levels)),
        fits=tuple(fit for fit in profile.fits if kept and _top(profile.cluster, fit) == 0),
        collectives=tuple(
            one for one in profile.collectives if kept and (one.group - 1) * one.stride < profile.cluster.levels[0].size
        ),
        straggling=straggling,
        communication_origin=replace(profile.communication_origin, kind=OriginKind.ESTIMATED, source="; ".join(said)),
    )


def _corrected(level: Level, factor: LevelFactor) -> Level:
    source = ", ".join(filter(None, (level.source, "corrected by what was measured")))
    (made,) = _scaled([level], np.log([factor.bandwidth, factor.latency]))
    return replace(made, source=source)


def _unmeasured(profile: Profile, cluster: Cluster) -> Origin:
    if profile.communication_origin.kind is OriginKind.ESTIMATED and not profile.fits:
        return Origin(OriginKind.ESTIMATED, f"levels of cluster {cluster.name}")
    reason = f"measured on {profile.cluster.device.name}, of another type" if profile.fits else "none was measured"
    return Origin(OriginKind.ESTIMATED, f"levels of cluster {cluster.name}: {reason}")
