"""Convolutions of images whose pixels ranks share, transposed ones too.

One autograd function borrows the borders and returns their gradients. It keeps the shard and the borders, not the
image made of both; that is put together again for the gradient of the weights, while the borders of the input's
gradient travel. Gradients of weights and biases are this rank's parts.
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
from galvatron_lite.parallelism.spatial.grids import SideWindow, crop, needed, output_extent, stays
from galvatron_lite.parallelism.spatial.halo import (
    Borrowing,
    Halo,
    HaloSide,
    Shard,
    check_batched,
    give_back,
    halo_of,
    halo_sides,
    padded,
    per_side,
    shards_in,
)


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """How a rank does its part of a convolution, worked out once for each layer and image."""

    windows: tuple[SideWindow, ...]  # one a side of the image
    function: Callable[..., Tensor]  # torch's
    # sides that are shared, or padded unevenly; None where each rank's shard is enough
    sides: tuple[HaloSide, ...] | None
    steps: Mapping[str, Any]  # arguments of torch's functions; sides of the halo are padded already
    outputs: tuple[int, ...]  # extents of what the convolution makes, of sharded dims
    transposed: bool  # whether it is the adjoint of a convolution


_DEFAULTS: dict[str, Any] = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0}
_ARGUMENTS = {**_DEFAULTS, "dilation": 1, "groups": 1}
_TRANSPOSED = {**_DEFAULTS, "output_padding": 0, "groups": 1, "dilation": 1}


def convolve(call: Call) -> Any:
    """conv1d, conv2d, conv3d and conv_transpose1d, 2d, 3d of a sharded image with full weights: a sharded image.

    Raises:
        InputError: the image has no dim of samples, or its ranks need more than the ranks beside them hold.
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
    """A convolution that looks at sharded tensors itself, not through ``__torch_function__``: it saves host time in
    every call."""

    def forward(self, image: Tensor) -> Any:
        """As the convolution does."""
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
    alone: Callable[[Tensor], Any],
) -> Any:
    """The sharded result; ``alone`` convolves the shard where no rank needs another."""
    specs = image.specs
    extents = tuple([spec.extent for spec in specs])
    plan = _planned(name, shard.shape, extents, weight.shape, amounts, shards_in(specs))
    if plan.sides is None:
        result = alone(shard)
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
    alone = all(stays(windows[dim - PIXELS], extents[dim - PIXELS], degree) for dim, degree, _ in shards)
    sides = None if alone else halo_sides(tuple(extents), windows, shards, name)
    outside = [side.dim for side in sides or ()]
    steps = {
        "stride": tuple(window.stride for window in windows),
        "padding": tuple(0 if dim in outside else window.before for dim, window in enumerate(windows, PIXELS)),
        "dilation": tuple(window.dilation for window in windows),
        "groups": options["groups"],
    }
    outputs = tuple(output_extent(windows[dim - PIXELS], extents[dim - PIXELS]) for dim, *_ in shards)
    return ConvolutionPlan(windows, getattr(functional, name), sides, steps, outputs, windows[0].transposed)


