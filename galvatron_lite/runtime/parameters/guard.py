"""What a training loop sees of shared gradients and parameters: the full values, or an error where it has a part.

A part is guarded: code other than this package's, and optimizers', may compute with its elements one by one, but not
with several of them, nor read them. DTensors of ZeRO compute with the full tensor; their single values are read whole.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of

if TYPE_CHECKING:
    from galvatron_lite.runtime.parameters.managed import ManagedParameter

_MIXING = frozenset((
    "_foreach_norm", "vector_norm", "matrix_norm", "norm", "sum", "nansum", "mean", "nanmean", "max", "min", "amax",
    "amin", "aminmax", "dot", "vdot", "inner", "var", "std", "var_mean", "std_mean", "logsumexp", "prod", "median",
    "quantile", "any", "all", "count_nonzero", "histc", "histogram", "argmax", "argmin", "sort", "argsort", "topk",
    "kthvalue", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax", "renorm", "matmul",
    "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot", "dist", "cdist", "trace",
    "equal", "allclose", "cov", "corrcoef", "unique", "nonzero",
))  # fmt: skip
"""Functions whose results are made of several elements, by name."""
_COMPOSED = ("torch.nn.functional", "torch.linalg", "torch._C._linalg", "torch.fft")
_READS = frozenset((
    "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__complex__",
))  # fmt: skip
_SELECTING = frozenset(("__getitem__", "index_select", "gather", "take", "masked_select", "__get__"))
_TORCH, _PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])
_PLAIN_CALLS = frozenset(("_save_to_state_dict", "__deepcopy__", "__reduce_ex__"))  # torch's, whose results are kept
_REMEDY = (
    "A rank holds a part of the gradient under this plan, and the norm of a part is not the whole one's. Call "
    "parallel.clip_grad_norm(max_norm) in its place, which returns the whole model's norm before clipping, or give "
    "max_grad_norm to train_step. runtime.parameters.full_state.full_gradients(parallel) has whole gradients."
)
_VALUES = (
    "A rank holds a part of the parameter under this plan. parallel.full_state_dict(), on all ranks, has all of it."
)
_COUNTED = "Under this plan a rank has a part of the parameters: numel() counts those of this one."
_SCALER = (
    "A rank sees overflow in its part of the gradient alone, and would skip a step that others take. Compute with "
    'precision="fp16" and call train_step, which scales the loss.'
)


def _guarded(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name, options, outside = getattr(func, "__name__", ""), kwargs or {}, _is_called_outside()
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise InputError("gradient", "a GradScaler", _SCALER)
        if not outside:
            return func(*args, **options)
        taken = list(tensors_of((args, options)))
        guarded = [one for one in taken if _is_guarded(one)]
        home = getattr(func, "__module__", None) or ""
        if name in _MIXING or name in _READS or home.startswith(_COMPOSED):
            raise _error(guarded, name)
        result = func(*args, **options)
        items = max((one.numel() for one in guarded), default=0)
        for one in tensors_of(result):
            if not any(one is other for other in taken):
                if one.numel() < items and one._base is None and name not in _SELECTING:
                    raise _error(guarded, name)
                set_guard(one, guarded=True)
    return result


def _error(guarded: Sequence[Tensor], name: str) -> InputError:
    if any(isinstance(one, nn.Parameter) for one in guarded):
        return InputError("parameter", f"{name} of this rank's part", _VALUES)
    return InputError("gradient", f"{name} of this rank's part", _REMEDY)


def _is_called_outside() -> bool:
    """Whether code that is neither torch's nor this package's computes with a part."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        if frame.f_code.co_name in _PLAIN_CALLS:
            return False
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_PACKAGE)


def _data(tensor: Tensor) -> Tensor:
    vars(tensor)[_TAKEN] = True
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def _plainly(tensor: Tensor, name: str, argument: Any) -> Any:
    """What a method of the plain tensor gives, for copies and files, which know no other types."""
    shown = type(tensor)
    set_guard(tensor, guarded=False)
    try:
        return getattr(tensor, name)(argument)
    finally:
        tensor.__class__ = shown


_TAKEN = "_data_was_taken"


