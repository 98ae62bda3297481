"""Seconds of communication, and how much of it compute hides.

A collective on a group of ranks takes the seconds that were measured for groups of its size and stride, up to the
largest size measured, else those of the profile's fits or of the cluster's levels.

A communication of S seconds with cause c has a share h_c that may run beside compute and 1 - h_c that blocks it. h_c is
1 for what a dimension says overlaps (gradients of replicas, ZeRO's gathers and reductions) and 0 for the rest (tensor
and sequence parallelism, redistribution), unless the profile names it (``Profile.hidden``). With c_f and c_b the
layer's compute in forward and backward, H_f, H_b, H_s, H_g the seconds that may hide in forward, in backward, in the
last backward of a step and in its first forward, and t(c, H) the seconds until both are done (``overlapped_seconds``):

    forward  = t(c_f, H_f) - c_f + blocking_f        every micro-batch
    backward = t(c_b, H_b) - c_b + blocking_b        every micro-batch
    step     = t(c_b, H_b + H_s) - t(c_b, H_b) + t(c_f, H_f + H_g) - t(c_f, H_f) + blocking_s

- Gradients of replicas (``step``) hide behind the last micro-batch's backward only. A layer's backward stands for that
  of the layers before it, which runs while its bucket is reduced: among equal layers that is the same. The bucket of
  the embedding, which has no compute, goes last and stays exposed.
- Parameters gathered after the update (all-gathers once a step: ZeRO-1, a distributed optimizer) hide behind the first
  micro-batch's forward (``zero.gather``).
- ZeRO-3's gather of layer l+1 hides behind layer l in either pass. Nothing runs before that of the first layer; the
  embedding's compute, close to none, stands for that again.
- Blocking communication counts in full where the device waits for the host too: each rank waits for the slowest host
  of its group first. vTrain's launch-bound runs (arXiv 2312.12391) grow with the message as others do.

Li et al. 2020 (arXiv:2006.15704, section 3.2) for buckets, Zhao et al. 2023 (arXiv:2304.11277, section 3.3) for
prefetching; the mutual slow-down after Miao et al. 2022 (Galvatron, arXiv:2211.13878, section 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
MeasuredKey = tuple[Collective, int, int]
"""Collective, size and stride of a group."""
Curve = tuple[list[float], list[float]]
"""Bytes, ascending, and the seconds measured for them."""


@dataclass(frozen=True, slots=True)
class GroupTime:
    """Seconds of a collective on a group, by bytes."""

    lines: tuple[CollectiveTime, ...]  # see ``seconds_on``
    curve: Curve | None  # measured; counts up to its largest size


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds of a collective on each of n groups, by bytes."""

    index: IntArray  # (n,) which of the distinct groups each is
    lines: Sequence[CollectiveTime]  # arrays (n,)
    curves: Sequence[tuple[int, Curve]]  # of distinct groups, by index


