"""Indexing of sharded tensors: ``x[...]``, ``narrow`` and ``select``.

Unsharded dims are indexed on the shards. A slice of a sharded dim stays sharded: each rank takes what it holds of it,
then rows move between ranks until they lie as ``shares.share`` says. So a crop by a few pixels moves a few rows instead
of all. A single row, or the result of an index with a tensor, is held by every rank in full.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from numbers import Integral
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import align, argument, input_first, on_full, refuse_write
from galvatron_lite.parallelism.sharded.collectives import redistribute, sum_over
from galvatron_lite.parallelism.sharded.groups import OrderedGroup, RangeGroup, shards_of, take_pieces
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
from galvatron_lite.parallelism.shares import Range


@dataclass(frozen=True, slots=True)
class _ParsedIndex:
    """The meaning of an index for a shard."""

    local: tuple[Any, ...]  # index of the shard, after sharded dims have been indexed
    sliced: dict[int, slice]  # slices of sharded dims, by dim of the tensor
    chosen: dict[int, int]  # rows of sharded dims, by dim of the tensor
    dims_after: dict[int, int]  # dims of the result, by sharded dim of the tensor

    def slices(self, specs: ShardSpecs) -> list[tuple[slice, ShardSpec]]:
        """Return the slices of sharded dims with their specs."""
        return [(self.sliced[spec.dim], spec) for spec in specs if spec.dim in self.sliced]


def _parsed(index: Any, specs: ShardSpecs, dims: int) -> _ParsedIndex | None:
    """Parse an index of a tensor with ``dims`` dims; None if it needs the full tensor."""
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
    # torch moves the dim of a list to the front if a number is separate from it
    if lists and any(type(entry) is int for entry in local):
        return None
    return _ParsedIndex(tuple(local), sliced, chosen, dims_after)


def _expanded(index: Any, dims: int) -> tuple[Any, ...]:
    """Return an entry for every dim, with numbers of other libraries as Python integers."""
    entries = [
        int(entry) if isinstance(entry, Integral) and not isinstance(entry, bool) else entry
        for entry in (index if isinstance(index, tuple) else (index,))
    ]
    missing = [slice(None)] * (dims - sum(entry is not None and entry is not Ellipsis for entry in entries))
    dots = next((position for position, entry in enumerate(entries) if entry is Ellipsis), None)
    return (*entries, *missing) if dots is None else (*entries[:dots], *missing, *entries[dots + 1 :])


def _is_list(entry: Any) -> bool:
    """Whether an entry picks several rows: a list of numbers, or a plain tensor of them."""
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
    specs, is_slice = list[ShardSpec](), bool(index.chosen) or tensor.write_back is not None
    with locals_only():
        for spec in tensor.specs:
            if spec.dim in index.chosen:
                result = _row(result, spec, index.chosen[spec.dim])
            else:
                result, after = _slice(result, spec, index.sliced[spec.dim])
                specs.append(after.at_dim(index.dims_after[spec.dim]))
                is_slice |= after is not spec
        takes_all = all(isinstance(entry, slice) and entry == slice(None) for entry in index.local)
        result = result.view_as(result) if takes_all and result is tensor else result[index.local]
    rows = wrap_locals(result, tuple(specs), call.rules)
    if not isinstance(rows, ShardedTensor):
        keep_unwritten(rows)
    elif is_slice:
        rows.write_back = partial(setitem, tensor, entries)
    return rows


_WATCHED = threading.local()
"""``copies``: tensors that code of this thread may not write to, with versions; absent outside of ``rows_stay``."""


def keep_unwritten(copied: Tensor) -> None:
    """Refuse writes to a full tensor that is a copy here, and a view in one process (``x[:, 0].zero_()``)."""
    copies = getattr(_WATCHED, "copies", None)
    if copies is not None and not copied.is_inference():
        copies.append((copied, copied._version))


@contextmanager
def rows_stay() -> Iterator[None]:
    """Run code of sharded tensors, and raise InputError if it wrote to tensors of ``keep_unwritten``."""
    outer, copies = getattr(_WATCHED, "copies", None), list[tuple[Tensor, int]]()
    _WATCHED.copies = copies
    try:
        yield
    finally:
        _WATCHED.copies = outer
    if any(row._version != version for row, version in copies):
        remedy = "Under this plan they are copies: write x[:, 0] = value in place of x[:, 0].copy_(value) and the like."
        raise InputError("model", "that writes to rows or views taken of split tokens or pixels", remedy)


def _slice(local: Tensor, spec: ShardSpec, part: slice) -> tuple[Tensor, ShardSpec]:
    """Return this rank's shard of a slice, and its spec."""
    start, stop, step = part.indices(spec.extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    extent, group = len(range(start, stop, step)), spec.group
    if extent == spec.extent:
        return local, spec
    if isinstance(group, OrderedGroup):
        return _range(local, spec, start, extent), ShardSpec(spec.dim, extent, RangeGroup(group, spec.extent, start))
    shards = spec.shards
    held = [_slice_items(rows, start, step, extent) for (rows,) in shards]
    first, last = held[group.rank]
    offset = start + first * step - spec.start if first < last else 0
    index = [slice(None)] * spec.dim + [slice(offset, offset + max((last - first - 1) * step + 1, 0), step)]
    rows = redistribute(
        local[tuple(index)], spec.dim, tuple((items,) for items in held), shards_of(extent, group), group
    )
    return rows, ShardSpec(spec.dim, extent, group)


def _range(local: Tensor, spec: ShardSpec, start: int, extent: int) -> Tensor:
    """Return this rank's part of a range of rows; none of them moves."""
    overlaps = _overlaps(spec, start, start + extent)
    return take_pieces(local, spec.dim, tuple((place, place + length) for place, _, length in overlaps))


def _overlaps(spec: ShardSpec, start: int, stop: int) -> list[tuple[int, int, int]]:
    """What this rank holds of a range of rows: place in its shard, first row in the range, number; a single empty one
    if it holds none."""
    overlaps, before = list[tuple[int, int, int]](), 0
    for low, high in spec.pieces:
        first, last = max(low, start), min(high, stop)
        overlaps += [(before + first - low, first - start, last - first)] if first < last else []
        before += high - low
    return overlaps or [(0, 0, 0)]


def _slice_items(rows: Range, start: int, step: int, extent: int) -> Range:
    """The items of a slice that lie in a range of rows."""
    first, last = (min(max(-(-(row - start) // step), 0), extent) for row in rows)
    return first, last


def _row(local: Tensor, spec: ShardSpec, number: int) -> Tensor:
    """Return a row of a sharded dim on every rank, as a dim of extent 1: a sum to which other ranks add nothing."""
    if not -spec.extent <= number < spec.extent:
        raise IndexError(f"index {number} is out of bounds for dimension {spec.dim} with size {spec.extent}")
    row = _range(local, spec, number % spec.extent, 1)
    return sum_over(row.sum(spec.dim, keepdim=True, dtype=local.dtype), [spec.group])


def _narrow(call: Call) -> Any:
    """``narrow(x, dim, start, length)`` is a slice."""
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
    """``select(x, dim, index)`` is a row."""
    names = enumerate(("", "dim", "index"))
    tensor, dim, index = (argument(input_first(call), number, name) for number, name in names)
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    return tensor[(*[slice(None)] * (dim % len(global_shape(tensor))), index)]


def _set(call: Call) -> Any:
    """``x[index] = value``: every rank writes the rows that it holds, or none, so that backward runs on all of them."""
    tensor, entries, value = call.args
    if not isinstance(tensor, ShardedTensor):
        return on_full(call)
    with locals_only():
        numbers = _parsed(entries, tensor.specs, tensor.dim())
        index = numbers and _parsed(_as_slices(entries, tensor.specs, tensor.dim()), tensor.specs, tensor.dim())
        dims = tensor[index.local].dim() if index else 0
    if numbers is None or index is None or any(part.step not in (None, 1) for part in index.sliced.values()):
        return refuse_write(call)
    copies = getattr(_WATCHED, "copies", None)
    if copies is not None and isinstance(value, Tensor):  # x[:, 0] += 1 writes to the row, which it then assigns
        copies[:] = [(row, value._version if row is value else version) for row, version in copies]
    for dim in sorted(numbers.chosen, reverse=True):
        behind = dims - 1 - index.dims_after[dim]
        value = value.unsqueeze(-1 - behind) if isinstance(value, Tensor) and value.dim() >= behind else value
    rows = {spec.dim: range(*index.sliced[spec.dim].indices(spec.extent)) for spec in tensor.specs}
    partial = [spec for spec in tensor.specs if len(rows[spec.dim]) < spec.extent]
    with locals_only():
        kept = tuple(spec.at_dim(index.dims_after[spec.dim]) for spec in tensor.specs if spec not in partial)
        value = align(value, kept, dims) if isinstance(value, Tensor) else value
        for overlaps in product(*(_overlaps(spec, rows[spec.dim].start, rows[spec.dim].stop) for spec in partial)):
            target, part = tensor.view_as(tensor) if partial else tensor, value
            for spec, (place, row, length) in zip(partial, overlaps, strict=True):
                target, from_last = target.narrow(spec.dim, place, length), index.dims_after[spec.dim] - dims
                if isinstance(part, Tensor) and part.dim() >= -from_last and part.shape[from_last] > 1:
                    part = part.narrow(from_last, row, length)
            target[index.local] = part
    return None


def _as_slices(index: Any, specs: ShardSpecs, dims: int) -> tuple[Any, ...]:
    """Replace the numbers of sharded dims by slices of one row."""
    extents = {spec.dim: spec.extent for spec in specs}
    entries, dim = list[Any](), 0
    for entry in _expanded(index, dims):
        row = range(extents[dim])[entry] if type(entry) is int and dim in extents else None
        entries.append(entry if row is None else slice(row, row + 1))
        dim += entry is not None
    return tuple(entries)


HANDLERS: Mapping[str, Handler] = {"__getitem__": _get, "__setitem__": _set, "narrow": _narrow, "select": _select}
