"""Convolutions of pictures whose pixels ranks share, transposed ones too: as on one device, bit for bit of rounding.

One autograd function borrows the borders, and returns their gradients. It keeps the share and the borders, not the
picture made of both; that is put together again for the gradient of the weights, while the borders of the input's
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

from galvatron_lite.parallelism.cuts.grid import PIXELS
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, Handler, cut_tensor, cuts_of, local_of, whole_shape
from galvatron_lite.parallelism.spatial.halo import (
    Box,
    Halo,
    ImagePart,
    assemble,
    borrow,
    give_back,
    padded,
    shape_of,
    sides_after,
)
from galvatron_lite.parallelism.spatial.layers import Amount, check_batched, cuts_after, numbers, on_own_share, pixels
from galvatron_lite.parallelism.spatial.windows import SideWindow, crop, needed


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution of a picture."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # one a side of the picture
    groups: int  # of channels

    @property
    def transposed(self) -> bool:
        """Whether it is the adjoint of a convolution."""
        return self.windows[0].transposed


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """How this rank does its part of a convolution.

    Attributes:
        halo: sides that are cut, or padded unevenly.
        layer: what to do.
        padding: what torch's function pads by: nothing on the sides of the halo.
        split: see ``splits``.
    """

    halo: Halo
    layer: ConvolutionSpec
    padding: tuple[int, ...]
    split: bool = False

    @property
    def steps(self) -> dict[str, Any]:
        """What torch's functions for this convolution are told."""
        windows = self.layer.windows
        stride, dilation = tuple(one.stride for one in windows), tuple(one.dilation for one in windows)
        return {"stride": stride, "padding": self.padding, "dilation": dilation, "groups": self.layer.groups}


