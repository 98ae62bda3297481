"""Pools of images whose pixels ranks share: the largest or the mean of each window, or pools to an output size.

As convolutions do, they borrow borders and return their gradients. A max pool keeps which place of each window was the
largest, and neither the shard nor the borders; a mean keeps nothing.

Along a sharded side a pool to an output size comes to 1 (every rank pools its shard, and the results are summed, or
gathered and pooled again; every rank has them) or leaves the side as it is; to other sizes the image is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from galvatron_lite.parallelism.sharded.calls import apply_internal, named_arguments, on_locals, wrap_like
from galvatron_lite.parallelism.sharded.collectives import gather_dims, sum_over
from galvatron_lite.parallelism.sharded.tensor import (
    PIXELS,
    Call,
    Handler,
    ShardSpec,
    from_local,
    global_shape,
    specs_of,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.spatial.grids import SideWindow, needed, output_extent, stays
from galvatron_lite.parallelism.spatial.halo import (
    Borrowing,
    Halo,
    check_batched,
    give_back,
    halo_of,
    halo_sides,
    layout_of,
    per_side,
    shards_in,
    specs_after,
)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of an image."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # one a side of the image
    halo: Halo  # sides that are shared
    extents: tuple[int, ...]  # of the global image

    @property
    def steps(self) -> dict[str, Any]:
        """Arguments of torch's function; the sides of the halo are padded already."""
        padded = {side.dim for side in self.halo.sides}
        return {
            "kernel_size": tuple(window.kernel for window in self.windows),
            "stride": tuple(window.stride for window in self.windows),
            "padding": tuple(0 if dim in padded else window.before for dim, window in enumerate(self.windows, PIXELS)),
            "ceil_mode": self.windows[0].ceil,
        }


def _sides(call: Call) -> int:
    """Sides of the images that a function is for, by its name: 2 of ``max_pool2d``."""
    return int(call.name.removesuffix("_with_indices")[-2])


def _has_full_pixels(image: Tensor, call: Call) -> bool:
    """Whether an image is sharded along samples or channels only: every rank pools its shard."""
    specs = specs_of(image)
    return bool(specs) and specs[-1].dim < len(global_shape(image)) - _sides(call)


def _can_pool(image: Tensor, windows: Sequence[SideWindow], call: Call) -> bool:
    """Whether ranks can share what a pool makes of an image; else it is gathered, as the last pool of a network is.

    They can where it is sharded along sides only and holds floating-point numbers, torch allows the pads, and there is
    an output for every rank.

    Raises:
        InputError: the image has no dim of samples.
    """
    check_batched(image, _sides(call), call.name)
    specs = specs_of(image)
    if not specs or specs[0].dim < PIXELS or not to_local(image).is_floating_point():
        return False
    enough = all(spec.extent >= spec.group.size for spec in specs_after(specs, windows))
    return enough and all(2 * window.before <= window.reach for window in windows)


_MAX = {
    "input": None,
    "kernel_size": 1,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}
_MEAN = {
    "input": None,
    "kernel_size": 1,
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
    "divisor_override": None,
}


def max_pool(call: Call) -> Any:
    """max_pool1d, 2d and 3d of a sharded image: a sharded image; with places of the largest the image is gathered.

    Raises:
        InputError: the image has no dim of samples, or its ranks need more than the ranks beside them hold.
    """
    options = named_arguments(call, _MAX)
    return _pooled(call, options, _MaxPool)


def avg_pool(call: Call) -> Any:
    """avg_pool1d, 2d and 3d of a sharded image: a sharded image; raises as ``max_pool``."""
    options = named_arguments(call, _MEAN)
    return _pooled(call, options, _MeanPool, options["count_include_pad"], options["divisor_override"])


