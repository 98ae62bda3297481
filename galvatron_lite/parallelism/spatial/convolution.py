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
    Amount,
    Box,
    Halo,
    ImagePart,
    assemble,
    borrow,
    check_batched,
    give_back,
    halo_of,
    on_shards,
    padded,
    per_side,
    shape_of,
    sides_after,
    specs_after,
)
from galvatron_lite.parallelism.spatial.windows import SideWindow, crop, needed


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution of an image."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # one a side of the image
    groups: int  # of channels

    @property
    def transposed(self) -> bool:
        """Whether it is the adjoint of a convolution."""
        return self.windows[0].transposed


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """How this rank does its part of a convolution."""

    halo: Halo  # sides that are shared, or padded unevenly
    layer: ConvolutionSpec
    overlaps: bool = False  # see ``overlaps``

    @property
    def function(self) -> Callable[..., Tensor]:
        """Torch's function."""
        function: Callable[..., Tensor] = getattr(functional, self.layer.name)
        return function

    @property
    def steps(self) -> dict[str, Any]:
        """Arguments of torch's functions for this convolution; sides of the halo are padded already."""
        windows, padded_sides = self.layer.windows, {side.dim for side in self.halo.sides}
        return {
            "stride": tuple(one.stride for one in windows),
            "padding": tuple(0 if dim in padded_sides else one.before for dim, one in enumerate(windows, PIXELS)),
            "dilation": tuple(one.dilation for one in windows),
            "groups": self.layer.groups,
        }


def convolve(call: Call) -> Any:
    """conv1d, conv2d, conv3d and conv_transpose1d, 2d, 3d of a sharded image with full weights: a sharded image.

    Raises:
        InputError: the image has no dim of samples, or its ranks need more than the ranks beside them hold.
    """
    sides = int(call.name[-2])
    reader = _transposed if "transpose" in call.name else _plain
    image, weight, bias, layer = reader(call.name, sides, *call.args, **call.kwargs)
    check_batched(image, sides, call.name)
    specs = specs_of(image)
    if not specs or specs[0].dim < PIXELS or isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        return call.rules.otherwise(call)
    simple = on_shards(call, specs, layer.windows)
    if simple is not None:
        return simple
    halo = halo_of(global_shape(image)[PIXELS:], layer.windows, specs, call.name)
    shard, weight, bias = _as_autocast(to_local(image), weight, bias)
    plan = ConvolutionPlan(halo, layer, not layer.transposed and overlaps(halo, shard, weight))
    result: Tensor = _Convolve.apply(shard, weight, bias, plan)  # type: ignore[no-untyped-call]
    return from_local(result, specs_after(specs, layer.windows), call.rules)


