"""Normalisation of sharded images, with the statistics of the global image.

Statistics over sharded dims are combined over the ranks; if no such dim is sharded, torch's function runs on the shard.
Weights and running statistics may be full (a rank then uses those of its channels), or sharded like the image.

Each rank computes mean and variance of its items; those of all ranks are combined pairwise (Chan, Golub and LeVeque
1979, "Updating formulae and a pairwise algorithm for computing sample variances"), which loses no digits if the mean is
large. A rank sends two numbers for each statistic in forward, and two in backward (sum of dy, sum of dy times the
normalised input). Statistics are float32 for inputs of 16 bits, and are saved with the rank's shard of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import apply_internal, arguments, wrap_like
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.reductions import along
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    specs_of,
    to_local,
    wrap_locals,
)

CHANNELS = 1
"""Dim of an image's channels."""
_STATE = ("running_mean", "running_var", "weight", "bias")
_BUILT_IN = ("input", "weight", "bias", "running_mean", "running_var")
"""First arguments of torch's built-in functions; in ``torch.nn.functional`` running statistics come first."""
Affine = tuple[Tensor | None, Tensor | None]
"""Weight and bias."""


def batch_norm(call: Call) -> Any:
    """Run ``torch.nn.functional.batch_norm``: statistics over samples and pixels."""
    options = arguments(call, functional.batch_norm, (*_BUILT_IN, "training", "momentum", "eps"))
    if not specs_of(options["input"]):
        return call.rules.otherwise(call)
    state = [options[name] for name in _STATE]
    local = to_local(options["input"])
    return _batch_norm(options["input"], local, state, options["training"], options["momentum"], options["eps"], ())


def instance_norm(call: Call) -> Any:
    """Run ``torch.nn.functional.instance_norm``: statistics over the pixels of each sample."""
    options = arguments(call, functional.instance_norm, (*_BUILT_IN, "use_input_stats", "momentum", "eps"))
    tensor = options["input"]
    channel, pixels = _split_specs(specs_of(tensor))
    if not specs_of(tensor):
        return call.rules.otherwise(call)
    state = {name: _local_channels(options[name], channel) for name in _STATE}
    local = to_local(tensor)
    if not pixels or not options["use_input_stats"]:
        kernel: Callable[..., Tensor] = functional.instance_norm
        settings = {name: options[name] for name in ("use_input_stats", "momentum", "eps")}
        return wrap_like(call, kernel(local, **state, **settings), tensor)
    samples, channels = local.shape[:2]
    _refuse_single(prod(global_shape(tensor)[2:]), tensor)
    result, statistics = _grouped(local, channels, (state["weight"], state["bias"]), tensor, options["eps"])
    _update(state["running_mean"], state["running_var"], statistics, options["momentum"], samples)
    return wrap_like(call, result, tensor)


def group_norm(call: Call) -> Any:
    """Run ``torch.nn.functional.group_norm``: statistics over the pixels of groups of channels of each sample.

    The image is gathered if a group of channels would be split between ranks.
    """
    options = arguments(call, functional.group_norm, ("input", "num_groups", "weight", "bias", "eps"))
    tensor, groups, eps = options["input"], options["num_groups"], options["eps"]
    channel, pixels = _split_specs(specs_of(tensor))
    if not specs_of(tensor) or (channel and groups % channel.group.size):
        return call.rules.otherwise(call)
    weight, bias = (_local_channels(options[name], channel) for name in ("weight", "bias"))
    groups //= channel.group.size if channel else 1
    local = as_autocast(to_local(tensor))
    if not pixels:
        return wrap_like(call, functional.group_norm(local, groups, weight, bias, eps), tensor)
    return wrap_like(call, _grouped(local, groups, (weight, bias), tensor, eps)[0], tensor)


def _grouped(local: Tensor, groups: int, affine: Affine, tensor: Tensor, eps: float) -> tuple[Tensor, Moments]:
    """Normalise groups of channels of a shard over the pixels of each sample; return the statistics too."""
    samples, channels, extent = *local.shape[:2], prod(local.shape[2:])
    group_channels, pixels = channels // groups, _split_specs(specs_of(tensor))[1]
    rows = local.reshape(samples * groups, group_channels * extent)
    statistics = _over_specs(moments(rows, (1,)), pixels, group_channels * prod(global_shape(tensor)[2:]))
    form = NormForm((1, samples * channels, extent), group_channels, _groups(pixels), eps)
    weight, bias = (None if parameter is None else parameter.repeat(samples) for parameter in affine)
    return normalise(local, (weight, bias), statistics, form), statistics


