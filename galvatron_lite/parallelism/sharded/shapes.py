"""Functions that change the shape and keep the items: views, permutations, ``expand``, ``cat`` and ``stack``.

A dim stays sharded through a reshape in three cases. It is kept as it is. It is merged with full dims behind it: a
shard of rows is a range of the merged items. It is divided, with the rest behind it: ranges of complete groups of rows.
In the last two the ranges may not be those of ``shares.share``; then a few items move between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.calls import (
    align,
    argument,
    first_specs,
    handled_by,
    input_first,
    on_full,
    refuse_write,
    same_group,
    spec_at,
    warn_gathered,
)
from galvatron_lite.parallelism.sharded.collectives import gather_dims, redistribute, sum_over
from galvatron_lite.parallelism.sharded.groups import (
    OrderedGroup,
    Pieces,
    RangeGroup,
    length_of,
    ordered_dim_after,
    shards_of,
    take_pieces,
)
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    locals_only,
    specs_of,
    wrap_locals,
)
from galvatron_lite.parallelism.shares import Range

Shape = tuple[int, ...]


@lru_cache(4096)
def _order(function: Callable[..., Tensor], dims: int, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Shape:
    """Which dim becomes each dim of what a function returns that permutes them."""
    probe = torch.empty_strided((1,) * dims, tuple(range(dims)), device="meta")
    return tuple(function(probe, *args, **dict(kwargs)).stride())


@lru_cache(4096)
def _shape_after(
    function: Callable[..., Tensor], shape: Shape, args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> Shape:
    return tuple(function(torch.empty(shape, device="meta"), *args, **dict(kwargs)).shape)


def _key(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments behind the tensor, hashable."""
    args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in call.args[1:])
    return args, tuple((name, tuple(one) if isinstance(one, list) else one) for name, one in call.kwargs.items())


def _permuted(call: Call) -> Any:
    """``permute``, ``transpose`` and their kind."""
    call = input_first(call)
    tensor = call.args[0]
    with locals_only():
        order = _order(call.function, tensor.dim(), *_key(call))
        result = call.function(*call.args, **call.kwargs)
    specs = sorted((spec.at_dim(order.index(spec.dim)) for spec in tensor.specs), key=lambda spec: spec.dim)
    return wrap_locals(result, tuple(specs), call.rules)


