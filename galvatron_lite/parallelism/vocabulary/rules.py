"""What functions do with logits that are shares of the vocabulary; all that is not named here is given whole ones.

Only Python tells where dims go: capture writes down every tensor that is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded import metadata, pointwise
from galvatron_lite.parallelism.sharded.calls import argument, handled_by, in_place, input_first, refuse_write
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    global_shape,
    locals_only,
    wrap_locals,
)
from galvatron_lite.parallelism.tensor.functions import copy_to_group
from galvatron_lite.parallelism.vocabulary.logits import columns_of, everything_whole


def otherwise(call: Call) -> Any:
    """On whole logits.

    Raises:
        InputError: the function would write to them: a gathered copy is not what it means.
    """
    refuse_write(call)
    return everything_whole(call)


def with_columns_at(output: Tensor, logits: ShardedTensor, dim: int) -> Any:
    """What a function made of the share, with the columns at a dim."""
    with locals_only():
        alias = output.as_subclass(Tensor) if output is logits else output
    return wrap_locals(alias, (replace(logits.specs[0], dim=dim),), logits.rules)


def _itemwise(call: Call) -> Any:
    """A function of each logit by itself, and of numbers or other tensors that are broadcast to the logits."""
    call = input_first(call)
    operands = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)]
    logits = next(one for one in operands if isinstance(one, ShardedTensor))
    if (in_place(call) and logits is not operands[0]) or not all(_fits(one, logits) for one in operands):
        return otherwise(call)
    with locals_only():
        args = tuple(_beside(one, logits) for one in call.args)
        given = {name: _beside(one, logits) for name, one in call.kwargs.items()}
        return wrap_locals(call.function(*args, **given), logits.specs, call.rules)


def _fits(other: Tensor, logits: ShardedTensor) -> bool:
    """Whether a tensor is of the same shares, or is broadcast to the whole logits without making them larger."""
    shape, own = global_shape(logits), global_shape(other)
    if isinstance(other, ShardedTensor):
        return own == shape and other.specs == logits.specs
    pairs = zip(own[::-1], shape[::-1], strict=False)
    return len(own) <= len(shape) and all(extent in (1, whole) for extent, whole in pairs)


def _beside(other: Any, logits: ShardedTensor) -> Any:
    """The part of an operand that meets the share; of its gradient each rank has a part, too."""
    if not isinstance(other, Tensor) or isinstance(other, ShardedTensor):
        return other
    if other.requires_grad:
        other = copy_to_group(other, columns_of(logits).group)
    (cut,) = logits.specs
    dim = cut.dim - (logits.dim() - other.dim())
    return other.narrow(dim, cut.start, cut.length) if dim >= 0 and other.shape[dim] == cut.extent > 1 else other


def _reshaped(call: Call) -> Any:
    """``view`` and ``reshape``, where the vocabulary is the last dim and stays it."""
    call = input_first(call)
    logits = call.args[0]
    after = _sizes(call) if isinstance(logits, ShardedTensor) and not call.kwargs else None
    if after is None:
        return otherwise(call)
    return _as_shape(call, logits, after)


def _as_shape(call: Call, logits: ShardedTensor, after: list[int]) -> Any:
    (cut,), before = logits.specs, global_shape(logits)
    if cut.dim != len(before) - 1 or not after or after[-1] != cut.extent or prod(after) != prod(before):
        return otherwise(call)
    local = [*after[:-1], cut.length]
    with locals_only():
        made = logits.view(local) if call.name == "view" else logits.reshape(local)
    return with_columns_at(made, logits, len(after) - 1)


def _sizes(call: Call) -> list[int] | None:
    """The shape that is asked for; None where that is not told in numbers."""
    given = call.args[1:]
    sizes = list(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)
    if not all(isinstance(one, int) for one in sizes):
        return None
    rest = prod(one for one in sizes if one >= 0)
    return [prod(global_shape(call.args[0])) // max(rest, 1) if one < 0 else one for one in sizes]


def _flattened(call: Call) -> Any:
    """``flatten`` of dims in front of the vocabulary."""
    call = input_first(call)
    shape = global_shape(call.args[0])
    first, last = (argument(call, *one) % len(shape) for one in ((1, "start_dim", 0), (2, "end_dim", -1)))
    merged = [*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]]
    return _as_shape(call, call.args[0], merged)


def _swapped(call: Call) -> Any:
    """``transpose`` and its kind."""
    call = input_first(call)
    logits = call.args[0]
    with locals_only():
        dims = logits.dim()
        made = call.function(*call.args, **call.kwargs)
    pair = (argument(call, 1, "dim0"), argument(call, 2, "dim1")) if call.name == "transpose" else (-2, -1)
    order = list(range(dims))
    first, second = (one % dims for one in pair)
    order[first], order[second] = order[second], order[first]
    return with_columns_at(made, logits, order.index(logits.specs[0].dim))


def _permuted(call: Call) -> Any:
    """``permute(dims)``, or ``permute(*dims)``."""
    call = input_first(call)
    logits, given = call.args[0], call.args[1:] or (call.kwargs["dims"],)
    with locals_only():
        order = [one % logits.dim() for one in (given[0] if isinstance(given[0], (tuple, list)) else given)]
        made = logits.permute(order)
    return with_columns_at(made, logits, order.index(logits.specs[0].dim))


def _indexed(call: Call) -> Any:
    """``logits[...]`` of some tokens and all columns, which are the last dim."""
    logits, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(logits, ShardedTensor) or not _keeps_last(parts, logits.specs[0].dim, len(global_shape(logits))):
        return otherwise(call)
    with locals_only():
        made = logits[index]
    return with_columns_at(made, logits, made.dim() - 1)


def _keeps_last(parts: tuple[Any, ...], columns: int, dims: int) -> bool:
    """Whether an index takes columns, which must be the last dim, as a whole and leaves them last."""
    if columns != dims - 1 or any(isinstance(one, (ShardedTensor, list, bool)) for one in parts):
        return False
    place = next((number for number, one in enumerate(parts) if one is Ellipsis), None)
    behind = parts if place is None else parts[place + 1 :]
    if place is None and sum(map(_dims_of, parts)) < dims:
        return True
    return not behind or (isinstance(behind[-1], slice) and behind[-1] == slice(None))


def _dims_of(one: Any) -> int:
    """Dims of a tensor that a part of an index is about."""
    if one is None:
        return 0
    return one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else 1


SHAPES: Mapping[str, Handler] = {
    **metadata.METADATA,
    **metadata.GRADIENTS,
    **{name: one for name, one in pointwise.HANDLERS.items() if one is pointwise.cast},
    **dict.fromkeys([name for name, one in pointwise.HANDLERS.items() if one is pointwise.pointwise], _itemwise),
    **handled_by(_reshaped, "view reshape"),
    **handled_by(_swapped, "transpose mT"),
    "flatten": _flattened,
    "permute": _permuted,
    "__getitem__": _indexed,
}
"""All but losses."""
