from __future__ import annotations

import pytest

from galvatron_lite.analysis.setting import device_counts, even_counts, first_devices
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.errors import InputError


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "t4"])
def test_the_first_devices_are_the_cluster_of_so_many(name: str) -> None:
    whole = load_cluster(name, 32)
    offered = device_counts(whole)
    for devices in range(1, 33):
        try:
            made = load_cluster(name, devices)
        except InputError:
            assert devices not in offered
            with pytest.raises(InputError, match="whole ones"):
                first_devices(whole, devices)
        else:
            assert devices in offered
            assert first_devices(whole, devices) == made


def test_counts_fill_whole_members_of_every_level() -> None:
    whole = load_cluster("a100-80gb", 64)
    assert device_counts(whole) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
    assert even_counts(whole) == (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
    assert even_counts(load_cluster("a100-80gb", 56))[-3:] == (32, 48, 56)


def test_the_first_devices_of_unlike_ones() -> None:
    fast, slow = (Device(name, 2**30, 1e10, {"fp32": flops}) for name, flops in (("fast", 2e11), ("slow", 1e11)))
    levels = (Level("node", 2, 1e9, 0.0), Level("cluster", 4, 1e9, 0.0))
    whole = Cluster("mixed", (DeviceGroup(fast, 4), DeviceGroup(slow, 4)), levels)
    half = first_devices(whole, 6)
    assert [(group.device.name, group.count) for group in half.groups] == [("fast", 4), ("slow", 2)]
    assert [level.size for level in half.levels] == [2, 3]
    assert [group.device.name for group in first_devices(whole, 4).groups] == ["fast"]


@pytest.mark.parametrize("devices", [0, -1, 65])
def test_devices_that_there_are_not(devices: int) -> None:
    with pytest.raises(InputError, match="The cluster has 64"):
        first_devices(load_cluster("a100-80gb", 64), devices)