def _counted(tensor: Tensor) -> int:
    if _is_called_outside():
        warnings.warn(_COUNTED, stacklevel=2)
    return Tensor.numel(tensor)


@cache
def _shown_as(kind: type, guarded: bool, watched: bool, counted: bool) -> type:
    """A subclass of a type of tensors: guarded; known by whether its ``data`` was taken; warning of its ``numel()``."""
    if not (guarded or watched or counted):
        return kind
    body: dict[str, Any] = {name: partialmethod(_plainly, name) for name in ("__reduce_ex__", "__deepcopy__")}
    if guarded:
        body["__torch_function__"] = classmethod(_guarded)
    if counted:
        body |= {"numel": _counted, "nelement": _counted}
    if watched:
        body["data"] = property(_data, Tensor.data.__set__)  # type: ignore[attr-defined]
    shown: type = type(kind)(f"Shown{kind.__name__}", (kind,), body)
    _PLAIN[shown] = kind
    return shown


_PLAIN: dict[type, type] = {}
"""Types of tensors by those that they are shown as."""


def _is_guarded(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and "__torch_function__" in vars(type(tensor))


def set_guard(tensor: Tensor, guarded: bool, watched: bool = False, counted: bool = False) -> None:
    """The very tensor changes its type: who else holds it (a bucket of gradients) goes on with it."""
    kind = _PLAIN.get(type(tensor), type(tensor))
    if kind in (Tensor, nn.Parameter, DTensor):
        tensor.__class__ = _shown_as(kind, guarded, watched, counted)


def was_taken(tensors: Iterable[Tensor]) -> bool:
    """Whether a loop took the ``data`` of any since this was last asked: it may have changed it, unseen by versions."""
    taken = [vars(one).pop(_TAKEN, False) for one in tensors]
    return any(taken)


def guard_gradients(owned: Iterable[ManagedParameter], guarded: bool = True) -> None:
    """Have what a user sees of reduced gradients refuse norms and other reductions; or no more, for an optimizer.

    ``torch.nn.utils.clip_grad_norm_`` and clipping written by hand would clip each rank by another norm.
    """
    for gradient in (tensor.grad for one in owned for tensor in {one.updated, one.reduced}):
        if gradient is not None:
            set_guard(gradient, guarded)


def guard_values(owned: Iterable[ManagedParameter], guarded: bool = True, counted: bool = False) -> None:
    """The same for parameters of which this rank has a part; also, what is updated in their stead is watched. Not while
    a model or an optimizer runs. ``counted``: whether the parameters are a part of the model's.
    """
    for one in owned:
        sliced = (one.shard is not None and one.shard.degree > 1) or one.spread is not None
        for tensor in {one.parameter, one.updated}:
            rows = one.host is not None and tensor is one.host.copy and isinstance(one.reduced, DTensor)
            set_guard(tensor, guarded and (sliced or rows), guarded and tensor is not one.parameter, counted)


def hides_norm(owned: Sequence[ManagedParameter], stage_devices: int) -> bool:
    """Whether the norm of these gradients is not that of all of them: torch reduces norms over ranks only where every
    one is a DTensor of the same mesh, cut by nothing else.
    """
    cut = [one for one in owned if one.copies < stage_devices]
    meshes = {one.updated.device_mesh if isinstance(one.updated, DTensor) else None for one in owned}
    sliced = any((one.shard is not None and one.shard.degree > 1) or one.spread is not None for one in cut)
    return bool(cut) and (sliced or None in meshes or len(meshes) > 1)


def _read_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(args[0].full_tensor(), *args[1:], **kwargs)


def _reduce_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = args[0].device_mesh
    return DTensor.from_local(_read_full(op, args, kwargs), mesh, [Replicate()] * mesh.ndim, run_check=False)


def read_full_values() -> None:
    """Have ``item()``, ``float()`` and ``bool()`` of a DTensor read its full value, on all ranks together: torch reads
    the local part of a sum, or of a shard. Its largest element is that of all, where torch fails on empty shards.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    handlers.setdefault(aten._local_scalar_dense.default, _read_full)
    for op in (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default):
        handlers.setdefault(op, _reduce_full)
