"""Pools of images whose pixels are sharded: max and mean pools, and pools to an output size (adaptive pools).

They exchange borders like convolutions. A max pool saves the index of the largest item of each window, neither the
shard nor the borders; a mean pool saves nothing.

Along a sharded side an adaptive pool either keeps the extent, or reduces it to 1: every rank pools its shard, and the
results are summed, or gathered and pooled again, on all ranks. For other sizes the image is gathered.
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
from galvatron_lite.parallelism.spatial.grids import SideWindow, input_range, output_extent, runs_locally
from galvatron_lite.parallelism.spatial.halo import (
    Halo,
    HaloExchange,
    check_batched,
    halo_of,
    halo_sides,
    layout_of,
    per_side,
    return_gradients,
    shards_in,
    specs_after,
)


@dataclass(frozen=True, slots=True)
class Pool:
    """A max or mean pool of an image."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # by side of the image
    halo: Halo  # sharded sides
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
    """The number of sides of images that a function takes, from its name: 2 for ``max_pool2d``."""
    return int(call.name.removesuffix("_with_indices")[-2])


def _has_full_pixels(image: Tensor, call: Call) -> bool:
    """Whether an image is sharded only along samples or channels, so that every rank pools its shard."""
    specs = specs_of(image)
    return bool(specs) and specs[-1].dim < len(global_shape(image)) - _sides(call)


def _can_pool(image: Tensor, windows: Sequence[SideWindow], call: Call) -> bool:
    """Whether ranks can shard the output of a pool; if not, the image is gathered, as for the last pool of a network.

    They can if a floating-point image is sharded along sides only, torch allows the padding, and there is an output for
    every rank.

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
    """Run max_pool1d, 2d and 3d of a sharded image; with ``return_indices`` it is gathered.

    Raises:
        InputError: the image has no dim of samples, or a rank needs more than its neighbours hold.
    """
    options = named_arguments(call, _MAX)
    return _pooled(call, options, _MaxPool)


def avg_pool(call: Call) -> Any:
    """Run avg_pool1d, 2d and 3d of a sharded image; raises as ``max_pool``."""
    options = named_arguments(call, _MEAN)
    return _pooled(call, options, _MeanPool, options["count_include_pad"], options["divisor_override"])


def _pooled(call: Call, options: Mapping[str, Any], function: type[Function], *arguments: Any) -> Any:
    image, windows = options["input"], _windows(_sides(call), options)
    if _has_full_pixels(image, call):
        return wrap_like(call, on_locals(call), image)
    if options.get("return_indices") or not _can_pool(image, windows, call):
        return call.rules.otherwise(call)
    specs = specs_of(image)
    if all(runs_locally(windows[spec.dim - PIXELS], spec.extent, spec.group.size) for spec in specs):
        # equal on all ranks, as is what autograd saves
        return wrap_locals(on_locals(call), specs_after(specs, windows), call.rules)
    extents = global_shape(image)[PIXELS:]
    halo = halo_of(halo_sides(extents, windows, shards_in(specs), call.name), specs)
    pooled = apply_internal(function, to_local(image), Pool(call.name, windows, halo, extents), *arguments)
    return from_local(pooled, specs_after(specs, windows), call.rules)


def _windows(sides: int, options: Mapping[str, Any]) -> tuple[SideWindow, ...]:
    kernels, stride = per_side(options["kernel_size"], sides), options["stride"]
    strides = per_side(stride, sides) if isinstance(stride, int) or stride else kernels
    pads, dilations = per_side(options["padding"], sides), per_side(options.get("dilation", 1), sides)
    steps = zip(kernels, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, pad, pad, d, options["ceil_mode"]) for k, s, pad, d in steps)


def _with_indices(call: Call) -> Any:
    """``max_pool2d_with_indices`` and similar functions: indices are those of the global image if pixels are full."""
    image = call.args[0] if call.args else call.kwargs["input"]
    return wrap_like(call, on_locals(call), image) if _has_full_pixels(image, call) else call.rules.otherwise(call)


SIZE_REASON = "gathers pictures of this size by design"


def adaptive_pool(call: Call) -> Any:
    """Run adaptive pools of a sharded image: the result is full along sides of extent 1, sharded along the others.

    With ``return_indices`` the image is gathered.

    Raises:
        InputError: the image has no dim of samples.
    """
    options = named_arguments(call, {"input": None, "output_size": None, "return_indices": False})
    image, size, sides = options["input"], options["output_size"], _sides(call)
    sizes = (size,) * sides if isinstance(size, int) or size is None else tuple(size)
    sizes = sizes * sides if len(sizes) == 1 else sizes
    extents = global_shape(image)[-sides:]
    targets = tuple(extent if target is None else target for target, extent in zip(sizes, extents, strict=True))
    if _has_full_pixels(image, call):
        return wrap_like(call, on_locals(call), image)
    largest = "max" in call.name
    # torch's function beneath that of ``torch.nn.functional`` returns indices too
    indices = options["return_indices"] or (largest and call.function.__module__ != functional.__name__)
    if indices or not _can_pool(image, [SideWindow()] * len(targets), call):
        return call.rules.otherwise(call)
    specs = specs_of(image)
    reduced = tuple(spec for spec in specs if targets[spec.dim - PIXELS] == 1)
    kept = tuple(spec for spec in specs if spec not in reduced)
    if any(targets[spec.dim - PIXELS] != spec.extent for spec in kept):
        return call.rules.otherwise(call._replace(gather_reason=SIZE_REASON))
    lengths = {spec.dim: spec.length for spec in kept}
    local_sizes = tuple(lengths.get(dim, target) for dim, target in enumerate(targets, PIXELS))
    function: Callable[..., Tensor] = getattr(functional, call.name)
    local = function(to_local(image), local_sizes)
    if largest:
        for spec in reduced:
            local = function(gather_dims(local, [ShardSpec(spec.dim, spec.group.size, spec.group)]), local_sizes)
    elif reduced:
        weight = prod(spec.length / spec.extent for spec in reduced)
        local = sum_over(local * weight, [spec.group for spec in reduced])
    return from_local(local, kept, call.rules)


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, pool: Pool) -> Tensor:
        image = HaloExchange(shard.detach(), pool.halo, fill=-torch.inf).finish()
        dilation = tuple(window.dilation for window in pool.windows)
        function = getattr(functional, pool.name)
        pooled, indices = function(image, **pool.steps, dilation=dilation, return_indices=True)
        ctx.pool, ctx.shape, ctx.layout = pool, image.shape, layout_of(shard)
        ctx.save_for_backward(indices)
        return _no_view(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        samples, channels, *extents = ctx.shape
        flat = gradient.new_zeros(samples, channels, prod(extents))
        flat.scatter_add_(2, indices.flatten(2), gradient.flatten(2))
        image = flat.view(ctx.shape).contiguous(memory_format=ctx.layout)
        return return_gradients(image, ctx.pool.halo)(), None


class _MeanPool(Function):
    """No rank saves anything, so that recomputation that may end early ends at the same point on all ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Tensor:
        ctx.pool, ctx.shape, ctx.counted, ctx.divisor = pool, shard.shape, counted, divisor
        means = _means(HaloExchange(shard.detach(), pool.halo).finish(), pool, divisor)
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
        return return_gradients(back, halo)(), None, None, None


