"""Convolutions of images whose pixels ranks share, transposed ones too.

One autograd function borrows the borders and returns their gradients. It keeps the shard and the borders, not the
image made of both; that is put together again for the gradient of the weights, while the borders of the input's
gradient travel. Gradients of weights and biases are this rank's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
    locals_only,
    specs_of,
    to_local,
)
from galvatron_lite.parallelism.spatial.halo import (
    Borrowing,
    Box,
    Halo,
    HaloPlaces,
    Shard,
    borrow,
    box_shape,
    check_batched,
    give_back,
    halo_places,
    layout_of,
    padded,
    per_side,
    region,
    shard_of,
    specs_after,
    with_borders,
    with_groups,
)
from galvatron_lite.parallelism.spatial.windows import SideWindow, crop, needed, stays


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """How a rank does its part of a convolution, worked out once for each layer and image."""

    windows: tuple[SideWindow, ...]  # one a side of the image
    function: Callable[..., Tensor]  # torch's
    name: str  # of it
    places: HaloPlaces | None  # sides that are shared, or padded unevenly; None where each rank's shard is enough
    steps: Mapping[str, Any]  # arguments of torch's functions; sides of the halo are padded already

    @property
    def transposed(self) -> bool:
        """Whether it is the adjoint of a convolution."""
        return self.windows[0].transposed


_ARGUMENTS = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1,
              "output_padding": 0}  # fmt: skip
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
    values = (options.get(name, 0) for name in _AMOUNTS)
    amounts = tuple([one if isinstance(one, (int, str)) else tuple(one) for one in values])
    shards = tuple(map(shard_of, specs))
    plan = _planned(call.name, global_shape(image)[PIXELS:], tuple(weight.shape[PIXELS:]), amounts, shards)
    if plan.places is None:
        with locals_only():
            result: Tensor = call.function(*call.args, **call.kwargs)
    else:
        shard, weight, bias = _as_autocast(to_local(image), weight, bias)
        result = _Convolve.apply(shard, weight, bias, plan, with_groups(plan.places, specs))  # type: ignore[no-untyped-call]
    return from_local(result, specs_after(specs, plan.windows), call.rules)


_AMOUNTS = ("stride", "padding", "dilation", "groups", "output_padding")
_Amounts = tuple[int | str | tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _planned(
    name: str, extents: tuple[int, ...], kernel: tuple[int, ...], amounts: _Amounts, shards: tuple[Shard, ...]
) -> ConvolutionPlan:
    options = dict(zip(_AMOUNTS, amounts, strict=True))
    windows = _windows(kernel, options, "transpose" in name)
    degrees = {dim: degree for dim, degree, _ in shards}
    alone = all(stays(windows[dim - PIXELS], extents[dim - PIXELS], degree) for dim, degree in degrees.items())
    places = None if alone else halo_places(extents, windows, shards, name)
    outside = () if places is None else places.dims
    steps = {
        "stride": tuple(one.stride for one in windows),
        "padding": tuple(0 if dim in outside else one.before for dim, one in enumerate(windows, PIXELS)),
        "dilation": tuple(one.dilation for one in windows),
        "groups": options["groups"],
    }
    return ConvolutionPlan(windows, getattr(functional, name), name, places, steps)


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


def overlaps(places: HaloPlaces, shard: Tensor, weight: Tensor) -> bool:
    """Whether outputs that need no borders are computed on their own while the borders travel.

    That hides the messages, but costs a copy of the outputs and a kernel for each strip at the border. So it is done
    where something travels, outputs at the border are few, one output takes more work than its copy, and the work lasts
    as long as a message. A rule of sizes only: no clock, so runs repeat.
    """
    if not places.travelling or weight.numel() < OVERLAP_DEPTH * weight.shape[0]:
        return False
    inner = prod(stop - start for start, stop in places.interior)
    every = prod(stop - start for start, stop in places.outputs)
    sides = {side.dim for side in places.sides}
    rest = prod(extent for dim, extent in enumerate(shard.shape) if dim != 1 and dim not in sides)
    return inner * OVERLAP_EDGE >= every * (OVERLAP_EDGE - 1) and inner * rest * weight.numel() >= OVERLAP_WORK


class _Convolve(Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, halo: Halo
    ) -> Tensor:
        borrowing = borrow(shard, halo)
        run = _run_transposed if plan.transposed else _run_overlapped if overlaps(halo.places, shard, weight) else _run
        result = run(plan, borrowing, weight, bias)
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
            arriving = padded(gradient, halo.places.sides, _crops(halo))
        returning = weights = None
        if for_shard:
            size = box_shape(ctx.shape, halo.places.dims, halo.places.needed)
            returning = give_back(_input_gradient(plan, size, weight, arriving), halo)
        if for_weight:
            image = with_borders(kept[0], halo, kept[1:])
            weights = _weight_gradient(plan, image, weight.shape, arriving)
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        return returning() if returning is not None else None, weights, biases, None, None


def _run(plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None) -> Tensor:
    return plan.function(borrowing.arrive(), weight, bias, **plan.steps)


def _run_overlapped(plan: ConvolutionPlan, borrowing: Borrowing, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs that need no borders while these travel, and then the others."""
    halo = borrowing.halo
    sides, dims, every = halo.places.sides, halo.places.dims, halo.places.outputs

    def outputs(box: Box) -> Tensor:
        places = tuple(needed(side.window, side.extent, one) for side, one in zip(sides, box, strict=True))
        return plan.function(borrowing.region(places), weight, bias, **plan.steps)

    inner = outputs(halo.places.interior)
    borrowing.arrive()
    shape = box_shape(inner.shape, dims, every)
    result = torch.empty(shape, dtype=inner.dtype, device=inner.device, memory_format=layout_of(inner))
    region(result, dims, every, halo.places.interior).copy_(inner)
    for box in _frame(every, halo.places.interior):
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
    halo = borrowing.halo
    crops = _crops(halo)
    gaps = any(min(one) < 0 for one in crops)
    result = plan.function(borrowing.arrive(), weight, None if gaps else bias, output_padding=0, **plan.steps)
    result = padded(result, halo.places.sides, [(-before, -after) for before, after in crops])
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
