"""Every constant the estimates rest on besides the data sheets, in one place. No torch here.

[Empirical] marks round figures from public benchmarks of large kernels rather than a formula; they are meant to be
right within some ten per cent, and ``galvatron profile`` on the machine itself replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.calibration.schema import Calibration, DeviceConstants
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.profiler.schema import HostOverhead, Overlap

GPU_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.8), (128, 64, 0.8), (64, 64, 0.65))
"""Rows, columns and rate beside the best one's of the tiles cuBLAS chooses from; sizes and the order of their rates
after NVIDIA, "Matrix Multiplication Background User's Guide" (docs.nvidia.com/deeplearning/performance), section 3;
rates [Empirical]."""

CPU_TILE = 16
"""Rows and columns of a CPU kernel's register block."""

SPLITS = (1, 2, 4, 8)
"""Ways cuBLAS splits the inner extent where an output has fewer tiles than the device has multiprocessors."""

MISALIGNED = 2.0
"""[Empirical] factor on matmuls with an extent that is no multiple of 16 bytes (NVIDIA's guide, figure 3 and section
"Requirements to use Tensor Cores"; nanoGPT's head ran twice as fast after padding 50257 columns to 50304)."""

COLUMN_SPLIT = frozenset(("q", "k", "v", "qkv", "up", "gate", "gate_up", "head", "fc1", "c_attn", "c_fc"))
"""Last parts of names of matmuls whose columns tensor parallelism divides."""

CAST_BYTES = 4
"""Bytes moved for one item cast to 8 bits and transposed: read in bf16, written once in either order."""

FAMILIES: dict[str, DeviceConstants] = {
    # cuBLAS 8192^3 about 100 of 125 TFLOP/s; no FlashAttention-2 before Ampere, the memory-efficient kernel runs.
    # fp32 SGEMM reaches about 14.5 of 15.7 (NVIDIA, "Tesla V100 architecture").
    "V100": DeviceConstants({"bf16": 0.8, "fp32": 0.9}, 0.35, 0.25, 0.8),
    "T4": DeviceConstants({"bf16": 0.42, "fp32": 0.6}, 0.2, 0.15, 0.75),  # 70 W: clocks fall under load
    "RTX-Titan": DeviceConstants({"bf16": 0.65, "fp32": 0.85}, 0.3, 0.22, 0.8),
    "RTX-3090": DeviceConstants({"bf16": 0.85, "tf32": 0.8, "fp32": 0.75}, 0.65, 0.5, 0.8),
    # cuBLAS 8192^3 about 265-275 of 312 TFLOP/s when cool, 250-260 in long runs at 400 W; the latter fits the training
    # runs of arXiv 2205.05198. FlashAttention-2 220 forward and 180 backward (arXiv 2307.08691).
    "A100": DeviceConstants({"bf16": 0.83, "tf32": 0.8, "fp32": 0.92}, 0.7, 0.58, 0.8),
    # About 700-750 of 989 TFLOP/s within 700 W; FlashAttention-2 370 forward, 290 backward (arXiv 2407.08608, 4.1).
    # fp8 about 1200-1300 of 1979 TFLOP/s (same power limit).
    "H100": DeviceConstants({"bf16": 0.74, "tf32": 0.7, "fp32": 0.75, "fp8": 0.63}, 0.37, 0.29, 0.85),
    "H200": DeviceConstants({"bf16": 0.75, "tf32": 0.7, "fp32": 0.75, "fp8": 0.64}, 0.37, 0.29, 0.85),
    "B200": DeviceConstants({"bf16": 0.74, "tf32": 0.7, "fp32": 0.75, "fp8": 0.68}, 0.3, 0.22, 0.85),
    "GB200": DeviceConstants({"bf16": 0.74, "tf32": 0.7, "fp32": 0.75, "fp8": 0.68}, 0.3, 0.22, 0.85),
    # Probed CPU processes: peak and bandwidth are measured, nothing is lost beside them.
    "CPU": DeviceConstants({"bf16": 1.0, "fp32": 1.0}, 0.6, 0.5, 1.0),
    "default": DeviceConstants({"bf16": 0.75, "tf32": 0.7, "fp32": 0.8, "fp8": 0.6}, 0.4, 0.3, 0.8),
}
"""[Empirical] by the first part of a device's name."""

