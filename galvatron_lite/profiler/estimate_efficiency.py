"""Every constant the estimates rest on besides the data sheets, in one place. No torch here.

[Empirical] marks round figures from public benchmarks of large kernels rather than a formula; they are meant to be
right within some ten per cent, and ``galvatron profile`` on the machine itself replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.profiler.schema import HostOverhead, Overlap


@dataclass(frozen=True, slots=True)
class Tile:
    """One output tile of a matmul kernel: rows x columns, and its rate beside the best tile's."""

    rows: int
    columns: int
    rate: float


GPU_TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.92), Tile(64, 128, 0.8), Tile(64, 64, 0.65))
"""Tiles cuBLAS chooses from; sizes and the order of their rates after NVIDIA, "Matrix Multiplication Background User's
Guide" (docs.nvidia.com/deeplearning/performance), section 3; rates [Empirical]."""

CPU_TILES = (Tile(16, 16, 1.0),)
"""A CPU kernel's register block."""

SPLITS = (1, 2, 4, 8)
"""Ways cuBLAS splits the inner extent where an output has fewer tiles than the device has multiprocessors."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What share of its data sheet a family of devices reaches on large kernels.

    Attributes:
        matmul: of peak FLOP/s, before tile and wave quantisation and the ramp over the inner extent.
        attention: of peak FLOP/s in the fused attention kernel's forward, at head size 128 and long sequences.
        attention_backward: the same in its backward, whose FLOPs are 2.5 times the forward's (Dao 2023).
        memory: of memory bandwidth in element-wise and normalisation kernels.
        tiles: of its matmul kernels.
    """

    matmul: float
    attention: float
    attention_backward: float
    memory: float = 0.8
    tiles: tuple[Tile, ...] = GPU_TILES


FAMILIES: dict[str, Efficiency] = {
    # cuBLAS 8192^3 about 100 of 125 TFLOP/s; no FlashAttention-2 before Ampere, the memory-efficient kernel runs.
    "V100": Efficiency(0.8, 0.35, 0.25),
    "T4": Efficiency(0.42, 0.2, 0.15, 0.75),  # 70 W: clocks fall under load
    "RTX-Titan": Efficiency(0.65, 0.3, 0.22),
    "RTX-3090": Efficiency(0.85, 0.65, 0.5),
    # cuBLAS 8192^3 about 265-275 of 312 TFLOP/s when cool, 250-260 in long runs at 400 W; the latter fits the training
    # runs of arXiv 2205.05198. FlashAttention-2 220 forward and 180 backward (arXiv 2307.08691).
    "A100": Efficiency(0.83, 0.7, 0.58),
    # About 700-750 of 989 TFLOP/s within 700 W; FlashAttention-2 370 forward, 290 backward (arXiv 2407.08608, 4.1).
    "H100": Efficiency(0.74, 0.37, 0.29, 0.85),
    "H200": Efficiency(0.75, 0.37, 0.29, 0.85),
    "B200": Efficiency(0.74, 0.3, 0.22, 0.85),
    "GB200": Efficiency(0.74, 0.3, 0.22, 0.85),
    # Probed CPU processes: peak and bandwidth are measured, nothing is lost beside them.
    "CPU": Efficiency(1.0, 0.6, 0.5, 1.0, CPU_TILES),
}
"""[Empirical] by the first part of a device's name."""

UNKNOWN = Efficiency(0.75, 0.4, 0.3)
"""[Empirical] for devices of no known family."""

MEASURED = Efficiency(1.0, 0.5, 0.4, 1.0)
"""[Empirical] for such devices where peak and bandwidth were measured, so that nothing is lost beside them."""

RAMP_INNER = 160
"""[Empirical] inner items a tile costs beyond its own: filling the pipeline and writing the result. Writing a 128 x 256
tile in bf16 takes an A100 multiprocessor's share of memory bandwidth 3.4 us, as long as 150 inner items."""

ATTENTION_BLOCK = 128
"""Query rows of one thread block of FlashAttention-2 (arXiv 2307.08691, section 3.3)."""

ATTENTION_RAMP = 250
"""[Empirical] keys at which fused attention reaches half its rate (arXiv 2307.08691, fig. 4: 512 to 16k keys)."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""Backward FLOPs of fused attention over forward's: five matmuls instead of two (arXiv 2307.08691, section 4.1)."""

SMALL_HEAD = 0.86
"""[Empirical] rate of fused attention at head size 64 beside 128 (arXiv 2307.08691, fig. 4)."""

CONVOLUTION = 0.75
"""[Empirical] rate of an implicit-GEMM convolution beside a matmul of its shape (cuDNN, channels first)."""

DEPTHWISE_CHANNELS = 8
"""Fewer input channels a group than this leave tensor cores idle: the kernel runs on the fp32 units."""

DEPTHWISE = 0.2
"""[Empirical] share of fp32 peak that depthwise convolutions reach."""

KERNEL_TAIL = 1.5e-6
"""[Empirical] seconds between a kernel's start and its memory streaming at full rate."""

NVIDIA_OVERLAP = Overlap(1.1256, 1.1256)
"""[Empirical] how compute and NCCL slow one another down while both run: measured on A100 by Hetu-Galvatron
(its shipped ``overlap_coefficient.json``: 1.1256), applied to both sides as it does."""

HOST = HostOverhead(zero=0.0, data=0.0, step=1e-3, pipeline=5e-5)
"""[Empirical] GPUs run behind the host, so hooks hide; what is left is once a step or once a transfer."""


@dataclass(frozen=True, slots=True)
class OptimizerTraffic:
    """Memory traffic of one optimizer step for one parameter item held in fp32.

    Attributes:
        state: bytes of state kept.
        moved: bytes read and written.
        working: temporary bytes.
    """

    state: int
    moved: int
    working: int


OPTIMIZERS: dict[str, OptimizerTraffic] = {
    # torch.optim.AdamW as it runs on CUDA by default (foreach): decay 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8,
    # add 8, addcdiv 16 bytes; the square root is a temporary.
    "adamw": OptimizerTraffic(8, 80, 4),
    "adam": OptimizerTraffic(8, 72, 4),
    # One pass: reads parameter, gradient and two moments, writes three of them.
    "adamw-fused": OptimizerTraffic(8, 28, 0),
    # With momentum: mul 8, add 12 on the buffer, add 12 on the parameter.
    "sgd": OptimizerTraffic(4, 32, 0),
}
"""What is known of optimizers by name."""


def efficiency_of(device: Device) -> Efficiency:
    """The efficiencies of a device's family, by the longest family name its own begins with."""
    names = [name for name in FAMILIES if device.name.upper().startswith(name.upper())]
    if names:
        return FAMILIES[max(names, key=len)]
    return MEASURED if device.source == "measured" else UNKNOWN
