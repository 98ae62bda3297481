"""The loss of a batch whose backward pass is done already, for loops that call ``loss.backward()`` themselves.

Under a pipeline, or with several micro-batches, forward and backward passes take turns: there is no moment between them
for the loop. So the model does both when it is called, and ``loss.backward()`` only multiplies the gradients by what
the loop made of the loss (1 where it is left as it is).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.gradient_guard import guard_gradients
from galvatron_lite.runtime.setup import StageRuntime


def stepped_loss(loss: Tensor, multiply: Callable[[Tensor], None]) -> Tensor:
    """A loss whose backward multiplies gradients that are there.

    Args:
        loss: of the batch.
        multiply: multiplies all gradients; raises where there are none.
    """
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    made: Tensor = _Stepped.apply(anchor, loss, multiply)  # type: ignore[no-untyped-call]
    return made


class GradientsAside:
    """Gradients of earlier batches, which the next one may not meet before it is summed over ranks; they take their
    room a second time.

    Args:
        runtimes: of the model's parts on this rank; their gradients are taken away.
        pending: whether backward of the loss of the batch before was not called yet.

    Raises:
        InputError: there are gradients whose loss is pending, or in host memory.
    """

    def __init__(self, runtimes: Sequence[StageRuntime], pending: bool) -> None:
        held = [one for runtime in runtimes for one in runtime.owned if one.gradient is not None]
        if held and (pending or any(one.host is not None for one in held)):
            remedy = (
                "Those of the last batch are still there. Under this plan the model works a batch through in "
                "micro-batches by itself: call loss.backward() before the next batch, or optimizer.zero_grad(); with "
                "offload plan a larger --batch to accumulate more."
            )
            raise InputError("gradients", "of two batches", remedy)
        guard_gradients(held, guarded=False)
        self._held = [(one, one.reduced.grad.clone()) for one in held if one.reduced.grad is not None]
        for one, _ in self._held:
            one.reduced.grad = None

    def add(self) -> None:
        """Add them to the new ones."""
        for one, gradient in self._held:
            new = one.reduced.grad
            one.reduced.grad = gradient if new is None else new.add_(gradient)


def check_gradients(present: bool) -> None:
    """Refuse a backward pass whose gradients were thrown away.

    Raises:
        InputError: there are none.
    """
    if not present:
        remedy = "Under this plan they are made when the model is called: call optimizer.zero_grad() before that."
        raise InputError("gradients", "none", remedy)


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, multiply: Callable[[Tensor], None]) -> Tensor:  # noqa: ARG004
        ctx.multiply, ctx.is_done = multiply, False
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_done:
            raise InputError("loss.backward", "a second time", "Gradients were made when the model was called, once.")
        ctx.is_done = True
        ctx.multiply(gradient)
        return torch.zeros_like(gradient), None, None