def _plain(
    name: str,
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Amount = 1,
    padding: Amount | str = 0,
    dilation: Amount = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, ConvolutionSpec]:
    kernel, strides, dilations = weight.shape[PIXELS:], per_side(stride, sides), per_side(dilation, sides)
    if isinstance(padding, str):
        spare = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(one // 2, one - one // 2) for one in spare]
    else:
        pads = [(one, one) for one in per_side(padding, sides)]
    windows = (SideWindow(k, s, *q, d) for k, s, q, d in zip(kernel, strides, pads, dilations, strict=True))
    return input, weight, bias, ConvolutionSpec(name, tuple(windows), groups)


def _transposed(
    name: str,
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Amount = 1,
    padding: Amount = 0,
    output_padding: Amount = 0,
    groups: int = 1,
    dilation: Amount = 1,
) -> tuple[Tensor, Tensor, Tensor | None, ConvolutionSpec]:
    amounts = (per_side(amount, sides) for amount in (stride, padding, output_padding, dilation))
    windows = (
        SideWindow(k, s, q, q - more, d, transposed=True)
        for k, s, q, more, d in zip(weight.shape[PIXELS:], *amounts, strict=True)
    )
    return input, weight, bias, ConvolutionSpec(name, tuple(windows), groups)


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
    sides = {side.dim for side in halo.sides}
    rest = prod(extent for dim, extent in enumerate(shard.shape) if dim != 1 and dim not in sides)
    return inner * OVERLAP_EDGE >= every * (OVERLAP_EDGE - 1) and inner * rest * weight.numel() >= OVERLAP_WORK


class _Convolve(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
        halo = plan.halo
        borrowing = borrow(shard, halo)
        if plan.overlaps:
            result, parts = _overlapped(plan, borrowing.here, borrowing.wait, weight, bias)
        else:
            parts = borrowing.wait()
            image = assemble(parts, halo.sides, halo.places.needed)
            run = _run_transposed if plan.layer.transposed else _run
            result = run(plan, image, weight, bias)
        ctx.plan, ctx.shape = plan, shard.shape
        kept = (part.tensor for part in parts) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, *kept = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        sides, places = plan.halo.sides, plan.halo.places
        for_shard, for_weight, for_bias, _ = ctx.needs_input_grad
        arriving = gradient
        if plan.layer.transposed:
            # of what the transposed convolution made before it was cropped
            arriving = padded(gradient, sides, _crops(plan.halo))
        returning = weights = None
        if for_shard:
            size = shape_of(ctx.shape, sides, places.needed)
            returning = give_back(_input_gradient(plan, size, weight, arriving), plan.halo)
        if for_weight:
            boxes = (places.held, *places.borders())
            image = assemble(list(map(ImagePart, kept, boxes)), sides, places.needed)
            weights = _weight_gradient(plan, image, weight.shape, arriving)
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        return returning.wait() if returning is not None else None, weights, biases, None


def _run(plan: ConvolutionPlan, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return plan.function(image, weight, bias, **plan.steps)


def _overlapped(
    plan: ConvolutionPlan,
    here: Sequence[ImagePart],
    wait: Callable[[], tuple[ImagePart, ...]],
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, tuple[ImagePart, ...]]:
    """The outputs that need no borders while these travel, and then the others."""
    sides, every, inner = plan.halo.sides, plan.halo.places.outputs, plan.halo.places.interior

    def outputs(parts: Sequence[ImagePart], box: Box) -> ImagePart:
        places = tuple(needed(side.window, side.extent, one) for side, one in zip(sides, box, strict=True))
        return ImagePart(_run(plan, assemble(parts, sides, places), weight, bias), box)

    first = outputs(here, inner)
    parts = wait()
    strips = [outputs(parts, box) for box in _frame(every, inner)]
    return assemble([first, *strips], sides_after(sides), every), parts


def _frame(outer: Box, inner: Box) -> Iterator[Box]:
    """Boxes that cover ``outer`` without ``inner``, each place once."""
    for index, ((start, stop), (low, high)) in enumerate(zip(outer, inner, strict=True)):
        for places in ((start, low), (high, stop)):
            if places[0] < places[1]:
                yield (*inner[:index], places, *outer[index + 1 :])


def _run_transposed(plan: ConvolutionPlan, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The transposed convolution of what the outputs depend on, cropped to them."""
    crops = _crops(plan.halo)
    gaps = any(min(one) < 0 for one in crops)
    result = plan.function(image, weight, None if gaps else bias, output_padding=0, **plan.steps)
    result = padded(result, plan.halo.sides, [(-before, -after) for before, after in crops])
    if gaps and bias is not None:
        result += bias.view(-1, *[1] * len(plan.layer.windows))
    return result


def _crops(halo: Halo) -> list[tuple[int, int]]:
    every = zip(halo.sides, halo.places.outputs, halo.places.needed, strict=True)
    return [crop(side.window, outputs, inputs) for side, outputs, inputs in every]


def _input_gradient(plan: ConvolutionPlan, size: Sequence[int], weight: Tensor, gradient: Tensor) -> Tensor:
    """A transposed convolution is the adjoint of the convolution with its weight: its gradient is that convolution."""
    name = plan.layer.name
    if plan.layer.transposed:
        function: Callable[..., Tensor] = getattr(functional, name.replace("_transpose", ""))
        return function(gradient, weight, **plan.steps)
    backward: Callable[..., Tensor] = getattr(grad, f"{name}_input")
    return backward(size, weight, gradient, **plan.steps)


def _weight_gradient(plan: ConvolutionPlan, image: Tensor, shape: Sequence[int], gradient: Tensor) -> Tensor:
    """Of a transposed convolution, that of the convolution with input and gradient exchanged."""
    backward: Callable[..., Tensor] = getattr(grad, f"{plan.layer.name.replace('_transpose', '')}_weight")
    first, second = (gradient, image) if plan.layer.transposed else (image, gradient)
    return backward(first, shape, second, **plan.steps)


HANDLERS: Mapping[str, Handler] = {
    f"conv{kind}{sides}d": convolve for kind in ("", "_transpose") for sides in (1, 2, 3)
}
