"""Which tensors of a tape are alive at the worst moment of its forward and of its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.model.shapes.calls import ShapeCall, Value


def _total(values: Sequence[Value]) -> int:
    return sum({value.key: value.held for value in values}.values())


def _larger(best: list[Value], values: Sequence[Value]) -> list[Value]:
    return list(values) if _total(values) > _total(best) else best


def forward_peak(calls: Sequence[ShapeCall], inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Value]:
    """Tensors alive at the worst moment of forward: inputs, what is saved, and temporary results until last read."""
    # a gathered tensor and the shard of it that is kept have one key
    last_read = {(value.key, value.part): index for index, call in enumerate(calls) for value in call.inputs}
    staying = {(value.key, value.part) for value in (*outputs, *(value for call in calls for value in call.saved))}
    live, best = list(inputs), list(inputs)
    for index, call in enumerate(calls):
        live += [*call.inputs, call.output, *call.saved]
        best = _larger(best, live)
        live = [
            value for value in live
            if (value.key, value.part) in staying or last_read.get((value.key, value.part), -1) > index
        ]  # fmt: skip
    return best


@dataclass(slots=True)
class _Gradients:
    """Gradient buffers alive: each tensor's key points to a buffer, which several may share."""

    buffers: dict[int, Value] = field(default_factory=dict)
    of: dict[int, int] = field(default_factory=dict)
    made: int = 0

    def new(self, value: Value) -> int:
        self.made += 1
        self.buffers[-self.made] = replace(value, key=-self.made)
        return -self.made

    def give(self, value: Value, buffer: int) -> None:
        """Hand a gradient to a tensor; where it has one already that is shared, the sum takes a new buffer."""
        old = self.of.get(value.key)
        shared = old is not None and Counter(self.of.values())[old] > 1
        self.of[value.key] = self.new(value) if shared else buffer if old is None else old

    def sweep(self) -> None:
        """Drop the buffers that no tensor points to."""
        used = set(self.of.values())
        self.buffers = {key: value for key, value in self.buffers.items() if key in used}


def backward_peak(calls: Sequence[ShapeCall], outputs: Sequence[Value]) -> list[Value]:
    """Tensors alive at the worst moment of backward: what is still saved, and gradients from made to last read."""
    readers = Counter(key for call in calls for key in {value.key for value in call.saved})
    everything = (value for call in calls for value in call.saved)
    saved = {value.key: value for value in sorted(everything, key=lambda value: value.part)}
    gradients = _Gradients()
    for value in outputs:
        gradients.give(value, gradients.new(value))
    best = [*saved.values(), *gradients.buffers.values()]
    for call in reversed(calls):
        if call.inplace:
            _release(call, readers, saved)
        _run_backward(call, gradients)
        best = _larger(best, [*saved.values(), *call.rebuilt, *gradients.buffers.values()])
        gradients.sweep()
        if not call.inplace:
            _release(call, readers, saved)
    return best


def _release(call: ShapeCall, readers: Counter[int], saved: dict[int, Value]) -> None:
    """Drop what only this call's backward still needed."""
    for key in {value.key for value in call.saved}:
        readers[key] -= 1
        if not readers[key]:
            del saved[key]


def _run_backward(call: ShapeCall, gradients: _Gradients) -> None:
    arrived = gradients.of.pop(call.output.key, None)
    if arrived is None:
        return
    for value in call.inputs:
        if value.grad:
            gradients.give(value, arrived if call.shares_gradient else gradients.new(value))
