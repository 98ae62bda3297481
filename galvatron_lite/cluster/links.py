"""Types of links, by name or from free text, and clusters built from two of them.

Bandwidths are data-sheet figures in one direction, of a device for links inside a node and of an adapter for networks.
What collectives reach of them (efficiency, latency, size at half bandwidth) comes from the calibration, or without one
from the sourced starting values of ``configs/devices/links.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
"""Fixed seconds of an NCCL collective (``baseLat`` of the Simple protocol in src/graph/tuning.cc)."""


@dataclass(frozen=True, slots=True)
class LinkType:
    """One type of link, an entry of ``configs/devices/links.yaml``."""

    name: str  # key of its calibrated constants
    # bytes per second in one direction, of a device (inside a node) or an adapter (network); 0: the adapter is that of
    # the reference design
    bandwidth: float
    constants: LinkConstants  # starting values of the calibrated constants
    source: str  # address of the data sheet
    network: bool = False  # whether it joins nodes
    contention: float = 1.0  # factor by which times grow when all members send at once
    domain: int = 0  # devices in one switch domain, which may span nodes; 0: those of a node
    mesh: tuple[tuple[int, float], ...] = ()  # ``Level.mesh`` of a node of 8 devices

    def mesh_of(self, node: int) -> tuple[tuple[int, float], ...]:
        """Return ``mesh`` for a node of ``node`` devices.

        A node of four V100 has two links between each pair (3 x 2 x 25 GB/s, ABCI and Summit-like designs); one of
        eight is a hybrid cube mesh.
        """
        if not self.mesh or node > 4:
            return self.mesh
        return tuple((size, (size - 1) / max(node - 1, 1)) for size in range(2, node + 1))


@cache
def link_types() -> dict[str, LinkType]:
    """Return every link type by name."""
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
    """The vendor's reference design around one generation of devices (``configs/devices/designs.yaml``)."""

    inside: str  # link type inside a node
    network: str  # link type between nodes
    adapters: float  # network adapters for each device (DGX A100: 8 compute adapters for 8 devices)
    source: str  # address


@cache
def publication_patterns() -> dict[str, Any]:
    """Return regular expressions for names in publications, and what they mean (``configs/devices/designs.yaml``)."""
    data: dict[str, Any] = read_data(config_folder("devices") / "designs.yaml")
    return data


@lru_cache(maxsize=256)
def reference_of(gpu: str) -> Design:
    """Return the vendor's reference design around a device, by its name; servers with PCIe cards if it has none."""
    data = publication_patterns()
    design = next(design for design in data["designs"] if re.search(design["match"], gpu.lower()))
    return Design(design["inside"], design["network"], design["adapters"], data["sources"][design["source"]])


@lru_cache(maxsize=1024)
def link_matching(text: str | None, gpu: str, *, between: bool = False) -> str:
    """Return the name of the link type that a publication's text means.

    Args:
        text: description of the link (``NVLink3/NVSwitch 600GB/s``); None or unknown words: the reference design's.
        gpu: name of the device.
        between: whether it is the network between nodes rather than the link inside a node.
    """
    reference, words = reference_of(gpu), (text or "").lower()
    link_type = link_types().get(words)
    if link_type is not None and link_type.network == between:
        return words
    table = publication_patterns()["between" if between else "inside"]
    link: str | None = next((name for pattern, name in table if re.search(pattern, words)), None)
    if link is not None:
        return link
    if not between and "pci" in words:
        # the PCIe generation that goes with a generation of NVLink
        generation = reference.inside.removeprefix("nvlink")[:1]
        bus = {"1": "pcie3", "2": "pcie3", "3": "pcie4"}.get(generation, "pcie5")
        return reference.inside if reference.inside.startswith("pcie") else bus
    return reference.network if between else reference.inside


def constants_of(name: str, calibration: Calibration | None) -> LinkConstants:
    """Return the calibrated constants of a link type, or its starting values without a calibration.

    Raises:
        InputError: unknown link type.
    """
    return link_named(name).constants if calibration is None else constants_for_link(calibration, name)


def link_named(name: str) -> LinkType:
    """Return a link type.

    Raises:
        InputError: unknown link type; lists the known ones.
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
    """Build a cluster of equal devices from the types of its two links.

    Args:
        device: the type of all devices.
        n_gpus: number of devices.
        gpus_per_node: devices of a node; None: 8, or all if there are fewer.
        intra: link type inside a node, or any text for ``link_matching``; None: the reference design's.
        inter: the same for the network between nodes.
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
    limit = min(n_gpus, max(inside.domain, stated))
    node = next(size for size in range(limit, 0, -1) if n_gpus % size == 0)
    levels = [_level("node", node, inside, inside.bandwidth, calibration)]
    if n_gpus > node:
        between, reference = link_named(link_matching(inter, device.name, between=True)), reference_of(device.name)
        adapter = between.bandwidth or link_named(reference.network).bandwidth
        total = adapter * max(reference.adapters * node, 1.0)
        if inter_gbps_per_node is not None:
            total = inter_gbps_per_node * GBIT * node / stated
        lanes = max(1, min(ceil(round(total / adapter, 6)), node))  # several adapters at one device are a single lane
        levels.append(replace(_level("cluster", n_gpus // node, between, total, calibration), lanes=lanes))
    return Cluster(device.name, (DeviceGroup(device, n_gpus),), tuple(levels))


def _level(name: str, size: int, link: LinkType, bandwidth: float, calibration: Calibration | None) -> Level:
    constants = constants_of(link.name, calibration)
    return Level(
        name, size, bandwidth, constants.latency, link.contention, constants.efficiency, link.source,
        half_size=constants.half_size, mesh=() if link.network else link.mesh_of(size), start=START,
    )  # fmt: skip


def level_of_link(data: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Replace the ``link`` of a level, as in a cluster file, by the figures it implies for absent keys.

    Raises:
        InputError: unknown link type.
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
