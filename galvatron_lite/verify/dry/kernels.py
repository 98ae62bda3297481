"""Kernels of accelerators, where a dry run's tensors are said to lie on the CPU.

What autograd keeps for backward depends on them: a CPU runs dropout and RMSNorm in steps, and has no attention that
drops weights without keeping them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.parallelism.context import attention
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor
from galvatron_lite.runtime.activations.traffic import LayoutTensor

Function = Callable[..., Any]


@contextmanager
def accelerated() -> Iterator[None]:
    """Run as one kernel each, keeping what that keeps, what a CPU runs in steps.

    The functions themselves are replaced: a mode is off while backward runs, which computes layers again.
    """
    before = {(home, name): getattr(home, name) for (home, name) in _KERNELS}
    for (home, name), kernel in _KERNELS.items():
        setattr(home, name, wraps(before[home, name])(partial(_on_plain, kernel, before[home, name])))
    try:
        yield
    finally:
        for (home, name), function in before.items():
            setattr(home, name, function)


def _on_plain(kernel: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Tensors that wrap others take the function apart first."""
    wrapped = any(isinstance(one, (ShardedTensor, LayoutTensor)) for one in (*args, *kwargs.values()))
    return function(*args, **kwargs) if wrapped else kernel(function, *args, **kwargs)


def _attention(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Leave the dropout out: one kernel keeps no mask of it, but the state that its random numbers began with.

    CPUs have no such kernel for a mask that is trained (a relative bias).
    """
    kwargs.pop("dropout_p", None)
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is None or not mask.requires_grad or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    operands = [*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args) :])]
    if torch.is_autocast_enabled("cpu"):
        operands = [operand.to(torch.get_autocast_dtype("cpu")) for operand in operands]
    return _BiasedAttention.apply(*operands, mask.to(operands[0].dtype))  # type: ignore[no-untyped-call]


def _dropout(
    function: Function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False  # noqa: A002
) -> Any:  # fmt: skip
    if not training or not p or inplace:
        return function(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _rms_norm(
    function: Function, input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None  # noqa: A002
) -> Any:  # fmt: skip
    """Keeps its input, and a reciprocal root in float32 of each row; of operands of two precisions it is in steps."""
    if weight is not None and weight.dtype != input.dtype:
        return function(input, shape, weight, eps)
    return _RmsNorm.apply(input, weight, len(shape))  # type: ignore[no-untyped-call]


def _narrow(function: Function, *args: Any, **kwargs: Any) -> Any:
    """In the precision of its input: autocast widens it on CPUs alone."""
    with torch.autocast("cpu", enabled=False):
        return function(*args, **kwargs)


class _BiasedAttention(torch.autograd.Function):
    """The tensors of one kernel, and no values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        *batch, heads, queries, _ = query.shape
        output = query.new_empty((*batch, queries, heads, value.shape[-1])).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(saved_tensor) for saved_tensor in ctx.saved_tensors[:4])


class _RmsNorm(torch.autograd.Function):
    """The tensors of one kernel, and no values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        roots = value.new_empty(value.shape[: value.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(value, roots, weight)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        value, _, weight = ctx.saved_tensors
        return torch.empty_like(value), None if weight is None else torch.empty_like(weight), None


_KERNELS: dict[tuple[Any, str], Function] = {
    (functional, "scaled_dot_product_attention"): _attention,
    (attention, "scaled_dot_product_attention"): _attention,
    (functional, "dropout"): _dropout,
    (functional, "rms_norm"): _rms_norm,
    (functional, "avg_pool3d"): _narrow,
}