def convolve(call: Call) -> Any:
    """conv1d, conv2d, conv3d and conv_transpose1d, 2d, 3d of a cut picture with whole weights: a cut picture.

    Raises:
        InputError: the picture has no dim of samples, or its ranks need more than the ranks beside them hold.
    """
    sides = int(call.name[-2])
    reader = _transposed if "transpose" in call.name else _plain
    picture, weight, bias, layer = reader(call.name, sides, *call.args, **call.kwargs)
    check_batched(picture, sides, call.name)
    cuts = cuts_of(picture)
    if not cuts or cuts[0].dim < PIXELS or isinstance(weight, CutTensor) or isinstance(bias, CutTensor):
        return call.rules.otherwise(call)
    simple = on_own_share(call, cuts, layer.windows)
    if simple is not None:
        return simple
    halo = pixels(whole_shape(picture)[PIXELS:], layer.windows, cuts, call.name)
    ours = {side.dim for side in halo.sides}
    padding = tuple(0 if dim in ours else one.before for dim, one in enumerate(layer.windows, PIXELS))
    share, weight, bias = _as_autocast(local_of(picture), weight, bias)
    plan = ConvolutionPlan(halo, layer, padding, not layer.transposed and splits(halo, share, weight))
    made: Tensor = _Convolve.apply(share, weight, bias, plan)  # type: ignore[no-untyped-call]
    return cut_tensor(made, cuts_after(cuts, layer.windows), call.rules)


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
    kernel, strides, dilations = weight.shape[PIXELS:], numbers(stride, sides), numbers(dilation, sides)
    if isinstance(padding, str):
        spare = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(one // 2, one - one // 2) for one in spare]
    else:
        pads = [(one, one) for one in numbers(padding, sides)]
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
    amounts = (numbers(amount, sides) for amount in (stride, padding, output_padding, dilation))
    windows = (
        SideWindow(k, s, q, q - more, d, transposed=True)
        for k, s, q, more, d in zip(weight.shape[PIXELS:], *amounts, strict=True)
    )
    return input, weight, bias, ConvolutionSpec(name, tuple(windows), groups)


def _as_autocast(share: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype that autocast runs convolutions in, where it is on; it leaves float64 alone."""
    kind = share.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return share, weight, bias
    cast = partial(_lowered, dtype=torch.get_autocast_dtype(kind))
    return cast(share), cast(weight), None if bias is None else cast(bias)


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


SPLIT_WORK = 2**30
"""Multiplications and additions that take an accelerator as long (20 us at 50e12 a second) as a message takes."""
SPLIT_DEPTH = 256
"""Multiplications for an output from which on these take longer than to copy it (8 bytes at 2e12 bytes a second)."""
SPLIT_EDGE = 4
"""Outputs for one at the border, from which on few of them are done as thin strips, which fill an accelerator badly."""


def splits(halo: Halo, share: Tensor, weight: Tensor) -> bool:
    """Whether outputs that need no borders are computed on their own while the borders travel.

    That hides the messages, but costs a copy of the outputs and a kernel for each strip at the border. So it is done
    where something travels, outputs at the border are few, one output takes more work than its copy, and the work lasts
    as long as a message. A rule of sizes only: no clock, so runs repeat.
    """
    if not halo.places.travelling or weight[0].numel() < SPLIT_DEPTH:
        return False
    inner = prod(stop - start for start, stop in halo.places.interior)
    every = prod(stop - start for start, stop in halo.places.outputs)
    sides = {side.dim for side in halo.sides}
    rest = prod(extent for dim, extent in enumerate(share.shape) if dim != 1 and dim not in sides)
    return inner * SPLIT_EDGE >= every * (SPLIT_EDGE - 1) and inner * rest * weight.numel() >= SPLIT_WORK


class _Convolve(Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
        run = _run_transposed if plan.layer.transposed else _run_split if plan.split else _run
        made, borders = run(share, weight, bias, plan)
        ctx.plan, ctx.shape = plan, share.shape
        kept = (share, *borders) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, *kept = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        of_input, of_weight = _transposed_gradients(plan) if plan.layer.transposed else _gradients(plan)
        for_share, for_weight, for_bias, _ = ctx.needs_input_grad
        whole = _uncropped(gradient, plan) if plan.layer.transposed else gradient
        size = shape_of(ctx.shape, plan.halo.sides, plan.halo.places.needed)
        returning = give_back(of_input(size, weight, whole), plan.halo) if for_share else None
        weights = of_weight(_together(kept, plan.halo), weight.shape, whole) if for_weight else None
        biases = gradient.sum((0, *range(PIXELS, gradient.dim()))) if for_bias else None
        return returning.wait() if returning is not None else None, weights, biases, None


def _together(kept: Sequence[Tensor], halo: Halo) -> Tensor:
    """The share and its borders as one picture."""
    boxes = (halo.places.own, *halo.places.borders())
    return assemble(list(map(ImagePart, kept, boxes)), halo.sides, halo.places.needed)


Result = tuple[Tensor, tuple[Tensor, ...]]
"""Outputs, and the borders that were borrowed for them."""


def _run(share: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Result:
    parts = borrow(share, plan.halo).wait()
    made = _function(plan)(assemble(parts, plan.halo.sides, plan.halo.places.needed), weight, bias, **plan.steps)
    return made, tuple(part.tensor for part in parts[1:])


def _run_split(share: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Result:
    """The outputs that need no borders while these travel, and then the others."""
    halo = plan.halo
    coming = borrow(share, halo)
    every, inner = halo.places.outputs, halo.places.interior
    run = partial(_outputs, halo=halo, weight=weight, bias=bias, plan=plan)
    first = run(coming.here, box=inner)
    parts = coming.wait()
    strips = [ImagePart(run(parts, box=box), box) for box in _frame(every, inner)]
    return assemble([ImagePart(first, inner), *strips], sides_after(halo.sides), every), tuple(
        part.tensor for part in parts[1:]
    )


def _outputs(
    parts: Sequence[ImagePart], box: Box, halo: Halo, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan
) -> Tensor:
    """The outputs of a box."""
    places = tuple(needed(side.window, side.extent, one) for side, one in zip(halo.sides, box, strict=True))
    made: Tensor = _function(plan)(assemble(parts, halo.sides, places), weight, bias, **plan.steps)
    return made


def _frame(outer: Box, inner: Box) -> Iterator[Box]:
    """Boxes that cover ``outer`` without ``inner``, each place once."""
    for index, ((start, stop), (low, high)) in enumerate(zip(outer, inner, strict=True)):
        for places in ((start, low), (high, stop)):
            if places[0] < places[1]:
                yield (*inner[:index], places, *outer[index + 1 :])


def _run_transposed(share: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Result:
    """The transposed convolution of what the outputs depend on, cropped to them."""
    parts = borrow(share, plan.halo).wait()
    crops = _crops(plan.halo)
    gaps = any(min(one) < 0 for one in crops)
    steps = plan.steps
    made = _function(plan)(
        assemble(parts, plan.halo.sides, plan.halo.places.needed),
        weight,
        None if gaps else bias,
        output_padding=0,
        **steps,
    )
    made = padded(made, plan.halo.sides, [(-before, -after) for before, after in crops])
    if gaps and bias is not None:
        made += bias.view(-1, *[1] * len(plan.layer.windows))
    return made, tuple(part.tensor for part in parts[1:])


def _crops(halo: Halo) -> list[tuple[int, int]]:
    every = zip(halo.sides, halo.places.outputs, halo.places.needed, strict=True)
    return [crop(side.window, outputs, inputs) for side, outputs, inputs in every]


def _uncropped(gradient: Tensor, plan: ConvolutionPlan) -> Tensor:
    """The gradient of what a transposed convolution made before it was cropped."""
    return padded(gradient, plan.halo.sides, _crops(plan.halo))


def _function(plan: ConvolutionPlan) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(functional, plan.layer.name)
    return function


OfInput = Callable[[Sequence[int], Tensor, Tensor], Tensor]
OfWeight = Callable[[Tensor, Sequence[int], Tensor], Tensor]


def _gradients(plan: ConvolutionPlan) -> tuple[OfInput, OfWeight]:
    """Of a convolution: (its input's shape, weight, gradient) -> that of its input, and (input, weight's shape,
    gradient) -> that of its weight."""
    name = plan.layer.name
    return partial(getattr(grad, f"{name}_input"), **plan.steps), partial(getattr(grad, f"{name}_weight"), **plan.steps)


def _transposed_gradients(plan: ConvolutionPlan) -> tuple[OfInput, OfWeight]:
    """As ``_gradients``: a transposed convolution is the adjoint of the convolution with its weight, so the gradient of
    its input is that convolution, and that of its weight the convolution's with input and gradient changed about."""
    name = plan.layer.name.replace("_transpose", "")
    forward, of_weight = getattr(functional, name), getattr(grad, f"{name}_weight")
    return (
        lambda size, weight, gradient: forward(gradient, weight, **plan.steps),  # noqa: ARG005
        lambda picture, shape, gradient: of_weight(gradient, shape, picture, **plan.steps),
    )


HANDLERS: Mapping[str, Handler] = {
    f"conv{kind}{sides}d": convolve for kind in ("", "_transpose") for sides in (1, 2, 3)
}
"""Convolutions."""
