"""Data sheets of accelerators. No torch here.

``memory`` is what the CUDA driver reports as total (``torch.cuda.get_device_properties``), a little below the nominal
size: ECC and firmware take their share. Peaks are dense (no sparsity), with fp32 accumulation; ``fp32`` is without
TF32, PyTorch's default for matmuls. A precision that a device lacks is absent. ``launch_overhead`` and ``context``
are [Empirical]: about 4 us between back-to-back kernels of eager PyTorch on a busy stream, and a CUDA context with
cuBLAS workspaces and NCCL buffers of 0.5 to 1.2 GiB that grows with the number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Device


@dataclass(frozen=True, slots=True)
class HostLink:
    """A device's way to host memory.

    A device's link: PCIe x16 one way (15.75, 31.5 and 63 GB/s of PCIe 3, 4 and 5 after 128b/130b coding; PCI-SIG,
    https://pcisig.com/specifications), of which pinned copies reach about four fifths (25 of 31.5 GB/s on A100:
    https://docs.nvidia.com/dgx/dgxa100-user-guide/), or NVLink-C2C (450 GB/s one way, half of it for each device of a
    GB200: https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip), of which copies reach about two thirds
    to four fifths (Fusco et al. 2024, arXiv:2408.11556).

    Host memory: both sockets' channels, an eighth of it for each device of a node with 8: DGX-1 (2 x 4 DDR4-2400), DGX
    A100 (2 x 8 DDR4-3200), DGX H100 (2 x 8 DDR5-4800); Grace's LPDDR5X for devices that are joined to one.
    """

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


_P40 = "https://images.nvidia.com/content/pdf/tesla/184427-Tesla-P40-Datasheet-NV-Final-Letter-Web.pdf"
_PASCAL_CARDS = (
    "https://international.download.nvidia.com/geforce-com/international/pdfs/GeForce_GTX_1080_Whitepaper_FINAL.pdf"
)
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_A30 = "https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf"
_A40 = "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_A6000 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "proviz-print-nvidia-rtx-a6000-datasheet-us-nvidia-1454980-r9-web%20(1).pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_ADA_6000 = "https://www.nvidia.com/en-us/design-visualization/rtx-6000/"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40 = "https://images.nvidia.com/content/Solutions/data-center/vgpu-L40-datasheet.pdf"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"

CARDS: tuple[Sheet, ...] = (
    # Pascal cards multiply half-precision items in fp32 (cublasGemmEx with fp32 compute).
    sheet("GTX-1080Ti", 10.91, 484e9, {"fp32": 11.3, "fp16": 11.3}, 28, _PASCAL_CARDS, "GTX 1080 Ti", context_mib=400),
    sheet("P40", 22.38, 346e9, {"fp32": 11.8, "fp16": 11.8}, 30, _P40, "P40-24GB", context_mib=400),
    sheet("RTX-2080Ti", 10.76, 616e9, {"fp32": 13.4, "fp16": 53.8}, 68, _TURING, "RTX 2080 Ti", context_mib=400),
    sheet("Quadro-RTX-8000", 47.46, 672e9, {"fp32": 16.3, "fp16": 130.5}, 72, _TURING, "RTX 8000", context_mib=500),
    sheet("A10", 22.06, 600e9, {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0}, 72, _A10, context_mib=500),
    sheet("A30", 23.5, 933e9, {"fp32": 10.3, "tf32": 82.0, "fp16": 165.0, "bf16": 165.0}, 56, _A30, context_mib=500),
    sheet("A40", 44.4, 696e9, {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7}, 84, _A40, context_mib=500),
    sheet(
        "RTX-A6000", 47.5, 768e9, {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8}, 84, _A6000, "A6000",
        context_mib=500,
    ),
    sheet(
        "RTX-6000-Ada", 47.5, 960e9, {"fp32": 91.1, "tf32": 182.1, "fp16": 364.2, "bf16": 364.2, "fp8": 728.5}, 142,
        _ADA_6000, "RTX 6000 Ada Generation", context_mib=500,
    ),
    sheet(
        "RTX-4090", 23.64, 1008e9, {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}, 128, _ADA,
        context_mib=500,
    ),
    sheet(
        "L4", 22.05, 300e9, {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5}, 58, _L4,
        context_mib=500,
    ),
    sheet(
        "L40", 44.5, 864e9, {"fp32": 90.5, "tf32": 90.5, "fp16": 181.0, "bf16": 181.0, "fp8": 362.0}, 142, _L40,
        context_mib=500,
    ),
    sheet(
        "L40S", 44.5, 864e9, {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0}, 142, _L40S,
        context_mib=500,
    ),
)  # fmt: skip
"""Every card the catalogue knows."""


_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_T4 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_B200 = "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"
_B300 = "https://resources.nvidia.com/en-us-dgx-systems/dgx-b300-datasheet"
_H20 = "https://www.techpowerup.com/gpu-specs/h20.c4284"
_GH200 = "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"
_GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_GB300 = "https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
_H100_NVL = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/h100/PB-11773-001_v01.pdf"
_H100_96 = "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md"
_PASCAL = "https://images.nvidia.com/content/pdf/tesla/whitepaper/pascal-architecture-whitepaper.pdf"

_A100_PEAK = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_HOPPER_PEAK = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_V100_PEAK = {"fp32": 15.7, "fp16": 125.0}

SHEETS: tuple[Sheet, ...] = (
    sheet("V100-SXM2-16GB", 15.77, 900e9, _V100_PEAK, 80, _VOLTA, "V100-16GB", context_mib=600),
    sheet(
        "V100-SXM2-32GB", 31.74, 900e9, _V100_PEAK, 80, _VOLTA, "V100-32GB", "V100-SXM3-32GB", "V100", context_mib=600
    ),
    sheet("V100-PCIE-16GB", 15.77, 900e9, {"fp32": 14.0, "fp16": 112.0}, 80, _VOLTA, context_mib=600),
    sheet("T4", 14.56, 320e9, {"fp32": 8.1, "fp16": 65.0}, 40, _T4, context_mib=400),
    sheet(
        "RTX-3090", 23.69, 936e9, {"fp32": 35.6, "tf32": 35.6, "fp16": 71.2, "bf16": 71.2}, 82, _GA102, context_mib=500
    ),
    sheet("RTX-Titan", 23.65, 672e9, {"fp32": 16.3, "fp16": 130.5}, 72, _TURING, "TITAN RTX", context_mib=500),
    sheet("A100-SXM4-40GB", 39.38, 1555e9, _A100_PEAK, 108, _A100, "A100-40GB"),
    sheet("A100-SXM4-80GB", 79.14, 2039e9, _A100_PEAK, 108, _A100, "A100-80GB", "A100"),
    sheet("A100-PCIE-40GB", 39.38, 1555e9, _A100_PEAK, 108, _A100),
    sheet("A100-PCIE-80GB", 79.14, 1935e9, _A100_PEAK, 108, _A100, "A100 80GB PCIe"),
    sheet(
        "H100-SXM5-80GB", 79.1, 3350e9, _HOPPER_PEAK, 132, _H100, "H100 80GB HBM3", "H100-SXM", "H100", context_mib=1000
    ),
    sheet(
        "H100-PCIE-80GB",
        79.1,
        2000e9,
        {"fp32": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0},
        114,
        _H100,
        "H100 PCIe",
        context_mib=1000,
    ),
    sheet(
        "H20-96GB",
        95.6,
        4000e9,
        {"fp32": 44.0, "tf32": 74.0, "fp16": 148.0, "bf16": 148.0, "fp8": 296.0},
        78,
        _H20,
        "H20",
    ),
    sheet("GH200-96GB", 94.5, 4000e9, _HOPPER_PEAK, 132, _GH200, "GH200", context_mib=1000),
    sheet(
        "H200-SXM5-141GB", 139.8, 4800e9, _HOPPER_PEAK, 132, _H200, "H200", "H200-SXM", "H200-SXM5", context_mib=1000
    ),
    sheet(
        "B200-SXM6-180GB",
        178.3,
        8000e9,
        {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0},
        148,
        _B200,
        "B200",
        "B200-SXM",
        context_mib=1200,
    ),
    sheet(
        "GB200-186GB",
        184.0,
        8000e9,
        {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0},
        152,
        _GB200,
        "GB200",
        context_mib=1200,
    ),
    sheet(
        "GB300-288GB",
        277.0,
        8000e9,
        {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 15000.0},
        152,
        _GB300,
        "GB300",
        context_mib=1200,
    ),
    sheet(
        "B300-SXM-270GB",
        268.0,
        8000e9,
        {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 13500.0},
        148,
        _B300,
        "B300",
        context_mib=1200,
    ),
    # The A800 and H800 are the A100 and H100 with slower NVLink.
    sheet("A800-SXM4-80GB", 79.14, 2039e9, _A100_PEAK, 108, _A100, "A800"),
    sheet("H800-SXM5-80GB", 79.1, 3350e9, _HOPPER_PEAK, 132, _H100, "H800", context_mib=1000),
    # HBM2e and 500 W instead of HBM3 and 700 W (Torchtitan, arXiv:2410.06511, section 3.1).
    sheet("H100-SXM-96GB", 95.0, 2400e9, _HOPPER_PEAK, 132, _H100_96, context_mib=1000),
    sheet(
        "H100-NVL-94GB",
        93.1,
        3900e9,
        {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1671.0},
        132,
        _H100_NVL,
        "H100 NVL",
        "H100-NVL",
        context_mib=1000,
    ),
    sheet("P100-SXM2-16GB", 15.9, 732e9, {"fp32": 10.6, "fp16": 21.2}, 56, _PASCAL, "P100", context_mib=400),
    *CARDS,
)
"""Every device the catalogue knows."""
