"""Data sheets of accelerators. No torch here.

``memory`` is what the CUDA driver reports as total (``torch.cuda.get_device_properties``), a little below the nominal
size: ECC and firmware take their share. Peaks are dense (no sparsity), with fp32 accumulation; ``fp32`` is without
TF32, PyTorch's default for matmuls. A precision that a device lacks is absent. ``launch_overhead`` and ``context``
are [Empirical]: about 4 us between back-to-back kernels of eager PyTorch on a busy stream, and a CUDA context with
cuBLAS workspaces and NCCL buffers of 0.5 to 1.2 GiB that grows with the number of multiprocessors.
"""

from __future__ import annotations

from galvatron_lite.cluster.catalog_cards import CARDS
from galvatron_lite.cluster.sheets import Sheet, sheet

_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_T4 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
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
