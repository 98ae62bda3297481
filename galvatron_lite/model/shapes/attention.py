"""Layers of a transformer on a tape: norms, projections, and attention by one fused kernel or step by step.

In multi-head latent attention each device of a tensor group holds the compressions and applies them to its shard of the
tokens; the expansions are split by heads. In training keys and values are expanded in full, and the part of a key with
rotary positions, one for all heads, is copied to each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.fields import TransformerShape
from galvatron_lite.model.shapes.records import FP32, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, narrow

S = TypeVar("S", bound=TransformerShape, covariant=True)


@dataclass(frozen=True, slots=True)
class LayerWriter(Generic[S]):
    """Writes the calls of one layer on its tape; tensors are (tokens, hidden)."""

    shape: S  # of the model
    tape: Tape

    def enter(self, tokens: int) -> Value:
        """The hidden state that enters the layer."""
        return self.tape.enter(tokens * self.shape.hidden)

    def norm(self, name: str, x: Value) -> Value:
        """Normalise over the hidden size."""
        if self.shape.norm == "rmsnorm":
            return self.rms_norm(name, x, self.shape.hidden)
        return ops.layer_norm(self.tape, name, x, self.shape.hidden, bias=self.shape.biases)

    def rms_norm(self, name: str, x: Value, width: int) -> Value:
        """RMSNorm over the last ``width`` items."""
        return ops.rms_norm(self.tape, name, x, width, fused=self.tape.kernels.fused_norm)

    def linear(
        self, name: str, x: Value, inner: int, columns: int, split: Sharding = Sharding.TENSOR, *, bias: bool = False
    ) -> Value:
        """A projection inside a block; see ``ops.linear``."""
        return ops.linear(self.tape, name, x, inner, columns, split, bias=bias, fp8=self.tape.kernels.fp8)

    def column(self, name: str, x: Value, columns: int) -> Value:
        """A column-split projection of the hidden state."""
        bias = self.shape.biases or (self.shape.qkv_bias and "attention" in name)
        return self.linear(name, x, self.shape.hidden, columns, bias=bias)

    def row(self, name: str, x: Value, inner: int) -> Value:
        """A row-split projection to the hidden size, summed over the tensor group."""
        return narrow(self.linear(name, x, inner, self.shape.hidden, Sharding.SEQUENCE, bias=self.shape.biases))

    def dropout(self, name: str, x: Value) -> Value:
        """Dropout with the shape's probability."""
        return ops.dropout(self.tape, name, x, self.shape.dropout)

    def residual(self, name: str, x: Value, y: Value) -> Value:
        """Add dropout of ``y`` to ``x``."""
        return ops.residual(self.tape, name, x, y, self.shape.dropout)


def attend(
    layer: LayerWriter[TransformerShape], x: Value, *, causal: bool = False, source: Value | None = None,
    window: int = 0,
) -> Value:  # fmt: skip
    """Attention of ``x`` over itself (of each query over ``window`` tokens), or over ``source`` (cross-attention).

    The result is summed over the tensor group, before its dropout.
    """
    shape, tape = layer.shape, layer.tape
    if shape.kv_rank and source is None:
        return _latent_attention(layer, x, causal, window)
    name = "attention" if source is None else "cross_attention"
    q, k, v = _projections(layer, name, tape.gather(x), None if source is None else tape.gather(source))
    if shape.head_norm:
        q, k = (layer.rms_norm(f"{name}.{letter}_norm", x, shape.head_dim) for letter, x in (("q", q), ("k", k)))
    if shape.positions == "rotary":
        q, k = (ops.rotary(tape, f"{name}.rotary_{letter}", x) for letter, x in (("q", q), ("k", k)))
    biased = shape.positions in ("alibi", "relative") and source is None
    tape.count(shape.heads * shape.sinks, Sharding.TENSOR)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    mixed = attention(
        tape, name, (q, k, v), heads, causal=causal, dropout=shape.dropout, biased=biased, window=window
    )  # fmt: skip
    return layer.row(f"{name}.out", mixed, shape.attention_width)