def _factors(output: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Iterator[Tensor]:
    """By output along a side, the kernel over the positions that count; sides with complete windows are left out."""
    for dim, window in enumerate(pool.windows, PIXELS):
        counts = None if divisor else _counted_positions(pool, dim, window, counted, output.device)
        if counts is not None:
            exact = counts.to(torch.promote_types(output.dtype, torch.float32))
            yield (window.kernel / exact).to(output.dtype).view(-1, *[1] * (output.dim() - 1 - dim))


def _counted_positions(pool: Pool, dim: int, window: SideWindow, counted: bool, device: torch.device) -> Tensor | None:
    """How many positions of each window along a side count, for this rank's outputs; None if all do."""
    outputs = {side.dim: side.outputs for side in pool.halo.sides}
    extent = pool.extents[dim - PIXELS]
    first, last = outputs.get(dim) or (0, output_extent(window, extent))
    low, high = (-window.before, extent + window.after) if counted else (0, extent)
    start, stop = input_range(window, extent, (first, last))
    if low <= start and stop <= high:
        return None
    starts = torch.arange(first, last, device=device) * window.stride - window.before
    return (starts + window.kernel).clamp(max=high) - starts.clamp(min=low)


def _means(image: Tensor, pool: Pool, divisor: int | None) -> Tensor:
    """Sums of windows over all their positions, with padding, or over ``divisor``."""
    function = getattr(functional, pool.name)
    options = pool.steps
    if len(pool.windows) > 1:  # avg_pool1d has no such option; its side has been padded, so windows are complete
        options["divisor_override"] = divisor or prod(window.kernel for window in pool.windows)
    means: Tensor = function(image, **options)
    return means


def _no_view(output: Tensor) -> Tensor:
    """Alias a tensor without a view: pools of one side return views, on which in-place functions fail in autograd."""
    return output.new_empty(0).set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())


HANDLERS: Mapping[str, Handler] = {
    f"{name}{sides}d{suffix}": handler
    for name, suffix, handler in (
        ("max_pool", "", max_pool),
        ("avg_pool", "", avg_pool),
        ("adaptive_max_pool", "", adaptive_pool),
        ("adaptive_avg_pool", "", adaptive_pool),
        ("max_pool", "_with_indices", _with_indices),
        ("adaptive_max_pool", "_with_indices", _with_indices),
    )
    for sides in (1, 2, 3)
}
