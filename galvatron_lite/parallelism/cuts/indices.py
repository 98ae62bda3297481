"""What an index ``x[...]`` says of each dim of a cut tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.tensor import Cuts, CutTensor

Index = tuple[Any, ...]
"""Numbers, slices, None, and lists of rows; one of each dim, and None for new ones."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What an index means for a share."""

    local: Index  # index of the share, in which cut dims are taken whole, or of the one row that is left
    sliced: dict[int, slice]  # slices of cut dims, by dims of the tensor
    chosen: dict[int, int]  # rows of cut dims, by dims of the tensor
    homes: dict[int, int]  # which dim of the result each cut dim becomes


def plan_of(index: Any, cuts: Cuts, dims: int) -> IndexPlan | None:
    """The plan of an index of a tensor with ``dims`` dims; None where the index must see the whole tensor."""
    given = _expanded(index, dims)
    lists = sum(_is_list(one) for one in given)
    if lists > 1 or not all(one is None or type(one) in (int, slice) or _is_list(one) for one in given):
        return None
    where = {cut.dim for cut in cuts}
    found = [(one, dim, home) for one, dim, home in _placed(given) if one is not None and dim in where]
    local = tuple(_on_share(one, one is not None and dim in where) for one, dim, _ in _placed(given))
    # torch moves the dim of a list to the front where a number stands apart from it
    if any(_is_list(one) for one, _, _ in found) or (lists and any(type(one) is int for one in local)):
        return None
    return IndexPlan(
        local,
        {dim: one for one, dim, _ in found if isinstance(one, slice)},
        {dim: one for one, dim, _ in found if isinstance(one, int)},
        {dim: home for _, dim, home in found},
    )


def _expanded(index: Any, dims: int) -> Index:
    """An index that says something of every dim."""
    given = [_number(one) for one in (index if isinstance(index, tuple) else (index,))]
    missing = [slice(None)] * (dims - sum(one is not None and one is not Ellipsis for one in given))
    place = next((number for number, one in enumerate(given) if one is Ellipsis), None)
    return (*given, *missing) if place is None else (*given[:place], *missing, *given[place + 1 :])


def _number(one: Any) -> Any:
    """Numbers of other libraries as those of Python."""
    return int(one) if isinstance(one, Integral) and not isinstance(one, bool) else one


def _is_list(one: Any) -> bool:
    """An index of many rows: a list of numbers, or a plain tensor of them."""
    if isinstance(one, Tensor):
        return not isinstance(one, CutTensor) and not one.dtype.is_floating_point and one.dtype != torch.bool
    return isinstance(one, list) and all(type(item) is int for item in one)


def _placed(index: Index) -> Iterator[tuple[Any, int, int]]:
    """What is said of each dim, the dim, and the dim of the result that it becomes."""
    dim = home = 0
    for one in index:
        yield one, dim, home
        dim += one is not None
        home += _left(one)


def _left(one: Any) -> int:
    """How many dims of the result an entry makes."""
    if isinstance(one, Tensor):
        return one.dim()
    return int(not isinstance(one, int))


def _on_share(one: Any, is_cut: bool) -> Any:
    if not is_cut:
        return one
    return 0 if isinstance(one, int) else slice(None)
