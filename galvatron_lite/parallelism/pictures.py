"""The operators of convolutional layers: their weights, channels, tensors and windows. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass
from galvatron_lite.model.sides import SIDES, Side, sides_of

Extents = tuple[int, int, int]
"""Pixels along depth, height and width."""


@dataclass(frozen=True, slots=True, eq=False)
class KindKey:
    """A kind of layer as a cache key, compared by identity since its many operators are slow to compare."""

    kind: LayerKind

    def __hash__(self) -> int:
        return id(self.kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KindKey) and other.kind is self.kind


@dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a convolution or pooling."""

    count: int  # of equal windows in a layer
    channels: tuple[int, int]  # of the input, and of the output
    sides: tuple[Side, Side, Side]  # depth, height and width; one pixel along sides that the input does not have
    gradient: bool  # whether the input needs a gradient

    @property
    def items(self) -> tuple[int, int]:
        """Items of input and output of a sample."""
        return (
            self.channels[0] * prod(side.extent for side in self.sides),
            self.channels[1] * prod(side.output for side in self.sides),
        )


def is_picture(kind: LayerKind) -> bool:
    """Whether a layer consists of convolutions, pooling and operators on single pixels."""
    mixes = any(
        operator.kind is OperatorClass.ATTENTION
        or (operator.kind is OperatorClass.MATMUL and not operator.weight_bytes)
        for operator in kind.operators
    )
    return kind.dims.in_channels > 0 and kind.dims.sequence <= 1 and not mixes


def extents_of(kind: LayerKind) -> Extents:
    """Return the pixels of a layer's input along depth, height and width; 1 along sides that it does not have."""
    return max(kind.dims.depth, 1), max(kind.dims.height, 1), max(kind.dims.width, 1)


@lru_cache(maxsize=4096)
def windows_of(operators: tuple[Operator, ...]) -> tuple[Window, ...]:
    """Return the windows on inputs of more than one pixel."""
    windows = (_window(operator) for operator in operators if sides_of(operator))
    return tuple(window for window in windows if any(side.extent > 1 for side in window.sides))


def _window(operator: Operator) -> Window:
    sides = sides_of(operator)
    depth, height, width = (Side(1),) * (len(SIDES) - len(sides)) + sides
    if operator.kind is OperatorClass.CONVOLUTION:
        channels, gradient = (operator.shape[0], operator.shape[1]), operator.backward_flops > operator.flops
    else:
        channels, gradient = (operator.shape[1], operator.shape[1]), True
    return Window(operator.count or 1, channels, (depth, height, width), gradient)


def has_weights(operator: Operator) -> bool:
    """Whether an operator is a convolution or a matmul with weights."""
    is_matmul = operator.kind is OperatorClass.MATMUL
    return operator.kind is OperatorClass.CONVOLUTION or (is_matmul and operator.weight_bytes > 0)


def channels_of(operator: Operator) -> tuple[int, int, int]:
    """Return input channels, output channels and groups of an operator with weights."""
    if operator.kind is OperatorClass.MATMUL:
        return operator.shape[1], operator.shape[2], 1
    return operator.shape[0], operator.shape[1], operator.shape[2]


def items_of(operator: Operator) -> tuple[int, int, int]:
    """Return the items of input and output of a sample, and of weights, in all calls of an operator with weights."""
    count = operator.count
    if operator.kind is OperatorClass.MATMUL:
        rows, inner, columns = operator.shape
        return count * rows * inner, count * rows * columns, count * inner * columns
    inputs, outputs, groups = operator.shape[:3]
    sides = sides_of(operator)
    weights = outputs * inputs // groups * prod(side.kernel for side in sides)
    input_pixels, output_pixels = (prod(getattr(side, name) for side in sides) for name in ("extent", "output"))
    return count * inputs * input_pixels, count * outputs * output_pixels, count * weights
