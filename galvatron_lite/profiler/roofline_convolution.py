"""Seconds of convolutions by shape. No torch here."""

from __future__ import annotations

from math import ceil, prod

from galvatron_lite.model.graph import Operator
from galvatron_lite.profiler import estimate_efficiency as constants
from galvatron_lite.profiler.roofline_machine import Machine, Seconds, stream
from galvatron_lite.profiler.roofline_matmul import matmul_seconds


def convolution(machine: Machine, operator: Operator, samples: float, shared: int) -> Seconds:
    """An implicit GEMM: output pixels x (input channels x kernel) x output channels, once a group."""
    inputs, outputs, groups = operator.shape[:3]
    dims = (len(operator.shape) - 3) // 3
    extents, kernel, strides = (operator.shape[3 + i * dims : 3 + (i + 1) * dims] for i in range(3))
    pixels = samples * prod(ceil(extent / stride) for extent, stride in zip(extents, strides, strict=True))
    inner, columns = inputs // groups * prod(kernel), outputs / groups / shared
    if inputs // groups < constants.DEPTHWISE_CHANNELS and groups > 1:
        work = operator.flops * samples / shared / (machine.device.peak.get("fp32", machine.peak) * constants.DEPTHWISE)
    else:
        calls = operator.flops / (2 * pixels / samples * inner * outputs / groups)
        work = calls * matmul_seconds(machine, pixels, inner, columns) / constants.CONVOLUTION
    forward = max(work, _calls(machine, operator, operator.moved, samples / shared))
    ratio = operator.backward_flops / operator.flops if operator.flops else 0.0
    backward = max(work * ratio, _calls(machine, operator, operator.backward_moved, samples / shared))
    return Seconds(forward, backward if ratio else 0.0)


def _calls(machine: Machine, operator: Operator, moved: float, samples: float) -> float:
    """Seconds the operator's bytes take, kernel by kernel."""
    calls = max(1, operator.count)
    return calls * stream(machine, (moved * samples + operator.weight_bytes) / calls)
