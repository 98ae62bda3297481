"""Functions along some dims that leave the others alone: softmax, sort, split, flip and their kind; sums and means.

Sums and means over sharded dims are those of the shards, added over the ranks. Everything else is gathered along the
sharded dims that it works along.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from galvatron_lite.parallelism.sharded.calls import (
    argument,
    handled_by,
    input_first,
    on_full,
    refuse_write,
    tensors_among,
    warn_gathered,
    without_dims,
)
from galvatron_lite.parallelism.sharded.collectives import gather_dims, sum_over
from galvatron_lite.parallelism.sharded.pointwise import pointwise
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    global_shape,
    locals_only,
    wrap_locals,
)

HALF = (torch.float16, torch.bfloat16)
"""Dtypes in which nothing is summed."""


def _from_front(dims: Any, count: int) -> tuple[int, ...]:
    """Dims as they were passed (one, several; None or, of ``var``, a bool: all), counted from the front."""
    if dims is None or isinstance(dims, bool):
        return tuple(range(count))
    several = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(dim % count for dim in several)


def along(position: int, default: Any = None, name: str = "dim", drops: bool = False, keepdim: int = 0) -> Handler:
    """A handler of functions of one tensor that work along dims; along sharded ones the tensor is gathered first.

    Args:
        position: of the dims among the arguments.
        default: the dims where none are passed; None: all.
        name: of the argument.
        drops: whether the result lacks the dims.
        keepdim: position of the argument that keeps them nevertheless; 0: none.
    """

    def handler(call: Call) -> Any:
        call = input_first(call)
        tensor = call.args[0]
        if not isinstance(tensor, ShardedTensor) or any(isinstance(one, ShardedTensor) for one in call.args[1:]):
            return on_full(call)
        with locals_only():
            dims = _from_front(argument(call, position, name, default), tensor.dim())
        specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
        if len(specs) < len(tensor.specs):
            refuse_write(call)
            warn_gathered(call, tensor)
        with locals_only():
            local = gather_dims(tensor, [spec for spec in tensor.specs if spec.dim in dims])
            result = call.function(local, *call.args[1:], **call.kwargs)
        if drops and not (keepdim and argument(call, keepdim, "keepdim", False)):
            specs = without_dims(specs, dims)
        return wrap_locals(result, specs, call.rules)

    return handler


_REDUCED = along(1, drops=True, keepdim=2)
_FLIPPED = along(1, name="dims")


def _flip(call: Call) -> Any:
    """``flip(x, dims)`` and ``x.flip(2, 3)``."""
    call = input_first(call)
    return _FLIPPED(call._replace(args=(call.args[0], call.args[1:])) if len(call.args) > 2 else call)


def _max_or_min(call: Call) -> Any:
    """``max(x)``, ``max(x, dim)`` (with places) and ``max(x, y)``."""
    return pointwise(call) if len(tensors_among(call)) > 1 else _REDUCED(call)


def _sum_or_mean(call: Call) -> Any:
    """Ranks add in fp32 what is of half precision: one process rounds once, when everything is summed."""
    call = input_first(call)
    tensor, dims = call.args[0], argument(call, 1, "dim")
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    keepdim, shape = bool(argument(call, 2, "keepdim", False)), global_shape(tensor)
    dims = _from_front(None if dims in ((), []) else dims, len(shape))
    groups = [spec.group for spec in tensor.specs if spec.dim in dims]
    specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
    specs = specs if keepdim else without_dims(specs, dims)
    with locals_only():
        dtype = call.kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else None)
        if not groups or (call.name == "mean" and dtype is None):  # which torch refuses
            return wrap_locals(call.function(*call.args, **call.kwargs), specs, call.rules)
        total = sum_over(tensor.sum(dims, keepdim, dtype=torch.float32 if dtype in HALF else dtype), groups)
        total = total / prod(shape[dim] for dim in dims) if call.name == "mean" else total
        return wrap_locals(total if dtype is None else total.to(dtype), specs, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_sum_or_mean, "sum mean"),
    **handled_by(_max_or_min, "max min"),
    **handled_by(_REDUCED, "amax amin argmax argmin any all count_nonzero prod nansum nanmean median nanmedian"),
    **handled_by(along(1, drops=True, keepdim=3), "var std var_mean std_mean"),
    **handled_by(along(1, -1, drops=True, keepdim=2), "mode logsumexp"),
    **handled_by(along(2, drops=True, keepdim=3), "norm linalg_vector_norm linalg_norm"),
    **handled_by(along(2, -1, drops=True, keepdim=3), "kthvalue"),
    **handled_by(along(1), "softmax log_softmax softmin logcumsumexp cumsum cumprod cummax cummin cumsum_"),
    **handled_by(along(1, -1), "sort argsort glu"),
    **handled_by(along(2, -1), "topk"),
    **handled_by(along(2, 0), "split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split"),
    **handled_by(along(1, 0), "index_select"),
    **handled_by(along(2), "repeat_interleave"),
    **handled_by(along(2, name="dims"), "roll"),
    **handled_by(along(2, 1), "normalize"),
    **handled_by(along(2, -1), "renorm"),
    **handled_by(along(2, 1), "channel_shuffle native_channel_shuffle"),
    "unbind": along(1, 0, drops=True),
    "flip": _flip,
}
