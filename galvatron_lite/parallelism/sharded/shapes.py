"""Functions that change the shape and keep the items: views, permutations, ``expand``, ``cat`` and ``stack``.

A dim stays sharded through a reshape in three cases: it is unchanged; it is merged with full dims behind it, so that a
shard of rows is a range of the merged items; or it is divided, and a shard is a range of complete groups of rows. In
the last two the ranges may not be those of ``shares.share``; then a few items move between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.calls import (
    align,
    first_specs,
    handled_by,
    input_first,
    on_full,
    same_group,
    spec_at,
    warn_gathered,
)
from galvatron_lite.parallelism.sharded.collectives import gather_dims, redistribute
from galvatron_lite.parallelism.sharded.groups import (
    OrderedGroup,
    Pieces,
    length_of,
    ordered_dim_after,
    shards_of,
)
from galvatron_lite.parallelism.sharded.indexing import keep_unwritten
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    locals_only,
    refuse_write_back,
    share_memory,
    specs_of,
    wrap_locals,
)

Shape = tuple[int, ...]


@lru_cache(4096)
def _dim_order(function: Callable[..., Tensor], dims: int, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Shape:
    """For each dim of the result of a permutation, the dim of its argument."""
    probe = torch.empty_strided((1,) * dims, tuple(range(dims)), device="meta")
    return tuple(function(probe, *args, **dict(kwargs)).stride())


@lru_cache(4096)
def _shape_after(
    function: Callable[..., Tensor], shape: Shape, args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> Shape:
    return tuple(function(torch.empty(shape, device="meta"), *args, **dict(kwargs)).shape)


def _key(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments after the tensor, hashable."""
    args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in call.args[1:])
    return args, tuple((name, tuple(arg) if isinstance(arg, list) else arg) for name, arg in call.kwargs.items())


def _permuted(call: Call) -> Any:
    """``permute``, ``transpose`` and similar functions."""
    call = input_first(call)
    tensor = call.args[0]
    with locals_only():
        order = _dim_order(call.function, tensor.dim(), *_key(call))
        result = call.function(*call.args, **call.kwargs)
    specs = sorted((spec.at_dim(order.index(spec.dim)) for spec in tensor.specs), key=lambda spec: spec.dim)
    return wrap_locals(result, tuple(specs), call.rules)


