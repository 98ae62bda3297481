"""Seconds of communication: measured for shapes of group that were, else from the cluster's levels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from galvatron_lite.parallelism.base import Collective, Communication
from galvatron_lite.profiler.schema import CollectiveFit, Overlap, Profile

T = TypeVar("T")
GroupKey = tuple[Collective, int, int]


@dataclass(slots=True)
class Links:
    """Seconds of collectives on a profile's cluster; answers are remembered.

    Attributes:
        profile: what was measured or estimated.
    """

    profile: Profile
    _measured: dict[GroupKey, dict[int, tuple[list[float], list[float]]]] = field(default_factory=dict)
    _fits: dict[GroupKey, dict[int, CollectiveFit]] = field(default_factory=dict)
    _known: dict[tuple[Collective, float, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sorts the measured points by shape of group and size."""
        for point in sorted(self.profile.collectives, key=lambda p: p.size):
            shape = (point.collective, point.group, point.stride)
            sizes, seconds = self._measured.setdefault(shape, {}).setdefault(point.siblings, ([], []))
            sizes.append(point.size)
            seconds.append(point.seconds)
        for fit in self.profile.fits:
            self._fits.setdefault((fit.collective, fit.group, fit.stride), {})[fit.siblings] = fit

    def seconds(self, communication: Communication) -> float:
        """Seconds of all ``count`` calls together, alone on the device."""
        group = communication.group
        if group.size == 1 or communication.size <= 0:
            return 0.0
        key = (communication.collective, communication.size, group.size, group.stride, group.siblings)
        if key not in self._known:
            self._known[key] = self._once(communication)
        return self._known[key] * communication.count

    def _once(self, communication: Communication) -> float:
        group, size = communication.group, communication.size
        shape = (communication.collective, group.size, group.stride)
        if shape in self._measured:
            sizes, seconds = _nearest(self._measured[shape], group.siblings)
            if len(sizes) > 1 and size <= sizes[-1]:
                return float(np.interp(size, sizes, seconds))
        if shape in self._fits:
            fit = _nearest(self._fits[shape], group.siblings)
            return fit.latency + size / fit.bandwidth
        from galvatron_lite.cluster.collectives import collective_seconds

        return float(collective_seconds(self.profile.cluster, communication.collective, size, group))


def _nearest(options: dict[int, T], siblings: int) -> T:
    """The option measured with the number of sibling groups nearest to the one asked for (more on a tie)."""
    return options[min(options, key=lambda count: (abs(count - siblings), -count))]


def together(compute: float, communication: float, overlap: Overlap) -> float:
    """Seconds until both are done when they start together and slow one another down while both run.

    With factors a (compute) and b (communication): if communication ends first, at b * communication, compute has
    lost the share 1 - 1/a of that time; else the other way round.
    """
    a, b = overlap.compute_slowdown, overlap.communication_slowdown
    if b * communication <= a * compute:
        return compute + b * communication * (1 - 1 / a)
    return communication + a * compute * (1 - 1 / b)
