"""Reductions: of the share, then over the lines of the dims that were cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.cuts.along import along, listed, without
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by, tensors_of
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import gather, sum_over
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.pointwise import pointwise
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    Cut,
    Cuts,
    CutTensor,
    Handler,
    cut_like,
    local_of,
    shares_only,
    whole_shape,
)


class _Reduction(NamedTuple):
    """What is reduced.

    Attributes:
        dims: counted from the front.
        keepdim: whether they stay, with extent 1.
        lines: along which they were cut.
        cuts: of the result.
        items: of the whole that make one of the result.
    """

    dims: tuple[int, ...]
    keepdim: bool
    lines: tuple[Line, ...]
    cuts: Cuts
    items: int


def _reduction(tensor: CutTensor, dims: Any, keepdim: bool) -> _Reduction:
    shape = whole_shape(tensor)
    found = listed(None if dims in ((), []) else dims, len(shape))
    rest = tuple(cut for cut in tensor.cuts if cut.dim not in found)
    lines = tuple(cut.line for cut in tensor.cuts if cut.dim in found)
    cuts = rest if keepdim else without(rest, found)
    return _Reduction(found, keepdim, lines, cuts, prod(shape[dim] for dim in found))


Reduce = Callable[[Tensor, _Reduction, dict[str, Any]], Tensor]


def reducing(reduce: Reduce) -> Handler:
    """A handler of ``f(x, dim, keepdim, **more)`` from what does it on shares, where cut dims are reduced."""

    def handler(call: Call) -> Any:
        call = fronted(call)
        tensor = call.args[0]
        if not isinstance(tensor, CutTensor):
            return on_whole(call)
        how = _reduction(tensor, argument(call, 1, "dim"), bool(argument(call, 2, "keepdim", False)))
        more = {name: one for name, one in call.kwargs.items() if name not in ("dim", "keepdim")}
        with shares_only():
            result = reduce(tensor, how, more) if how.lines else call.function(*call.args, **call.kwargs)
        return cut_like(result, how.cuts, call.rules)

    return handler


def _sum(local: Tensor, how: _Reduction, more: dict[str, Any]) -> Tensor:
    return sum_over(local.sum(how.dims, how.keepdim, **more), how.lines)


def _mean(local: Tensor, how: _Reduction, more: dict[str, Any]) -> Tensor:
    """The mean of the ranks' means, each weighed by its items: sums of half precision might overflow."""
    return sum_over(_part_of_mean(local, how, **more), how.lines)


def _part_of_mean(local: Tensor, how: _Reduction, **more: Any) -> Tensor:
    held = prod(local.shape[dim] for dim in how.dims)
    if not held:
        return local.sum(how.dims, how.keepdim, **more)
    return local.mean(how.dims, how.keepdim, **more) * (held / how.items)


