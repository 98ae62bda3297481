"""Training for ``scripts/cyclic_study``: data parallelism in one process, and cyclic data parallelism beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
from cyclic_study_tasks import MICRO_BATCHES, Batch, Task
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, Cyclic, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.cyclic.model import CyclicModel

PLAIN = "dp"
RULES = (PLAIN, CyclicRule.V1.value, CyclicRule.V2.value)
POINT = 10  # training steps that a point of a curve is the mean of
WARM_UP = 0.1
"""Of all steps; the learning rate rises linearly to its height, and falls linearly to 0 afterwards."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    task: str  # its name
    rule: str  # ``dp``, ``cdp-v1`` or ``cdp-v2``
    rate: float  # highest learning rate
    seed: int  # of initial values and of the order of batches
    steps: int  # training steps
    curve: list[float]  # training loss, means of every ``POINT`` steps
    figure: float  # of the trained model; see the task
    cpu: float  # seconds of training


def begin() -> None:
    """Make this process a world of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def share(step: int, steps: int) -> float:
    """Of the highest learning rate, in a training step."""
    rise = max(1, round(WARM_UP * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def cyclic_model(
    model: nn.Module, batch: Batch, rule: str, setting: CyclicSetting = CyclicSetting.SINGLE, early: bool = False
) -> CyclicModel:
    """A model of one block a stage; what is before and after the blocks goes with the first and the last one."""
    layers = discover_layers(model)
    blocks = [layer.name for layer in layers if layer.role is Role.BLOCK]
    before, after = ([layer.name for layer in layers if layer.role is role] for role in (Role.BEFORE, Role.AFTER))
    names = [[name] for name in blocks]
    names[0], names[-1] = before + names[0], names[-1] + after
    stages = tuple(Stage(tuple(LayerRun(name, name, 1, Strategy()) for name in stage)) for stage in names)
    count, samples = len(stages), len(next(iter(batch.values())))
    plan = Plan(
        PLAN_VERSION, "study", device_count(setting, count), samples, count, Schedule.CYCLIC, "fp32", stages,
        cyclic=Cyclic(CyclicRule(rule), setting),
    )  # fmt: skip
    return CyclicModel(model, plan, layers, device="cpu", early_release=early)


def train(task: Task, rule: str, rate: float, seed: int, steps: int) -> Run:
    """Train under a rule and judge the model."""
    batches, model = task.batches(steps, seed), task.make(seed)
    started = time.process_time()
    losses = (_train_plain if rule == PLAIN else partial(_train_cyclic, rule=rule))(task, model, batches, rate)
    cpu = time.process_time() - started
    curve = [fmean(losses[start : start + POINT]) for start in range(0, steps, POINT)]
    return Run(task.name, rule, rate, seed, steps, curve, task.judge(model), cpu)


def _train_plain(task: Task, model: nn.Module, batches: list[Batch], rate: float) -> list[float]:
    """Data parallelism: the mean gradient of all micro-batches at the same parameters."""
    optimizer = task.optimizer(model.parameters(), lr=rate)
    scheduler = LambdaLR(optimizer, partial(share, steps=len(batches)))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [model(**part) for part in micro_batches(batch)]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def _train_cyclic(task: Task, model: nn.Module, batches: list[Batch], rate: float, rule: str) -> list[float]:
    """Setting ``single``. A loss is that of the micro-batches that became known in a call."""
    cyclic = cyclic_model(model, batches[0], rule)
    scheduler = partial(LambdaLR, lr_lambda=partial(share, steps=len(batches)))
    optimizer = cyclic.optimizer(task.optimizer, scheduler, lr=rate)
    losses = [float(cyclic.train_step(batch, optimizer)) for batch in batches]
    cyclic.flush()
    model.load_state_dict(cyclic.full_state_dict())
    return losses


def micro_batches(batch: Batch) -> list[Batch]:
    """The parts of a global batch, in order."""
    parts = {name: tensor.chunk(MICRO_BATCHES) for name, tensor in batch.items()}
    return [{name: found[number] for name, found in parts.items()} for number in range(MICRO_BATCHES)]