@dataclass(slots=True, eq=False)
class Links:
    """Seconds of collectives on a profile's cluster; what is worked out for a group is remembered."""

    profile: Profile
    _measured: dict[MeasuredKey, dict[int, Curve]] = field(default_factory=dict)  # by number of sibling groups
    _fits: dict[MeasuredKey, dict[int, CollectiveFit]] = field(default_factory=dict)
    _times: dict[tuple[Collective, RankGroup], GroupTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index what was measured."""
        for point in sorted(self.profile.collectives, key=lambda point: point.size):
            key = (point.collective, point.group, point.stride)
            sizes, seconds = self._measured.setdefault(key, {}).setdefault(point.siblings, ([], []))
            sizes.append(point.size)
            seconds.append(point.seconds)
        for fit in self.profile.fits:
            self._fits.setdefault((fit.collective, fit.group, fit.stride), {})[fit.siblings] = fit

    def seconds(self, communication: Communication) -> float:
        """Return the seconds of all ``count`` calls, without compute beside them."""
        return float(self.timed([communication])[0])

    def timed(self, communications: Sequence[Communication]) -> list[Real]:
        """Return the seconds of all ``count`` calls of each communication, without compute beside them.

        Sizes, counts and groups may be arrays (n,). Communications that share these objects are timed once.
        """
        cache: dict[tuple[object, ...], Real] = {}
        result = []
        for communication in communications:
            staged = communication.cause in self.profile.transport.staged
            parts = (communication.size, communication.load, communication.group)
            key = (communication.collective, *map(id, parts), staged)
            if key not in cache:
                cache[key] = self._seconds_of_call(communication, staged)
            result.append(cache[key] * communication.count)
        return result

    def _seconds_of_call(self, communication: Communication, staged: bool) -> Real:
        """Seconds of one call, for the rank that exchanges most; ``staged``: through host memory."""
        collective, group, load = communication.collective, communication.group, communication.load
        even = type(load) is float and load == 1.0
        size = communication.size if even else communication.size * load
        if staged:
            return staged_seconds(self.profile.cluster, self.profile.transport, collective, group.size, size)
        if any(isinstance(figure, np.ndarray) for figure in (group.size, group.stride, group.siblings)):
            times = self._times_of(collective, group.apart or distinct_groups(group))
            seconds = seconds_on(collective, times.lines, size)
            for number, curve in times.curves:
                seconds = where(times.index == number, _on_curve(curve, size, seconds), seconds)
        elif group.size == 1:
            return 0.0
        else:
            time = self._time_of(collective, group)
            seconds = seconds_on(collective, time.lines, size)
            if time.curve is not None:
                seconds = _on_curve(time.curve, size, seconds)
        return where(size > 0, seconds, 0.0)

    def _times_of(self, collective: Collective, groups: DistinctGroups) -> GroupTimes:
        cached = groups.cache.get((self, collective))
        if isinstance(cached, GroupTimes):
            return cached
        distinct = [self._time_of(collective, group) for group in groups.groups]
        lines = [
            _line_of_each(distinct, line, groups.place) for line in range(max(len(time.lines) for time in distinct))
        ]
        curves = [(number, time.curve) for number, time in enumerate(distinct) if time.curve is not None]
        times = GroupTimes(groups.place, lines, curves)
        groups.cache[self, collective] = times
        return times

    def _time_of(self, collective: Collective, group: RankGroup) -> GroupTime:
        if (collective, group) not in self._times:
            self._times[collective, group] = self._new_time(collective, group)
        return self._times[collective, group]

    def _new_time(self, collective: Collective, group: RankGroup) -> GroupTime:
        cluster = as_driven(self.profile.cluster, self.profile.transport, collective)
        if group.size == 1:
            return GroupTime(collective_lines(cluster, collective, group), None)
        key = (collective, group.size, group.stride)
        curve = _nearest(self._measured[key], group.siblings) if key in self._measured else None
        if key in self._fits:
            fit = _nearest(self._fits[key], group.siblings)
            lines: tuple[CollectiveTime, ...] = (CollectiveTime(fit.latency, 1 / fit.bandwidth),)
        else:
            lines = collective_lines(cluster, collective, group)
        return GroupTime(lines, curve if curve is not None and len(curve[0]) > 1 else None)


def _line_of_each(distinct: Sequence[GroupTime], line: int, index: IntArray) -> CollectiveTime:
    """The n-th line of each group, the last one again for groups with fewer."""
    lines = [time.lines[min(line, len(time.lines) - 1)] for time in distinct]
    latency, per_byte = (np.array([getattr(each, name) for each in lines])[index] for name in ("latency", "per_byte"))
    return CollectiveTime(latency, per_byte)


def _on_curve(curve: Curve, size: Real, beyond: Real) -> Real:
    """Seconds on a measured curve; ``beyond`` for larger sizes than were measured."""
    sizes, seconds = curve
    on_curve = np.interp(size, sizes, seconds)
    return where(size <= sizes[-1], on_curve if isinstance(size, np.ndarray) else float(on_curve), beyond)


def _nearest(options: dict[int, T], siblings: int) -> T:
    """The option measured with the nearest number of sibling groups, the larger of two."""
    return options[min(options, key=lambda count: (abs(count - siblings), -count))]


def overlapped_seconds(compute: Real, communication: Real, overlap: Overlap) -> Real:
    """Return the seconds until both are done when they start together and slow one another down.

    With factors a (compute) and b (communication): if communication ends first, at b * communication, compute has
    lost the share 1 - 1/a of that time; else the other way round.
    """
    a, b = overlap.compute_slowdown, overlap.communication_slowdown
    communication_ends_first = b * communication <= a * compute
    return where(
        communication_ends_first,
        compute + b * communication * (1 - 1 / a),
        communication + a * compute * (1 - 1 / b),
    )


GATHER = "gather"
"""Moment of an all-gather once a step, in the keys of ``Profile.hidden``: it follows the update."""


@dataclass(frozen=True, slots=True)
class ExposedCommunication:
    """Seconds of a layer's communication that compute does not hide; arrays under several strategies."""

    forward: Real  # forward, backward: of a micro-batch
    backward: Real
    step: Real  # once a step


def moment_of(communication: Communication) -> str:
    """When a communication runs: forward, backward, step, or gather (parameters after the update)."""
    once = communication.moment is Moment.STEP
    return GATHER if once and communication.collective is Collective.ALL_GATHER else communication.moment.value


def hidden_share(communication: Communication, hidden: Mapping[str, float]) -> float:
    """Return the share of a communication that compute may hide, as the profile or else its dimension says.

    ``hidden`` has shares by cause and moment (``zero.gather``), or by cause.
    """
    default = 1.0 if communication.overlaps else 0.0
    by_cause = hidden.get(communication.cause, default)
    return hidden.get(f"{communication.cause}.{moment_of(communication)}", by_cause)


def exposed_by(
    communications: Sequence[tuple[Communication, Real]],
    figures: LayerFigures,
    hidden: Mapping[str, float],
    overlap: Overlap,
) -> ExposedCommunication:
    """Return what a layer's communication adds to its compute; see the module.

    Args:
        communications: each with its seconds without compute.
        figures: the layer's compute seconds.
        hidden: see ``hidden_share``.
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
    forward_both = overlapped_seconds(forward, hiding["forward"], overlap)
    backward_both = overlapped_seconds(backward, hiding["backward"], overlap)
    first_forward = overlapped_seconds(forward, hiding["forward"] + hiding[GATHER], overlap)
    last_backward = overlapped_seconds(backward, hiding["backward"] + hiding["step"], overlap)
    return ExposedCommunication(
        forward_both - forward + blocking["forward"],
        backward_both - backward + blocking["backward"],
        last_backward - backward_both + first_forward - forward_both + blocking["step"] + blocking[GATHER],
    )
