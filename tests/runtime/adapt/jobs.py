"""What the tests of adapting run on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.cluster.cluster import Cluster, Device, DeviceGroup, Level
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.trace import trace
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.monitor import Monitor
from galvatron_lite.runtime.adapt.planning import plan_name
from galvatron_lite.runtime.adapt.schema import Adapt, Decision, Planner
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed
from tests.runtime.adapt import slow_link

CONFIG = GPTConfig(vocab=64, layers=4, hidden=128, heads=4, sequence=16)
BATCH = 16
BANDWIDTH = 1e8
WIDTH, WORK = 256, 1e-3
"""Of a block: its width, and seconds of a sample's forward pass."""
FACTOR = 24.0
WINDOW = 8
SETTINGS = Adapt(window=WINDOW, warm_up=2, threshold=0.25, cool_down=5 * WINDOW, steps=5000, planner=Planner.INLINE)


@dataclass(frozen=True)
class Course:
    """What happened: seconds of steps before the link became slow, under it, and at the end; the losses."""

    quick: float
    slow: float
    after: float
    decisions: list[Decision]
    plans: list[str]
    losses: list[float]


def make_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    rows = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.sequence + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def slow_profile() -> Profile:
    """An estimate for two processes over the link, of a processor that is not this one's."""
    device = Device("cpu", 2**32, 1e10, {"fp32": 4e10}, source="a test")
    cluster = Cluster("pair", (DeviceGroup(device, 2),), (Level("wire", 2, BANDWIDTH, 1e-5),))
    return estimate_profile(trace(make_model(), make_batch(0)), cluster, precision="fp32", name="gpt")


class _Work(torch.autograd.Function):
    """Work that takes a known time and no processor: on a loaded machine it takes as long."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            time.sleep(WORK * tensor.shape[0])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * WORK * gradient.shape[0])
        return gradient


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        worked: Tensor = _Work.apply(self.linear(hidden))  # type: ignore[no-untyped-call]
        return hidden + torch.tanh(worked)


class Workers(nn.Module):
    """Blocks of many parameters and little to hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return nn.functional.mse_loss(inputs, targets)


def make_workers() -> Workers:
    torch.manual_seed(0)
    return Workers()


def worked_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    inputs, targets = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"inputs": inputs, "targets": targets}


def known_profile() -> Profile:
    """Two processes over the link; blocks take the time that their work does."""
    device = Device("cpu", 2**32, 1e10, {"fp32": 4e10}, source="a test")
    cluster = Cluster("pair", (DeviceGroup(device, 2),), (Level("wire", 2, BANDWIDTH, 1e-3),))
    profile = estimate_profile(trace(make_workers(), worked_batch(0)), cluster, precision="fp32", name="workers")
    kinds = {layer.kind for layer in profile.graph.layers if layer.role is Role.BLOCK}
    points = tuple(
        replace(point, forward=WORK * point.samples, backward=2 * WORK * point.samples)
        if point.kind in kinds
        else point
        for point in profile.layers
    )
    return replace(profile, layers=points)


def train_over_slow_link(folder: str, quick: int, slow: int) -> Course:
    """So many steps over a quick link, then over one that is slower by a known factor."""
    slow_link.join(Path(folder), BANDWIDTH)
    profile = known_profile()
    plan = find_plan(profile, devices=2, global_batch=BATCH, budget=2**31)
    model, example = make_workers(), worked_batch(0)
    parallel = ParallelModel(model, plan, discover_layers(model, example), example, device="cpu")
    log = str(Path(folder) / "log.jsonl")
    monitor = Monitor(parallel, profile, replace(SETTINGS, log=log))
    parallel.steering = monitor
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    seconds, plans, losses = list[float](), list[str](), list[float]()
    for step in range(quick + slow):
        slow_link.Link.per_byte = (1.0 if step < quick else FACTOR) / BANDWIDTH
        dist.barrier()
        before = time.perf_counter()
        losses.append(float(parallel.train_step(worked_batch(step), optimizer)))
        seconds.append(time.perf_counter() - before)
        plans.append(plan_name(parallel.plan))
    return Course(
        median(seconds[WINDOW:quick]), median(seconds[quick + 1 : quick + WINDOW]), median(seconds[-WINDOW:]),
        list(monitor.decisions), plans, losses,
    )  # fmt: skip


def train_alone(steps: int) -> list[float]:
    """The losses of plain PyTorch."""
    return _losses(make_model(), make_batch, steps)


def work_alone(steps: int) -> list[float]:
    """The same of the other model."""
    return _losses(make_workers(), worked_batch, steps)


def _losses(model: Any, batches: Callable[[int], dict[str, Tensor]], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(**batches(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run_out_of_memory(folder: str, everywhere: bool) -> tuple[list[float], list[int], str]:
    """Five steps, in the third of which a block fails to get memory under the first plan; on rank 1 alone, or on both.

    Returns:
        The losses, the predicted bytes of the plan of each step, and what the error says.
    """
    profile, model = slow_profile(), make_model()
    # stages of a pipeline would wait for one another before they fail
    single = Fixed(pipeline=1)
    plan = find_plan(profile, devices=2, global_batch=BATCH, budget=2**31, fixed=single)
    parallel = ParallelModel(model, plan, discover_layers(model, make_batch(0)), make_batch(0), device="cpu")
    settings = Adapt(planner=Planner.INLINE, log=str(Path(folder) / "log.jsonl"))
    parallel.steering = monitor = Monitor(parallel, profile, settings)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)

    def fail(*_: object) -> None:
        if monitor.step == 2 and parallel.plan is plan and (everywhere or dist.get_rank() == 1):
            raise torch.OutOfMemoryError("as injected")

    next(iter(parallel.structures)).register_forward_pre_hook(fail)
    losses, bytes_of = list[float](), list[int]()
    for step in range(5):
        if not everywhere and step == 2 and dist.get_rank() == 0:
            break  # it would wait in a collective for rank 1
        try:
            losses.append(float(parallel.train_step(make_batch(step), optimizer)))
        except MemoryError as error:
            return losses, bytes_of, str(error)
        prediction = evaluate(profile, parallel.plan).prediction
        bytes_of.append(0 if prediction is None else prediction.peak_memory)
    return losses, bytes_of, ""
