"""Link types by name, links recognised from free text, and clusters built from two link types.

Bandwidths are data-sheet figures in one direction: for links inside a node of one device, for networks of one adapter.
What collectives reach of them (efficiency, latency, size at half bandwidth) comes from the calibration, and where it
has no entry from the sourced starting values here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import Any

from galvatron_lite.calibration.schema import Calibration, LinkConstants
from galvatron_lite.calibration.store import constants_for_link, load_calibration
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.errors import FileFormatError, InputError, unknown
from galvatron_lite.files import read_data
from galvatron_lite.folders import config_folder

GBIT = 1e9 / 8

START = 8.4e-6
"""Seconds NCCL takes for a collective beside its steps (``baseLat`` of the Simple protocol in src/graph/tuning.cc)."""


@dataclass(frozen=True, slots=True)
class LinkType:
    """One type of link, see ``configs/devices/links.yaml``."""

    name: str  # key of its calibrated constants
    # bytes per second in one direction, of a device (inside a node) or an adapter (network); 0 where the adapter
    # depends on the design
    bandwidth: float
    constants: LinkConstants  # starting values of what is calibrated
    source: str  # address of the data sheet
    network: bool = False  # whether it joins nodes
    contention: float = 1.0  # factor by which times grow when all members send at once
    domain: int = 0  # devices that one switch domain joins, however many nodes they are in; 0: those of a node
    mesh: tuple[tuple[int, float], ...] = ()  # see ``Level.mesh``, of a node of 8 devices

    def mesh_of(self, node: int) -> tuple[tuple[int, float], ...]:
        """``mesh`` for a node of ``node`` devices: 4 joined by all their links reach all of them.

        A node of four V100 has two links between each pair (3 x 2 x 25 GB/s, ABCI and Summit-like designs); one of
        eight is a hybrid cube mesh.
        """
        if not self.mesh or node > 4:
            return self.mesh
        return tuple((size, (size - 1) / max(node - 1, 1)) for size in range(2, node + 1))


@cache
def link_types() -> dict[str, LinkType]:
    """Every link type by name."""
    data = read_data(config_folder("devices") / "links.yaml")
    return {
        name: LinkType(
            name, link["bandwidth"] * 1e9,
            LinkConstants(link["efficiency"], link["latency"], float(link["half_size"])), link["source"],
            link.get("network", False), float(link.get("contention", 1)), link.get("domain", 0),
            tuple((size, float(share)) for size, share in link.get("mesh", ())),
        )
        for name, link in data.items()
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Design:
    """The vendor's reference design around one generation of devices."""

    inside: str  # link type inside a node
    network: str  # link type between nodes
    adapters: float  # network adapters for each device (DGX A100: 8 compute adapters for 8 devices)
    source: str  # address


_DGX1 = "https://docs.nvidia.com/dgx/dgx1-user-guide/introduction-to-dgx1.html"
_DGX2 = "https://docs.nvidia.com/dgx/dgx2-user-guide/introduction-to-dgx2.html"
_DGX_A100 = "https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html"
_DGX_H100 = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
_DGX_B200 = "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html"
_DGX_B300 = "https://docs.nvidia.com/dgx/dgxb300-user-guide/introduction-to-dgxb300.html"
_GB200 = "https://docs.nvidia.com/dgx/dgxgb200-user-guide/hardware.html"
_PLAIN = "one 100 Gb/s adapter in a server of 8 devices, [Assumption]"