def _windows(kernel: Sequence[int], options: Mapping[str, Any], transposed: bool) -> tuple[SideWindow, ...]:
    sides = len(kernel)
    strides, dilations = per_side(options["stride"], sides), per_side(options["dilation"], sides)
    if isinstance(options["padding"], str):
        spare = [d * (k - 1) if options["padding"] == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(one // 2, one - one // 2) for one in spare]
    else:
        extra = per_side(options["output_padding"], sides)
        pads = [(one, one - more) for one, more in zip(per_side(options["padding"], sides), extra, strict=True)]
    every = zip(kernel, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, *pad, d, transposed=transposed) for k, s, pad, d in every)


def _as_autocast(shard: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype that autocast runs convolutions in, where it is on; it leaves float64 alone."""
    dtype = autocast_dtype(shard)
    if dtype is None:
        return shard, weight, bias

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(shard), cast(weight), None if bias is None else cast(bias)


OVERLAP_WORK = 2**30
"""Multiplications and additions that take an accelerator as long (20 us at 50e12 a second) as a message takes."""
OVERLAP_DEPTH = 256
"""Multiplications for an output from which on these take longer than to copy it (8 bytes at 2e12 bytes a second)."""
OVERLAP_EDGE = 4
"""Outputs for one at the border, from which on few of them are done as thin strips, which fill an accelerator badly."""


def overlaps(sides: Sequence[HaloSide], shard: Tensor, weight: Tensor) -> bool:
    """Whether outputs that need no borders of the last side are computed on their own while these travel.

    That hides the messages, but costs a copy of the outputs and a kernel for each strip at the border. So it is done
    where something travels, outputs at the border are few, one output takes more work than its copy, and the work lasts
    as long as a message. A rule of sizes only: no clock, so runs repeat.
    """
    if weight.numel() < OVERLAP_DEPTH * weight.shape[0] or not sides[-1].travels:
        return False
    every = prod(side.outputs[1] - side.outputs[0] for side in sides)
    inner = prod(side.interior[1] - side.interior[0] for side in sides)
    dims = {side.dim for side in sides}
    rest = prod(extent for dim, extent in enumerate(shard.shape) if dim != 1 and dim not in dims)
    return inner * OVERLAP_EDGE >= every * (OVERLAP_EDGE - 1) and inner * rest * weight.numel() >= OVERLAP_WORK


class _Convolve(Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, halo: Halo
    ) -> Tensor:
        # views of what takes a gradient cost twice as much
        borrowing = Borrowing(shard.detach(), halo)
        if plan.transposed:
            result = _run_transposed(plan, borrowing.arrive(), weight, bias, halo)
        elif overlaps(halo.sides, shard, weight):
            result = _run_overlapped(plan, borrowing, weight, bias, halo.sides[-1])
        else:
            result = plan.function(borrowing.arrive(), weight, bias, **plan.steps)
        ctx.plan, ctx.halo, ctx.shape = plan, halo, shard.shape
        kept = (shard, *borrowing.borders) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, *kept = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        halo: Halo = ctx.halo
        for_shard, for_weight, for_bias, *_ = ctx.needs_input_grad
        arriving = gradient
        if plan.transposed:
            # of what the transposed convolution made before it was cropped
            arriving = padded(gradient, halo.sides, _crops(halo))
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        if not for_weight:
            size = list(ctx.shape)
            for side in halo.sides:
                size[side.dim] = side.needed[1] - side.needed[0]
            image = gradient.new_empty(1).expand(size)
            return give_back(_gradients(plan, arriving, image, weight, _OF_IMAGE)[0], halo)(), None, biases, None, None
        image = Borrowing(kept[0], halo, kept=kept[1:]).arrive()
        if not for_shard:
            return None, _gradients(plan, arriving, image, weight, _OF_WEIGHT)[1], biases, None, None
        if not overlaps(halo.sides, kept[0], weight):  # one call costs less host time than two
            images, weights = _gradients(plan, arriving, image, weight, _OF_BOTH)
            return give_back(images, halo)(), weights, biases, None, None
        returning = give_back(_gradients(plan, arriving, image, weight, _OF_IMAGE)[0], halo)
        weights = _gradients(plan, arriving, image, weight, _OF_WEIGHT)[1]
        return returning(), weights, biases, None, None


def _run_overlapped(
    plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None, side: HaloSide
) -> Tensor:
    """The outputs that need no borders of a side while these travel, and then the others."""

    def outputs(image: Tensor, first: int, places: Range) -> Tensor:
        """Those of a range, of an image that begins at place ``first``."""
        start, stop = needed(side.window, 0, places)
        return plan.function(image.narrow(side.dim, start - first, stop - start), weight, bias, **plan.steps)

    (start, stop), (low, high) = side.outputs, side.interior
    middle = outputs(borrowing.image, side.start, (low, high))
    image = borrowing.arrive()
    ends = [outputs(image, side.needed[0], one) if one[0] < one[1] else None for one in ((start, low), (high, stop))]
    return torch.cat([one for one in (ends[0], middle, ends[1]) if one is not None], side.dim)


def _run_transposed(plan: ConvolutionPlan, image: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo) -> Tensor:
    """The transposed convolution of what the outputs depend on, cropped to them."""
    crops = _crops(halo)
    gaps = any(min(one) < 0 for one in crops)
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
    """Of the image and of the weights; without the image's values where the latter is not wanted."""
    steps = plan.steps
    images, weights, _ = torch.ops.aten.convolution_backward(
        gradient, image, weight, None, steps["stride"], steps["padding"], steps["dilation"], plan.transposed,
        (0,) * len(plan.windows), steps["groups"], wanted,
    )  # fmt: skip
    return images, weights


HANDLERS: Mapping[str, Handler] = {
    f"conv{kind}{sides}d": convolve for kind in ("", "_transpose") for sides in (1, 2, 3)
}
