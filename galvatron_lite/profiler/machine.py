"""Every constant the estimates rest on besides the data sheets, in one place.

[Empirical] marks round figures from public benchmarks of large kernels rather than a formula; they are meant to be
right within some ten per cent, and ``galvatron profile`` on the machine itself replaces them.
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
"""Rows, columns and rate beside the best one's of the tiles cuBLAS chooses from; sizes and the order of their rates
after NVIDIA, "Matrix Multiplication Background User's Guide" (docs.nvidia.com/deeplearning/performance), section 3;
rates [Empirical]."""

CPU_TILE = 16  # rows and columns of a CPU kernel's register block

SPLITS = (1, 2, 4, 8)
"""Ways cuBLAS splits the inner extent where an output has fewer tiles than the device has multiprocessors."""

MISALIGNED = {8: 1.7, 4: 2.3, 2: 3.4}
"""[Empirical] factor on 16-bit matmuls whose inner or column extent is aligned to so many bytes only: tensor cores load
16 bytes at once (NVIDIA's guide, "Requirements to use Tensor Cores" and figure 3). From A100 runs whose vocabulary of
50257 was split without padding (vTrain's ground truth); nanoGPT's head ran twice as fast after padding."""

COLUMN_SPLIT = frozenset(("q", "k", "v", "qkv", "up", "gate", "gate_up", "head", "fc1", "c_attn", "c_fc"))
"""Last parts of names of matmuls whose columns tensor parallelism divides."""

RAMP_INNER = 160
"""[Empirical] inner items a tile costs beyond its own: filling the pipeline and writing the result. Writing a 128 x 256
tile in bf16 takes an A100 multiprocessor's share of memory bandwidth 3.4 us, as long as 150 inner items."""

NARROW_KERNELS = {"fp8-rowwise": 0.75}
"""[Empirical] rate of fp8 matmuls whose scales go by rows (CUTLASS) beside those with one scale a tensor (cuBLAS):
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
"""[Empirical] how compute and NCCL slow one another down while both run: measured on A100 by Hetu-Galvatron
(its shipped ``overlap_coefficient.json``: 1.1256), applied to both sides as it does."""

HOST = HostOverhead(pipeline=5e-5, branch=2e-4)
"""[Empirical] GPUs run behind the host, so hooks hide; what is left besides a stack's own is once a transfer. A call of
a branch is taken to be one send and one receive in each pass; that putting it off hides as well was not measured."""

QUEUE = 2.0
"""[Empirical] order of the smooth maximum of device and host time. Within a layer some kernels wait for the host and
others fill its queue, and recomputation and backward begin with an empty one, so a layer loses part of either: 41 %
where both are equal, 5 % where one is three times the other. vTrain's published steps on A100 (arXiv 2312.12391),
layers of a third to six times their launches, grow with the micro-batch as this order says."""

BACKWARD_HOST = 0.7
"""[Empirical] host time of a kernel launched by autograd's C++ engine beside one launched from Python's forward."""

COLLECTIVE_LAUNCHES = 2.0
"""[Empirical] host time of a blocking collective in kernel launches: beside its own launch the streams of compute and
NCCL wait for an event of one another, before and after (torch.distributed, ProcessGroupNCCL). vTrain's launch-bound
layers take a tenth longer in tensor groups than without, with three collectives for each 22 other launches."""

BACKWARD_KERNELS = {OperatorClass.MATMUL: 2, OperatorClass.ATTENTION: 3, OperatorClass.CONVOLUTION: 2}
"""Kernels in backward for one in forward: gradients of input and weights; of fused attention the row sums, the main
kernel and the conversion of the queries' gradient (FlashAttention-2's source); one of memory-bound operators."""


@dataclass(frozen=True, slots=True)
class OptimizerTraffic:
    """Memory traffic of one optimizer step for one parameter item, its gradient and states in fp32."""

    state: int  # bytes of state kept
    moved: int  # bytes read and written
    working: int  # temporary bytes
    launches: float = 0.0  # kernels' worth of host time that one tensor costs


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
}
"""What is known of optimizers by name."""


NARROW = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4", "fp4")
"""Precisions that only linear layers run in; everything else stays in bf16 (NVIDIA Transformer Engine, user guide,
"Using FP8": attention, norms, embedding and head are left alone)."""

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
    """What the kernels of one precision reach on one device; hashable, so that answers can be remembered."""

    units: int  # multiprocessors
    unit: float  # FLOP/s of one of them in the best matmul tile
    bandwidth: float  # bytes per second of memory
    launch: float  # seconds of the shortest kernel
    tail: float  # seconds before a kernel's memory streams at full rate
    item_bytes: int  # bytes of one item
    gpu: bool  # whether matmul kernels work in a GPU's tiles
    # whether slices of an extent that does not divide differ by one, so that all wait for the slower of both
    uneven: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One device at one precision."""

    device: Device  # its data sheet
    constants: DeviceConstants  # what kernels reach of it
    stack: StackConstants  # what the training software adds
    precision: str  # of linear layers
    item_bytes: int  # bytes of one item of activations
    peak: float  # FLOP/s of the data sheet in linear layers
    wide: float  # FLOP/s of the data sheet in all other matmuls and in attention
    linear: Rates  # rates of matmuls that run in ``precision``
    other: Rates  # rates of everything else

    @property
    def bandwidth(self) -> float:
        """Bytes per second that memory-bound kernels reach."""
        return self.other.bandwidth

    @property
    def narrow(self) -> bool:
        """Whether marked matmuls (``Operator.precision``) run in a narrower precision than everything else."""
        return self.linear is not self.other


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward and backward time of one operator, all its calls together."""

    forward: float
    backward: float


def wide_precision(precision: str) -> str:
    """The precision of activations and of all operators but linear layers: bf16 under fp8 and narrower."""
    return "bf16" if precision in NARROW else precision


def machine_of(
    device: Device,
    precision: str,
    reached: DeviceConstants | None = None,
    stack: StackConstants | None = None,
    uneven: bool = False,
) -> Machine:
    """A device at a precision; one it has no units for runs at the next wider one (bf16 on V100 at fp32's rate).

    Args:
        device: its data sheet.
        precision: fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4 (``nvfp4`` at fp8's peak where no fp4 peak is known).
        reached: what kernels reach of it; None: the calibrated constants of its type.
        stack: factors of the training software; None: none.
        uneven: whether it slices unevenly, see ``Rates``.
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
    # a precision without a constant of its own takes bf16's
    names = [name for name in _SHARES.get(precision_name, (precision_name, "bf16")) if name in reached.matmul]
    share = reached.matmul[next(iter(names or reached.matmul))]
    unit = peak * share * kernel / stack.matmul / device.units
    bandwidth = device.memory_bandwidth * reached.memory / stack.memory
    item_bytes = ITEM_BYTES.get(precision, 1)
    launch, tail = device.launch_overhead, KERNEL_TAIL
    return Rates(device.units, unit, bandwidth, launch, tail, item_bytes, gpu, uneven), peak


def stream(machine: Machine, moved: float) -> float:
    """Seconds of one memory-bound kernel that moves so many bytes."""
    rates = machine.other
    return max(rates.launch, rates.tail + moved / rates.bandwidth)
