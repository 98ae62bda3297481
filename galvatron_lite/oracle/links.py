"""The links of a cluster as the closed forms see them: a start-up time and a bandwidth by devices.

Kahira et al. 2021 (arXiv:2104.09075), section 3.1: Hockney's model with ring collectives. alpha is the summed latency
of the way, 1 / beta the bandwidth of its slowest link, of the worst pair on the ring.

    one message of m bytes                  alpha + m beta
    all-reduce of m bytes over p            2 (p - 1) (alpha + m beta / p)
    all-gather of m bytes of each of p      (p - 1) (alpha + m beta)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.files import STRICT

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two devices."""

    alpha: float  # seconds before the first byte arrives
    beta: float  # seconds a byte

    def seconds(self, size: float) -> float:
        """Of one message of so many bytes."""
        return self.alpha + size * self.beta

    def contended(self, flows: float) -> Link:
        """The way where so many flows share its slowest link (the paper's phi)."""
        return Link(self.alpha, self.beta * flows)


def all_reduce(link: Link, devices: int, size: float) -> float:
    """Seconds to sum ``size`` bytes over a ring."""
    return 2 * (devices - 1) * link.seconds(size / devices)


def all_gather(link: Link, devices: int, size: float) -> float:
    """Seconds until each device has the ``size`` bytes of every one."""
    return (devices - 1) * link.seconds(size)


@dataclass(frozen=True, slots=True)
class LinkSetting:
    """One way the figures of a network are told."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    end: float  # seconds from a device to its bridge
    source: str = ""  # where that is said


@dataclass(frozen=True, slots=True)
class Rate:
    """A link's figures: bytes a second, seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Reach:
    """Switches on the longest way among the first so many devices."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    devices: int  # at most so many
    switches: float  # seconds of all switches passed


@dataclass(frozen=True, slots=True)
class Fabric:
    """A fat tree of nodes with bridged network adapters, as ``profiles/paradl/networks`` describes it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str  # of the cluster
    source: str  # where the figures come from
    devices: int  # at most
    memory: float  # bytes a device
    node: int  # devices of a node
    default: str  # name of the setting taken where none is asked for
    settings: dict[str, LinkSetting]  # named figures of a way's ends
    inside: Rate  # between devices of a node
    between: float  # bytes a second between nodes
    bridge: float  # seconds of the switch between a device and the adapter
    levels: tuple[Reach, ...]  # by devices, ascending
    staged: Rate  # between devices of a node where messages go through host memory


@dataclass(frozen=True, slots=True)
class Wires:
    """What the formulas ask of a cluster: the worst pair among the first so many devices."""

    name: str  # of the cluster
    setting: str  # which figures of it
    devices: int  # at most
    memory: float  # bytes a device
    node: int  # devices of a node
    direct: tuple[tuple[int, Link], ...]  # by devices, ascending: the link of collectives
    staged: tuple[tuple[int, Link], ...]  # by devices, ascending: the link of messages that go through host memory

    def link(self, devices: int) -> Link:
        """Of collectives over so many devices."""
        return _reaching(self.direct, devices)

    def staged_link(self, devices: int) -> Link:
        """Of halos and the all-gather that ends a spatial split."""
        return _reaching(self.staged, devices)


def _reaching(links: tuple[tuple[int, Link], ...], devices: int) -> Link:
    found = next((link for reach, link in links if devices <= reach), None)
    if found is None:
        raise InputError("--gpus", devices, f"The cluster has {links[-1][0]}; give 1 to that many.")
    return found


def wires_of(fabric: Fabric, setting: str | None = None) -> Wires:
    """The links of a fabric under one of its settings."""
    name = setting or fabric.default
    if name not in fabric.settings:
        raise InputError("--network", name, f"{fabric.name} has {', '.join(fabric.settings)}.")
    hop, near = fabric.settings[name].end + fabric.bridge, fabric.inside
    slow = min(fabric.between, fabric.staged.bandwidth)
    first = (fabric.node, Link(near.latency, 1 / near.bandwidth))
    far = [(at.devices, Link(2 * hop + at.switches, 1 / fabric.between)) for at in fabric.levels]
    through = (fabric.node, Link(fabric.staged.latency + fabric.bridge, 1 / fabric.staged.bandwidth))
    beyond = [(at.devices, Link(4 * hop + at.switches, 1 / slow)) for at in fabric.levels]
    return Wires(
        fabric.name, name, fabric.devices, fabric.memory, fabric.node, (first, *far), (through, *beyond)
    )  # fmt: skip


def wires_of_cluster(cluster: Cluster, setting: str | None = None) -> Wires:
    """The links of any cluster: latencies of the levels passed, the bandwidth of one adapter, by level.

    Collectives reach the share of a bandwidth that the level's ``efficiency`` says. Messages go from device to device.
    """
    if setting is not None:
        raise InputError("--network", setting, f"{cluster.name} has one way to tell its network: leave it out.")
    sizes = list(accumulate((level.size for level in cluster.levels), lambda a, b: a * b))
    slow = list(accumulate((level.bandwidth / level.lanes * level.efficiency for level in cluster.levels), min))
    links = tuple(
        (size, Link(level.latency, 1 / rate)) for size, level, rate in zip(sizes, cluster.levels, slow, strict=True)
    )
    memory = float(cluster.device.memory - cluster.device.context)
    return Wires(cluster.name, "levels", cluster.devices, memory, cluster.levels[0].size, links, links)
