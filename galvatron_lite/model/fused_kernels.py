"""Attention and mixtures of experts as one operator each, as fused and grouped kernels run them."""

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


_SHAPES_ONLY = "This operator has shapes only; it is for tensors on the meta device."


@torch.library.custom_op("galvatron_lite::grouped", mutates_args=())
def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(rows, inner) by (experts, inner, columns): (rows, columns). Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@grouped.register_fake
def _grouped_shapes(rows: Tensor, weight: Tensor, _ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


@torch.library.custom_op("galvatron_lite::grouped_weight", mutates_args=())
def grouped_weight(rows: Tensor, gradient: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight. Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@grouped_weight.register_fake
def _weight_shapes(_rows: Tensor, _gradient: Tensor, _ends: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _keep_experts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward_experts(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    return grouped(gradient, weight.transpose(-2, -1), ends), grouped_weight(rows, gradient, ends, weight), None


grouped.register_autograd(_backward_experts, setup_context=_keep_experts)


class GroupedExperts(TorchFunctionMode):
    """While it is entered, ``grouped_mm`` on meta tensors is the operator above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one call, pass every other on."""
        # what torch.nn.functional.grouped_mm calls; modes are not asked about that one itself
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _shaped(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _shaped(func: Any, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    if offs is None or not mat_a.is_meta or mat_a.dim() != 2 or mat_b.dim() != 3:
        plain: Tensor = func(mat_a, mat_b, offs=offs, **options)
        return plain
    made: Tensor = grouped(mat_a, mat_b, offs)
    return made
