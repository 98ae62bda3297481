"""What a layer does, written down: values and the calls that make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

FP32 = 4  # bytes of an fp32 item

INDEX = 8  # bytes of an index


class Division(IntEnum):
    """How tensor parallelism divides a value; the larger one wins where a value is held in two ways."""

    TENSOR = 0
    SEQUENCE = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of one sample."""

    key: int  # which storage; two values of one key are the same memory on one device
    items: int  # elements per sample
    item_bytes: int  # bytes of one element
    part: Division  # how tensor parallelism divides it
    grad: bool = True  # whether a gradient flows to it
    storage: int = 0  # bytes of the storage where the value is a view of part of it; 0: it has its own

    @property
    def bytes(self) -> int:
        """Bytes per sample that a kernel reads or writes, on one device that does all of it."""
        return self.items * self.item_bytes

    @property
    def held(self) -> int:
        """Bytes per sample that live while it does."""
        return self.storage or self.bytes


@dataclass(frozen=True, slots=True)
class ShapeCall:
    """One operator call."""

    inputs: tuple[Value, ...]  # tensors it reads, parameters left out
    output: Value  # tensor it makes
    saved: tuple[Value, ...] = ()  # what autograd keeps for its backward pass
    # what selective recomputation by operators keeps of it (matmul and attention outputs), empty else
    anchor: tuple[Value, ...] = ()
    shares_gradient: bool = False  # whether the inputs' gradients are the output's gradient itself (addition)
    inplace: bool = False  # whether the input's gradient takes the place of what is saved
    core: bool = False  # whether it belongs to the attention core (scores, softmax, dropout, context)
    fusible: bool = False  # whether a compiler joins it with its neighbours (element-wise and row-wise calls)
    # what exists again while its backward runs (gathered inputs of which a share is kept)
    rebuilt: tuple[Value, ...] = ()
