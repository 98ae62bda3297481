"""The loss that a training loop receives, whose backward pass must reach parameters through the model only.

The gradient of a term that the loop adds (a penalty of ``parallel.parameters()``) would be summed over ranks, or be
that of shares of parameters; ``torch.autograd.grad`` and ``backward(inputs=...)`` would not reduce gradients. Both are
errors.
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
    """A loss that requires a gradient. Results of functions of it that require one are ``LossTensor``, too."""

    parameter_ids: Callable[[], frozenset[int]]  # identities of the model's parameters

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        inputs = list(tensors_of((args, options)))
        losses = [tensor for tensor in inputs if isinstance(tensor, LossTensor)]
        if func is torch.autograd.grad:
            raise InputError("loss", "torch.autograd.grad", _GRADIENTS)
        if func is Tensor.backward and (options.get("inputs") is not None or options.get("create_graph")):
            raise InputError("loss.backward", "inputs or create_graph", _GRADIENTS)
        with torch._C.DisableTorchFunctionSubclass():
            others = [tensor for tensor in inputs if tensor.requires_grad and not isinstance(tensor, LossTensor)]
            ids = losses[0].parameter_ids() if others else frozenset()
            if any(id(leaf) in ids for tensor in others for leaf in _leaves(tensor)):
                raise InputError("loss", "a term that the training loop adds", _PENALTY)
            result = func(*args, **options)
            for output in tensors_of(result):
                if output.requires_grad:
                    guard_loss(output, losses[0].parameter_ids)
                elif isinstance(output, LossTensor):
                    output.__class__ = Tensor  # type: ignore[assignment]
        return result


def guard_loss(loss: Tensor, parameter_ids: Callable[[], frozenset[int]]) -> Tensor:
    """Turn a loss that requires a gradient into a ``LossTensor``, in place."""
    if type(loss) is Tensor and loss.requires_grad:
        loss.__class__ = LossTensor
    if isinstance(loss, LossTensor):
        loss.parameter_ids = parameter_ids
    return loss


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The leaves of a tensor's autograd graph."""
    if tensor.grad_fn is None:
        yield tensor
        return
    pending, seen = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        pending += new


def global_mean(loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
    """The mean of the losses of a group's ranks, which work on ``shares`` equal shares or, in some layers, on parts of
    them; in backward each rank receives the gradient of its own loss."""
    mean: Tensor = _GlobalMean.apply(loss, group, shares)  # type: ignore[no-untyped-call]
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup, shares: int) -> Tensor:
        ctx.shares = shares
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.shares, None, None
