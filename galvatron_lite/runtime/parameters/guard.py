"""What a training loop sees of shared gradients and parameters: their full values, or an error if a rank has a part.

A guarded tensor is a part. The training loop may compute with its elements one by one, but may neither combine several
of them nor read them, nor choose them by their places; this package and optimizers may. DTensors of ZeRO compute with
the full tensor, so that functions of them return full values, and assignments to places are those of the full tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partialmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.frames import PACKAGE, TORCH, callers

if TYPE_CHECKING:
    from galvatron_lite.runtime.parameters.managed import ManagedParameter

_COMBINING = frozenset((
    "_foreach_norm", "vector_norm", "matrix_norm", "norm", "sum", "nansum", "mean", "nanmean", "max", "min", "amax",
    "amin", "aminmax", "dot", "vdot", "inner", "var", "std", "var_mean", "std_mean", "logsumexp", "prod", "median",
    "quantile", "any", "all", "count_nonzero", "histc", "histogram", "argmax", "argmin", "sort", "argsort", "topk",
    "kthvalue", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax", "renorm", "matmul",
    "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot", "dist", "cdist", "trace",
    "equal", "allclose", "cov", "corrcoef", "unique", "nonzero",
))  # fmt: skip
"""Functions that combine several elements, by name. Others are recognised by results with fewer elements."""
_COMBINING_MODULES = ("torch.nn.functional", "torch.linalg", "torch._C._linalg", "torch.fft")
_READING = frozenset((
    "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__complex__",
))  # fmt: skip
_LISTING = frozenset(("tolist", "numpy", "__array__"))
"""Functions that give elements to others than torch, which has none of them for DTensors."""
_SELECTING = frozenset(("__getitem__", "index_select", "gather", "take", "masked_select", "__get__"))
"""Functions whose results have fewer elements, but do not combine them."""
_PLACES = frozenset((
    "__getitem__", "__setitem__", "index_select", "gather", "take", "select", "narrow", "chunk", "split", "unbind",
    "index_fill_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "put_", "roll", "flip", "tril", "triu",
    "tril_", "triu_", "diagonal", "diag", "fill_diagonal_", "slice_scatter", "select_scatter",
))  # fmt: skip
"""Functions that choose elements by their places, which are others in a part, by name."""
_RANDOM = frozenset((
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
    "rand_like", "randn_like", "randint_like", "bernoulli", "dropout",
))  # fmt: skip
_ASSIGNMENTS = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__",
))  # fmt: skip
_REMEDY = (
    "A rank holds a part of the gradient under this plan, whose values are not those of the whole one. "
    "parallel.clip_grad_norm(max_norm) clips, and returns the whole model's norm before clipping; so does "
    "max_grad_norm of train_step. galvatron_lite.runtime.parameters.full_state.full_gradients(parallel) has whole "
    "gradients."
)
_VALUES = (
    "A rank holds a part of the parameter under this plan. parallel.full_state_dict(), on all ranks, has all of it."
)
_COUNTED = "Under this plan a rank has a part of the parameters: numel() counts those of this one."
_SUMMED = (
    "Under this plan a rank has a part of the parameters: a sum over parallel.parameters() is one over these. "
    "parallel.full_state_dict(), on all ranks, has all parameters."
)
_SELECTED = (
    "Ranks share it, and what is selected is a copy here. Assign to its places (tensor[places] = values) instead."
)
_DRAWN = (
    "Random numbers for the parameters of this rank are not those for all. Draw them under a plan of data parallelism."
)
_CHOSEN = (
    "A rank holds a part of it under this plan, whose places and random numbers are not those of the full tensor. "
    'Choose elements by a mask of their values, or give a plan without tensor parallelism (forbid="tp").'
)
_SCALER = (
    "A rank sees overflow in its part of the gradient alone, and would skip a step that others take. Compute with "
    'precision="fp16" and call train_step, which scales the loss.'
)
_DATA_READ = "_data_was_read"


def _is_called_by_user() -> bool:
    """Whether the code that calls torch is outside of this package. ``state_dict()`` returns plain tensors."""
    file, _ = next(callers((TORCH, __file__), until="_save_to_state_dict"), (PACKAGE, 0))
    return not file.startswith(PACKAGE)


class _Shown:
    """A tensor between uses of the model. Copies and files of it are plain tensors."""

    __slots__ = ()

    def _call_plain(self: Any, name: str, argument: Any) -> Any:
        shown = type(self)
        self.__class__ = _PLAIN[shown]
        try:
            return getattr(self, name)(argument)
        finally:
            self.__class__ = shown

    __reduce_ex__ = partialmethod(_call_plain, "__reduce_ex__")
    __deepcopy__ = partialmethod(_call_plain, "__deepcopy__")


class _Guarded(_Shown):
    """A part of a tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_called_by_user = _is_called_by_user()
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                raise InputError("gradient", "a GradScaler", _SCALER)
            if not is_called_by_user:
                return func(*args, **kwargs)
            inputs = list(tensors_of((args, kwargs)))
            guarded = [tensor for tensor in inputs if isinstance(tensor, _Guarded)]
            is_slice = any(isinstance(tensor, _Slice) for tensor in guarded)
            module = getattr(func, "__module__", None) or ""
            if name in _COMBINING | _READING | _RANDOM or module.startswith(_COMBINING_MODULES):
                raise _error(guarded, name)
            if is_slice and _chooses_places(name, args):
                raise _error(guarded, name)
            result = func(*args, **kwargs)
            most = max((tensor.shape.numel() for tensor in guarded), default=0)
            for output in tensors_of(result):
                if not any(output is tensor for tensor in inputs):
                    if output.shape.numel() < most and output._base is None and name not in _SELECTING:
                        raise _error(guarded, name)
                    set_guard(output, guarded=True, is_slice=is_slice)
        return result


