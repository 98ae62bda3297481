"""Normalisation of cut pictures, with the statistics of the whole ones.

Statistics over dims that ranks share are taken over all of them (``statistics``); where none is shared, torch's own
function runs on the share. Weights and running statistics may be whole, of which a rank uses the channels it holds, or
cut as the picture is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.calls import arguments
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Cuts, Handler, cut_tensor, cuts_of, local_of, whole_shape
from galvatron_lite.parallelism.spatial.statistics import (
    Moments,
    Normal,
    NormRows,
    as_autocast,
    moments,
    normalise,
    normalise_rows,
    over_cut,
    over_line,
    wide,
)

CHANNELS = 1
"""Dim of a picture's channels."""
_STATE = ("running_mean", "running_var", "weight", "bias")
_BUILT_IN = ("input", "weight", "bias", "running_mean", "running_var")
"""The first arguments of torch's built-in functions; those of ``torch.nn.functional`` have running statistics first."""


def batch_norm(call: Call) -> Any:
    """``torch.nn.functional.batch_norm``: statistics over samples and pixels."""
    given = arguments(call, functional.batch_norm, (*_BUILT_IN, "training", "momentum", "eps"))
    if not cuts_of(given["input"]):
        return call.rules.otherwise(call)
    return _batch_norm(given, ())


def instance_norm(call: Call) -> Any:
    """``torch.nn.functional.instance_norm``: statistics over the pixels of each sample."""
    given = arguments(call, functional.instance_norm, (*_BUILT_IN, "use_input_stats", "momentum", "eps"))
    tensor = given["input"]
    channel, pixels = _split(cuts_of(tensor))
    if not cuts_of(tensor):
        return call.rules.otherwise(call)
    own = {name: _share_of(given[name], channel) for name in _STATE}
    local = local_of(tensor)
    if not pixels or not given["use_input_stats"]:
        kernel: Callable[..., Tensor] = functional.instance_norm
        rest = {name: given[name] for name in ("use_input_stats", "momentum", "eps")}
        return _like(kernel(local, **own, **rest), tensor)
    samples, channels = local.shape[:2]
    found = _over(moments(local, range(2, local.dim())), pixels, prod(whole_shape(tensor)[2:]))
    _refuse_single(found.count, tensor)
    _update(own, found, given["momentum"], samples)
    how = Normal((1, samples * channels, prod(local.shape[2:])), 1, found.count, _lines(pixels), given["eps"])
    found = Moments(found.mean.flatten(), found.variance.flatten(), found.count)
    return _like(normalise(local, _for_each(own, samples), found, how), tensor)


