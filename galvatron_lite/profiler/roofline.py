"""Seconds of one operator on one device from its shape and the data sheet (roofline). No torch here.

A matmul's output is cut into tiles, and the device works through them in waves of one tile a multiprocessor: the last
wave is paid in full (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation). The kernel
library takes the cheapest tile. Nothing runs faster than its bytes can be moved or a kernel can be launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.profiler.estimate_efficiency import Efficiency, Tile
from galvatron_lite.units import ITEM_BYTES

_FALLBACK = {"fp8": ("fp8", "bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32"), "bf16": ("bf16", "fp32")}


@dataclass(frozen=True, slots=True)
class Machine:
    """One device at one precision.

    Attributes:
        device: its data sheet.
        efficiency: what it reaches of that.
        peak: FLOP/s at the precision.
        item_bytes: bytes of one item.
    """

    device: Device
    efficiency: Efficiency
    peak: float
    item_bytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that memory-bound kernels reach."""
        return self.device.memory_bandwidth * self.efficiency.memory


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward and backward time of one operator, all its calls together."""

    forward: float
    backward: float


def machine_of(device: Device, precision: str) -> Machine:
    """A device at a precision; one it has no units for runs at the next wider one (bf16 on V100 at fp32's rate).

    Raises:
        InputError: an unknown precision, or a device whose peaks do not cover it.
    """
    if precision not in ITEM_BYTES:
        raise InputError("--precision", precision, f"Give one of {', '.join(ITEM_BYTES)}.")
    for known in _FALLBACK.get(precision, (precision, "fp32")):
        if known in device.peak:
            return Machine(device, constants.efficiency_of(device), device.peak[known], ITEM_BYTES[precision])
    raise InputError("--precision", precision, f"{device.name} has peaks for {', '.join(device.peak)} only.")


def operator_seconds(
    machine: Machine, operator: Operator, samples: float, degree: int = 1, sequence_parallel: bool = False
) -> Seconds:
    """Forward and backward seconds of an operator, all calls together.

    Args:
        machine: the device at a precision.
        operator: what is called.
        samples: samples on the device.
        degree: tensor-parallel degree.
        sequence_parallel: whether tokens are shared between sharded operators.
    """
    shared = {Sharding.TENSOR: degree, Sharding.SEQUENCE: degree if sequence_parallel else 1, Sharding.NONE: 1}
    return _MODELS[operator.kind](machine, operator, samples, shared[operator.sharding])


def matmul_seconds(machine: Machine, rows: float, inner: float, columns: float) -> float:
    """Seconds of one matmul (rows x inner) @ (inner x columns)."""
    moved = (rows * inner + inner * columns + rows * columns) * machine.item_bytes
    work = min(_tiled(machine, rows, inner, columns, tile) for tile in machine.efficiency.tiles)
    return max(work, _stream(machine, moved))


def _tiled(machine: Machine, rows: float, inner: float, columns: float, tile: Tile) -> float:
    tiles = ceil(rows / tile.rows) * ceil(columns / tile.columns)
    units = machine.device.units
    rate = machine.peak * machine.efficiency.matmul * tile.rate / units
    inner_flops = 2 * tile.rows * tile.columns / rate
    ramp = constants.RAMP_INNER if units > 1 else 0
    if tiles >= units:
        return ceil(tiles / units) * (inner + ramp) * inner_flops
    return min(ceil(tiles * split / units) * (inner / split + ramp) * inner_flops for split in constants.SPLITS)


def _stream(machine: Machine, moved: float) -> float:
    """Seconds of one kernel that moves so many bytes."""
    return max(machine.device.launch_overhead, constants.KERNEL_TAIL + moved / machine.bandwidth)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _matmul(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """Backward is one matmul for the input's and one for the weights' gradient.

    A split matmul has its columns or its inner extent divided, which the shape does not tell: the mean of both.
    """
    if not operator.weight_bytes or operator.sharding is not Sharding.TENSOR:
        return _row_matmul(machine, operator, samples, shared)
    rows, inner, columns = operator.shape[0] * samples, operator.shape[1], operator.shape[2]
    ways = ((rows, inner, columns / shared), (rows, inner / shared, columns))
    forward = sum(matmul_seconds(machine, m, k, n) for m, k, n in ways) / 2
    both = sum(matmul_seconds(machine, m, n, k) + matmul_seconds(machine, k, m, n) for m, k, n in ways) / 2
    return _scaled(operator, forward, both)


def _row_matmul(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """A matmul whose rows are divided; without weights it is a batch (the heads of attention) folded into the rows."""
    rows, inner, columns = operator.shape[0] * samples / shared, operator.shape[1], operator.shape[2]
    forward, to_input = matmul_seconds(machine, rows, inner, columns), matmul_seconds(machine, rows, columns, inner)
    if operator.weight_bytes:
        return _scaled(operator, forward, to_input + matmul_seconds(machine, inner, rows, columns))
    forward = max(forward, _calls(machine, operator, samples / shared, False) / max(1, operator.count))
    return _scaled(operator, forward, to_input + forward)


def _scaled(operator: Operator, forward: float, both: float) -> Seconds:
    """All calls of a matmul from the seconds of one, forward and backward; a frozen one does less in backward."""
    calls = _ratio(operator.flops, 2 * prod(operator.shape))
    return Seconds(calls * forward, calls * both * _ratio(operator.backward_flops, 2 * operator.flops))


def _attention(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """One fused kernel whose thread blocks take a head's query rows each; it skips what a causal mask hides."""
    heads, _, queries, keys, head_size = operator.shape
    blocks = ceil(samples * heads / shared * ceil(queries / constants.ATTENTION_BLOCK))
    waves = ceil(blocks / machine.device.units) * machine.device.units / blocks
    rate = machine.peak * keys / (keys + constants.ATTENTION_RAMP)
    rate *= constants.SMALL_HEAD if head_size <= 64 else 1.0
    seen = 0.5 if operator.causal else 1.0
    work = seen * operator.flops * samples / shared / rate * waves
    forward = max(work / machine.efficiency.attention, _calls(machine, operator, samples / shared, False))
    again = work * constants.ATTENTION_BACKWARD_FLOPS / machine.efficiency.attention_backward
    backward = max(again, _calls(machine, operator, samples / shared, True))
    return Seconds(forward, backward if operator.backward_flops else 0.0)


def _calls(machine: Machine, operator: Operator, samples: float, backward: bool) -> float:
    """Seconds the operator's bytes take, kernel by kernel."""
    moved = operator.backward_moved if backward else operator.moved
    calls = max(1, operator.count)
    return calls * _stream(machine, (moved * samples + operator.weight_bytes) / calls)


def _convolution(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """An implicit GEMM: output pixels x (input channels x kernel) x output channels, once a group."""
    inputs, outputs, groups = operator.shape[:3]
    dims = (len(operator.shape) - 3) // 3
    extents, kernel, strides = (operator.shape[3 + i * dims : 3 + (i + 1) * dims] for i in range(3))
    pixels = samples * prod(ceil(extent / stride) for extent, stride in zip(extents, strides, strict=True))
    inner, columns = inputs // groups * prod(kernel), outputs / groups / shared
    if inputs // groups < constants.DEPTHWISE_CHANNELS and groups > 1:
        work = operator.flops * samples / shared / (machine.device.peak.get("fp32", machine.peak) * constants.DEPTHWISE)
    else:
        calls = _ratio(operator.flops, 2 * pixels / samples * inner * outputs / groups)
        work = calls * matmul_seconds(machine, pixels, inner, columns) / constants.CONVOLUTION
    forward = max(work, _calls(machine, operator, samples / shared, False))
    ratio = _ratio(operator.backward_flops, operator.flops)
    backward = max(work * ratio, _calls(machine, operator, samples / shared, True))
    return Seconds(forward, backward if ratio else 0.0)


def _memory(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    forward = _calls(machine, operator, samples / shared, False)
    backward = _calls(machine, operator, samples / shared, True) if operator.backward_moved else 0.0
    return Seconds(forward, backward)


_MODELS = {
    OperatorClass.MATMUL: _matmul,
    OperatorClass.ATTENTION: _attention,
    OperatorClass.CONVOLUTION: _convolution,
    OperatorClass.MEMORY: _memory,
}
