"""The cluster a model trains on: devices in nested levels, and process groups on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Annotated

from annotated_types import Interval

from galvatron_lite.arrays import IntArray, Whole
from galvatron_lite.files import Strict
from galvatron_lite.limits import Amount, CallSeconds, Devices, Factor, Name, Rate, RateOrNone, Seconds, Size


class Collective(StrEnum):
    """Kinds of communication."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


@dataclass(frozen=True, slots=True)
class Device(Strict):
    """One accelerator (or one CPU process that stands for one)."""

    name: Name  # ``A100-SXM4-80GB``
    memory: Size  # bytes
    memory_bandwidth: Rate  # bytes per second
    peak: dict[str, Rate]  # dense peak FLOP/s by precision (``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``)
    units: Devices = 1  # streaming multiprocessors (or cores), for wave quantisation
    launch_overhead: Seconds = 0.0  # the shortest time of a kernel launch, seconds
    context: Size = 0  # bytes taken before the first tensor: driver context, library workspaces
    source: str = ""  # address of the data sheet, or ``measured``
    # bytes per second to host memory, in each direction at once; 0: unknown, so that nothing is offloaded
    host_bandwidth: RateOrNone = 0.0
    # bytes per second of host memory: this device's even part if devices of a node share it
    host_memory_bandwidth: RateOrNone = 0.0


@dataclass(frozen=True, slots=True)
class Level(Strict):
    """One level of nesting: how the members of the level below are joined."""

    name: Name  # ``node`` (devices of one node over NVLink), ``rack``, ``cluster``
    size: Devices  # number of members of the level below
    # bytes per second of one member in one direction, with the link to itself; above the node, of a whole node: all
    # NICs together
    bandwidth: Rate
    latency: CallSeconds  # seconds before the first byte of a message arrives
    contention: Factor = 1.0  # factor >= 1 by which times grow when every member sends at once
    # share of ``bandwidth`` that a collective reaches on large messages
    efficiency: Annotated[float, Interval(gt=0, le=1)] = 1.0
    source: str = ""  # where the figures come from, or ``measured``
    lanes: Devices = 1  # equal adapters (NICs) that ``bandwidth`` is the sum of; a single sending device drives one
    half_size: Amount = 0.0  # bytes of a message that reaches half of the bandwidth; 0: any message reaches all of it
    # (members of a group at most, share of ``bandwidth`` it reaches), ascending, if members are joined directly (hybrid
    # cube mesh); empty if a switch joins them
    mesh: tuple[tuple[Devices, Annotated[float, Interval(gt=0, le=1)]], ...] = ()
    start: CallSeconds = 0.0  # fixed seconds of a collective over this level, whatever its size and algorithm
    rings: Size = 0  # adapters that the collective of one group drives (``transport``); 0: all


@dataclass(frozen=True, slots=True)
class DeviceGroup(Strict):
    """A run of consecutive equal devices."""

    device: Device
    count: Devices  # number of devices
    # their links, innermost first, with the sizes of the cluster's levels; empty: the cluster's links
    levels: tuple[Level, ...] = ()

    def like(self, other: DeviceGroup) -> bool:
        """Whether both are of one type: equal devices with equal links."""
        return self.device == other.device and self.levels == other.levels


@dataclass(frozen=True, slots=True)
class Cluster(Strict):
    """Devices in nested levels, innermost level first.

    Attributes:
        name: for people.
        groups: runs of equal devices in rank order; a single run if all are alike.
        levels: innermost first; the product of their sizes is the number of devices. If devices are unlike, these
            links count between devices of several types.
        fingerprint: identifies the machine a measurement was made on; empty for data-sheet clusters.
    """

    name: Name
    groups: tuple[DeviceGroup, ...]
    levels: tuple[Level, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(level.size for level in self.levels)

    @property
    def device(self) -> Device:
        """The device with the least memory, with the largest context of all devices."""
        least = min((group.device for group in self.groups), key=lambda device: device.memory)
        context = max(group.device.context for group in self.groups)
        return least if context == least.context else replace(least, context=context)

    @property
    def alike(self) -> bool:
        """Whether all devices are of one type."""
        return len(self.groups) == 1 or len(self.types) == 1

    @property
    def types(self) -> tuple[DeviceGroup, ...]:
        """The first group of each type of device, in rank order."""
        types: list[DeviceGroup] = []
        for group in self.groups:
            if not any(group.like(other) for other in types):
                types.append(group)
        return tuple(types)

    def type_of(self, ranks: range) -> int | None:
        """Return the index in ``types`` that all ``ranks`` share; None if they differ, or if the cluster is alike."""
        if self.alike:
            return None
        types, start, reached = self.types, 0, set[int]()
        for group in self.groups:
            if start < ranks.stop and start + group.count > ranks.start:
                reached.add(next(number for number, other in enumerate(types) if group.like(other)))
            start += group.count
        return reached.pop() if len(reached) == 1 else None

    def of_one_type(self, size: int, devices: int) -> bool:
        """Whether each run of ``size`` ranks among the first ``devices`` has devices of one type only."""
        starts = range(0, devices, size)
        return self.alike or all(self.type_of(range(start, start + size)) is not None for start in starts)

    def only(self, kind: int) -> Cluster:
        """Return a cluster with as many devices, all of the type ``types[kind]``."""
        group = self.types[kind]
        levels = group.levels or self.levels
        return replace(self, groups=(replace(group, count=self.devices, levels=()),), levels=levels)

    def peak(self, precision: str, devices: int) -> float:
        """Return the FLOP/s of the first ``devices`` devices together; a device without the precision runs its best."""
        total, left = 0.0, devices
        for group in self.groups:
            rate = group.device.peak.get(precision) or max(group.device.peak.values())
            total, left = total + rate * min(group.count, left), max(left - group.count, 0)
        return total


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The shape of a process group inside one stage; arrays for the groups of several strategies."""

    size: Whole  # ranks
    stride: Whole = 1  # ranks from one member to the next
    siblings: Whole = 1  # groups that work at the same moment and share the links above the level they fit in
    apart: DistinctGroups | None = field(default=None, compare=False, repr=False)  # the distinct groups of arrays

    @property
    def reach(self) -> Whole:
        """Ranks from the first member to the last."""
        return (self.size - 1) * self.stride


@dataclass(frozen=True, slots=True, eq=False)
class DistinctGroups:
    """The distinct groups in an array of n groups."""

    groups: Sequence[RankGroup]  # each distinct group once
    place: IntArray  # (n,) index into ``groups``
    cache: dict[object, object] = field(default_factory=dict)  # results for ``groups``, by caller
