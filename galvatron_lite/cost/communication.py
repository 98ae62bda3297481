"""Seconds of communication: measured for shapes of group that were, else from the cluster's levels.

Each shape of group has straight lines over bytes, and a curve up to a size where one was measured. Many groups at once
are told apart by a number for each shape, so that as many lookups are made as there are shapes.

What compute hides. A communication of S seconds with cause c has a share h_c that may run beside compute and 1 - h_c
that blocks it. h_c is 1 for what a dimension says overlaps (gradients of replicas, ZeRO's gathers and reductions) and 0
for the rest (tensor and sequence parallelism, redistribution), unless the profile names it (``Profile.hidden``). With
c_f and c_b the layer's compute in forward and backward, H_f, H_b, H_s, H_g the seconds that may hide in forward, in
backward, in the last backward of a step and in its first forward, and t(c, H) the seconds until both are done
(``together``):

    forward  = t(c_f, H_f) - c_f + blocking_f        every micro-batch
    backward = t(c_b, H_b) - c_b + blocking_b        every micro-batch
    step     = t(c_b, H_b + H_s) - t(c_b, H_b) + t(c_f, H_f + H_g) - t(c_f, H_f) + blocking_s

- Gradients of replicas (``step``) hide behind the last micro-batch's backward only. A layer's own backward stands for
  the one of the layers before it that runs while its bucket is reduced: among equal layers that is the same, and the
  layer without compute, the embedding, whose bucket goes last, stays exposed: the tail.
- Parameters gathered after the update (all-gathers once a step: ZeRO-1, a distributed optimizer) hide behind the first
  micro-batch's forward (``zero.gather``).
- ZeRO-3's gather of layer l+1 hides behind layer l in either pass; the first layer's has nothing before it, and again
  the embedding's own compute, close to none, stands for that.
- Blocking communication counts in full where the device waits for the host too: each rank waits for the slowest host
  of its group first. vTrain's launch-bound runs (arXiv 2312.12391) grow with the message as others do.

Li et al. 2020 (arXiv:2006.15704, section 3.2) for buckets, Zhao et al. 2023 (arXiv:2304.11277, section 3.3) for
prefetching; the mutual slow-down after Miao et al. 2022 (Galvatron, arXiv:2211.13878, section 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from galvatron_lite.arrays import IntArray, Real, where
from galvatron_lite.cluster.cluster import Collective, DistinctGroups, RankGroup
from galvatron_lite.cluster.collectives import CollectiveTime, collective_lines, seconds_on
from galvatron_lite.cluster.transport import as_driven, staged_seconds
from galvatron_lite.cost.points import LayerFigures
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.ranks import distinct_groups
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
        cache: dict[tuple[Collective, int, int, int, bool], Real] = {}
        result = []
        for communication in communications:
            staged = communication.cause in self.profile.transport.staged
            key = (
                communication.collective,
                id(communication.size),
                id(communication.load),
                id(communication.group),
                staged,
            )
            if key not in cache:
                even = type(communication.load) is float and communication.load == 1.0
                slowest = (
                    communication if even else replace(communication, size=communication.size * communication.load)
                )
                cache[key] = self._staged(slowest) if staged else self._once(slowest)
            result.append(cache[key] * communication.count)
        return result

    def _staged(self, one: Communication) -> Real:
        """Seconds of one call through host memory."""
        return staged_seconds(self.profile.cluster, self.profile.transport, one.collective, one.group.size, one.size)

    def _once(self, one: Communication) -> Real:
        """Seconds of one call."""
        if not _several(one.group):
            return self._alike(one.collective, one.group, one.size)
        shapes = self._shapes_of(one.collective, one.group.apart or distinct_groups(one.group))
        seconds = seconds_on(one.collective, shapes.lines, one.size)
        for number, curve in shapes.curves:
            seconds = where(shapes.place == number, _on_curve(curve, one.size, seconds), seconds)
        return where(one.size > 0, seconds, 0.0)

    def _shapes_of(self, collective: Collective, groups: DistinctGroups) -> Shapes:
        found = groups.cache.get((self, collective))
        if isinstance(found, Shapes):
            return found
        shapes, place = [self._shape(collective, group) for group in groups.groups], groups.place
        lines = [_line_of(shapes, number, place) for number in range(max(len(shape.lines) for shape in shapes))]
        curves = [(number, shape.curve) for number, shape in enumerate(shapes) if shape.curve is not None]
        groups.cache[self, collective] = Shapes(place, lines, curves)
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


GATHER = "gather"
"""Moment of an all-gather once a step, in the keys of ``Profile.hidden``: it follows the update."""


@dataclass(frozen=True, slots=True)
class ExposedCommunication:
    """Seconds of one layer's communication that compute does not hide; arrays under several strategies."""

    forward: Real  # forward, backward: every micro-batch
    backward: Real
    step: Real  # once a step


def moment_of(communication: Communication) -> str:
    """When a communication runs: forward, backward, step, or gather (parameters after the update)."""
    once = communication.moment is Moment.STEP
    return GATHER if once and communication.collective is Collective.ALL_GATHER else communication.moment.value


def hidden_share(communication: Communication, hidden: Mapping[str, float]) -> float:
    """Share of a communication that compute may hide: by cause and moment, by cause, else as its dimension says."""
    default = 1.0 if communication.overlaps else 0.0
    by_cause = hidden.get(communication.cause, default)
    return hidden.get(f"{communication.cause}.{moment_of(communication)}", by_cause)


def exposed_by(
    communications: Sequence[tuple[Communication, Real]],
    figures: LayerFigures,
    hidden: Mapping[str, float],
    overlap: Overlap,
) -> ExposedCommunication:
    """What one layer's communication adds to its compute; see the module.

    Args:
        communications: each with its seconds alone on the device.
        figures: the layer's compute seconds.
        hidden: shares by cause.
        overlap: mutual slow-down.
    """
    blocking: dict[str, Real] = dict.fromkeys((*(moment.value for moment in Moment), GATHER), 0.0)
    hiding = dict(blocking)
    for communication, seconds in communications:
        share, moment = hidden_share(communication, hidden), moment_of(communication)
        if share:
            hiding[moment] = hiding[moment] + share * seconds
        if share < 1:
            blocking[moment] = blocking[moment] + (1.0 - share) * seconds
    forward, backward = figures.forward, figures.backward
    ahead = together(forward, hiding["forward"], overlap)
    back = together(backward, hiding["backward"], overlap)
    last = together(backward, hiding["backward"] + hiding["step"], overlap)
    first = together(forward, hiding["forward"] + hiding[GATHER], overlap)
    return ExposedCommunication(
        ahead - forward + blocking["forward"],
        back - backward + blocking["backward"],
        last - back + first - ahead + blocking["step"] + blocking[GATHER],
    )
