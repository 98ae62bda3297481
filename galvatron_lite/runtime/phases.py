"""Training in phases with a plan each, and changes from one plan to another."""

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
    """What runs the training steps of a model, and changes its plan between them."""

    step: int
    """Steps done; set it when training continues from a checkpoint."""
    scheduler: Any
    """The scheduler of the learning rate, if any: set it, so that it has all parameter groups after a change."""

    @property
    def phase(self) -> PlannedPhase | None:
        """The phase of the next step; None without phases."""

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; see ``ParallelModel.train_step``."""
        ...


class Phases:
    """Training in phases: before the first step of a phase the model is split by its plan."""

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
    """Split a model by another plan, unless both split it alike; all ranks call it together.

    Returns:
        Seconds of the change; 0 if only micro-batches change.

    Raises:
        GalvatronError: the plan does not fit; the model and its plan do not change.
    """
    if same_split(parallel.plan, plan):
        parallel.plan = plan
        return 0.0
    return reshard(parallel, optimizer, plan, scheduler, batch=batch).seconds
