"""Data sheets of PCIe cards: inference, workstation and consumer devices. No torch here.

As in ``catalog_devices``: memory as the driver reports it, dense peaks with fp32 accumulation.
"""

from __future__ import annotations

from galvatron_lite.cluster.sheets import Sheet, sheet

_P40 = "https://images.nvidia.com/content/pdf/tesla/184427-Tesla-P40-Datasheet-NV-Final-Letter-Web.pdf"
_PASCAL = (
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
    sheet("GTX-1080Ti", 10.91, 484e9, {"fp32": 11.3, "fp16": 11.3}, 28, _PASCAL, "GTX 1080 Ti", context_mib=400),
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
