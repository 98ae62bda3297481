"""One device at one precision as the rooflines see it: its data sheet times what kernels reach of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from galvatron_lite.calibration.schema import DeviceConstants, StackConstants
from galvatron_lite.calibration.store import constants_for_device, load_calibration
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.errors import InputError
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.units import ITEM_BYTES

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
    for known in _FALLBACK.get(precision, (precision, "fp32")):
        if known in device.peak:
            break
    else:
        raise InputError("--precision", precision, f"{device.name} has peaks for {', '.join(device.peak)} only.")
    peak, gpu = device.peak[known], not device.name.upper().startswith("CPU")
    kernel = constants.NARROW_KERNELS.get(precision, 1.0) if known in NARROW else 1.0
    unit = peak * _share(reached, known) * kernel / stack.matmul / device.units
    bandwidth = device.memory_bandwidth * reached.memory / stack.memory
    item_bytes = ITEM_BYTES.get(precision, 1)
    launch, tail = device.launch_overhead, constants.KERNEL_TAIL
    return Rates(device.units, unit, bandwidth, launch, tail, item_bytes, gpu, uneven), peak


def _share(reached: DeviceConstants, precision: str) -> float:
    """Of peak FLOP/s at a precision; a precision without its own constant takes bf16's."""
    for name in _SHARES.get(precision, (precision, "bf16")):
        if name in reached.matmul:
            return reached.matmul[name]
    return next(iter(reached.matmul.values()))


def stream(machine: Machine, moved: float) -> float:
    """Seconds of one memory-bound kernel that moves so many bytes."""
    rates = machine.other
    return max(rates.launch, rates.tail + moved / rates.bandwidth)
