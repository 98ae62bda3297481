"""Start-up times and bandwidths by devices."""

from dataclasses import replace

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError
from galvatron_lite.oracle.layers import wires_of, wires_of_cluster
from galvatron_lite.oracle.request import fabric_named

ABCI = fabric_named("abci")
assert ABCI is not None
MICRO = 1e-6


@pytest.mark.parametrize(
    ("setting", "figures"),
    [
        (None, {4: 9, 5: 30.31, 68: 30.31, 69: 30.49, 136: 30.49, 137: 30.98, 4096: 30.98}),
        ("plx-20us", {1: 9, 8: 40.31, 128: 40.49, 1024: 40.98}),
    ],
)
def test_two_settings_of_the_same_network(setting: str | None, figures: dict[int, float]) -> None:
    wires = wires_of(ABCI, setting)
    for devices, micros in figures.items():
        assert wires.link(devices).alpha == pytest.approx(micros * MICRO)
        assert 1 / wires.link(devices).beta == (50e9 if devices <= 4 else 12.5e9)


def test_messages_through_host_memory() -> None:
    wires = wires_of(ABCI)
    assert wires.staged_link(4).alpha == pytest.approx(3.00011e-3)
    assert wires.staged_link(4).beta == 1 / 16e9
    assert wires.staged_link(8).alpha == pytest.approx((4 * 15.11 + 0.09) * MICRO)
    assert wires.staged_link(8).beta == 1 / 12.5e9


def test_any_cluster_has_links() -> None:
    cluster = load_cluster("abci", 128)
    wires = wires_of_cluster(cluster)
    near, leaf, far = (wires.link(devices) for devices in (4, 64, 128))
    levels = cluster.levels
    assert [near.alpha, leaf.alpha, far.alpha] == [level.latency for level in levels]
    assert 1 / near.beta == pytest.approx(levels[0].bandwidth * levels[0].efficiency)
    assert near.beta < leaf.beta == far.beta  # one adapter; what leaves a leaf switch is no slower
    slow = replace(cluster, levels=(replace(levels[0], bandwidth=1e6), *levels[1:]))
    assert wires_of_cluster(slow).link(128).beta == wires_of_cluster(slow).link(4).beta


def test_bad_settings_and_counts() -> None:
    with pytest.raises(InputError, match="abci has plx-15us, plx-20us"):
        wires_of(ABCI, "plx-10us")
    with pytest.raises(InputError, match="leave it out"):
        wires_of_cluster(load_cluster("v100", 8), "plx-15us")
    with pytest.raises(InputError, match=r"--gpus: 5000 .*4096"):
        wires_of(ABCI).link(5000)
