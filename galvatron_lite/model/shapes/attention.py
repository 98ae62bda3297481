"""Attention: one fused kernel, or calls of its own; and multi-head latent attention.

The compressions are held by every device of a tensor group and work on its share of the tokens; the expansions are
split by heads. In training keys and values are expanded in full, and the turned part of a key, one for all heads, is
copied to every head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.fields import TransformerShape
from galvatron_lite.model.shapes.records import FP32, Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, narrow, sharding_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention."""

    queries: int  # heads of queries
    keys: int  # heads of keys and values
    size: int  # items of one head of queries and keys
    value_size: int = 0  # items of one head of values; 0: as many as ``size``

    @property
    def values(self) -> int:
        """Items of one head of values."""
        return self.value_size or self.size


def attention(
    tape: Tape, name: str, q: Value, k: Value, v: Value, heads: Heads, *, causal: bool, dropout: float = 0.0,
    biased: bool = False, window: int = 0,
) -> Value:  # fmt: skip
    """Attention by the tape's kernels.

    Args:
        causal: whether a query sees no later key.
        dropout: probability on the attention weights; the fused kernel keeps no mask of it.
        biased: whether a bias by distance is added to the scores; where the fused kernel does it that costs nothing.
        window: tokens that a query sees at most; the fused kernel skips the others. 0: no window.
    """
    if tape.kernels.flash_attention:
        bias = _bias(tape, f"{name}.bias", q, k, heads) if biased and tape.kernels.bias_in_mask else None
        return _flash(tape, f"{name}.scores", (q, k, v), heads, causal=causal, bias=bias, window=window)
    return _plain(tape, name, (q, k, v), heads, causal=causal, dropout=dropout, biased=biased)


def _bias(tape: Tape, name: str, q: Value, k: Value, heads: Heads) -> Value:
    """The mask with the bias of every pair of a query and a key, a head."""
    queries, keys = q.items // (heads.queries * heads.size), k.items // (heads.keys * heads.size)
    out = tape.value(heads.queries * queries * keys, q.part)
    return tape.memory(name, (), out, 3 * out.bytes, out.bytes)


def _flash(
    tape: Tape, name: str, qkv: tuple[Value, Value, Value], heads: Heads, *, causal: bool, bias: Value | None = None,
    window: int = 0,
) -> Value:  # fmt: skip
    """Flash attention (Dao 2023): keeps q, k, v, its output and one fp32 log-sum a query and head.

    FLOPs count the whole score matrix, causal or not: 2 x queries x keys x heads x (head size + value size) forward
    (two matmuls), 2.5 times that backward (five matmuls: the scores are computed again). Of a window every query counts
    in full, those at the beginning too.
    """
    q, k, v = qkv
    queries, keys = q.items // (heads.queries * heads.size), k.items // (heads.keys * heads.size)
    if 0 < window < keys:
        keys, causal = window, False
    out = tape.value(queries * heads.queries * heads.values, q.part)
    sums = tape.value(queries * heads.queries, q.part, FP32, grad=False)
    flops = 2 * queries * keys * heads.queries * (heads.size + heads.values)
    biases = () if bias is None else (bias,)
    touched = q.bytes + k.bytes + v.bytes + out.bytes + sum(bias.bytes for bias in biases)
    operator = Operator(
        name, OperatorClass.ATTENTION, (heads.queries, heads.keys, queries, keys, heads.size), 1, flops, flops * 5 // 2,
        touched + sums.bytes, 2 * touched + sums.bytes, 0, sharding_of(q), causal,
    )  # fmt: skip
    saved = (q, k, v, *biases, out, sums)
    return tape.record(ShapeCall((q, k, v, *biases), out, saved=saved, anchor=(out, sums), core=True), operator)


def _plain(
    tape: Tape, name: str, qkv: tuple[Value, Value, Value], heads: Heads, *, causal: bool, dropout: float, biased: bool
) -> Value:
    """Scores, softmax, dropout and context; keeps 5 bytes a score in half precision (Korthikanti et al. 2022, eq. 1).

    Shared heads of keys and values are copied to every query head first, as Megatron's plain path does.
    """
    q, k, v = qkv
    queries, keys = q.items // (heads.queries * heads.size), k.items // (heads.keys * heads.size)
    if heads.keys < heads.queries:
        k = _repeat(tape, f"{name}.repeat_k", k, keys * heads.queries * heads.size)
        v = _repeat(tape, f"{name}.repeat_v", v, keys * heads.queries * heads.values)
    rows = heads.queries * queries
    scores = _product(tape, f"{name}.scores", (q, k), (rows, heads.size, keys))
    weights = _softmax(tape, name, scores, causal=causal, biased=biased)
    weights = _drop(tape, f"{name}.weights_dropout", weights, dropout)
    return _product(tape, f"{name}.context", (weights, v), (rows, keys, heads.values))


def _repeat(tape: Tape, name: str, x: Value, items: int) -> Value:
    out = tape.value(items, x.part)
    return tape.memory(name, (x,), out, x.bytes + out.bytes, core=True)


def _product(tape: Tape, name: str, factors: tuple[Value, Value], shape: tuple[int, int, int]) -> Value:
    """A batch of matmuls, one a head, no weights: keeps both factors; the heads are folded into the rows."""
    first, second = factors
    rows, inner, columns = shape
    out = tape.value(rows * columns, first.part)
    flops, moved = 2 * rows * inner * columns, first.bytes + second.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 0, sharding_of(first)
    )  # fmt: skip
    return tape.record(ShapeCall(factors, out, saved=factors, anchor=(out,), core=True), operator)


