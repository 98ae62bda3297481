"""Rules of operators: FLOPs, bytes moved, and what PyTorch's autograd keeps.

Logits are the largest tensor of most small runs' peaks: rows x vocabulary items, in the precision of compute, and
again in fp32 where the loss makes a copy.

FLOPs count a multiply-add as two. A matmul's backward pass is two matmuls of the same size. Bytes moved count every
tensor read and written once, weights apart. What is kept is what ``torch.autograd.graph.saved_tensors_hooks`` shows on
a CUDA device: a Linear keeps its input, LayerNorm its input and two fp32 statistics a row, SiLU and GELU their input,
ReLU its output, a product both factors (our runtime of an activated gate its source, see ``Kernels.remade_gates``),
dropout a mask of one byte an item, log-softmax its output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.shapes.records import FP32, Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator, narrow, sharding_of

_RMS_PASSES = (7, 23)
"""Times that RMSNorm, step by step, reads or writes a tensor of its input's size: forward, backward."""
_LAYER_PASSES = (14, 40)  # the same of LayerNorm


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
    moved, back = (passes * x.bytes for passes in _LAYER_PASSES)
    weights = 2 * width * tape.item_bytes
    return tape.memory(name, (x,), out, moved, back, saved=(*kept, root), weight_bytes=weights, count=10, fusible=True)


def rms_norm(tape: Tape, name: str, x: Value, width: int, *, fused: bool) -> Value:
    """RMSNorm over the last ``width`` items.

    Args:
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
    moved, back = (passes * x.items * FP32 + casts for passes in _RMS_PASSES)
    upcast = x if x.item_bytes == FP32 else tape.value(x.items, x.part, FP32)
    normalised = tape.value(x.items, x.part, FP32)
    tape.count(width)
    saved = ((upcast, root) if x.grad else ()) + (() if tape.freezes(name) else (normalised,))
    weights = width * tape.item_bytes
    return tape.memory(name, (x,), out, moved, back, saved=saved, weight_bytes=weights, count=6, fusible=True)


def _norm(tape: Tape, name: str, x: Value, statistics: Value, weights: int) -> Value:
    """One kernel; under autocast it runs in fp32, between a cast of its input (which is kept) and one of its output."""
    out = tape.value(x.items, x.part)
    tape.count(weights)
    cast = tape.kernels.autocast and x.item_bytes < FP32
    kept = tape.value(x.items, x.part, FP32) if cast else x
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
    cast = tape.value(logits.items, logits.part, FP32)
    return tape.memory(f"{name}.cast", (logits,), cast, logits.bytes + cast.bytes)


def _eager(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """In fp32: keeps the fp32 log-softmax and the labels.

    The cast, log-softmax and the negative log-likelihood are calls of their own, so that backward holds the two fp32
    gradients that PyTorch makes. The model's own forward holds the logits until the loss is there.
    """
    cast = _cast(tape, name, logits)
    log_softmax = tape.value(logits.items, logits.part, FP32)
    tape.memory(f"{name}.log_softmax", (cast,), log_softmax, 2 * cast.bytes, 3 * cast.bytes, saved=(log_softmax,))
    loss = tape.value(1, Division.WHOLE, FP32)
    return tape.memory(
        f"{name}.nll", (log_softmax, labels, replace(logits, grad=False)), loss, labels.bytes,
        2 * cast.bytes + labels.bytes, like=cast, saved=(log_softmax, labels), items=labels.items,
    )  # fmt: skip


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
        tape.memory(f"{name}.exponentials", (cast,), softmax, 3 * cast.bytes, 0, count=2, shares_gradient=True)
    loss = tape.value(1, Division.WHOLE, FP32)
    masks = tape.value(labels.items, Division.WHOLE, 1, grad=False)
    return tape.memory(
        f"{name}.softmax", (softmax, labels, replace(logits, grad=False)), loss, passes * cast.bytes, 2 * cast.bytes,
        like=softmax, saved=(softmax, masks, labels), count=kernels, inplace=True,
    )  # fmt: skip


def _compiled(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """torch.compile's: reads the logits twice (largest and sum), keeps them and two fp32 statistics a row."""
    loss = tape.value(1, Division.WHOLE, FP32)
    statistics = tape.value(2 * labels.items, Division.WHOLE, FP32, grad=False)
    saved = (logits, statistics, labels)
    return tape.memory(name, (logits, labels), loss, 2 * logits.bytes, like=logits, saved=saved, count=2)


