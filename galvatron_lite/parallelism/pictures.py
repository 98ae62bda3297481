"""What convolutional layers are made of: operators with weights, their channels, tensors and windows. No torch here."""

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
    """A kind of layer as a key of what is remembered of it: by identity, as its many operators are slow to compare."""

    kind: LayerKind

    def __hash__(self) -> int:
        return id(self.kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KindKey) and other.kind is self.kind


@dataclass(frozen=True, slots=True)
class Window:
    """A window that passes over a picture: a convolution's kernel or a pooling window."""

    count: int  # how many such there are in a layer
    channels: tuple[int, int]  # of the input, and of the output
    # depth, height and width; those that a picture or a line does not have are one pixel
    sides: tuple[Side, Side, Side]
    gradient: bool  # whether the input takes one

    @property
    def items(self) -> tuple[int, int]:
        """Items of input and output, a sample."""
        return (
            self.channels[0] * prod(side.extent for side in self.sides),
            self.channels[1] * prod(side.output for side in self.sides),
        )


def is_picture(kind: LayerKind) -> bool:
    """Whether a layer works on pictures with convolutions, pooling and what works pixel by pixel."""
    mixes = any(
        operator.kind is OperatorClass.ATTENTION
        or (operator.kind is OperatorClass.MATMUL and not operator.weight_bytes)
        for operator in kind.operators
    )
    return kind.dims.in_channels > 0 and kind.dims.sequence <= 1 and not mixes


def extents_of(kind: LayerKind) -> Extents:
    """Pixels of the picture that enters a layer along depth, height and width; 1 along sides it does not have."""
    return max(kind.dims.depth, 1), max(kind.dims.height, 1), max(kind.dims.width, 1)


@lru_cache(maxsize=4096)
def windows_of(operators: tuple[Operator, ...]) -> tuple[Window, ...]:
    """The windows that pass over pictures of more than one pixel."""
    every = (_window(operator) for operator in operators if sides_of(operator))
    return tuple(window for window in every if any(side.extent > 1 for side in window.sides))


def _window(one: Operator) -> Window:
    sides = sides_of(one)
    depth, height, width = (Side(1),) * (len(SIDES) - len(sides)) + sides
    if one.kind is OperatorClass.CONVOLUTION:
        channels, gradient = (one.shape[0], one.shape[1]), one.backward_flops > one.flops
    else:
        channels, gradient = (one.shape[1], one.shape[1]), True
    return Window(one.count or 1, channels, (depth, height, width), gradient)


def has_weights(one: Operator) -> bool:
    """Whether an operator is a convolution or a matmul with weights."""
    return one.kind is OperatorClass.CONVOLUTION or (one.kind is OperatorClass.MATMUL and one.weight_bytes > 0)


def channels_of(one: Operator) -> tuple[int, int, int]:
    """Input channels, output channels and groups of an operator with weights."""
    if one.kind is OperatorClass.MATMUL:
        return one.shape[1], one.shape[2], 1
    return one.shape[0], one.shape[1], one.shape[2]


def items_of(one: Operator) -> tuple[int, int, int]:
    """Items of input and output a sample, and of weights, of an operator with weights, all calls together."""
    if one.kind is OperatorClass.MATMUL:
        rows, inner, columns = one.shape
        return one.count * rows * inner, one.count * rows * columns, one.count * inner * columns
    inputs, outputs, groups = one.shape[:3]
    sides = sides_of(one)
    weights = outputs * inputs // groups * prod(side.kernel for side in sides)
    entering, leaving = (prod(getattr(side, name) for side in sides) for name in ("extent", "output"))
    return one.count * inputs * entering, one.count * outputs * leaving, one.count * weights
