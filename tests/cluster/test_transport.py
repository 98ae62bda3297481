"""What software makes of links: adapters without GPUDirect, sums over one of them, messages through host memory."""

from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cluster.transport import STRAIGHT, Transport, as_driven, staged_seconds
from galvatron_lite.cost.communication import Links
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.estimate import estimate_profile

DEVICE = Device("V", 16_000_000_000, 9e11, {"fp32": 1e13}, host_bandwidth=16e9)
LEVELS = (Level("node", 4, 1e11, 0.0), Level("cluster", 2, 20e9, 0.0, lanes=2))
CLUSTER = Cluster("two nodes", (DeviceGroup(DEVICE, 8),), LEVELS)
SLOW = Transport(direct=False, sum_rings=1, staged=("spatial",), message=3e-3)


def seconds(transport: Transport, collective: Collective, group: RankGroup, size: float = 8e9) -> float:
    return collective_seconds(as_driven(CLUSTER, transport, collective), collective, size, group)


def test_without_gpudirect_adapters_carry_half() -> None:
    """A ring moves 7/8 of the bytes over 20 GB/s, or over 10 GB/s."""
    group = RankGroup(8, 1, 1)
    assert seconds(STRAIGHT, Collective.ALL_GATHER, group) == pytest.approx(7e9 / 20e9)
    assert seconds(SLOW, Collective.ALL_GATHER, group) == pytest.approx(7e9 / 10e9)


def test_a_sum_over_one_adapter_has_half_of_the_node() -> None:
    """Of two adapters of 5 GB/s each one carries twice 7/8 of the bytes; four groups side by side use both."""
    assert seconds(SLOW, Collective.ALL_REDUCE, RankGroup(8, 1, 1)) == pytest.approx(2 * 7e9 / 5e9)
    assert seconds(SLOW, Collective.ALL_REDUCE, RankGroup(2, 4, 4)) == pytest.approx(2 * 4e9 / (10e9 / 4))


def test_what_stays_in_a_node_is_as_before() -> None:
    group = RankGroup(4, 1, 2)
    assert seconds(SLOW, Collective.ALL_REDUCE, group) == seconds(STRAIGHT, Collective.ALL_REDUCE, group)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (Collective.SEND_RECV, 3e-3 + 1e9 / 2e9),
        (Collective.ALL_GATHER, 3 * (3e-3 + 0.25e9 / 2e9)),
        (Collective.REDUCE_SCATTER, 3 * (3e-3 + 0.25e9 / 2e9)),
        (Collective.ALL_REDUCE, 6 * (3e-3 + 0.25e9 / 2e9)),
    ],
)
def test_through_host_memory(collective: Collective, expected: float) -> None:
    """Four devices send and receive over a link of 16 GB/s: 2 GB/s each."""
    assert staged_seconds(CLUSTER, SLOW, collective, 4, 1e9) == pytest.approx(expected)


def test_only_the_causes_named_go_through_host_memory() -> None:
    graph = load_model("alexnet", precision="fp32")
    profile = replace(estimate_profile(graph, CLUSTER, precision="fp32", name="x", samples=(1,)), transport=SLOW)
    group = RankGroup(4, 1, 2)
    halo = Communication(Collective.SEND_RECV, 1e6, group, Moment.FORWARD, False, 2, "spatial")
    gradient = replace(halo, collective=Collective.ALL_REDUCE, cause="data")
    staged, straight = Links(profile).timed([halo, gradient])
    assert staged == pytest.approx(2 * (3e-3 + 1e6 / 2e9))
    assert straight == pytest.approx(2 * collective_seconds(CLUSTER, Collective.ALL_REDUCE, 1e6, group))
