"""Links recognised from what publications say, and clusters built from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import Calibration, LinkConstants
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cluster.links import (
    GBIT,
    cluster_from_links,
    constants_of,
    link_matching,
    link_named,
    link_types,
)
from galvatron_lite.cluster.transport import STRAIGHT, Transport, as_driven, staged_seconds
from galvatron_lite.cost.communication import Links
from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.estimate import estimate_profile


@pytest.mark.parametrize(
    ("text", "gpu", "name"),
    [
        ("NVLink3/NVSwitch 600GB/s", "A100-SXM4-80GB", "nvlink3"),
        ("NVSwitch 600GB/s", "A100-SXM4-40GB", "nvlink3"),
        ("NVLink2 hybrid cube mesh", "V100-SXM2-16GB", "nvlink2"),
        ("NVLink2", "V100-SXM2-16GB", "nvlink2"),
        ("NVSwitch (DGX-2H)", "V100-SXM3-32GB (450W, DGX-2H)", "nvlink2-switch"),
        ("NVLink4/NVSwitch 900GB/s", "H100-SXM5-80GB", "nvlink4"),
        ("NVLink/NVSwitch", "8x H100 80GB SXM5", "nvlink4"),
        ("NVLink/NVSwitch", "LambdaCloud 8xV100 16GB", "nvlink2"),
        ("NVLink5 NVL72", "GB200", "nvlink5-nvl72"),
        ("NVLink5 (NVL72 domain)", "GB200-192GB", "nvlink5-nvl72"),
        ("NVLink5/NVSwitch 1.8TB/s", "B200-SXM", "nvlink5"),
        ("PCIe (NVLink bridge unknown)", "A100 80GB PCIe", "pcie4"),
        ("PCIe (NVLink bridge unknown)", "8x H100 80GB PCIe Gen5", "pcie5"),
        ("PCIe (NVLink bridge unknown)", "LambdaCloud 2x V100 16GB", "pcie3"),
        ("PCIe 3.0", "Tesla P40-24GB", "pcie3"),
        (None, "A100-SXM4-80GB", "nvlink3"),
        (None, "A800-SXM4-80GB", "nvlink3-a800"),
        (None, "RTX 3090", "pcie4"),
        ("some future link", "GB300", "nvlink5-nvl72"),
        (None, "no such device", "pcie3"),
    ],
)
def test_links_inside_a_node(text: str | None, gpu: str, name: str) -> None:
    assert link_matching(text, gpu) == name


@pytest.mark.parametrize(
    ("text", "gpu", "name"),
    [
        ("InfiniBand HDR 4 HCA/node", "A100-SXM4-80GB", "infiniband-hdr"),
        ("InfiniBand EDR 100Gb (1 HCA)", "V100-SXM2-16GB", "infiniband-edr"),
        ("InfiniBand NDR 8x400Gb (DGX H100)", "H100-SXM5-80GB", "infiniband-ndr"),
        ("InfiniBand (DGX SuperPOD)", "A100-SXM4-40GB", "infiniband-hdr"),
        ("InfiniBand (DGX SuperPOD)", "V100-SXM3-32GB", "infiniband-edr"),
        ("InfiniBand (DGX)", "H100-SXM5-80GB", "infiniband-ndr"),
        ("Omni-Path 4 links/node (Jean Zay)", "A100-SXM4-80GB", "omni-path"),
        ("AWS EFA 32x100Gb (HF cluster p5)", "H100-SXM5-80GB", "efa"),
        ("RoCE", "A100-SXM4-40GB", "roce"),
        ("RDMA 8x200Gb CLOS", "A100", "roce"),
        ("CX-7 400Gb/s per GPU", "H200-SXM5", "infiniband-ndr"),
        ("DGX B300", "B300", "infiniband-xdr"),
        ("GB200 NVL72", "GB200", "infiniband-ndr"),
        (None, "V100-SXM2-32GB", "infiniband-edr"),
    ],
)
def test_cluster_networks(text: str | None, gpu: str, name: str) -> None:
    assert link_matching(text, gpu, between=True) == name


@pytest.mark.parametrize("name", sorted(link_types()))
def test_every_link_type_is_known_by_name_and_has_a_source_and_sane_figures(name: str) -> None:
    link = link_types()[name]
    assert link_matching(name, "A100", between=link.network) == name
    assert link.source
    assert 0 < link.constants.efficiency < 1
    assert 0 < link.constants.latency < 1e-4
    assert link.network or link.bandwidth > 0


def test_unknown_link_types_are_named() -> None:
    with pytest.raises(InputError, match="nvlink3"):
        link_named("smoke signals")
    with pytest.raises(InputError, match="1 or more"):
        cluster_from_links(device_named("A100"), 0, 8, None, None, None)


@pytest.mark.parametrize(
    ("device", "network", "gbps", "lanes", "one_device"),
    [
        ("A100", "InfiniBand HDR 4 HCA/node", 800, 4, 200),
        ("A100", "InfiniBand HDR 8x200Gb (Selene)", 1600, 8, 200),
        ("A100", "Omni-Path 4 links/node", 400, 4, 100),
        ("H100", "AWS EFA 32x100Gb (HF cluster p5)", 3200, 8, 400),
        ("V100", "InfiniBand EDR 100Gb (1 HCA)", 100, 1, 100),
        ("H100", "RDMA 400Gb/s per GPU", 3200, 8, 400),
        ("A100", None, None, 8, 200),
        ("V100", None, None, 4, 100),
        ("H100", None, None, 8, 400),
        ("A100-PCIE-80GB", None, None, 1, 200),
    ],
)
def test_adapters_of_a_node(
    device: str, network: str | None, gbps: float | None, lanes: int, one_device: float
) -> None:
    level = cluster_from_links(device_named(device), 32, 8, None, network, gbps).levels[1]
    assert (level.size, level.lanes) == (4, lanes)
    assert level.bandwidth / lanes == pytest.approx(one_device * GBIT)


@given(st.sampled_from(["A100", "V100", "H100", "GB200"]), st.integers(1, 600), st.sampled_from([1, 2, 4, 8, 16, None]))
def test_a_cluster_has_the_devices_asked_for(device: str, gpus: int, node: int | None) -> None:
    cluster = cluster_from_links(device_named(device), gpus, node, None, None, None)
    assert cluster.devices == gpus
    assert all(level.size > 1 for level in cluster.levels[1:])


def test_an_nvlink_domain_spans_nodes() -> None:
    device = device_named("GB200")
    assert [level.size for level in cluster_from_links(device, 64, 4, None, None, None).levels] == [64]
    assert [level.size for level in cluster_from_links(device, 72, 4, None, None, None).levels] == [72]
    rack, network = cluster_from_links(device, 256, 4, "NVLink5 NVL72", None, 1600).levels
    assert (rack.size, network.size, network.lanes) == (64, 4, 64)
    assert network.bandwidth == pytest.approx(16 * 1600 * GBIT)


def test_calibrated_constants_replace_the_starting_ones() -> None:
    constants = LinkConstants(0.5, 1e-5, 1e6)
    calibration = Calibration({}, {"nvlink3": constants, "default": LinkConstants(0.6, 2e-5)}, {})
    node, network = cluster_from_links(device_named("A100"), 16, 8, None, "RoCE", None, calibration).levels
    assert (node.efficiency, node.latency, node.half_size) == (0.5, 1e-5, 1e6)
    assert (network.efficiency, network.latency) == (0.6, 2e-5)
    assert constants_of("nvlink3", None) == link_types()["nvlink3"].constants


def bus_bandwidth(device: str, gpus: int, collective: Collective, size: float, ranks: int) -> float:
    """What nccl-tests calls busbw: bytes a rank would send if links were the only bound, over the time."""
    cluster = cluster_from_links(device_named(device), gpus, 8, None, None, None)
    seconds = collective_seconds(cluster, collective, size, RankGroup(ranks))
    passes = 2 if collective is Collective.ALL_REDUCE else 1
    return passes * (ranks - 1) / ranks * size / seconds


@pytest.mark.parametrize(
    ("device", "gpus", "low", "high"),
    [
        # nccl-tests, all-reduce of 4 to 8 GiB: DGX-1V 130, DGX A100 230-240, DGX H100 rings 360-370, over nodes of
        # 8 adapters 185-195 (HDR) and 350-370 (NDR).
        ("V100", 8, 115e9, 135e9),
        ("A100", 8, 225e9, 240e9),
        ("H100", 8, 350e9, 370e9),
        ("A100", 32, 175e9, 195e9),
        ("H100", 32, 340e9, 370e9),
    ],
)
def test_large_all_reduces_reach_published_bus_bandwidth(device: str, gpus: int, low: float, high: float) -> None:
    assert low <= bus_bandwidth(device, gpus, Collective.ALL_REDUCE, 8 * 2**30, gpus) <= high


def test_small_messages_ramp_as_published() -> None:
    """DGX A100, nccl-tests all-reduce: about 25-45 GB/s at 1 MiB, 110-170 at 16 MiB, over 200 at 256 MiB."""
    speeds = [bus_bandwidth("A100", 8, Collective.ALL_REDUCE, mib * 2**20, 8) / 1e9 for mib in (1, 16, 256)]
    assert 20 <= speeds[0] <= 60
    assert 100 <= speeds[1] <= 185
    assert 200 <= speeds[2] <= 235


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100", "h200", "b200", "v100"])
def test_shipped_clusters_agree_with_their_link_types(name: str) -> None:
    """A cluster file and the reference design of its device have the same data-sheet bandwidths."""
    shipped = load_cluster(name, 8 * load_cluster(name).devices)
    built = cluster_from_links(
        shipped.device, shipped.devices, load_cluster(name).devices, None, None, None, load_calibration()
    )
    for file, link in zip(shipped.levels, built.levels, strict=True):
        assert file.bandwidth == pytest.approx(link.bandwidth, rel=0.01)
        assert (file.latency, file.efficiency, file.half_size) == (link.latency, link.efficiency, link.half_size)
        assert (file.lanes, file.mesh, file.start) == (link.lanes, link.mesh, link.start)


def test_a_level_of_a_file_may_name_its_link(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ndevice: A100\nlevels:\n"
        "  - {name: node, size: 8, link: nvlink3, efficiency: 0.5}\n"
        "  - {name: cluster, size: any, link: infiniband-hdr, lanes: 4}\n"
    )
    node, network = load_cluster(path, 16).levels
    assert (node.bandwidth, node.efficiency) == (300e9, 0.5)
    assert network.bandwidth == pytest.approx(4 * 200 * GBIT)
    path.write_text("name: mine\ndevice: A100\nlevels:\n  - {name: node, size: 8, link: string}\n")
    with pytest.raises(InputError, match="nvlink3"):
        load_cluster(path)


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


def test_collectives_inside_a_node_are_not_affected() -> None:
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
def test_messages_through_host_memory(collective: Collective, expected: float) -> None:
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
