"""Decoders (GPT, Llama, mixtures of experts) and encoders (BERT) from their shapes.

Blocks follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): query, key, value, up and
gate projections are split by columns, output and down projections by rows; norms, dropout and additions work on a
share of the tokens under sequence parallelism, while the gathered input of each column-split region is kept in full.
"""

from __future__ import annotations

from math import gcd

from galvatron_lite.model.graph import LayerKind, ModelGraph, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble, blocks
from galvatron_lite.model.shapes.calls import Part, Value
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderShape, MoeShape, TransformerShape
from galvatron_lite.model.shapes.moe import experts
from galvatron_lite.model.shapes.tape import Tape, narrow, widen

NOT_SPLIT = "nothing in it is split: every device of a tensor group does all of its work"
_MANY_WAYS = 5040


def norm(tape: Tape, shape: TransformerShape, name: str, x: Value) -> Value:
    """The shape's normalisation over the hidden size."""
    if shape.norm == "rmsnorm":
        return ops.rms_norm(tape, name, x, shape.hidden, fused=shape.fused_norm)
    return ops.layer_norm(tape, name, x, shape.hidden, bias=shape.biases)


def attend(
    tape: Tape, shape: TransformerShape, x: Value, *, causal: bool = False, source: Value | None = None
) -> Value:
    """Attention of ``x`` over itself, or over ``source`` (cross-attention); both (tokens, hidden) and gathered."""
    name = "attention" if source is None else "cross_attention"
    keys = x if source is None else source
    bias = shape.biases or shape.qkv_bias
    q = ops.linear(tape, f"{name}.q", x, shape.hidden, shape.attention_width, Part.TENSOR, bias=bias)
    k = ops.linear(tape, f"{name}.k", keys, shape.hidden, shape.kv_width, Part.TENSOR, bias=bias)
    v = ops.linear(tape, f"{name}.v", keys, shape.hidden, shape.kv_width, Part.TENSOR, bias=bias)
    if shape.positions == "rotary":
        q, k = ops.rotary(tape, f"{name}.rotary_q", q), ops.rotary(tape, f"{name}.rotary_k", k)
    mixed = ops.attention(tape, f"{name}.scores", q, k, v, (shape.heads, shape.kv_heads), shape.head_dim, causal=causal)
    out = ops.linear(tape, f"{name}.out", mixed, shape.attention_width, shape.hidden, Part.SEQUENCE, bias=shape.biases)
    return ops.dropout(tape, f"{name}.dropout", narrow(out), shape.dropout)


def activate(tape: Tape, shape: TransformerShape, x: Value) -> Value:
    """The MLP's activation."""
    return ops.activation(tape, "mlp.act", x, keeps_output=shape.activation == "relu")


def mlp(tape: Tape, shape: TransformerShape, x: Value) -> Value:
    """The MLP of gathered ``x`` (tokens, hidden): two projections, or three where it is gated."""
    ffn, bias = shape.ffn_hidden, shape.biases
    if shape.gated_mlp:
        gate = activate(tape, shape, ops.linear(tape, "mlp.gate", x, shape.hidden, ffn, Part.TENSOR, bias=bias))
        up = ops.linear(tape, "mlp.up", x, shape.hidden, ffn, Part.TENSOR, bias=bias)
        inner = ops.multiply(tape, "mlp.product", gate, up)
    else:
        inner = activate(tape, shape, ops.linear(tape, "mlp.up", x, shape.hidden, ffn, Part.TENSOR, bias=bias))
    out = ops.linear(tape, "mlp.down", inner, ffn, shape.hidden, Part.SEQUENCE, bias=bias)
    return ops.dropout(tape, "mlp.dropout", narrow(out), shape.dropout)


def split_degree(shape: TransformerShape) -> int:
    """Largest tensor-parallel degree of a block: what divides heads, key-value heads and the MLP's width."""
    width = shape.moe_ffn if isinstance(shape, MoeShape) else shape.ffn_hidden
    return gcd(shape.heads, shape.kv_heads, width)


