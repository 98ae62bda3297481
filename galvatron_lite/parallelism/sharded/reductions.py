"""Functions along some dims that leave the others alone: softmax, sort, split, flip and their kind; reductions.

Sums, means, variances and norms over sharded dims are those of the shards, added over the ranks. Everything else is
gathered along the sharded dims that it works along.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.pointwise import pointwise
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
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


class _Reduction(NamedTuple):
    """A reduction of a sharded tensor."""

    dims: tuple[int, ...]
    keepdim: bool
    groups: list[AxisGroup]  # that shard the dims
    specs: ShardSpecs  # of the result
    items: int  # of the global tensor in one of the result


def _reduction(tensor: ShardedTensor, dims: Any, keepdim: bool) -> _Reduction:
    shape = global_shape(tensor)
    dims = _from_front(None if dims in ((), []) else dims, len(shape))
    specs = tuple(spec for spec in tensor.specs if spec.dim not in dims)
    groups = [spec.group for spec in tensor.specs if spec.dim in dims]
    return _Reduction(
        dims, keepdim, groups, specs if keepdim else without_dims(specs, dims), prod(shape[dim] for dim in dims)
    )


def _sum_or_mean(call: Call) -> Any:
    """Ranks add in fp32 what is of half precision: one process rounds once, when everything is summed."""
    call = input_first(call)
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    how = _reduction(tensor, argument(call, 1, "dim"), bool(argument(call, 2, "keepdim", False)))
    with locals_only():
        dtype = call.kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else None)
        if not how.groups or (call.name == "mean" and dtype is None):  # which torch refuses
            return wrap_locals(call.function(*call.args, **call.kwargs), how.specs, call.rules)
        wide = torch.float32 if dtype in HALF else dtype
        total = sum_over(tensor.sum(how.dims, how.keepdim, dtype=wide), how.groups)
        total = total / how.items if call.name == "mean" else total
        return wrap_locals(total if dtype is None else total.to(dtype), how.specs, call.rules)


_SPREAD = along(1, drops=True, keepdim=3)


def _variance(call: Call) -> Any:
    """``var`` and ``std``, with or without the mean: (x, unbiased), or (x, dim, unbiased, keepdim)."""
    call = input_first(call)
    tensor, rest = call.args[0], call.args[1:]
    names = ["unbiased"] if rest and isinstance(rest[0], bool) else ["dim", "unbiased", "keepdim"]
    options = {**dict(zip(names, rest, strict=False)), **call.kwargs}
    keepdim = bool(options.get("keepdim", False))
    how = _reduction(tensor, options.get("dim"), keepdim) if isinstance(tensor, ShardedTensor) else None
    if how is None or not how.groups:
        return _SPREAD(call)
    correction = options.get("correction", int(options.get("unbiased", True)))
    with locals_only():
        wide = tensor.float() if tensor.dtype in HALF else tensor
        mean = sum_over(wide.sum(how.dims, True), how.groups) / how.items
        squares = sum_over((wide - mean).square().sum(how.dims, True), how.groups)
        spread = squares / max(how.items - (1 if correction is None else correction), 0)
        if call.name.startswith("std"):
            # torch's gradient of a deviation of zero is zero
            positive = spread > 0
            spread = torch.where(positive, torch.where(positive, spread, 1).sqrt(), spread.detach())
        results = [one.squeeze(() if keepdim else how.dims).to(tensor.dtype) for one in (spread, mean)]
    return wrap_locals(tuple(results) if call.name.endswith("_mean") else results[0], how.specs, call.rules)


_NORMED = along(2, drops=True, keepdim=3)


def _norm(call: Call) -> Any:
    """Norms of vectors of a finite order: the norm of the ranks' norms."""
    call = input_first(call)
    tensor, dims = call.args[0], argument(call, 2, "dim")
    order = argument(call, 1, "ord" if call.name.startswith("linalg") else "p")
    matrix = call.name == "linalg_norm" and order is not None and isinstance(dims, tuple | None)
    order = 2 if order in ("fro", None) else order
    if not isinstance(tensor, ShardedTensor) or matrix or isinstance(order, str) or not 0 < order < torch.inf:
        return _NORMED(call)
    how = _reduction(tensor, dims, bool(argument(call, 3, "keepdim", False)))
    if not how.groups:
        return _NORMED(call)
    with locals_only():
        result: Tensor = torch.linalg.vector_norm(tensor, order, how.dims, how.keepdim, dtype=call.kwargs.get("dtype"))
        for group in how.groups:
            every = gather_dims(result.unsqueeze(0), [ShardSpec(0, group.size, group)])
            result = torch.linalg.vector_norm(every, order, 0)
    return wrap_locals(result, how.specs, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_sum_or_mean, "sum mean"),
    **handled_by(_max_or_min, "max min"),
    **handled_by(_REDUCED, "amax amin argmax argmin any all count_nonzero prod nansum nanmean median nanmedian"),
    **handled_by(_variance, "var std var_mean std_mean"),
    **handled_by(_norm, "norm linalg_vector_norm linalg_norm"),
    **handled_by(along(1, -1, drops=True, keepdim=2), "mode logsumexp"),
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
