"""How long the passes of a pipeline's stages take: what the order of passes may be made from."""

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
    forward: float  # of compute and what it waits for inside the stage
    backward: float  # the same for backward
    send_forward: float = 0.0  # of sending the boundary tensor on; 0 in the last stage
    send_backward: float = 0.0  # of sending the gradient back; 0 in the first stage
    weight: float = 0.0  # the part of ``backward`` that makes the gradients of weights, which nothing waits for

    @property
    def forward_total(self) -> float:
        """Forward and what it sends."""
        return self.forward + self.send_forward

    @property
    def backward_total(self) -> float:
        """Backward and what it sends."""
        return self.backward + self.send_backward

    @property
    def total(self) -> float:
        """Both passes and what they send."""
        return self.forward_total + self.backward_total


@dataclass(frozen=True, slots=True)
class PassOrder:
    """What a zero-bubble order of passes is made from; planner and runtime make the same order of it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stages: tuple[StageTimes, ...]  # in the order of the model
    hidden: float = 0.0  # share of a send that the sender's compute hides: it delays the receiver only
    # bytes held between the gradient of the input and that of the weights, for one byte held between forward and the
    # gradient of the input
    share: float = 1.0


def even_order(stages: int) -> PassOrder:
    """Where nothing was measured: every pass takes as long, and a micro-batch counts whole until its last one."""
    return PassOrder((StageTimes(1.0, 2.0, weight=1.0),) * stages)
