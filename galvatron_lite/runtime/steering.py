"""What trains the steps of a model under plans that change."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from galvatron_lite.plans.phases import PlannedPhase


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