def _any(local: Tensor, how: _Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over(_over(torch.any, local, how).int(), how.lines) > 0


def _all(local: Tensor, how: _Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over((~_over(torch.all, local, how)).int(), how.lines) == 0


def _over(function: Callable[..., Tensor], local: Tensor, how: _Reduction) -> Tensor:
    return function(local, how.dims, how.keepdim)


def _count_nonzero(local: Tensor, how: _Reduction, _: dict[str, Any]) -> Tensor:
    return sum_over(local.count_nonzero(how.dims), how.lines)


def _variance(local: Tensor, how: _Reduction, correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean: squares about the common mean are those about a rank's own, and that one's about the common.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    held = prod(local.shape[dim] for dim in how.dims)
    kept = how._replace(keepdim=True)
    mean = sum_over(_part_of_mean(local, kept), how.lines)
    if held:
        own_variance, own_mean = torch.var_mean(local, how.dims, correction=0, keepdim=True)
        squares = (own_variance + (own_mean - mean).square()) * held
    else:
        squares = local.sum(how.dims, keepdim=True) + mean * 0
    variance = sum_over(squares, how.lines) / max(how.items - correction, 0)
    if not how.keepdim:
        return _squeezed(variance, how), _squeezed(mean, how)
    return variance, mean


def _squeezed(tensor: Tensor, how: _Reduction) -> Tensor:
    return tensor.squeeze(how.dims)


def _root(variance: Tensor) -> Tensor:
    """The square root, with torch's gradient of a deviation of zero: zero."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), variance.detach())


def _spread(finish: Callable[[Tensor, Tensor], Any]) -> Handler:
    """``var`` and ``std``, with or without the mean: (x, unbiased), or (x, dim, unbiased, keepdim)."""

    def handler(call: Call) -> Any:
        call = fronted(call)
        tensor, rest = call.args[0], list(call.args[1:])
        if not isinstance(tensor, CutTensor):
            return on_whole(call)
        names = ["unbiased"] if rest and isinstance(rest[0], bool) else ["dim", "unbiased", "keepdim"]
        given = {**dict(zip(names, rest, strict=False)), **call.kwargs}
        how = _reduction(tensor, given.get("dim"), bool(given.get("keepdim", False)))
        correction = given.get("correction", int(given.get("unbiased", True)))
        with shares_only():
            if how.lines:
                result = finish(*_variance(tensor, how, 1 if correction is None else correction))
            else:
                result = call.function(*call.args, **call.kwargs)
        return cut_like(result, how.cuts, call.rules)

    return handler


class _Extremum(Function):
    """Largest or smallest items; as torch has it, equal ones share the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, how: _Reduction, sign: int) -> Tensor:
        kept = how._replace(keepdim=True)
        best = _best(local, kept, sign)
        for line in how.lines:
            best = _best(line.all_gather(best.unsqueeze(0), 0), kept._replace(dims=(0,)), sign).squeeze(0)
        ctx.save_for_backward(local, best)
        ctx.how = how
        # never an alias of what is saved
        return best.clone() if how.keepdim else _squeezed(best, how).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        local, best = ctx.saved_tensors
        how: _Reduction = ctx.how
        equal = local == best
        count = equal.sum(how.dims, keepdim=True)
        for line in how.lines:
            gradient, count = line.all_reduce(gradient), line.all_reduce(count)
        return equal * (gradient.reshape(best.shape) / count), None, None


def _best(local: Tensor, how: _Reduction, sign: int) -> Tensor:
    """Of an empty share: what every other item beats."""
    if not prod(local.shape[dim] for dim in how.dims):
        worst = -sign * torch.inf if local.is_floating_point() else getattr(torch.iinfo(local.dtype), _WORST[sign])
        shape = [1 if dim in how.dims else extent for dim, extent in enumerate(local.shape)]
        return local.new_full(shape, worst)
    return (local.amax if sign > 0 else local.amin)(how.dims, how.keepdim)


_WORST = {1: "min", -1: "max"}


def _extremum(sign: int) -> Reduce:
    def reduce(local: Tensor, how: _Reduction, _: dict[str, Any]) -> Tensor:
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
    how = _reduction(tensor, dims, bool(argument(call, 3, "keepdim", False)))
    with shares_only():
        if how.lines:
            result = _norm_of_norms(tensor, how, float(order), call.kwargs.get("dtype"))
        else:
            result = call.function(*call.args, **call.kwargs)
    return cut_like(result, how.cuts, call.rules)


def _norm_of_norms(local: Tensor, how: _Reduction, order: float, dtype: torch.dtype | None) -> Tensor:
    local = local if dtype is None else local.to(dtype)
    if abs(order) == torch.inf:
        return _extremum(1 if order > 0 else -1)(local.abs(), how, {})
    if order == 0:
        return _sum((local != 0).to(local.dtype), how, {})
    own: Tensor = torch.linalg.vector_norm(local, order, how.dims, how.keepdim)
    for line in how.lines:
        every = gather(own.unsqueeze(0), Cut(0, line.size, line))
        own = torch.linalg.vector_norm(every, order, 0)
    return own


HANDLERS: Mapping[str, Handler] = {
    "sum": reducing(_sum),
    "mean": reducing(_mean),
    "any": reducing(_any),
    "all": reducing(_all),
    "count_nonzero": reducing(_count_nonzero),
    "amax": reducing(_extremum(1)),
    "amin": reducing(_extremum(-1)),
    "max": _max_or_min(1),
    "min": _max_or_min(-1),
    "var": _spread(lambda variance, _: variance),
    "std": _spread(lambda variance, _: _root(variance)),
    "var_mean": _spread(lambda variance, mean: (variance, mean)),
    "std_mean": _spread(lambda variance, mean: (_root(variance), mean)),
    **handled_by(_norm, "norm linalg_vector_norm linalg_norm"),
}
