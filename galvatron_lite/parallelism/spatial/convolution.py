"""Convolutions of images whose pixels ranks share, transposed ones too.

One autograd function borrows the borders and returns their gradients. It keeps the shard and the borders, not the
image made of both; that is put together again for the gradient of the weights, while the borders of the input's
gradient travel. Gradients of weights and biases are this rank's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional, grad

from galvatron_lite.parallelism.sharded.calls import named_arguments
from galvatron_lite.parallelism.sharded.tensor import (
    PIXELS,
    Call,
    Handler,
    ShardedTensor,
    from_local,
    global_shape,
    specs_of,
    to_local,
)
from galvatron_lite.parallelism.spatial.halo import (
    Borrowing,
    Box,
    Halo,
    borrow,
    box_shape,
    check_batched,
    give_back,
    halo_of,
    layout_of,
    on_shards,
    padded,
    per_side,
    region,
    specs_after,
    with_borders,
)
from galvatron_lite.parallelism.spatial.windows import SideWindow, crop, needed


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """How this rank does its part of a convolution."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # one a side of the image
    groups: int  # of channels
    halo: Halo  # sides that are shared, or padded unevenly

    @property
    def transposed(self) -> bool:
        """Whether it is the adjoint of a convolution."""
        return self.windows[0].transposed

    @property
    def function(self) -> Callable[..., Tensor]:
        """Torch's function."""
        function: Callable[..., Tensor] = getattr(functional, self.name)
        return function

    @property
    def steps(self) -> dict[str, Any]:
        """Arguments of torch's functions for this convolution; sides of the halo are padded already."""
        padded_sides = self.halo.places.dims
        return {
            "stride": tuple(one.stride for one in self.windows),
            "padding": tuple(0 if dim in padded_sides else one.before for dim, one in enumerate(self.windows, PIXELS)),
            "dilation": tuple(one.dilation for one in self.windows),
            "groups": self.groups,
        }


_ARGUMENTS = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = {
    "input": None,
    "weight": None,
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "groups": 1,
    "dilation": 1,
}


def convolve(call: Call) -> Any:
    """conv1d, conv2d, conv3d and conv_transpose1d, 2d, 3d of a sharded image with full weights: a sharded image.

    Raises:
        InputError: the image has no dim of samples, or its ranks need more than the ranks beside them hold.
    """
    transposed, sides = "transpose" in call.name, int(call.name[-2])
    options = named_arguments(call, _TRANSPOSED if transposed else _ARGUMENTS)
    image, weight, bias = options["input"], options["weight"], options["bias"]
    check_batched(image, sides, call.name)
    specs = specs_of(image)
    if not specs or specs[0].dim < PIXELS or isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        return call.rules.otherwise(call)
    windows = _windows(weight.shape[PIXELS:], options, transposed)
    simple = on_shards(call, specs, windows)
    if simple is not None:
        return simple
    halo = halo_of(global_shape(image)[PIXELS:], windows, specs, call.name)
    plan = ConvolutionPlan(call.name, windows, options["groups"], halo)
    shard, weight, bias = _as_autocast(to_local(image), weight, bias)
    result: Tensor = _Convolve.apply(shard, weight, bias, plan)  # type: ignore[no-untyped-call]
    return from_local(result, specs_after(specs, windows), call.rules)


