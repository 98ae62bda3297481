"""What a collective costs on a group of ranks in a cluster of nested levels (α-β model).

Every message costs α (latency, seconds) plus bytes / β (bandwidth), after R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, sections 3-4. The algorithms are
those of NCCL (``src/graph/tuning.cc``): rings through all ranks, laid so that each node is entered and left once and
every adapter carries one of the parallel rings; for all-reduce also double binary trees over nodes. Reduce-scatter and
all-gather have rings only, so that each node's adapters carry (n-1)/n of the tensor. The cheapest candidate counts.

Message-size ramp: x bytes take (x + h) / β, which reaches half of β at x = h (``Level.half_size``). A step of a ring
moves S/n bytes, so that small shares ramp each of its n-1 steps: α' = α + h/β.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import ceil, log2, prod

from galvatron_lite.arrays import Real, largest, least
from galvatron_lite.cluster.cluster import Cluster, Collective, Level, RankGroup
from galvatron_lite.errors import InputError

TREE_EFFICIENCY = 0.92
"""Share of the ring's bandwidth that NCCL's tree reaches (``ncclTopoTuneModel`` in NCCL's tuning.cc)."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A level that a group crosses: the links between its sub-groups in the level below."""

    members: int  # sub-groups that this level joins (> 1)
    ranks: int  # ranks of the group in one sub-group
    latency: float  # seconds before the first byte of a message arrives
    bandwidth: float  # bytes per second that one sub-group as a whole can send while all sibling groups send too
    lane: float  # bytes per second that a single rank can send
    ramp: float = 0.0  # bytes that a message's ramp is worth (``Level.half_size``)
    start: float = 0.0  # fixed seconds of a collective
    level: str = ""  # name of the level

    @property
    def alpha(self) -> float:
        """Seconds of an empty message and its ramp, sent by a sub-group as a whole."""
        return self.latency + self.ramp / self.bandwidth


def hops_of(cluster: Cluster, group: RankGroup) -> tuple[Hop, ...]:
    """Return the levels a group crosses, innermost first; none for a group of one rank.

    A level's block of ``c`` devices holds ``ceil(c / stride)`` of the group's ranks. Sibling groups with
    ranks in the same block share its links; adapters that no rank of the block drives are idle (``Level.lanes``).

    Raises:
        InputError: the group reaches beyond the cluster.
    """
    if group.reach >= cluster.devices:
        reach = f"{group.size} ranks {group.stride} apart"
        raise InputError("group", reach, f"The cluster {cluster.name} has {cluster.devices} devices.")
    return _hops(cluster.levels, group)


@lru_cache(maxsize=8192)
def _hops(levels: tuple[Level, ...], group: RankGroup) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    block, inside = 1, 1
    for level in levels:
        upper = min(group.size, ceil(block * level.size / group.stride))
        if upper > inside:
            hops.append(_hop(level, block, inside, upper, group.siblings))
        block, inside = block * level.size, upper
    return tuple(hops)


def _hop(level: Level, block: int, inside: int, upper: int, siblings: int) -> Hop:
    """Return the hop of a group with ``inside`` ranks in each block of ``block`` devices and ``upper`` in the level."""
    groups = min(siblings, block // inside)
    size = block * level.size
    busy = upper * min(siblings, size // upper) / size
    # share of a device's direct links that lead to members of its group; a switch uses all of them
    direct = next((share for most, share in level.mesh if upper <= most), 1.0) if block == 1 else 1.0
    reached = level.bandwidth * level.efficiency * direct / (1.0 + (level.contention - 1.0) * busy)
    # Devices have a link each at the innermost level; above it a block shares its adapters.
    lanes = level.lanes if block > 1 else 1
    driven = min(inside, level.rings or inside)
    bandwidth = reached * min(1.0, groups * driven / lanes) / groups
    lane = min(bandwidth, reached / lanes)
    return Hop(ceil(upper / inside), inside, level.latency, bandwidth, lane, level.half_size, level.start, level.name)


def _path_latency(hops: Sequence[Hop]) -> float:
    """Return the latency along a ring through all ranks: most hops are near, few cross the upper levels."""
    crossings, latency = 1, 0.0
    for hop in reversed(hops):
        latency += (hop.members - 1) * crossings * hop.alpha
        crossings *= hop.members
    return latency


def _slowest(hops: Sequence[Hop]) -> float:
    return min(hop.bandwidth for hop in hops)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of a collective of S bytes, ``latency + S * per_byte``; arrays for several groups."""

    latency: Real
    per_byte: Real

    def at(self, size: Real) -> Real:
        """Return the seconds for ``size`` bytes."""
        return self.latency + size * self.per_byte

    def times(self, count: float) -> CollectiveTime:
        """Return the time of ``count`` such collectives, one after the other."""
        return CollectiveTime(count * self.latency, count * self.per_byte)


def ring_pass(hops: Sequence[Hop]) -> CollectiveTime:
    """Return the time of one ring pass (a reduce-scatter or an all-gather): (n-1)/n · S/β + (n-1)·α.

    The slowest link of the ring sets β; α adds up along the ring (Thakur et al. 2005, 4.1 and 4.5).
    """
    ranks = prod(hop.members for hop in hops)
    return CollectiveTime(_path_latency(hops), (ranks - 1) / ranks / _slowest(hops))


def tree_all_reduce(hops: Sequence[Hop]) -> CollectiveTime:
    """Return the time of a pipelined double binary tree all-reduce: 2·ceil(log2 n)·α + 2·S/β of the slowest level.

    Each half of the tensor has its own tree. A member is a leaf of one tree (sends S/2 up) and has two children in the
    other (sends S/2 up and twice S/2 down): 2·S (P. Sanders, J. Speck, J. Träff, "Two-tree algorithms for full
    bandwidth broadcast", Parallel Computing 35, 2009). Two members are root of a tree each and could send S only, but
    measurements do not show it: 201 MB over two nodes of 8 V100 on one EDR adapter take 40 ms, like the ring's 1.88·S
    at 9.5 GB/s, and tensor groups over four nodes take 43 ms (github.com/Oneflow-Inc/DLPerf, reports/GPT, 2021).
    """
    latency = sum(ceil(log2(hop.members)) * hop.alpha for hop in hops)
    return CollectiveTime(2 * latency, 2 / _slowest(hops) / TREE_EFFICIENCY)


def _all_to_all(hops: Sequence[Hop]) -> tuple[CollectiveTime, ...]:
    """Return the time of a pairwise exchange (Thakur et al. 2005, 4.3); links of all levels work at the same time."""
    ranks = prod(hop.members for hop in hops)
    latency = sum((hop.members - 1) * hop.ranks * hop.alpha for hop in hops)
    return (CollectiveTime(latency, max((hop.members - 1) * hop.ranks**2 / ranks / hop.bandwidth for hop in hops)),)


def _broadcast(hops: Sequence[Hop]) -> tuple[CollectiveTime, ...]:
    """Return the times of NCCL's pipelined ring and of a binomial tree (Thakur et al. 2005, 4.2), level by level."""
    rounds = [ceil(log2(hop.members)) for hop in hops]
    latency = sum(count * hop.alpha for count, hop in zip(rounds, hops, strict=True))
    per_byte = sum(count / hop.bandwidth for count, hop in zip(rounds, hops, strict=True))
    return CollectiveTime(_path_latency(hops), 1 / _slowest(hops)), CollectiveTime(latency, per_byte)


def _send_recv(hops: Sequence[Hop]) -> tuple[CollectiveTime, ...]:
    """Return the time of every hop, since each rank sends to the next and the slowest pair counts."""
    return tuple(CollectiveTime(hop.latency + hop.ramp / hop.lane, 1 / hop.lane) for hop in hops)


_LINES: dict[Collective, Callable[[Sequence[Hop]], tuple[CollectiveTime, ...]]] = {
    Collective.ALL_REDUCE: lambda hops: (ring_pass(hops).times(2), tree_all_reduce(hops)),
    Collective.ALL_GATHER: lambda hops: (ring_pass(hops),),
    Collective.REDUCE_SCATTER: lambda hops: (ring_pass(hops),),
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.SEND_RECV: _send_recv,
}


def collective_lines(cluster: Cluster, collective: Collective, group: RankGroup) -> tuple[CollectiveTime, ...]:
    """Return lines that bound a collective's seconds by its bytes; ``seconds_on`` combines them.

    Raises:
        InputError: the group reaches beyond the cluster.
    """
    if group.size <= 1:
        return (CollectiveTime(0.0, 0.0),)
    hops = hops_of(cluster, group)
    start = max(hop.start for hop in hops)
    return tuple(CollectiveTime(line.latency + start, line.per_byte) for line in _LINES[collective](hops))


def seconds_on(collective: Collective, lines: Sequence[CollectiveTime], size: Real) -> Real:
    """Return the seconds for ``size`` bytes (> 0): the fastest algorithm, or the slowest pair of a send."""
    pick = largest if collective is Collective.SEND_RECV else least
    return reduce(pick, (line.at(size) for line in lines))


def collective_seconds(cluster: Cluster, collective: Collective, size_bytes: float, group: RankGroup) -> float:
    """Return the seconds of one collective on a group of ranks.

    Args:
        size_bytes: bytes of the full tensor: what an all-reduce or broadcast carries, an all-gather yields, a
            reduce-scatter takes, one rank of an all-to-all holds, and one rank of a send/recv sends.
        group: shape of the process group.

    Raises:
        InputError: the group reaches beyond the cluster.
    """
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    return float(seconds_on(collective, collective_lines(cluster, collective, group), size_bytes))
