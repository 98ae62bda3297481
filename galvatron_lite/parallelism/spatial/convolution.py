"""Convolutions and transposed convolutions of images whose pixels are sharded.

One autograd function receives the borders and returns their gradients. It saves the shard and the borders, not the
image made of both: that is made again for the gradient of the weights, while the gradients of borders are sent.
Gradients of weights and biases are this rank's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from galvatron_lite.parallelism.precision import autocast_dtype
from galvatron_lite.parallelism.sharded.calls import apply_internal, named_arguments, on_locals
from galvatron_lite.parallelism.sharded.tensor import (
    PIXELS,
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    specs_of,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.shares import Range
from galvatron_lite.parallelism.spatial.grids import SideWindow, crop, input_range, output_extent, runs_locally
from galvatron_lite.parallelism.spatial.halo import (
    Halo,
    HaloExchange,
    HaloSide,
    Shard,
    check_batched,
    halo_of,
    halo_sides,
    padded,
    per_side,
    return_gradients,
    shards_in,
)


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """A rank's part of a convolution, computed once for each layer and image."""

    windows: tuple[SideWindow, ...]  # by side of the image
    function: Callable[..., Tensor]  # of torch
    sides: tuple[HaloSide, ...] | None  # sharded or unevenly padded sides; None if each rank needs only its shard
    steps: Mapping[str, Any]  # arguments of ``function``; sides of the halo are padded already
    outputs: tuple[int, ...]  # output extents of sharded dims
    transposed: bool


_DEFAULTS: dict[str, Any] = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0}
_ARGUMENTS = {**_DEFAULTS, "dilation": 1, "groups": 1}
_TRANSPOSED = {**_DEFAULTS, "output_padding": 0, "groups": 1, "dilation": 1}


def convolve(call: Call) -> Any:
    """Run conv1d, conv2d, conv3d and conv_transpose1d, 2d, 3d of a sharded image with full weights.

    Raises:
        InputError: the image has no dim of samples, or a rank needs more than its neighbours hold.
    """
    options = named_arguments(call, _TRANSPOSED if "transpose" in call.name else _ARGUMENTS)
    image, weight, bias = options["input"], options["weight"], options["bias"]
    shard, specs = to_local(image), specs_of(image)
    check_batched(shard, int(call.name[-2]), call.name)
    if not specs or specs[0].dim < PIXELS or isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        return call.rules.otherwise(call)
    values = [options.get(name, 0) for name in _AMOUNTS]
    amounts = tuple([tuple(value) if isinstance(value, list) else value for value in values])
    return _convolved(image, shard, call.name, weight, bias, amounts, lambda _: on_locals(call))


class ShardedConvolution(nn.modules.conv._ConvNd):
    """A convolution that handles sharded images without ``__torch_function__``, to save host time in every call."""

    def forward(self, image: Tensor) -> Any:
        """See ``torch.nn.Conv2d``."""
        if not isinstance(image, ShardedTensor) or image.specs[0].dim < PIXELS or self.padding_mode != "zeros":
            return super().forward(image)
        shard, name = to_local(image), f"conv{len(self.kernel_size)}d"
        check_batched(shard, len(self.kernel_size), name)
        amounts = (self.stride, self.padding, self.dilation, self.groups, 0)
        return _convolved(image, shard, name, self.weight, self.bias, amounts, super().forward)


def _convolved(
    image: ShardedTensor,
    shard: Tensor,
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    amounts: _Amounts,
    convolve_shard: Callable[[Tensor], Any],
) -> Any:
    """Convolve a sharded image; ``convolve_shard`` is called if ranks need only their shards."""
    specs = image.specs
    extents = tuple([spec.extent for spec in specs])
    plan = _planned(name, shard.shape, extents, weight.shape, amounts, shards_in(specs))
    if plan.sides is None:
        result = convolve_shard(shard)
    else:
        operands = _as_autocast(shard, weight, bias)
        result = apply_internal(_Convolve, *operands, plan, halo_of(plan.sides, specs))
    after = [ShardSpec(spec.dim, extent, spec.group) for spec, extent in zip(specs, plan.outputs, strict=True)]
    return wrap_locals(result, tuple(after), image.rules)


