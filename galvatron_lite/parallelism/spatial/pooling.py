"""Pools of pictures whose pixels ranks share: the largest, the mean, or a norm of each window.

As convolutions do, they borrow borders and return their gradients. A max pool keeps which place of each window was the
largest, and neither the share nor the borders; a mean keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from galvatron_lite.parallelism.cuts.grid import PIXELS
from galvatron_lite.parallelism.cuts.tensor import Call, Handler, cut_tensor, cuts_of, local_of, whole_shape
from galvatron_lite.parallelism.spatial.halo import Halo, assemble, borrow, give_back, layout_of, shape_of
from galvatron_lite.parallelism.spatial.layers import Amount, check_batched, cuts_after, numbers, on_own_share, pixels
from galvatron_lite.parallelism.spatial.windows import SideWindow, needed, output_extent


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of a picture."""

    name: str  # of torch's function
    windows: tuple[SideWindow, ...]  # one a side of the picture
    halo: Halo  # sides that are cut
    whole: tuple[int, ...]  # extents of the whole picture

    @property
    def steps(self) -> dict[str, Any]:
        """What torch's function is told; the sides of the halo are padded already."""
        padded = {side.dim for side in self.halo.sides}
        return {
            "kernel_size": tuple(one.kernel for one in self.windows),
            "stride": tuple(one.stride for one in self.windows),
            "padding": tuple(0 if dim in padded else one.before for dim, one in enumerate(self.windows, PIXELS)),
            "ceil_mode": self.windows[0].ceil,
        }


def max_pool(call: Call) -> Any:
    """max_pool1d, 2d and 3d of a cut picture: a cut picture; where places are asked for too, the picture is gathered.

    Raises:
        InputError: the picture has no dim of samples, or its ranks need more than the ranks beside them hold.
    """
    picture, windows, places = _max_arguments(sides_of(call), *call.args, **call.kwargs)
    if places or not can_pool(picture, windows, call):
        return call.rules.otherwise(call)
    simple = on_own_share(call, cuts_of(picture), windows)
    if simple is not None:
        return simple
    made = max_of_windows(picture, call.name, windows)
    return cut_tensor(made, cuts_after(cuts_of(picture), windows), call.rules)


def avg_pool(call: Call) -> Any:
    """avg_pool1d, 2d and 3d of a cut picture: a cut picture.

    Raises:
        InputError: as ``max_pool``.
    """
    picture, windows, counted, divisor = _avg_arguments(sides_of(call), *call.args, **call.kwargs)
    if not can_pool(picture, windows, call):
        return call.rules.otherwise(call)
    simple = on_own_share(call, cuts_of(picture), windows)
    if simple is not None:
        return simple
    made = mean_of_windows(local_of(picture), pool_of(picture, call.name, windows), counted, divisor)
    return cut_tensor(made, cuts_after(cuts_of(picture), windows), call.rules)


def lp_pool(call: Call) -> Any:
    """lp_pool1d, 2d and 3d of a cut picture: a cut picture; the power of a mean of powers, as torch does it.

    Raises:
        InputError: as ``max_pool``.
    """
    picture, power, windows = _lp_arguments(sides_of(call), *call.args, **call.kwargs)
    if not can_pool(picture, windows, call):
        return call.rules.otherwise(call)
    simple = on_own_share(call, cuts_of(picture), windows)
    if simple is not None:
        return simple
    pool = pool_of(picture, call.name.replace("lp", "avg"), windows)
    mean = mean_of_windows(local_of(picture).pow(power), pool)
    made = (mean.sign() * mean.abs().relu() * prod(one.kernel for one in windows)).pow(1.0 / power)
    return cut_tensor(made, cuts_after(cuts_of(picture), windows), call.rules)


def sides_of(call: Call) -> int:
    """Sides of the pictures that a function is for, by its name: 2 of ``max_pool2d``."""
    return int(call.name[-2])


def can_pool(picture: Tensor, windows: Sequence[SideWindow], call: Call) -> bool:
    """Whether ranks can share what a pool makes of a picture; else it is gathered, as the last pool of a network is.

    They can where it is cut along sides only and holds floating-point numbers, torch allows the pads, and there is an
    output for every rank.

    Raises:
        InputError: the picture has no dim of samples.
    """
    check_batched(picture, sides_of(call), call.name)
    cuts = cuts_of(picture)
    if not cuts or cuts[0].dim < PIXELS or not local_of(picture).is_floating_point():
        return False
    enough = all(cut.extent >= cut.line.size for cut in cuts_after(cuts, windows))
    return enough and all(2 * window.before <= window.reach for window in windows)


def max_of_windows(picture: Tensor, name: str, windows: Sequence[SideWindow]) -> Tensor:
    """This rank's share of the largest of each window; ``name``: of torch's function."""
    made: Tensor = _MaxPool.apply(local_of(picture), pool_of(picture, name, windows))  # type: ignore[no-untyped-call]
    return made


def mean_of_windows(share: Tensor, pool: Pool, counted: bool = True, divisor: int | None = None) -> Tensor:
    """This rank's share of the mean of each window.

    Args:
        share: of the picture.
        pool: how it is pooled.
        counted: places outside the picture, by which it is padded, count.
        divisor: of the sum of a window; else its places.
    """
    made: Tensor = _MeanPool.apply(share, pool, counted, divisor)  # type: ignore[no-untyped-call]
    return made


def pool_of(picture: Tensor, name: str, windows: Sequence[SideWindow]) -> Pool:
    """How a cut picture is pooled; ``name``: of torch's function.

    Raises:
        InputError: ranks cannot share the picture under these windows.
    """
    extents = whole_shape(picture)[PIXELS:]
    return Pool(name, tuple(windows), pixels(extents, windows, cuts_of(picture), name), extents)


