"""What a training loop sees of shared gradients and parameters: the full values, or an error where it has a part.

A part is guarded: code other than this package's, and optimizers', may compute with its elements one by one, but not
with several of them, nor read them. DTensors of ZeRO compute with the full tensor; their single values are read whole,
and what is assigned to some of their places is.
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
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of

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
_BY_PLACE = frozenset((
    "__getitem__", "__setitem__", "index_select", "gather", "take", "select", "narrow", "chunk", "split", "unbind",
    "index_fill_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "put_", "roll", "flip", "tril", "triu",
    "tril_", "triu_", "diagonal", "diag", "fill_diagonal_", "slice_scatter", "select_scatter",
))  # fmt: skip
"""Functions of the places of elements, which are others in a part, by name."""
_RANDOM = frozenset((
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
    "rand_like", "randn_like", "randint_like", "bernoulli", "dropout",
))  # fmt: skip
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
_SUMMED = (
    "Under this plan a rank has a part of the parameters: a sum over parallel.parameters() is one over these. "
    "parallel.full_state_dict(), on all ranks, has all parameters."
)
_IN_PLACE = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__",
))  # fmt: skip
_SELECTED = (
    "Ranks share it, and what is selected is a copy here. Assign to its places (tensor[places] = values) instead."
)
_DRAWN = (
    "Places and random numbers in the parameters of this rank are not those of all. Draw them under a plan of data "
    "parallelism."
)
_PLACES = (
    "A rank holds a part of it under this plan, whose places and random numbers are not those of the full tensor. "
    'Choose elements by a mask of their values, or give a plan without tensor parallelism (forbid="tp").'
)
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
        placed = any(_is_cut(one) for one in guarded) and name in _BY_PLACE and _picks(name, args)
        if placed or name in _MIXING or name in _READS or name in _RANDOM or home.startswith(_COMPOSED):
            raise _error(guarded, name)
        result = func(*args, **options)
        items = max((one.numel() for one in guarded), default=0)
        for one in tensors_of(result):
            if not any(one is other for other in taken):
                if one.numel() < items and one._base is None and name not in _SELECTING:
                    raise _error(guarded, name)
                set_guard(one, guarded=True, cut=any(map(_is_cut, guarded)))
    return result


def _summed(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name = getattr(func, "__name__", "")
    if name in _MIXING | _RANDOM and _is_called_outside():
        if name in _RANDOM:
            raise InputError("parameter", f"{name} of a parameter", _DRAWN)
        warnings.warn(_SUMMED, stacklevel=3)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _placed(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Of a DTensor: torch assigns to places of few DTensors, and changes of what is selected are lost where it is a
    copy."""
    name, options, outside = getattr(func, "__name__", ""), kwargs or {}, _is_called_outside()
    with torch._C.DisableTorchFunctionSubclass():
        tensor = args[0] if args else None
        if not outside or not isinstance(tensor, DTensor):
            return func(*args, **options)
        if name in _RANDOM:
            raise InputError("gradient or parameter", f"{name} of a part of it", _DRAWN)
        if name in _BY_PLACE and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            full, *others = map_tensors(args, lambda one: one.full_tensor() if isinstance(one, DTensor) else one)
            func(full, *others, **options)
            return tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None))
        result = func(*args, **options)
        memory = tensor.to_local().untyped_storage()._cdata
        for one in tensors_of(result):
            if isinstance(one, DTensor) and one is not tensor:
                if one.to_local().untyped_storage()._cdata == memory:
                    set_guard(one, guarded=False, placed=True)
                elif name in _BY_PLACE and _picks(name, args):
                    one.__class__ = _selected_type()
    return result


