"""How devices reach host memory, from data sheets. No torch here.

A device's link: PCIe x16 one way (15.75, 31.5 and 63 GB/s of PCIe 3, 4 and 5 after 128b/130b coding; PCI-SIG,
https://pcisig.com/specifications), of which pinned copies reach about four fifths (25 of 31.5 GB/s on A100:
https://docs.nvidia.com/dgx/dgxa100-user-guide/), or NVLink-C2C (450 GB/s one way, half of it for each device of a
GB200: https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip), of which copies reach about two thirds to
four fifths (Fusco et al. 2024, arXiv:2408.11556).

Host memory: both sockets' channels, an eighth of it for each device of a node with 8: DGX-1 (2 x 4 DDR4-2400), DGX A100
(2 x 8 DDR4-3200), DGX H100 (2 x 8 DDR5-4800); Grace's LPDDR5X for devices that are joined to one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostLink:
    """A device's way to host memory."""

    bandwidth: float  # bytes per second one way that copies reach
    memory: float  # bytes per second of host memory, a device's part


_PCIE3 = HostLink(12.5e9, 19.2e9)
_PCIE4 = HostLink(25e9, 51.2e9)
_PCIE5 = HostLink(50e9, 76.8e9)
_GRACE_HOPPER = HostLink(330e9, 500e9)
_GRACE_BLACKWELL = HostLink(165e9, 256e9)

_FAMILIES: tuple[tuple[str, HostLink], ...] = (
    ("GH200", _GRACE_HOPPER),
    ("GB200", _GRACE_BLACKWELL),
    ("GB300", _GRACE_BLACKWELL),
    *((family, _PCIE5) for family in ("H100", "H200", "H800", "H20", "B200", "B300")),
    *((family, _PCIE3) for family in ("V100", "P100", "P40", "T4", "RTX-Titan", "GTX", "RTX-2080", "Quadro")),
)
"""By the beginning of a device's name, first match."""


def host_link(name: str) -> HostLink:
    """The link of a device of the catalogue; PCIe 4 x16 where its name says nothing else (Ampere and Ada)."""
    return next((link for family, link in _FAMILIES if name.startswith(family)), _PCIE4)