class _Kept(NamedTuple):
    """A dim that stays sharded, before and after a reshape."""

    before: ShardSpec
    after: ShardSpec

    @property
    def moves(self) -> bool:
        """Whether a rank may hold other items than before."""
        return self.before.extent != self.after.extent and not isinstance(self.before.group, OrderedGroup)

    def held(self) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
        """The rows of the old dim that each rank must hold for the reshape, and the items of the new dim they are."""
        group, extent, later = self.before.group, self.before.extent, self.after.extent
        old, new = shards_of(extent, group), shards_of(later, group)
        return (old, _scaled(old, later // extent)) if later >= extent else (_scaled(new, extent // later), new)


def _scaled(shards: Sequence[Pieces], factor: int) -> tuple[Pieces, ...]:
    return tuple(tuple((start * factor, stop * factor) for start, stop in pieces) for pieces in shards)


def _spec_after(before: Shape, after: Shape, spec: ShardSpec) -> ShardSpec | None:
    """How a sharded dim is sharded in another shape; None where it does not stay so."""
    if 0 in before or spec.extent == 1:
        return None
    if isinstance(spec.group, OrderedGroup):
        dim_after = ordered_dim_after(before, after, spec.dim, spec.extent, spec.group)
        return None if dim_after is None else ShardSpec(dim_after[0], after[dim_after[0]], dim_after[1])
    outer, fewest = prod(before[: spec.dim]), spec.group.size
    for dim, extent in enumerate(after):
        # no dim that leaves ranks without items, unless there are such before
        divides = extent % spec.extent == 0 or spec.extent % max(extent, 1) == 0
        if (extent == spec.extent or (extent >= fewest and divides)) and prod(after[:dim]) == outer:
            return ShardSpec(dim, extent, spec.group)
    return None


def _reshaped_local(local: Tensor, after: Shape, kept: Sequence[_Kept]) -> Tensor:
    """The shard of the new shape; a view where nothing moves and memory allows it."""
    shape = _local_shape(after, [one.after for one in kept])
    moving = [(one, *one.held()) for one in kept if one.moves]
    for one, old, new in moving:
        spec = one.before
        local = redistribute(local, spec.dim, spec.shards, old, spec.group)
        shape[one.after.dim] = length_of(new[spec.group.rank])
    local = local.reshape(shape)
    for one, _, new in moving:
        spec = one.after
        local = redistribute(local, spec.dim, new, spec.shards, spec.group)
    return local


def _local_shape(shape: Shape, specs: Sequence[ShardSpec]) -> list[int]:
    local = list(shape)
    for spec in specs:
        local[spec.dim] = spec.length
    return local


def _reshaped(call: Call) -> Any:
    """``view``, ``reshape``, ``flatten`` and their kind: dims stay sharded where they can; others are gathered.

    Gathers warn where more than rows of features remains: at the head of a classifier nothing else can be meant.
    """
    call = input_first(call)
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor) or any(isinstance(arg, (torch.dtype, Tensor)) for arg in call.args[1:]):
        return on_full(call)
    before = global_shape(tensor)
    with locals_only():
        after = _shape_after(call.function, before, *_key(call))
        pairs = [(spec, _spec_after(before, after, spec)) for spec in tensor.specs]
        kept = [_Kept(spec, later) for spec, later in pairs if later is not None]
        lost = [spec for spec, later in pairs if later is None]
        result = _reshaped_local(gather_dims(tensor, lost), after, kept)
    if lost and len(after) > 2:
        warn_gathered(call, tensor)
    return wrap_locals(result, tuple(one.after for one in kept), call.rules)


def _widened(call: Call) -> Any:
    """``expand`` and ``repeat``: dims stay sharded where they keep their extent."""
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
    """Whether a ``cat`` joins tensors along the one dim along which all of them are sharded."""
    tensors, dim = _joined_operands(call)
    first = specs_of(tensors[0])
    dim %= len(global_shape(tensors[0]))
    if len(first) != 1 or first[0].dim != dim or isinstance(first[0].group, OrderedGroup):
        return False
    specs = [specs_of(tensor) for tensor in tensors]
    return all(len(spec) == 1 and spec[0].dim == dim and same_group(spec[0].group, first[0].group) for spec in specs)


def _joined(call: Call) -> Any:
    """``cat``: on shards along other dims; along the sharded dim, items move to where the result has them."""
    tensors, dim = _joined_operands(call)
    first = tensors[0]
    if isinstance(first, ShardedTensor) and all(specs_of(tensor) == first.specs for tensor in tensors):
        with locals_only():
            if spec_at(first.specs, dim % first.dim()) is None:
                return wrap_locals(call.function(tensors, dim), first.specs, call.rules)
    # empty lists of numbers join with everything
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
    """The rows of each rank that lie in a part of all rows, counted from the part's first."""
    both = [[(max(low - start, 0), min(high - start, extent)) for low, high in pieces] for pieces in shards]
    return tuple(tuple((low, high) for low, high in pieces if low < high) for pieces in both)


def _stacked(call: Call) -> Any:
    """``stack``: a new dim."""
    tensors, dim = _joined_operands(call)
    dims = len(global_shape(tensors[0]))
    specs = first_specs(map(specs_of, tensors))
    if not _match(tensors, specs):
        return on_full(call)
    with locals_only():
        result = call.function([align(tensor, specs, dims) for tensor in tensors], dim)
    place = dim % (dims + 1)
    return wrap_locals(result, tuple(spec.at_dim(spec.dim + (spec.dim >= place)) for spec in specs), call.rules)


def _match(tensors: Sequence[Tensor], specs: ShardSpecs) -> bool:
    """Whether all have the extents of the specs."""
    return all(global_shape(tensor)[spec.dim : spec.dim + 1] == (spec.extent,) for tensor in tensors for spec in specs)


JOINS = "cat concat concatenate"
"""Names of ``cat``."""

HANDLERS: Mapping[str, Handler] = {
    **handled_by(_permuted, "permute transpose movedim moveaxis swapaxes swapdims t T mT adjoint H mH"),
    **handled_by(_reshaped, "view reshape flatten ravel unflatten squeeze unsqueeze"),
    **handled_by(_widened, "expand broadcast_to repeat tile"),
    **handled_by(_joined, JOINS),
    "stack": _stacked,
    # the other tensor only gives its shape
    "view_as": lambda call: call.args[0].view(global_shape(call.args[1])),
    "reshape_as": lambda call: call.args[0].reshape(global_shape(call.args[1])),
}


# Parts of a sharded tensor: ``x[...]``, ``narrow`` and ``select``.
#
# Other dims are indexed on the shards. A slice of a sharded dim stays sharded: each rank takes what it holds of it, and
# rows then move between ranks until they lie as ``shares.share`` says. A crop by a few pixels moves a few rows, where
# gathering would move all. One row, or what an index made of tensors picks, every rank holds in full.


@dataclass(frozen=True, slots=True)
class _ParsedIndex:
    """What an index means for a shard."""

    local: tuple[Any, ...]  # index of the shard, in which sharded dims are taken in full; or of the one row left
    sliced: dict[int, slice]  # slices of sharded dims, by dims of the tensor
    chosen: dict[int, int]  # rows of sharded dims, by dims of the tensor
    dims_after: dict[int, int]  # the dim of the result that each sharded dim becomes

    def slices(self, specs: ShardSpecs) -> list[tuple[slice, ShardSpec]]:
        """Slices of sharded dims, with their specs."""
        return [(self.sliced[spec.dim], spec) for spec in specs if spec.dim in self.sliced]


def _parsed(index: Any, specs: ShardSpecs, dims: int) -> _ParsedIndex | None:
    """The meaning of an index of a tensor with ``dims`` dims; None where it must see the full tensor."""
    entries = _expanded(index, dims)
    lists = sum(map(_is_list, entries))
    if lists > 1 or not all(entry is None or type(entry) in (int, slice) or _is_list(entry) for entry in entries):
        return None
    sharded, local = {spec.dim for spec in specs}, list[Any]()
    sliced, chosen, dims_after = dict[int, slice](), dict[int, int](), dict[int, int]()
    dim = after = 0
    for entry in entries:
        if entry is not None and dim in sharded:
            if _is_list(entry):
                return None
            (chosen if isinstance(entry, int) else sliced)[dim] = entry
            dims_after[dim] = after
            local.append(0 if isinstance(entry, int) else slice(None))
        else:
            local.append(entry)
        dim += entry is not None
        after += entry.dim() if isinstance(entry, Tensor) else not isinstance(entry, int)
    # torch moves the dim of a list to the front where a number stands apart from it
    if lists and any(type(entry) is int for entry in local):
        return None
    return _ParsedIndex(tuple(local), sliced, chosen, dims_after)


def _expanded(index: Any, dims: int) -> tuple[Any, ...]:
    """An index with an entry for every dim, and numbers of other libraries as Python's."""
    entries = [
        int(one) if isinstance(one, Integral) and not isinstance(one, bool) else one
        for one in (index if isinstance(index, tuple) else (index,))
    ]
    missing = [slice(None)] * (dims - sum(entry is not None and entry is not Ellipsis for entry in entries))
    place = next((number for number, entry in enumerate(entries) if entry is Ellipsis), None)
    return (*entries, *missing) if place is None else (*entries[:place], *missing, *entries[place + 1 :])


def _is_list(entry: Any) -> bool:
    """An index of many rows: a list of numbers, or a plain tensor of them."""
    if isinstance(entry, Tensor):
        return not (isinstance(entry, ShardedTensor) or entry.dtype.is_floating_point or entry.dtype == torch.bool)
    return isinstance(entry, list) and all(type(item) is int for item in entry)


def _get(call: Call) -> Any:
    tensor, entries = call.args
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    with locals_only():
        index = _parsed(entries, tensor.specs, tensor.dim())
    if index is None or any(
        isinstance(spec.group, OrderedGroup) and part.step not in (None, 1) for part, spec in index.slices(tensor.specs)
    ):
        return on_full(call)
    result: Tensor = tensor
    specs = list[ShardSpec]()
    with locals_only():
        for spec in tensor.specs:
            if spec.dim in index.chosen:
                result = _row(result, spec, index.chosen[spec.dim])
            else:
                result, after = _slice(result, spec, index.sliced[spec.dim])
                specs.append(after.at_dim(index.dims_after[spec.dim]))
        everything = all(isinstance(one, slice) and one == slice(None) for one in index.local)
        result = result.view_as(result) if everything and result is tensor else result[index.local]
    return wrap_locals(result, tuple(specs), call.rules)


def _slice(local: Tensor, spec: ShardSpec, part: slice) -> tuple[Tensor, ShardSpec]:
    """A shard of the rows of a slice, and how these are sharded."""
    start, stop, step = part.indices(spec.extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    extent, group = len(range(start, stop, step)), spec.group
    if extent == spec.extent:
        return local, spec
    if isinstance(group, OrderedGroup):
        return _range(local, spec, start, extent), ShardSpec(spec.dim, extent, RangeGroup(group, spec.extent, start))
    shards = spec.shards
    held = [_numbers(rows, start, step, extent) for (rows,) in shards]
    first, last = held[group.rank]
    offset = start + first * step - spec.start if first < last else 0
    index = [slice(None)] * spec.dim + [slice(offset, offset + max((last - first - 1) * step + 1, 0), step)]
    rows = redistribute(local[tuple(index)], spec.dim, tuple((one,) for one in held), shards_of(extent, group), group)
    return rows, ShardSpec(spec.dim, extent, group)


def _range(local: Tensor, spec: ShardSpec, start: int, extent: int) -> Tensor:
    """Neighbouring rows, which stay where they are."""
    kept, before = list[Range](), 0
    for low, high in spec.pieces:
        first, last = max(low, start), min(high, start + extent)
        kept += [(before + first - low, before + last - low)] if first < last else []
        before += high - low
    return take_pieces(local, spec.dim, tuple(kept))


def _numbers(rows: Range, start: int, step: int, extent: int) -> Range:
    """Which items of a slice lie in a range of rows."""
    first, last = (min(max(-(-(row - start) // step), 0), extent) for row in rows)
    return first, last


def _row(local: Tensor, spec: ShardSpec, number: int) -> Tensor:
    """One row of a sharded dim on every rank, as a dim of 1: the other ranks add nothing."""
    if not -spec.extent <= number < spec.extent:
        raise IndexError(f"index {number} is out of bounds for dimension {spec.dim} with size {spec.extent}")
    row = _range(local, spec, number % spec.extent, 1)
    return sum_over(row.sum(spec.dim, keepdim=True, dtype=local.dtype), [spec.group])


def _narrow(call: Call) -> Any:
    """``narrow(x, dim, start, length)``: a slice."""
    names = enumerate(("", "dim", "start", "length"))
    tensor, dim, start, length = (argument(input_first(call), number, name) for number, name in names)
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    shape = global_shape(tensor)
    dim, begin = dim % len(shape), start + shape[dim] if start < 0 else start
    if not 0 <= begin <= begin + length <= shape[dim]:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({shape[dim]}).")
    return tensor[(*[slice(None)] * dim, slice(begin, begin + length))]


def _select(call: Call) -> Any:
    """``select(x, dim, index)``: one row."""
    tensor, dim, index = (argument(input_first(call), n, name) for n, name in enumerate(("", "dim", "index")))
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    return tensor[(*[slice(None)] * (dim % len(global_shape(tensor))), index)]


def _set(call: Call) -> Any:
    """``x[index] = value`` where the index takes all of the sharded dims."""
    tensor, entries, value = call.args
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    with locals_only():
        index = _parsed(entries, tensor.specs, tensor.dim())
    everything = index is not None and not index.chosen
    if (
        index is None
        or not everything
        or any(part.indices(spec.extent) != (0, spec.extent, 1) for part, spec in index.slices(tensor.specs))
    ):
        return refuse_write(call)
    with locals_only():
        specs = tuple(spec.at_dim(index.dims_after[spec.dim]) for spec in tensor.specs)
        dims = tensor[index.local].dim()
        tensor[index.local] = align(value, specs, dims) if isinstance(value, Tensor) else value
    return None


INDEXING: Mapping[str, Handler] = {"__getitem__": _get, "__setitem__": _set, "narrow": _narrow, "select": _select}