_REFERENCES: tuple[tuple[str, Design], ...] = (
    (r"gb300", Design("nvlink5-nvl72", "infiniband-xdr", 1.0, _GB200)),
    (r"gb200", Design("nvlink5-nvl72", "infiniband-ndr", 1.0, _GB200)),
    (r"b300", Design("nvlink5", "infiniband-xdr", 1.0, _DGX_B300)),
    (r"b200|b100", Design("nvlink5", "infiniband-ndr", 1.0, _DGX_B200)),
    (r"(h100|h200|h800).*pcie|h100 nvl", Design("pcie5", "infiniband-ndr", 0.125, _PLAIN)),
    (r"h800", Design("nvlink4-h800", "infiniband-ndr", 1.0, _DGX_H100)),
    (r"h100|h200|h20|gh200|hopper", Design("nvlink4", "infiniband-ndr", 1.0, _DGX_H100)),
    (r"(a100|a800).*pcie|a10\b|a40|a30|a6000|3090|3080|ga102", Design("pcie4", "infiniband-hdr", 0.125, _PLAIN)),
    (r"a800", Design("nvlink3-a800", "infiniband-hdr", 1.0, _DGX_A100)),
    (r"a100|ampere", Design("nvlink3", "infiniband-hdr", 1.0, _DGX_A100)),
    (r"ada|4090|l40|l4\b", Design("pcie4", "infiniband-hdr", 0.125, _PLAIN)),
    (r"v100.*sxm3|dgx-2", Design("nvlink2-switch", "infiniband-edr", 0.5, _DGX2)),
    (r"v100.*pcie", Design("pcie3", "infiniband-edr", 0.125, _PLAIN)),
    (r"v100|volta", Design("nvlink2", "infiniband-edr", 0.5, _DGX1)),
    (r"p100.*sxm", Design("nvlink1", "infiniband-edr", 0.5, _DGX1)),
)
_ELSE = Design("pcie3", "infiniband-edr", 0.125, _PLAIN)

_INSIDE: tuple[tuple[str, str], ...] = (
    (r"nvl72|nvl36", "nvlink5-nvl72"),
    (r"dgx-2", "nvlink2-switch"),
    (r"nvlink\s*2.*switch", "nvlink2-switch"),
    (r"nvlink\s*2.*mesh|cube.mesh|nvlink\s*2", "nvlink2"),
    (r"nvlink\s*5|1\.8 ?tb/s", "nvlink5"),
    (r"nvlink\s*4|900 ?gb/s", "nvlink4"),
    (r"nvlink\s*3|600 ?gb/s", "nvlink3"),
    (r"400 ?gb/s", "nvlink3-a800"),
    (r"pcie? ?(gen)? ?5", "pcie5"),
    (r"pcie? ?(gen)? ?4", "pcie4"),
    (r"pcie? ?(gen)? ?3", "pcie3"),
)

_BETWEEN: tuple[tuple[str, str], ...] = (
    (r"efa|elastic fabric", "efa"),
    (r"omni.?path|opa\b", "omni-path"),
    (r"xdr|800 ?gb|cx-?8|connectx-?8", "infiniband-xdr"),
    (r"roce", "roce"),
    (r"ndr|quantum-?2", "infiniband-ndr"),
    (r"hdr", "infiniband-hdr"),
    (r"edr", "infiniband-edr"),
    (r"rdma", "roce"),
    (r"cx-?7|connectx-?7", "infiniband-ndr"),
    (r"ethernet|tcp|gbe\b", "ethernet"),
)


@lru_cache(maxsize=256)
def reference_of(gpu: str) -> Design:
    """The vendor's reference design around a device, by its name; servers with PCIe cards where there is none."""
    name = gpu.lower()
    return next((reference for pattern, reference in _REFERENCES if re.search(pattern, name)), _ELSE)


@lru_cache(maxsize=1024)
def link_matching(text: str | None, gpu: str, *, between: bool = False) -> str:
    """Name of the link type that a text of a publication means; the device's reference design where it says nothing.

    Args:
        text: what is said of the link (``NVLink3/NVSwitch 600GB/s``); None or unknown words: not stated.
        gpu: name of the device.
        between: whether it is the network between nodes, not the link inside one.
    """
    reference, said = reference_of(gpu), (text or "").lower()
    named = link_types().get(said)
    if named is not None and named.network == between:
        return said
    table = _BETWEEN if between else _INSIDE
    found = next((name for pattern, name in table if re.search(pattern, said)), None)
    if found is not None:
        return found
    if not between and "pci" in said:
        return reference.inside if reference.inside.startswith("pcie") else _bus_of(reference.inside)
    return reference.network if between else reference.inside


def _bus_of(inside: str) -> str:
    """The PCIe generation that goes with a generation of NVLink."""
    return {"1": "pcie3", "2": "pcie3", "3": "pcie4"}.get(inside.removeprefix("nvlink")[:1], "pcie5")


