"""Predicts profiles: of a measured profile on other devices (``transfer_profile``), and on more devices (``scale_up``).

Transfer to another device: a point of a layer takes the estimate for the other device, corrected by a part of the
difference between measurement and estimate on this one:

    seconds there = estimate there * (seconds here / estimate here) ** COMMON

An estimate sums the operators of a layer (``roofline``), each at the share of the data sheet that its class reaches on
that device (``configs/calibration``): matmuls, attention and convolutions a share of peak FLOP/s, all other operators a
share of memory bandwidth; launches are host time, the same on both. ``class_factors`` first fits to the profile how
much slower or faster each class runs in its software, so that the time of memory-bound operators does not scale with
peak FLOP/s. The optimizer's update is memory-bound. Bytes do not depend on the device. Communication is that of the
other cluster.

Extension to a cluster of many devices:

- Layers, the optimizer's update, host overhead and overlap stay as measured: they are figures of one device.
- Collectives inside a node stay as measured if nodes have the same size.
- All other collectives follow the α-β model of ``cluster.collectives``. α and β of a level come from the cluster's data
  sheet, times the factors that fit the measurements on that level (``link_factors``). A level whose bandwidth differs
  by more than ``_ALIKE`` is another kind of link here; it keeps the data sheet's figures, like levels that were not
  measured.
- Stragglers: step · (1 + s·log2(nodes)), with s of the profile, or the software's calibrated value, since a single node
  cannot measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron_lite.calibration.parameters import SCALES, Vector, fit
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.calibration.store import constants_for_device, constants_for_stack, load_calibration
from galvatron_lite.cluster.catalog import match_device
from galvatron_lite.cluster.cluster import Cluster, Device, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cluster.precisions import check_precision
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import OperatorClass, Recompute
from galvatron_lite.parallelism.channel.parts import kind_under
from galvatron_lite.profiler.estimate import LayerTimes, layer_times, optimizer_cost, stack_constants
from galvatron_lite.profiler.machine import OPTIMIZERS, Machine, machine_of
from galvatron_lite.profiler.roofline import operator_seconds
from galvatron_lite.profiler.schema import CollectiveFit, LayerPoint, Origin, OriginKind, Profile
from galvatron_lite.stacks.catalog import GALVATRON, STACKS
from galvatron_lite.stacks.schema import Stack

COMMON = 0.5
"""[Empirical] share of the logarithm of measured over estimated time that another type of device has, too: half of it
comes from the software, half from the device's kernels and the measurement. Between published runs, values from 0 to 1
give errors within 1.2 points of one another (docs/validate.md). Devices of one type share all of it."""


def device_type(name: str) -> str:
    """Return the type of a device: A100 for A100-SXM4-80GB, RTX-3090 for cards that a number distinguishes."""
    first, *others = name.split("-")
    return f"{first}-{others[0]}" if first in ("RTX", "Quadro") and others else first


@dataclass(frozen=True, slots=True)
class ClassRatio:
    """Estimated cost of one class of operators on two devices: forward and backward of the model with one sample."""

    kind: OperatorClass
    here: float  # seconds
    there: float  # seconds

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
    """Return the profile to expect on a cluster of other devices.

    Args:
        profile: measured (or estimated) on devices of one type.
        cluster: the other cluster; its devices are of one type.
        precision: precision of compute, if it is not the graph's (``tf32``).
        stack: the training software that was measured; None: the profile's.
        calibration: constants of both devices; None: the shipped ones.
        factors: constants of the software; None: fitted to the profile.

    Raises:
        InputError: devices of several types, or a precision that the other devices do not have.
    """
    here, there = machines(profile, cluster, precision, stack, calibration)
    stack = stack or STACKS.get(profile.stack, GALVATRON)
    factors = factors or class_factors(profile, here, stack)
    here, there = with_factors(here, factors), with_factors(there, factors)
    common = 1.0 if device_type(here.device.name) == device_type(there.device.name) else COMMON
    estimates: dict[object, tuple[LayerTimes, LayerTimes]] = {}

    def predict(seconds: float, estimate_here: float, estimate_there: float) -> float:
        return estimate_there * (seconds / estimate_here) ** common if estimate_here > 0 else seconds

    def transfer_point(point: LayerPoint) -> LayerPoint:
        key = replace(point, recompute=next(iter(type(point.recompute))), forward=0, backward=0, kept=0, working=0,
                      forward_working=0, spread=0)  # fmt: skip
        if key not in estimates:
            estimates[key] = (_times(profile, here, stack, point), _times(profile, there, stack, point))
        forward = (times.forward.seconds for times in estimates[key])
        backward = (times.backward_with(point.recompute).seconds for times in estimates[key])
        return replace(point, forward=predict(point.forward, *forward), backward=predict(point.backward, *backward))

    name = profile.optimizer.name if profile.optimizer.name in OPTIMIZERS else "adamw"
    updates = (optimizer_cost([machine], name, stack.states, machine.stack) for machine in (here, there))
    update = predict(profile.optimizer.seconds_per_item, *(cost.seconds_per_item for cost in updates))
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
        layers=tuple(map(transfer_point, profile.layers)),
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
    """Return the device of the profile and that of the cluster at one precision; see ``transfer_profile``."""
    for field, place in (("profile", profile.cluster), ("--to", cluster)):
        if not place.alike:
            remedy = "It has devices of several types; a profile is carried from one to one."
            raise InputError(field, place.name, remedy)
    if profile.graph.precision != "tf32":  # devices without such units multiply in fp32
        check_precision(profile.graph.precision, cluster)
    calibration = calibration or load_calibration()
    stack = stack or STACKS.get(profile.stack, GALVATRON)
    host = stack_constants(stack, calibration)

    def machine(device: Device) -> Machine:
        constants = constants_for_device(calibration, device.name, device.source)
        return machine_of(device, precision or profile.graph.precision, constants, host, stack.uneven_shares)

    return machine(match_device(profile.cluster.device.name) or profile.cluster.device), machine(cluster.device)


FITTED = ("matmul", "attention", "memory", "kernel_host")
"""Fields of ``StackConstants`` that are fitted to a profile: factors on times of classes, and seconds of a launch."""

WIDTHS = [SCALES["stacks"][name].deviation for name in FITTED]
"""Standard deviations of the priors of ``FITTED``, as logarithms."""

_NOISE = 0.1
"""Standard deviation of the logarithm of measured over estimated seconds of a point. Neighbouring points err alike, so
that more of them add little."""
_POINTS = 32  # points of a profile in the fit, at most


def class_factors(profile: Profile, machine: Machine, stack: Stack) -> StackConstants:
    """Return the constants of a profile's software, fitted to its points (``calibration.parameters``)."""
    points = [
        point for point in profile.layers if point.recompute is Recompute.NONE and point.forward + point.backward > 0
    ]
    points = points[:: max(1, len(points) // _POINTS)]
    prior = machine.stack
    if not points:
        return prior

    def predict(logs: Vector) -> Vector:
        candidate = with_factors(machine, scaled_constants(prior, logs))
        times = (_times(profile, candidate, stack, point) for point in points)
        seconds = (layer.forward.seconds + layer.backward.seconds for layer in times)
        return np.log([max(total, 1e-9) for total in seconds])

    measured = [point.forward + point.backward for point in points]
    return scaled_constants(prior, fit(predict, measured, np.zeros(len(FITTED)), WIDTHS, _NOISE).values)


def scaled_constants(prior: StackConstants, logs: Vector) -> StackConstants:
    """Return the constants with the fields of ``FITTED`` multiplied by the exponentials of ``logs``."""
    scaled = {name: getattr(prior, name) * float(np.exp(log)) for name, log in zip(FITTED, logs, strict=True)}
    return replace(prior, **scaled)


def with_factors(machine: Machine, stack: StackConstants) -> Machine:
    """Return the machine under software with other constants."""
    return machine_of(machine.device, machine.precision, machine.constants, stack, machine.linear.uneven)


def class_ratios(profile: Profile, here: Machine, there: Machine) -> list[ClassRatio]:
    """Return the cost of each class of operators on both devices, the most expensive here first."""
    seconds: dict[OperatorClass, list[float]] = {}
    for layer in profile.graph.layers:
        for operator in profile.graph.kind_of(layer).operators:
            totals = seconds.setdefault(operator.kind, [0.0, 0.0])
            for index, machine in enumerate((here, there)):
                times = operator_seconds(machine, operator, 1)
                totals[index] += times.forward + times.backward
    ratios = [ClassRatio(kind, *totals) for kind, totals in seconds.items() if min(totals) > 0]
    return sorted(ratios, key=lambda ratio: -ratio.here)


def _times(profile: Profile, machine: Machine, stack: Stack, point: LayerPoint) -> LayerTimes:
    """Return the estimate for a point of a profile."""
    kind = kind_under(profile.graph.kinds[point.kind], point, stack.pictures.gathers_each)
    return layer_times(
        machine, kind, stack.states, point.samples, point.tensor, point.sequence_parallel, point.expert,
        stack.early_stop,
    )  # fmt: skip


SIZES = (2**17, 2**22, 2**26)
"""Bytes of messages that levels are fitted at, from small gradients to full buckets."""
_WIDTHS = (0.7, 1.0)
"""Prior widths of the factors on bandwidth and latency, as logarithms: half to twice, a third to three times."""
_FIT_NOISE = 0.15  # standard deviation between a fitted line and the α-β model, as a logarithm
_ALIKE = 3.0  # factor on bandwidth within which a measured link is of the data sheet's kind


@dataclass(frozen=True, slots=True)
class LevelFactor:
    """Factors between the measured figures of a level and its data sheet."""

    level: str  # name of the level
    bandwidth: float  # measured over data sheet
    latency: float  # measured over data sheet
    fits: int  # measured collectives that cross the level and no higher one


def link_factors(profile: Profile, sheet: Sequence[Level]) -> tuple[LevelFactor, ...]:
    """Fit factors on the levels of a data sheet to the collectives that a profile measured."""
    sizes = [level.size for level in profile.cluster.levels]
    lines = [line for line in profile.fits if _outermost_level(profile.cluster, line) < len(sheet)]
    levels = tuple(replace(level, size=size) for level, size in zip(sheet, sizes, strict=False))
    cluster = replace(profile.cluster, levels=levels)
    calls = [(line, RankGroup(line.group, line.stride, line.siblings), size) for line in lines for size in SIZES]
    measured = [line.latency + size / line.bandwidth for line, _, size in calls]

    def predict(logs: Vector) -> Vector:
        candidate = replace(cluster, levels=_scaled_levels(cluster.levels, logs))
        return np.log([collective_seconds(candidate, line.collective, size, group) for line, group, size in calls])

    count = len(cluster.levels)
    logs = fit(predict, measured, np.zeros(2 * count), np.tile(_WIDTHS, count), _FIT_NOISE, rounds=6).values
    crossing = [sum(_outermost_level(profile.cluster, line) == number for line in lines) for number in range(count)]
    return tuple(
        LevelFactor(level.name, float(np.exp(bandwidth)), float(np.exp(latency)), fits)
        for level, (bandwidth, latency), fits in zip(cluster.levels, logs.reshape(-1, 2), crossing, strict=True)
    )


def _scaled_levels(levels: Sequence[Level], logs: Vector) -> tuple[Level, ...]:
    """Multiply bandwidth and latency of each level by the exponentials of a pair of ``logs``."""
    factors = np.exp(logs.reshape(-1, 2)).tolist()
    return tuple(
        replace(level, bandwidth=level.bandwidth * bandwidth, latency=level.latency * latency,
                start=level.start * latency)
        for level, (bandwidth, latency) in zip(levels, factors, strict=True)
    )  # fmt: skip


def _outermost_level(cluster: Cluster, line: CollectiveFit) -> int:
    """Return the number of the outermost level that a group crosses."""
    block = 1
    for number, level in enumerate(cluster.levels):
        block *= level.size
        if (line.group - 1) * line.stride < block:
            return number
    return len(cluster.levels) - 1


def scale_up(profile: Profile, cluster: Cluster) -> Profile:
    """Extend a profile, measured on few devices or estimated, to a cluster of any number of equal devices."""
    moved = profile.on(cluster)
    is_same_type = device_type(profile.cluster.device.name) == device_type(cluster.device.name)
    if not profile.fits or not is_same_type:
        source = f"levels of cluster {cluster.name}"
        if profile.fits:
            source += f": measured on {profile.cluster.device.name}, of another type"
        elif profile.communication_origin.kind is OriginKind.MEASURED:
            source += ": none was measured"
        return replace(moved, fits=(), collectives=(), communication_origin=Origin(OriginKind.ESTIMATED, source))
    levels, notes = list(cluster.levels), list[str]()
    factors = {factor.level: factor for factor in link_factors(profile, levels) if factor.fits}
    for place, level in enumerate(levels):
        factor = factors.get(level.name)
        if factor is None:
            notes.append(f"{level.name} by its sheet")
        elif not 1 / _ALIKE < factor.bandwidth < _ALIKE:
            notes.append(f"{level.name} by its sheet: links here are of another kind (x{factor.bandwidth:.2g})")
        else:
            (corrected,) = _scaled_levels([level], np.log([factor.bandwidth, factor.latency]))
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
        fits=tuple(line for line in profile.fits if kept and _outermost_level(profile.cluster, line) == 0),
        collectives=tuple(point for point in profile.collectives if kept and (point.group - 1) * point.stride < node),
        straggling=straggling,
        communication_origin=replace(profile.communication_origin, kind=OriginKind.ESTIMATED, source="; ".join(notes)),
    )