def group_norm(call: Call) -> Any:
    """``torch.nn.functional.group_norm``: statistics over the pixels of groups of channels of each sample.

    Channels that are cut must be cut between groups; other pictures are gathered.
    """
    given = arguments(call, functional.group_norm, ("input", "num_groups", "weight", "bias", "eps"))
    tensor, groups = given["input"], given["num_groups"]
    channel, pixels = _split(cuts_of(tensor))
    if not cuts_of(tensor) or (channel and groups % channel.line.size):
        return call.rules.otherwise(call)
    own = {name: _share_of(given[name], channel) for name in ("weight", "bias")}
    groups //= channel.line.size if channel else 1
    local = as_autocast(local_of(tensor))
    if not pixels:
        return _like(functional.group_norm(local, groups, **own, eps=given["eps"]), tensor)
    samples, channels = local.shape[:2]
    count = channels // groups * prod(whole_shape(tensor)[2:])
    shown = local.reshape(samples * groups, channels // groups * prod(local.shape[2:]))
    found = _over(moments(shown, (1,)), pixels, count)
    how = Normal(
        (1, samples * channels, prod(local.shape[2:])), channels // groups, count, _lines(pixels), given["eps"]
    )
    return _like(normalise(local, _for_each(own, samples), found, how), tensor)


def layer_norm(call: Call) -> Any:
    """``torch.nn.functional.layer_norm``: statistics over the last dims."""
    given = arguments(call, functional.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"))
    return _normalised_rows(call, given, centred=True)


def rms_norm(call: Call) -> Any:
    """``torch.nn.functional.rms_norm``: root mean squares over the last dims."""
    given = arguments(call, functional.rms_norm, ("input", "normalized_shape", "weight", "eps"))
    return _normalised_rows(call, given, centred=False)


def local_response_norm(call: Call) -> Any:
    """``torch.nn.functional.local_response_norm``: over neighbouring channels, which must be whole."""
    given = arguments(call, functional.local_response_norm)
    tensor = given.pop("input")
    if not cuts_of(tensor) or _split(cuts_of(tensor))[0]:
        return call.rules.otherwise(call)
    return _like(functional.local_response_norm(local_of(tensor), **given), tensor)


HANDLERS: Mapping[str, Handler] = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
    "local_response_norm": local_response_norm,
    "rms_norm": rms_norm,
}


def sync_batch_norm(module: nn.SyncBatchNorm, lines: Sequence[Line] = ()) -> None:
    """Make a synchronised batch normalisation take its statistics over these ranks, on any device and back end.

    Args:
        module: its forward is replaced; parameters, buffers and state stay as they are.
        lines: the ranks that work on other samples. Those that share the pixels of these are known from the cut
            tensor that arrives; plain tensors are whole.
    """
    module.forward = partial(_synchronised, module, tuple(lines))  # type: ignore[method-assign]


def _synchronised(module: nn.SyncBatchNorm, lines: tuple[Line, ...], tensor: Tensor) -> Tensor:
    """What the module does with a batch; which statistics count, and how much, is as its documentation says."""
    if tensor.dim() < 2:
        raise InputError("input of SyncBatchNorm", tuple(tensor.shape), "Give (samples, channels, ...).")
    running = module.running_mean is not None and (not module.training or module.track_running_stats)
    given: dict[str, Any] = {
        "input": tensor,
        "running_mean": module.running_mean if running else None,
        "running_var": module.running_var if running else None,
        "weight": module.weight,
        "bias": module.bias,
        "training": module.training or module.running_mean is None,
        "momentum": _momentum(module),
        "eps": module.eps,
    }
    return _batch_norm(given, lines)


def _momentum(module: nn.SyncBatchNorm) -> float:
    """The weight of this batch in the running statistics; without a momentum they are the mean of all batches."""
    if not (module.training and module.track_running_stats and module.num_batches_tracked is not None):
        return module.momentum or 0.0
    module.num_batches_tracked.add_(1)
    return 1.0 / module.num_batches_tracked.item() if module.momentum is None else module.momentum


def _batch_norm(arguments: Mapping[str, Any], others: tuple[Line, ...]) -> Tensor:
    """Batch normalisation over the ranks that share pixels, and over ``others``, which work on other samples."""
    tensor: Tensor = arguments["input"]
    channel, pixels = _split(cuts_of(tensor))
    own = {name: _share_of(arguments[name], channel) for name in _STATE}
    local = local_of(tensor)
    if not arguments["training"] or not (pixels or others):
        kernel: Callable[..., Tensor] = functional.batch_norm
        rest = {name: arguments[name] for name in ("training", "momentum", "eps")}
        return _like(kernel(local, **own, **rest), tensor)
    shape = whole_shape(tensor)
    found = _over(moments(local, [0, *range(2, local.dim())]), pixels, shape[0] * prod(shape[2:]))
    for line in others:
        found = over_line(found, line)
    _refuse_single(found.count, tensor)
    _update(own, found, arguments["momentum"], 1)
    how = Normal(tuple(local.shape), 1, found.count, (*_lines(pixels), *others), arguments["eps"])
    return _like(normalise(local, (own["weight"], own["bias"]), found, how), tensor)


def _normalised_rows(call: Call, arguments: Mapping[str, Any], *, centred: bool) -> Any:
    tensor, normalised = arguments["input"], tuple(arguments["normalized_shape"])
    shape = whole_shape(tensor) if isinstance(tensor, Tensor) else ()
    first = len(shape) - len(normalised)
    if not cuts_of(tensor) or shape[first:] != normalised:
        return call.rules.otherwise(call)
    local, cuts = as_autocast(local_of(tensor)), [cut for cut in cuts_of(tensor) if cut.dim >= first]
    weight, bias = (_own_items(arguments.get(name), cuts, first) for name in ("weight", "bias"))
    affine = {"weight": weight, "bias": bias} if centred else {"weight": weight}
    if not cuts:
        return _like(call.function(local, normalised, **affine, eps=arguments["eps"]), tensor)
    rows = NormRows(len(normalised), prod(normalised), _lines(cuts))
    with torch.no_grad():
        mean, inverse = (
            _centre(local, rows, cuts, arguments["eps"]) if centred else _root(local, rows, arguments["eps"])
        )
    return _like(normalise_rows(local, (weight, bias), mean, inverse, rows), tensor)


def _centre(local: Tensor, rows: NormRows, cuts: Sequence[Cut], eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of whole rows."""
    kept = local.shape[: -rows.dims] + (1,) * rows.dims
    dims = range(local.dim() - rows.dims, local.dim())
    found = _over(moments(local, dims), cuts, rows.count)
    return found.mean.view(kept), (found.variance + eps).rsqrt().view(kept)


def _root(local: Tensor, rows: NormRows, eps: float | None) -> tuple[None, Tensor]:
    """Inverse root mean square of whole rows; without ``eps`` the smallest step of the share's type, as in torch."""
    squares = wide(local).square().sum(rows.last, keepdim=True)
    for line in rows.lines:
        squares = line.all_reduce(squares)
    return None, (squares / rows.count + (torch.finfo(local.dtype).eps if eps is None else eps)).rsqrt()


def _over(moments: Moments, cuts: Sequence[Cut], count: int) -> Moments:
    """Statistics of all ranks of these lines; ``count``: items of each, of them all."""
    for cut in cuts:
        moments = over_cut(moments, cut, count)
    return moments


def _update(buffers: Mapping[str, Tensor | None], moments: Moments, momentum: float, samples: int) -> None:
    """Running statistics, of unbiased variances, the mean over samples that have their own."""
    mean, variance = buffers["running_mean"], buffers["running_var"]
    with torch.no_grad():
        if mean is not None:
            _keep(mean, moments.mean, momentum, samples)
        if variance is not None:
            _keep(variance, moments.variance * (moments.count / (moments.count - 1)), momentum, samples)


def _keep(running: Tensor, batch: Tensor, momentum: float, samples: int) -> None:
    mean = batch if samples == 1 else batch.view(samples, -1).mean(0)
    running.lerp_(mean.view(running.shape).to(running.dtype), momentum)


def _refuse_single(count: float | Tensor, tensor: Tensor) -> None:
    """Variances of one number are no use to train with; torch refuses them too."""
    if not isinstance(count, Tensor) and count <= 1:
        raise InputError("pixels a statistic", whole_shape(tensor), "Train with more than one value per channel.")


def _split(cuts: Cuts) -> tuple[Cut | None, Cuts]:
    """The cut of the channels, and those of pixels."""
    channel = next((cut for cut in cuts if cut.dim == CHANNELS), None)
    return channel, tuple(cut for cut in cuts if cut.dim > CHANNELS)


def _lines(cuts: Sequence[Cut]) -> tuple[Line, ...]:
    return tuple(cut.line for cut in cuts)


def _share_of(parameter: Tensor | None, channel: Cut | None) -> Tensor | None:
    """Numbers of the channels that this rank holds."""
    if parameter is None or channel is None:
        return parameter
    if cuts_of(parameter) or parameter.shape[0] != channel.extent:
        return local_of(parameter)
    return parameter.narrow(0, channel.start, channel.length)


def _own_items(parameter: Tensor | None, cuts: Sequence[Cut], first: int) -> Tensor | None:
    """Numbers of the normalised items that this rank holds; ``first``: the dim of the picture they begin at."""
    if parameter is None or cuts_of(parameter):
        return parameter if parameter is None else local_of(parameter)
    for cut in cuts:
        parameter = parameter.narrow(cut.dim - first, cut.start, cut.length)
    return parameter


def _for_each(buffers: Mapping[str, Tensor | None], samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of every sample's channels."""
    weight, bias = (None if one is None else one.repeat(samples) for one in (buffers["weight"], buffers["bias"]))
    return weight, bias


def _like(local: Tensor, tensor: Tensor) -> Tensor:
    """A result that is cut as an argument is."""
    cuts = cuts_of(tensor)
    return cut_tensor(local, cuts, tensor.rules) if cuts else local  # type: ignore[attr-defined]