MEASURED = DeviceConstants({"bf16": 1.0, "fp32": 1.0}, 0.5, 0.4, 1.0)
"""[Empirical] for devices of no known type whose peak and bandwidth were measured: nothing is lost beside them."""

RAMP_INNER = 160
"""[Empirical] inner items a tile costs beyond its own: filling the pipeline and writing the result. Writing a 128 x 256
tile in bf16 takes an A100 multiprocessor's share of memory bandwidth 3.4 us, as long as 150 inner items."""

ATTENTION_BLOCK = 128
"""Query rows of one thread block of FlashAttention-2 (arXiv 2307.08691, section 3.3)."""

ATTENTION_RAMP = 160
"""[Empirical] keys a query sees at which fused attention reaches half its rate (arXiv 2307.08691, figs. 4 to 6: 512 to
16k keys, with and without a causal mask)."""

HEAD_RAMP = 25
"""[Empirical] head size at which fused attention reaches half its rate: 64 runs at 0.86 of 128's (ibid., fig. 4)."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""Backward FLOPs of fused attention over forward's: five matmuls instead of two (arXiv 2307.08691, section 4.1)."""

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
"""[Empirical] what a stack without constants of its own costs: GPUs run behind the host, so hooks hide; what is left is
once a step or once a transfer."""

QUEUE = 4.0
"""Order of the smooth maximum of device and host time. A layer whose kernels wait for the host empties the queue that
its neighbours filled and the other way round, so a layer near the balance loses part of either: a quarter-power norm
costs 19 % where both are equal and 1 % where one is twice the other."""

BACKWARD_HOST = 0.7
"""[Empirical] host time of a kernel launched by autograd's C++ engine beside one launched from Python's forward."""

BACKWARD_KERNELS = {OperatorClass.MATMUL: 2, OperatorClass.ATTENTION: 3, OperatorClass.CONVOLUTION: 2}
"""Kernels in backward for one in forward: gradients of input and weights; of fused attention the row sums, the main
kernel and the conversion of the queries' gradient (FlashAttention-2's source); one of memory-bound operators."""


@dataclass(frozen=True, slots=True)
class OptimizerTraffic:
    """Memory traffic of one optimizer step for one parameter item, its gradient and states in fp32.

    Attributes:
        state: bytes of state kept.
        moved: bytes read and written.
        working: temporary bytes.
        launches: kernels' worth of host time that one tensor costs.
    """

    state: int
    moved: int
    working: int
    launches: float = 0.0


OPTIMIZERS: dict[str, OptimizerTraffic] = {
    # torch.optim.AdamW as it runs on CUDA by default (foreach): decay 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8,
    # add 8, addcdiv 16 bytes; the square root is a temporary. Kernels take some hundred tensors at once.
    "adamw": OptimizerTraffic(8, 80, 4, 1.0),
    "adam": OptimizerTraffic(8, 72, 4, 1.0),
    # One pass (torch fused=True, apex FusedAdam): reads parameter, gradient and two moments, writes three of them.
    "adamw-fused": OptimizerTraffic(8, 28, 0, 0.2),
    "adam-fused": OptimizerTraffic(8, 28, 0, 0.2),
    # A kernel an operation and tensor (foreach=False): the same traffic, eight launches.
    "adamw-loop": OptimizerTraffic(8, 80, 4, 8.0),
    # apex FusedLAMB (multi_tensor_lamb.cu): norm of gradients 4; stage 1 reads four and writes three; norms of
    # parameters and updates 8; stage 2 reads two and writes one.
    "lamb": OptimizerTraffic(8, 52, 0, 0.4),
    # With momentum: mul 8, add 12 on the buffer, add 12 on the parameter.
    "sgd": OptimizerTraffic(4, 32, 0, 0.5),
    "sgd-fused": OptimizerTraffic(4, 20, 0, 0.2),
}
"""What is known of optimizers by name."""


def constants_of(device: Device, calibration: Calibration | None = None) -> DeviceConstants:
    """What kernels reach of a device: the calibrated entry with the longest name its own begins with."""
    table = FAMILIES if calibration is None else calibration.devices
    names = [name for name in table if device.name.upper().startswith(name.upper())]
    if names:
        return table[max(names, key=len)]
    return MEASURED if device.source == "measured" else table["default"]
