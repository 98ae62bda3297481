"""Normalisations: what they read, write and keep, by the kernels that run."""

from __future__ import annotations

from galvatron_lite.model.shapes.calls import FP32, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator

_RMS_PASSES = (7, 23)
"""Times that RMSNorm, step by step, reads or writes a tensor of its input's size: forward, backward."""
_LAYER_PASSES = (14, 40)
"""The same of LayerNorm."""


def layer_norm(tape: Tape, name: str, x: Value, width: int, *, bias: bool = True, affine: bool = True) -> Value:
    """LayerNorm over the last ``width`` items: keeps its input, and mean and reciprocal deviation in fp32."""
    statistics = tape.value(2 * (x.items // width), x.part, FP32, grad=False)
    return _norm(tape, name, x, statistics, (1 + bias) * width * affine)


def layer_norm_in_steps(tape: Tape, name: str, x: Value, width: int) -> Value:
    """LayerNorm over channels that lie first: u = mean(x), s = mean((x - u)^2), w (x - u) / sqrt(s + e) + b.

    Both differences and their quotient are kept; the input is not.
    """
    out, root = (tape.value(items, x.part) for items in (x.items, x.items // width))
    kept = tuple(tape.value(x.items, x.part) for _ in range(3))
    tape.count(2 * width)
    moved, backward_moved = (passes * x.bytes for passes in _LAYER_PASSES)
    operator = memory_operator(name, x, moved, backward_moved, 2 * width * tape.item_bytes, count=10)
    return tape.record(ShapeCall((x,), out, saved=(*kept, root), fusible=True), operator)


def rms_norm(tape: Tape, name: str, x: Value, width: int, *, fused: bool) -> Value:
    """RMSNorm over the last ``width`` items.

    Args:
        tape: where it is written down.
        name: of the operator.
        x: input.
        width: items of a row.
        fused: whether one kernel does it (CUDA): it keeps its input and the reciprocal root in fp32. Else it is
            computed step by step in fp32 (CPU, Llama of transformers): the input in fp32 and the normalised input in
            fp32 are kept.
    """
    root = tape.value(x.items // width, x.part, FP32, grad=False)
    if fused or tape.kernels.compiled:
        return _norm(tape, name, x, root, width)
    out = tape.value(x.items, x.part)
    casts = 0 if x.item_bytes == FP32 else 2 * (x.bytes + x.items * FP32)
    moved, backward_moved = (passes * x.items * FP32 + casts for passes in _RMS_PASSES)
    upcast = x if x.item_bytes == FP32 else tape.value(x.items, x.part, FP32)
    normalised = tape.value(x.items, x.part, FP32)
    tape.count(width)
    operator = memory_operator(name, x, moved, backward_moved, width * tape.item_bytes, count=6)
    return tape.record(ShapeCall((x,), out, saved=(upcast, root, normalised), fusible=True), operator)


def _norm(tape: Tape, name: str, x: Value, statistics: Value, weights: int) -> Value:
    """One kernel; under autocast it runs in fp32, between a cast of its input (which is kept) and one of its output."""
    out = tape.value(x.items, x.part)
    tape.count(weights)
    cast = tape.kernels.autocast and x.item_bytes < FP32
    kept = tape.value(x.items, x.part, FP32) if cast else x
    casts = 2 * (x.bytes + kept.bytes) if cast else 0
    moved, backward_moved = 2 * kept.bytes + casts, 3 * kept.bytes + casts
    operator = memory_operator(
        name, x, moved, backward_moved, weights * tape.item_bytes, count=3 if cast else 1
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(kept, statistics), fusible=True), operator)
