"""Decoders (GPT, Llama, mixtures of experts) and encoders (BERT) from their shapes.

Follows Mixtral (Jiang et al. 2024) with grouped matmuls: every token is copied to its k experts, so the experts keep k
times what one MLP of their width would. FLOPs count the k experts a token visits, parameters count all. Shared experts
(DeepSeekMoE, Dai et al. 2024) are one MLP that every token visits.

Blocks follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): query, key, value, up and
gate projections are split by columns, output and down projections by rows; norms, dropout and additions work on a
share of the tokens under sequence parallelism, while the gathered input of each column-split region is kept in full.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import gcd

from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Routing, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import Heads, attention, latent_attention, view
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderShape, MoeShape, TransformerShape
from galvatron_lite.model.shapes.records import FP32, INDEX, Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, assemble, blocks, narrow, sharding_of, widen

NOT_SPLIT = "nothing in it is split: every device of a tensor group does all of its work"
_MANY_WAYS = 5040
_FIGURE_BYTES = 12
"""Of a token, that a device tells the others of a tensor group for a loss on shares (``parallelism.vocabulary``)."""


def norm(tape: Tape, shape: TransformerShape, name: str, x: Value) -> Value:
    """The shape's normalisation over the hidden size."""
    if shape.norm == "rmsnorm":
        return ops.rms_norm(tape, name, x, shape.hidden, fused=tape.kernels.fused_norm)
    return ops.layer_norm(tape, name, x, shape.hidden, bias=shape.biases)