def _projections(
    layer: LayerWriter[TransformerShape], name: str, x: Value, source: Value | None
) -> tuple[Value, Value, Value]:
    """Queries of ``x``, keys and values of ``source`` or ``x``: three matmuls, or as few as the kernels allow."""
    width, kv_width = layer.shape.attention_width, layer.shape.kv_width
    if not layer.tape.kernels.merged_projections:
        q, attended = layer.column(f"{name}.q", x, width), source or x
        return q, layer.column(f"{name}.k", attended, kv_width), layer.column(f"{name}.v", attended, kv_width)
    if source is None:
        tokens, qkv = x.items // layer.shape.hidden, layer.column(f"{name}.qkv", x, width + 2 * kv_width)
        return qkv.view(tokens * width), qkv.view(tokens * kv_width), qkv.view(tokens * kv_width)
    kv = layer.column(f"{name}.kv", source, 2 * kv_width)
    return layer.column(f"{name}.q", x, width), kv.view(kv.items // 2), kv.view(kv.items // 2)


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention."""

    queries: int  # heads of queries
    keys: int  # heads of keys and values
    size: int  # items of one head of queries and keys
    values: int  # items of one head of values


def attention(
    tape: Tape, name: str, qkv: tuple[Value, Value, Value], heads: Heads, *, causal: bool, dropout: float = 0.0,
    biased: bool = False, window: int = 0,
) -> Value:  # fmt: skip
    """Attention by the tape's kernels.

    Args:
        qkv: queries, keys and values.
        causal: whether a query sees no later key.
        dropout: probability on the attention weights; the fused kernel keeps no mask.
        biased: whether a bias by distance is added to the scores, which is free in the fused kernel.
        window: tokens that a query sees at most; the fused kernel skips the others. 0: no window.
    """
    q, k, _ = qkv
    queries, keys = q.items // (heads.queries * heads.size), k.items // (heads.keys * heads.size)
    if not tape.kernels.flash_attention:
        return _plain(tape, name, qkv, heads, (queries, keys), causal=causal, dropout=dropout, biased=biased)
    mask: tuple[Value, ...] = ()
    if biased and tape.kernels.bias_in_mask:  # a mask with the bias of each head, query and key
        pairs = tape.value(heads.queries * queries * keys, q.sharding)
        mask = (tape.memory(f"{name}.bias", (), pairs, 3 * pairs.bytes, pairs.bytes),)
    if 0 < window < keys:
        keys, causal = window, False
    return _flash(tape, f"{name}.scores", (*qkv, *mask), heads, (queries, keys), causal)


def _flash(
    tape: Tape, name: str, inputs: tuple[Value, ...], heads: Heads, extents: tuple[int, int], causal: bool
) -> Value:
    """Flash attention (Dao 2023): keeps its inputs, its output and one fp32 log-sum per query and head.

    FLOPs count the full score matrix, causal or not: 2 x queries x keys x heads x (head size + value size) forward (two
    matmuls), 2.5 times that backward (five matmuls: the scores are computed again). With a window each query counts in
    full, also at the beginning.
    """
    (queries, keys), sharding = extents, inputs[0].sharding
    out = tape.value(queries * heads.queries * heads.values, sharding)
    sums = tape.value(queries * heads.queries, sharding, FP32, grad=False)
    flops = 2 * queries * keys * heads.queries * (heads.size + heads.values)
    touched = sum(value.bytes for value in (*inputs, out))
    operator = Operator(
        name, OperatorClass.ATTENTION, (heads.queries, heads.keys, queries, keys, heads.size), 1, flops, flops * 5 // 2,
        touched + sums.bytes, 2 * touched + sums.bytes, 0, out.sharding, causal,
    )  # fmt: skip
    return tape.record(ShapeCall(inputs, out, saved=(*inputs, out, sums), anchor=(out, sums), core=True), operator)


def _plain(
    tape: Tape, name: str, qkv: tuple[Value, Value, Value], heads: Heads, extents: tuple[int, int], *, causal: bool,
    dropout: float, biased: bool,
) -> Value:  # fmt: skip
    """Scores, softmax, dropout and context; keeps 5 bytes a score in half precision (Korthikanti et al. 2022, eq. 1).

    Shared heads of keys and values are first copied to each query head, as in Megatron's plain path.
    """
    (q, k, v), (queries, keys) = qkv, extents
    if heads.keys < heads.queries:
        k = ops.reshape(tape, f"{name}.repeat_k", k, keys * heads.queries * heads.size, core=True)
        v = ops.reshape(tape, f"{name}.repeat_v", v, keys * heads.queries * heads.values, core=True)
    rows = heads.queries * queries
    scores = _product(tape, f"{name}.scores", (q, k), (rows, heads.size, keys))
    weights = _softmax(tape, name, scores, causal=causal, biased=biased)
    weights = ops.dropout(tape, f"{name}.weights_dropout", weights, dropout, core=True)
    return _product(tape, f"{name}.context", (weights, v), (rows, keys, heads.values))


def _product(tape: Tape, name: str, factors: tuple[Value, Value], shape: tuple[int, int, int]) -> Value:
    """A batch of matmuls without weights, one a head, with heads folded into the rows; keeps both factors."""
    rows, inner, columns = shape
    out = tape.value(rows * columns, factors[0].sharding)
    flops, moved = 2 * rows * inner * columns, sum(value.bytes for value in (*factors, out))
    operator = Operator(name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, moved, 2 * moved, 0, out.sharding)
    return tape.record(ShapeCall(factors, out, saved=factors, anchor=(out,), core=True), operator)


def _softmax(tape: Tape, name: str, scores: Value, *, causal: bool, biased: bool) -> Value:
    """Scale, mask and softmax: one kernel that keeps its output, or one each, with softmax in fp32 under autocast."""
    out = tape.like(scores)
    if tape.kernels.fused_softmax:
        seen = 1 if causal else 2  # Megatron's causal kernel skips what the mask hides
        moved, back = (seen + 2) * out.bytes // 2, (seen + 1) * out.bytes
        return tape.memory(f"{name}.softmax", (scores,), out, moved, back, saved=(out,), core=True)
    x, moved, traits = scores, 2 * scores.bytes, dict[str, Any](core=True, fusible=True)
    for step in ("scale", "mask"):
        x = tape.memory(f"{name}.{step}", (x,), tape.like(x), moved, **traits)
    if biased:
        added = tape.like(x)
        x = tape.memory(f"{name}.bias", (x,), added, moved, 0, shares_gradient=True, **traits)
    wide = tape.like(x, FP32) if tape.kernels.autocast and out.item_bytes < FP32 else out
    moved, back = x.bytes + wide.bytes, 2 * wide.bytes + x.bytes
    tape.memory(f"{name}.softmax", (x,), wide, moved, back, saved=(wide,), **traits)
    return out if wide is out else tape.memory(f"{name}.cast", (wide,), out, wide.bytes + out.bytes, **traits)


def _latent_attention(layer: LayerWriter[TransformerShape], x: Value, causal: bool, window: int) -> Value:
    """Multi-head latent attention of ``x`` over itself; the result is summed over the tensor group."""
    shape, tape = layer.shape, layer.tape
    heads = Heads(shape.heads, shape.heads, shape.head_dim, shape.value_dim or shape.head_dim)
    if shape.q_rank:
        small = tape.gather(_compressed(layer, "q", x, shape.q_rank, shape.q_rank))
        q = layer.linear("attention.q_up", small, shape.q_rank, shape.attention_width)
    else:
        q = layer.linear("attention.q", tape.gather(x), shape.hidden, shape.attention_width)
    keys, values = _latent_keys_and_values(layer, x, heads)
    # rotary positions on part of the items, and a copy of the others
    rotated = x.items // shape.hidden * shape.heads * shape.rope_dim * q.item_bytes
    passes, count = (2, 1) if tape.kernels.fused_rotary else (10, 6)
    moved, out = passes * rotated + 2 * (q.bytes - rotated), tape.like(q)
    q = tape.memory("attention.rotary_q", (q,), out, moved, count=count, fusible=True)
    qkv = q, keys, values
    mixed = attention(tape, "attention", qkv, heads, causal=causal, dropout=shape.dropout, window=window)
    return layer.row("attention.out", mixed, shape.heads * heads.values)


def _compressed(layer: LayerWriter[TransformerShape], name: str, x: Value, columns: int, rank: int) -> Value:
    """A projection to few items and its norm, which each device applies to its shard of the tokens."""
    down = layer.linear(f"attention.{name}_down", narrow(x), layer.shape.hidden, columns, Sharding.NONE)
    return layer.rms_norm(f"attention.{name}_norm", narrow(down), rank)


def _latent_keys_and_values(layer: LayerWriter[TransformerShape], x: Value, heads: Heads) -> tuple[Value, Value]:
    """Keys (the expanded part beside the part with rotary positions) and values."""
    shape, tape = layer.shape, layer.tape
    tokens = x.items // shape.hidden
    joined = _compressed(layer, "kv", x, shape.kv_rank + shape.rope_dim, shape.kv_rank)
    compressed = tape.value(tokens * shape.kv_rank, joined.sharding)
    small = tape.gather(tape.memory("", (joined,), compressed, 0, like=joined, count=0))
    columns = shape.heads * (shape.head_dim - shape.rope_dim + heads.values)
    both = layer.linear("attention.kv_up", small, shape.kv_rank, columns)
    keys = tape.value(tokens * shape.attention_width, both.sharding)
    values = tape.value(tokens * shape.heads * heads.values, both.sharding)
    tape.memory("attention.join_keys", (both,), keys, 2 * keys.bytes, count=3, fusible=True)
    tape.memory("attention.split_values", (both,), values, 2 * values.bytes, fusible=True)
    return keys, values
