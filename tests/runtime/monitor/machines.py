"""Simulated machines: models whose blocks take known times, their profiles and windows, and a slow link.

The link is a process group that communicates by gloo and waits as long as the link would take, on a simulated clock
(``KnownClock``). The link carries one transfer at a time. A transfer begins when the last of its ranks has started it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from tests.known_time import KnownClock

NAME = "slowgloo"
_STAMP = 2**20
"""Offset of the tag of the message with the sender's time, from the tag of the message itself."""


class Link:
    """The link. A message takes ``latency + bytes * per_byte`` seconds; both may be changed at any time."""

    latency = 0.0
    per_byte = 0.0
    busy_until = 0.0
    clock = KnownClock()

    @classmethod
    def take(cls, size: float, since: float = 0.0) -> float:
        """Return the time at which the link has carried another ``size`` bytes, which were sent at ``since``."""
        cls.busy_until = max(cls.busy_until, cls.clock.now(), since) + cls.latency + size * cls.per_byte
        return cls.busy_until


class _Slow(dist.Work):
    """Work that ends when the link has carried the message."""

    def __init__(self, inner: Any, until: float, held: Any) -> None:
        super().__init__()
        self._inner, self._until, self._held = inner, until, held

    def wait(self, *_: Any) -> bool:
        self._inner.wait()
        Link.clock.wait(self._until)
        return True

    def is_completed(self) -> bool:
        return False


class _Arriving(dist.Work):
    """Work that receives a message, which the link carries from the time at which it was sent.

    Args:
        inner: receives the message.
        size: bytes of the message.
        sent: receives the time of the sender into ``stamp``.
        stamp: tensor of one item.
    """

    def __init__(self, inner: Any, size: int, sent: Any, stamp: Tensor) -> None:
        super().__init__()
        self._inner, self._size, self._sent, self._stamp = inner, size, sent, stamp
        self._until: float | None = None

    def wait(self, *_: Any) -> bool:
        self._inner.wait()
        self._sent.wait()
        if self._until is None:
            self._until = Link.take(self._size, float(self._stamp))
        Link.clock.wait(self._until)
        return True

    def is_completed(self) -> bool:
        return False


class SlowGroup(dist.ProcessGroup):
    """Gloo over the link. Of each collective, the link carries the share of a ring algorithm."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner, self._ranks = inner, size
        self._stamps: list[Any] = []

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _ring(self, work: Any, tensors: Any, passes: int = 1) -> _Slow:
        share = passes * (self._ranks - 1) / self._ranks
        since = self._latest()[1]
        work.wait()
        return _Slow(work, Link.take(share * sum(tensor.nbytes for tensor in _flat(tensors)), since), tensors)

    def _latest(self) -> tuple[Any, float]:
        """The work that found the time of the last rank, and that time."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        now = torch.tensor([Link.clock.now()], dtype=torch.float64)
        work = self._inner.allreduce([now], options)
        work.wait()
        return work, float(now)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Slow:
        return self._ring(self._inner.allreduce(tensors, opts or dist.AllreduceOptions()), tensors, 2)

    def broadcast(self, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.broadcast(tensors, opts), tensors, 2)

    def allgather(self, out: Any, tensors: Any, opts: Any = None) -> _Slow:
        return self._ring(self._inner.allgather(out, tensors, opts or dist.AllgatherOptions()), out)

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Slow:
        return self._ring(self._inner._allgather_base(out, tensor, opts or dist.AllgatherOptions()), out)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Slow:
        return self._ring(self._inner._reduce_scatter_base(out, tensor, opts or dist.ReduceScatterOptions()), tensor)

    def alltoall_base(self, out: Tensor, tensor: Tensor, outs: Any, ins: Any, opts: Any = None) -> _Slow:
        work = self._inner.alltoall_base(out, tensor, outs, ins, opts or dist.AllToAllOptions())
        return self._ring(work, tensor)

    all_gather_single = _allgather_base
    """Names in torch 2.13."""
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def gather(self, out: Any, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.gather(out, tensors, opts), tensors)

    def scatter(self, out: Any, tensors: Any, opts: Any) -> _Slow:
        return self._ring(self._inner.scatter(out, tensors, opts), tensors)

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        stamp = torch.tensor([Link.clock.now()], dtype=torch.float64)
        self._stamps.append((self._inner.send([stamp], peer, tag + _STAMP), stamp))
        return self._inner.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> _Arriving:
        stamp = torch.zeros(1, dtype=torch.float64)
        sent = self._inner.recv([stamp], peer, tag + _STAMP)
        return _Arriving(self._inner.recv(tensors, peer, tag), sum(one.nbytes for one in tensors), sent, stamp)

    def barrier(self, opts: Any = None) -> Any:
        met, until = self._latest()
        return _Slow(met, until, None)


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for item in value for one in _flat(item)]


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SlowGroup:
    return SlowGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def join(folder: Path, bandwidth: float, clock: KnownClock) -> None:
    """Leave the world, and join a world of the same ranks over a link of ``bandwidth`` bytes a second of a clock."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    Link.per_byte, Link.clock = 1 / bandwidth, clock
    dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


WIDTH, BLOCKS = 256, 4
Pace = Callable[[int, int], tuple[float, float]]
"""Returns the forward and backward seconds of a block for its number and the number of samples."""


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
    """Blocks with many parameters and small activations."""

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
    """The profile of ``Workers`` with the times of ``pace``."""
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
    """Blocks with many parameters for their work, so that replicas are fast as long as the link is fast."""
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
    """The fastest plan by a profile."""
    return find_plan(profile, devices=profile.cluster.devices, global_batch=BATCH, budget=2**29)


def started(settings: Adapt, profile: Profile | None = None) -> Started:
    """The first record of a log."""
    profile = profile or wide_profile()
    return Started(LOG_VERSION, settings, profile, fastest(profile))


def window_on(
    profile: Profile, truth: Corrections, plan: Plan, step: int, noise: float = 0.0, links: bool = True
) -> StepWindow:
    """The measurements under a plan on a machine that differs from the profile by ``truth``."""
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
    """The forward times of layers, with the factor of each rank."""
    groups = []
    stages = {run.first: number for number, stage in enumerate(plan.stages) for run in stage.runs}
    for name, seconds in predicted_groups(corrected(profile, Corrections(truth.links)), plan).items():
        first = stages[name] * plan.stage_devices
        ranks = tuple(range(first, first + plan.stage_devices))
        factors = truth.devices or (1.0,) * real.cluster.devices
        groups.append(LayerGroup(name, ranks, tuple(seconds * factors[rank] for rank in ranks)))
    return tuple(groups)