class _Slice(_Shown):
    """A part of a tensor that is split otherwise than by ZeRO."""

    __slots__ = ()


class _Watched(_Shown):
    """A tensor that notes whether its ``data`` was read."""

    __slots__ = ()

    def _data(self: Any) -> Tensor:
        vars(self)[_DATA_READ] = True
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    data = property(_data, Tensor.data.__set__)  # type: ignore[attr-defined]


class _Counted(_Shown):
    """A parameter, where this rank has a part of the parameters. It warns if they are counted or summed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _COMBINING | _RANDOM and _is_called_by_user():
            if name in _RANDOM:
                raise InputError("parameter", f"{name} of a parameter", _DRAWN)
            warnings.warn(_SUMMED, stacklevel=2)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def numel(self: Any) -> int:
        if _is_called_by_user():
            warnings.warn(_COUNTED, stacklevel=2)
        return Tensor.numel(self)

    nelement = numel


class _Assignable(_Shown):
    """A DTensor whose places the training loop may assign to, which torch supports for few DTensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_called_by_user = _is_called_by_user()
        with torch._C.DisableTorchFunctionSubclass():
            tensor = args[0] if args else None
            if not is_called_by_user or not isinstance(tensor, DTensor):
                return func(*args, **kwargs)
            if name in _RANDOM:
                raise InputError("gradient or parameter", f"{name} of a part of it", _DRAWN)
            if name in _LISTING:
                return func(tensor.full_tensor(), *args[1:], **kwargs)
            if name in _PLACES and _is_in_place(name):
                full, *others = map_tensors(args, lambda one: one.full_tensor() if isinstance(one, DTensor) else one)
                func(full, *others, **kwargs)
                placements = tensor.placements
                return tensor.copy_(distribute_tensor(full, tensor.device_mesh, placements, src_data_rank=None))
            result = func(*args, **kwargs)
            for output in tensors_of(result):
                if isinstance(output, DTensor) and output is not tensor:
                    _follow(output, tensor, is_selected=_chooses_places(name, args))
        return result


