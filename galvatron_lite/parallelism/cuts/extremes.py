"""Largest and smallest items, and norms."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.cuts.along import along
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by, tensors_of
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import gather, sum_over
from galvatron_lite.parallelism.cuts.pointwise import pointwise
from galvatron_lite.parallelism.cuts.reductions import Reduce, Reduction, reducing, reduction_of
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, CutTensor, Handler, cut_like, local_of, shares_only


class _Extremum(Function):
    """Largest or smallest items; as torch has it, equal ones share the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, how: Reduction, sign: int) -> Tensor:
        kept = how._replace(keepdim=True)
        best = _best(local, kept, sign)
        for line in how.lines:
            best = _best(line.all_gather(best.unsqueeze(0), 0), kept._replace(dims=(0,)), sign).squeeze(0)
        ctx.save_for_backward(local, best)
        ctx.how = how
        # never an alias of what is saved
        return best.clone() if how.keepdim else best.squeeze(how.dims).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        local, best = ctx.saved_tensors
        how: Reduction = ctx.how
        equal = local == best
        count = equal.sum(how.dims, keepdim=True)
        for line in how.lines:
            gradient, count = line.all_reduce(gradient), line.all_reduce(count)
        return equal * (gradient.reshape(best.shape) / count), None, None


def _best(local: Tensor, how: Reduction, sign: int) -> Tensor:
    """Of an empty share: what every other item beats."""
    if not prod(local.shape[dim] for dim in how.dims):
        worst = -sign * torch.inf if local.is_floating_point() else getattr(torch.iinfo(local.dtype), _WORST[sign])
        shape = [1 if dim in how.dims else extent for dim, extent in enumerate(local.shape)]
        return local.new_full(shape, worst)
    return (local.amax if sign > 0 else local.amin)(how.dims, how.keepdim)


_WORST = {1: "min", -1: "max"}


def _extremum(sign: int) -> Reduce:
    def reduce(local: Tensor, how: Reduction, _: dict[str, Any]) -> Tensor:
        # in backward, what is saved must be plain
        result: Tensor = _Extremum.apply(local_of(local), how, sign)  # type: ignore[no-untyped-call]
        return result

    return reduce


def _max_or_min(sign: int) -> Handler:
    """``max(x)``, ``max(x, dim)`` (with places) and ``max(x, y)``."""
    everything, places = reducing(_extremum(sign)), along(1, drops=True, keeps=True)

    def handler(call: Call) -> Any:
        if len(tensors_of(call)) > 1:
            return pointwise(call)
        return everything(call) if len(call.args) + len(call.kwargs) == 1 else places(call)

    return handler


def _norm(call: Call) -> Any:
    """Norms of vectors: the norm of the ranks' norms."""
    call = fronted(call)
    tensor, order = call.args[0], argument(call, 1, "ord" if call.name.startswith("linalg") else "p", 2)
    order = 2 if order in ("fro", None) else order
    dims = argument(call, 2, "dim")
    matrix = call.name == "linalg_norm" and argument(call, 1, "ord") is not None and isinstance(dims, tuple | None)
    if not isinstance(tensor, CutTensor) or isinstance(order, str) or matrix:
        return on_whole(call)
    how = reduction_of(tensor, dims, bool(argument(call, 3, "keepdim", False)))
    with shares_only():
        if how.lines:
            result = _norm_of_norms(tensor, how, float(order), call.kwargs.get("dtype"))
        else:
            result = call.function(*call.args, **call.kwargs)
    return cut_like(result, how.cuts, call.rules)


def _norm_of_norms(local: Tensor, how: Reduction, order: float, dtype: torch.dtype | None) -> Tensor:
    local = local if dtype is None else local.to(dtype)
    if abs(order) == torch.inf:
        return _extremum(1 if order > 0 else -1)(local.abs(), how, {})
    if order == 0:
        return sum_over((local != 0).to(local.dtype).sum(how.dims, how.keepdim), how.lines)
    own: Tensor = torch.linalg.vector_norm(local, order, how.dims, how.keepdim)
    for line in how.lines:
        every = gather(own.unsqueeze(0), Cut(0, line.size, line))
        own = torch.linalg.vector_norm(every, order, 0)
    return own


HANDLERS: Mapping[str, Handler] = {
    "amax": reducing(_extremum(1)),
    "amin": reducing(_extremum(-1)),
    "max": _max_or_min(1),
    "min": _max_or_min(-1),
    **handled_by(_norm, "norm linalg_vector_norm linalg_norm"),
}