def _of_selected(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name = getattr(func, "__name__", "")
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        raise InputError("gradient or parameter", f"{name} of some of its places", _SELECTED)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


@cache
def _selected_type() -> type:
    body: Any = {"__torch_function__": classmethod(_of_selected)}
    kind: type = type(DTensor)("SelectedDTensor", (DTensor,), body)  # type: ignore[misc]
    return kind


def _picks(name: str, args: Sequence[Any]) -> bool:
    """Whether a function picks some places; all of a dim, and those where a mask is true, are the same in a part."""
    if name not in ("__getitem__", "__setitem__"):
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return not all(
        one is None or one is ... or one == slice(None) or (isinstance(one, Tensor) and one.dtype is torch.bool)
        for one in index
    )


def _error(guarded: Sequence[Tensor], name: str) -> InputError:
    parameter = any(isinstance(one, nn.Parameter) for one in guarded)
    remedy = _PLACES if name in _BY_PLACE | _RANDOM else _VALUES if parameter else _REMEDY
    return InputError("parameter" if parameter else "gradient", f"{name} of this rank's part", remedy)


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
def _shown_as(kind: type, guarded: bool, watched: bool, counted: bool, cut: bool, placed: bool) -> type:
    """A subclass of a type of tensors: guarded; known by whether its ``data`` was taken; warning of its ``numel()`` and
    of sums; a part of the tensor; a DTensor whose places are assigned to."""
    if not (guarded or watched or counted or placed):
        return kind
    body: dict[str, Any] = {name: partialmethod(_plainly, name) for name in ("__reduce_ex__", "__deepcopy__")}
    if placed:
        body["__torch_function__"] = classmethod(_placed)
    if counted:
        body |= {"numel": _counted, "nelement": _counted, "__torch_function__": classmethod(_summed)}
    if guarded:
        body |= {"__torch_function__": classmethod(_guarded), _GUARDED: True, _CUT: cut}
    if watched:
        body["data"] = property(_data, Tensor.data.__set__)  # type: ignore[attr-defined]
    shown: type = type(kind)(f"Shown{kind.__name__}", (kind,), body)
    _PLAIN[shown] = kind
    return shown


_PLAIN: dict[type, type] = {}
"""Types of tensors by those that they are shown as."""


_GUARDED, _CUT = "_is_guarded", "_is_cut"


def _is_guarded(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and _GUARDED in vars(type(tensor))


def _is_cut(tensor: Tensor) -> bool:
    return _is_guarded(tensor) and bool(vars(type(tensor))[_CUT])


def set_guard(
    tensor: Tensor,
    guarded: bool,
    watched: bool = False,
    counted: bool = False,
    cut: bool = False,
    placed: bool = False,
) -> None:
    """The very tensor changes its type: who else holds it (a bucket of gradients) goes on with it."""
    kind = _PLAIN.get(type(tensor), type(tensor))
    if kind in (Tensor, nn.Parameter, DTensor):
        tensor.__class__ = _shown_as(kind, guarded, watched, counted, cut, placed and issubclass(kind, DTensor))


def was_taken(tensors: Iterable[Tensor]) -> bool:
    """Whether a loop took the ``data`` of any since this was last asked: it may have changed it, unseen by versions."""
    taken = [vars(one).pop(_TAKEN, False) for one in tensors]
    return any(taken)


def guard_gradients(owned: Iterable[ManagedParameter], guarded: bool = True, hidden: bool = False) -> None:
    """Have what a user sees of reduced gradients be that of full ones; or no more, for an optimizer. ``hidden``: as
    norms are not, they and other reductions are refused.

    ``torch.nn.utils.clip_grad_norm_`` and clipping written by hand would clip each rank by another norm.
    """
    for one in owned:
        for gradient in (tensor.grad for tensor in {one.updated, one.reduced}):
            if gradient is not None:
                set_guard(gradient, guarded and hidden, cut=_is_sliced(one), placed=guarded)


def guard_values(owned: Iterable[ManagedParameter], guarded: bool = True, counted: bool = False) -> None:
    """The same for parameters of which this rank has a part; also, what is updated in their stead is watched. Not while
    a model or an optimizer runs. ``counted``: whether the parameters are a part of the model's.
    """
    for one in owned:
        for tensor in {one.parameter, one.updated}:
            rows = one.host is not None and tensor is one.host.copy and isinstance(one.reduced, DTensor)
            cut = rows or _is_sliced(one)
            set_guard(tensor, guarded and cut, guarded and tensor is not one.parameter, counted, cut, guarded)


def _is_sliced(one: ManagedParameter) -> bool:
    """Whether a parameter is cut other than by ZeRO."""
    return (one.shard is not None and one.shard.degree > 1) or one.spread is not None


def hides_norm(owned: Sequence[ManagedParameter], stage_devices: int) -> bool:
    """Whether the norm of these gradients is not that of all of them: torch reduces norms over ranks only where every
    one is a DTensor of the same mesh, cut by nothing else.
    """
    cut = [one for one in owned if one.copies < stage_devices]
    meshes = {one.updated.device_mesh if isinstance(one.updated, DTensor) else None for one in owned}
    return bool(cut) and (any(map(_is_sliced, cut)) or None in meshes or len(meshes) > 1)


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
