"""A profile from data sheets: the same schema as a measured one, no GPU needed. No torch here.

Forward and backward of a layer are the sums of its operators' rooflines (``roofline``); recompute ``full`` adds the
whole forward to backward, ``selective`` that of the memory-bound operators. Communication is not in the layers: the
cost model takes it from the cluster's levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute
from galvatron_lite.profiler.estimate_efficiency import HOST, NVIDIA_OVERLAP, OPTIMIZERS
from galvatron_lite.profiler.roofline import Machine, machine_of, operator_seconds
from galvatron_lite.profiler.schema import PROFILE_VERSION, LayerPoint, OptimizerCost, Origin, OriginKind, Profile
from galvatron_lite.units import ITEM_BYTES

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
"""Samples a device that are estimated; the cost model interpolates between them."""

LARGEST_DEGREE = 64
"""Tensor-parallel degrees above this are not estimated."""


def estimate_profile(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    precision: str,
    name: str,
    samples: Sequence[int] = SAMPLES,
    optimizer: str = "adamw",
) -> Profile:
    """A profile of a model on a cluster from data sheets.

    Parameters rest in fp32 and are gathered in the precision of compute; gradients are reduced in fp32. In a cluster
    of unlike devices every figure is the slowest device's.

    Args:
        graph: the model; its byte figures must be of the same item size as ``precision``.
        cluster: the devices and links.
        precision: of compute: fp32, tf32, fp16, bf16.
        name: of the profile.
        samples: samples on a device to estimate points for.
        optimizer: a name of ``OPTIMIZERS``.

    Raises:
        InputError: an unknown precision or optimizer, or a graph of another precision.
    """
    machines = [machine_of(device, precision) for device in _devices(cluster)]
    if ITEM_BYTES[precision] != ITEM_BYTES.get(graph.precision):
        raise InputError("--precision", precision, f"The model was captured in {graph.precision}; capture it anew.")
    points = [
        point
        for key, kind in graph.kinds.items()
        for point in _kind_points(machines, key, kind, cluster.devices, samples)
    ]
    devices = ", ".join(machine.device.name for machine in machines)
    return Profile(
        version=PROFILE_VERSION,
        name=name,
        graph=graph,
        cluster=cluster,
        origin=Origin(OriginKind.ESTIMATED, f"data sheet of {devices}, {precision}"),
        communication_origin=Origin(OriginKind.ESTIMATED, f"levels of cluster {cluster.name}"),
        layers=tuple(points),
        optimizer=optimizer_cost(machines, optimizer),
        overlap=NVIDIA_OVERLAP,
        overhead=HOST,
        gather_precision="fp32" if ITEM_BYTES[precision] == 4 else precision,
    )


def optimizer_cost(machines: Sequence[Machine], name: str) -> OptimizerCost:
    """Update time from memory traffic: every item of parameter, gradient and state passes through memory.

    Raises:
        InputError: an optimizer whose traffic is not known.
    """
    if name not in OPTIMIZERS:
        raise InputError("--optimizer", name, f"Known for estimates: {', '.join(OPTIMIZERS)}.")
    traffic = OPTIMIZERS[name]
    seconds = max(traffic.moved / machine.bandwidth for machine in machines)
    share = 1.0 if traffic.working else 0.0
    return OptimizerCost(name, traffic.state, seconds, 0.0, float(traffic.working), share)


def tensor_degrees(kind: LayerKind, devices: int) -> tuple[int, ...]:
    """Legal tensor-parallel degrees of a kind on up to so many devices: divisors of what its structure allows."""
    largest = min(LARGEST_DEGREE, devices, kind.tensor_degrees)
    return tuple(degree for degree in range(1, largest + 1) if kind.tensor_degrees % degree == 0)


def _devices(cluster: Cluster) -> list[Device]:
    """The devices of a cluster, each kind once."""
    return list({group.device.name: group.device for group in cluster.groups}.values())


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of one layer: forward, backward, and forward of what selective recompute runs again."""

    forward: float
    backward: float
    again: float

    def extra(self, recompute: Recompute) -> float:
        return {Recompute.NONE: 0.0, Recompute.SELECTIVE: self.again, Recompute.FULL: self.forward}[recompute]


def _times(machine: Machine, kind: LayerKind, samples: int, degree: int, sequence_parallel: bool) -> _Times:
    forward = backward = again = 0.0
    for operator in kind.operators:
        seconds = operator_seconds(machine, operator, samples, degree, sequence_parallel)
        forward += seconds.forward
        backward += seconds.backward
        again += seconds.forward if operator.kind is OperatorClass.MEMORY else 0.0
    return _Times(forward, backward, again)


def _slowest(machines: Sequence[Machine], kind: LayerKind, samples: int, degree: int, split: bool) -> _Times:
    every = [_times(machine, kind, samples, degree, split) for machine in machines]
    return max(every, key=lambda times: times.forward + times.backward)


def _kind_points(
    machines: Sequence[Machine], key: str, kind: LayerKind, devices: int, samples: Sequence[int]
) -> Iterator[LayerPoint]:
    for degree in tensor_degrees(kind, devices):
        for split in (False, True) if kind.sequence_parallel and degree > 1 else (False,):
            for count in samples:
                times = _slowest(machines, kind, count, degree, split)
                for recompute in kind.kept:
                    yield _point(key, kind, times, count, degree, split, recompute)


def _point(
    key: str, kind: LayerKind, times: _Times, samples: int, degree: int, split: bool, recompute: Recompute
) -> LayerPoint:
    """One point; under recompute all that a plain layer keeps lives again while its backward runs."""
    kept = kind.kept[recompute].at(degree, split) * samples
    plain = kind.kept.get(Recompute.NONE, kind.kept[recompute]).at(degree, split) * samples
    rebuilt = plain + kept if recompute is Recompute.FULL else max(plain, kept)
    return LayerPoint(
        kind=key,
        samples=samples,
        tensor=degree,
        sequence_parallel=split,
        recompute=recompute,
        forward=times.forward,
        backward=times.backward + times.extra(recompute),
        kept=round(kept),
        working=round(rebuilt + kind.working.at(degree, split) * samples),
        forward_working=round(max(plain, kept) + kind.forward_working.at(degree, split) * samples),
    )
