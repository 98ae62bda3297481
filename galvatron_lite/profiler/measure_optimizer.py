"""What an AdamW step costs, by parameter items and by parameter tensors."""

from __future__ import annotations

import torch
from torch import nn

from galvatron_lite.profiler.memory import storage_bytes, track_peak
from galvatron_lite.profiler.schema import OptimizerCost
from galvatron_lite.profiler.timing import DEFAULT_RULE, TimingRule, time_call

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
