"""The form of a device's data sheet. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.cluster.host_links import host_link

_GIB = 2**30
_MIB = 2**20
_LAUNCH = 4e-6


@dataclass(frozen=True, slots=True)
class Sheet:
    """One data sheet."""

    device: Device  # the figures
    aliases: tuple[str, ...] = ()  # other names of the device, among them what the CUDA driver calls it


def sheet(
    name: str,
    memory_gib: float,
    bandwidth: float,
    peak_tflops: dict[str, float],
    units: int,
    source: str,
    *aliases: str,
    context_mib: int = 800,
) -> Sheet:
    """A sheet from the units data sheets use: GiB, bytes per second, TFLOP/s, MiB."""
    peak = {precision: tera * 1e12 for precision, tera in peak_tflops.items()}
    memory = round(memory_gib * _GIB)
    host = host_link(name)
    device = Device(
        name, memory, bandwidth, peak, units, _LAUNCH, context_mib * _MIB, source, host.bandwidth, host.memory
    )
    return Sheet(device, aliases)
