"""Runs with planted causes, on every rank: blocks take known times, so that what is predicted is what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.read import TRACES
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe
from tests.known_time import KnownClock, retimed
from tests.runtime.monitor import slow_link
from tests.runtime.monitor.slow_link import Link

WIDTH, BATCH, BLOCKS = 256, 8, 4
FORWARD, BACKWARD = 0.01, 0.02
"""Seconds of a block's pass of a micro-batch."""
BANDWIDTH, LATENCY = 2e8, 1e-3
MORE = 0.1
"""Seconds that are planted, in forward; twice that in backward."""
SLOWER = 0.5
"""Seconds that the gradients' messages take longer, all together."""


class Plants:
    """What is planted now."""

    blocks: dict[int, float] = {}  # noqa: RUF012 - changed by the jobs of one process
    optimizer = 0.0


class _Work(torch.autograd.Function):
    """Work that takes a known time and no processor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int) -> Tensor:
        ctx.number = number
        if not tensor.is_meta:
            Link.clock.work(FORWARD + Plants.blocks.get(number, 0.0))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Link.clock.work(BACKWARD + 2 * Plants.blocks.get(ctx.number, 0.0))
        return gradient, None


class _Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), number

    def forward(self, hidden: Tensor) -> Tensor:
        worked: Tensor = _Work.apply(self.linear(hidden), self.number)  # type: ignore[no-untyped-call]
        return hidden + torch.tanh(worked)


class Workers(nn.Module):
    """Blocks that take known times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(number) for number in range(BLOCKS))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, targets)


def make_workers() -> Workers:
    torch.manual_seed(0)
    return Workers()


def make_batch() -> dict[str, Tensor]:
    inputs, targets = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return {"inputs": inputs, "targets": targets}


def known_profile() -> Profile:
    """Of two processes; blocks take the time that their work does, whatever their samples."""
    device = Device("cpu", 2**32, 1e10, {"fp32": 4e10}, source="a test")
    cluster = Cluster("pair", (DeviceGroup(device, 2),), (Level("wire", 2, BANDWIDTH, LATENCY),))
    profile = estimate_profile(trace(make_workers(), make_batch()), cluster, precision="fp32", name="workers")
    blocks = {layer.kind for layer in profile.graph.layers if layer.role is Role.BLOCK}
    points = tuple(
        replace(point, forward=FORWARD, backward=BACKWARD) if point.kind in blocks else point
        for point in profile.layers
    )
    return replace(profile, layers=points)


def plan_of(profile: Profile, stages: int = 1, microbatches: int = 1) -> Plan:
    """Two replicas; or two stages."""
    names = [layer.name for layer in profile.graph.layers]
    strategy = Strategy(data=2 // stages)
    halves = [names] if stages == 1 else [names[: len(names) // 2], names[len(names) // 2 :]]
    # each block by itself, so that each is a group of layers
    made = tuple(Stage(tuple(LayerRun(name, name, 1, strategy) for name in half)) for half in halves)
    plan = Plan(PLAN_VERSION, "workers", 2, BATCH, microbatches, Schedule.ONE_F_ONE_B, "fp32", made)
    return evaluate(profile, plan)


class Trained:
    """A model that trains on this rank, and what is planted into it.

    Args:
        folder: of the test.
        stages, microbatches: of the plan.
    """

    def __init__(self, folder: Path, stages: int = 1, microbatches: int = 1) -> None:
        self.folder, self.profile = folder, known_profile()
        self.plan = plan_of(self.profile, stages, microbatches)
        model, batch = make_workers(), make_batch()
        self.parallel = ParallelModel(model, self.plan, discover_layers(model, batch), batch, device="cpu")
        self.optimizer = self.parallel.optimizer(torch.optim.SGD, lr=0.01)
        self.optimizer.register_step_pre_hook(lambda *_: Link.clock.work(Plants.optimizer))

    def run(self, name: str) -> float:
        """Train some steps into a folder of their own, the last two of them traced; seconds of the second."""
        first = self.parallel.step
        traced = range(first + 2, first + 4)
        recorder = observe(self.parallel, ObserverOptions(self.folder / name, False, traced), self.profile)
        seconds = []
        for _ in range(4):
            dist.barrier()
            before = Link.clock.now()
            self.parallel.train_step(make_batch(), self.optimizer)
            seconds.append(Link.clock.now() - before)
        assert recorder is not None
        recorder.finish()
        (trace,) = (self.folder / name / TRACES).glob(f"rank-{dist.get_rank():05d}-*")
        retimed(trace)
        return seconds[1]


@contextmanager
def planted(blocks: dict[int, float], optimizer: float = 0.0) -> Iterator[None]:
    Plants.blocks, Plants.optimizer = blocks, optimizer
    yield
    Plants.blocks, Plants.optimizer = {}, 0.0


def plant_all(folder: str) -> dict[str, float]:
    """Every cause in a run of its own; seconds of a step of each, on this rank."""
    clock = KnownClock()
    slow_link.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        return _plant_all(folder)


def _plant_all(folder: str) -> dict[str, float]:
    trained = Trained(Path(folder))
    every, own = dict.fromkeys(range(BLOCKS), MORE / 2), dist.get_rank() == 1
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: planted({}),
        "layers": lambda: planted({1: MORE}),
        "rank": lambda: planted(every if own else {}),
        "layers of a rank": lambda: planted({2: MORE} if own else {}),
        "optimizer": lambda: planted({}, 3 * MORE),
    }
    found = {}
    for name, plant in runs.items():
        with plant():
            found[name] = trained.run(name)
    size = sum(parameter.nbytes for parameter in make_workers().parameters())
    Link.per_byte += SLOWER / size
    found["collective"] = trained.run("collective")
    return found


def plant_in_a_stage(folder: str) -> float:
    """A block of the second of two stages takes longer."""
    clock = KnownClock()
    slow_link.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        trained = Trained(Path(folder), stages=2, microbatches=4)
        with planted({3: MORE}):
            return trained.run("stage")
