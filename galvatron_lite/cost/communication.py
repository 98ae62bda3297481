"""Seconds of communication: measured for shapes of group that were, else from the cluster's levels.

Each shape of group has straight lines over bytes, and a curve up to a size where one was measured. Many groups at once
are told apart by a number for each shape, so that as many lookups are made as there are shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from galvatron_lite.arrays import IntArray, Real, where
from galvatron_lite.cluster.cluster import Collective, DistinctGroups, RankGroup
from galvatron_lite.cluster.collectives import CollectiveTime, collective_lines, seconds_on
from galvatron_lite.cluster.transport import as_driven, staged_seconds
from galvatron_lite.parallelism.base import Communication
from galvatron_lite.parallelism.ranks import told_apart
from galvatron_lite.profiler.schema import CollectiveFit, Overlap, Profile

T = TypeVar("T")
GroupKey = tuple[Collective, int, int]
Curve = tuple[list[float], list[float]]
"""Bytes, ascending, and the seconds that were measured for them."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What a collective costs on a shape of group."""

    lines: tuple[CollectiveTime, ...]  # see ``seconds_on``
    curve: Curve | None  # what was measured; it counts up to its largest size


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a collective costs on each of n groups."""

    place: IntArray  # (n,) the number of the shape of each
    lines: Sequence[CollectiveTime]  # of each group
    curves: Sequence[tuple[int, Curve]]  # number of a shape and what was measured for it


@dataclass(slots=True, eq=False)
class Links:
    """Seconds of collectives on a profile's cluster; shapes of group are remembered."""

    profile: Profile  # what was measured or estimated
    _measured: dict[GroupKey, dict[int, Curve]] = field(default_factory=dict)
    _fits: dict[GroupKey, dict[int, CollectiveFit]] = field(default_factory=dict)
    _shapes: dict[tuple[Collective, RankGroup], GroupSize] = field(default_factory=dict)

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
        return float(self.timed([communication])[0])

    def timed(self, communications: Sequence[Communication]) -> list[Real]:
        """Seconds of all ``count`` calls of each communication, alone on the device.

        Sizes, counts and groups may be arrays (n,); those of several communications that are one object are worked out
        once.
        """
        known: dict[tuple[Collective, int, int, int, bool], Real] = {}
        result = []
        for one in communications:
            staged = one.cause in self.profile.transport.staged
            key = (one.collective, id(one.size), id(one.load), id(one.group), staged)
            if key not in known:
                even = type(one.load) is float and one.load == 1.0
                slowest = one if even else replace(one, size=one.size * one.load)
                known[key] = self._staged(slowest) if staged else self._once(slowest)
            result.append(known[key] * one.count)
        return result

    def _staged(self, one: Communication) -> Real:
        """Seconds of one call through host memory."""
        return staged_seconds(self.profile.cluster, self.profile.transport, one.collective, one.group.size, one.size)

    def _once(self, one: Communication) -> Real:
        """Seconds of one call."""
        if not _several(one.group):
            return self._alike(one.collective, one.group, one.size)
        shapes = self._shapes_of(one.collective, one.group.apart or told_apart(one.group))
        seconds = seconds_on(one.collective, shapes.lines, one.size)
        for number, curve in shapes.curves:
            seconds = where(shapes.place == number, _on_curve(curve, one.size, seconds), seconds)
        return where(one.size > 0, seconds, 0.0)

    def _shapes_of(self, collective: Collective, groups: DistinctGroups) -> Shapes:
        found = groups.known.get((self, collective))
        if isinstance(found, Shapes):
            return found
        shapes, place = [self._shape(collective, group) for group in groups.groups], groups.place
        lines = [_line_of(shapes, number, place) for number in range(max(len(shape.lines) for shape in shapes))]
        curves = [(number, shape.curve) for number, shape in enumerate(shapes) if shape.curve is not None]
        groups.known[self, collective] = Shapes(place, lines, curves)
        return Shapes(place, lines, curves)

    def _alike(self, collective: Collective, group: RankGroup, size: Real) -> Real:
        if group.size == 1:
            return 0.0
        shape = self._shape(collective, group)
        seconds = seconds_on(collective, shape.lines, size)
        if shape.curve is not None:
            seconds = _on_curve(shape.curve, size, seconds)
        return where(size > 0, seconds, 0.0)

    def _shape(self, collective: Collective, group: RankGroup) -> GroupSize:
        key = (collective, group)
        if key not in self._shapes:
            self._shapes[key] = self._new_shape(collective, group)
        return self._shapes[key]

    def _new_shape(self, collective: Collective, group: RankGroup) -> GroupSize:
        cluster = as_driven(self.profile.cluster, self.profile.transport, collective)
        if group.size == 1:
            return GroupSize(collective_lines(cluster, collective, group), None)
        key = (collective, group.size, group.stride)
        curve = _nearest(self._measured[key], group.siblings) if key in self._measured else None
        fit = _nearest(self._fits[key], group.siblings) if key in self._fits else None
        line = None if fit is None else CollectiveTime(fit.latency, 1 / fit.bandwidth)
        lines = collective_lines(cluster, collective, group) if line is None else (line,)
        return GroupSize(lines, curve if curve is not None and len(curve[0]) > 1 else None)


def _several(group: RankGroup) -> bool:
    return any(isinstance(figure, np.ndarray) for figure in (group.size, group.stride, group.siblings))


def _line_of(shapes: Sequence[GroupSize], number: int, place: IntArray) -> CollectiveTime:
    """A line of each group; the last again of a shape that has fewer."""
    lines = [shape.lines[min(number, len(shape.lines) - 1)] for shape in shapes]
    return CollectiveTime(
        np.array([line.latency for line in lines])[place], np.array([line.per_byte for line in lines])[place]
    )


def _on_curve(curve: Curve, size: Real, beyond: Real) -> Real:
    """Seconds on a measured curve; as given beyond its largest size."""
    sizes, seconds = curve
    on = np.interp(size, sizes, seconds)
    return where(size <= sizes[-1], on if isinstance(size, np.ndarray) else float(on), beyond)


def _nearest(options: dict[int, T], siblings: int) -> T:
    """The option measured with the number of sibling groups nearest to the one asked for (more on a tie)."""
    return options[min(options, key=lambda count: (abs(count - siblings), -count))]


def together(compute: Real, communication: Real, overlap: Overlap) -> Real:
    """Seconds until both are done when they start together and slow one another down while both run.

    With factors a (compute) and b (communication): if communication ends first, at b * communication, compute has
    lost the share 1 - 1/a of that time; else the other way round.
    """
    a, b = overlap.compute_slowdown, overlap.communication_slowdown
    first = b * communication <= a * compute
    return where(first, compute + b * communication * (1 - 1 / a), communication + a * compute * (1 - 1 / b))
