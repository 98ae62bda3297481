"""Recomputation: throw activations away in forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from galvatron_lite.model.graph import Recompute

Forward = Callable[..., Any]

_aten = torch.ops.aten
KEPT_OPERATORS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math_for_mps.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operators whose outputs selective recomputation keeps: matmuls, convolutions and attention."""


def recomputed(forward: Forward, recompute: Recompute) -> Forward:
    """A forward function that recomputes as told; ``forward`` itself where nothing is recomputed.

    ``FULL`` keeps only the inputs. ``SELECTIVE`` keeps what ``KEPT_OPERATORS`` return and recomputes the rest.
    Non-reentrant ``torch.utils.checkpoint``; random numbers (dropout) are the same both times.
    """
    if recompute is Recompute.NONE:
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute is Recompute.SELECTIVE:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args, **options)

    return run


def apply_recompute(module: nn.Module, recompute: Recompute) -> None:
    """Make a module recompute, in place. Its hooks stay outside: what they do happens once."""
    if recompute is not Recompute.NONE:
        module.forward = recomputed(module.forward, recompute)


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
