"""The optimizer that users hold while DeepSpeed's engine updates the parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer that was made over the parameters: its groups are that one's, so that schedulers of
    learning rates change them, and a step is the engine's.

    Args:
        inner: made by the user's factory.
        update: has the engine update the parameters.
        factory, options: what made it; None where the user did.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        update: Callable[[], None],
        factory: Callable[..., torch.optim.Optimizer] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.factory, self.options = factory, dict(options or {})
        # Not the base class' own: groups and states are those of the inner one, which DeepSpeed has made flat.
        self.inner, self._update = inner, update
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's: of flat shards, as DeepSpeed keeps them."""
        return self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update the parameters with the gradients of the last backward pass."""
        loss: Tensor | None = None if closure is None else closure()
        self._update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine drops gradients when it has used them."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's flat shards; the model's ``save`` is what to keep."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set this rank's flat shards."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        """The inner one, and who steps it."""
        return f"EngineOptimizer({self.inner!r})"
