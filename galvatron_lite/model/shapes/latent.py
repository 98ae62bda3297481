"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from a compressed token.

The compressions are held by every device of a tensor group and work on its share of the tokens; the expansions are
split by heads. In training keys and values are expanded in full, and the turned part of a key, one for all heads, is
copied to every head.
"""

from __future__ import annotations

from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import Heads, attention
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.fields import TransformerShape
from galvatron_lite.model.shapes.tape import Tape, memory_operator, narrow


def latent_attention(tape: Tape, shape: TransformerShape, x: Value, *, causal: bool) -> Value:
    """Attention of ``x`` (tokens, hidden) over itself; the result is summed over the tensor group."""
    heads = Heads(shape.heads, shape.heads, shape.head_dim, shape.value_dim or shape.head_dim)
    tokens = x.items // shape.hidden
    q = _queries(tape, shape, x)
    keys, values = _keys_and_values(tape, shape, x, heads)
    q = _turned(tape, "attention.rotary_q", q, tokens * shape.heads * shape.rope_dim)
    mixed = attention(tape, "attention", q, keys, values, heads, causal=causal, dropout=shape.dropout)
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
    small = tape.gather(
        tape.record(
            ShapeCall((joined,), tape.value(tokens * shape.kv_rank, joined.part)),
            memory_operator("", joined, 0, 0, count=0),
        )
    )
    columns = shape.heads * (plain + heads.values)
    both = ops.linear(
        tape, "attention.kv_up", small, shape.kv_rank, columns, Division.TENSOR, bias=False, fp8=tape.kernels.fp8
    )
    keys = tape.value(tokens * shape.heads * shape.head_dim, both.part)
    values = tape.value(tokens * shape.heads * heads.values, both.part)
    operator = memory_operator("attention.join_keys", keys, 2 * keys.bytes, 2 * keys.bytes, count=3)
    tape.record(ShapeCall((both,), keys, fusible=True), operator)
    copied = memory_operator("attention.split_values", values, 2 * values.bytes, 2 * values.bytes)
    tape.record(ShapeCall((both,), values, fusible=True), copied)
    return keys, values


def _turned(tape: Tape, name: str, x: Value, turned: int) -> Value:
    """Rotary positions on part of the items, written beside the rest."""
    out = tape.value(x.items, x.part)
    passes, count = (2, 1) if tape.kernels.fused_rotary else (10, 6)
    moved = passes * turned * x.item_bytes + 2 * (x.bytes - turned * x.item_bytes)
    return tape.record(ShapeCall((x,), out, fusible=True), memory_operator(name, x, moved, moved, count=count))
