"""Attention as one operator, as fused kernels run it: nothing of size tokens x tokens is made or kept.

On the meta device PyTorch takes ``scaled_dot_product_attention`` apart into matmuls and a softmax. No device that the
planner plans for runs it so; CPU and GPU kernels keep queries, keys, values, output and one logarithm a row (Dao et
al., FlashAttention, 2022). ``FusedAttention`` replaces the call by an operator of that behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_SHAPES_ONLY = "This operator has shapes only; it is for tensors on the meta device."


@torch.library.custom_op("galvatron_lite::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (..., heads, queries, value size) and logarithms (..., heads, queries) in float32. Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@attention.register_fake
def _attention_shapes(
    query: Tensor, _key: Tensor, value: Tensor, _mask: Tensor | None, _causal: bool
) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    output = query.new_empty(*rows[:-2], rows[-1], rows[-2], value.shape[-1]).transpose(-3, -2)
    return output, query.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("galvatron_lite::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@attention_backward.register_fake
def _backward_shapes(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    query, key, value, mask, output, logs = ctx.saved_tensors
    return *attention_backward(gradient, query, key, value, mask, output, logs), None, None


attention.register_autograd(_backward, setup_context=_keep)


class FusedAttention(TorchFunctionMode):
    """While it is entered, ``scaled_dot_product_attention`` on meta tensors is the operator above.

    Modes do not see what a function they were asked about calls in turn; inside ``multi_head_attention_forward``
    (``nn.MultiheadAttention``) the function is therefore replaced by name.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one call, pass every other on."""
        if func is F.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with _replaced():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced() -> Iterator[None]:
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001  fused kernels draw the same numbers again in backward
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    if query.dim() == 3:
        lifted = _fused(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), is_causal=is_causal)
        return lifted.squeeze(1)
    output: Tensor = attention(query, key, value, attn_mask, is_causal)[0]
    return output
