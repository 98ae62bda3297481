from __future__ import annotations

import pytest

from galvatron_lite.cluster.catalog import device_named, load_cluster
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.cluster.precisions import best_precision, check_precision, known_precisions
from galvatron_lite.errors import InputError

OF_CLUSTERS = {
    "a100-40gb": "bf16", "a100-80gb": "bf16", "b200": "bf16", "gb200": "bf16", "h100": "bf16", "h200": "bf16",
    "rtx-titan": "fp16", "rtx3090": "bf16", "t4": "fp16", "v100": "fp16",
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
def test_precisions_without_units_are_refused(precision: str, cluster: str) -> None:
    with pytest.raises(InputError, match=precision) as refused:
        check_precision(precision, load_cluster(cluster))
    assert "fp16" in refused.value.remedy


def test_precisions_with_units_pass() -> None:
    check_precision("fp8", load_cluster("h100"))
    check_precision("tf32", load_cluster("a100-80gb"))