_AMOUNTS = ("stride", "padding", "dilation", "groups", "output_padding")
_Amounts = tuple[int | str | tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _planned(
    name: str,
    shape: tuple[int, ...],
    sharded: tuple[int, ...],
    weight: tuple[int, ...],
    amounts: _Amounts,
    shards: tuple[Shard, ...],
) -> ConvolutionPlan:
    options = dict(zip(_AMOUNTS, amounts, strict=True))
    windows = _windows(weight[PIXELS:], options, "transpose" in name)
    extents = list(shape[PIXELS:])
    for (dim, *_), extent in zip(shards, sharded, strict=True):
        extents[dim - PIXELS] = extent
    local = all(runs_locally(windows[dim - PIXELS], extents[dim - PIXELS], degree) for dim, degree, _ in shards)
    sides = None if local else halo_sides(tuple(extents), windows, shards, name)
    padded_dims = [side.dim for side in sides or ()]
    steps = {
        "stride": tuple(window.stride for window in windows),
        "padding": tuple(0 if dim in padded_dims else window.before for dim, window in enumerate(windows, PIXELS)),
        "dilation": tuple(window.dilation for window in windows),
        "groups": options["groups"],
    }
    outputs = tuple(output_extent(windows[dim - PIXELS], extents[dim - PIXELS]) for dim, *_ in shards)
    return ConvolutionPlan(windows, getattr(functional, name), sides, steps, outputs, windows[0].transposed)


def _windows(kernel: Sequence[int], options: Mapping[str, Any], transposed: bool) -> tuple[SideWindow, ...]:
    sides = len(kernel)
    strides, dilations = per_side(options["stride"], sides), per_side(options["dilation"], sides)
    if isinstance(options["padding"], str):
        totals = [d * (k - 1) if options["padding"] == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        extra = per_side(options["output_padding"], sides)
        pads = [(pad, pad - more) for pad, more in zip(per_side(options["padding"], sides), extra, strict=True)]
    amounts = zip(kernel, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, *pad, d, transposed=transposed) for k, s, pad, d in amounts)


def _as_autocast(shard: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast operands to the dtype in which autocast runs convolutions, if it is on; it skips float64."""
    dtype = autocast_dtype(shard)
    if dtype is None:
        return shard, weight, bias

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(shard), cast(weight), None if bias is None else cast(bias)


OVERLAP_WORK = 2**30
"""Multiply-adds that take an accelerator as long as a message (20 us at 50e12 a second)."""
OVERLAP_DEPTH = 256
"""Multiplications an output from which on they take longer than a copy of it (8 bytes at 2e12 bytes a second)."""
OVERLAP_EDGE = 4
"""Outputs for each at the border: with fewer, too many are computed in thin strips, which use an accelerator badly."""


def overlaps(sides: Sequence[HaloSide], shard: Tensor, weight: Tensor) -> bool:
    """Whether to compute outputs that need no borders of the last side while these are received.

    That hides the messages, but costs a copy of the outputs and a kernel for each strip at the border. It pays if there
    are messages, outputs at the border are few, an output takes longer than its copy, and all of them take as long as a
    message. The rule depends on sizes only, so that runs repeat.
    """
    if weight.numel() < OVERLAP_DEPTH * weight.shape[0] or not sides[-1].exchanges:
        return False
    outputs = prod(side.outputs[1] - side.outputs[0] for side in sides)
    inner = prod(side.interior[1] - side.interior[0] for side in sides)
    dims = {side.dim for side in sides}
    rest = prod(extent for dim, extent in enumerate(shard.shape) if dim != 1 and dim not in dims)
    return inner * OVERLAP_EDGE >= outputs * (OVERLAP_EDGE - 1) and inner * rest * weight.numel() >= OVERLAP_WORK


class _Convolve(Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, halo: Halo
    ) -> Tensor:
        # views of tensors that require a gradient cost twice as much
        exchange = HaloExchange(shard.detach(), halo)
        if plan.transposed:
            result = _run_transposed(plan, exchange.finish(), weight, bias, halo)
        elif overlaps(halo.sides, shard, weight):
            result = _run_overlapped(plan, exchange, weight, bias, halo.sides[-1])
        else:
            result = plan.function(exchange.finish(), weight, bias, **plan.steps)
        ctx.plan, ctx.halo, ctx.shape = plan, halo, shard.shape
        saved = (shard, *exchange.borders) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *saved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, *saved = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        halo: Halo = ctx.halo
        for_shard, for_weight, for_bias, *_ = ctx.needs_input_grad
        arriving = gradient
        if plan.transposed:
            # the result of the transposed convolution before it was cropped
            arriving = padded(gradient, halo.sides, _crops(halo))
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        if not for_weight:
            size = list(ctx.shape)
            for side in halo.sides:
                size[side.dim] = side.needed[1] - side.needed[0]
            image = gradient.new_empty(1).expand(size)
            images, _ = _gradients(plan, arriving, image, weight, _OF_IMAGE)
            return return_gradients(images, halo)(), None, biases, None, None
        image = HaloExchange(saved[0], halo, saved=saved[1:]).finish()
        if not for_shard:
            return None, _gradients(plan, arriving, image, weight, _OF_WEIGHT)[1], biases, None, None
        if not overlaps(halo.sides, saved[0], weight):  # one call costs less host time than two
            images, weights = _gradients(plan, arriving, image, weight, _OF_BOTH)
            return return_gradients(images, halo)(), weights, biases, None, None
        returning = return_gradients(_gradients(plan, arriving, image, weight, _OF_IMAGE)[0], halo)
        weights = _gradients(plan, arriving, image, weight, _OF_WEIGHT)[1]
        return returning(), weights, biases, None, None


def _run_overlapped(
    plan: ConvolutionPlan, exchange: HaloExchange, weight: Tensor, bias: Tensor | None, side: HaloSide
) -> Tensor:
    """Compute the outputs that need no borders of a side while these are received, then the others."""

    def outputs(image: Tensor, first: int, positions: Range) -> Tensor:
        """A range of outputs; ``first``: position at which ``image`` begins."""
        start, stop = input_range(side.window, 0, positions)
        return plan.function(image.narrow(side.dim, start - first, stop - start), weight, bias, **plan.steps)

    (start, stop), (low, high) = side.outputs, side.interior
    middle = outputs(exchange.image, side.start, (low, high))
    image = exchange.finish()
    below, above = (
        [outputs(image, side.needed[0], ends)] if ends[0] < ends[1] else [] for ends in ((start, low), (high, stop))
    )
    return torch.cat([*below, middle, *above], side.dim)


def _run_transposed(plan: ConvolutionPlan, image: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo) -> Tensor:
    """Run the transposed convolution on the input of the outputs, and crop the result to them."""
    crops = _crops(halo)
    gaps = any(min(crop_) < 0 for crop_ in crops)
    result = plan.function(image, weight, None if gaps else bias, output_padding=0, **plan.steps)
    result = padded(result, halo.sides, [(-before, -after) for before, after in crops])
    if gaps and bias is not None:
        result += bias.view(-1, *[1] * len(plan.windows))
    return result


def _crops(halo: Halo) -> list[tuple[int, int]]:
    return [crop(side.window, side.outputs, side.needed) for side in halo.sides]


_OF_IMAGE, _OF_WEIGHT, _OF_BOTH = [True, False, False], [False, True, False], [True, True, False]


def _gradients(
    plan: ConvolutionPlan, gradient: Tensor, image: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of the image and of the weights; values of ``image`` only count for the latter."""
    steps = plan.steps
    images, weights, _ = torch.ops.aten.convolution_backward(
        gradient, image, weight, None, steps["stride"], steps["padding"], steps["dilation"], plan.transposed,
        (0,) * len(plan.windows), steps["groups"], wanted,
    )  # fmt: skip
    return images, weights


HANDLERS: Mapping[str, Handler] = {
    f"conv{kind}{sides}d": convolve for kind in ("", "_transpose") for sides in (1, 2, 3)
}
