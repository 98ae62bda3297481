"""Detours that training software takes between devices, which a data sheet of links does not show.

- Without GPUDirect RDMA an adapter does not read device memory. Its messages pass through the host: device to host
  memory and host memory to adapter share one PCIe bridge, in either direction, so that an adapter carries half of its
  rate (Kahira et al. 2021, arXiv:2104.09075, section 5.1: incoming and outgoing messages share the PLX). The all-reduce
  of a group may drive fewer adapters than its node has.
- Some software sends by blocking MPI calls on copies in host memory. A message waits for the kernels before it, is
  copied down, sent and copied up. All devices of a node send and receive at the same time, so that 2 x devices share
  the link to the host (the same section: contention of 2 x p2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_lite.arrays import Real
from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.files import Strict
from galvatron_lite.limits import Seconds, Size


@dataclass(frozen=True, slots=True)
class Transport(Strict):
    """How training software sends."""

    direct: bool = True  # whether adapters read and write device memory
    sum_rings: Size = 0  # adapters that the all-reduce of one group drives between nodes; 0: all
    # causes of communication (``spatial``, ``channel``, ``layout``) that go through host memory by MPI
    staged: tuple[str, ...] = ()
    message: Seconds = 0.0  # fixed seconds of such a message


STRAIGHT = Transport()
"""No detours."""


def as_driven(cluster: Cluster, transport: Transport, collective: Collective) -> Cluster:
    """Return the cluster whose links between nodes have what a collective of the software reaches."""
    rings = transport.sum_rings if collective is Collective.ALL_REDUCE else 0
    if transport.direct and not rings:
        return cluster
    near, *far = cluster.levels
    share = 1.0 if transport.direct else 0.5
    driven = (replace(level, bandwidth=level.bandwidth * share, rings=rings) for level in far)
    return replace(cluster, levels=(near, *driven))


def staged_seconds(cluster: Cluster, transport: Transport, collective: Collective, ranks: Real, size: Real) -> Real:
    """Return the seconds of one call of a communication through host memory, its steps one after the other.

    With n ranks, S bytes, a message's start a and a device's rate b: (n-1) (a + S / n b) for an all-gather, a
    reduce-scatter or an all-to-all, twice that for an all-reduce, a + S / b for a send or a broadcast.

    Args:
        ranks: ranks of the group.
        size: bytes, as ``Communication.size``.
    """
    device = cluster.device
    rate = (device.host_bandwidth or device.memory_bandwidth) / (2 * cluster.levels[0].size)
    if collective in (Collective.SEND_RECV, Collective.BROADCAST):
        return (transport.message + size / rate) * (ranks > 1)
    rounds = 2 if collective is Collective.ALL_REDUCE else 1
    return rounds * (ranks - 1) * (transport.message + size / ranks / rate)
