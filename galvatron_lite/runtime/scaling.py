"""Loss scaling for fp16 compute: gradients too small for fp16 are lifted by a factor that finds its own size.

The rule is that of Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2), as ``torch.amp.GradScaler`` has it: a step
whose gradient is not finite anywhere in the world is skipped and the scale halved; it doubles after so many steps in a
row that were taken. Gradients are summed in the parameters' own precision, so only fp16 compute can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError, NonFiniteLossError

SMALLEST = 2.0**-14
"""A scale below which gradients that are still not finite are no overflow of fp16 (its smallest normal number)."""
_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class LossScaler:
    """Used like ``torch.amp.GradScaler``; ``train_step`` uses it by itself.

    ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``, on every rank alike; ``unscale_`` before
    clipping.

    Args:
        norm: of the whole model's gradient, the same on every rank; all ranks call it.
        multiply: multiplies the whole model's gradient by a number.
        scale: to begin with.
        growth_factor: by which it grows.
        backoff_factor: by which it shrinks.
        growth_interval: after how many steps in a row that were taken it grows.
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
        """What the loss is multiplied by now."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, lifted; in fp32 at least."""
        return (loss.float() if loss.dtype is torch.float16 else loss) * self._scale

    def unscale_(self, optimizer: object = None) -> None:  # noqa: ARG002 - as torch's is called
        """Bring the gradient down again, once a step; needed before it is clipped or looked at."""
        if self._finite is None:
            norm = self._norm()
            self._finite = bool(norm.isfinite())
            self._multiply(torch.full_like(norm, 1.0 / self._scale))

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Take the optimizer's step, unless a gradient is not finite on any rank."""
        self.unscale_(optimizer)
        return optimizer.step() if self._finite else None

    def update(self) -> None:
        """Once a step, after it: grow or shrink; raises what ``settle`` does."""
        if self._finite is None:
            raise InputError("scaler", "update", "Call scaler.step(optimizer) before it.")
        self.settle(self._finite)

    def settle(self, finite: bool) -> None:
        """Grow or shrink after a step that was taken (``finite``) or skipped; NonFiniteLossError at the least."""
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
        """What to save: numbers, under the names of ``torch.amp.GradScaler``'s state."""
        values = (self._scale, self.growth_factor, self.backoff_factor, self.growth_interval, self._taken)
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved state, or that of a ``torch.amp.GradScaler``; InputError where an entry is missing."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise InputError("scaler state", ", ".join(missing), "Give what scaler.state_dict() returned.")
        self._scale, self.growth_factor, self.backoff_factor = (float(state[name]) for name in _STATE[:3])
        self.growth_interval, self._taken = (int(state[name]) for name in _STATE[3:])
