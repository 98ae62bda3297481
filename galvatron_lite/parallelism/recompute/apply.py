"""Recomputation: throw activations away in forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.trace_meta import left_to_the_plan
from galvatron_lite.parallelism.context import ring as _ring  # noqa: F401  (registers its operator)
from galvatron_lite.parallelism.recompute.state import LayerState, as_before
from galvatron_lite.parallelism.recompute.sums import MUTATED, KeptSums

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


def recomputed(forward: Forward, recompute: Recompute, module: nn.Module | None = None) -> Forward:
    """A forward function that recomputes; ``forward`` itself where nothing is recomputed.

    ``FULL`` keeps only the inputs. ``SELECTIVE`` keeps what ``KEPT_OPERATORS`` return, of row-split matmuls the sum
    over the tensor group (``recompute.sums``), and recomputes the rest.
    Non-reentrant ``torch.utils.checkpoint``; random numbers (dropout) and the module's state (buffers, counters, caches
    that it is given) are the same both times, and what it changes is changed once.

    Args:
        forward: of a module.
        recompute: what is computed again.
        module: whose forward it is; without one only what it is given is looked at.

    The function raises ``InputError`` where the module overwrites a tensor that it is given.
    """
    if recompute is Recompute.NONE:
        return forward
    forward = _wrapped(forward, recompute)
    state = LayerState(nn.Module() if module is None else module)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def first(before: list[Any]) -> Any:
            options: Any = {"context_fn": functools.partial(_contexts, recompute, before)}
            with left_to_the_plan(decides=False):
                return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

        return state.call(first, (args, kwargs))

    return run


def apply_recompute(module: nn.Module, recompute: Recompute) -> None:
    """Make a module recompute, in place. Its hooks stay outside: what they do happens once."""
    if recompute is not Recompute.NONE:
        module.forward = recomputed(module.forward, recompute, module)


def _wrapped(forward: Forward, recompute: Recompute) -> Forward:
    """Autocast casts weights in every pass: their copies are kept no more than what is made of them, and a pass that
    finds them cast by an earlier call of the layer would run fewer operators than the second time.

    Under selective recomputation activations (ReLU) that were asked to work in place make new tensors: what is kept
    may not change.
    """
    selective = recompute is Recompute.SELECTIVE

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OutOfPlace() if selective else nullcontext(), casting_anew():
            try:
                return forward(*args, **kwargs)
            except RuntimeError as error:
                if not selective or MUTATED not in str(error):
                    raise
                remedy = "A layer changes in place what a matmul or convolution gave: plan it with full recomputation."
                raise InputError("recompute", Recompute.SELECTIVE.value, remedy) from error

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
    recompute: Recompute, before: list[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the first run, and of the second, which has the layer's state from before the first."""
    if recompute is not Recompute.SELECTIVE:
        return nullcontext(), as_before(before)
    first, again = create_selective_checkpoint_contexts(_keep_expensive)  # type: ignore[no-untyped-call]
    sums = KeptSums()
    return _nested(sums.active(again=False), first), _nested(as_before(before), sums.active(again=True), again)


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
