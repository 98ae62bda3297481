"""Dynamic loss scaling for fp16 compute, whose range small gradients would underflow.

The rule is that of Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2) and ``torch.amp.GradScaler``: if the
gradient is not finite on any rank, the step is skipped and the scale halved; the scale doubles after a number of steps
in a row without. Gradients are summed in the precision of the parameters, so only fp16 compute can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError, NonFiniteLossError

SMALLEST = 2.0**-14
"""Below this scale (fp16's smallest normal number) gradients that are not finite are no overflow of fp16."""
_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class LossScaler:
    """Used like ``torch.amp.GradScaler``; ``train_step`` uses it automatically.

    ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``, on every rank alike; ``unscale_`` before
    clipping.

    Args:
        norm: of the full model's gradient, the same on every rank; all ranks call it.
        multiply: multiplies the full model's gradient by a number.
        scale: at the beginning.
        growth_factor: by which the scale grows.
        backoff_factor: by which it shrinks.
        growth_interval: number of steps in a row without overflow after which it grows.
    """

    def __init__(
        self,
        norm: Callable[[], Tensor],
        multiply: Callable[[Tensor], None],
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._norm, self._multiply = norm, multiply
        self._scale, self.growth_factor, self.backoff_factor = scale, growth_factor, backoff_factor
        self.growth_interval, self._taken = growth_interval, 0
        self._finite: bool | None = None

    def get_scale(self) -> float:
        """The present scale."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, in fp32 or higher precision."""
        return (loss.float() if loss.dtype is torch.float16 else loss) * self._scale

    def unscale_(self, optimizer: object = None) -> None:  # noqa: ARG002 - as torch's is called
        """Divide the gradient by the scale, once a step; needed before it is clipped or read."""
        if self._finite is None:
            norm = self._norm()
            self._finite = bool(norm.isfinite())
            self._multiply(torch.full_like(norm, 1.0 / self._scale))

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call the optimizer's step, unless the gradient is not finite on some rank."""
        self.unscale_(optimizer)
        return optimizer.step() if self._finite else None

    def update(self) -> None:
        """Change the scale after a step; raises as ``settle``."""
        if self._finite is None:
            raise InputError("scaler", "update", "Call scaler.step(optimizer) before it.")
        self.settle(self._finite)

    def settle(self, finite: bool) -> None:
        """Change the scale after a step that was taken (``finite``) or skipped.

        Raises:
            NonFiniteLossError: the gradient is not finite at the smallest scale.
        """
        self._finite = None
        self._taken = self._taken + 1 if finite else 0
        if not finite:
            self._scale *= self.backoff_factor
        elif self._taken == self.growth_interval:
            self._taken, grown = 0, self._scale * self.growth_factor
            self._scale = grown if math.isfinite(grown) else self._scale
        if not finite and self._scale < SMALLEST:
            raise NonFiniteLossError(
                f"The gradient is not finite at a loss scale of {self._scale}: fp16 is not why. The step was not "
                "taken. Look at the batch, lower the learning rate, or train in bf16 or fp32."
            )

    def state_dict(self) -> dict[str, float]:
        """The state, under the names of ``torch.amp.GradScaler``'s state."""
        values = (self._scale, self.growth_factor, self.backoff_factor, self.growth_interval, self._taken)
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, or that of a ``torch.amp.GradScaler``; InputError if an entry is missing."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise InputError("scaler state", ", ".join(missing), "Give what scaler.state_dict() returned.")
        self._scale, self.growth_factor, self.backoff_factor = (float(state[name]) for name in _STATE[:3])
        self.growth_interval, self._taken = (int(state[name]) for name in _STATE[3:])
