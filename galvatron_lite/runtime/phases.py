"""Training in phases, and going over from one plan to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import batch_size
from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase, same_split
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.reshard.reshard import reshard

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel


class Steering(Protocol):
    """What trains the steps of a model in its stead, changing its plan between them."""

    step: int
    """Steps trained; set it where training goes on from a checkpoint."""
    scheduler: Any
    """Of the optimizer's learning rate, where there is one: set it, so that it knows all groups behind a switch."""

    @property
    def phase(self) -> PlannedPhase | None:
        """The phase of the next step; None without phases."""

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; see ``ParallelModel.train_step``."""
        ...


class Phases:
    """Training in phases: before the first step of each the model is split for its plan."""

    def __init__(self, parallel: ParallelModel, plan: PhasedPlan) -> None:
        self.step, self.plan = 0, plan
        self.scheduler: Any = None
        self._parallel = parallel

    @property
    def phase(self) -> PlannedPhase:
        """The phase of the next step."""
        return self.plan.at(self.step)

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step, under the plan of its phase; all ranks call it together."""
        phase = self.phase
        if batch_size(batch) != phase.plan.global_batch:
            remedy = f"Step {self.step} is of phase {phase.name}: give {phase.plan.global_batch} (parallel.phase)."
            raise InputError("samples", batch_size(batch), remedy)
        go_over(self._parallel, optimizer, phase.plan, self.scheduler, batch)
        loss = self._parallel.plain_step(batch, optimizer, max_grad_norm)
        self.step += 1
        return loss


def go_over(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, plan: Plan, scheduler: Any = None, batch: Any = None
) -> float:
    """Split a model for another plan, where it is split otherwise; all ranks call it together.

    Returns:
        Seconds of the switch; 0 where only micro-batches change.

    Raises:
        GalvatronError: the plan does not fit; the model and its plan are what they were.
    """
    if same_split(parallel.plan, plan):
        parallel.plan = plan
        return 0.0
    return reshard(parallel, optimizer, plan, scheduler, batch=batch).seconds