class _Selected:
    """A copy of selected elements of a DTensor: changing it would not change the tensor, as in one process."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if _is_in_place(name):
            raise InputError("gradient or parameter", f"{name} of some of its places", _SELECTED)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _follow(output: DTensor, tensor: DTensor, is_selected: bool) -> None:
    """Let a view of a DTensor be assigned to, as the tensor is, and refuse assignments to a copy of its elements."""
    if output.to_local().untyped_storage()._cdata == tensor.to_local().untyped_storage()._cdata:
        set_guard(output, guarded=False, assignable=True)
    elif is_selected:
        output.__class__ = _selected_type()


@cache
def _selected_type() -> type:
    selected: type = type(DTensor)("SelectedDTensor", (_Selected, DTensor), {})  # type: ignore[misc]
    return selected


def _is_in_place(name: str) -> bool:
    return name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def _chooses_places(name: str, args: Sequence[Any]) -> bool:
    """Whether a function chooses places. All of a dim, and those where a mask is true, are the same in a part."""
    if name not in ("__getitem__", "__setitem__"):
        return name in _PLACES
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return not all(
        one is None or one is ... or one == slice(None) or (isinstance(one, Tensor) and one.dtype is torch.bool)
        for one in index
    )


_PLAIN: dict[type, type] = {}
"""Types of tensors, by the types that stand in for them."""


@cache
def _shown_type(plain: type, mixins: tuple[type, ...]) -> type:
    """A subclass of a type of tensors."""
    shown: type = type(plain)(f"Shown{plain.__name__}", (*mixins, plain), {})
    _PLAIN[shown] = plain
    return shown


def _error(guarded: Sequence[Tensor], name: str) -> InputError:
    is_parameter = any(isinstance(tensor, nn.Parameter) for tensor in guarded)
    remedy = _CHOSEN if name in _PLACES | _RANDOM else _VALUES if is_parameter else _REMEDY
    return InputError("parameter" if is_parameter else "gradient", f"{name} of this rank's part", remedy)


def set_guard(
    tensor: Tensor,
    guarded: bool,
    watched: bool = False,
    counted: bool = False,
    is_slice: bool = False,
    assignable: bool = False,
) -> None:
    """Guard a tensor, watch reads of its ``data``, and follow assignments to its places, or stop doing so.

    The type of the tensor itself changes, so that this holds for all references to it (in a bucket of gradients).

    Args:
        tensor: a parameter or a gradient.
        guarded: whether it is a part that must not be taken for the full tensor.
        watched: whether to note reads of its ``data``.
        counted: whether to warn where it is counted or summed.
        is_slice: whether its places are not those of the full tensor.
        assignable: whether assignments to places of a DTensor are those of the full tensor.
    """
    plain = _PLAIN.get(type(tensor), type(tensor))
    if plain in (Tensor, nn.Parameter, DTensor):
        flags = (
            (_Guarded, guarded),
            (_Slice, guarded and is_slice),
            (_Watched, watched),
            (_Counted, counted),
            (_Assignable, assignable and issubclass(plain, DTensor)),
        )
        mixins = tuple(mixin for mixin, is_set in flags if is_set)
        tensor.__class__ = _shown_type(plain, mixins) if mixins else plain


def was_data_read(tensors: Iterable[Tensor]) -> bool:
    """Whether the ``data`` of a tensor was read since the last call: it may have changed, unseen by versions."""
    read = [vars(tensor).pop(_DATA_READ, False) for tensor in tensors]
    return any(read)


def guard_gradients(parameters: Iterable[ManagedParameter], guarded: bool = True, hides_norm: bool = False) -> None:
    """Let the training loop see reduced gradients as the full ones, or stop doing so while an optimizer steps.

    With ``hides_norm`` norms and other reductions are refused: ``torch.nn.utils.clip_grad_norm_`` and clipping by hand
    would clip each rank by another norm.
    """
    for managed in parameters:
        for gradient in (tensor.grad for tensor in {managed.updated, managed.reduced}):
            if gradient is not None:
                set_guard(gradient, guarded and hides_norm, is_slice=managed.is_sliced, assignable=guarded)


def guard_values(parameters: Iterable[ManagedParameter], guarded: bool = True, counted: bool = False) -> None:
    """Guard parameters of which this rank has a part, and watch what the optimizer updates in their place.

    With ``guarded=False`` stop both, while the model or an optimizer runs. ``counted`` warns of counts and sums.
    """
    for managed in parameters:
        for tensor in {managed.parameter, managed.updated}:
            is_copy = managed.host is not None and tensor is managed.host.copy
            is_part = managed.is_sliced or (is_copy and isinstance(managed.reduced, DTensor))
            watched = guarded and tensor is not managed.parameter
            set_guard(tensor, guarded and is_part, watched, counted, is_slice=is_part, assignable=guarded)


def hides_norm(parameters: Sequence[ManagedParameter], stage_devices: int) -> bool:
    """Whether the norm of gradients on a rank is not that of all gradients.

    torch reduces norms over ranks only if all gradients are DTensors of the same mesh, and not split otherwise.
    """
    split = [managed for managed in parameters if managed.copies < stage_devices]
    updated = [managed.updated for managed in parameters]
    meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in updated}
    return bool(split) and (any(one.is_sliced for one in split) or None in meshes or len(meshes) > 1)


def _read_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(args[0].full_tensor(), *args[1:], **kwargs)


def _reduce_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = args[0].device_mesh
    return DTensor.from_local(_read_full(op, args, kwargs), mesh, [Replicate()] * mesh.ndim, run_check=False)


def read_full_values() -> None:
    """Let ``item()``, ``float()`` and ``bool()`` of a DTensor read its full value; all ranks call them together.

    torch reads the local part of a sum, or of a shard. The largest element is that of all shards, where torch fails on
    empty shards.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    handlers.setdefault(aten._local_scalar_dense.default, _read_full)
    for op in (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default):
        handlers.setdefault(op, _reduce_full)
