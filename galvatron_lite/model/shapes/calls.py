"""What a layer does, written down: values and the calls that make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Part(IntEnum):
    """How tensor parallelism divides a value; the larger one wins where a value is held in two ways."""

    TENSOR = 0
    SEQUENCE = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of one sample.

    Attributes:
        key: which storage; two values of one key are the same memory on one device.
        items: elements per sample.
        item_bytes: bytes of one element.
        part: how tensor parallelism divides it.
        grad: whether a gradient flows to it.
    """

    key: int
    items: int
    item_bytes: int
    part: Part
    grad: bool = True

    @property
    def bytes(self) -> int:
        """Bytes per sample on one device that holds all of it."""
        return self.items * self.item_bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call.

    Attributes:
        inputs: tensors it reads, parameters left out.
        output: tensor it makes.
        saved: what autograd keeps for its backward pass.
        anchor: what selective recomputation keeps of it (matmul and attention outputs), empty else.
        shares_gradient: whether the inputs' gradients are the output's gradient itself (addition).
    """

    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...] = ()
    anchor: tuple[Value, ...] = ()
    shares_gradient: bool = False
