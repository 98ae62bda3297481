"""One rule per operator: its FLOPs, the bytes it moves, and what PyTorch's autograd keeps of it.

FLOPs count a multiply-add as two. A matmul's backward pass is two matmuls of the same size. Bytes moved count every
tensor read and written once, weights apart. What is kept is what ``torch.autograd.graph.saved_tensors_hooks`` shows on
a CUDA device: a Linear keeps its input, LayerNorm its input and two fp32 statistics a row, SiLU and GELU their input,
ReLU its output, a product both factors, dropout a mask of one byte an item, log-softmax its output.
"""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.model.shapes.calls import Call, Part, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator, sharding_of

FP32 = 4
INDEX = 8
_RMS_PASSES = (7, 23)
"""Times that RMSNorm, step by step, reads or writes a tensor of its input's size: forward, backward."""


def linear(
    tape: Tape,
    name: str,
    x: Value,
    inner: int,
    columns: int,
    part: Part,
    *,
    bias: bool,
    own: bool = True,
    keeps: Value | None = None,
) -> Value:
    """``x`` (rows, inner) times a weight (inner, columns).

    Args:
        tape: where it is written down.
        name: of the operator.
        x: input; its rows are its items / inner.
        inner: columns of the input.
        columns: of the output.
        part: TENSOR for a weight split by columns, SEQUENCE for one split by rows whose output is reduced, WHOLE for
            one that every device holds.
        bias: whether a bias is added.
        own: whether the weight belongs to this layer (a tied head's does not).
        keeps: the tensor whose storage is kept where the input is a view of it.
    """
    rows = x.items // inner
    split = part is not Part.WHOLE
    out = tape.value(rows * columns, Part.TENSOR if part is Part.TENSOR else Part.WHOLE)
    flops = 2 * rows * inner * columns
    weight = inner * columns
    if own:
        tape.own(weight, Part.TENSOR if split else Part.WHOLE)
    tape.own(columns * bias, Part.TENSOR if part is Part.TENSOR else Part.WHOLE)
    operator = Operator(
        name, OperatorClass.MATMUL, (rows, inner, columns), 1, flops, 2 * flops if x.grad else flops,
        x.bytes + out.bytes, 2 * (x.bytes + out.bytes) + out.bytes * bias, (weight + columns * bias) * tape.item_bytes,
        sharding_of(out if part is Part.TENSOR else x),
    )  # fmt: skip
    return tape.record(Call((x,), out, saved=(keeps or x,), anchor=(out,)), operator)


