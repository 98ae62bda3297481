"""Seconds of the passes of pipeline stages, from which zero-bubble schedules derive their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one micro-batch."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    forward: float  # compute and exposed communication inside the stage
    backward: float
    send_forward: float = 0.0  # sending the boundary tensor; 0 in the last stage
    send_backward: float = 0.0  # sending its gradient; 0 in the first stage
    weight: float = 0.0  # the part of ``backward`` for gradients of weights, which nothing waits for

    @property
    def forward_total(self) -> float:
        """Forward and its send."""
        return self.forward + self.send_forward

    @property
    def backward_total(self) -> float:
        """Backward and its send."""
        return self.backward + self.send_backward

    @property
    def total(self) -> float:
        """Both passes and their sends."""
        return self.forward_total + self.backward_total


@dataclass(frozen=True, slots=True)
class PassOrder:
    """The figures that determine a zero-bubble order of passes, the same in planner and runtime."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stages: tuple[StageTimes, ...]  # in the order of the model
    hidden: float = 0.0  # share of a send that delays only the receiver, as the sender's compute hides it
    # bytes held from the gradient of the input to that of the weights, over bytes held from forward to the gradient of
    # the input
    share: float = 1.0


def even_order(stages: int) -> PassOrder:
    """Return the order without measurements: passes take equally long, and hold all memory until the last of them."""
    return PassOrder((StageTimes(1.0, 2.0, weight=1.0),) * stages)
