"""Variances and deviations, with or without the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.calls import fronted
from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.functions import sum_over
from galvatron_lite.parallelism.cuts.reductions import HALF, Reduction, part_of_mean, reduction_of
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, Handler, cut_like, shares_only


def _variance(local: Tensor, how: Reduction, correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean: squares about the common mean are those about a rank's own, and that one's about the common.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    given, local = local.dtype, local.float() if local.dtype in HALF else local
    held = prod(local.shape[dim] for dim in how.dims)
    kept = how._replace(keepdim=True)
    mean = sum_over(part_of_mean(local, kept), how.lines)
    if held:
        own_variance, own_mean = torch.var_mean(local, how.dims, correction=0, keepdim=True)
        squares = (own_variance + (own_mean - mean).square()) * held
    else:
        squares = local.sum(how.dims, keepdim=True) + mean * 0
    variance = sum_over(squares, how.lines) / max(how.items - correction, 0)
    gone = () if how.keepdim else how.dims
    return variance.squeeze(gone).to(given), mean.squeeze(gone).to(given)


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
        how = reduction_of(tensor, given.get("dim"), bool(given.get("keepdim", False)))
        correction = given.get("correction", int(given.get("unbiased", True)))
        with shares_only():
            if how.lines:
                result = finish(*_variance(tensor, how, 1 if correction is None else correction))
            else:
                result = call.function(*call.args, **call.kwargs)
        return cut_like(result, how.cuts, call.rules)

    return handler


HANDLERS: Mapping[str, Handler] = {
    "var": _spread(lambda variance, _: variance),
    "std": _spread(lambda variance, _: _root(variance)),
    "var_mean": _spread(lambda variance, mean: (variance, mean)),
    "std_mean": _spread(lambda variance, mean: (_root(variance), mean)),
}
