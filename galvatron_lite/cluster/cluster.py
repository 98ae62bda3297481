"""Where a model is trained: devices in nested levels. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one CPU process that stands for one).

    Attributes:
        name: ``A100-SXM4-80GB``.
        memory: bytes.
        memory_bandwidth: bytes per second.
        peak: dense peak FLOP/s by precision (``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``).
        units: streaming multiprocessors (or cores), for wave quantisation.
        launch_overhead: seconds a kernel launch costs at the least.
        context: bytes taken before the first tensor: driver context, library workspaces.
        source: address of the data sheet, or ``measured``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    memory: int
    memory_bandwidth: float
    peak: dict[str, float]
    units: int = 1
    launch_overhead: float = 0.0
    context: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of nesting: how the members of the level below are joined.

    Attributes:
        name: ``node`` (devices of one node over NVLink), ``rack``, ``cluster``.
        size: how many members of the level below it joins.
        bandwidth: bytes per second that one member can send while it receives as much (one direction), with the whole
            link to itself. For a level above the node, what one whole node can send: all NICs together.
        latency: seconds before the first byte of a message arrives.
        contention: factor >= 1 by which times grow when every member sends at once.
        efficiency: share of ``bandwidth`` that a collective really reaches on large messages.
        source: where the figures come from, or ``measured``.
        lanes: how many equal adapters (NICs) ``bandwidth`` is the sum of; one sending device alone reaches one of them.
        half_size: bytes a message at which it reaches half of the bandwidth; 0: any message reaches all of it.
        mesh: share of ``bandwidth`` that a group of at most so many members reaches, ascending by members, where they
            are joined directly (hybrid cube mesh); empty where a switch joins them.
        start: seconds that a collective over this level takes to get going, whatever its size and algorithm.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    size: int
    bandwidth: float
    latency: float
    contention: float = 1.0
    efficiency: float = 1.0
    source: str = ""
    lanes: int = 1
    half_size: float = 0.0
    mesh: tuple[tuple[int, float], ...] = ()
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A run of consecutive equal devices in a cluster whose devices are not all alike.

    Attributes:
        device: what they are.
        count: how many follow one another.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    device: Device
    count: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in nested levels, innermost level first.

    Attributes:
        name: for people.
        groups: runs of equal devices in rank order; one run where all are alike.
        levels: innermost first; the product of their sizes is the number of devices.
        fingerprint: what identifies the machine a measurement was made on; empty for data-sheet clusters.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    groups: tuple[DeviceGroup, ...]
    levels: tuple[Level, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return prod(level.size for level in self.levels)

    @property
    def device(self) -> Device:
        """The device with the least memory (the only one where all are alike)."""
        return min((group.device for group in self.groups), key=lambda device: device.memory)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The shape of a process group inside one stage: ``size`` ranks that lie ``stride`` ranks apart.

    ``siblings`` such groups work at the same moment and share the links above the level they fit in.
    """

    size: int
    stride: int = 1
    siblings: int = 1