def _pooled(call: Call, options: Mapping[str, Any], function: type[Function], *more: Any) -> Any:
    image, windows = options["input"], _windows(_sides(call), options)
    if _has_full_pixels(image, call):
        return wrap_like(call, on_locals(call), image)
    if options.get("return_indices") or not _can_pool(image, windows, call):
        return call.rules.otherwise(call)
    specs = specs_of(image)
    if all(stays(windows[spec.dim - PIXELS], spec.extent, spec.group.size) for spec in specs):
        # the same on all ranks, and so is what autograd keeps
        return wrap_locals(on_locals(call), specs_after(specs, windows), call.rules)
    extents = global_shape(image)[PIXELS:]
    halo = halo_of(halo_sides(extents, windows, shards_in(specs), call.name), specs)
    pooled = apply_internal(function, to_local(image), Pool(call.name, windows, halo, extents), *more)
    return from_local(pooled, specs_after(specs, windows), call.rules)


def _windows(sides: int, options: Mapping[str, Any]) -> tuple[SideWindow, ...]:
    kernels, stride = per_side(options["kernel_size"], sides), options["stride"]
    strides = per_side(stride, sides) if isinstance(stride, int) or stride else kernels
    pads, dilations = per_side(options["padding"], sides), per_side(options.get("dilation", 1), sides)
    steps = zip(kernels, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, pad, pad, d, options["ceil_mode"]) for k, s, pad, d in steps)


def _with_places(call: Call) -> Any:
    """``max_pool2d_with_indices`` and its kind: places are those of the global image where pixels are full."""
    image = call.args[0] if call.args else call.kwargs["input"]
    return wrap_like(call, on_locals(call), image) if _has_full_pixels(image, call) else call.rules.otherwise(call)


UNEQUAL = "gathers pictures of this size by design"


