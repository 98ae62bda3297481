"""This machine as a ``Cluster``: CUDA devices by name, or CPU processes of measured speed. Imports torch when run."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_lite.cluster.catalog import known_clusters, load_cluster, match_device
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.errors import InputError, LaunchError

if TYPE_CHECKING:
    import torch

_MATMUL_EXTENT = 512
_COPY_BYTES = 32 * 2**20
_ROUNDS = 5

HIDDEN_LOCAL = "GALVATRON_LOCAL_WORLD_SIZE"
"""Stands in for ``LOCAL_WORLD_SIZE`` while it is hidden from other libraries and each process sees a single GPU
(``frameworks.one_process``)."""

CPU_LINK = Level("machine", 1, 5e9, 3e-5, contention=1.0, efficiency=0.5, source="rough figure for gloo in one machine")
"""[Empirical] gloo between processes of one machine; ``galvatron profile`` measures the real figures."""

NETWORK_LINK = Level("cluster", 1, 12.5e9, 3e-5, efficiency=0.8, source="rough figure: one 100 Gb/s adapter a node")
"""[Empirical] an unknown network."""

_LABELS = {
    "device": "device",
    "count": "number of devices",
    "cpu": "CPU model",
    "torch": "torch version",
    "backend": "communication backend",
    "host": "machine",
}


def probe(world_size: int | None = None, device: str = "auto") -> Cluster:
    """Return this machine, or all machines of a launch, as a cluster.

    Levels come from ``LOCAL_WORLD_SIZE`` and ``WORLD_SIZE`` as torchrun sets them; their figures are rough until
    ``galvatron profile`` has measured communication.

    Args:
        world_size: number of processes; default: ``WORLD_SIZE``, else all GPUs of this machine, else 1.
        device: ``cuda``, ``cpu``, or ``auto``: GPUs if there are any.

    Raises:
        LaunchError: ``cuda`` without a GPU, or more processes than GPUs on a machine.
        InputError: an unknown device, or a world that does not fill its machines.
    """
    import torch

    if device not in {"auto", "cuda", "cpu"}:
        raise InputError("device", device, "Give auto, cuda or cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            "No GPU is visible to this process. Check nvidia-smi and CUDA_VISIBLE_DEVICES, install a CUDA build of"
            f" torch (this is {torch.__version__}), or run on CPU processes with device='cpu'."
        )
    on_gpu = device != "cpu" and torch.cuda.is_available()
    world, local = _sizes(world_size, torch.cuda.device_count() if on_gpu else 1)
    probed = _gpu(torch.cuda.device_count(), local) if on_gpu else _cpu(local)
    node, network = _gpu_links(probed, local) if on_gpu else (CPU_LINK, NETWORK_LINK)
    levels = (replace(node, size=local), replace(network, size=world // local))
    return Cluster(
        name="this machine" if world == local else "these machines",
        groups=(DeviceGroup(probed, world),),
        levels=levels[:1] if world == local else levels,
        fingerprint=_fingerprint(probed, world, "nccl" if on_gpu else "gloo"),
    )


def differs(fingerprint_a: Mapping[str, str], fingerprint_b: Mapping[str, str]) -> list[str]:
    """Return a line for each difference between the machines of two fingerprints.

    Keys that only one of them has are left out, so that an empty fingerprint (data sheets) differs from none.
    """
    return [
        f"{_LABELS.get(key, key)}: {fingerprint_a[key]} against {fingerprint_b[key]}"
        for key in fingerprint_a
        if key in fingerprint_b and fingerprint_a[key] != fingerprint_b[key]
    ]


def _sizes(world_size: int | None, devices: int) -> tuple[int, int]:
    """Return the number of processes of the world and of this machine."""
    world = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", devices))
    if world < 1:
        raise InputError("world_size", world, "Give 1 or more.")
    hidden = None if "WORLD_SIZE" in os.environ else os.environ.get(HIDDEN_LOCAL)
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", hidden or world)))
    if world % local:
        raise InputError("WORLD_SIZE", world, f"Give a multiple of LOCAL_WORLD_SIZE ({local}).")
    return world, local


def _gpu(count: int, local: int) -> Device:
    """Return the first GPU: peaks from its data sheet (measured if there is none), memory as the driver reports it."""
    import torch

    if local > count and HIDDEN_LOCAL not in os.environ:
        raise LaunchError(f"{local} processes on this machine, but it shows {count} GPUs. Start one a GPU.")
    properties = torch.cuda.get_device_properties(0)
    sheet = match_device(properties.name)
    if sheet is not None:
        return replace(sheet, memory=properties.total_memory, units=properties.multi_processor_count)
    peaks, bandwidth = _measured(torch.device("cuda", 0), ("fp32", "bf16", "fp16"), 4096, 2**30)
    return Device(
        properties.name,
        properties.total_memory,
        bandwidth,
        peaks,
        properties.multi_processor_count,
        launch_overhead=4e-6,
        context=800 * 2**20,
        source="measured",
    )


def _cpu(local: int) -> Device:
    """Return one of ``local`` CPU processes: its share of memory, and the speed measured now."""
    import torch

    peaks, bandwidth = _measured(torch.device("cpu"), ("fp32",), _MATMUL_EXTENT, _COPY_BYTES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    return Device(f"CPU {_cpu_model()}", memory, bandwidth, peaks, launch_overhead=2e-6, source="measured")


def _measured(
    device: torch.device, precisions: tuple[str, ...], extent: int, size: int
) -> tuple[dict[str, float], float]:
    """Return the FLOP/s of a short matmul by precision, and the bytes per second of a short copy."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    peaks = {}
    for precision in precisions:
        matrix = torch.rand(extent, extent, dtype=torch.float32, device=device).to(dtypes[precision])
        peaks[precision] = 2 * extent**3 / _shortest(partial(torch.mm, matrix, matrix), device)
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return peaks, 2 * size / _shortest(partial(target.copy_, source), device)


def _shortest(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs after a warm-up."""
    import torch

    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _gpu_links(device: Device, local: int) -> tuple[Level, Level]:
    """Return the links inside and between nodes of a shipped cluster of the same device, else rough figures."""
    for name in known_clusters():
        shipped = load_cluster(name)
        if shipped.device.name == device.name and shipped.devices >= local:
            inner, outer = load_cluster(name, 2 * shipped.devices).levels
            return inner, outer
    pcie = Level("node", 1, 31.5e9, 1e-5, contention=1.5, efficiency=0.5, source="rough figure: PCIe 4.0 x16")
    return pcie, NETWORK_LINK


def _cpu_model() -> str:
    """Return the CPU's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _fingerprint(device: Device, world: int, backend: str) -> dict[str, str]:
    """Return what identifies the machine, with the host's name as a hash only."""
    import torch

    return {
        "device": device.name,
        "count": str(world),
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "backend": backend,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
    }
