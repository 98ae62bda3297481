"""How long the passes of a pipeline's stages take: what the order of passes may be made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one micro-batch.

    Attributes:
        forward: of compute and what it waits for inside the stage.
        backward: the same for backward.
        send_forward: of sending the boundary tensor on; 0 in the last stage.
        send_backward: of sending the gradient back; 0 in the first stage.
        weight: the part of ``backward`` that makes the gradients of weights, which nothing waits for.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    forward: float
    backward: float
    send_forward: float = 0.0
    send_backward: float = 0.0
    weight: float = 0.0

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
    """What a zero-bubble order of passes is made from; planner and runtime make the same order of it.

    Attributes:
        stages: in the order of the model.
        hidden: share of a send that the sender's compute hides: it delays the receiver only.
        share: bytes held between the gradient of the input and that of the weights, for one byte held between forward
            and the gradient of the input.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stages: tuple[StageTimes, ...]
    hidden: float = 0.0
    share: float = 1.0


def even_order(stages: int) -> PassOrder:
    """Where nothing was measured: every pass takes as long, and a micro-batch counts whole until its last one."""
    return PassOrder((StageTimes(1.0, 2.0, weight=1.0),) * stages)