def _windows(
    sides: int, kernel: Amount, stride: Amount | None, padding: Amount, ceil: bool, dilation: Amount = 1
) -> tuple[SideWindow, ...]:
    kernels = numbers(kernel, sides)
    strides = numbers(stride, sides) if isinstance(stride, int) or stride else kernels
    pads, dilations = numbers(padding, sides), numbers(dilation, sides)
    steps = zip(kernels, strides, pads, dilations, strict=True)
    return tuple(SideWindow(k, s, q, q, d, ceil) for k, s, q, d in steps)


def _max_arguments(
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    kernel_size: Amount,
    stride: Amount | None = None,
    padding: Amount = 0,
    dilation: Amount = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, tuple[SideWindow, ...], bool]:
    return input, _windows(sides, kernel_size, stride, padding, ceil_mode, dilation), return_indices


def _avg_arguments(
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    kernel_size: Amount,
    stride: Amount | None = None,
    padding: Amount = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[Tensor, tuple[SideWindow, ...], bool, int | None]:
    return input, _windows(sides, kernel_size, stride, padding, ceil_mode), count_include_pad, divisor_override


def _lp_arguments(
    sides: int,
    input: Tensor,  # noqa: A002 - as torch names it
    norm_type: float,
    kernel_size: Amount,
    stride: Amount | None = None,
    ceil_mode: bool = False,
) -> tuple[Tensor, float, tuple[SideWindow, ...]]:
    return input, float(norm_type), _windows(sides, kernel_size, stride, 0, ceil_mode)


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, pool: Pool) -> Tensor:
        halo = pool.halo
        picture = assemble(borrow(share, halo).wait(), halo.sides, halo.places.needed, fill=-torch.inf)
        dilation = tuple(one.dilation for one in pool.windows)
        function = getattr(functional, pool.name)
        made, places = function(picture, **pool.steps, dilation=dilation, return_indices=True)
        ctx.pool, ctx.shape, ctx.layout = pool, picture.shape, layout_of(share)
        ctx.save_for_backward(places)
        return _no_view(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        samples, channels, *extents = ctx.shape
        flat = gradient.new_zeros(samples, channels, prod(extents))
        flat.scatter_add_(2, places.flatten(2), gradient.flatten(2))
        picture = flat.view(ctx.shape).contiguous(memory_format=ctx.layout)
        return give_back(picture, ctx.pool.halo).wait(), None


class _MeanPool(Function):
    """Nothing is kept on any rank: where recomputation may end early, it ends on all of them at the same place."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Tensor:
        ctx.pool, ctx.shape, ctx.counted, ctx.divisor = pool, share.shape, counted, divisor
        picture = assemble(borrow(share, pool.halo).wait(), pool.halo.sides, pool.halo.places.needed)
        made = _means(picture, pool, divisor)
        for factor in _factors(made, pool, counted, divisor):
            made *= factor
        return _no_view(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        halo = ctx.pool.halo
        for factor in _factors(gradient, ctx.pool, ctx.counted, ctx.divisor):
            gradient = gradient * factor
        with torch.enable_grad():  # means are linear: their gradient is the same for every picture
            picture = (
                gradient.new_zeros(()).expand(shape_of(ctx.shape, halo.sides, halo.places.needed)).requires_grad_()
            )
            made = _means(picture, ctx.pool, ctx.divisor)
        (back,) = torch.autograd.grad(made, picture, gradient)
        return give_back(back, halo).wait(), None, None, None


def _factors(output: Tensor, pool: Pool, counted: bool, divisor: int | None) -> Iterator[Tensor]:
    """By output along a side: places of the kernel for one that counts; sides whose windows are complete left out."""
    for dim, window in enumerate(pool.windows, PIXELS):
        places = None if divisor else _places(pool, dim, window, counted, output.device)
        if places is not None:
            exact = places.to(torch.promote_types(output.dtype, torch.float32))
            yield (window.kernel / exact).to(output.dtype).view(-1, *[1] * (output.dim() - 1 - dim))


def _places(pool: Pool, dim: int, window: SideWindow, counted: bool, device: torch.device) -> Tensor | None:
    """The places of each window along a side that count, for this rank's outputs; None where they are the kernel."""
    made = {side.dim: outputs for side, outputs in zip(pool.halo.sides, pool.halo.places.outputs, strict=True)}
    extent = pool.whole[dim - PIXELS]
    first, last = made.get(dim) or (0, output_extent(window, extent))
    low, high = (-window.before, extent + window.after) if counted else (0, extent)
    start, stop = needed(window, extent, (first, last))
    if low <= start and stop <= high:
        return None
    starts = torch.arange(first, last, device=device) * window.stride - window.before
    return (starts + window.kernel).clamp(max=high) - starts.clamp(min=low)


def _means(picture: Tensor, pool: Pool, divisor: int | None) -> Tensor:
    """Sums of windows over their places, also those outside the picture, or over ``divisor``."""
    function = getattr(functional, pool.name)
    # one side has no divisor to give: it is cut, so its windows are complete
    places = {} if len(pool.windows) == 1 else {"divisor_override": divisor or prod(one.kernel for one in pool.windows)}
    made: Tensor = function(picture, **pool.steps, **places)
    return made


def _no_view(output: Tensor) -> Tensor:
    """The same memory, to autograd no view: pools of one side return views, which in-place functions cannot follow."""
    return output.new_empty(0).set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())


_POOLS: Mapping[str, Handler] = {"max_pool": max_pool, "avg_pool": avg_pool, "lp_pool": lp_pool}

HANDLERS: Mapping[str, Handler] = {
    f"{name}{sides}d": handler for name, handler in _POOLS.items() for sides in (1, 2, 3)
}
"""Pools of windows."""
