"""Clusters of several types of device: files, links between them, budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.budget import Budget, budget_on
from galvatron_lite.cluster.catalog import device_named, load_cluster, slower, slower_levels
from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import write_value

A100, V100 = "A100-SXM4-80GB", "V100-SXM2-32GB"


def node(size: int = 4, bandwidth: float = 1e11, **more: object) -> dict[str, object]:
    return {"name": "node", "size": size, "bandwidth": bandwidth, "latency": 1e-5} | more


def network(bandwidth: float = 1e10, **more: object) -> dict[str, object]:
    return {"name": "cluster", "size": "any", "bandwidth": bandwidth, "latency": 2e-5} | more


def run(device: str = A100, count: int = 8, *levels: dict[str, object]) -> dict[str, object]:
    return {"device": device, "count": count, "levels": list(levels or (node(), network()))}


def file_of(folder: Path, *groups: dict[str, object], **more: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "groups": list(groups)} | more))
    return path


def test_the_shipped_one_has_a_node_of_each_type() -> None:
    cluster = load_cluster("a100-v100")
    assert [(group.device.name, group.count) for group in cluster.groups] == [(A100, 8), (V100, 8)]
    alike = [load_cluster(name, 16) for name in ("a100-80gb", "v100")]
    assert [cluster.only(kind).levels for kind in (0, 1)] == [other.levels for other in alike]
    assert [cluster.only(kind).devices for kind in (0, 1)] == [16, 16]
    fast, slow = (group.levels for group in cluster.groups)
    for level, a, b in zip(cluster.levels, fast, slow, strict=True):
        assert level.bandwidth * level.efficiency == b.bandwidth * b.efficiency < a.bandwidth * a.efficiency
        assert level.latency == max(a.latency, b.latency)


def test_a_part_of_one_type_is_a_cluster_of_that_type() -> None:
    part, alike = load_cluster("a100-v100", 8), load_cluster("a100-80gb", 8)
    assert (part.groups, part.levels) == (alike.groups, alike.levels)
    assert part.alike
    assert not load_cluster("a100-v100").alike
    with pytest.raises(InputError, match="has 16 devices"):
        load_cluster("a100-v100", 32)
    with pytest.raises(InputError, match="whole ones"):
        load_cluster("a100-v100", 12)


def test_a_written_one_reads_back_the_same(tmp_path: Path) -> None:
    cluster = load_cluster("a100-v100")
    write_value(tmp_path / "cluster.yaml", cluster)
    assert load_cluster(tmp_path / "cluster.yaml") == cluster
    assert load_cluster(tmp_path / "cluster.yaml", 8) == load_cluster("a100-v100", 8)


def test_links_that_are_given_for_all_count_above_the_types_own(tmp_path: Path) -> None:
    given = [node(bandwidth=5e10), network(5e9)]
    cluster = load_cluster(file_of(tmp_path, run(), run(V100, 4), levels=given))
    assert [level.bandwidth for level in cluster.levels] == [5e10, 5e9]
    assert [level.bandwidth for level in cluster.groups[0].levels] == [1e11, 1e10]
    plain = {"device": V100, "count": 4}
    cluster = load_cluster(file_of(tmp_path, run(), plain, levels=given))
    assert [level.bandwidth for level in cluster.groups[1].levels] == [5e10, 5e9]


@pytest.mark.parametrize(
    ("groups", "more", "message"),
    [
        ((run(A100, 6), run(V100, 10)), {}, "whole nodes"),
        ((run(), run(V100, 8, node(8), network())), {}, "same numbers of members"),
        ((run(), run(V100, 8, node(4))), {}, "has 4 devices"),
        ((run(), {"device": V100, "count": 8}), {}, "Give a list of levels"),
        ((run(), run(V100, 8, node(bandwidth=-1.0), network())), {}, "greater than or equal to 1"),
        ((run(), run(V100, 8, node(speed=1), network())), {}, "speed"),
        ((run(), run(V100, 8, node(link="string"), network())), {}, "Known"),
        ((run(), run("V1000", 8)), {}, "Known: V100"),
        ((run(), run(V100, 0)), {}, "count"),
        ((run(),), {"device": A100}, "either device"),
    ],
)
def test_wrong_values_are_named(
    tmp_path: Path, groups: tuple[dict[str, object], ...], more: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(file_of(tmp_path, *groups, **more))


def test_one_name_may_not_mean_two_devices(tmp_path: Path) -> None:
    own = {"name": A100, "memory": "46GiB", "memory_bandwidth": 8.6e11, "peak": {"fp32": 9e13}}
    with pytest.raises(FileFormatError, match="another name"):
        load_cluster(file_of(tmp_path, run(), run() | {"device": own}))


LEVELS = st.builds(
    Level, st.just("node"), st.just(8), st.floats(1e9, 1e12), st.floats(0, 1e-4), st.floats(1, 2), st.floats(0.5, 1),
    lanes=st.integers(1, 8), half_size=st.floats(0, 1e6),
)  # fmt: skip


@given(LEVELS, LEVELS)
def test_nothing_is_quicker_than_the_slower_of_two_levels(one: Level, other: Level) -> None:
    joined = slower([one, other])
    assert slower([one, joined]).bandwidth == joined.bandwidth
    for own in (one, other):
        assert joined.bandwidth * joined.efficiency <= own.bandwidth * own.efficiency
        assert joined.bandwidth * joined.efficiency / joined.lanes <= own.bandwidth * own.efficiency / own.lanes * 1.001
        assert joined.latency >= own.latency
        assert joined.half_size >= own.half_size
    assert slower([one, one]) == one
    assert slower_levels([[one], [other]]) == (joined,)


def mixed(*counts: int) -> Cluster:
    devices = [device_named(A100), device_named(V100)]
    groups = tuple(DeviceGroup(devices[place % 2], count) for place, count in enumerate(counts))
    return Cluster("test", groups, (Level("node", sum(counts), 1e9, 1e-6),))


def test_types_of_runs_of_ranks() -> None:
    cluster = mixed(4, 4, 2)
    assert [kind.device.name for kind in cluster.types] == [A100, V100]
    assert [cluster.type_of(range(at, at + 2)) for at in range(0, 10, 2)] == [0, 0, 1, 1, 0]
    assert cluster.type_of(range(3, 5)) is None
    assert cluster.of_one_type(2, 10)
    assert cluster.of_one_type(4, 8)
    assert not cluster.of_one_type(5, 10)
    alike = replace(cluster, groups=(cluster.groups[0],) * 2)
    assert alike.alike
    assert alike.type_of(range(2)) is None
    assert alike.of_one_type(5, 10)


def test_peaks_add_up_over_the_devices_used() -> None:
    cluster = mixed(4, 4)
    assert cluster.peak("fp16", 8) == 4 * 312e12 + 4 * 125e12
    assert cluster.peak("fp16", 5) == 4 * 312e12 + 125e12


def test_budgets_are_of_each_device() -> None:
    cluster = mixed(4, 4)
    memory = {group.device.name: group.device.memory for group in cluster.groups}
    shares = budget_on(cluster, "90%")
    assert {name: shares.of(name) for name in memory} == {name: round(0.9 * size) for name, size in memory.items()}
    assert shares.of("") == shares.least == round(0.9 * memory[V100])
    assert budget_on(cluster, "20GB") == budget_on(cluster, 20 * 10**9) == Budget(20 * 10**9)
    assert budget_on(load_cluster("v100", 8), "90%") == Budget(round(0.9 * memory[V100]))
    with pytest.raises(InputError, match=V100):
        budget_on(cluster, "40GB")
    with pytest.raises(InputError, match=V100):
        budget_on(cluster, 40 * 10**9)
