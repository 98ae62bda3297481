"""Rules of operators: FLOPs, bytes moved, and what PyTorch's autograd saves.

FLOPs count a multiply-add as two. A matmul's backward pass is two matmuls of the same size. Bytes moved count each
tensor read and written once, without weights. What is saved is what ``torch.autograd.graph.saved_tensors_hooks`` shows
on a CUDA device: a Linear saves its input, LayerNorm its input and two fp32 statistics a row, SiLU and GELU their
input, ReLU its output, a product both factors (our runtime instead of an activated gate its source, see
``Kernels.remade_gates``), dropout a mask of one byte an item, log-softmax its output.

Logits are the largest tensor at the peak of most small runs: rows x vocabulary items, in the precision of compute, and
again in fp32 if the loss makes a copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.shapes.records import FP32, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator, narrow

_RMS_PASSES = (7, 23)
"""Times that RMSNorm, step by step, reads or writes a tensor of its input's size: forward, backward."""
_LAYER_PASSES = (14, 40)  # the same for LayerNorm


def layer_norm(tape: Tape, name: str, x: Value, width: int, *, bias: bool = True, affine: bool = True) -> Value:
    """LayerNorm over the last ``width`` items: keeps its input, and mean and reciprocal deviation in fp32."""
    statistics = tape.value(2 * (x.items // width), x.sharding, FP32, grad=False)
    return _norm(tape, name, x, statistics, (1 + bias) * width * affine)


def layer_norm_in_steps(tape: Tape, name: str, x: Value, width: int) -> Value:
    """LayerNorm of a picture channels first: u = mean(x), s = mean((x - u)^2), w (x - u) / sqrt(s + e) + b, in steps.

    Both differences and their quotient are kept; the input is not.
    """
    out, root = (tape.value(items, x.sharding) for items in (x.items, x.items // width))
    kept = tuple(tape.like(x) for _ in range(3))
    tape.count(2 * width)
    moved, back = (passes * x.bytes for passes in _LAYER_PASSES)
    weights = 2 * width * tape.item_bytes
    return tape.memory(name, (x,), out, moved, back, saved=(*kept, root), weight_bytes=weights, count=10, fusible=True)


def rms_norm(tape: Tape, name: str, x: Value, width: int, *, fused: bool) -> Value:
    """RMSNorm over the last ``width`` items.

    Args:
        width: items of a row.
        fused: whether one kernel does it (CUDA) and keeps its input and the reciprocal root in fp32. Else steps in fp32
            (CPU, Llama of transformers) keep the input and the normalised input in fp32.
    """
    root = tape.value(x.items // width, x.sharding, FP32, grad=False)
    if fused or tape.kernels.compiled:
        return _norm(tape, name, x, root, width)
    out = tape.like(x)
    casts = 0 if x.item_bytes == FP32 else 2 * (x.bytes + x.items * FP32)
    moved, back = (passes * x.items * FP32 + casts for passes in _RMS_PASSES)
    upcast = x if x.item_bytes == FP32 else tape.like(x, FP32)
    normalised = tape.like(x, FP32)
    tape.count(width)
    saved = ((upcast, root) if x.grad else ()) + (() if tape.freezes(name) else (normalised,))
    weights = width * tape.item_bytes
    return tape.memory(name, (x,), out, moved, back, saved=saved, weight_bytes=weights, count=6, fusible=True)


def _norm(tape: Tape, name: str, x: Value, statistics: Value, weights: int) -> Value:
    """One kernel; under autocast it runs in fp32, after a cast of its input, which is kept, and before one of its
    output."""
    out = tape.like(x)
    tape.count(weights)
    cast = tape.kernels.autocast and x.item_bytes < FP32
    kept = tape.like(x, FP32) if cast else x
    casts = 2 * (x.bytes + kept.bytes) if cast else 0
    return tape.memory(
        name, (x,), out, 2 * kept.bytes + casts, 3 * kept.bytes + casts, saved=(kept, statistics),
        weight_bytes=weights * tape.item_bytes, count=3 if cast else 1, fusible=True,
    )  # fmt: skip


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
    cast = tape.like(logits, FP32)
    return tape.memory(f"{name}.cast", (logits,), cast, logits.bytes + cast.bytes)


def _eager(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """In fp32: keeps the fp32 log-softmax and the labels.

    Cast, log-softmax and negative log-likelihood are separate calls, so that backward holds the two fp32 gradients that
    PyTorch makes. The model's forward holds the logits until the loss is computed.
    """
    cast = _cast(tape, name, logits)
    log_softmax = tape.like(logits, FP32)
    tape.memory(f"{name}.log_softmax", (cast,), log_softmax, 2 * cast.bytes, 3 * cast.bytes, saved=(log_softmax,))
    loss = tape.value(1, item_bytes=FP32)
    return tape.memory(
        f"{name}.nll", (log_softmax, labels, replace(logits, grad=False)), loss, labels.bytes,
        2 * cast.bytes + labels.bytes, like=cast, saved=(log_softmax, labels), items=labels.items,
    )  # fmt: skip


def _vocabulary_parallel(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """Megatron's ``_VocabParallelCrossEntropy``: an fp32 copy of the logits that becomes the softmax in place.

    Largest logit, subtraction, exponential, sum and division each pass over the copy (8 reads or writes of it); the
    softmax, a mask and the labels are kept. In backward the gradient overwrites the softmax. The caller holds the
    logits until the loss is computed.
    """
    cast = _cast(tape, name, logits)
    softmax, passes, kernels = cast, 8, 12
    if tape.kernels.jit_loss:
        softmax, passes, kernels = tape.like(cast, FP32), 5, 7
        tape.memory(f"{name}.exponentials", (cast,), softmax, 3 * cast.bytes, 0, count=2, shares_gradient=True)
    loss = tape.value(1, item_bytes=FP32)
    masks = tape.value(labels.items, item_bytes=1, grad=False)
    return tape.memory(
        f"{name}.softmax", (softmax, labels, replace(logits, grad=False)), loss, passes * cast.bytes, 2 * cast.bytes,
        like=softmax, saved=(softmax, masks, labels), count=kernels, inplace=True,
    )  # fmt: skip


def _compiled(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """torch.compile's: reads the logits twice (largest and sum), keeps them and two fp32 statistics a row."""
    loss = tape.value(1, item_bytes=FP32)
    statistics = tape.value(2 * labels.items, item_bytes=FP32, grad=False)
    saved = (logits, statistics, labels)
    return tape.memory(name, (logits, labels), loss, 2 * logits.bytes, like=logits, saved=saved, count=2)


def _inplace(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """TransformerEngine's and Liger's: forward writes the gradient over the logits; backward scales it."""
    loss = tape.value(1, item_bytes=FP32)
    moved, back = 3 * logits.bytes, 2 * logits.bytes
    return tape.memory(name, (logits, labels), loss, moved, back, like=logits, saved=(logits,), count=2, inplace=True)


def linear(
    tape: Tape,
    name: str,
    x: Value,
    inner: int,
    columns: int,
    split: Sharding,
    *,
    bias: bool,
    tied: bool = False,
    keeps: Value | None = None,
    fp8: bool = False,
) -> Value:
    """``x`` (rows, inner) times a weight (inner, columns).

    Args:
        x: input; its rows are its items / inner.
        inner: columns of the input.
        columns: of the output.
        split: TENSOR for a weight split by columns, SEQUENCE for one split by rows whose output is reduced, NONE for
            one that each device holds in full.
        bias: whether a bias is added.
        tied: whether the weight belongs to another layer (a tied head's).
        keeps: the tensor whose storage is kept if the input is a view of it.
        fp8: whether it runs in fp8.
    """
    by_columns, by_rows = split is Sharding.TENSOR, split is Sharding.SEQUENCE
    rows, weight = x.items // inner, inner * columns
    out = tape.value(rows * columns, Sharding.TENSOR if by_columns else Sharding.NONE)
    flops = 2 * rows * weight
    if not tied:
        tape.count(weight, Sharding.TENSOR if by_columns or by_rows else Sharding.NONE)
    tape.count(columns * bias, out.sharding)
    kept = cast_input(tape, name, x, out, weight) if fp8 else (keeps or x)
    if tape.kernels.autocast and tape.item_bytes < FP32:
        # autocast's copy of a weight (fp32 read, half written), and the way back of its gradient, once a call
        tape.extra(memory_operator(f"{name}.weight_cast", out, 0, 1, (FP32 + tape.item_bytes) * weight))
    operator = Operator(
        name, OperatorClass.MATMUL, (rows, inner, columns), 1, flops, 2 * flops if x.grad else flops,
        x.bytes + out.bytes, 2 * (x.bytes + out.bytes) + out.bytes * bias, (weight + columns * bias) * tape.item_bytes,
        out.sharding if by_columns else x.sharding, precision=narrow_precision(tape) if fp8 else "", reads=x.key,
    )  # fmt: skip
    # of an input that is gathered again in backward a shard is kept
    rebuilt, saved = ((x,), (narrow(kept),)) if tape.regathers(x) else ((), (kept,))
    # our own selective recomputation keeps the sum of a row-split matmul's products, of which each device has a shard
    summed = by_rows and tape.kernels.selective == "operators"
    anchor = replace(out, sharding=Sharding.SEQUENCE) if summed else out
    tape.split(name, x, out, split)
    result = tape.record(ShapeCall((x,), out, saved=saved, anchor=(anchor,), rebuilt=rebuilt), operator)
    if tape.training is None or name not in tape.training.adapted:
        return result
    return _adapted(tape, name, x, result, (inner, tape.training.rank, columns), split)


def _adapted(tape: Tape, name: str, x: Value, base: Value, sizes: tuple[int, int, int], split: Sharding) -> Value:
    """The output of a linear layer plus the scaled product of its input with an adapter's two matrices.

    If the layer is split by columns, so is the second matrix, whose input is gathered; if it is split by rows, so is
    the first one, whose output is summed.
    """
    inner, rank, columns = sizes
    by_columns, by_rows = split is Sharding.TENSOR, split is Sharding.SEQUENCE
    down, up = split if by_rows else Sharding.NONE, split if by_columns else Sharding.NONE
    low = linear(tape, f"{name}.lora_down", narrow(x) if by_columns else x, inner, rank, down, bias=False)
    if by_columns:
        low = tape.gather(low)
    elif by_rows:
        low, base = narrow(low), narrow(base)
    update = linear(tape, f"{name}.lora_up", low, rank, columns, up, bias=False)
    scaled = tape.like(update)
    tape.memory(f"{name}.lora_scale", (update,), scaled, 2 * update.bytes, fusible=True)
    return add(tape, f"{name}.lora_sum", base, scaled)


def cast_input(tape: Tape, name: str, x: Value, out: Value, weight: int) -> Value:
    """Cast the input of an fp8 matmul, and in backward its output's gradient; return what the matmul keeps.

    The input is written twice, as it is and transposed (fp8 matmuls take one layout only on Hopper). The transposed
    copy is kept (TransformerEngine), or the input itself (torchao, which casts it and the weight again each time).
    Under sequence parallelism each device casts its tokens, and one byte an item is gathered (TransformerEngine's
    linear layers; torchao's ``Float8ColwiseParallel``), unless scales go by rows.
    """
    copy, new = tape.narrow_copy(x)
    if tape.kernels.fp8_kept:
        moved, backward_moved, weights = x.bytes + 2 * x.items, out.bytes + 2 * out.items, 0
    else:
        # torchao, dynamic scaling: one pass finds the largest item, the next one casts; of weights too
        moved, weights = 2 * x.bytes + x.items, weight * (2 * tape.item_bytes + 1)
        backward_moved = 2 * out.bytes + out.items + moved
    moved = moved if new else 0
    operator = memory_operator(f"{name}.cast", x, moved, backward_moved, weights, count=2 if new or weights else 1)
    if operator.sharding is Sharding.NONE and not tape.kernels.fp8_rows:
        operator = replace(operator, sharding=Sharding.SEQUENCE)
    tape.extra(operator)
    return copy if tape.kernels.fp8_kept else x


def narrow_precision(tape: Tape) -> str:
    """Return the precision of an fp8 matmul: scales of tensors and of rows have different kernels."""
    return "fp8-rowwise" if tape.kernels.fp8_rows else "fp8"


def activation(tape: Tape, name: str, x: Value, *, keeps_output: bool = False) -> Value:
    """An elementwise function: GELU and SiLU keep their input, ReLU its output."""
    out = tape.like(x)
    saved = (out,) if keeps_output else (x,)
    return tape.memory(name, (x,), out, 2 * x.bytes, 3 * x.bytes, saved=saved, fusible=True)


def gated(tape: Tape, gate: Value, up: Value, *, keeps_output: bool = False) -> Value:
    """Activation of ``gate`` times ``up``, in one kernel that does not keep the activated gate, or in two."""
    if tape.kernels.fused_activation:
        out = tape.like(gate)
        moved, back = 3 * out.bytes, 5 * out.bytes
        return tape.memory("mlp.act", (gate, up), out, moved, back, saved=(gate, up), fusible=True)
    activated = activation(tape, "mlp.act", gate, keeps_output=keeps_output)
    return multiply(tape, "mlp.product", activated, up, remade=not keeps_output)


def multiply(tape: Tape, name: str, first: Value, second: Value, *, remade: bool = False) -> Value:
    """Elementwise product of two tensors of one shape; keeps both.

    ``remade``: whether the first is the output of an activation function that keeps its input, of which
    ``Kernels.remade_gates`` makes it again.
    """
    out = tape.like(first)
    again = (first,) if remade and tape.kernels.remade_gates else ()
    saved, back = ((second,), 8 * out.bytes) if again else ((first, second), 6 * out.bytes)
    return tape.memory(name, (first, second), out, 3 * out.bytes, back, saved=saved, fusible=True, rebuilt=again)


def scale(tape: Tape, name: str, x: Value, width: int) -> Value:
    """Product with a learned vector of ``width`` items; keeps its input."""
    out = tape.like(x)
    tape.count(width)
    saved = () if tape.freezes(name) else (x,)
    weights = width * tape.item_bytes
    return tape.memory(name, (x,), out, 2 * x.bytes, 4 * x.bytes, saved=saved, weight_bytes=weights)


def add(tape: Tape, name: str, first: Value, second: Value) -> Value:
    """Elementwise sum; keeps nothing, and passes its gradient on unchanged."""
    out = tape.like(first)
    return tape.memory(name, (first, second), out, 3 * out.bytes, 0, shares_gradient=True, fusible=True)


def residual(tape: Tape, name: str, x: Value, y: Value, probability: float) -> Value:
    """Add dropout of ``y`` to ``x``: two kernels, or one that keeps only the mask."""
    if not tape.kernels.fused_residual or not probability:
        return add(tape, f"{name}.residual", x, dropout(tape, f"{name}.dropout", y, probability))
    dropped, mask = tape.value(0, y.sharding), tape.value(y.items, x.sharding, 1, grad=False)
    moved, back = 3 * x.bytes + mask.bytes, 2 * x.bytes + mask.bytes
    tape.memory(f"{name}.residual", (y,), dropped, moved, back, like=x, saved=(mask,), fusible=True)
    out = tape.like(x)
    return tape.memory("", (x, dropped), out, 0, count=0, shares_gradient=True, fusible=True)


def dropout(tape: Tape, name: str, x: Value, probability: float, **traits: Any) -> Value:
    """Dropout: keeps a mask of one byte an item; nothing happens if the probability is 0."""
    if not probability:
        return x
    out, mask = tape.like(x), tape.value(x.items, x.sharding, 1, grad=False)
    return tape.memory(name, (x,), out, 2 * x.bytes + mask.bytes, saved=(mask,), fusible=True, **traits)


def rotary(tape: Tape, name: str, x: Value) -> Value:
    """Rotary positions: one kernel, or eager PyTorch's (negate half, concatenate, two products, one sum).

    Keeps nothing a sample.
    """
    out = tape.like(x)
    passes, count = (2, 1) if tape.kernels.fused_rotary else (10, 5)
    return tape.memory(name, (x,), out, passes * x.bytes, count=count, fusible=True)


def embedding(
    tape: Tape, name: str, indices: Value, width: int, *, table: int, sharding: Sharding = Sharding.NONE
) -> Value:
    """Look rows of a table up; keeps the indices.

    Args:
        indices: of the rows.
        width: items of a row.
        table: items of the table; 0 if another layer has it.
        sharding: TENSOR if each device holds some rows, and results are summed over the tensor group.
    """
    out = tape.value(indices.items * width, Sharding.SEQUENCE)
    tape.count(table, sharding)
    return tape.memory(name, (indices,), out, 2 * out.bytes + indices.bytes, saved=(indices,))


def positions(tape: Tape, name: str, x: Value, table: int) -> Value:
    """Add rows of a learned table of ``table`` items, the same for all samples; keeps nothing per sample."""
    tape.count(table)
    out = tape.like(x)
    weights = x.items * tape.item_bytes
    return tape.memory(name, (x,), out, 2 * x.bytes, x.bytes, weight_bytes=weights, shares_gradient=True)


def reshape(tape: Tape, name: str, x: Value, items: int, **traits: Any) -> Value:
    """Copy into another shape (concatenate a class token, take one token); keeps nothing."""
    out = tape.value(items, x.sharding)
    return tape.memory(name, (x,), out, x.bytes + out.bytes, **traits)