def layer_norm(call: Call) -> Any:
    """Run ``torch.nn.functional.layer_norm``: statistics over the last dims."""
    return _normalise_rows(call, functional.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"))


def rms_norm(call: Call) -> Any:
    """Run ``torch.nn.functional.rms_norm``: root mean squares over the last dims."""
    return _normalise_rows(call, functional.rms_norm, ("input", "normalized_shape", "weight", "eps"))


HANDLERS: Mapping[str, Handler] = {
    **{handler.__name__: handler for handler in (batch_norm, group_norm, instance_norm, layer_norm, rms_norm)},
    "local_response_norm": along(5, 1),  # over neighbouring channels
}


def sync_batch_norm(module: nn.SyncBatchNorm, groups: Sequence[AxisGroup] = ()) -> None:
    """Make a synchronised batch norm take its statistics over some ranks, on any device and backend.

    Args:
        module: its forward is replaced; parameters, buffers and state do not change.
        groups: ranks that process other samples. Ranks that split the pixels of these samples follow from the sharded
            input.
    """

    def forward(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor) and "batch_norm" not in tensor.rules.handlers:  # tokens
            return tensor.rules.otherwise(Call(forward, "batch_norm", (tensor,), {}, tensor.rules))  # type: ignore
        local = to_local(tensor)
        if local.dim() < 2:
            raise InputError("input of SyncBatchNorm", global_shape(tensor), "Give (samples, channels, ...).")
        return _normalised(module, tuple(groups), tensor, local)

    module.forward = forward  # type: ignore[assignment, method-assign]


class ShardedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that handles sharded images without ``__torch_function__``, to save host time in every call."""

    def forward(self, image: Tensor) -> Tensor:
        """See ``torch.nn.BatchNorm2d``."""
        if not isinstance(image, ShardedTensor):
            return super().forward(image)
        local = to_local(image)
        self._check_input_dim(local)  # type: ignore[no-untyped-call]
        return _normalised(self, (), image, local)


def _normalised(
    module: nn.modules.batchnorm._BatchNorm, groups: tuple[AxisGroup, ...], tensor: Tensor, local: Tensor
) -> Tensor:
    """Run a module on a batch, with the statistics and momentum that torch documents."""
    means, variances = module.running_mean, module.running_var
    training = module.training or means is None
    if module.training and not module.track_running_stats:
        means = variances = None
    state, momentum = (means, variances, module.weight, module.bias), module.momentum or 0.0
    if module.training and module.track_running_stats and (batches := module.num_batches_tracked) is not None:
        batches.add_(1)
        if module.momentum is None:  # running statistics are the mean of all batches
            momentum = 1.0 / batches.item()
    return _batch_norm(tensor, local, state, training, momentum, module.eps, groups)


def _batch_norm(
    tensor: Tensor,
    local: Tensor,
    state: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    others: tuple[AxisGroup, ...],
) -> Tensor:
    """Normalise over samples and pixels of the ranks that split pixels, and of ``others``, which have other samples.

    ``state`` has running mean and variance, weight and bias.
    """
    specs = specs_of(tensor)
    channel, pixels = _split_specs(specs)
    if channel is not None:
        state = [_local_channels(parameter, channel) for parameter in state]
    means, variances, weight, bias = state
    if not training or not (pixels or others):
        kernel: Callable[..., Tensor] = functional.batch_norm
        result = kernel(local, means, variances, weight, bias, training, momentum, eps)
    else:
        shape = local.shape
        extents = list(shape)
        for spec in pixels:
            extents[spec.dim] = spec.extent
        statistics = _over_specs(_by_channel(local.detach()), pixels, prod(extents) // extents[CHANNELS])
        for group in others:
            statistics = _over_group(statistics, group)
        _refuse_single(statistics.items, tensor)
        _update(means, variances, statistics, momentum, 1)
        form = NormForm(shape, 1, (*_groups(pixels), *others), eps)
        result = normalise(local, (weight, bias), statistics, form)
    wrapped: Tensor = wrap_locals(result, specs, tensor.rules) if specs else result  # type: ignore[attr-defined]
    return wrapped


# This rank's part of arguments


def _split_specs(specs: ShardSpecs) -> tuple[ShardSpec | None, ShardSpecs]:
    """The spec of the channels, and those of pixels, of an image."""
    if specs and specs[0].dim > CHANNELS:
        return None, specs
    channel = next((spec for spec in specs if spec.dim == CHANNELS), None)
    return channel, tuple(spec for spec in specs if spec.dim > CHANNELS)


def _groups(specs: Sequence[ShardSpec]) -> tuple[AxisGroup, ...]:
    return tuple([spec.group for spec in specs])


def _local_channels(parameter: Tensor | None, channel: ShardSpec | None) -> Tensor | None:
    """Select the parameters of this rank's channels."""
    if parameter is None or channel is None:
        return parameter
    if specs_of(parameter) or parameter.shape[0] != channel.extent:
        return to_local(parameter)
    return parameter.narrow(0, channel.start, channel.length)


def _local_items(parameter: Tensor | None, specs: Sequence[ShardSpec], first: int) -> Tensor | None:
    """Select the parameters of this rank's items; ``first``: the first normalised dim of the image."""
    if parameter is None or specs_of(parameter):
        return parameter if parameter is None else to_local(parameter)
    for spec in specs:
        parameter = parameter.narrow(spec.dim - first, spec.start, spec.length)
    return parameter


def _refuse_single(count: float | Tensor, tensor: Tensor) -> None:
    """Refuse variances of one item, as torch does."""
    if not isinstance(count, Tensor) and count <= 1:
        raise InputError("pixels a statistic", global_shape(tensor), "Train with more than one value per channel.")


# Statistics


class Moments(NamedTuple):
    """Statistics of a tensor."""

    mean: Tensor
    variance: Tensor  # biased: the mean squared deviation
    items: float | Tensor  # that each statistic is of


def _wide(tensor: Tensor) -> Tensor:
    """Cast to the dtype of statistics: float64 for float64, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast to float32 if autocast does so for norms and interpolation: if it is on, except on CPUs."""
    kind = tensor.device.type
    if kind == "cpu" or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return _wide(tensor)


def moments(tensor: Tensor, dims: Sequence[int]) -> Moments:
    """Return the statistics of this rank's items over ``dims``, in the shape of the other dims."""
    count = prod([tensor.shape[dim] for dim in dims])
    kept = [extent for dim, extent in enumerate(tensor.shape) if dim not in dims]
    statistics = _by_channel(tensor.detach().reshape(1, prod(kept), count))
    return Moments(statistics.mean.view(kept), statistics.variance.view(kept), count)


def _by_channel(tensor: Tensor) -> Moments:
    """Statistics of this rank's items over all dims but the second."""
    channels = tensor.shape[CHANNELS]
    if not tensor.numel():
        zeros = _wide(tensor.new_zeros(channels))
        return Moments(zeros, zeros, 0)
    return Moments(*_statistics(tensor), tensor.numel() // channels)


def _statistics(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all dims but the second."""
    if tensor.device.type not in ("cpu", "cuda"):
        variance, mean = torch.var_mean(_wide(tensor), [0, *range(2, tensor.dim())], correction=0)
        return mean, variance
    # This part of torch's batch norm makes no wide copy of 16 bits. It returns the dtype of running statistics, so pass
    # some in the wide dtype.
    means = variances = None
    if tensor.dtype.itemsize < torch.float32.itemsize:
        means, variances = torch.zeros(2, tensor.shape[1], device=tensor.device)
    updated: tuple[Tensor, Tensor] = torch.batch_norm_update_stats(tensor, means, variances, 0.0)
    return updated


def _over_specs(statistics: Moments, specs: Sequence[ShardSpec], count: int) -> Moments:
    """Combine statistics over the ranks that shard dims; ``count``: items of all ranks."""
    for spec in specs:
        group, mean = spec.group, statistics.mean
        joined = group.all_gather(torch.stack((mean, statistics.variance)), 0)
        base, extra = divmod(spec.extent, group.size)
        if not extra:
            # the mean of both statistics over ranks, and the variance of means over ranks
            average, spread = _statistics(joined.view(group.size, -1))
            mean, variance = average.view(2, *mean.shape).unbind()
            statistics = Moments(mean, variance.add_(spread.narrow(0, 0, mean.numel()).view_as(mean)), count)
            continue
        means, variances = joined.view(group.size, 2, *mean.shape).unbind(1)
        # filled in on the device, without waiting for it
        weights = means.new_full((group.size,), base / spec.extent)
        weights[:extra] = (base + 1) / spec.extent
        statistics = Moments(*_merged(means, variances, weights), count)
    return statistics


def _over_group(statistics: Moments, group: AxisGroup) -> Moments:
    """Combine statistics over the ranks of a group, whose numbers of items may differ and are exchanged too."""
    flat = torch.stack((statistics.mean, statistics.variance)).flatten()
    count = torch.as_tensor(statistics.items, dtype=flat.dtype, device=flat.device).reshape(1)
    gathered = group.all_gather(torch.cat((flat, count))[None], 0)
    counts = gathered[:, -1:]
    means, variances = gathered[:, :-1].reshape(group.size, 2, -1).unbind(1)
    return Moments(*_merged(means, variances, counts / counts.sum()), counts.sum())


def _merged(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Combine as Chan et al.: squared deviations from each rank's mean, plus those of these means from their mean."""
    weights = weights.view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def _update(mean: Tensor | None, variance: Tensor | None, statistics: Moments, momentum: float, samples: int) -> None:
    """Update running statistics, by unbiased variances, and by the mean over samples if these have statistics each."""
    if mean is None or variance is None:
        return
    means, variances, count = statistics
    if samples > 1:
        means, variances = means.view(samples, -1).mean(0), variances.view(samples, -1).mean(0)
    unbiased = variances * (count / (count - 1)) if isinstance(count, Tensor) else variances
    scale = 1.0 if isinstance(count, Tensor) else count / (count - 1)
    mean.mul_(1.0 - momentum).add_(means, alpha=momentum)
    variance.mul_(1.0 - momentum).add_(unbiased, alpha=momentum * scale)


# Normalisation by statistics of features


class NormForm(NamedTuple):
    """The layout in which an image is normalised, feature by feature."""

    shape: tuple[int, ...]  # in which features are dim 1
    features: int  # consecutive features with one statistic
    groups: tuple[AxisGroup, ...]  # over which statistics were combined
    eps: float  # added to the variance

    def by_feature(self, statistics: Tensor) -> Tensor:
        """Repeat statistics for each of their features."""
        return statistics if self.features == 1 else statistics.repeat_interleave(self.features)


def normalise(tensor: Tensor, affine: Affine, statistics: Moments, form: NormForm) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias of this rank's shard, in its dtype, by torch's kernels.

    Args:
        tensor: the shard.
        affine: a number for each feature; their gradients are this rank's part.
        statistics: of all ranks.
        form: layout of features and statistics.
    """
    weight, bias = affine
    if weight is not None and weight.dtype != statistics.mean.dtype:
        weight, bias = (None if parameter is None else parameter.to(statistics.mean.dtype) for parameter in affine)
    result: Tensor = apply_internal(_Normalise, tensor, weight, bias, statistics, form)
    return result


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Moments, form: NormForm
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight, statistics.mean, statistics.variance)
        ctx.form, ctx.count = form, statistics.items
        mean, variance = form.by_feature(statistics.mean), form.by_feature(statistics.variance)
        view = tensor if form.shape == tensor.shape else tensor.reshape(form.shape)
        result = torch.batch_norm(view, weight, bias, mean, variance, False, 0.0, form.eps, True)
        # not a view, so that the next function (ReLU) can work in place
        return result if view is tensor else result.resize_(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, mean, variance = ctx.saved_tensors
        form: NormForm = ctx.form
        means, variances = form.by_feature(mean), form.by_feature(variance)
        view, arriving = tensor.reshape(form.shape), gradient.reshape(form.shape)
        slope = torch.ones_like(means) if weight is None else weight
        # with fixed statistics the kernel's gradients are exact sums over this rank's items
        passed, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            arriving, view, slope, means, variances, None, None, False, form.eps, [True, True, True]
        )
        for_tensor, for_weight, for_bias, *_ = ctx.needs_input_grad
        if for_tensor:
            sums, scale = torch.stack((by_weight, by_bias)), (variance + form.eps).rsqrt_().div_(-ctx.count)
            if form.features > 1:
                sums = (slope * sums).view(2, -1, form.features).sum(2)
            elif weight is not None:
                scale.mul_(weight)
            for group in form.groups:
                sums = group.all_reduce(sums)
            factor, offset = (form.by_feature(part) for part in (scale * sums).unbind())
            passed += torch.batch_norm(view, factor, offset, means, variances, False, 0.0, form.eps, True)
        by_weight, by_bias = by_weight if for_weight else None, by_bias if for_bias else None
        return passed.view(tensor.shape), by_weight, by_bias, None, None


# Normalisation of rows


def _normalise_rows(call: Call, public: Callable[..., Any], built_in: Sequence[str]) -> Any:
    options = arguments(call, public, built_in)
    tensor, normalised, eps = options["input"], tuple(options["normalized_shape"]), options["eps"]
    centred = "bias" in options
    shape = global_shape(tensor) if isinstance(tensor, Tensor) else ()
    first = len(shape) - len(normalised)
    if not specs_of(tensor) or shape[first:] != normalised:
        return call.rules.otherwise(call)
    local, specs = as_autocast(to_local(tensor)), [spec for spec in specs_of(tensor) if spec.dim >= first]
    affine = {name: _local_items(options[name], specs, first) for name in ("weight", "bias") if name in options}
    if not specs:
        return wrap_like(call, call.function(local, normalised, **affine, eps=eps), tensor)
    last, count, groups = tuple(range(-len(normalised), 0)), prod(normalised), _groups(specs)
    mean = None
    with torch.no_grad():
        if centred:
            statistics = _over_specs(moments(local, range(first, local.dim())), specs, count)
            kept = local.shape[:first] + (1,) * len(last)
            mean, squares = statistics.mean.view(kept), statistics.variance.view(kept)
        else:
            squares = _wide(local).square().sum(last, keepdim=True)
            for group in groups:
                squares = group.all_reduce(squares)
            squares = squares / count
        # the default of torch: the machine epsilon of the shard's dtype
        inverse = (squares + (torch.finfo(local.dtype).eps if eps is None else eps)).rsqrt()
    weight, bias = affine["weight"], affine.get("bias")
    return wrap_like(
        call, apply_internal(_NormaliseRows, local, weight, bias, mean, inverse, last, count, groups), tensor
    )


def _centred(tensor: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    return (tensor * inverse) if mean is None else (tensor - mean) * inverse


class _NormaliseRows(Function):
    """(x - mean) * inverse * weight + bias of this rank's shard of rows (..., *normalised), in its dtype.

    ``mean`` (None for RMSNorm) and ``inverse``, of the standard deviation or root mean square, are those of global rows
    (..., 1, ...). ``dims`` are the dims of a row, counted from the back, and ``count`` is its items on all ranks of
    ``groups``. Gradients of weight and bias are this rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        inverse: Tensor,
        dims: tuple[int, ...],
        count: int,
        groups: tuple[AxisGroup, ...],
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight, bias, mean, inverse)
        ctx.dims, ctx.count, ctx.groups = dims, count, groups
        result = _centred(tensor, mean, inverse)
        result = result if weight is None else result * weight
        return (result if bias is None else result + bias).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, bias, mean, inverse = ctx.saved_tensors
        normal, arriving = _centred(tensor, mean, inverse), _wide(gradient)
        others = tuple(range(tensor.dim() - len(ctx.dims)))
        by_weight = None if weight is None else (arriving * normal).sum(others).to(weight.dtype)
        by_bias = None if bias is None else arriving.sum(others).to(bias.dtype)
        arriving = arriving if weight is None else arriving * weight
        sums = [(arriving * normal).sum(ctx.dims, True)]
        sums += [] if mean is None else [arriving.sum(ctx.dims, True)]
        total = torch.stack(sums)
        for group in ctx.groups:
            total = group.all_reduce(total)
        passed = arriving - normal * total[0] / ctx.count
        passed = passed if mean is None else passed - total[1] / ctx.count
        return (passed * inverse).to(tensor.dtype), by_weight, by_bias, *[None] * 5
