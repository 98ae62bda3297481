"""Reductions: of the share, then over the lines of the dims that were cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.along import listed, without
from galvatron_lite.parallelism.cuts.calls import argument, fronted
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import sum_over
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Call, Cuts, CutTensor, Handler, cut_like, shares_only, whole_shape

HALF = (torch.float16, torch.bfloat16)
"""Dtypes in which nothing is added up."""


class Reduction(NamedTuple):
    """What is reduced."""

    dims: tuple[int, ...]  # counted from the front
    keepdim: bool  # whether they stay, with extent 1
    lines: tuple[Line, ...]  # along which they were cut
    cuts: Cuts  # of the result
    items: int  # of the whole that make one of the result


def reduction_of(tensor: CutTensor, dims: Any, keepdim: bool) -> Reduction:
    """What a reduction over dims (as they were given) is for a tensor."""
    shape = whole_shape(tensor)
    found = listed(None if dims in ((), []) else dims, len(shape))
    rest = tuple(cut for cut in tensor.cuts if cut.dim not in found)
    lines = tuple(cut.line for cut in tensor.cuts if cut.dim in found)
    cuts = rest if keepdim else without(rest, found)
    return Reduction(found, keepdim, lines, cuts, prod(shape[dim] for dim in found))


Reduce = Callable[[Tensor, Reduction, dict[str, Any]], Tensor]


def reducing(reduce: Reduce) -> Handler:
    """A handler of ``f(x, dim, keepdim, **more)`` from what does it on shares, where cut dims are reduced."""

    def handler(call: Call) -> Any:
        call = fronted(call)
        tensor = call.args[0]
        if not isinstance(tensor, CutTensor):
            return on_whole(call)
        how = reduction_of(tensor, argument(call, 1, "dim"), bool(argument(call, 2, "keepdim", False)))
        more = {name: one for name, one in call.kwargs.items() if name not in ("dim", "keepdim")}
        with shares_only():
            result = reduce(tensor, how, more) if how.lines else call.function(*call.args, **call.kwargs)
        return cut_like(result, how.cuts, call.rules)

    return handler


def _sum(local: Tensor, how: Reduction, more: dict[str, Any]) -> Tensor:
    part, dtype = local.sum(how.dims, how.keepdim, dtype=_wide(local, more)), more.get("dtype")
    # whole numbers were made long
    return _narrow(sum_over(part, how.lines), local.dtype if part.is_floating_point() and dtype is None else dtype)


def _mean(local: Tensor, how: Reduction, more: dict[str, Any]) -> Tensor:
    part = part_of_mean(local, how, _wide(local, more))
    return _narrow(sum_over(part, how.lines), more.get("dtype") or local.dtype)


def part_of_mean(local: Tensor, how: Reduction, dtype: torch.dtype | None = None) -> Tensor:
    """What a share adds to the mean: its own, weighed by its items."""
    held = prod(local.shape[dim] for dim in how.dims)
    if not held:
        return local.sum(how.dims, how.keepdim, dtype=dtype)
    return local.mean(how.dims, how.keepdim, dtype=dtype) * (held / how.items)


def _wide(local: Tensor, more: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that ranks add in: one process rounds to half precision once, when all is added."""
    dtype: torch.dtype = more.get("dtype") or local.dtype
    return torch.float32 if dtype in HALF else more.get("dtype")


def _narrow(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _any(local: Tensor, how: Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over(_over(torch.any, local, how).int(), how.lines) > 0


def _all(local: Tensor, how: Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over((~_over(torch.all, local, how)).int(), how.lines) == 0


def _over(function: Callable[..., Tensor], local: Tensor, how: Reduction) -> Tensor:
    return function(local, how.dims, how.keepdim)


def _count_nonzero(local: Tensor, how: Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over(local.count_nonzero(how.dims), how.lines)


HANDLERS: Mapping[str, Handler] = {
    "sum": reducing(_sum),
    "mean": reducing(_mean),
    "any": reducing(_any),
    "all": reducing(_all),
    "count_nonzero": reducing(_count_nonzero),
}
