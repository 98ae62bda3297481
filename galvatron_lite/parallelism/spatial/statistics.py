"""Means and variances over pixels that ranks share, and normalisation by them.

Each rank finds mean and variance of its own items; those of all are combined pairwise (Chan, Golub and LeVeque 1979,
"Updating formulae and a pairwise algorithm for computing sample variances"), which loses no digits where the mean is
large. In forward a rank gives two numbers a statistic to each line of ranks, in backward two (sum of dy, sum of dy
times the normalised input). Statistics are fp32 of inputs of 16 bits, and kept with the rank's own share of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Cut


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of a tensor."""

    mean: Tensor  # one number a statistic
    variance: Tensor  # the mean squared deviation, likewise
    count: float | Tensor  # items of each statistic


def wide(tensor: Tensor) -> Tensor:
    """In the type statistics are taken in: fp32, or fp64 of fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def as_autocast(tensor: Tensor) -> Tensor:
    """In fp32 where autocast is on, on devices where it runs these functions in that: all but CPUs."""
    kind = tensor.device.type
    if kind == "cpu" or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return wide(tensor)


def moments(tensor: Tensor, dims: Sequence[int]) -> Moments:
    """Of this rank's own items: over ``dims``, one statistic an item of the other dims, in their order."""
    count = prod(tensor.shape[dim] for dim in dims)
    kept = [extent for dim, extent in enumerate(tensor.shape) if dim not in dims]
    tensor = tensor.detach()
    if count == 0:
        nothing = wide(tensor.new_zeros(kept))
        return Moments(nothing, nothing, 0)
    mean, variance = _per_channel(tensor if dims[0] == 0 else tensor.reshape(1, prod(kept), count))
    return Moments(mean.view(kept), variance.view(kept), count)


