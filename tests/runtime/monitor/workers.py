"""Models whose blocks take known times, profiles of them, and windows that a machine would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level
from galvatron_lite.cost.communication import Links
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.runtime.monitor.correct import corrected, link_probes, predicted_groups
from galvatron_lite.runtime.monitor.planning import plain
from galvatron_lite.runtime.monitor.schema import (
    LOG_VERSION,
    Adapt,
    Corrections,
    LayerGroup,
    Started,
    StepWindow,
)
from galvatron_lite.search.planner import find_plan
from tests.factories import make_cluster, make_graph, make_kind, make_profile
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


BATCH = 16
PARAMETERS = 200_000


def wide_profile(devices: int = 2) -> Profile:
    """Blocks whose parameters are many for their work: replicas pay as long as the link is quick."""
    seconds = {"before": 1e-4, "block": 2e-3, "after": 1e-4}
    kinds = [make_kind(name, PARAMETERS if name == "block" else 1000, boundary=4000) for name in seconds]
    points = [
        LayerPoint(
            kind.name, samples, 1, False, Recompute.NONE,
            seconds[kind.name] * samples, 2 * seconds[kind.name] * samples,
            1000 * samples, 1500 * samples, 1200 * samples,
        )
        for kind in kinds
        for samples in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    graph = make_graph(kinds, ["before", *["block"] * 4, "after"])
    return make_profile(graph, points, make_cluster(devices, bandwidth=1e9, latency=1e-5))


def fastest(profile: Profile) -> Plan:
    """The plan of a profile."""
    return find_plan(profile, devices=profile.cluster.devices, global_batch=BATCH, budget=2**29)


def started(settings: Adapt, profile: Profile | None = None) -> Started:
    """What a log begins with."""
    known = profile or wide_profile()
    return Started(LOG_VERSION, settings, known, fastest(known))


def window_on(
    profile: Profile, truth: Corrections, plan: Plan, step: int, noise: float = 0.0, links: bool = True
) -> StepWindow:
    """What a machine that differs from the profile by ``truth`` shows under a plan."""
    real = corrected(profile, truth)
    prediction = evaluate(real, plain(plan)).prediction
    seconds = prediction.step_seconds * truth.residual * (1.0 + noise)
    measured = []
    for group, points in link_probes(profile) if links else ():
        for point in points:
            call = Communication(Collective.ALL_REDUCE, point.size, group, Moment.STEP, overlaps=False)
            measured.append(replace(point, seconds=Links(real).seconds(call) * (1.0 + noise)))
    groups = _groups(real, truth, profile, plan)
    return StepWindow(step, (0.98 * seconds, seconds, 1.02 * seconds), groups, (), tuple(measured))


def _groups(real: Profile, truth: Corrections, profile: Profile, plan: Plan) -> tuple[LayerGroup, ...]:
    """Forward passes as each rank's factor makes them."""
    found = []
    stages = {run.first: number for number, stage in enumerate(plan.stages) for run in stage.runs}
    for name, seconds in predicted_groups(corrected(profile, Corrections(truth.links)), plan).items():
        first = stages[name] * plan.stage_devices
        ranks = tuple(range(first, first + plan.stage_devices))
        factors = truth.devices or (1.0,) * real.cluster.devices
        found.append(LayerGroup(name, ranks, tuple(seconds * factors[rank] for rank in ranks)))
    return tuple(found)
