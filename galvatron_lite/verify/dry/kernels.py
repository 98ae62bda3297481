"""Stand-ins for the kernels of GPUs in dry runs, whose tensors have a CPU as their device.

What autograd keeps for backward depends on the kernel. A CPU runs dropout and RMSNorm as several operations, and its
attention with dropout keeps all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.model.trace.operators import attention_output
from galvatron_lite.parallelism.context import attention
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor
from galvatron_lite.runtime.activations.traffic import LayoutTensor

Function = Callable[..., Any]


@contextmanager
def accelerated() -> Iterator[None]:
    """Keep for backward what GPU kernels keep.

    Functions of torch are replaced, because modes are off during backward, where recomputation calls them.
    """
    originals = {(module, name): getattr(module, name) for (module, name) in _KERNELS}
    for (module, name), kernel in _KERNELS.items():
        original = originals[module, name]
        setattr(module, name, wraps(original)(partial(_run_kernel, kernel, original)))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def _run_kernel(kernel: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel; on wrapped tensors the original function, which calls it again on their contents."""
    wrapped = any(isinstance(argument, (ShardedTensor, LayoutTensor)) for argument in (*args, *kwargs.values()))
    return function(*args, **kwargs) if wrapped else kernel(function, *args, **kwargs)


def _attention(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Run without dropout: a fused kernel keeps the random state instead of a mask.

    CPUs have no fused kernel for a mask that needs a gradient (a relative bias).
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
    """Keep the input, and a reciprocal root in float32 of each row; GPUs have no kernel for mixed precisions either."""
    if weight is not None and weight.dtype != input.dtype:
        return function(input, shape, weight, eps)
    return _RmsNorm.apply(input, weight, len(shape))  # type: ignore[no-untyped-call]


def _narrow(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Run in the precision of the input, which autocast widens only on CPUs."""
    with torch.autocast("cpu", enabled=False):
        return function(*args, **kwargs)


class _BiasedAttention(torch.autograd.Function):
    """Attention with a trained mask as one kernel, without values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        output = attention_output(query, value)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(saved_tensor) for saved_tensor in ctx.saved_tensors[:4])


class _RmsNorm(torch.autograd.Function):
    """RMSNorm as one kernel, without values."""

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
