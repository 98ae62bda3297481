"""Recomputation: throw activations away in forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.context import ring as _ring  # noqa: F401  (registers its operator)

Forward = Callable[..., Any]

_aten = torch.ops.aten
KEPT_OPERATORS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math_for_mps.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.galvatron.ring_attention.default,
    }
)
"""Operators whose outputs selective recomputation keeps: matmuls, convolutions and attention."""


Tracking = Sequence[Any]
"""Norms that track statistics of what they see in training."""


def recomputed(forward: Forward, recompute: Recompute, tracking: Tracking = ()) -> Forward:
    """A forward function that recomputes as told; ``forward`` itself where nothing is recomputed.

    ``FULL`` keeps only the inputs. ``SELECTIVE`` keeps what ``KEPT_OPERATORS`` return and recomputes the rest.
    Non-reentrant ``torch.utils.checkpoint``; random numbers (dropout) are the same both times.

    Args:
        forward: of a module.
        recompute: what is computed again.
        tracking: norms inside that track statistics; they take in what they see the first time only.
    """
    if recompute is Recompute.NONE:
        return forward
    forward = _keeping(forward) if recompute is Recompute.SELECTIVE else _casting(forward)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": functools.partial(_contexts, recompute, tracking)}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args, **options)

    return run


def apply_recompute(module: nn.Module, recompute: Recompute) -> None:
    """Make a module recompute, in place. Its hooks stay outside: what they do happens once."""
    if recompute is not Recompute.NONE:
        tracking = [one for one in module.modules() if isinstance(getattr(one, "running_mean", None), torch.Tensor)]
        module.forward = recomputed(module.forward, recompute, tracking)


def _casting(forward: Forward) -> Forward:
    """A forward whose weights autocast casts in every pass: their copies are kept no more than what is made of them."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with casting_anew():
            return forward(*args, **kwargs)

    return run


def _keeping(forward: Forward) -> Forward:
    """A forward in which activations (ReLU) that were asked to work in place make new tensors: what is kept may not
    change. Autocast casts weights in every pass: one that finds them cast by an earlier call of the layer would run
    fewer operators than the second time.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OutOfPlace(), casting_anew():
            return forward(*args, **kwargs)

    return run


def casting_anew() -> AbstractContextManager[Any]:
    """The autocast that is in force, without what it has cast before."""
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    if kind is None:
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


class _OutOfPlace(TorchFunctionMode):
    def __torch_function__(self, func: Forward, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return func(*args, **({**options, "inplace": False} if options.get("inplace") else options))


def _contexts(
    recompute: Recompute, tracking: Tracking
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What forward runs in the first time, and what the second time."""
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if recompute is Recompute.SELECTIVE:
        first, again = create_selective_checkpoint_contexts(_keep_expensive)  # type: ignore[no-untyped-call]
    return first, _untracked(again, tracking)


@contextmanager
def _untracked(context: AbstractContextManager[Any], tracking: Tracking) -> Iterator[None]:
    """The norms see a batch that they have seen before: their statistics stay as they are.

    Without tracking they would save other tensors for backward than the first time; so what is new weighs nothing.
    """
    before = [(one, one.momentum, one.num_batches_tracked) for one in tracking]
    for one, _, count in before:
        one.momentum = 0.0
        one.num_batches_tracked = None if count is None else count.clone()
    try:
        with context:
            yield
    finally:
        for one, momentum, count in before:
            one.momentum, one.num_batches_tracked = momentum, count


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
