"""This machine as a cluster, GPUs by a stand-in for torch.cuda, and what fingerprints tell."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from galvatron_lite.cluster.probe import HIDDEN_LOCAL, differs, probe
from galvatron_lite.errors import InputError, LaunchError


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def gpus(patch: pytest.MonkeyPatch, name: str, count: int, memory: int = 80 * 10**9) -> None:
    properties = SimpleNamespace(name=name, total_memory=memory, multi_processor_count=100)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_cpu_processes_share_the_memory_and_have_measured_speeds(plain: pytest.MonkeyPatch) -> None:
    one, two = probe(1, "cpu"), probe(2, "cpu")
    assert two.devices == 2
    assert one.device.memory // 2 == two.device.memory
    assert two.device.name.startswith("CPU ")
    for rate in (two.device.peak["fp32"], two.device.memory_bandwidth):
        assert 1e8 < rate < 1e14
    assert two.device.source == "measured"


def test_levels_follow_the_launcher(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("WORLD_SIZE", "8")
    plain.setenv("LOCAL_WORLD_SIZE", "4")
    assert [level.size for level in probe(device="cpu").levels] == [4, 2]
    plain.setenv("LOCAL_WORLD_SIZE", "8")
    assert [level.size for level in probe(device="cpu").levels] == [8]
    plain.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE"):
        probe(device="cpu")


def test_a_known_gpu_has_its_data_sheet_and_links(plain: pytest.MonkeyPatch) -> None:
    gpus(plain, "NVIDIA H100 80GB HBM3", 8)
    cluster = probe()
    assert cluster.devices == 8
    assert cluster.device.peak["bf16"] == pytest.approx(989.4e12)
    assert (cluster.device.memory, cluster.device.units) == (80 * 10**9, 100)
    assert cluster.levels[0].bandwidth == 450e9
    assert cluster.fingerprint["backend"] == "nccl"
    plain.setenv("WORLD_SIZE", "16")
    plain.setenv("LOCAL_WORLD_SIZE", "8")
    assert [(level.size, level.bandwidth) for level in probe().levels] == [(8, 450e9), (2, 400e9)]


def test_missing_gpus(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"CUDA_VISIBLE_DEVICES.*device='cpu'"):
        probe(device="cuda")
    assert probe().device.name.startswith("CPU")
    gpus(plain, "Tesla T4", 1)
    with pytest.raises(LaunchError, match="shows 1 GPUs"):
        probe(2)


@pytest.mark.parametrize(("world", "device"), [(0, "cpu"), (1, "tpu")])
def test_bad_arguments(plain: pytest.MonkeyPatch, world: int, device: str) -> None:
    with pytest.raises(InputError):
        probe(world, device)


def test_fingerprints_tell_machines_apart_without_naming_them(plain: pytest.MonkeyPatch) -> None:
    here = probe(1, "cpu").fingerprint
    assert here == probe(1, "cpu").fingerprint
    assert platform.node() not in here.values()
    assert differs(here, here) == []
    assert differs({}, here) == []
    told = differs(here, here | {"device": "T4", "backend": "nccl"})
    assert len(told) == 2
    assert told[0] == f"device: {here['device']} against T4"
    assert told[1].startswith("communication backend")


def test_processes_that_each_see_one_gpu_of_their_own(plain: pytest.MonkeyPatch) -> None:
    """As ``as_one_process`` leaves them: the world is hidden from other libraries, and what it was is kept for us."""
    gpus(plain, "NVIDIA A100-SXM4-80GB", 1)
    plain.setenv(HIDDEN_LOCAL, "4")
    found = probe(8)
    assert (found.devices, found.levels[0].size, found.name) == (8, 4, "these machines")
