"""Where a model is trained: devices in nested levels."""

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
    launch_overhead: Seconds = 0.0  # seconds a kernel launch costs at the least
    context: Size = 0  # bytes taken before the first tensor: driver context, library workspaces
    source: str = ""  # address of the data sheet, or ``measured``
    # bytes per second that it can send to host memory while it receives as much; 0: not known, so that nothing is
    # kept there
    host_bandwidth: RateOrNone = 0.0
    # bytes per second of host memory, its even part where devices of a node share it
    host_memory_bandwidth: RateOrNone = 0.0


@dataclass(frozen=True, slots=True)
class Level(Strict):
    """One level of nesting: how the members of the level below are joined."""

    name: Name  # ``node`` (devices of one node over NVLink), ``rack``, ``cluster``
    size: Devices  # how many members of the level below it joins
    # bytes per second that one member can send while it receives as much (one direction), with the whole link to
    # itself. For a level above the node, what one whole node can send: all NICs together
    bandwidth: Rate
    latency: CallSeconds  # seconds before the first byte of a message arrives
    contention: Factor = 1.0  # factor >= 1 by which times grow when every member sends at once
    # share of ``bandwidth`` that a collective really reaches on large messages
    efficiency: Annotated[float, Interval(gt=0, le=1)] = 1.0
    source: str = ""  # where the figures come from, or ``measured``
    # how many equal adapters (NICs) ``bandwidth`` is the sum of; one sending device alone reaches one of them
    lanes: Devices = 1
    # bytes a message at which it reaches half of the bandwidth; 0: any message reaches all of it
    half_size: Amount = 0.0
    # share of ``bandwidth`` that a group of at most so many members reaches, ascending by members, where they are
    # joined directly (hybrid cube mesh); empty where a switch joins them
    mesh: tuple[tuple[Devices, Annotated[float, Interval(gt=0, le=1)]], ...] = ()
    # seconds that a collective over this level takes to get going, whatever its size and algorithm
    start: CallSeconds = 0.0
    rings: Size = 0  # how many of the adapters the collective of one group drives (``transport``); 0: all


@dataclass(frozen=True, slots=True)
class DeviceGroup(Strict):
    """A run of consecutive equal devices in a cluster whose devices are not all alike."""

    device: Device  # what they are
    count: Devices  # how many follow one another
    # their own links, innermost first, as many levels of the same sizes as the cluster's; empty where they are the
    # cluster's
    levels: tuple[Level, ...] = ()

    def like(self, other: DeviceGroup) -> bool:
        """Whether both are of one type: equal devices with equal links."""
        return self.device == other.device and self.levels == other.levels


@dataclass(frozen=True, slots=True)
class Cluster(Strict):
    """Devices in nested levels, innermost level first.

    Attributes:
        name: for people.
        groups: runs of equal devices in rank order; one run where all are alike.
        levels: innermost first; the product of their sizes is the number of devices. Where devices are unlike, what
            counts among devices of several types: of each level the slower of their own.
        fingerprint: what identifies the machine a measurement was made on; empty for data-sheet clusters.
    """

    name: Name
    groups: tuple[DeviceGroup, ...]
    levels: tuple[Level, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return prod(level.size for level in self.levels)

    @property
    def device(self) -> Device:
        """The device with the least memory (the only one where all are alike), with the largest of their contexts."""
        least = min((group.device for group in self.groups), key=lambda device: device.memory)
        context = max(group.device.context for group in self.groups)
        return least if context == least.context else replace(least, context=context)

    @property
    def alike(self) -> bool:
        """Whether all devices are of one type."""
        return len(self.groups) == 1 or len(self.types) == 1

    @property
    def types(self) -> tuple[DeviceGroup, ...]:
        """A run of each type of device, in rank order of the first of each; one where all are alike."""
        first: list[DeviceGroup] = []
        for group in self.groups:
            if not any(group.like(group_type) for group_type in first):
                first.append(group)
        return tuple(first)

    def type_of(self, ranks: range) -> int | None:
        """Place in ``types`` of the type of some devices; None where all of the cluster are alike or these are not."""
        if self.alike:
            return None
        types, place, reached = self.types, 0, set[int]()
        for group in self.groups:
            if place < ranks.stop and place + group.count > ranks.start:
                reached.add(next(number for number, type_ in enumerate(types) if group.like(type_)))
            place += group.count
        return reached.pop() if len(reached) == 1 else None

    def of_one_type(self, size: int, devices: int) -> bool:
        """Whether none of the runs of ``size`` that the first ``devices`` ranks make has devices of several types."""
        return self.alike or all(self.type_of(range(at, at + size)) is not None for at in range(0, devices, size))

    def only(self, kind: int) -> Cluster:
        """A cluster of as many devices, all of one type (a place in ``types``)."""
        own = self.types[kind]
        group = replace(own, count=self.devices, levels=())
        return replace(self, groups=(group,), levels=own.levels or self.levels)

    def peak(self, precision: str, devices: int) -> float:
        """FLOP/s of the first so many devices together, in a precision; the best they have where they lack it."""
        total, left = 0.0, devices
        for group in self.groups:
            own = group.device.peak.get(precision) or max(group.device.peak.values())
            total, left = total + own * min(group.count, left), max(left - group.count, 0)
        return total


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The shape of a process group inside one stage; arrays where there is one for each of several strategies."""

    size: Whole  # ranks
    stride: Whole = 1  # ranks from one member to the next
    siblings: Whole = 1  # groups that work at the same moment and share the links above the level they fit in
    # of arrays, which groups occur, where that was worked out
    apart: DistinctGroups | None = field(default=None, compare=False, repr=False)

    @property
    def reach(self) -> Whole:
        """Ranks from the first member to the last."""
        return (self.size - 1) * self.stride


@dataclass(frozen=True, slots=True, eq=False)
class DistinctGroups:
    """The groups that occur in an array of n groups."""

    groups: Sequence[RankGroup]  # each of them once
    place: IntArray  # (n,) which of them each is
    cache: dict[object, object] = field(default_factory=dict)  # what was found out of them, by who asked
