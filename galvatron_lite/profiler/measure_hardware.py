"""What one device does when nothing but itself holds it back: matmul, attention and copy throughput.

Under a process group all ranks of a machine run at the same moment, so cores and memory that they share are shared
here too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.profiler.memory import storage_bytes, track_peak
from galvatron_lite.profiler.schema import OptimizerCost, Throughput
from galvatron_lite.profiler.timing import DEFAULT_RULE, TimingRule, time_call

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SHAPES = {
    "cpu": ((128, 256, 1024), (256, 256, 256), (512, 512, 512), (1024, 512, 512)),
    "cuda": ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 4096, 11008), (8192, 8192, 8192)),
}
_ATTENTION = {"cpu": (2, 4, 256, 64), "cuda": (8, 16, 2048, 128)}
_STREAM = {"cpu": 2**23, "cuda": 2**28}


def measure_throughput(device: torch.device, precision: str = "fp32", rule: TimingRule = DEFAULT_RULE) -> Throughput:
    """Measure this device (all ranks at the same moment) at one precision."""
    dtype = _DTYPES[precision]
    matmul = max(_matmul(shape, device, dtype, rule) for shape in _SHAPES[device.type])
    return Throughput(matmul, _attention(device, dtype, rule), _stream(device, rule), _launch(device, rule))


def with_throughput(cluster: Cluster, throughput: Throughput, precision: str) -> Cluster:
    """The cluster with measured figures; peaks of a data sheet stay, since utilisation refers to them."""
    groups = tuple(replace(group, device=_device(group.device, throughput, precision)) for group in cluster.groups)
    return replace(cluster, groups=groups)


def _device(device: Device, throughput: Throughput, precision: str) -> Device:
    known = {} if device.source == "measured" else device.peak
    peak = {**device.peak, precision: max(throughput.matmul, throughput.attention), **known}
    return replace(device, peak=peak, memory_bandwidth=throughput.bandwidth, launch_overhead=throughput.launch)


def _matmul(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, rule: TimingRule) -> float:
    rows, inner, columns = shape
    left = torch.rand(rows, inner, device=device).to(dtype)
    right = torch.rand(inner, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    return 2.0 * rows * inner * columns / time_call(lambda: torch.mm(left, right, out=out), device, rule).seconds


def _attention(device: torch.device, dtype: torch.dtype, rule: TimingRule) -> float:
    samples, heads, tokens, size = _ATTENTION[device.type]
    q, k, v = (torch.rand(samples, heads, tokens, size, device=device).to(dtype) for _ in range(3))
    seconds = time_call(lambda: F.scaled_dot_product_attention(q, k, v), device, rule).seconds
    return 4.0 * samples * heads * tokens * tokens * size / seconds


def _stream(device: torch.device, rule: TimingRule) -> float:
    left, right, out = (torch.ones(_STREAM[device.type], device=device) for _ in range(3))
    moved = 3 * left.nbytes
    return moved / time_call(lambda: torch.add(left, right, out=out), device, rule).seconds


def _launch(device: torch.device, rule: TimingRule) -> float:
    one = torch.ones(1, device=device)
    calls = 100

    def many() -> None:
        for _ in range(calls):
            one.add_(1.0)

    return time_call(many, device, rule).seconds / calls


_LARGE = {"cpu": 2**20, "cuda": 2**26}
_SMALL_TENSORS = 64


def measure_optimizer(device: torch.device, rule: TimingRule = DEFAULT_RULE) -> OptimizerCost:
    """Measure ``torch.optim.AdamW`` as it is by default on this device, fp32 parameters, states in place.

    Seconds are split into a part for each tensor (from many tiny ones) and a part for each item (from few large
    ones). Whether temporaries grow with one tensor or with all is seen by comparing one large tensor with two.
    """
    items = _LARGE[device.type]
    small = _optimizer(_SMALL_TENSORS, 16, device)
    large = _optimizer(4, items, device)
    per_tensor = time_call(small.step, device, rule).seconds / _SMALL_TENSORS
    whole = time_call(large.step, device, rule).seconds
    one, two = (_working(count, items, device) for count in (1, 2))
    return OptimizerCost(
        name="adamw",
        state_bytes=_state_bytes(large),
        seconds_per_item=max(whole - 4 * per_tensor, whole / 2) / (4 * items),
        seconds_per_tensor=per_tensor,
        working_bytes=one / items,
        working_share=float(one > 0 and two > 1.5 * one),
    )


def _optimizer(tensors: int, items: int, device: torch.device) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(items, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    return optimizer


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state for one item; the step counters (scalars) are left out."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: list[object] = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    moments = storage_bytes(value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0)
    items: int = sum(parameter.numel() for parameter in parameters)
    return round(moments / items)


def _working(tensors: int, items: int, device: torch.device) -> int:
    optimizer = _optimizer(tensors, items, device)
    with track_peak(device) as tracked:
        optimizer.step()
    return tracked.peak
