"""Clusters by name and from files: sizes, devices, their precisions, and clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from galvatron_lite.cluster.catalog import (
    device_named,
    device_sheets,
    known_clusters,
    known_devices,
    load_cluster,
    match_device,
)
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.cluster.precisions import best_precision, check_precision, known_precisions
from galvatron_lite.errors import FileFormatError, InputError

SHIPPED = ("a100-40gb", "a100-80gb", "b200", "gb200", "h100", "h200", "h800", "rtx-titan", "rtx3090", "t4", "v100")


def user_file(folder: Path, **changes: object) -> Path:
    data: dict[str, object] = {"name": "mine", "device": "T4", "levels": [level()]}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (data | changes).items() if value is not None}))
    return path


def level(**changes: object) -> dict[str, object]:
    return {"name": "node", "size": 4, "bandwidth": 1e10, "latency": 1e-5} | changes


def test_the_shipped_clusters_are_the_promised_ones() -> None:
    assert set(known_clusters()) == {*SHIPPED, "a100-v100", "abci"}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("nodes", [1, 128])
def test_any_number_of_whole_nodes(name: str, nodes: int) -> None:
    node = load_cluster(name).devices
    cluster = load_cluster(name, nodes * node)
    assert cluster.devices == nodes * node == sum(group.count for group in cluster.groups)
    assert len(cluster.levels) == (1 if nodes == 1 else 2)
    assert all(level.source.startswith("http") for level in cluster.levels)
    assert cluster.device.source.startswith("http")


def test_gpus_that_fill_no_whole_node_name_the_nearest_counts() -> None:
    with pytest.raises(InputError, match=r"8 devices.*such as 8 or 16"):
        load_cluster("a100-80gb", 12)
    with pytest.raises(InputError, match="72 or 144"):
        load_cluster("gb200", 100)
    with pytest.raises(InputError, match="from 1 to"):
        load_cluster("h100", 0)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match=", ".join(known_clusters())):
        load_cluster("a1000")
    with pytest.raises(InputError, match="T4"):
        device_named("P9000")
    assert "A100-SXM4-80GB" in known_devices()


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H200", "H200-SXM5-141GB"),
        ("NVIDIA B200", "B200-SXM6-180GB"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA TITAN RTX", "RTX-Titan"),
    ],
)
def test_devices_are_found_by_what_the_driver_calls_them(reported: str, name: str) -> None:
    device = match_device(reported)
    assert device is not None
    assert device.name == name


def test_names_are_unambiguous_and_figures_sane() -> None:
    every = [name.lower() for device, names in device_sheets() for name in (device.name, *names)]
    assert len(every) == len(set(every))
    for device, _ in device_sheets():
        nominal = [int(part[:-2]) for part in device.name.split("-") if part.endswith("GB") and part[:-2].isdigit()]
        assert all(0.9 * size * 1e9 < device.memory <= size * 2**30 for size in nominal)
        assert device.peak["fp32"] <= device.peak["fp16"]
        assert device.context < 0.05 * device.memory


def test_published_peaks() -> None:
    assert device_named("A100-80GB").peak["bf16"] == 312e12
    assert device_named("H100").peak["fp8"] == pytest.approx(1979e12, rel=1e-3)
    assert device_named("V100").peak["fp16"] == 125e12
    assert "bf16" not in device_named("V100").peak


def test_a_users_file_with_unlike_devices(tmp_path: Path) -> None:
    own = {"name": "own", "memory": "46GiB", "memory_bandwidth": 8.6e11, "peak": {"fp32": 9e13}}
    groups = [{"device": "A100-SXM4-80GB", "count": 4}, {"device": own, "count": 4}]
    levels = [level(), level(name="cluster", size="any", lanes=2)]
    path = user_file(tmp_path, device=None, groups=groups, levels=levels)
    cluster = load_cluster(path)
    assert [level.size for level in cluster.levels] == [4, 2]
    assert cluster.device.name == "own"
    assert cluster.device.memory == 46 * 2**30
    assert [group.device.name for group in load_cluster(path, 4).groups] == ["A100-SXM4-80GB"]
    with pytest.raises(FileFormatError, match="list as many"):
        load_cluster(path, 16)


def test_a_file_of_fixed_size_is_cut_but_never_stretched(tmp_path: Path) -> None:
    path = user_file(tmp_path)
    assert load_cluster(path).devices == 4
    assert load_cluster(str(path), 2).devices == 2
    with pytest.raises(InputError, match="has 4 devices"):
        load_cluster(path, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"device": None}, "either device"),
        ({"groups": [{"device": "T4", "count": 4}]}, "either device"),
        ({"device": "T5"}, "'T5' is unknown. Known: V100"),
        ({"device": {"name": "own", "memory": "46"}}, "unit"),
        ({"device": {"name": "own", "memory": "46GiB"}}, "memory_bandwidth"),
        ({"device": {"name": "o", "memory": 1, "memory_bandwidth": 1.0, "peak": {}}}, "peak"),
        ({"device": None, "groups": [{"device": "T4"}]}, "count"),
        ({"device": None, "groups": ["T4"]}, "groups"),
        ({"levels": None}, "levels"),
        ({"levels": [3]}, "levels"),
        ({"levels": [level(size=0)]}, "size"),
        ({"levels": [level(size="any"), level()]}, "outermost"),
        ({"levels": [level(bandwidth=0)]}, "bandwidth"),
        ({"levels": [level(bandwidth=100)]}, r"100 bytes a second: write 100e\+9"),
        ({"device": {"name": "o", "memory": 46, "memory_bandwidth": 1e12, "peak": {"fp32": 1e13}}}, "write a unit"),
        ({"levels": [level(contention=0.5)]}, "contention"),
        ({"levels": [level(speed=1)]}, "speed"),
        *(({"levels": [level(size=size)]}, "up to a number") for size in ("up to 0", "up to", "upto 4", "up to x")),
    ],
)
def test_bad_files_name_the_offending_key(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(user_file(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "- a", "levels: [", "name: \x00"])
def test_broken_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError):
        load_cluster(path)
    with pytest.raises(FileFormatError, match="no such file"):
        load_cluster(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("gpus", "sizes"), [(None, [4]), (2, [2]), (64, [4, 16]), (68, [4, 17]), (72, [4, 9, 2]), (1024, [4, 16, 16])]
)
def test_levels_that_are_filled_evenly(gpus: int | None, sizes: list[int]) -> None:
    assert [level.size for level in load_cluster("abci", gpus).levels] == sizes


OF_CLUSTERS = {
    "a100-40gb": "bf16", "a100-80gb": "bf16", "b200": "bf16", "gb200": "bf16", "h100": "bf16", "h200": "bf16",
    "h800": "bf16", "rtx-titan": "fp16", "rtx3090": "bf16", "t4": "fp16", "v100": "fp16",
}  # fmt: skip
"""bf16 came with Ampere (NVIDIA A100 whitepaper, 2020); Volta and Turing have fp16 tensor cores."""


def joined(*devices: Device) -> Cluster:
    level = Level("node", len(devices), 1e9, 1e-6)
    return Cluster("own", tuple(DeviceGroup(device, 1) for device in devices), (level,))


@pytest.mark.parametrize(("cluster", "best"), OF_CLUSTERS.items())
def test_bf16_is_for_devices_from_ampere_on(cluster: str, best: str) -> None:
    assert best_precision(load_cluster(cluster)) == best


def test_unlike_devices_train_in_what_all_have() -> None:
    mixed = joined(device_named("H100"), device_named("V100"))
    assert set(known_precisions(mixed)) == {"fp32", "fp16"}
    assert best_precision(mixed) == "fp16"
    with pytest.raises(InputError, match="H100-SXM5-80GB and V100-SXM2-32GB: fp32, fp16"):
        check_precision("fp8", mixed)


def test_a_device_without_half_precision_trains_in_fp32() -> None:
    assert best_precision(joined(Device("own", 1, 1.0, {"fp32": 1.0}))) == "fp32"


def test_fp8_is_never_the_default_and_fp4_cannot_be_captured() -> None:
    with pytest.raises(InputError, match="fp8"):
        best_precision(joined(Device("own", 1, 1.0, {"fp8": 1.0})))
    assert "fp4" not in known_precisions(load_cluster("b200"))


@pytest.mark.parametrize(
    ("precision", "cluster"),
    [("bf16", "v100"), ("bf16", "t4"), ("fp8", "a100-80gb"), ("fp64", "h100"), ("int4", "h100")],
)
def test_precisions_without_a_peak_are_refused(precision: str, cluster: str) -> None:
    with pytest.raises(InputError, match=precision) as refused:
        check_precision(precision, load_cluster(cluster))
    assert "fp16" in refused.value.remedy
    check_precision("fp8", load_cluster("h100"))
    check_precision("tf32", load_cluster("a100-80gb"))
