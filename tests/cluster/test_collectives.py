"""The α-β model against closed forms and the relations every collective obeys."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level, RankGroup
from galvatron_lite.cluster.collectives import TREE_EFFICIENCY, collective_seconds, hops_of, ring_pass, tree_all_reduce
from galvatron_lite.errors import InputError

ALPHA, BETA = 2e-6, 100e9
NET_ALPHA, NET_BETA = 8e-6, 40e9
DEVICE = Device("test", 2**30, 1e12, {"fp32": 1e12})
MIB = 2**20


def flat(size: int, **more: float) -> Cluster:
    level = Level("node", size, BETA, ALPHA, **more)  # type: ignore[arg-type]
    return Cluster("flat", (DeviceGroup(DEVICE, size),), (level,))


def nested(nodes: int = 4, lanes: int = 1) -> Cluster:
    levels = (Level("node", 8, BETA, ALPHA), Level("cluster", nodes, NET_BETA, NET_ALPHA, lanes=lanes))
    return Cluster("nested", (DeviceGroup(DEVICE, 8 * nodes),), levels)


sizes = st.floats(1.0, 1e11)
groups = st.builds(
    RankGroup,
    size=st.integers(2, 8),
    stride=st.sampled_from([1, 2, 4]),
    siblings=st.sampled_from([1, 2, 4, 8]),
)
collectives = st.sampled_from(list(Collective))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ring_closed_forms_on_one_level(n: int) -> None:
    size = 512 * MIB
    half = (n - 1) / n * size / BETA + (n - 1) * ALPHA
    expected = {
        Collective.ALL_REDUCE: 2 * half,
        Collective.ALL_GATHER: half,
        Collective.REDUCE_SCATTER: half,
        Collective.ALL_TO_ALL: half,
        Collective.BROADCAST: min(size / BETA + (n - 1) * ALPHA, ceil(log2(n)) * (ALPHA + size / BETA)),
        Collective.SEND_RECV: ALPHA + size / BETA,
    }
    for collective, seconds in expected.items():
        assert collective_seconds(flat(n), collective, size, RankGroup(n)) == pytest.approx(seconds)


def test_small_messages_take_the_tree() -> None:
    seconds = collective_seconds(flat(64), Collective.ALL_REDUCE, 1024, RankGroup(64))
    assert seconds == pytest.approx(2 * 6 * ALPHA + 2 * 1024 / (TREE_EFFICIENCY * BETA))


@pytest.mark.parametrize("collective", list(Collective))
def test_a_group_of_one_and_an_empty_message_cost_nothing(collective: Collective) -> None:
    assert collective_seconds(flat(8), collective, MIB, RankGroup(1)) == 0.0
    assert collective_seconds(flat(8), collective, 0, RankGroup(8)) == 0.0


def test_two_nodes_reach_the_adapters_bandwidth_and_no_more() -> None:
    size = 4e9
    sent = collective_seconds(nested(), Collective.ALL_REDUCE, size, RankGroup(16))
    assert sent == pytest.approx(2 * 15 / 16 * size / NET_BETA, rel=0.01)


def test_trees_over_four_nodes_send_the_tensor_twice() -> None:
    size = 4e9
    four = tree_all_reduce(hops_of(nested(), RankGroup(32))).at(size)
    assert four == pytest.approx(2 * (3 * ALPHA + 2 * NET_ALPHA) + 2 * size / NET_BETA / TREE_EFFICIENCY)


@pytest.mark.parametrize(
    ("group", "members"),
    [
        (RankGroup(16), [(8, 1), (2, 8)]),
        (RankGroup(4, 8), [(4, 1)]),
        (RankGroup(16, 2), [(4, 1), (4, 4)]),
        (RankGroup(4, 2), [(4, 1)]),
        (RankGroup(2, 16), [(2, 1)]),
        (RankGroup(1), []),
    ],
)
def test_a_group_occupies_the_levels_it_crosses(group: RankGroup, members: list[tuple[int, int]]) -> None:
    assert [(hop.members, hop.ranks) for hop in hops_of(nested(), group)] == members


def test_sixteen_ranks_over_two_nodes_by_hand() -> None:
    size = 1e9
    ring = 15 / 16 * size / NET_BETA + 14 * ALPHA + NET_ALPHA
    assert ring_pass(hops_of(nested(), RankGroup(16))).at(size) == pytest.approx(ring)
    assert collective_seconds(nested(), Collective.ALL_GATHER, size, RankGroup(16)) == pytest.approx(ring)


def ramped(half_size: float) -> Cluster:
    levels = (
        Level("node", 8, BETA, ALPHA, half_size=half_size),
        Level("cluster", 4, NET_BETA, NET_ALPHA, lanes=8, half_size=half_size),
    )
    return Cluster("ramped", (DeviceGroup(DEVICE, 32),), levels)


@given(st.integers(2, 8), st.floats(1e3, 1e8))
def test_a_share_of_the_half_size_moves_at_half_the_bandwidth(n: int, half: float) -> None:
    seconds = collective_seconds(ramped(half), Collective.ALL_GATHER, n * half, RankGroup(n))
    assert seconds == pytest.approx((n - 1) * (ALPHA + half / (BETA / 2)))
    sent = collective_seconds(ramped(half), Collective.SEND_RECV, half, RankGroup(2, 8))
    assert sent == pytest.approx(NET_ALPHA + half / (NET_BETA / 8 / 2))


@given(collectives, groups, sizes)
def test_a_start_is_paid_once_a_collective(collective: Collective, group: RankGroup, size: float) -> None:
    levels = tuple(replace(level, start=1e-3) for level in nested().levels)
    slow = replace(nested(), levels=levels)
    seconds = [collective_seconds(cluster, collective, size, group) for cluster in (nested(), slow)]
    assert seconds[1] - seconds[0] == pytest.approx(1e-3, rel=1e-6, abs=1e-12 * seconds[0])


def test_direct_links_serve_small_groups_with_those_between_them_only() -> None:
    level = Level("node", 8, BETA, ALPHA, mesh=((2, 1 / 6), (4, 4 / 6), (8, 1.0)))
    cluster = Cluster("mesh", (DeviceGroup(DEVICE, 8),), (level,))
    for ranks, share in ((2, 1 / 6), (3, 4 / 6), (4, 4 / 6), (8, 1.0)):
        assert hops_of(cluster, RankGroup(ranks))[0].bandwidth == pytest.approx(BETA * share)


@given(sizes, st.integers(2, 16), st.sampled_from([1, 2, 4, 8]))
def test_all_to_all_over_nodes_is_bound_by_what_leaves_a_node(size: float, nodes: int, lanes: int) -> None:
    group = RankGroup(8 * nodes)
    cluster = nested(nodes, lanes)
    leaving = 8 * size * (nodes - 1) / nodes / NET_BETA
    within = 7 * size / (8 * nodes) / BETA
    latency = 7 * ALPHA + (nodes - 1) * 8 * NET_ALPHA
    seconds = collective_seconds(cluster, Collective.ALL_TO_ALL, size, group)
    assert seconds == pytest.approx(latency + max(leaving, within))


@pytest.mark.parametrize(("tensor", "share"), [(1, 1.0), (2, 1 / 2), (4, 1 / 4), (8, 1 / 8)])
def test_replicas_of_tensor_groups_share_a_nodes_adapters(tensor: int, share: float) -> None:
    """Data-parallel groups that stride the tensor group: 8/t ranks a node, t of them at once."""
    cluster = nested(4, lanes=4)
    alone = hops_of(cluster, RankGroup(32 // tensor, tensor, 1))[-1].bandwidth
    together = hops_of(cluster, RankGroup(32 // tensor, tensor, tensor))[-1].bandwidth
    assert together == pytest.approx(NET_BETA * share)
    assert alone == pytest.approx(NET_BETA * min(1.0, 8 / tensor / 4))


def test_siblings_share_one_nodes_adapters_but_not_more_than_live_there() -> None:
    def far(siblings: int) -> float:
        return hops_of(nested(), RankGroup(4, 8, siblings))[0].bandwidth

    assert far(1) == pytest.approx(NET_BETA)
    assert far(4) == pytest.approx(NET_BETA / 4)
    assert far(8) == far(64) == pytest.approx(NET_BETA / 8)
    assert hops_of(nested(), RankGroup(16, 1, 2))[1].bandwidth == pytest.approx(NET_BETA)


def test_one_sender_reaches_one_adapter_only() -> None:
    cluster = nested(lanes=8)
    alone = collective_seconds(cluster, Collective.SEND_RECV, 1e9, RankGroup(2, 8, 1))
    together = collective_seconds(cluster, Collective.SEND_RECV, 1e9, RankGroup(2, 8, 8))
    assert alone == pytest.approx(NET_ALPHA + 1e9 / (NET_BETA / 8)) == pytest.approx(together)
    assert hops_of(cluster, RankGroup(16))[1].bandwidth == pytest.approx(NET_BETA)
    assert hops_of(cluster, RankGroup(8, 4))[1].bandwidth == pytest.approx(NET_BETA / 4)


def test_contention_slows_a_full_level_and_spares_a_lone_pair() -> None:
    cluster = flat(8, contention=3.0)
    full = hops_of(cluster, RankGroup(8))[0].bandwidth
    pair = hops_of(cluster, RankGroup(2))[0].bandwidth
    pairs = hops_of(cluster, RankGroup(2, 1, 4))[0].bandwidth
    assert full == pairs == pytest.approx(BETA / 3)
    assert pair == pytest.approx(BETA / 1.5)


def test_efficiency_scales_bandwidth() -> None:
    assert hops_of(flat(4, efficiency=0.5), RankGroup(4))[0].bandwidth == pytest.approx(BETA / 2)


def test_a_group_beyond_the_cluster_is_refused() -> None:
    with pytest.raises(InputError, match="has 32 devices"):
        collective_seconds(nested(), Collective.ALL_REDUCE, MIB, RankGroup(8, 8))
    with pytest.raises(InputError):
        collective_seconds(nested(), Collective.ALL_REDUCE, MIB, RankGroup(8, 16))
