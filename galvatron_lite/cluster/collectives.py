"""What a collective costs on a group of ranks in a cluster of nested levels (α-β model). No torch here.

Every message costs α (latency, seconds) plus bytes / β (bandwidth), after R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, sections 3-4. The algorithms are
those of NCCL (``src/graph/tuning.cc``): ring and double binary tree. A hierarchical form works level by level, so
that each slow link is crossed by one share of the tensor. The cheapest of the candidates counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from galvatron_lite.cluster.cluster import Cluster, Level, RankGroup
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Collective

TREE_EFFICIENCY = 0.92
"""Share of the ring's bandwidth that NCCL's tree reaches (``ncclTopoTuneModel`` in NCCL's tuning.cc)."""


@dataclass(frozen=True, slots=True)
class Hop:
    """What a group has of one level: the links between its sub-groups of the level below.

    Attributes:
        members: how many sub-groups this level joins (> 1).
        ranks: ranks of the group inside one such sub-group.
        latency: seconds.
        bandwidth: bytes per second that one sub-group as a whole can send while all sibling groups send too.
        lane: bytes per second that a single rank can send over it.
    """

    members: int
    ranks: int
    latency: float
    bandwidth: float
    lane: float


def hops_of(cluster: Cluster, group: RankGroup) -> tuple[Hop, ...]:
    """The levels a group crosses, innermost first; empty for a group of one.

    A level's block of ``c`` devices holds ``ceil(c / stride)`` of the group's ranks. Sibling groups with ranks in the
    same block share its links; adapters that no rank of the block drives are idle (``Level.lanes``).

    Raises:
        InputError: the group reaches beyond the cluster.
    """
    if (group.size - 1) * group.stride >= cluster.devices:
        reach = f"{group.size} ranks {group.stride} apart"
        raise InputError("group", reach, f"The cluster {cluster.name} has {cluster.devices} devices.")
    hops: list[Hop] = []
    block, inside = 1, 1
    for level in cluster.levels:
        upper = min(group.size, ceil(block * level.size / group.stride))
        if upper > inside:
            hops.append(_hop(level, block, inside, upper, group.siblings))
        block, inside = block * level.size, upper
    return tuple(hops)


def _hop(level: Level, block: int, inside: int, upper: int, siblings: int) -> Hop:
    """The hop of a group with ``inside`` ranks in a block of ``block`` devices and ``upper`` in the level's block."""
    groups = min(siblings, block // inside)
    whole = block * level.size
    busy = upper * min(siblings, whole // upper) / whole
    reached = level.bandwidth * level.efficiency / (1.0 + (level.contention - 1.0) * busy)
    # Devices have a link each at the innermost level; above it a block shares its adapters.
    lanes = level.lanes if block > 1 else 1
    bandwidth = reached * min(1.0, groups * inside / lanes) / groups
    return Hop(ceil(upper / inside), inside, level.latency, bandwidth, min(bandwidth, reached / lanes))


def _path_latency(hops: Sequence[Hop]) -> float:
    """Latency along a ring through all ranks but one: most hops are near, few cross the upper levels."""
    crossings, latency = 1, 0.0
    for hop in reversed(hops):
        latency += (hop.members - 1) * crossings * hop.latency
        crossings *= hop.members
    return latency


def _slowest(hops: Sequence[Hop]) -> float:
    return min(hop.bandwidth for hop in hops)


def ring_pass(size: float, hops: Sequence[Hop]) -> float:
    """Seconds of one ring pass over all ranks (a reduce-scatter or an all-gather): (n-1)/n · S/β + (n-1)·α.

    The slowest link of the ring sets β; α adds up along the ring (Thakur et al. 2005, 4.1 and 4.5).
    """
    ranks = prod(hop.members for hop in hops)
    return _path_latency(hops) + (ranks - 1) / ranks * size / _slowest(hops)


def level_pass(size: float, hops: Sequence[Hop]) -> float:
    """Seconds of a reduce-scatter or all-gather done level by level, each with a ring.

    A sub-group's ranks hold disjoint shares, so together they send (m-1)/m · S over the level's link whatever their
    number, and α is paid m-1 times at each level instead of along the whole ring.
    """
    return sum(ring_pass(size, (hop,)) for hop in hops)


def tree_all_reduce(size: float, hops: Sequence[Hop]) -> float:
    """Seconds of a pipelined double binary tree all-reduce: 2·ceil(log2 n)·α + 2·S/β (NCCL's tree)."""
    latency = sum(ceil(log2(hop.members)) * hop.latency for hop in hops)
    return 2 * latency + 2 * size / (TREE_EFFICIENCY * _slowest(hops))


def _half(size: float, hops: Sequence[Hop]) -> float:
    return min(ring_pass(size, hops), level_pass(size, hops))


def _all_reduce(size: float, hops: Sequence[Hop]) -> float:
    return min(2 * _half(size, hops), tree_all_reduce(size, hops))


def _all_to_all(size: float, hops: Sequence[Hop]) -> float:
    """Pairwise exchange (Thakur et al. 2005, 4.3); the levels' links work at the same time."""
    ranks = prod(hop.members for hop in hops)
    latency = sum((hop.members - 1) * hop.ranks * hop.latency for hop in hops)
    return latency + max((hop.members - 1) * hop.ranks**2 * size / ranks / hop.bandwidth for hop in hops)


def _broadcast(size: float, hops: Sequence[Hop]) -> float:
    """The better of NCCL's pipelined ring and a binomial tree (Thakur et al. 2005, 4.2), level by level."""
    ring = _path_latency(hops) + size / _slowest(hops)
    tree = sum(ceil(log2(hop.members)) * (hop.latency + size / hop.bandwidth) for hop in hops)
    return min(ring, tree)


def _send_recv(size: float, hops: Sequence[Hop]) -> float:
    """Every rank sends ``size`` bytes to the next one; the slowest pair counts."""
    return max(hop.latency + size / hop.lane for hop in hops)


_SECONDS: dict[Collective, Callable[[float, Sequence[Hop]], float]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _half,
    Collective.REDUCE_SCATTER: _half,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.SEND_RECV: _send_recv,
}


def collective_seconds(cluster: Cluster, collective: Collective, size_bytes: float, group: RankGroup) -> float:
    """Seconds of one collective on a group of ranks.

    Args:
        cluster: the devices and links.
        collective: its kind.
        size_bytes: bytes of the whole tensor: what an all-reduce or broadcast carries, an all-gather yields, a
            reduce-scatter takes, one rank of an all-to-all holds, and one rank of a send/recv sends.
        group: its ranks, how far apart they lie, and how many such groups work at once.

    Raises:
        InputError: the group reaches beyond the cluster.
    """
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    return _SECONDS[collective](size_bytes, hops_of(cluster, group))
