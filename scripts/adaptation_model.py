"""The model of ``scripts/adaptation``: blocks of many parameters and little to hand on, whose work takes a known time.

They sleep instead of computing, so that two processes on one machine do not slow one another down: the wire alone is
what changes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.model.graph import Role
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile

WIDTH, BLOCKS, BATCH = 256, 4, 16
WORK = 2e-3  # seconds of a sample's forward pass in a block


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            time.sleep(WORK * tensor.shape[0])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * WORK * gradient.shape[0])
        return gradient


class Block(nn.Module):
    """A wide layer and its work."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (samples, WIDTH) to such."""
        worked: Tensor = _Work.apply(self.linear(hidden))  # type: ignore[no-untyped-call]
        return hidden + torch.tanh(worked)


class Workers(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of what the blocks make of the inputs."""
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, targets)


def make_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step, the same on every rank."""
    inputs, targets = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"inputs": inputs, "targets": targets}


def make_model() -> Workers:
    """The model, alike on every rank."""
    torch.manual_seed(0)
    return Workers()


def make_profile(bandwidth: float) -> Profile:
    """Two processes over a wire of so many bytes a second; blocks take the time that their work does."""
    device = Device("cpu", 2**32, 1e10, {"fp32": 4e10}, source="estimated")
    cluster = Cluster("pair", (DeviceGroup(device, 2),), (Level("wire", 2, bandwidth, 1e-3),))
    profile = estimate_profile(trace(make_model(), make_batch(0)), cluster, precision="fp32", name="workers")
    kinds = {layer.kind for layer in profile.graph.layers if layer.role is Role.BLOCK}
    points = tuple(
        replace(point, forward=WORK * point.samples, backward=2 * WORK * point.samples)
        if point.kind in kinds
        else point
        for point in profile.layers
    )
    return replace(profile, layers=points)
