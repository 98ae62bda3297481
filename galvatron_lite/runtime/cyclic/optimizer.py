"""One optimizer a stage behind one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.states import StageStates

KEPT = "save(folder) of the model keeps the optimizers' states, and load(folder) sets them."
STEPPED = (
    "train_step(batch, optimizer) of the model steps each stage's optimizer when its gradient is complete. A scheduler "
    "that steps with it is given when it is made: optimizer(factory, scheduler=make_scheduler), where "
    "make_scheduler(optimizer) returns the scheduler of a stage."
)


class CyclicOptimizer(torch.optim.Optimizer):
    """The optimizers of the stages that a process holds; each steps when its stage's gradient is complete.

    It is an optimizer in name, so that whoever takes it for one (torch's schedulers do) is told what to do instead.

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
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all stages, in order: options may be read and set between training steps."""
        return [group for _, one in sorted(self.stages.items()) for group in one.param_groups]

    @property
    def step(self) -> NoReturn:
        """Refused where it is looked up, which is what a scheduler does."""
        raise _refused("step", STEPPED)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Refused."""
        raise _refused("zero_grad", "train_step(batch, optimizer) of the model begins each stage's gradient anew.")

    def state_dict(self) -> dict[str, Any]:
        """Refused."""
        raise _refused("state_dict", KEPT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused."""
        raise _refused("load_state_dict", KEPT)


def _refused(name: str, remedy: str) -> InputError:
    return InputError(f"{name} of the optimizer", "cyclic data parallelism", remedy)
