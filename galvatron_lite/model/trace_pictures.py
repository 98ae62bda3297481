"""Operators on pictures below autograd: channels and sides, and what they sum over all pixels (``Operator.shape``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_POOLS = {
    "max_pool2d_with_indices": 2, "avg_pool2d": 2, "max_pool3d_with_indices": 3, "avg_pool3d": 3,
}  # fmt: skip
"""Pooling windows, and over how many sides they pass."""
_ADAPTIVE = {
    "_adaptive_avg_pool2d": 2, "adaptive_max_pool2d": 2, "_adaptive_avg_pool3d": 3, "adaptive_max_pool3d": 3,
}  # fmt: skip
_COPIES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
"""Interpolations that read one pixel for each of theirs."""
_BLENDS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
"""Those that read the two nearest along each side."""
_PADDED, _DILATED = 3, 4
"""Places of padding and dilation among the arguments of a pooling operator."""
_LINES = 3
"""Of a batch of lines."""


def convolution_shape(args: Sequence[Any]) -> tuple[int, ...]:
    """Channels, groups and sides of ``aten.convolution``'s arguments; strides below 0 where it is transposed."""
    taken, weight, stride, padding, dilation, transposed, groups = (args[place] for place in (0, 1, 3, 4, 5, 6, 8))
    sides = taken.dim() - 2
    steps = [-step if transposed else step for step in _each(stride, sides)]
    around = (*_each(padding, sides), *_each(dilation, sides))
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (taken.shape[1], channels, groups, *taken.shape[2:], *weight.shape[2:], *steps, *around)


def window_of(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Channels and sides of what passes a window over a picture; empty: nothing such.

    An adaptive pooling's window is that of the pooling with equal outputs and no padding. Interpolation to f times the
    size is a transposed convolution: of kernel f where it copies, of kernel 2 f - f % 2 and padding f // 2 where it
    blends (Long et al. 2015, arXiv:1411.4038, section 3.3).
    """
    if name in _POOLS:
        return _pooled(name, args)
    if name in _ADAPTIVE:
        return _adapted(args[0].shape[-_ADAPTIVE[name] - 1 :], _each(args[1], _ADAPTIVE[name]))
    if name in _COPIES or name in _BLENDS:
        return _enlarged(args[0].shape[1:], args[1], blends=name in _BLENDS)
    return ()


def _pooled(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    sides = _POOLS[name]
    whole = args[0].shape[-sides - 1 :]
    padding = args[_PADDED] if len(args) > _PADDED else (0,)
    dilation = args[_DILATED] if len(args) > _DILATED and name.startswith("max") else (1,)
    kernel = _each(args[1], sides)
    stride = _each(args[2], sides) if len(args) > 2 and args[2] else kernel
    return (*whole, *kernel, *stride, *_each(padding, sides), *_each(dilation, sides))


def _adapted(whole: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
    stride = [max(extent // output, 1) for extent, output in zip(whole[1:], left, strict=True)]
    kernel = [
        max(extent - (output - 1) * step, 1) for extent, output, step in zip(whole[1:], left, stride, strict=True)
    ]
    return (*whole, *kernel, *stride, *(0 for _ in left), *(1 for _ in left))


def _enlarged(whole: Sequence[int], after: Sequence[int], *, blends: bool) -> tuple[int, ...]:
    """Where a side is not enlarged by a whole number, a window that reads one pixel on either end."""
    rows = [_enlarging(extent, output, blends) for extent, output in zip(whole[1:], after, strict=True)]
    return (*whole, *(figure for place in range(3) for figure in (row[place] for row in rows)), *(1 for _ in rows))


def _enlarging(extent: int, output: int, blends: bool) -> tuple[int, int, int]:
    """Kernel, stride and padding of interpolation along one side."""
    times, rest = divmod(output, extent)
    if rest or not times:
        return 3, 1, 1
    return (2 * times - times % 2, -times, times // 2) if blends else (times, -times, 0)


def _each(figures: Sequence[int] | int, sides: int) -> tuple[int, ...]:
    """A figure for each side; one may stand for all."""
    told = (figures,) if isinstance(figures, int) else tuple(figures)
    return told * sides if len(told) == 1 else told


def statistics_of(name: str, args: Sequence[Any]) -> int:
    """Items that are summed over all pixels of a picture before the call's result is known.

    Sum and square sum of every channel (batch normalisation) or group of channels of a sample (group normalisation),
    and one sum a channel of a sample where the mean of all pixels is taken.
    """
    if name.endswith("backward"):
        return 0
    if "batch_norm" in name:
        return 2 * int(args[0].shape[1])
    if name == "native_group_norm":
        return 2 * int(args[6])
    dims = args[0].dim() if name == "mean" and len(args) > 1 else 0
    if dims > _LINES and args[1] is not None and sorted(dim % dims for dim in args[1]) == [*range(2, dims)]:
        return int(args[0].shape[1])
    return 0
