"""Constants of the estimates besides data sheets, and the rates that kernels reach on a device (``Machine``).

[Empirical] marks figures from public benchmarks of large kernels rather than a formula. They are right within some ten
per cent; ``galvatron profile`` on the machine replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from galvatron_lite.calibration.schema import DeviceConstants, StackConstants
from galvatron_lite.calibration.store import constants_for_device, load_calibration
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.profiler.schema import HostOverhead, Overlap
from galvatron_lite.units import ITEM_BYTES

GPU_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.8), (128, 64, 0.8), (64, 64, 0.65))
"""Rows, columns and relative rate of the tiles that cuBLAS chooses from; sizes and the order of their rates after
NVIDIA, "Matrix Multiplication Background User's Guide" (docs.nvidia.com/deeplearning/performance), section 3; rates
[Empirical]."""

CPU_TILE = 16  # rows and columns of a CPU kernel's register block

SPLITS = (1, 2, 4, 8)
"""Parts that cuBLAS splits the inner extent into if an output has fewer tiles than the device has multiprocessors."""

MISALIGNED = {8: 1.7, 4: 2.3, 2: 3.4}
"""[Empirical] factor on 16-bit matmuls by the bytes that their inner or column extent is aligned to: tensor cores load
16 bytes at once (NVIDIA's guide, "Requirements to use Tensor Cores" and figure 3). From A100 runs whose vocabulary of
50257 was split without padding (vTrain's ground truth); nanoGPT's head ran twice as fast after padding."""

COLUMN_SPLIT = frozenset(("q", "k", "v", "qkv", "up", "gate", "gate_up", "head", "fc1", "c_attn", "c_fc"))
"""Last parts of names of matmuls whose columns tensor parallelism divides."""

RAMP_INNER = 160
"""[Empirical] further inner items' worth of a tile: filling the pipeline and writing the result. Writing a 128 x 256
tile in bf16 takes an A100 multiprocessor's share of memory bandwidth 3.4 us, as long as 150 inner items."""

NARROW_KERNELS = {"fp8-rowwise": 0.75}
"""[Empirical] rate of fp8 matmuls with a scale for each row (CUTLASS) over those with a scale for the tensor (cuBLAS):
torchtitan on one node of H100, Llama 3 8B: 6420 tokens/s, 7186 with tensors' scales, 5760 in bf16
(github.com/pytorch/torchtitan, commit 7a04053)."""

ATTENTION_BLOCK = 128
"""Query rows of one thread block of FlashAttention-2 (arXiv 2307.08691, section 3.3)."""

ATTENTION_RAMP = 160
"""[Empirical] keys a query sees at which fused attention reaches half its rate (arXiv 2307.08691, figs. 4 to 6: 512 to
16k keys, with and without a causal mask)."""

HEAD_RAMP = (25, 8)
"""[Empirical] head sizes at which fused attention reaches half its rate in forward and in backward: 64 runs at 0.86 and
0.94 of 128's (arXiv 2307.08691, figs. 4 to 6; runs of llm-foundry on A100 say the same of both together)."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""Backward FLOPs of fused attention over forward's: five matmuls instead of two (arXiv 2307.08691, section 4.1)."""

KERNEL_TAIL = 1.5e-6
"""[Empirical] seconds between a kernel's start and its memory streaming at full rate."""

NVIDIA_OVERLAP = Overlap(1.1256, 1.1256)
"""[Empirical] slow-down of compute and of NCCL while both run, measured on A100 by Hetu-Galvatron (its shipped
``overlap_coefficient.json``: 1.1256), applied to both sides as it does."""

HOST = HostOverhead(pipeline=5e-5, branch=2e-4)
"""[Empirical] host overhead of the runtime besides a stack's constants. Hooks cost nothing, since GPUs run behind the
host; each transfer does. A call of a branch is estimated as a send and a receive in each pass, not measured."""

QUEUE = 2.0
"""[Empirical] order of the smooth maximum of device and host time. Within a layer some kernels wait for the host and
others fill its queue, and recomputation and backward begin with an empty queue, so that a layer takes 41 % longer than
either time if both are equal, 5 % longer than the longer one if it is three times the other. vTrain's published steps
on A100 (arXiv 2312.12391), with layers of a third to six times their launches, grow with the micro-batch like that."""

BACKWARD_HOST = 0.7
"""[Empirical] host time of a kernel launched by autograd's C++ engine over one launched by Python in forward."""

COLLECTIVE_LAUNCHES = 2.0
"""[Empirical] host time of a blocking collective in kernel launches: besides its launch, the compute and NCCL streams
wait for an event of one another, before and after (torch.distributed, ProcessGroupNCCL). vTrain's launch-bound layers
take a tenth longer in tensor groups, with three collectives for each 22 other launches."""

BACKWARD_KERNELS = {OperatorClass.MATMUL: 2, OperatorClass.ATTENTION: 3, OperatorClass.CONVOLUTION: 2}
"""Kernels in backward for one in forward: gradients of input and weights; for fused attention the row sums, the main
kernel and the conversion of the queries' gradient (FlashAttention-2's source). Memory-bound operators have one."""


@dataclass(frozen=True, slots=True)
class OptimizerTraffic:
    """Memory traffic of one optimizer step for each parameter item, with gradient and states in fp32."""

    state: int  # bytes of optimizer state
    moved: int  # bytes read and written
    working: int  # temporary bytes
    launches: float = 0.0  # kernel launches for each tensor


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
    "sgd-plain": OptimizerTraffic(0, 12, 0, 0.2),
    "sgd-fused": OptimizerTraffic(4, 20, 0, 0.2),
    # The same after norms of gradients and parameters (You et al. 2017, arXiv 1708.03888).
    "lars": OptimizerTraffic(4, 28, 0, 0.4),
}
"""Memory traffic of optimizers by name."""


NARROW = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4", "fp4")
"""Precisions of linear layers only; all else stays in bf16 (NVIDIA Transformer Engine, user guide, "Using FP8":
attention, norms, embedding and head)."""

_FALLBACK = {
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp8-rowwise": ("fp8", "bf16", "fp16", "fp32"),
    "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "nvfp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
}
_SHARES = {"fp16": ("fp16", "bf16"), "tf32": ("tf32", "bf16"), "fp32": ("fp32", "bf16"), "fp4": ("fp4", "fp8", "bf16")}


class Rates(NamedTuple):
    """Rates that kernels of one precision reach on one device; hashable, for caches."""

    units: int  # multiprocessors
    unit: float  # FLOP/s of a multiprocessor in the best matmul tile
    bandwidth: float  # bytes per second of memory
    launch: float  # seconds of the shortest kernel
    tail: float  # seconds before a kernel's memory streams at full rate
    item_bytes: int  # bytes of an item
    gpu: bool  # whether matmul kernels use a GPU's tiles
    uneven: bool = False  # whether slices of an extent that does not divide differ by one; the slower one counts


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One device at one precision."""

    device: Device  # data sheet
    constants: DeviceConstants  # shares of the data sheet that kernels reach
    stack: StackConstants  # costs of the training software
    precision: str  # precision of linear layers
    item_bytes: int  # bytes of an item of activations
    peak: float  # peak FLOP/s of linear layers
    wide: float  # peak FLOP/s of all other matmuls and of attention
    linear: Rates  # rates of matmuls in ``precision``
    other: Rates  # rates of all other operators

    @property
    def bandwidth(self) -> float:
        """Bytes per second that memory-bound kernels reach."""
        return self.other.bandwidth

    @property
    def narrow(self) -> bool:
        """Whether marked matmuls (``Operator.precision``) run in a narrower precision than other operators."""
        return self.linear is not self.other


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward and backward time of one operator, all its calls together."""

    forward: float
    backward: float


def wide_precision(precision: str) -> str:
    """Return the precision of activations and of operators other than linear layers: bf16 under fp8 and narrower."""
    return "bf16" if precision in NARROW else precision


def machine_of(
    device: Device,
    precision: str,
    reached: DeviceConstants | None = None,
    stack: StackConstants | None = None,
    uneven: bool = False,
) -> Machine:
    """Return a device at a precision; one it has no peak for runs at the next wider one (bf16 on V100 at fp32's rate).

    Args:
        device: data sheet.
        precision: fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4 (at fp8's peak without a peak of fp4).
        reached: shares of the data sheet that kernels reach; None: the calibrated constants of its type.
        stack: costs of the training software; None: none.
        uneven: see ``Rates``.
    """
    if precision not in ITEM_BYTES and precision not in NARROW:
        raise InputError("--precision", precision, f"Give one of {', '.join((*ITEM_BYTES, *NARROW[1:]))}.")
    reached = reached or constants_for_device(load_calibration(), device.name, device.source)
    stack = stack or StackConstants()
    wide = wide_precision(precision)
    other, wide_peak = _rates(device, wide, reached, stack, uneven)
    linear, peak = (other, wide_peak) if wide == precision else _rates(device, precision, reached, stack, uneven)
    return Machine(device, reached, stack, precision, ITEM_BYTES[wide], peak, wide_peak, linear, other)


def _rates(
    device: Device, precision: str, reached: DeviceConstants, stack: StackConstants, uneven: bool
) -> tuple[Rates, float]:
    for precision_name in _FALLBACK.get(precision, (precision, "fp32")):
        if precision_name in device.peak:
            break
    else:
        raise InputError("--precision", precision, f"{device.name} has peaks for {', '.join(device.peak)} only.")
    peak, gpu = device.peak[precision_name], not device.name.upper().startswith("CPU")
    kernel = NARROW_KERNELS.get(precision, 1.0) if precision_name in NARROW else 1.0
    # a precision without a constant has bf16's
    names = [name for name in _SHARES.get(precision_name, (precision_name, "bf16")) if name in reached.matmul]
    share = reached.matmul[next(iter(names or reached.matmul))]
    unit = peak * share * kernel / stack.matmul / device.units
    bandwidth = device.memory_bandwidth * reached.memory / stack.memory
    item_bytes = ITEM_BYTES.get(precision, 1)
    launch, tail = device.launch_overhead, KERNEL_TAIL
    return Rates(device.units, unit, bandwidth, launch, tail, item_bytes, gpu, uneven), peak


def stream(machine: Machine, moved: float) -> float:
    """Return the seconds of one memory-bound kernel that moves ``moved`` bytes."""
    rates = machine.other
    return max(rates.launch, rates.tail + moved / rates.bandwidth)
