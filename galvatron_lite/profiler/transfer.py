"""A profile carried to another device: what was measured here, times what data sheets say that differs.

Every point of a layer takes the other device's estimate, and keeps a part of what it measured beside its own:

    seconds there = estimate there * (seconds here / estimate here) ** COMMON

An estimate sums a layer's operators (``roofline``), each at what its class reaches of the data sheet on that device
(``configs/calibration``): matmuls, attention and convolutions a share of peak FLOP/s, all else a share of memory
bandwidth; launches are host time, the same on both. How much slower or faster than that each class runs in this
software is learnt from the profile first (``class_factors``), so that what is bound by memory here is not carried over
at the ratio of peak FLOP/s. The optimizer's update is bound by memory. Bytes do not depend on the device.
Communication is the other cluster's.

A profile measured on few devices, extended to a cluster of many of them.

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

from galvatron_lite.calibration.parameters import SCALES, Vector, learn
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.calibration.store import constants_for_device, constants_for_stack, load_calibration
from galvatron_lite.cluster.catalog import match_device
from galvatron_lite.cluster.cluster import Cluster, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cluster.precisions import check_precision
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import OperatorClass, Recompute
from galvatron_lite.parallelism.channel.parts import sliced_kind
from galvatron_lite.profiler.estimate import LayerTimes, layer_times, optimizer_cost, stack_constants
from galvatron_lite.profiler.machine import OPTIMIZERS, Machine, machine_of
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.schema import CollectiveFit, LayerPoint, Origin, OriginKind, Profile
from galvatron_lite.stacks.catalog import GALVATRON, STACKS
from galvatron_lite.stacks.schema import Stack

COMMON = 0.5
"""[Empirical] share, as a logarithm, of what a measurement is off its estimate that is found on another type of device,
too: half of it is the software's, half that device's kernels' and the measurement's. Carried between published runs,
0 to 1 give errors within 1.2 points of one another (docs/validate.md). Devices of one type share all of it."""


def device_type(name: str) -> str:
    """A100 of A100-SXM4-80GB; of cards that a number tells apart, both (RTX-3090)."""
    first, *others = name.split("-")
    return f"{first}-{others[0]}" if first in ("RTX", "Quadro") and others else first


@dataclass(frozen=True, slots=True)
class ClassRatio:
    """What one class of operators costs there beside here, over one pass of the model with one sample."""

    kind: OperatorClass
    here: float  # seconds by estimate, forward and backward
    there: float

    @property
    def ratio(self) -> float:
        """Seconds there over seconds here."""
        return self.there / self.here


def transfer_profile(
    profile: Profile,
    cluster: Cluster,
    *,
    precision: str | None = None,
    stack: Stack | None = None,
    calibration: Calibration | None = None,
    factors: StackConstants | None = None,
) -> Profile:
    """A profile as it is to be expected on another cluster, of other devices.

    Args:
        profile: measured (or estimated) on devices of one type.
        cluster: where it is carried to; its devices are of one type.
        precision: of compute, where that is not the graph's (``tf32``).
        stack: the training software it was measured with; None: the profile's.
        calibration: what classes of operators reach on both devices; None: the shipped constants.
        factors: what the software costs, class by class; None: learnt from the profile.

    Raises:
        InputError: devices of several types, or a precision that the other devices have no units for.
    """
    here, there = machines(profile, cluster, precision, stack, calibration)
    stack = stack or STACKS.get(profile.stack, GALVATRON)
    factors = factors or class_factors(profile, here, stack)
    here, there = with_factors(here, factors), with_factors(there, factors)
    common = 1.0 if device_type(here.device.name) == device_type(there.device.name) else COMMON
    ratios: dict[object, tuple[LayerTimes, LayerTimes]] = {}

    def moved(seconds: float, estimate: float, other: float) -> float:
        return other * (seconds / estimate) ** common if estimate > 0 else seconds

    def carried(point: LayerPoint) -> LayerPoint:
        key = replace(point, recompute=next(iter(type(point.recompute))), forward=0, backward=0, kept=0, working=0,
                      forward_working=0, spread=0)  # fmt: skip
        if key not in ratios:
            ratios[key] = (_times(profile, here, stack, point), _times(profile, there, stack, point))
        one, other = ratios[key]
        return replace(
            point,
            forward=moved(point.forward, one.forward_with_host, other.forward_with_host),
            backward=moved(
                point.backward, one.backward_with_host(point.recompute), other.backward_with_host(point.recompute)
            ),
        )

    name = profile.optimizer.name if profile.optimizer.name in OPTIMIZERS else "adamw"
    one, other = (optimizer_cost([item], name, stack.states, item.stack) for item in (here, there))
    update = moved(profile.optimizer.seconds_per_item, one.seconds_per_item, other.seconds_per_item)
    overhead, slower = profile.overhead, here.bandwidth / there.bandwidth
    overhead = replace(
        overhead,
        gathered_per_byte=overhead.gathered_per_byte * slower,
        spatial_per_byte=overhead.spatial_per_byte * slower,
    )
    device, target = profile.cluster.device.name, cluster.device.name
    source = f"{profile.origin.kind.value} on {device} ({profile.origin.source}), carried to {target} by data sheets"
    return replace(
        profile,
        name=f"{profile.name}-{target.split('-')[0].lower()}",
        cluster=replace(cluster, fingerprint={}),
        origin=Origin(OriginKind.ESTIMATED, source, profile.origin.date, profile.origin.repetitions,
                      profile.origin.spread),
        communication_origin=Origin(OriginKind.ESTIMATED, f"levels of cluster {cluster.name}"),
        layers=tuple(map(carried, profile.layers)),
        collectives=(),
        fits=(),
        optimizer=replace(profile.optimizer, seconds_per_item=update),
        overhead=overhead,
        throughput=None,
    )  # fmt: skip


def machines(
    profile: Profile,
    cluster: Cluster,
    precision: str | None = None,
    stack: Stack | None = None,
    calibration: Calibration | None = None,
) -> tuple[Machine, Machine]:
    """The profile's device and the cluster's, with what operators reach on each; see ``transfer_profile``."""
    for field, place in (("profile", profile.cluster), ("--to", cluster)):
        if not place.alike:
            raise InputError(
                field, place.name, "It has devices of several types; a profile is carried from one to one."
            )
    if profile.graph.precision != "tf32":  # devices without such units multiply in fp32
        check_precision(profile.graph.precision, cluster)
    calibration = calibration or load_calibration()
    stack = stack or STACKS.get(profile.stack, GALVATRON)
    host = stack_constants(stack, calibration)
    one, other = (
        machine_of(device, precision or profile.graph.precision, constants_for_device(calibration, device.name,
                   device.source), host, stack.uneven_shares)
        for device in (match_device(profile.cluster.device.name) or profile.cluster.device, cluster.device)
    )  # fmt: skip
    return one, other


LEARNT = ("matmul", "attention", "memory", "kernel_host")
"""Fields of ``StackConstants`` that a profile tells: factors on the time of a class, and seconds of a launch."""

_NOISE = 0.1
"""Standard deviation by which points of a profile differ from the best estimate: neighbours err alike, so that more of
them say little more."""
_POINTS = 32  # of a profile that are looked at


def class_factors(profile: Profile, machine: Machine, stack: Stack) -> StackConstants:
    """What classes of operators cost in a profile's software (``calibration.parameters``)."""
    points = [
        point for point in profile.layers if point.recompute is Recompute.NONE and point.forward + point.backward > 0
    ]
    points = points[:: max(1, len(points) // _POINTS)]
    prior = machine.stack

    def predict(places: Vector) -> Vector:
        moved = with_factors(machine, moved_constants(prior, places))
        times = (_times(profile, moved, stack, point) for point in points)
        return np.log(
            [max(time_.forward_with_host + time_.backward_with_host(Recompute.NONE), 1e-9) for time_ in times]
        )

    if not points:
        return prior
    measured = [point.forward + point.backward for point in points]
    learnt = learn(predict, measured, np.zeros(len(LEARNT)), WIDTHS, _NOISE)
    return moved_constants(prior, learnt.values)


WIDTHS = [SCALES["stacks"][name].deviation for name in LEARNT]
"""How far each is expected from what is known of the software, as logarithms."""


def moved_constants(prior: StackConstants, places: Vector) -> StackConstants:
    """A software's constants with those of ``LEARNT`` multiplied by the exponentials of ``places``."""
    changed = {name: getattr(prior, name) * float(np.exp(place)) for name, place in zip(LEARNT, places, strict=True)}
    return replace(prior, **changed)


def with_factors(machine: Machine, stack: StackConstants) -> Machine:
    """The machine under software of other constants."""
    return machine_of(machine.device, machine.precision, machine.constants, stack, machine.linear.uneven)


def class_ratios(profile: Profile, here: Machine, there: Machine) -> list[ClassRatio]:
    """What each class of operators costs on both devices, the longest first."""
    seconds: dict[OperatorClass, list[float]] = {}
    for layer in profile.graph.layers:
        for operator in profile.graph.kind_of(layer).operators:
            both = seconds.setdefault(operator.kind, [0.0, 0.0])
            for place, machine in enumerate((here, there)):
                times = operator_seconds(machine, operator, 1)
                both[place] += times.forward + times.backward
    ratios = [ClassRatio(kind, *both) for kind, both in seconds.items() if min(both) > 0]
    return sorted(ratios, key=lambda one: -one.here)


def _times(profile: Profile, machine: Machine, stack: Stack, point: LayerPoint) -> LayerTimes:
    kind = profile.graph.kinds[point.kind]
    for by, degree in (("filters", point.filters), ("channels", point.channels)):
        if degree > 1:
            kind = sliced_kind(kind, by, degree, stack.pictures.gathers_each)
    return layer_times(
        machine, kind, stack.states, point.samples, point.tensor, point.sequence_parallel, point.expert,
        stack.early_stop,
    )  # fmt: skip


SIZES = (2**17, 2**22, 2**26)
"""Bytes at which the law is held against what was measured: gradients' small tensors to whole buckets."""
_WIDTHS = (0.7, 1.0)
"""Prior widths of the factors on bandwidth and latency, as logarithms: half to twice, a third to three times."""
_FIT_NOISE = 0.15  # by which one straight line and the law differ, as a logarithm
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
    questions = [(fit, size) for fit in fits for size in SIZES]
    measured = [fit.latency + size / fit.bandwidth for fit, size in questions]

    def predict(places: Vector) -> Vector:
        changed = replace(cluster, levels=_scaled(cluster.levels, places))
        groups = [RankGroup(fit.group, fit.stride, fit.siblings) for fit, _ in questions]
        rows = zip(questions, groups, strict=True)
        return np.log([collective_seconds(changed, fit.collective, size, group) for (fit, size), group in rows])

    count = len(cluster.levels)
    values = learn(predict, measured, np.zeros(2 * count), np.tile(_WIDTHS, count), _FIT_NOISE, rounds=6).values
    crossing = [sum(_top(profile.cluster, fit) == place for fit in fits) for place in range(count)]
    return tuple(
        LevelFactor(level.name, float(np.exp(values[2 * place])), float(np.exp(values[2 * place + 1])), crossing[place])
        for place, level in enumerate(cluster.levels)
    )


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
        source = f"levels of cluster {cluster.name}"
        if profile.fits:
            source += f": measured on {profile.cluster.device.name}, of another type"
        elif profile.communication_origin.kind is OriginKind.MEASURED:
            source += ": none was measured"
        return replace(moved, fits=(), collectives=(), communication_origin=Origin(OriginKind.ESTIMATED, source))
    levels, notes = list(cluster.levels), list[str]()
    factors = {factor.level: factor for factor in factors_of(profile, levels) if factor.fits}
    for place, level in enumerate(levels):
        factor = factors.get(level.name)
        if factor is None:
            notes.append(f"{level.name} by its sheet")
        elif not 1 / _ALIKE < factor.bandwidth < _ALIKE:
            notes.append(f"{level.name} by its sheet: links here are of another kind (x{factor.bandwidth:.2g})")
        else:
            (corrected,) = _scaled([level], np.log([factor.bandwidth, factor.latency]))
            source = ", ".join(filter(None, (level.source, "corrected by what was measured")))
            levels[place] = replace(corrected, source=source)
            scaled = f"bandwidth x{factor.bandwidth:.2f}, latency x{factor.latency:.2f} of its sheet"
            notes.append(f"{level.name} as measured on {profile.cluster.devices} devices ({scaled})")
    node = profile.cluster.levels[0].size
    kept = node == cluster.levels[0].size
    software = constants_for_stack(load_calibration(), profile.stack or GALVATRON.name)
    straggling = profile.straggling or software.straggling
    notes.append(f"stragglers {straggling:.2%} for each doubling of nodes, calibrated")
    return replace(
        moved,
        cluster=replace(cluster, levels=tuple(levels)),
        fits=tuple(fit for fit in profile.fits if kept and _top(profile.cluster, fit) == 0),
        collectives=tuple(
            collective
            for collective in profile.collectives
            if kept and (collective.group - 1) * collective.stride < profile.cluster.levels[0].size
        ),
        straggling=straggling,
        communication_origin=replace(profile.communication_origin, kind=OriginKind.ESTIMATED, source="; ".join(notes)),
    )