def layer_norm(tape: Tape, name: str, x: Value, width: int, *, bias: bool = True, affine: bool = True) -> Value:
    """LayerNorm over the last ``width`` items: keeps its input, and mean and reciprocal deviation in fp32."""
    out = tape.value(x.items, x.part)
    statistics = tape.value(2 * (x.items // width), x.part, FP32, grad=False)
    return _norm(tape, name, x, out, (x, statistics), (1 + bias) * width * affine)


def rms_norm(tape: Tape, name: str, x: Value, width: int, *, fused: bool) -> Value:
    """RMSNorm over the last ``width`` items.

    Args:
        tape: where it is written down.
        name: of the operator.
        x: input.
        width: items of a row.
        fused: whether one kernel does it (CUDA): it keeps its input and the reciprocal root in fp32. Else it is
            computed step by step in fp32 (CPU): the input in fp32 and the normalised input in fp32 are kept.
    """
    out = tape.value(x.items, x.part)
    root = tape.value(x.items // width, x.part, FP32, grad=False)
    if fused:
        return _norm(tape, name, x, out, (x, root), width)
    casts = 0 if x.item_bytes == FP32 else 2 * (x.bytes + x.items * FP32)
    moved, backward_moved = (passes * x.items * FP32 + casts for passes in _RMS_PASSES)
    upcast = x if x.item_bytes == FP32 else tape.value(x.items, x.part, FP32)
    normalised = tape.value(x.items, x.part, FP32)
    tape.own(width)
    operator = memory_operator(name, x, moved, backward_moved, width * tape.item_bytes, count=6)
    return tape.record(Call((x,), out, saved=(upcast, root, normalised)), operator)


def _norm(tape: Tape, name: str, x: Value, out: Value, saved: tuple[Value, ...], weights: int) -> Value:
    tape.own(weights)
    operator = memory_operator(name, x, x.bytes + out.bytes, x.bytes + 2 * out.bytes, weights * tape.item_bytes)
    return tape.record(Call((x,), out, saved=saved), operator)


def activation(tape: Tape, name: str, x: Value, *, keeps_output: bool = False) -> Value:
    """An elementwise function: GELU and SiLU keep their input, ReLU its output."""
    out = tape.value(x.items, x.part)
    saved = (out,) if keeps_output else (x,)
    return tape.record(Call((x,), out, saved=saved), memory_operator(name, x, 2 * x.bytes, 3 * x.bytes))


def multiply(tape: Tape, name: str, first: Value, second: Value) -> Value:
    """Elementwise product of two tensors of one shape; keeps both."""
    out = tape.value(first.items, first.part)
    operator = memory_operator(name, first, 3 * out.bytes, 6 * out.bytes)
    return tape.record(Call((first, second), out, saved=(first, second)), operator)


def scale(tape: Tape, name: str, x: Value, width: int) -> Value:
    """Product with a learned vector of ``width`` items; keeps its input."""
    out = tape.value(x.items, x.part)
    tape.own(width)
    operator = memory_operator(name, x, 2 * x.bytes, 4 * x.bytes, width * tape.item_bytes)
    return tape.record(Call((x,), out, saved=(x,)), operator)


def add(tape: Tape, name: str, first: Value, second: Value) -> Value:
    """Elementwise sum; keeps nothing, and hands its gradient on as it is."""
    out = tape.value(first.items, first.part)
    call = Call((first, second), out, shares_gradient=True)
    return tape.record(call, memory_operator(name, out, 3 * out.bytes, 0))


def dropout(tape: Tape, name: str, x: Value, probability: float) -> Value:
    """Dropout: keeps a mask of one byte an item; nothing happens where the probability is 0."""
    if not probability:
        return x
    out, mask = tape.value(x.items, x.part), tape.value(x.items, x.part, 1, grad=False)
    operator = memory_operator(name, x, 2 * x.bytes + mask.bytes, 2 * x.bytes + mask.bytes)
    return tape.record(Call((x,), out, saved=(mask,)), operator)


def rotary(tape: Tape, name: str, x: Value) -> Value:
    """Rotary positions in eager PyTorch (negate half, concatenate, two products, one sum): keeps nothing a sample."""
    out = tape.value(x.items, x.part)
    return tape.record(Call((x,), out), memory_operator(name, x, 10 * x.bytes, 10 * x.bytes, count=5))


def attention(
    tape: Tape, name: str, q: Value, k: Value, v: Value, heads: tuple[int, int], head_dim: int, *, causal: bool
) -> Value:
    """Flash attention (Dao 2023): keeps q, k, v, its output and one fp32 log-sum a query and head.

    FLOPs count the whole score matrix, causal or not: 4 x queries x keys x heads x head size forward (two matmuls), 2.5
    times that backward (five matmuls: the scores are computed again).

    Args:
        tape: where it is written down.
        name: of the operator.
        q: queries.
        k: keys.
        v: values.
        heads: of queries, of keys and values.
        head_dim: items of one head.
        causal: whether a query sees no later key.
    """
    out = tape.value(q.items, q.part)
    queries, keys = q.items // (heads[0] * head_dim), k.items // (heads[1] * head_dim)
    sums = tape.value(queries * heads[0], q.part, FP32, grad=False)
    flops = 4 * queries * keys * heads[0] * head_dim
    touched = q.bytes + k.bytes + v.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.ATTENTION, (*heads, queries, keys, head_dim), 1, flops, flops * 5 // 2,
        touched + sums.bytes, 2 * touched + sums.bytes, 0, sharding_of(q), causal,
    )  # fmt: skip
    return tape.record(Call((q, k, v), out, saved=(q, k, v, out, sums), anchor=(out, sums)), operator)


def embedding(tape: Tape, name: str, indices: Value, width: int, *, table: int, part: Part = Part.WHOLE) -> Value:
    """Rows of a table: keeps the indices.

    Args:
        tape: where it is written down.
        name: of the operator.
        indices: which rows.
        width: items of a row.
        table: items of the table that belong to this layer; 0 where another layer owns it.
        part: TENSOR where each device holds some rows, and rows found are summed over the tensor group.
    """
    out = tape.value(indices.items * width, Part.SEQUENCE)
    tape.own(table, part)
    operator = memory_operator(name, out, 2 * out.bytes + indices.bytes, 2 * out.bytes + indices.bytes)
    return tape.record(Call((indices,), out, saved=(indices,)), operator)


def positions(tape: Tape, name: str, x: Value, table: int) -> Value:
    """Add rows of a learned table of so many items, the same for every sample: keeps nothing a sample."""
    tape.own(table)
    out = tape.value(x.items, x.part)
    operator = memory_operator(name, x, 2 * x.bytes, x.bytes, x.items * tape.item_bytes)
    return tape.record(Call((x,), out, shares_gradient=True), operator)


def reshape(tape: Tape, name: str, x: Value, items: int) -> Value:
    """Copy into another shape (concatenate a class token, take one token): keeps nothing."""
    out = tape.value(items, x.part)
    moved = x.bytes + out.bytes
    return tape.record(Call((x,), out), memory_operator(name, out, moved, moved))


def cross_entropy(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """Mean cross-entropy of logits (rows, classes) in fp32: keeps the fp32 log-softmax and the labels.

    The cast, log-softmax and the negative log-likelihood are calls of their own, so that backward holds the two fp32
    gradients that PyTorch makes. The model's own forward holds the logits until the loss is there.
    """
    cast = logits if logits.item_bytes == FP32 else tape.value(logits.items, logits.part, FP32)
    if cast is not logits:
        moved = logits.bytes + cast.bytes
        tape.record(Call((logits,), cast), memory_operator(f"{name}.cast", cast, moved, moved))
    log_softmax = tape.value(logits.items, logits.part, FP32)
    softmax = memory_operator(f"{name}.log_softmax", cast, 2 * cast.bytes, 3 * cast.bytes)
    tape.record(Call((cast,), log_softmax, saved=(log_softmax,)), softmax)
    loss = tape.value(1, Part.WHOLE, FP32)
    likelihood = memory_operator(f"{name}.nll", loss, labels.bytes, 2 * cast.bytes + labels.bytes, items=labels.items)
    held = replace(logits, grad=False)
    return tape.record(Call((log_softmax, labels, held), loss, saved=(log_softmax, labels)), likelihood)
