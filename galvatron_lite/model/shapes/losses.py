"""Cross-entropy of an LM head's logits: what lives and what is kept, by the kernels that run.

Logits are the largest tensor of most small runs' peaks: rows x vocabulary items, in the precision of compute, and
again in fp32 where the loss makes a copy.
"""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.shapes.calls import FP32, Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator


def cross_entropy(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """Mean cross-entropy of logits (rows, classes); see ``Kernels`` for its kinds."""
    if tape.kernels.inplace_loss:
        return _inplace(tape, name, logits, labels)
    if tape.kernels.compiled_loss:
        return _compiled(tape, name, logits, labels)
    if tape.kernels.fused_loss or tape.kernels.jit_loss:
        return _vocabulary_parallel(tape, name, logits, labels)
    return _eager(tape, name, logits, labels)


def _cast(tape: Tape, name: str, logits: Value) -> Value:
    if logits.item_bytes == FP32:
        return logits
    cast = tape.value(logits.items, logits.part, FP32)
    moved = logits.bytes + cast.bytes
    return tape.record(ShapeCall((logits,), cast), memory_operator(f"{name}.cast", cast, moved, moved))


def _eager(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """In fp32: keeps the fp32 log-softmax and the labels.

    The cast, log-softmax and the negative log-likelihood are calls of their own, so that backward holds the two fp32
    gradients that PyTorch makes. The model's own forward holds the logits until the loss is there.
    """
    cast = _cast(tape, name, logits)
    log_softmax = tape.value(logits.items, logits.part, FP32)
    softmax = memory_operator(f"{name}.log_softmax", cast, 2 * cast.bytes, 3 * cast.bytes)
    tape.record(ShapeCall((cast,), log_softmax, saved=(log_softmax,)), softmax)
    loss = tape.value(1, Division.WHOLE, FP32)
    likelihood = memory_operator(f"{name}.nll", cast, labels.bytes, 2 * cast.bytes + labels.bytes, items=labels.items)
    held = replace(logits, grad=False)
    return tape.record(ShapeCall((log_softmax, labels, held), loss, saved=(log_softmax, labels)), likelihood)


def _vocabulary_parallel(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """Megatron's ``_VocabParallelCrossEntropy``: an fp32 copy of the logits that becomes the softmax in place.

    Largest logit, subtraction, exponential, sum and division each pass over the copy (8 reads or writes of it); its
    softmax, a mask and the labels are kept. In backward the gradient takes the softmax's place. The caller holds the
    logits until the loss is there.
    """
    cast = _cast(tape, name, logits)
    softmax, passes, kernels = cast, 8, 12
    if tape.kernels.jit_loss:
        softmax, passes, kernels = tape.value(cast.items, cast.part, FP32), 5, 7
        operator = memory_operator(f"{name}.exponentials", cast, 3 * cast.bytes, 0, count=2)
        tape.record(ShapeCall((cast,), softmax, shares_gradient=True), operator)
    loss = tape.value(1, Division.WHOLE, FP32)
    masks = tape.value(labels.items, Division.WHOLE, 1, grad=False)
    operator = memory_operator(f"{name}.softmax", softmax, passes * cast.bytes, 2 * cast.bytes, count=kernels)
    held = replace(logits, grad=False)
    return tape.record(ShapeCall((softmax, labels, held), loss, saved=(softmax, masks, labels), inplace=True), operator)


def _compiled(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """torch.compile's: reads the logits twice (largest and sum), keeps them and two fp32 statistics a row."""
    loss = tape.value(1, Division.WHOLE, FP32)
    statistics = tape.value(2 * labels.items, Division.WHOLE, FP32, grad=False)
    operator = memory_operator(name, logits, 2 * logits.bytes, 2 * logits.bytes, count=2)
    return tape.record(ShapeCall((logits, labels), loss, saved=(logits, statistics, labels)), operator)


def _inplace(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """TransformerEngine's and Liger's: forward writes the gradient over the logits; backward scales it."""
    loss = tape.value(1, Division.WHOLE, FP32)
    operator = memory_operator(name, logits, 3 * logits.bytes, 2 * logits.bytes, count=2)
    return tape.record(ShapeCall((logits, labels), loss, saved=(logits,), inplace=True), operator)