def _windows(kernel: Sequence[int], options: Mapping[str, Any], transposed: bool) -> tuple[SideWindow, ...]:
    sides = len(kernel)
    strides, dilations = per_side(options["stride"], sides), per_side(options["dilation"], sides)
    if isinstance(options["padding"], str):
        spare = [d * (k - 1) if options["padding"] == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(one // 2, one - one // 2) for one in spare]
    else:
        extra = per_side(options.get("output_padding", 0), sides)
        pads = [(one, one - more) for one, more in zip(per_side(options["padding"], sides), extra, strict=True)]
    every = zip(kernel, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, *pad, d, transposed=transposed) for k, s, pad, d in every)


def _as_autocast(shard: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype that autocast runs convolutions in, where it is on; it leaves float64 alone."""
    kind = shard.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return shard, weight, bias
    cast = partial(_lowered, dtype=torch.get_autocast_dtype(kind))
    return cast(shard), cast(weight), None if bias is None else cast(bias)


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


OVERLAP_WORK = 2**30
"""Multiplications and additions that take an accelerator as long (20 us at 50e12 a second) as a message takes."""
OVERLAP_DEPTH = 256
"""Multiplications for an output from which on these take longer than to copy it (8 bytes at 2e12 bytes a second)."""
OVERLAP_EDGE = 4
"""Outputs for one at the border, from which on few of them are done as thin strips, which fill an accelerator badly."""


def overlaps(halo: Halo, shard: Tensor, weight: Tensor) -> bool:
    """Whether outputs that need no borders are computed on their own while the borders travel.

    That hides the messages, but costs a copy of the outputs and a kernel for each strip at the border. So it is done
    where something travels, outputs at the border are few, one output takes more work than its copy, and the work lasts
    as long as a message. A rule of sizes only: no clock, so runs repeat.
    """
    if not halo.places.travelling or weight[0].numel() < OVERLAP_DEPTH:
        return False
    inner = prod(stop - start for start, stop in halo.places.interior)
    every = prod(stop - start for start, stop in halo.places.outputs)
    sides = {side.dim for side in halo.places.sides}
    rest = prod(extent for dim, extent in enumerate(shard.shape) if dim != 1 and dim not in sides)
    return inner * OVERLAP_EDGE >= every * (OVERLAP_EDGE - 1) and inner * rest * weight.numel() >= OVERLAP_WORK


class _Convolve(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
        borrowing = borrow(shard, plan.halo)
        run = _run_transposed if plan.transposed else _run_overlapped if overlaps(plan.halo, shard, weight) else _run
        result = run(plan, borrowing, weight, bias)
        ctx.plan, ctx.shape = plan, shard.shape
        kept = (shard, *borrowing.borders) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, *kept = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        for_shard, for_weight, for_bias, _ = ctx.needs_input_grad
        arriving = gradient
        if plan.transposed:
            # of what the transposed convolution made before it was cropped
            arriving = padded(gradient, plan.halo.places.sides, _crops(plan.halo))
        returning = weights = None
        if for_shard:
            size = box_shape(ctx.shape, plan.halo.places.dims, plan.halo.places.needed)
            returning = give_back(_input_gradient(plan, size, weight, arriving), plan.halo)
        if for_weight:
            image = with_borders(kept[0], plan.halo, kept[1:])
            weights = _weight_gradient(plan, image, weight.shape, arriving)
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        return returning() if returning is not None else None, weights, biases, None


def _run(plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None) -> Tensor:
    return plan.function(borrowing.arrive(), weight, bias, **plan.steps)


def _run_overlapped(plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs that need no borders while these travel, and then the others."""
    sides, dims, every = plan.halo.places.sides, plan.halo.places.dims, plan.halo.places.outputs

    def outputs(box: Box) -> Tensor:
        places = tuple(needed(side.window, side.extent, one) for side, one in zip(sides, box, strict=True))
        return plan.function(borrowing.region(places), weight, bias, **plan.steps)

    inner = outputs(plan.halo.places.interior)
    borrowing.arrive()
    shape = box_shape(inner.shape, dims, every)
    result = torch.empty(shape, dtype=inner.dtype, device=inner.device, memory_format=layout_of(inner))
    region(result, dims, every, plan.halo.places.interior).copy_(inner)
    for box in _frame(every, plan.halo.places.interior):
        region(result, dims, every, box).copy_(outputs(box))
    return result


def _frame(outer: Box, inner: Box) -> Iterator[Box]:
    """Boxes that cover ``outer`` without ``inner``, each place once."""
    for index, ((start, stop), (low, high)) in enumerate(zip(outer, inner, strict=True)):
        for places in ((start, low), (high, stop)):
            if places[0] < places[1]:
                yield (*inner[:index], places, *outer[index + 1 :])


def _run_transposed(plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The transposed convolution of what the outputs depend on, cropped to them."""
    crops = _crops(plan.halo)
    gaps = any(min(one) < 0 for one in crops)
    result = plan.function(borrowing.arrive(), weight, None if gaps else bias, output_padding=0, **plan.steps)
    result = padded(result, plan.halo.places.sides, [(-before, -after) for before, after in crops])
    if gaps and bias is not None:
        result += bias.view(-1, *[1] * len(plan.windows))
    return result


def _crops(halo: Halo) -> list[tuple[int, int]]:
    every = zip(halo.places.sides, halo.places.outputs, halo.places.needed, strict=True)
    return [crop(side.window, outputs, inputs) for side, outputs, inputs in every]


def _input_gradient(plan: ConvolutionPlan, size: Sequence[int], weight: Tensor, gradient: Tensor) -> Tensor:
    """A transposed convolution is the adjoint of the convolution with its weight: its gradient is that convolution."""
    name = plan.name
    if plan.transposed:
        function: Callable[..., Tensor] = getattr(functional, name.replace("_transpose", ""))
        return function(gradient, weight, **plan.steps)
    backward: Callable[..., Tensor] = getattr(grad, f"{name}_input")
    return backward(size, weight, gradient, **plan.steps)


def _weight_gradient(plan: ConvolutionPlan, image: Tensor, shape: Sequence[int], gradient: Tensor) -> Tensor:
    """Of a transposed convolution, that of the convolution with input and gradient exchanged."""
    backward: Callable[..., Tensor] = getattr(grad, f"{plan.name.replace('_transpose', '')}_weight")
    first, second = (gradient, image) if plan.transposed else (image, gradient)
    return backward(first, shape, second, **plan.steps)


HANDLERS: Mapping[str, Handler] = {
    f"conv{kind}{sides}d": convolve for kind in ("", "_transpose") for sides in (1, 2, 3)
}
