"""A cluster's profile of Hetu-Galvatron as our cluster and fitted communication.

Its bandwidths are bus bandwidths: it divides MB (2^20 bytes) by GB/s and takes the quotient for milliseconds. An
all-reduce of S over n ranks takes 2 (n - 1) / n S / B. What tensor groups gather or scatter comes from tables of
neighbouring ranks, all else from the bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator

from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level
from galvatron_lite.peers.hetu.model import CONTEXT_MB, HetuHardware, Line, Table
from galvatron_lite.profiler.schema import CollectiveFit, CollectivePoint

MB = 2**20
PER_MS = MB * 1000
"""Bytes a second of one MB a millisecond."""
EXCHANGES = 2
"""All-to-alls of the whole boundary tensor that its formulas count in one forward pass."""


def to_cluster(hardware: HetuHardware, precision: str, memory: int) -> Cluster:
    """The devices, which its files say nothing of but their number, in nodes.

    Args:
        hardware: its profile.
        precision: of compute, so that the devices have it.
        memory: bytes of one device.
    """
    device = Device("gpu", memory, 1.0, {precision: 1.0}, context=CONTEXT_MB * MB, source=hardware.source)
    levels = [Level("node", hardware.gpus, hardware.near[hardware.gpus] * PER_MS, 0.0, source="measured")]
    if hardware.nodes > 1:
        bandwidth = hardware.near[hardware.devices] * PER_MS
        levels.append(Level("cluster", hardware.nodes, bandwidth, 0.0, source="measured"))
    name = f"{hardware.nodes}x{hardware.gpus}"
    return Cluster(name, (DeviceGroup(device, hardware.devices),), tuple(levels), {"profiled-by": "Hetu-Galvatron"})


def to_fits(hardware: HetuHardware) -> tuple[CollectiveFit, ...]:
    """A straight line for every collective and shape of group."""
    return tuple(fit for ranks, stride in _groups(hardware) for fit in _fits(hardware, ranks, stride))


def to_collectives(hardware: HetuHardware) -> tuple[CollectivePoint, ...]:
    """The points of the latency tables, for groups of neighbours."""
    return tuple(
        point
        for ranks, stride in _groups(hardware)
        if stride == 1
        for kind, table, share, scale in _tables(hardware, ranks)
        for point in _points(hardware, kind, ranks, table, share, scale)
    )


def _groups(hardware: HetuHardware) -> Iterator[tuple[int, int]]:
    """Ranks and stride of groups in powers of two."""
    ranks = 2
    while ranks <= hardware.devices:
        stride = 1
        while ranks * stride <= hardware.devices:
            yield ranks, stride
            stride *= 2
        ranks *= 2


def _tables(hardware: HetuHardware, ranks: int) -> Iterator[tuple[Collective, Table, float, float]]:
    """Collectives with their table, and what a size and a time in it count for one of our calls.

    Its formulas look all-to-alls up by the whole boundary tensor and count two a pass; ours are four a pass, of what
    one rank holds.
    """
    if ranks in hardware.gather:
        yield Collective.ALL_GATHER, hardware.gather[ranks], 1.0, 1.0
        yield Collective.REDUCE_SCATTER, hardware.gather[ranks], 1.0, 1.0
    if ranks in hardware.exchange:
        yield Collective.ALL_TO_ALL, hardware.exchange[ranks], 1 / ranks, EXCHANGES / 4


def _points(
    hardware: HetuHardware, kind: Collective, ranks: int, table: Table, share: float, scale: float
) -> Iterator[CollectivePoint]:
    for size, milliseconds in sorted(table.points.items()):
        yield CollectivePoint(
            kind, ranks, 1, hardware.devices // ranks, round(size * MB * share), milliseconds / 1000 * scale
        )


def _fits(hardware: HetuHardware, ranks: int, stride: int) -> Iterator[CollectiveFit]:
    siblings = hardware.devices // ranks
    bus = PER_MS / hardware.ms_per_mb(ranks, apart=stride > 1)
    rounds = ranks / (ranks - 1)
    yield CollectiveFit(Collective.ALL_REDUCE, ranks, stride, siblings, 0.0, bus * rounds / 2, 0.0)
    known = (
        {kind: (table, share, scale) for kind, table, share, scale in _tables(hardware, ranks)} if stride == 1 else {}
    )
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        if kind in known:
            table, share, scale = known[kind]
            yield _line_fit(kind, ranks, siblings, table.line, share, scale)
        else:
            yield CollectiveFit(kind, ranks, stride, siblings, 0.0, bus * rounds, 0.0)
    if ranks == 2:
        speed = hardware.send.get(hardware.devices // stride, min(hardware.send.values()))
        yield CollectiveFit(Collective.SEND_RECV, 2, stride, siblings, 0.0, speed * PER_MS, 0.0)


def _line_fit(kind: Collective, ranks: int, siblings: int, line: Line, share: float, scale: float) -> CollectiveFit:
    latency = max(line.start, 0.0) / 1000 * scale
    return CollectiveFit(kind, ranks, 1, siblings, latency, PER_MS * share / (line.slope * scale), 0.0)
