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
    """The vendor's reference design around one generation of devices, see ``configs/devices/designs.yaml``."""

    inside: str  # link type inside a node
    network: str  # link type between nodes
    adapters: float  # network adapters for each device (DGX A100: 8 compute adapters for 8 devices)
    source: str  # address


@cache
def _texts() -> dict[str, Any]:
    data: dict[str, Any] = read_data(config_folder("devices") / "designs.yaml")
    return data


@lru_cache(maxsize=256)
def reference_of(gpu: str) -> Design:
    """The vendor's reference design around a device, by its name; servers with PCIe cards where there is none."""
    data = _texts()
    found = next(dict(design) for design in data["designs"] if re.search(design["match"], gpu.lower()))
    return Design(found["inside"], found["network"], found["adapters"], data["sources"][found["source"]])


@lru_cache(maxsize=1024)
def link_matching(text: str | None, gpu: str, *, between: bool = False) -> str:
    """Name of the link type that a text of a publication means; the device's reference design where it says nothing.

    Args:
        text: what is said of the link (``NVLink3/NVSwitch 600GB/s``); None or unknown words: not stated.
        gpu: name of the device.
        between: whether it is the network between nodes, not the link inside one.
    """
    reference, wanted = reference_of(gpu), (text or "").lower()
    named = link_types().get(wanted)
    if named is not None and named.network == between:
        return wanted
    table = _texts()["between" if between else "inside"]
    link: str | None = next((name for pattern, name in table if re.search(pattern, wanted)), None)
    if link is not None:
        return link
    if not between and "pci" in wanted:
        # the PCIe generation that goes with a generation of NVLink
        generation = reference.inside.removeprefix("nvlink")[:1]
        bus = {"1": "pcie3", "2": "pcie3", "3": "pcie4"}.get(generation, "pcie5")
        return reference.inside if reference.inside.startswith("pcie") else bus
    return reference.network if between else reference.inside


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
    limit = min(n_gpus, max(inside.domain, stated))
    node = next(size for size in range(limit, 0, -1) if n_gpus % size == 0)
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
