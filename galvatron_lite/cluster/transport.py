"""How training software brings bytes from device to device, where that is not straight over the links.

Two things that a data sheet does not say:

- Without GPUDirect RDMA an adapter does not read device memory. What it carries passes the host: device to host memory
  and host memory to adapter share one PCIe bridge, in either direction, so that an adapter carries half of its rate
  (Kahira et al. 2021, arXiv:2104.09075, section 5.1: what comes in and what goes out share the PLX). The sums of a
  group may drive fewer adapters than its node has.
- Some software sends by blocking MPI calls on copies in host memory. A message waits for the kernels before it, is
  copied down, sent and copied up. Devices of a node do so at the same time, in and out: 2 x devices share the way (the
  same section: contention of 2 x p2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_lite.arrays import Real
from galvatron_lite.cluster.cluster import Cluster, Collective
from galvatron_lite.files import Strict
from galvatron_lite.limits import Seconds, Size


@dataclass(frozen=True, slots=True)
class Transport(Strict):
    """How software sends."""

    direct: bool = True  # whether adapters read and write device memory
    sum_rings: Size = 0  # adapters that the all-reduce of one group drives between nodes; 0: all
    # causes of communication (``spatial``, ``channel``, ``layout``) that go through host memory by MPI
    staged: tuple[str, ...] = ()
    message: Seconds = 0.0  # seconds that such a message takes beside its bytes


STRAIGHT = Transport()
"""Over the links as they are."""


def as_driven(cluster: Cluster, transport: Transport, collective: Collective) -> Cluster:
    """The cluster with the links between nodes as a collective of the software drives them."""
    rings = transport.sum_rings if collective is Collective.ALL_REDUCE else 0
    if transport.direct and not rings:
        return cluster
    near, *far = cluster.levels
    share = 1.0 if transport.direct else 0.5
    driven = (replace(level, bandwidth=level.bandwidth * share, rings=rings) for level in far)
    return replace(cluster, levels=(near, *driven))


def staged_seconds(cluster: Cluster, transport: Transport, collective: Collective, ranks: Real, size: Real) -> Real:
    """Seconds of one call of a communication through host memory, its steps one after the other.

    With n ranks, S bytes, a message's start a and a device's rate b: (n-1) (a + S / n b) for an all-gather, a
    reduce-scatter or an all-to-all, twice that for an all-reduce, a + S / b for what is sent to a neighbour or to all.

    Args:
        cluster: its device's link to the host, shared by twice the devices of a node.
        ranks: of the group.
        size: bytes, as ``Communication.size``.
    """
    device = cluster.device
    rate = (device.host_bandwidth or device.memory_bandwidth) / (2 * cluster.levels[0].size)
    if collective in (Collective.SEND_RECV, Collective.BROADCAST):
        return (transport.message + size / rate) * (ranks > 1)
    rounds = 2 if collective is Collective.ALL_REDUCE else 1
    return rounds * (ranks - 1) * (transport.message + size / ranks / rate)
