"""One optimizer a stage behind one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from galvatron_lite.parallelism.cyclic.states import StageStates


class CyclicOptimizer:
    """The optimizers of the stages that a process holds; each steps when its stage's gradient is complete.

    Args:
        states: of these stages, by number.

    Attributes:
        stages: optimizers, by the stage's number.
    """

    def __init__(self, states: Mapping[int, StageStates]) -> None:
        self.stages: dict[int, torch.optim.Optimizer] = {
            stage: one.optimizer for stage, one in states.items() if one.optimizer is not None
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all stages, in order: options may be read and set between training steps."""
        return [group for _, one in sorted(self.stages.items()) for group in one.param_groups]