def many_ways(rows: int = _MANY_WAYS << 6) -> int:
    """A number with many small divisors, none above ``rows``: the degrees offered where rows may be shared unevenly."""
    if rows < _MANY_WAYS:
        return 1 << (rows.bit_length() - 1)
    return _MANY_WAYS << ((rows // _MANY_WAYS).bit_length() - 1)


def block_dims(shape: TransformerShape, tokens: int) -> SplitDims:
    """Extents of a block that can be split."""
    moe = isinstance(shape, MoeShape)
    return SplitDims(
        sequence=tokens,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        hidden=shape.hidden,
        ffn_hidden=shape.moe_ffn if isinstance(shape, MoeShape) else shape.ffn_hidden,
        experts=shape.n_experts if isinstance(shape, MoeShape) and moe else 0,
    )


def block_kind(
    tape: Tape, shape: TransformerShape, name: str, outputs: tuple[Value, ...], tokens: int, collectives: int = 4
) -> LayerKind:
    """Sum up a block's tape: 4 collectives a forward pass (gather and scatter around attention and around the MLP)."""
    return tape.kind(
        name,
        outputs,
        block_dims(shape, tokens),
        tensor_degrees=split_degree(shape),
        tensor_collectives=collectives,
        sequence_parallel=True,
    )


def pre_norm_block(
    shape: TransformerShape, tokens: int, item_bytes: int, name: str = "block", *, causal: bool = True
) -> LayerKind:
    """A block that normalises before attention and before the MLP (GPT, Llama, Mixtral, T5's encoder)."""
    tape = Tape(item_bytes)
    x = tape.enter(tokens * shape.hidden)
    attended = attend(tape, shape, widen(norm(tape, shape, "norm1", x)), causal=causal)
    x = ops.add(tape, "attention.residual", x, attended)
    normed = norm(tape, shape, "norm2", x)
    mixed = experts(tape, shape, normed) if isinstance(shape, MoeShape) else mlp(tape, shape, widen(normed))
    out = ops.add(tape, "mlp.residual", x, mixed)
    return block_kind(tape, shape, name, (out,), tokens)


def post_norm_block(shape: TransformerShape, tokens: int, item_bytes: int) -> LayerKind:
    """A block that normalises after each residual addition (BERT)."""
    tape = Tape(item_bytes)
    x = tape.enter(tokens * shape.hidden)
    summed = ops.add(tape, "attention.residual", x, attend(tape, shape, widen(x)))
    x = norm(tape, shape, "norm1", summed)
    summed = ops.add(tape, "mlp.residual", x, mlp(tape, shape, widen(x)))
    return block_kind(tape, shape, "block", (norm(tape, shape, "norm2", summed),), tokens)


def embed(tape: Tape, shape: TransformerShape, tokens: int, *, own: bool = True) -> Value:
    """Token table, learned positions and dropout: token indices to (tokens, hidden)."""
    indices = tape.enter(tokens, Part.WHOLE, ops.INDEX, grad=False)
    part = Part.TENSOR if shape.splits_vocabulary else Part.WHOLE
    table = shape.entries * shape.hidden * own
    x = ops.embedding(tape, "embedding", indices, shape.hidden, table=table, part=part)
    if shape.positions == "learned":
        x = ops.positions(tape, "positions", x, shape.position_entries * shape.hidden)
    return x


def embedding_kind(shape: TransformerShape, tokens: int, item_bytes: int) -> LayerKind:
    """``before``: token table (split over the vocabulary), positions; a BERT's segment table and norm too."""
    tape = Tape(item_bytes)
    x = embed(tape, shape, tokens)
    if isinstance(shape, EncoderShape):
        segments = tape.enter(tokens, Part.WHOLE, ops.INDEX, grad=False)
        named = ops.embedding(tape, "segments", segments, shape.hidden, table=shape.segments * shape.hidden)
        x = ops.add(tape, "segments.sum", x, named)
        x = norm(tape, shape, "norm", x)
    x = ops.dropout(tape, "dropout", x, shape.dropout)
    return edge_kind(tape, shape, "before", (x,), tokens)


def edge_kind(
    tape: Tape, shape: TransformerShape, name: str, out: tuple[Value, ...], tokens: int, gathered: Value | None = None
) -> LayerKind:
    """Sum up the tape of an embedding (its rows are reduced once a forward pass) or of a head (its logits gathered).

    The vocabulary may be shared unevenly, so degrees need not divide it.
    """
    split = shape.splits_vocabulary
    return tape.kind(
        name,
        out,
        SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.entries),
        tensor_degrees=many_ways(shape.entries) if split else many_ways(),
        tensor_reason="" if split else NOT_SPLIT,
        tensor_collectives=2 if split and not gathered else 0,
        recomputed=False,
        gathered=gathered if split else None,
    )


def head(tape: Tape, shape: TransformerShape, x: Value, bias: bool = False) -> tuple[Value, Value]:
    """Logits split over the vocabulary, gathered, and their cross-entropy: (logits, loss)."""
    rows = x.items // shape.hidden
    labels = tape.labels(rows)
    own = not shape.tied_embeddings
    part = Part.TENSOR if shape.splits_vocabulary else Part.WHOLE
    logits = ops.linear(tape, "head", widen(x), shape.hidden, shape.entries, part, bias=bias, own=own)
    logits = widen(logits)
    return logits, ops.cross_entropy(tape, "loss", logits, labels)


def head_kind(shape: TransformerShape, tokens: int, item_bytes: int) -> LayerKind:
    """``after`` of a decoder: final norm, head, loss."""
    tape = Tape(item_bytes)
    x = norm(tape, shape, "norm", tape.enter(tokens * shape.hidden))
    logits, loss = head(tape, shape, x)
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def masked_head_kind(shape: EncoderShape, tokens: int, item_bytes: int) -> LayerKind:
    """``after`` of a BERT: transform, head with a bias over the vocabulary, loss; pooler and next-sentence head."""
    tape = Tape(item_bytes)
    x = tape.enter(tokens * shape.hidden)
    transformed = ops.linear(tape, "transform", x, shape.hidden, shape.hidden, Part.WHOLE, bias=True)
    transformed = norm(tape, shape, "norm", ops.activation(tape, "transform.act", transformed))
    logits, loss = head(tape, shape, transformed, bias=True)
    if shape.head == "pretraining":
        loss = ops.add(tape, "loss.sum", loss, _next_sentence(tape, shape, x))
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def _next_sentence(tape: Tape, shape: EncoderShape, x: Value) -> Value:
    first = ops.reshape(tape, "pooler.first", x, shape.hidden)
    pooled = ops.linear(tape, "pooler", first, shape.hidden, shape.hidden, Part.WHOLE, bias=True, keeps=x)
    pooled = ops.activation(tape, "pooler.act", pooled, keeps_output=True)
    logits = ops.linear(tape, "next_sentence", pooled, shape.hidden, 2, Part.WHOLE, bias=True)
    return ops.cross_entropy(tape, "next_sentence.loss", logits, tape.labels(1))


def ties_of(shape: TransformerShape, *users: str) -> dict[tuple[str, str], int]:
    """The token table, shared with each user where embeddings are tied."""
    return {("before", user): shape.entries * shape.hidden for user in users if shape.tied_embeddings}


def decoder_graph(shape: DecoderShape | MoeShape, precision: str, item_bytes: int, kernels: Kernels = EAGER) -> ModelGraph:
    """Embedding, equal pre-norm blocks, final norm with head and loss."""
    tokens = shape.seq_len
    kinds = [maker(shape, tokens, item_bytes) for maker in (embedding_kind, pre_norm_block, head_kind)]
    notes = ("Tokens are taken to be spread evenly over the experts.",) if isinstance(shape, MoeShape) else ()
    return assemble(
        shape.name,
        kinds,
        blocks("layers", "block", shape.layers),
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
        notes=notes,
    )


def encoder_graph(shape: EncoderShape, precision: str, item_bytes: int, kernels: Kernels = EAGER) -> ModelGraph:
    """Embedding with norm, equal post-norm blocks, masked-language-model head and loss."""
    tokens = shape.seq_len
    before, block = embedding_kind(shape, tokens, item_bytes), post_norm_block(shape, tokens, item_bytes)
    after = masked_head_kind(shape, tokens, item_bytes)
    return assemble(
        shape.name,
        (before, block, after),
        blocks("layers", "block", shape.layers),
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
    )
