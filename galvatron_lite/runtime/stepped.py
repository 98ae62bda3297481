"""The loss of a batch whose backward pass is done already, for loops that call ``loss.backward()`` themselves.

Under a pipeline, or with several micro-batches, forward and backward passes take turns: there is no moment between them
for the loop. So the model does both when it is called, and ``loss.backward()`` only multiplies the gradients by what
the loop made of the loss (1 where it is left as it is).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError


def stepped_loss(loss: Tensor, multiply: Callable[[Tensor], None]) -> Tensor:
    """A loss whose backward multiplies gradients that are there.

    Args:
        loss: of the batch.
        multiply: multiplies all gradients; raises where there are none.
    """
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    made: Tensor = _Stepped.apply(anchor, loss, multiply)  # type: ignore[no-untyped-call]
    return made


def check_no_gradients(present: bool) -> None:
    """Refuse gradients of an earlier batch: those of a new one would be summed over the ranks together with them.

    Raises:
        InputError: there are some.
    """
    if present:
        remedy = (
            "Those of the last batch are still there. Under this plan the model works a batch through in micro-batches "
            "by itself: call optimizer.zero_grad() before it, and plan with a larger --batch to accumulate more."
        )
        raise InputError("gradients", "of two batches", remedy)


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