def constants_of(name: str, calibration: Calibration | None) -> LinkConstants:
    """Calibrated constants of a link type; its starting values without a calibration.

    Raises:
        InputError: no such link type.
    """
    return link_named(name).constants if calibration is None else constants_for_link(calibration, name)


def link_named(name: str) -> LinkType:
    """A link type by name.

    Raises:
        InputError: no such link type; lists the known ones.
    """
    if name not in link_types():
        raise unknown("link", name, link_types())
    return link_types()[name]


def cluster_from_links(
    device: Device,
    n_gpus: int,
    gpus_per_node: int | None,
    intra: str | None,
    inter: str | None,
    inter_gbps_per_node: float | None,
    calibration: Calibration | None = None,
) -> Cluster:
    """A cluster of equal devices from the types of its two links.

    Args:
        device: all devices are such.
        n_gpus: how many.
        gpus_per_node: None: 8, or all where there are fewer.
        intra: link type inside a node, or any text ``link_matching`` understands; None: the reference design.
        inter: the same of the network between nodes.
        inter_gbps_per_node: gigabits a second that one node sends; None: the reference design's adapters.
        calibration: constants by link type; None: starting values.

    Raises:
        InputError: ``n_gpus`` below 1.
    """
    if n_gpus < 1:
        raise InputError("n_gpus", n_gpus, "Give 1 or more.")
    inside = link_named(link_matching(intra, device.name))
    stated = gpus_per_node or 8
    # A group of racks takes an even share of each domain (64 of 72 where 128 are used).
    node = _largest_divisor(n_gpus, max(inside.domain, stated))
    levels = [_inside(inside, node, calibration)]
    if n_gpus > node:
        between = link_named(link_matching(inter, device.name, between=True))
        rate = None if inter_gbps_per_node is None else inter_gbps_per_node * GBIT * node / stated
        levels.append(_between(between, device, node, n_gpus // node, rate, calibration))
    return Cluster(device.name, (DeviceGroup(device, n_gpus),), tuple(levels))


def level_of_link(data: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A level's mapping with what its ``link`` implies for keys that are not given; unchanged where it has none.

    Args:
        data: the level as in a cluster file.

    Raises:
        InputError: no such link type.
    """
    level = dict(data)
    name = level.pop("link", None)
    if name is None:
        return level
    if not isinstance(name, str) or name not in link_types():
        raise unknown(f"{field}.link", name, link_types())
    lanes = level.get("lanes", 1)
    if isinstance(lanes, bool) or not isinstance(lanes, (int, float)):
        raise FileFormatError(f"{field}.lanes", lanes, "Give how many links run side by side: a number.")
    link, constants = link_types()[name], constants_of(name, load_calibration())
    implied = {
        "latency": constants.latency,
        "efficiency": constants.efficiency,
        "half_size": constants.half_size,
        "contention": link.contention,
        "start": START,
        "source": link.source,
    }
    if link.bandwidth:
        implied["bandwidth"] = link.bandwidth * lanes
    if not link.network and isinstance(level.get("size"), int):
        implied["mesh"] = link.mesh_of(level["size"])
    return implied | level


def _largest_divisor(total: int, limit: int) -> int:
    return next(size for size in range(min(total, limit), 0, -1) if total % size == 0)


def _inside(link: LinkType, node: int, calibration: Calibration | None) -> Level:
    constants = constants_of(link.name, calibration)
    return Level(
        "node", node, link.bandwidth, constants.latency, link.contention, constants.efficiency, link.source,
        half_size=constants.half_size, mesh=link.mesh_of(node), start=START,
    )  # fmt: skip


def _between(
    link: LinkType, device: Device, node: int, nodes: int, rate: float | None, calibration: Calibration | None
) -> Level:
    """The network; adapters count where each gives a device its own way out (4 of 100 Gb/s at one device are one)."""
    constants, reference = constants_of(link.name, calibration), reference_of(device.name)
    adapter = link.bandwidth or link_named(reference.network).bandwidth
    total = rate if rate is not None else adapter * max(reference.adapters * node, 1.0)
    lanes = max(1, min(ceil(round(total / adapter, 6)), node))
    return Level(
        "cluster", nodes, total, constants.latency, link.contention, constants.efficiency, link.source, lanes,
        half_size=constants.half_size, start=START,
    )  # fmt: skip
