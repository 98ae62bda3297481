"""Gradients that refuse to be reduced by other code, where a rank's own give another norm than the whole model's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.sharding import Owned

_REDUCTIONS = frozenset((
    torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.norm, torch.norm, Tensor.norm,
    torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.max, Tensor.max, torch.amax, Tensor.amax, torch.dot,
    Tensor.dot, torch.vdot, Tensor.vdot, torch.var, Tensor.var, torch.std, Tensor.std,
))  # fmt: skip
_SAME = frozenset((
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach, torch.detach, Tensor.float, Tensor.double, Tensor.to, Tensor.view,
    Tensor.flatten, torch.flatten, Tensor.reshape, Tensor.ravel, Tensor.pow, torch.pow, Tensor.__pow__, Tensor.square,
    torch.square, Tensor.abs, torch.abs,
))  # fmt: skip
"""What norms written by hand begin with: its result is guarded as well."""
_REMEDY = (
    "A rank holds a part of the gradient under this plan, and the norm of a part is not the whole one's. Call "
    "parallel.clip_grad_norm(max_norm) in its place, which returns the whole model's norm before clipping, or give "
    "max_grad_norm to train_step. runtime.state.full_gradients(parallel) has whole gradients."
)
_SCALER = (
    "A rank sees overflow in its part of the gradient alone, and would skip a step that others take. Compute with "
    'precision="fp16" and call train_step, which scales the loss.'
)


def _guarded(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        raise InputError("gradient", "a GradScaler", _SCALER)
    if func in _REDUCTIONS:
        raise InputError("gradient", f"{getattr(func, '__name__', 'norm')} of this rank's part", _REMEDY)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
    if func in _SAME:
        _set_class(result, guarded=True)
    return result


class GuardedTensor(Tensor):
    """A part of a gradient, or a gradient beside others that are not here."""

    __torch_function__: Any = classmethod(_guarded)


class GuardedDTensor(DTensor):
    """The same under ZeRO."""

    __torch_function__: Any = classmethod(_guarded)


_GUARDED: dict[type, type] = {Tensor: GuardedTensor, DTensor: GuardedDTensor}
_PLAIN = {guarded: plain for plain, guarded in _GUARDED.items()}


def _set_class(gradient: Tensor, guarded: bool) -> None:
    """The very tensor changes its type: who else holds it (a bucket of gradients) goes on with it."""
    gradient.__class__ = (_GUARDED if guarded else _PLAIN).get(type(gradient), type(gradient))


def guard_gradients(owned: Iterable[Owned], guarded: bool = True) -> None:
    """Have what a user sees of reduced gradients refuse norms and other reductions; or no more, for an optimizer.

    ``torch.nn.utils.clip_grad_norm_`` and clipping written by hand would clip each rank by another norm.
    """
    for one in owned:
        gradient = one.updated.grad
        if gradient is not None:
            _set_class(gradient, guarded)


def hides_norm(owned: Iterable[Owned], stage_devices: int) -> bool:
    """Whether the norm of these gradients is not that of all of them: torch reduces norms over ranks only where every
    one is a DTensor of the same mesh, cut by nothing else.
    """
    held = list(owned)
    cut = [one for one in held if one.copies < stage_devices]
    meshes = {one.updated.device_mesh if isinstance(one.updated, DTensor) else None for one in held}
    sliced = any((one.shard is not None and one.shard.degree > 1) or one.spread is not None for one in cut)
    return bool(cut) and (sliced or None in meshes or len(meshes) > 1)