def _softmax(tape: Tape, name: str, scores: Value, *, causal: bool, biased: bool) -> Value:
    """Scale, mask and softmax: one kernel that keeps its output, or one each, softmax in fp32."""
    out = tape.value(scores.items, scores.part)
    if tape.kernels.fused_softmax:
        seen = 1 if causal else 2  # Megatron's causal kernel skips what the mask hides
        moved, back = (seen + 2) * out.bytes // 2, (seen + 1) * out.bytes
        return tape.memory(f"{name}.softmax", (scores,), out, moved, back, saved=(out,), core=True)
    passes = ("scale", "mask", "bias") if biased else ("scale", "mask")
    x = scores
    for each in passes:
        weights = tape.value(x.items, x.part)
        moved, added = 2 * x.bytes, each == "bias"
        x = tape.memory(
            f"{name}.{each}",
            (x,),
            weights,
            moved,
            0 if added else moved,
            core=True,
            fusible=True,
            shares_gradient=added,
        )
    wide = out if out.item_bytes == FP32 else tape.value(x.items, x.part, FP32)
    moved, back = x.bytes + wide.bytes, 2 * wide.bytes + x.bytes
    tape.memory(f"{name}.softmax", (x,), wide, moved, back, saved=(wide,), core=True, fusible=True)
    if wide is out:
        return out
    return tape.memory(f"{name}.cast", (wide,), out, wide.bytes + out.bytes, core=True, fusible=True)


def _drop(tape: Tape, name: str, weights: Value, probability: float) -> Value:
    if not probability:
        return weights
    out = tape.value(weights.items, weights.part)
    mask = tape.value(weights.items, weights.part, 1, grad=False)
    moved = 2 * weights.bytes + mask.bytes
    return tape.memory(name, (weights,), out, moved, saved=(mask,), core=True, fusible=True)


def view(tensor: Value, items: int) -> Value:
    """Part of a tensor, in the tensor's storage."""
    return replace(tensor, items=items, storage=tensor.held)


def latent_attention(tape: Tape, shape: TransformerShape, x: Value, *, causal: bool, window: int = 0) -> Value:
    """Attention of ``x`` (tokens, hidden) over itself; the result is summed over the tensor group."""
    heads = Heads(shape.heads, shape.heads, shape.head_dim, shape.value_dim or shape.head_dim)
    tokens = x.items // shape.hidden
    q = _queries(tape, shape, x)
    keys, values = _keys_and_values(tape, shape, x, heads)
    q = _turned(tape, "attention.rotary_q", q, tokens * shape.heads * shape.rope_dim)
    mixed = attention(tape, "attention", q, keys, values, heads, causal=causal, dropout=shape.dropout, window=window)
    width = shape.heads * heads.values
    out = ops.linear(
        tape, "attention.out", mixed, width, shape.hidden, Division.SEQUENCE, bias=shape.biases, fp8=tape.kernels.fp8
    )
    return narrow(out)


def _compressed(tape: Tape, shape: TransformerShape, name: str, x: Value, columns: int, rank: int) -> Value:
    """A projection to few items and its norm; every device does it on its share of the tokens."""
    down = ops.linear(
        tape,
        f"attention.{name}_down",
        narrow(x),
        shape.hidden,
        columns,
        Division.WHOLE,
        bias=False,
        fp8=tape.kernels.fp8,
    )
    return ops.rms_norm(tape, f"attention.{name}_norm", narrow(down), rank, fused=tape.kernels.fused_norm)


def _queries(tape: Tape, shape: TransformerShape, x: Value) -> Value:
    width, fp8 = shape.heads * shape.head_dim, tape.kernels.fp8
    if not shape.q_rank:
        return ops.linear(
            tape, "attention.q", tape.gather(x), shape.hidden, width, Division.TENSOR, bias=False, fp8=fp8
        )
    small = tape.gather(_compressed(tape, shape, "q", x, shape.q_rank, shape.q_rank))
    return ops.linear(tape, "attention.q_up", small, shape.q_rank, width, Division.TENSOR, bias=False, fp8=fp8)


def _keys_and_values(tape: Tape, shape: TransformerShape, x: Value, heads: Heads) -> tuple[Value, Value]:
    """Keys (expanded part beside the turned part) and values."""
    tokens = x.items // shape.hidden
    plain = shape.head_dim - shape.rope_dim
    joined = _compressed(tape, shape, "kv", x, shape.kv_rank + shape.rope_dim, shape.kv_rank)
    part = tape.value(tokens * shape.kv_rank, joined.part)
    small = tape.gather(tape.memory("", (joined,), part, 0, like=joined, count=0))
    columns = shape.heads * (plain + heads.values)
    both = ops.linear(
        tape, "attention.kv_up", small, shape.kv_rank, columns, Division.TENSOR, bias=False, fp8=tape.kernels.fp8
    )
    keys = tape.value(tokens * shape.heads * shape.head_dim, both.part)
    values = tape.value(tokens * shape.heads * heads.values, both.part)
    tape.memory("attention.join_keys", (both,), keys, 2 * keys.bytes, count=3, fusible=True)
    tape.memory("attention.split_values", (both,), values, 2 * values.bytes, fusible=True)
    return keys, values


def _turned(tape: Tape, name: str, x: Value, turned: int) -> Value:
    """Rotary positions on part of the items, written beside the rest."""
    out = tape.value(x.items, x.part)
    passes, count = (2, 1) if tape.kernels.fused_rotary else (10, 6)
    moved = passes * turned * x.item_bytes + 2 * (x.bytes - turned * x.item_bytes)
    return tape.memory(name, (x,), out, moved, count=count, fusible=True)