def _per_channel(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each item of dim 1, over all others.

    The first half of torch's own batch normalisation, where there is one: it makes no wide copy of 16 bits. Running
    statistics in the wide type, which nobody needs, have it answer in that.
    """
    if tensor.device.type in _HALVES:
        means = variances = None
        if tensor.dtype.itemsize < torch.float32.itemsize:
            means, variances = torch.zeros(2, tensor.shape[1], device=tensor.device)
        mean, variance = torch.batch_norm_update_stats(tensor, means, variances, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(wide(tensor), [0, *range(2, tensor.dim())], correction=0)
    return mean, variance


_HALVES = ("cpu", "cuda")
"""Devices with ``batch_norm_update_stats``."""


def over_cut(moments: Moments, cut: Cut, count: int) -> Moments:
    """Of the items of all ranks that share a dim, from each one's own; ``count``: items of them all."""
    line = cut.line
    gathered = line.all_gather(torch.stack((moments.mean, moments.variance))[None], 0)
    means, variances = gathered.unbind(1)
    if cut.extent % line.size == 0:
        between, mean = torch.var_mean(means, 0, correction=0)
        return Moments(mean, variances.mean(0) + between, count)
    return Moments(*_merged(means, variances, _weights(cut, moments.mean)), count)


def over_line(moments: Moments, line: Line) -> Moments:
    """Of the items of all ranks of a line, each of which has any number of them (none of whose counts others know)."""
    own = torch.stack((moments.mean, moments.variance)).flatten()
    count = torch.as_tensor(moments.count, dtype=own.dtype, device=own.device).reshape(1)
    gathered = line.all_gather(torch.cat((own, count))[None], 0)
    counts = gathered[:, -1:]
    means, variances = gathered[:, :-1].reshape(line.size, 2, -1).unbind(1)
    mean, variance = _merged(means, variances, counts / counts.sum())
    return Moments(mean, variance, counts.sum())


def _merged(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Chan et al.: squared deviations from the ranks' own means, and of these from the mean of all."""
    weights = weights.view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def _weights(cut: Cut, like: Tensor) -> Tensor:
    """What part of the extent each rank has; filled in on the device, which nobody needs to wait for."""
    base, extra = divmod(cut.extent, cut.line.size)
    weights = like.new_full((cut.line.size,), base / cut.extent)
    weights[:extra] = (base + 1) / cut.extent
    return weights


@dataclass(frozen=True, slots=True)
class Normal:
    """How a picture is normalised, feature by feature."""

    shape: tuple[int, ...]  # in which features are dim 1
    each: int  # features that follow one another and share a statistic
    count: float | Tensor  # items of a statistic, of all ranks
    lines: tuple[Line, ...]  # along which statistics were taken
    eps: float  # added to the variance


def normalise(tensor: Tensor, affine: tuple[Tensor | None, Tensor | None], moments: Moments, how: Normal) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of this rank's share, by torch's kernels.

    Args:
        tensor: the share.
        affine: weight and bias, one number a feature; their gradients are this rank's part.
        moments: statistics of all ranks.
        how: which feature has which statistic.

    Returns:
        The share of the result, in the type of the tensor.
    """
    weight, bias = (None if one is None else one.to(moments.mean.dtype) for one in affine)
    result: Tensor = _Normalise.apply(tensor, weight, bias, moments.mean, moments.variance, how)  # type: ignore[no-untyped-call]
    return result


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        how: Normal,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight, mean, variance)
        ctx.how = how
        each_mean, each_variance = _each(mean, how), _each(variance, how)
        shown = tensor.reshape(how.shape)
        result = functional.batch_norm(shown, each_mean, each_variance, weight, bias, False, 0.0, how.eps)
        # Not a view, so that the function behind (ReLU) may work in place.
        return result if how.shape == tensor.shape else result.resize_(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, mean, variance = ctx.saved_tensors
        how: Normal = ctx.how
        each_mean, each_variance = _each(mean, how), _each(variance, how)
        shown, arriving = tensor.reshape(how.shape), gradient.reshape(how.shape)
        slope = torch.ones_like(each_mean) if weight is None else weight
        # With statistics that are given the kernel's gradients are exact sums of this rank's own items.
        passed, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            arriving, shown, slope, each_mean, each_variance, None, None, False, how.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            sums = torch.stack((slope * by_weight, slope * by_bias))
            sums = sums if how.each == 1 else sums.view(2, -1, how.each).sum(2)
            for line in how.lines:
                sums = line.all_reduce(sums)
            scale = -(variance + how.eps).rsqrt() / how.count
            factor, offset = (_each(one, how) for one in (scale * sums).unbind())
            passed += functional.batch_norm(shown, each_mean, each_variance, factor, offset, False, 0.0, how.eps)
        return passed.view(tensor.shape), *_wanted(ctx, by_weight, by_bias), None, None, None


def _each(statistics: Tensor, how: Normal) -> Tensor:
    """One number a feature."""
    return statistics if how.each == 1 else statistics.repeat_interleave(how.each)


def _wanted(ctx: Any, by_weight: Tensor, by_bias: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The kernel finds gradients of parameters that may not be there."""
    return by_weight if ctx.needs_input_grad[1] else None, by_bias if ctx.needs_input_grad[2] else None


@dataclass(frozen=True, slots=True)
class NormRows:
    """How items of normalised dims, which are the last, are shared."""

    dims: int  # how many they are
    count: int  # items of a row, of all ranks
    lines: tuple[Line, ...]  # along which they are shared

    @property
    def last(self) -> tuple[int, ...]:
        """The normalised dims, counted from the back."""
        return tuple(range(-self.dims, 0))


def normalise_rows(
    tensor: Tensor, affine: tuple[Tensor | None, Tensor | None], mean: Tensor | None, inverse: Tensor, rows: NormRows
) -> Tensor:
    """(x - mean) * inverse * weight + bias of this rank's share of rows.

    Args:
        tensor: the share (..., *normalised).
        affine: weight and bias of its items (*normalised); their gradients are this rank's part.
        mean: of whole rows (..., 1, ...); None where only the root mean square is divided by.
        inverse: of whole rows' standard deviation or root mean square, of the same shape.
        rows: how rows are shared.

    Returns:
        The share of the result, in the type of the tensor.
    """
    result: Tensor = _NormaliseRows.apply(tensor, *affine, mean, inverse, rows)  # type: ignore[no-untyped-call]
    return result


def _normal(tensor: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    return (tensor * inverse) if mean is None else (tensor - mean) * inverse


class _NormaliseRows(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        inverse: Tensor,
        rows: NormRows,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight, bias, mean, inverse)
        ctx.rows = rows
        result = _normal(tensor, mean, inverse)
        result = result if weight is None else result * weight
        return (result if bias is None else result + bias).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, bias, mean, inverse = ctx.saved_tensors
        rows: NormRows = ctx.rows
        normal, arriving = _normal(tensor, mean, inverse), wide(gradient)
        others = tuple(range(tensor.dim() - rows.dims))
        by_weight = None if weight is None else (arriving * normal).sum(others).to(weight.dtype)
        by_bias = None if bias is None else arriving.sum(others).to(bias.dtype)
        arriving = arriving if weight is None else arriving * weight
        sums = torch.stack(
            [(arriving * normal).sum(rows.last, True), arriving.sum(rows.last, True)][: 2 - (mean is None)]
        )
        for line in rows.lines:
            sums = line.all_reduce(sums)
        passed = arriving - normal * sums[0] / rows.count
        passed = passed if mean is None else passed - sums[1] / rows.count
        return (passed * inverse).to(tensor.dtype), by_weight, by_bias, None, None, None
