"""Delayed gradient descent as plainly as it can be written: one process, one loop, no pipeline and no messages.

What cyclic data parallelism must equal (Fournier and Oyallon 2024, arXiv:2403.08837, section 3). It shares no code with
the package: the rules are spelled out here again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Parameters = dict[str, Tensor]
Loss = Callable[[Callable[..., Any], Any], Tensor]
"""Of a function that calls the model, and a micro-batch; a scalar."""
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

RULES = ("dp", "cdp-v1", "cdp-v2")
PLAIN: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True, slots=True)
class Step:
    """What one training step did.

    Attributes:
        losses: of each micro-batch with the parameters that it used.
        gradients: means over the micro-batches, by parameter.
        parameters: after the step, theta_{t+1}; a copy.
        buffers: after the step (batch-norm statistics); a copy.
    """

    losses: list[float]
    gradients: Parameters
    parameters: Parameters
    buffers: Parameters

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def is_fresh(rule: str, worker: int, stage: int, count: int) -> bool:
    """Whether a worker uses theta_t of a stage instead of theta_{t-1}; both counted from 1."""
    return {"dp": True, "cdp-v1": False, "cdp-v2": worker + stage > count}[rule]


def call_whole(call: Callable[..., Any], micro_batch: Any) -> Tensor:
    """The loss of a model that returns it: a dict of named inputs, or a tuple of inputs."""
    loss: Tensor = call(**micro_batch) if isinstance(micro_batch, dict) else call(*micro_batch)
    return loss


def train_reference(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    batches: Sequence[Sequence[Any]],
    loss_fn: Loss = call_whole,
    optimizer_factory: OptimizerFactory = PLAIN,
    rule: str = "cdp-v2",
    scheduler_factory: SchedulerFactory | None = None,
) -> list[Step]:
    """Train a copy of a model with delayed gradients.

    Args:
        model: stays as it is. Its initial parameters are theta_0, and theta_{-1} too.
        stages: of each stage the names of its parameters, or of modules whose parameters are its own.
        batches: of each step the micro-batches, as many as stages.
        loss_fn: of a function that calls the model and of a micro-batch.
        optimizer_factory: makes the optimizer of a stage.
        rule: ``dp``, ``cdp-v1`` or ``cdp-v2``.
        scheduler_factory: makes the scheduler of a stage's optimizer; it steps after every training step.

    Returns:
        A value a step.
    """
    return list(reference_steps(model, stages, batches, loss_fn, optimizer_factory, rule, scheduler_factory))


def reference_steps(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    batches: Sequence[Sequence[Any]],
    loss_fn: Loss,
    optimizer_factory: OptimizerFactory,
    rule: str,
    scheduler_factory: SchedulerFactory | None = None,
) -> Iterator[Step]:
    """The steps of ``train_reference``, one by one."""
    model = copy.deepcopy(model)
    live = dict(model.named_parameters())
    stage_of = _stages_of(live, stages)
    optimizers = [
        optimizer_factory([live[name] for name, own in stage_of.items() if own == stage])
        for stage in range(1, len(stages) + 1)
    ]
    schedulers = [scheduler_factory(one) for one in optimizers] if scheduler_factory else []
    older = newer = _copies(live)
    for micro_batches in batches:
        count = len(micro_batches)
        assert count == len(stages), "as many micro-batches as stages"
        sums = {name: torch.zeros_like(value) for name, value in newer.items()}
        losses = []
        for worker, micro_batch in enumerate(micro_batches, 1):
            mixed = {
                name: (newer if is_fresh(rule, worker, stage, count) else older)[name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            loss = loss_fn(partial(_called, model, mixed), micro_batch)
            found = torch.autograd.grad(loss, list(mixed.values()))
            losses.append(float(loss.detach()))
            for name, gradient in zip(mixed, found, strict=True):
                sums[name] += gradient
        means = {name: total / count for name, total in sums.items()}
        for name, mean in means.items():
            live[name].grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        older, newer = newer, _copies(live)
        yield Step(losses, means, newer, _copies(dict(model.named_buffers())))


def _called(model: nn.Module, parameters: Parameters, *args: Any, **kwargs: Any) -> Any:
    return functional_call(model, parameters, args, kwargs)


def _copies(values: dict[str, Any]) -> Parameters:
    return {name: value.detach().clone() for name, value in values.items()}


def _stages_of(parameters: dict[str, Any], stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage of each parameter, counted from 1; each has exactly one."""
    found = {}
    for name in parameters:
        owners = [
            place
            for place, names in enumerate(stages, 1)
            if any(name == one or name.startswith(f"{one}.") for one in names)
        ]
        assert len(owners) == 1, f"{name} belongs to stages {owners}"
        found[name] = owners[0]
    return found