def many_ways(rows: int = _MANY_WAYS << 6) -> int:
    """A number with many small divisors, none above ``rows``: the degrees offered where rows may be shared unevenly."""
    if rows < _MANY_WAYS:
        return 1 << (rows.bit_length() - 1)
    return _MANY_WAYS << ((rows // _MANY_WAYS).bit_length() - 1)


def embed(tape: Tape, shape: TransformerShape, tokens: int, *, tied: bool = False) -> Value:
    """Token table (``tied``: another layer's), learned positions, dropout: token indices to (tokens, hidden)."""
    indices = tape.enter(tokens, Division.WHOLE, INDEX, grad=False)
    part = Division.TENSOR if shape.splits_vocabulary else Division.WHOLE
    table = shape.entries * shape.hidden * (not tied)
    x = ops.embedding(tape, "embedding", indices, shape.hidden, table=table, part=part)
    if shape.positions == "learned":
        x = ops.positions(tape, "positions", x, shape.position_entries * shape.hidden)
    return x


def embedding_kind(shape: TransformerShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``before``: token table (split over the vocabulary), positions; a BERT's segment table and norm too."""
    tape = Tape(item_bytes, kernels)
    x = embed(tape, shape, tokens)
    if isinstance(shape, EncoderShape):
        segments = tape.enter(tokens, Division.WHOLE, INDEX, grad=False)
        named = ops.embedding(tape, "segments", segments, shape.hidden, table=shape.segments * shape.hidden)
        x = ops.add(tape, "segments.sum", x, named)
        x = norm(tape, shape, "norm", x)
    x = ops.dropout(tape, "dropout", x, shape.dropout)
    return edge_kind(tape, shape, "before", (x,), tokens)


def head(tape: Tape, shape: TransformerShape, x: Value, bias: bool = False) -> tuple[Value, Value]:
    """Logits split over the vocabulary, and their cross-entropy: (logits, loss)."""
    rows = x.items // shape.hidden
    labels = tape.labels(rows)
    part = Division.TENSOR if shape.splits_vocabulary else Division.WHOLE
    tied = shape.tied_embeddings
    logits = ops.linear(tape, "head", tape.gather(x), shape.hidden, shape.entries, part, bias=bias, tied=tied)
    return logits, ops.cross_entropy(tape, "loss", logits, labels)


def head_kind(shape: TransformerShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``after`` of a decoder: final norm, head, loss."""
    tape = Tape(item_bytes, kernels)
    x = norm(tape, shape, "norm", tape.enter(tokens * shape.hidden))
    logits, loss = head(tape, shape, x)
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def masked_head_kind(shape: EncoderShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """``after`` of a BERT: transform, head with a bias over the vocabulary, loss; pooler and next-sentence head."""
    tape = Tape(item_bytes, kernels)
    x = tape.enter(tokens * shape.hidden)
    picked = ops.reshape(tape, "predicted", x, shape.predicted * shape.hidden) if shape.predicted else x
    transformed = ops.linear(tape, "transform", picked, shape.hidden, shape.hidden, Division.WHOLE, bias=True)
    transformed = norm(tape, shape, "norm", ops.activation(tape, "transform.act", transformed))
    logits, loss = head(tape, shape, transformed, bias=True)
    if shape.head == "pretraining":
        loss = ops.add(tape, "loss.sum", loss, _next_sentence(tape, shape, x))
    return edge_kind(tape, shape, "after", (loss,), tokens, logits)


def _next_sentence(tape: Tape, shape: EncoderShape, x: Value) -> Value:
    first = ops.reshape(tape, "pooler.first", x, shape.hidden)
    pooled = ops.linear(tape, "pooler", first, shape.hidden, shape.hidden, Division.WHOLE, bias=True, keeps=x)
    pooled = ops.activation(tape, "pooler.act", pooled, keeps_output=True)
    logits = ops.linear(tape, "next_sentence", pooled, shape.hidden, 2, Division.WHOLE, bias=True)
    return ops.cross_entropy(tape, "next_sentence.loss", logits, tape.labels(1))


def edge_kind(
    tape: Tape, shape: TransformerShape, name: str, out: tuple[Value, ...], tokens: int, gathered: Value | None = None
) -> LayerKind:
    """Sum up the tape of an embedding (its rows are reduced once a forward pass) or of a head and its loss on shares.

    The vocabulary may be shared unevenly, so degrees need not divide it. Where software computes the loss on shares by
    itself, the layer's other work may be shared by tokens (Megatron's sequence parallelism covers both ends); else the
    runtime of this project does, and gathers logits where tokens are shared.
    """
    split, parallel = shape.splits_vocabulary, tape.kernels.parallel_loss
    figures = _FIGURE_BYTES * gathered.items // shape.entries if split and not parallel and gathered else 0
    kind = tape.kind(
        name,
        out,
        SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.entries),
        tensor_degrees=many_ways(shape.entries) if split else many_ways(),
        tensor_reason="" if split else NOT_SPLIT,
        tensor_collectives=2 if split and not gathered else 0,
        recomputed=False,
        sequence_parallel=split and parallel,
        gathered=gathered if split and not parallel else None,
        loss_bytes=figures,
        # rows of an embedding are summed once, of a head the gradient of its input is
        regions=(int(split and gathered is not None), int(split and gathered is None)),
    )
    more = FP32 * figures // _FIGURE_BYTES * (2 + shape.entries % 2)
    spared = FP32 * gathered.items if figures and gathered else 0
    # of each token a total in fp32 lies beside the logits, and the largest share of an odd vocabulary is a logit longer
    kept = {
        choice: replace(split, tensor=split.tensor - more, whole=split.whole + more)
        for choice, split in kind.kept.items()
    }
    return replace(kind, kept=kept, spared_bytes=spared)


def ties_of(shape: TransformerShape, *users: str) -> dict[tuple[str, str], int]:
    """The token table, shared with each user where embeddings are tied."""
    return {("before", user): shape.entries * shape.hidden for user in users if shape.tied_embeddings}


_TOP_K = 4  # kernels of top-k, its normalisation and the counting of rows an expert
_PERMUTE = 3  # kernels of sorting rows by expert and copying them


def experts(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """The mixture's output for ``x`` (tokens, hidden).

    Router logits are split neither by columns nor by rows. Keeps the router's input, the fp32 probabilities, the chosen
    indices and weights, and what each expert keeps.
    """
    logits = ops.linear(tape, "router", x, shape.hidden, shape.n_experts, Division.WHOLE, bias=shape.biases)
    weights = _choose(tape, shape, logits)
    copies = _dispatch(tape, shape, x)
    inner = _activated(tape, shape, copies)
    down = _grouped(tape, shape, "mlp.experts.down", inner, (shape.moe_ffn, shape.hidden), Division.SEQUENCE)
    weighted = tape.value(down.items, down.part)
    moved, back, factors = 2 * down.bytes + weights.bytes, 3 * down.bytes, (down, weights)
    tape.memory("mlp.weight", factors, weighted, moved, back, saved=factors, fusible=True)
    combined = tape.value(x.items, weighted.part)
    return narrow(tape.memory("combine", (weighted,), combined, weighted.bytes + combined.bytes, count=_PERMUTE))


def _dispatch(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """Tokens copied to the experts they visit, sorted by expert."""
    items = round(x.items * shape.moe_topk * shape.capacity)
    copies = tape.value(items, _part(tape))
    tape.dispatched_bytes += copies.bytes
    tape.routing = Routing(
        shape.moe_topk, tape.kernels.unique_dispatch, shape.expert_groups, shape.chosen_groups, shape.expert_excess
    )
    source = x if tape.kernels.folded_experts else widen(x)
    return tape.memory("dispatch", (source,), copies, x.bytes + copies.bytes, count=_PERMUTE)


def _part(tape: Tape) -> Division:
    """How the tokens on their way through the experts lie on a tensor group."""
    return Division.TENSOR if tape.kernels.folded_experts else Division.WHOLE


def _activated(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """What the down projections take: one activated projection, or a gated pair."""
    hidden, ffn = shape.hidden, shape.moe_ffn
    relu = shape.activation == "relu"
    if not shape.gated_mlp:
        up = _grouped(tape, shape, "mlp.experts.up", x, (hidden, ffn), Division.TENSOR)
        return ops.activation(tape, "mlp.act", up, keeps_output=relu)
    if tape.kernels.merged_projections:
        both = _grouped(tape, shape, "mlp.experts.gate_up", x, (hidden, 2 * ffn), Division.TENSOR)
        gate = up = view(both, both.items // 2)
    else:
        gate = _grouped(tape, shape, "mlp.experts.gate", x, (hidden, ffn), Division.TENSOR)
        up = _grouped(tape, shape, "mlp.experts.up", x, (hidden, ffn), Division.TENSOR)
    return ops.gated(tape, gate, up, keeps_output=relu)


def _choose(tape: Tape, shape: MoeShape, logits: Value) -> Value:
    """Scores in fp32 (softmax or sigmoid keeps its output), top-k (keeps indices), weights (keeps them).

    A softmax over the chosen logits alone is part of the weights. What a sigmoid router adds to each expert's score to
    balance their load (Wang et al. 2024) is a buffer.
    """
    tokens = logits.items // shape.n_experts
    scores = logits
    if shape.router != "chosen_softmax":
        scores = tape.value(logits.items, logits.part, FP32)
        tape.memory(f"router.{shape.router}", (logits,), scores, 2 * scores.bytes, 3 * scores.bytes, saved=(scores,))
    tape.buffer_bytes += FP32 * shape.n_experts * (shape.router == "sigmoid")
    chosen = tape.value(tokens * shape.moe_topk, logits.part, FP32)
    indices = tape.value(chosen.items, logits.part, INDEX, grad=False)
    passes = 1 + (shape.expert_groups > 1)  # limited to groups, scores are read again for the best groups
    moved = passes * scores.bytes + chosen.bytes + indices.bytes
    return tape.memory("router.topk", (scores,), chosen, moved, saved=(chosen, indices), count=passes * _TOP_K)


def _grouped(tape: Tape, shape: MoeShape, name: str, x: Value, extents: tuple[int, int], part: Division) -> Value:
    """One matmul an expert over its share of the rows of ``x`` (rows, inner); tokens spread evenly."""
    inner, columns = extents
    rows, many = x.items // inner, shape.n_experts
    out = tape.value(rows * columns, Division.TENSOR if part is Division.TENSOR else _part(tape))
    flops, weight = 2 * rows * inner * columns, many * inner * columns
    items = weight + many * columns * shape.biases
    tape.count(items, Division.TENSOR)
    tape.expert_items += items
    fp8 = tape.kernels.fp8
    kept = ops.cast_input(tape, name, x, out, weight) if fp8 else x
    moved = x.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, (max(1, rows // many), inner, columns), many, flops, 2 * flops, moved, 2 * moved,
        weight * tape.item_bytes, sharding_of(out if part is Division.TENSOR else x),
        precision=ops.narrow_precision(tape) if fp8 else "",
        reads=x.key,
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(replace(kept, part=x.part),), anchor=(out,)), operator)


def attend(
    tape: Tape, shape: TransformerShape, x: Value, *, causal: bool = False, source: Value | None = None, window: int = 0
) -> Value:
    """Attention of ``x`` over itself (of each query over ``window`` tokens), or over ``source`` (cross-attention); both
    (tokens, hidden).

    The result is summed over the tensor group, its dropout not yet done.
    """
    if shape.kv_rank and source is None:
        return latent_attention(tape, shape, x, causal=causal, window=window)
    name = "attention" if source is None else "cross_attention"
    q, k, v = _projections(tape, shape, name, tape.gather(x), None if source is None else tape.gather(source))
    if shape.head_norm:
        fused = tape.kernels.fused_norm
        q = ops.rms_norm(tape, f"{name}.q_norm", q, shape.head_dim, fused=fused)
        k = ops.rms_norm(tape, f"{name}.k_norm", k, shape.head_dim, fused=fused)
    if shape.positions == "rotary":
        q, k = ops.rotary(tape, f"{name}.rotary_q", q), ops.rotary(tape, f"{name}.rotary_k", k)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    biased = shape.positions in ("alibi", "relative") and source is None
    tape.count(shape.heads * shape.sinks, Division.TENSOR)
    mixed = attention(
        tape, name, q, k, v, heads, causal=causal, dropout=shape.dropout, biased=biased, window=window
    )  # fmt: skip
    out = ops.linear(
        tape, f"{name}.out", mixed, shape.attention_width, shape.hidden, Division.SEQUENCE, bias=shape.biases,
        fp8=tape.kernels.fp8,
    )  # fmt: skip
    return narrow(out)


def _projections(
    tape: Tape, shape: TransformerShape, name: str, x: Value, source: Value | None
) -> tuple[Value, Value, Value]:
    """Queries of ``x``, keys and values of ``source`` or ``x``: three matmuls, or as few as the kernels allow."""
    widths = (shape.attention_width, shape.kv_width, shape.kv_width)
    if not tape.kernels.merged_projections:
        projected = [_column(tape, shape, f"{name}.{part}", x if part == "q" or source is None else source, width)
                for part, width in zip("qkv", widths, strict=True)]  # fmt: skip
        return projected[0], projected[1], projected[2]
    tokens = x.items // shape.hidden
    if source is None:
        qkv = _column(tape, shape, f"{name}.qkv", x, sum(widths))
        return view(qkv, tokens * widths[0]), view(qkv, tokens * widths[1]), view(qkv, tokens * widths[2])
    kv = _column(tape, shape, f"{name}.kv", source, 2 * shape.kv_width)
    return _column(tape, shape, f"{name}.q", x, widths[0]), view(kv, kv.items // 2), view(kv, kv.items // 2)


def _column(tape: Tape, shape: TransformerShape, name: str, x: Value, columns: int) -> Value:
    """A projection split by columns."""
    bias = shape.biases or (shape.qkv_bias and "attention" in name)
    return ops.linear(tape, name, x, shape.hidden, columns, Division.TENSOR, bias=bias, fp8=tape.kernels.fp8)


def mlp(tape: Tape, shape: TransformerShape, x: Value, width: int = 0, name: str = "mlp") -> Value:
    """The MLP of ``x`` (tokens, hidden): two projections, or three where it is gated.

    The result is summed over the tensor group, its dropout not yet done.
    """
    ffn = width or shape.ffn_hidden
    inner = _inner(tape, shape, tape.gather(x), ffn, name)
    down = ops.linear(
        tape, f"{name}.down", inner, ffn, shape.hidden, Division.SEQUENCE, bias=shape.biases, fp8=tape.kernels.fp8
    )
    return narrow(down)


def _inner(tape: Tape, shape: TransformerShape, x: Value, ffn: int, name: str) -> Value:
    """What the down projection takes."""
    relu, kernels = shape.activation == "relu", tape.kernels
    if not shape.gated_mlp:
        activated = ops.activation(tape, f"{name}.act", _column(tape, shape, f"{name}.up", x, ffn), keeps_output=relu)
        return _dropped(tape, shape, name, activated)
    if kernels.merged_projections:
        both = _column(tape, shape, f"{name}.gate_up", x, 2 * ffn)
        return ops.gated(tape, view(both, both.items // 2), view(both, both.items // 2), keeps_output=relu)
    gate = _column(tape, shape, f"{name}.gate", x, ffn)
    if kernels.compiled or kernels.fused_activation:
        return ops.gated(tape, gate, _column(tape, shape, f"{name}.up", x, ffn), keeps_output=relu)
    gate = ops.activation(tape, f"{name}.act", gate, keeps_output=relu)
    up = _column(tape, shape, f"{name}.up", x, ffn)
    product = ops.multiply(tape, f"{name}.product", gate, up, remade=not relu)
    return _dropped(tape, shape, name, product)


def _dropped(tape: Tape, shape: TransformerShape, name: str, inner: Value) -> Value:
    """T5 drops inside the MLP, too (Raffel et al. 2019, section 2.1)."""
    return ops.dropout(tape, f"{name}.dropout", inner, shape.dropout if shape.positions == "relative" else 0.0)


def split_degree(shape: TransformerShape) -> int:
    """Largest tensor-parallel degree of a block: what divides heads, key-value heads and the MLP's width."""
    width = shape.moe_ffn if isinstance(shape, MoeShape) else shape.ffn_hidden
    return gcd(shape.heads, shape.kv_heads, width)


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
    shape: TransformerShape, tokens: int, item_bytes: int, name: str = "block", *, causal: bool = True,
    kernels: Kernels = EAGER, window: int = 0,
) -> LayerKind:  # fmt: skip
    """A block that normalises before attention and before the MLP (GPT, Llama, Mixtral, T5's encoder)."""
    tape = Tape(item_bytes, kernels)
    x = tape.enter(tokens * shape.hidden)
    attended = attend(tape, shape, norm(tape, shape, "norm1", x), causal=causal, window=window)
    x = ops.residual(tape, "attention", x, attended, shape.dropout)
    normed = norm(tape, shape, "norm2", x)
    mixed = mixture(tape, shape, normed) if isinstance(shape, MoeShape) else mlp(tape, shape, normed)
    out = ops.residual(tape, "mlp", x, mixed, shape.dropout)
    return block_kind(tape, shape, name, (out,), tokens)


def mixture(tape: Tape, shape: MoeShape, x: Value) -> Value:
    """Routed experts, and shared experts beside them."""
    routed = experts(tape, shape, x)
    if not shape.shared_ffn:
        return routed
    return ops.add(tape, "mlp.shared_sum", routed, mlp(tape, shape, x, shape.shared_ffn, "mlp.shared"))


def post_norm_block(shape: TransformerShape, tokens: int, item_bytes: int, kernels: Kernels = EAGER) -> LayerKind:
    """A block that normalises after each residual addition (BERT)."""
    tape = Tape(item_bytes, kernels)
    x = tape.enter(tokens * shape.hidden)
    summed = ops.residual(tape, "attention", x, attend(tape, shape, x), shape.dropout)
    x = norm(tape, shape, "norm1", summed)
    summed = ops.residual(tape, "mlp", x, mlp(tape, shape, x), shape.dropout)
    return block_kind(tape, shape, "block", (norm(tape, shape, "norm2", summed),), tokens)


def decoder_graph(
    shape: DecoderShape | MoeShape, precision: str, item_bytes: int, kernels: Kernels = EAGER
) -> ModelGraph:
    """Embedding, pre-norm blocks (the first ones dense, if the mixture says so), final norm with head and loss."""
    tokens = shape.seq_len
    kinds = {"before": embedding_kind(shape, tokens, item_bytes, kernels)}
    layers = []
    for place, layer in enumerate(blocks("layers", "block", shape.layers)):
        dense = dense_of(shape) if isinstance(shape, MoeShape) and place < shape.dense_layers else None
        narrow_view = 0 < shape.window < tokens and (place + 1) % shape.window_period != 0
        name = "dense_" * bool(dense) + "windowed_" * narrow_view + "block"
        if name not in kinds:
            window = shape.window if narrow_view else 0
            kinds[name] = pre_norm_block(dense or shape, tokens, item_bytes, name, kernels=kernels, window=window)
        layers.append(replace(layer, kind=name))
    kinds["after"] = head_kind(shape, tokens, item_bytes, kernels)
    return assemble(
        shape.name,
        list(kinds.values()),
        layers,
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
        notes=(load_note(shape),) if isinstance(shape, MoeShape) else (),
    )


def load_note(shape: MoeShape) -> str:
    """How tokens are taken to be spread over experts."""
    if not shape.expert_excess:
        return "Tokens are taken to be spread evenly over the experts."
    return (
        f"The most loaded expert is taken to have {shape.expert_excess:.0%} more tokens than the mean (expert_excess)."
    )


def dense_of(shape: MoeShape) -> DecoderShape:
    """The decoder whose blocks have a plain MLP where the mixture's have experts."""
    shared = {item.name: getattr(shape, item.name) for item in fields(TransformerShape)}
    return DecoderShape(**shared)


def encoder_graph(shape: EncoderShape, precision: str, item_bytes: int, kernels: Kernels = EAGER) -> ModelGraph:
    """Embedding with norm, equal post-norm blocks, masked-language-model head and loss."""
    tokens = shape.seq_len
    kinds = (
        embedding_kind(shape, tokens, item_bytes, kernels),
        post_norm_block(shape, tokens, item_bytes, kernels),
        masked_head_kind(shape, tokens, item_bytes, kernels),
    )
    return assemble(
        shape.name,
        kinds,
        blocks("layers", "block", shape.layers),
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
    )
