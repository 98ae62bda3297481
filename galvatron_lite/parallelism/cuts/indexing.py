"""Taking parts of a cut tensor: ``x[...]``, ``narrow`` and ``select``.

Other dims are indexed on the shares. Along a cut dim, a slice stays cut: each rank picks what it holds of it, and rows
then move between ranks until the rule of shares holds. A crop by a few pixels moves a few rows, where gathering would
move all and leave what follows to every rank. One row, or what an index made of tensors picks, becomes whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import brought, moved
from galvatron_lite.parallelism.cuts.calls import argument, fronted
from galvatron_lite.parallelism.cuts.fallback import on_whole, refuse_writing
from galvatron_lite.parallelism.cuts.functions import sum_over
from galvatron_lite.parallelism.cuts.indices import IndexPlan, plan_of
from galvatron_lite.parallelism.cuts.laying import ItemRange, LaidLine, taken
from galvatron_lite.parallelism.cuts.moving import Range, recut, shares_of
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, CutTensor, Handler, cut_like, shares_only, whole_shape


def _get(call: Call) -> Any:
    tensor, index = call.args
    if not isinstance(tensor, CutTensor):
        return on_whole(call)
    with shares_only():
        plan = plan_of(index, tensor.cuts, tensor.dim())
    return on_whole(call) if plan is None or _strides(plan, tensor) else _taken(tensor, plan)


def _strides(plan: IndexPlan, tensor: CutTensor) -> bool:
    """Whether rows are left out of what lies in pieces."""
    return any(isinstance(cut.line, LaidLine) and one.step not in (None, 1) for one, cut in _pairs(plan, tensor))


def _taken(tensor: CutTensor, plan: IndexPlan) -> Any:
    """The part that a plan names."""
    cuts, rules, after = tensor.cuts, tensor.rules, list[Cut]()
    result: Tensor = tensor
    with shares_only():
        for cut in cuts:
            if cut.dim in plan.chosen:
                result = _row(result, cut, plan.chosen[cut.dim])
            else:
                result, sliced = _slice(result, cut, plan.sliced[cut.dim])
                after.append(moved(sliced, plan.homes[cut.dim]))
        whole = all(isinstance(one, slice) and one == slice(None) for one in plan.local)
        result = result.view_as(result) if whole and result is tensor else result[plan.local]
    return cut_like(result, tuple(after), rules)


def _slice(local: Tensor, cut: Cut, wanted: slice) -> tuple[Tensor, Cut]:
    """A share of the rows that a slice names, and how these are cut."""
    start, stop, step = wanted.indices(cut.extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    extent = len(range(start, stop, step))
    if extent == cut.extent:
        return local, cut
    if isinstance(cut.line, LaidLine):
        return _window(local, cut, start, extent)
    rows = shares_of(cut.extent, cut.line)
    held = [_numbers(one, start, step, extent) for one in rows]
    first, last = held[cut.line.rank]
    offset = start + first * step - rows[cut.line.rank][0] if first < last else 0
    index = (
        *[slice(None)] * cut.dim,
        slice(offset, offset + (last - first - 1) * step + 1 if first < last else offset, step),
    )
    after = Cut(cut.dim, extent, cut.line)
    return recut(local[index], cut.dim, held, shares_of(extent, cut.line), cut.line), after


def _window(local: Tensor, cut: Cut, start: int, extent: int) -> tuple[Tensor, Cut]:
    """Neighbouring rows, which stay where they are."""
    after = Cut(cut.dim, extent, ItemRange(cut.line, cut.extent, start))
    kept, before = list[Range](), 0
    for low, high in cut.pieces:
        first, last = max(low, start), min(high, start + extent)
        kept += [(before + first - low, before + last - low)] if first < last else []
        before += high - low
    return taken(local, cut.dim, tuple(kept)), after


def _numbers(rows: Range, start: int, step: int, extent: int) -> Range:
    """Which items of a slice lie in a range of rows."""
    first, last = (min(max(-(-(row - start) // step), 0), extent) for row in rows)
    return first, last


def _row(local: Tensor, cut: Cut, number: int) -> Tensor:
    """One row of a cut dim on every rank, as a dim of 1: its owner gives it, the others add nothing."""
    if not -cut.extent <= number < cut.extent:
        raise IndexError(f"index {number} is out of bounds for dimension {cut.dim} with size {cut.extent}")
    number, before, place = number % cut.extent, 0, -1
    for start, stop in cut.pieces:
        place = before + number - start if start <= number < stop else place
        before += stop - start
    row = local.narrow(cut.dim, max(place, 0), int(place >= 0))
    return sum_over(row.sum(cut.dim, keepdim=True, dtype=local.dtype), [cut.line])


def _narrow(call: Call) -> Any:
    """``narrow(x, dim, start, length)``: a slice."""
    tensor, dim, start, length = (
        argument(fronted(call), n, name) for n, name in enumerate(("", "dim", "start", "length"))
    )
    if not isinstance(tensor, CutTensor):
        return on_whole(call)
    shape = whole_shape(tensor)
    dim, begin = dim % len(shape), start + shape[dim] if start < 0 else start
    if not 0 <= begin <= begin + length <= shape[dim]:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({shape[dim]}).")
    return tensor[(*[slice(None)] * dim, slice(begin, begin + length))]


def _select(call: Call) -> Any:
    """``select(x, dim, index)``: one row."""
    tensor, dim, index = (argument(fronted(call), n, name) for n, name in enumerate(("", "dim", "index")))
    if not isinstance(tensor, CutTensor):
        return on_whole(call)
    return tensor[(*[slice(None)] * (dim % len(whole_shape(tensor))), index)]


def _set(call: Call) -> Any:
    """``x[index] = value`` where the index takes cut dims whole."""
    tensor, index, value = call.args
    if not isinstance(tensor, CutTensor):
        return on_whole(call)
    with shares_only():
        plan = plan_of(index, tensor.cuts, tensor.dim())
    if (
        plan is None
        or plan.chosen
        or any(one.indices(cut.extent) != (0, cut.extent, 1) for one, cut in _pairs(plan, tensor))
    ):
        return refuse_writing(call)
    with shares_only():
        cuts = tuple(Cut(plan.homes[cut.dim], cut.extent, cut.line) for cut in tensor.cuts)
        tensor[plan.local] = brought(value, cuts, tensor[plan.local].dim()) if isinstance(value, Tensor) else value
    return None


def _pairs(plan: IndexPlan, tensor: CutTensor) -> list[tuple[slice, Cut]]:
    return [(plan.sliced[cut.dim], cut) for cut in tensor.cuts if cut.dim in plan.sliced]


HANDLERS: Mapping[str, Handler] = {"__getitem__": _get, "__setitem__": _set, "narrow": _narrow, "select": _select}
