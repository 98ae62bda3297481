"""A model whose blocks take known times and no processor (``tests/known_time.py``), and a profile of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.model.graph import Role
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from tests.runtime.monitor.slow_link import Link

WIDTH, BLOCKS = 256, 4
Pace = Callable[[int, int], tuple[float, float]]
"""Seconds of the forward and the backward pass of a block, by its number and the samples."""


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int, pace: Pace) -> Tensor:
        ctx.number, ctx.pace = number, pace
        if not tensor.is_meta:
            Link.clock.work(pace(number, tensor.shape[0])[0])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        Link.clock.work(ctx.pace(ctx.number, gradient.shape[0])[1])
        return gradient, None, None


class _Block(nn.Module):
    def __init__(self, number: int, pace: Pace) -> None:
        super().__init__()
        self.linear, self.number, self.pace = nn.Linear(WIDTH, WIDTH), number, pace

    def forward(self, hidden: Tensor) -> Tensor:
        worked: Tensor = _Work.apply(self.linear(hidden), self.number, self.pace)  # type: ignore[no-untyped-call]
        return hidden + torch.tanh(worked)


class Workers(nn.Module):
    """Blocks of many parameters and little to hand on."""

    def __init__(self, pace: Pace) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(_Block(number, pace) for number in range(BLOCKS))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, targets)


def worked_batch(samples: int, step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    inputs, targets = torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"inputs": inputs, "targets": targets}


def pair(bandwidth: float, latency: float) -> Cluster:
    """Two processes over a link."""
    device = Device("cpu", 2**32, 1e10, {"fp32": 4e10}, source="a test")
    return Cluster("pair", (DeviceGroup(device, 2),), (Level("wire", 2, bandwidth, latency),))


def profile_of(pace: Pace, samples: int, cluster: Cluster) -> Profile:
    """Blocks take the time that their work does."""
    captured = trace(Workers(pace), worked_batch(samples, 0))
    profile = estimate_profile(captured, cluster, precision="fp32", name="workers")
    kinds = {layer.kind for layer in profile.graph.layers if layer.role is Role.BLOCK}
    points = []
    for point in profile.layers:
        forward, backward = pace(-1, point.samples)
        points.append(replace(point, forward=forward, backward=backward) if point.kind in kinds else point)
    return replace(profile, layers=tuple(points))
