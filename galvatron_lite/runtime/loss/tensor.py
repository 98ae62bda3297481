"""The loss that a training loop gets: its backward pass starts there, and reaches parameters through the model alone.

What a loop adds to the loss (a penalty over ``parallel.parameters()``) would be summed over ranks as the gradient of
the model's own loss is, or meet shares of parameters; ``torch.autograd.grad`` and ``backward(inputs=...)`` would leave
gradients unreduced. Each is refused where the loop does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of

_PENALTY = (
    "It reads the model's parameters outside of the model, where gradients are not shared out as the plan has them. "
    "Compute it inside the model's forward, or leave it to the optimizer (weight_decay)."
)
_GRADIENTS = "Gradients are reduced over ranks by loss.backward() alone: call it, then read parameter.grad."


class LossTensor(Tensor):
    """A loss that requires a gradient; what is made of it with a gradient is one, too, all else is plain."""

    parameters: Callable[[], frozenset[int]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        losses = [one for one in tensors_of((args, options)) if isinstance(one, LossTensor)]
        if func is torch.autograd.grad:
            raise InputError("loss", "torch.autograd.grad", _GRADIENTS)
        if func is Tensor.backward and (options.get("inputs") is not None or options.get("create_graph")):
            raise InputError("loss.backward", "inputs or create_graph", _GRADIENTS)
        with torch._C.DisableTorchFunctionSubclass():
            every = tensors_of((args, options))
            others = [one for one in every if one.requires_grad and not isinstance(one, LossTensor)]
            ids = losses[0].parameters() if others else frozenset()
            if any(id(leaf) in ids for one in others for leaf in _leaves(one)):
                raise InputError("loss", "a term that the training loop adds", _PENALTY)
            result = func(*args, **options)
            for one in tensors_of(result):
                if one.requires_grad:
                    guard_loss(one, losses[0].parameters)
                elif isinstance(one, LossTensor):
                    one.__class__ = Tensor  # type: ignore[assignment]
        return result


def guard_loss(loss: Tensor, parameters: Callable[[], frozenset[int]]) -> Tensor:
    """The same tensor as a ``LossTensor``; as it is where it requires no gradient."""
    if type(loss) is Tensor and loss.requires_grad:
        loss.__class__ = LossTensor
    if isinstance(loss, LossTensor):
        loss.parameters = parameters
    return loss


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Leaves that a backward pass from a tensor gives gradients to."""
    if tensor.grad_fn is None:
        yield tensor
        return
    waiting, met = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        new = {other for other, _ in node.next_functions if other is not None} - met
        met |= new
        waiting += new


def global_mean(loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
    """The mean of equal shares' losses; backward gives each rank its own share's part."""
    mean: Tensor = _GlobalMean.apply(loss, group, shares)  # type: ignore[no-untyped-call]
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
        ctx.shares = shares
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.shares, None, None