def adaptive_pool(call: Call) -> Any:
    """Pools of sharded images to an output size: full along sides that come to 1, sharded along the others.

    With places of the largest the image is gathered.

    Raises:
        InputError: the image has no dim of samples.
    """
    options = named_arguments(call, {"input": None, "output_size": None, "return_indices": False})
    image, size, sides = options["input"], options["output_size"], _sides(call)
    sizes = (size,) * sides if isinstance(size, int) or size is None else tuple(size)
    sizes = sizes * sides if len(sizes) == 1 else sizes
    extents = global_shape(image)[-sides:]
    targets = tuple(extent if n is None else n for n, extent in zip(sizes, extents, strict=True))
    if _has_full_pixels(image, call):
        return wrap_like(call, on_locals(call), image)
    largest = "max" in call.name
    # torch's own function below the one of ``torch.nn.functional`` returns places too
    places = options["return_indices"] or (largest and call.function.__module__ != functional.__name__)
    if places or not _can_pool(image, [SideWindow()] * len(targets), call):
        return call.rules.otherwise(call)
    specs = specs_of(image)
    reduced = tuple(spec for spec in specs if targets[spec.dim - PIXELS] == 1)
    left = tuple(spec for spec in specs if spec not in reduced)
    if any(targets[spec.dim - PIXELS] != spec.extent for spec in left):
        return call.rules.otherwise(call._replace(because=UNEQUAL))
    lengths = {spec.dim: spec.length for spec in left}
    local_sizes = tuple(lengths.get(dim, target) for dim, target in enumerate(targets, PIXELS))
    function: Callable[..., Tensor] = getattr(functional, call.name)
    local = function(to_local(image), local_sizes)
    if largest:
        for spec in reduced:
            local = function(gather_dims(local, [ShardSpec(spec.dim, spec.group.size, spec.group)]), local_sizes)
    elif reduced:
        weight = prod(spec.length / spec.extent for spec in reduced)
        local = sum_over(local * weight, [spec.group for spec in reduced])
    return from_local(local, left, call.rules)


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, pool: Pool) -> Tensor:
        image = Borrowing(shard.detach(), pool.halo, fill=-torch.inf).arrive()
        dilation = tuple(window.dilation for window in pool.windows)
        function = getattr(functional, pool.name)
        pooled, places = function(image, **pool.steps, dilation=dilation, return_indices=True)
        ctx.pool, ctx.shape, ctx.layout = pool, image.shape, layout_of(shard)
        ctx.save_for_backward(places)
        return _no_view(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        samples, channels, *extents = ctx.shape
        flat = gradient.new_zeros(samples, channels, prod(extents))
        flat.scatter_add_(2, places.flatten(2), gradient.flatten(2))
        image = flat.view(ctx.shape).contiguous(memory_format=ctx.layout)
        return give_back(image, ctx.pool.halo)(), None


class _MeanPool(Function):
    """Nothing is kept on any rank: where recomputation may end early, it ends on all of them at the same place."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Tensor:
        ctx.pool, ctx.shape, ctx.counted, ctx.divisor = pool, shard.shape, counted, divisor
        means = _means(Borrowing(shard.detach(), pool.halo).arrive(), pool, divisor)
        for factor in _factors(means, pool, counted, divisor):
            means *= factor
        return _no_view(means)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        halo = ctx.pool.halo
        for factor in _factors(gradient, ctx.pool, ctx.counted, ctx.divisor):
            gradient = gradient * factor
        with torch.enable_grad():  # means are linear: their gradient is the same for every image
            shape = list(ctx.shape)
            for side in halo.sides:
                shape[side.dim] = side.needed[1] - side.needed[0]
            image = gradient.new_zeros(()).expand(shape).requires_grad_()
            means = _means(image, ctx.pool, ctx.divisor)
        (back,) = torch.autograd.grad(means, image, gradient)
        return give_back(back, halo)(), None, None, None


def _factors(output: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Iterator[Tensor]:
    """By output along a side: places of the kernel for one that counts; sides whose windows are complete left out."""
    for dim, window in enumerate(pool.windows, PIXELS):
        places = None if divisor else _places(pool, dim, window, counted, output.device)
        if places is not None:
            exact = places.to(torch.promote_types(output.dtype, torch.float32))
            yield (window.kernel / exact).to(output.dtype).view(-1, *[1] * (output.dim() - 1 - dim))


def _places(pool: Pool, dim: int, window: SideWindow, counted: bool, device: torch.device) -> Tensor | None:
    """The places of each window along a side that count, for this rank's outputs; None where they are the kernel."""
    outputs = {side.dim: side.outputs for side in pool.halo.sides}
    extent = pool.extents[dim - PIXELS]
    first, last = outputs.get(dim) or (0, output_extent(window, extent))
    low, high = (-window.before, extent + window.after) if counted else (0, extent)
    start, stop = needed(window, extent, (first, last))
    if low <= start and stop <= high:
        return None
    starts = torch.arange(first, last, device=device) * window.stride - window.before
    return (starts + window.kernel).clamp(max=high) - starts.clamp(min=low)


def _means(image: Tensor, pool: Pool, divisor: int | None) -> Tensor:
    """Sums of windows over their places, also those outside the image, or over ``divisor``."""
    function = getattr(functional, pool.name)
    # one side has no divisor to give: it is cut, so its windows are complete
    places = (
        {}
        if len(pool.windows) == 1
        else {"divisor_override": divisor or prod(window.kernel for window in pool.windows)}
    )
    sums: Tensor = function(image, **pool.steps, **places)
    return sums


def _no_view(output: Tensor) -> Tensor:
    """The same memory, to autograd no view: pools of one side return views, which in-place functions cannot follow."""
    return output.new_empty(0).set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())


HANDLERS: Mapping[str, Handler] = {
    f"{name}{sides}d{suffix}": handler
    for name, suffix, handler in (
        ("max_pool", "", max_pool),
        ("avg_pool", "", avg_pool),
        ("adaptive_max_pool", "", adaptive_pool),
        ("adaptive_avg_pool", "", adaptive_pool),
        ("max_pool", "_with_indices", _with_places),
        ("adaptive_max_pool", "_with_indices", _with_places),
    )
    for sides in (1, 2, 3)
}