class _KeptDim(NamedTuple):
    """A dim that stays sharded, before and after a reshape."""

    before: ShardSpec
    after: ShardSpec

    @property
    def moves(self) -> bool:
        """Whether a rank may hold other items than before."""
        return self.before.extent != self.after.extent and not isinstance(self.before.group, OrderedGroup)

    def held(self) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
        """The rows of the old dim that each rank needs for the reshape, and the items of the new dim they become."""
        group, extent, later = self.before.group, self.before.extent, self.after.extent
        old, new = shards_of(extent, group), shards_of(later, group)
        return (old, _scaled(old, later // extent)) if later >= extent else (_scaled(new, extent // later), new)


def _scaled(shards: Sequence[Pieces], factor: int) -> tuple[Pieces, ...]:
    return tuple(tuple((start * factor, stop * factor) for start, stop in pieces) for pieces in shards)


def _spec_after(before: Shape, after: Shape, spec: ShardSpec) -> ShardSpec | None:
    """How a sharded dim is sharded in another shape; None if it must be gathered."""
    if 0 in before or spec.extent == 1:
        return None
    if isinstance(spec.group, OrderedGroup):
        dim_after = ordered_dim_after(before, after, spec.dim, spec.extent, spec.group)
        return None if dim_after is None else ShardSpec(dim_after[0], after[dim_after[0]], dim_after[1])
    outer, fewest = prod(before[: spec.dim]), spec.group.size
    for dim, extent in enumerate(after):
        # no rank is left without items, unless there are such ranks before
        divides = extent % spec.extent == 0 or spec.extent % max(extent, 1) == 0
        if (extent == spec.extent or (extent >= fewest and divides)) and prod(after[:dim]) == outer:
            return ShardSpec(dim, extent, spec.group)
    return None


def _reshaped_local(local: Tensor, after: Shape, kept: Sequence[_KeptDim]) -> Tensor:
    """Reshape a shard; a view if no items move and memory allows it."""
    shape = _local_shape(after, [dim.after for dim in kept])
    moving = [(dim, *dim.held()) for dim in kept if dim.moves]
    for dim, old, new in moving:
        spec = dim.before
        local = redistribute(local, spec.dim, spec.shards, old, spec.group)
        shape[dim.after.dim] = length_of(new[spec.group.rank])
    local = local.reshape(shape)
    for dim, _, new in moving:
        spec = dim.after
        local = redistribute(local, spec.dim, new, spec.shards, spec.group)
    return local


def _local_shape(shape: Shape, specs: Sequence[ShardSpec]) -> list[int]:
    local = list(shape)
    for spec in specs:
        local[spec.dim] = spec.length
    return local


def _reshaped(call: Call) -> Any:
    """``view``, ``reshape``, ``flatten`` and similar functions: dims stay sharded if they can, and are gathered if not.

    A gather warns unless rows of features remain, as at the head of a classifier, where it is expected.
    """
    call = input_first(call)
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor) or any(isinstance(arg, (torch.dtype, Tensor)) for arg in call.args[1:]):
        return on_full(call)
    before = global_shape(tensor)
    with locals_only():
        after = _shape_after(call.function, before, *_key(call))
        pairs = [(spec, _spec_after(before, after, spec)) for spec in tensor.specs]
        kept = [_KeptDim(spec, later) for spec, later in pairs if later is not None]
        lost = [spec for spec, later in pairs if later is None]
        result = _reshaped_local(gather_dims(tensor, lost), after, kept)
    if lost and len(after) > 2:
        warn_gathered(call, tensor)
    result = wrap_locals(result, tuple(dim.after for dim in kept), call.rules)
    if call.name == "view" and not share_memory(tensor, result):
        if isinstance(result, ShardedTensor):
            result.write_back = refuse_write_back
        else:
            keep_unwritten(result)
    return result


def _widened(call: Call) -> Any:
    """``expand`` and ``repeat``: dims stay sharded if they keep their extent."""
    call = input_first(call)
    tensor = call.args[0]
    before = global_shape(tensor)
    with locals_only():
        after = _shape_after(call.function, before, *_key(call))
        more = len(after) - len(before)
        lost = [spec for spec in tensor.specs if after[spec.dim + more] != spec.extent]
        specs = tuple(spec.at_dim(spec.dim + more) for spec in tensor.specs if spec not in lost)
        local = gather_dims(tensor, lost)
        if call.name in ("repeat", "tile"):
            result = call.function(local, *call.args[1:], **call.kwargs)
        else:
            result = local.expand(_local_shape(after, specs))
    return wrap_locals(result, specs, call.rules)


def _joined_operands(call: Call) -> tuple[list[Tensor], int]:
    ordered = [*call.args, *(call.kwargs[name] for name in ("tensors", "dim") if name in call.kwargs)]
    return list(ordered[0]), ordered[1] if len(ordered) > 1 else 0


def joins_shards(call: Call) -> bool:
    """Whether ``cat`` joins tensors along their only sharded dim, which they all have."""
    tensors, dim = _joined_operands(call)
    first = specs_of(tensors[0])
    dim %= len(global_shape(tensors[0]))
    if len(first) != 1 or first[0].dim != dim or isinstance(first[0].group, OrderedGroup):
        return False
    specs = [specs_of(tensor) for tensor in tensors]
    return all(len(spec) == 1 and spec[0].dim == dim and same_group(spec[0].group, first[0].group) for spec in specs)


def _joined(call: Call) -> Any:
    """``cat``: on shards along other dims; along the sharded dim, items move to their ranks in the result."""
    tensors, dim = _joined_operands(call)
    first = tensors[0]
    if isinstance(first, ShardedTensor) and all(specs_of(tensor) == first.specs for tensor in tensors):
        with locals_only():
            if spec_at(first.specs, dim % first.dim()) is None:
                return wrap_locals(call.function(tensors, dim), first.specs, call.rules)
    # torch joins empty vectors with tensors of any shape
    tensors = [tensor for tensor in tensors if global_shape(tensor) != (0,)]
    dims = len(global_shape(tensors[0]))
    if joins_shards(call._replace(args=(tensors, dim), kwargs={})):
        return _joined_shards(call, tensors, dim % dims)
    specs = first_specs(map(specs_of, tensors))
    if spec_at(specs, dim % dims) is not None or not _match(tensors, specs):
        return on_full(call)
    with locals_only():
        result = call.function([align(tensor, specs, dims) for tensor in tensors], dim)
    return wrap_locals(result, specs, call.rules)


def _joined_shards(call: Call, tensors: Sequence[Tensor], dim: int) -> Any:
    group = specs_of(tensors[0])[0].group
    extents = [global_shape(tensor)[dim] for tensor in tensors]
    result = shards_of(sum(extents), group)
    with locals_only():
        moved = [
            redistribute(tensor, dim, shards_of(extent, group), _within(result, start, extent), group)
            for tensor, extent, start in zip(tensors, extents, accumulate(extents, initial=0), strict=False)
        ]
        joined = call.function(moved, dim)
    return wrap_locals(joined, (ShardSpec(dim, sum(extents), group),), call.rules)


def _within(shards: Sequence[Pieces], start: int, extent: int) -> tuple[Pieces, ...]:
    """The rows of each rank within a range of all rows, counted from ``start``."""
    inside = [[(max(low - start, 0), min(high - start, extent)) for low, high in pieces] for pieces in shards]
    return tuple(tuple((low, high) for low, high in pieces if low < high) for pieces in inside)


def _stacked(call: Call) -> Any:
    """``stack``: add a dim."""
    tensors, dim = _joined_operands(call)
    dims = len(global_shape(tensors[0]))
    specs = first_specs(map(specs_of, tensors))
    if not _match(tensors, specs):
        return on_full(call)
    with locals_only():
        result = call.function([align(tensor, specs, dims) for tensor in tensors], dim)
    dim %= dims + 1
    return wrap_locals(result, tuple(spec.at_dim(spec.dim + (spec.dim >= dim)) for spec in specs), call.rules)


def _match(tensors: Sequence[Tensor], specs: ShardSpecs) -> bool:
    """Whether all tensors have the extents of the specs."""
    return all(global_shape(tensor)[spec.dim : spec.dim + 1] == (spec.extent,) for tensor in tensors for spec in specs)


JOINS = "cat concat concatenate"
"""Names of ``cat``."""

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_permuted, "permute transpose movedim moveaxis swapaxes swapdims t T mT adjoint H mH"),
    **handled_by(_reshaped, "view reshape flatten ravel unflatten squeeze unsqueeze"),
    **handled_by(_widened, "expand broadcast_to repeat tile"),
    **handled_by(_joined, JOINS),
    "stack": _stacked,
    # only the shape of the other tensor counts
    "view_as": lambda call: call.args[0].view(global_shape(call.args[1])),
    "reshape_as": lambda call: call.args[0].reshape(global_shape(call.args[1])),
}
