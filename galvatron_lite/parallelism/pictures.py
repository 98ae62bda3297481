"""What convolutional layers are made of: operators with weights, their channels, tensors and windows. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass


@dataclass(frozen=True, slots=True)
class Window:
    """A window that passes over a picture: a convolution's kernel or a pooling window.

    Attributes:
        count: how many such there are in a layer.
        channels: of the input.
        extent: height and width of the input.
        kernel: height and width of the window.
        stride: along each side.
        gradient: whether the input takes one.
    """

    count: int
    channels: int
    extent: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    gradient: bool

    def beyond(self, side: int) -> int:
        """Rows (side 0) or columns (1) that a device's own outputs need of its neighbours, both sides together."""
        return max(self.kernel[side] - self.stride[side], 0)


def is_picture(kind: LayerKind) -> bool:
    """Whether a layer works on pictures with convolutions, pooling and what works pixel by pixel."""
    mixes = any(
        one.kind is OperatorClass.ATTENTION or (one.kind is OperatorClass.MATMUL and not one.weight_bytes)
        for one in kind.operators
    )
    return kind.dims.in_channels > 0 and kind.dims.sequence <= 1 and not mixes


@lru_cache(maxsize=4096)
def windows_of(operators: tuple[Operator, ...]) -> tuple[Window, ...]:
    """The windows that pass over pictures of more than one pixel; two sides only."""
    return tuple(window for one in operators if (window := _window(one)) and window.extent != (1, 1))


def _window(one: Operator) -> Window | None:
    """A convolution's, or that of a pooling operator whose shape says it."""
    if one.kind is OperatorClass.CONVOLUTION and len(one.shape) == _CONVOLUTION:
        channels, sides, gradient = one.shape[0], one.shape[3:], one.backward_flops > one.flops
    elif one.kind is OperatorClass.MEMORY and len(one.shape) == _POOLING:
        channels, sides, gradient = one.shape[1], one.shape[2:], True
    else:
        return None
    height, width, rows, columns, down, along = sides
    return Window(one.count or 1, channels, (height, width), (rows, columns), (down, along), gradient)


_CONVOLUTION = 9
"""Figures in the shape of a convolution over two sides."""
_POOLING = 8
"""Figures in the shape of a pooling window over two sides."""


def has_weights(one: Operator) -> bool:
    """Whether an operator is a convolution or a matmul with weights."""
    return one.kind is OperatorClass.CONVOLUTION or (one.kind is OperatorClass.MATMUL and one.weight_bytes > 0)


def channels_of(one: Operator) -> tuple[int, int, int]:
    """Input channels, output channels and groups of an operator with weights."""
    if one.kind is OperatorClass.MATMUL:
        return one.shape[1], one.shape[2], 1
    return one.shape[0], one.shape[1], one.shape[2]


def items_of(one: Operator) -> tuple[int, int, int]:
    """Items of input and output a sample, and of weights, of an operator with weights, all calls together.

    A convolution's output is what its FLOPs say: padding is not part of its shape.
    """
    if one.kind is OperatorClass.MATMUL:
        rows, inner, columns = one.shape
        return one.count * rows * inner, one.count * rows * columns, one.count * inner * columns
    inputs, outputs, groups = one.shape[:3]
    sides = (len(one.shape) - 3) // 3
    extent, kernel = prod(one.shape[3 : 3 + sides]), prod(one.shape[3 + sides : 3 + 2 * sides])
    inner = inputs // groups * kernel
    return one.count * inputs * extent, one.flops // (2 * inner), one.count * outputs * inner