def _inplace(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """TransformerEngine's and Liger's: forward writes the gradient over the logits; backward scales it."""
    loss = tape.value(1, Division.WHOLE, FP32)
    moved, back = 3 * logits.bytes, 2 * logits.bytes
    return tape.memory(name, (logits, labels), loss, moved, back, like=logits, saved=(logits,), count=2, inplace=True)


def linear(
    tape: Tape,
    name: str,
    x: Value,
    inner: int,
    columns: int,
    part: Division,
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
        part: TENSOR for a weight split by columns, SEQUENCE for one split by rows whose output is reduced, WHOLE for
            one that every device holds.
        bias: whether a bias is added.
        tied: whether the weight is another layer's (a tied head's).
        keeps: the tensor whose storage is kept where the input is a view of it.
        fp8: whether it runs in fp8.
    """
    rows = x.items // inner
    split = part is not Division.WHOLE
    out = tape.value(rows * columns, Division.TENSOR if part is Division.TENSOR else Division.WHOLE)
    flops = 2 * rows * inner * columns
    weight = inner * columns
    if not tied:
        tape.count(weight, Division.TENSOR if split else Division.WHOLE)
    tape.count(columns * bias, Division.TENSOR if part is Division.TENSOR else Division.WHOLE)
    sharding = sharding_of(out if part is Division.TENSOR else x)
    kept = cast_input(tape, name, x, out, weight) if fp8 else (keeps or x)
    if tape.kernels.autocast and tape.item_bytes < FP32:
        # autocast's copy of a weight (fp32 read, half written), and its gradient's way back, once a call
        cast = memory_operator(f"{name}.weight_cast", out, 0, 1, (FP32 + tape.item_bytes) * weight)
        tape.extra(replace(cast, sharding=sharding_of(out)))
    operator = Operator(
        name, OperatorClass.MATMUL, (rows, inner, columns), 1, flops, 2 * flops if x.grad else flops,
        x.bytes + out.bytes, 2 * (x.bytes + out.bytes) + out.bytes * bias, (weight + columns * bias) * tape.item_bytes,
        sharding, precision=narrow_precision(tape) if fp8 else "", reads=x.key,
    )  # fmt: skip
    again = tape.regathers(x)  # of the gathered input a share is kept
    rebuilt, saved = ((x,), (narrow(kept),)) if again else ((), (kept,))
    # our own selective recomputation keeps the sum of a row-split matmul's products, of which each device has a share
    summed = part is Division.SEQUENCE and tape.kernels.selective == "operators"
    anchor = replace(out, part=Division.SEQUENCE) if summed else out
    tape.split(name, x, out, part)
    done = tape.record(ShapeCall((x,), out, saved=saved, anchor=(anchor,), rebuilt=rebuilt), operator)
    training = tape.training
    if training is None or name not in training.adapted:
        return done
    return _adapted(tape, name, x, done, (inner, training.rank, columns), part)


def _adapted(tape: Tape, name: str, x: Value, base: Value, sizes: tuple[int, int, int], part: Division) -> Value:
    """What a linear layer gives plus the scaled product of its input with an adapter's two matrices.

    Of a layer split by columns the second matrix is split, and takes in its input gathered; of one split by rows the
    first one is, and its output summed.
    """
    inner, rank, columns = sizes
    column, row = part is Division.TENSOR, part is Division.SEQUENCE
    down, up = part if row else Division.WHOLE, part if column else Division.WHOLE
    low = linear(tape, f"{name}.lora_down", narrow(x) if column else x, inner, rank, down, bias=False)
    low, base = tape.gather(low) if column else narrow(low) if row else low, narrow(base) if row else base
    update = linear(tape, f"{name}.lora_up", low, rank, columns, up, bias=False)
    scaled = tape.value(update.items, update.part)
    tape.memory(f"{name}.lora_scale", (update,), scaled, 2 * update.bytes, fusible=True)
    return add(tape, f"{name}.lora_sum", base, scaled)


def cast_input(tape: Tape, name: str, x: Value, out: Value, weight: int) -> Value:
    """Casts around an fp8 matmul: the input, in backward the output's gradient. Returns what the matmul keeps.

    The input is written twice, as it is and transposed (matmuls in fp8 take one layout only on Hopper); the transposed
    copy is kept (TransformerEngine), or the input itself (torchao, which casts it again and the weight each time).
    Under sequence parallelism each device casts its tokens, and what is gathered has one byte an item
    (TransformerEngine's linear layers; torchao's ``Float8ColwiseParallel``), unless scales go by rows.
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
    """What an fp8 matmul computes in: scales of tensors and of rows have kernels of their own."""
    return "fp8-rowwise" if tape.kernels.fp8_rows else "fp8"


def activation(tape: Tape, name: str, x: Value, *, keeps_output: bool = False) -> Value:
    """An elementwise function: GELU and SiLU keep their input, ReLU its output."""
    out = tape.value(x.items, x.part)
    saved = (out,) if keeps_output else (x,)
    return tape.memory(name, (x,), out, 2 * x.bytes, 3 * x.bytes, saved=saved, fusible=True)


def gated(tape: Tape, gate: Value, up: Value, *, keeps_output: bool = False) -> Value:
    """What a gated MLP's down projection takes: activation of ``gate`` times ``up``.

    One kernel keeps both and not the activated gate; else activation and product follow one after the other.
    """
    if tape.kernels.fused_activation:
        out = tape.value(gate.items, gate.part)
        moved, back = 3 * out.bytes, 5 * out.bytes
        return tape.memory("mlp.act", (gate, up), out, moved, back, saved=(gate, up), fusible=True)
    activated = activation(tape, "mlp.act", gate, keeps_output=keeps_output)
    return multiply(tape, "mlp.product", activated, up, remade=not keeps_output)


def multiply(tape: Tape, name: str, first: Value, second: Value, *, remade: bool = False) -> Value:
    """Elementwise product of two tensors of one shape; keeps both.

    Args:
        remade: whether the first is what an activation function gave that keeps its input: see
            ``Kernels.remade_gates``.
    """
    out = tape.value(first.items, first.part)
    again = (first,) if remade and tape.kernels.remade_gates else ()
    saved, back = ((second,), 8 * out.bytes) if again else ((first, second), 6 * out.bytes)
    return tape.memory(name, (first, second), out, 3 * out.bytes, back, saved=saved, fusible=True, rebuilt=again)


def scale(tape: Tape, name: str, x: Value, width: int) -> Value:
    """Product with a learned vector of ``width`` items; keeps its input."""
    out = tape.value(x.items, x.part)
    tape.count(width)
    saved = () if tape.freezes(name) else (x,)
    weights = width * tape.item_bytes
    return tape.memory(name, (x,), out, 2 * x.bytes, 4 * x.bytes, saved=saved, weight_bytes=weights)


def add(tape: Tape, name: str, first: Value, second: Value) -> Value:
    """Elementwise sum; keeps nothing, and hands its gradient on as it is."""
    out = tape.value(first.items, first.part)
    return tape.memory(name, (first, second), out, 3 * out.bytes, 0, shares_gradient=True, fusible=True)


def residual(tape: Tape, name: str, x: Value, y: Value, probability: float) -> Value:
    """Dropout of ``y`` and its addition to ``x``: two kernels, or one that keeps the mask only."""
    if not tape.kernels.fused_residual or not probability:
        return add(tape, f"{name}.residual", x, dropout(tape, f"{name}.dropout", y, probability))
    dropped, mask = tape.value(0, y.part), tape.value(y.items, x.part, 1, grad=False)
    moved, back = 3 * x.bytes + mask.bytes, 2 * x.bytes + mask.bytes
    tape.memory(f"{name}.residual", (y,), dropped, moved, back, like=x, saved=(mask,), fusible=True)
    out = tape.value(x.items, x.part)
    return tape.memory("", (x, dropped), out, 0, count=0, shares_gradient=True, fusible=True)


def dropout(tape: Tape, name: str, x: Value, probability: float, **traits: Any) -> Value:
    """Dropout: keeps a mask of one byte an item; nothing happens where the probability is 0."""
    if not probability:
        return x
    out, mask = tape.value(x.items, x.part), tape.value(x.items, x.part, 1, grad=False)
    return tape.memory(name, (x,), out, 2 * x.bytes + mask.bytes, saved=(mask,), fusible=True, **traits)


def rotary(tape: Tape, name: str, x: Value) -> Value:
    """Rotary positions: one kernel, or eager PyTorch's (negate half, concatenate, two products, one sum).

    Keeps nothing a sample.
    """
    out = tape.value(x.items, x.part)
    passes, count = (2, 1) if tape.kernels.fused_rotary else (10, 5)
    return tape.memory(name, (x,), out, passes * x.bytes, count=count, fusible=True)


def embedding(
    tape: Tape, name: str, indices: Value, width: int, *, table: int, part: Division = Division.WHOLE
) -> Value:
    """Rows of a table: keeps the indices.

    Args:
        indices: which rows.
        width: items of a row.
        table: items of the table that belong to this layer; 0 where another layer owns it.
        part: TENSOR where each device holds some rows, and rows found are summed over the tensor group.
    """
    out = tape.value(indices.items * width, Division.SEQUENCE)
    tape.count(table, part)
    return tape.memory(name, (indices,), out, 2 * out.bytes + indices.bytes, saved=(indices,))


def positions(tape: Tape, name: str, x: Value, table: int) -> Value:
    """Add rows of a learned table of so many items, the same for every sample: keeps nothing a sample."""
    tape.count(table)
    out = tape.value(x.items, x.part)
    weights = x.items * tape.item_bytes
    return tape.memory(name, (x,), out, 2 * x.bytes, x.bytes, weight_bytes=weights, shares_gradient=True)


def reshape(tape: Tape, name: str, x: Value, items: int, **traits: Any) -> Value:
    """Copy into another shape (concatenate a class token, take one token): keeps nothing."""
    out = tape.value(items, x.part)
    return tape.memory(name, (x,), out, x.bytes + out.bytes, **traits)
