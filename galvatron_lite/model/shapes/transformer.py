"""Decoders (GPT, Llama, mixtures of experts) and encoders (BERT) from their shapes.

Follows Mixtral (Jiang et al. 2024) with grouped matmuls: every token is copied to its k experts, so the experts keep k
times what one MLP of their width would. FLOPs count the k experts a token visits, parameters count all. Shared experts
(DeepSeekMoE, Dai et al. 2024) are one MLP that every token visits.

Blocks follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): query, key, value, up and
gate projections are split by columns, output and down projections by rows; norms, dropout and additions work on a
share of the tokens under sequence parallelism, while the gathered input of each column-split region is kept in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from math import gcd
from typing import TypeAlias

from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Routing, SplitDims
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import LayerWriter, attend
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderShape, MoeShape, TransformerShape
from galvatron_lite.model.shapes.records import FP32, INDEX, Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, assemble, blocks, narrow, sharding_of
from galvatron_lite.units import activation_bytes

AnyLayer: TypeAlias = LayerWriter[TransformerShape]
NOT_SPLIT = "nothing in it is split: every device of a tensor group does all of its work"
_MANY_WAYS = 5040
_FIGURE_BYTES = 12
"""Of a token, that a device tells the others of a tensor group for a loss on shares (``parallelism.vocabulary``)."""


def divisible_degree(rows: int = _MANY_WAYS << 6) -> int:
    """A number with many small divisors, none above ``rows``: the degrees offered where rows may be shared unevenly."""
    if rows < _MANY_WAYS:
        return 1 << (rows.bit_length() - 1)
    return _MANY_WAYS << ((rows // _MANY_WAYS).bit_length() - 1)


def embed(layer: AnyLayer, tokens: int, *, tied: bool = False) -> Value:
    """Token table (``tied``: another layer's), learned positions: token indices to (tokens, hidden)."""
    shape, tape = layer.shape, layer.tape
    indices = tape.enter(tokens, Division.WHOLE, INDEX, grad=False)
    table = shape.entries * shape.hidden * (not tied)
    x = ops.embedding(tape, "embedding", indices, shape.hidden, table=table, part=_vocabulary(shape))
    if shape.positions == "learned":
        x = ops.positions(tape, "positions", x, shape.position_entries * shape.hidden)
    return x


def _vocabulary(shape: TransformerShape) -> Division:
    return Division.TENSOR if shape.splits_vocabulary else Division.WHOLE


def head(layer: AnyLayer, x: Value, bias: bool = False) -> tuple[Value, Value]:
    """Logits split over the vocabulary, and their cross-entropy: (logits, loss)."""
    shape, tape = layer.shape, layer.tape
    labels = tape.labels(x.items // shape.hidden)
    logits = ops.linear(
        tape, "head", tape.gather(x), shape.hidden, shape.entries, _vocabulary(shape), bias=bias,
        tied=shape.tied_embeddings,
    )  # fmt: skip
    return logits, ops.cross_entropy(tape, "loss", logits, labels)


def embedding_kind(layer: AnyLayer, tokens: int) -> LayerKind:
    """``before``: token table (split over the vocabulary), positions; a BERT's segment table and norm too."""
    shape, tape, x = layer.shape, layer.tape, embed(layer, tokens)
    if isinstance(shape, EncoderShape):
        segments = tape.enter(tokens, Division.WHOLE, INDEX, grad=False)
        named = ops.embedding(tape, "segments", segments, shape.hidden, table=shape.segments * shape.hidden)
        x = layer.norm("norm", ops.add(tape, "segments.sum", x, named))
    return edge_kind(layer, "before", (layer.dropout("dropout", x),), tokens)


def _masked_head_kind(layer: AnyLayer, shape: EncoderShape, tokens: int) -> LayerKind:
    """``after`` of a BERT: transform, head with a bias over the vocabulary, loss; pooler and next-sentence head."""
    tape, x = layer.tape, layer.enter(tokens)
    picked = ops.reshape(tape, "predicted", x, shape.predicted * shape.hidden) if shape.predicted else x
    transformed = ops.linear(tape, "transform", picked, shape.hidden, shape.hidden, Division.WHOLE, bias=True)
    logits, loss = head(layer, layer.norm("norm", ops.activation(tape, "transform.act", transformed)), bias=True)
    if shape.head == "pretraining":
        first = ops.reshape(tape, "pooler.first", x, shape.hidden)
        pooled = ops.linear(tape, "pooler", first, shape.hidden, shape.hidden, Division.WHOLE, bias=True, keeps=x)
        pooled = ops.activation(tape, "pooler.act", pooled, keeps_output=True)
        pair = ops.linear(tape, "next_sentence", pooled, shape.hidden, 2, Division.WHOLE, bias=True)
        next_sentence = ops.cross_entropy(tape, "next_sentence.loss", pair, tape.labels(1))
        loss = ops.add(tape, "loss.sum", loss, next_sentence)
    return edge_kind(layer, "after", (loss,), tokens, logits)


def edge_kind(
    layer: AnyLayer, name: str, out: tuple[Value, ...], tokens: int, gathered: Value | None = None
) -> LayerKind:
    """Sum up the tape of an embedding (its rows are reduced once a forward pass) or of a head and its loss on shares.

    The vocabulary may be shared unevenly, so degrees need not divide it. Where software computes the loss on shares by
    itself, the layer's other work may be shared by tokens (Megatron's sequence parallelism covers both ends); else the
    runtime of this project does, and gathers logits where tokens are shared.
    """
    shape, split, parallel = layer.shape, layer.shape.splits_vocabulary, layer.tape.kernels.parallel_loss
    on_shares = gathered if split and not parallel else None
    figures = _FIGURE_BYTES * on_shares.items // shape.entries if on_shares else 0
    kind = layer.tape.kind(
        name,
        out,
        SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.entries),
        recomputed=False,
        gathered=on_shares,
        # rows of an embedding are summed once, of a head the gradient of its input is
        regions=(int(split and gathered is not None), int(split and gathered is None)),
        tensor_degrees=divisible_degree(shape.entries) if split else divisible_degree(),
        tensor_reason="" if split else NOT_SPLIT,
        tensor_collectives=2 if split and not gathered else 0,
        sequence_parallel=split and parallel,
        loss_bytes=figures,
        spared_bytes=FP32 * on_shares.items if on_shares else 0,
    )
    # of each token a total in fp32 lies beside the logits, and the largest share of an odd vocabulary is a logit longer
    more = FP32 * figures // _FIGURE_BYTES * (2 + shape.entries % 2)
    kept = {
        choice: replace(split, tensor=split.tensor - more, whole=split.whole + more)
        for choice, split in kind.kept.items()
    }
    return replace(kind, kept=kept)


def ties_of(shape: TransformerShape, *users: str) -> dict[tuple[str, str], int]:
    """The token table, shared with each user where embeddings are tied."""
    return {("before", user): shape.entries * shape.hidden for user in users if shape.tied_embeddings}


_TOP_K = 4  # kernels of top-k, its normalisation and the counting of rows an expert
_PERMUTE = 3  # kernels of sorting rows by expert and copying them


def _mixture(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """Routed experts, and shared experts beside them."""
    routed = _experts(layer, x)
    if not layer.shape.shared_ffn:
        return routed
    return ops.add(layer.tape, "mlp.shared_sum", routed, mlp(layer, x, layer.shape.shared_ffn, "mlp.shared"))


def _experts(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """The routed experts' output for ``x``.

    Router logits are split neither by columns nor by rows. Keeps the router's input, the fp32 probabilities, the chosen
    indices and weights, and what each expert keeps.
    """
    shape, tape = layer.shape, layer.tape
    logits = ops.linear(tape, "router", x, shape.hidden, shape.n_experts, Division.WHOLE, bias=shape.biases)
    weights = _choose(layer, logits)
    # tokens copied to the experts they visit, sorted by expert
    copies = tape.value(round(x.items * shape.moe_topk * shape.capacity), _dispatched(tape))
    tape.dispatched_bytes += copies.bytes
    tape.routing = Routing(
        shape.moe_topk, tape.kernels.unique_dispatch, shape.expert_groups, shape.chosen_groups, shape.expert_excess
    )
    source = x if tape.kernels.folded_experts else replace(x, part=Division.WHOLE)
    tape.memory("dispatch", (source,), copies, x.bytes + copies.bytes, count=_PERMUTE)
    inner = _activated(layer, copies)
    down = _grouped(layer, "mlp.experts.down", inner, (shape.moe_ffn, shape.hidden), Division.SEQUENCE)
    weighted, factors = tape.value(down.items, down.part), (down, weights)
    moved, back = 2 * down.bytes + weights.bytes, 3 * down.bytes
    tape.memory("mlp.weight", factors, weighted, moved, back, saved=factors, fusible=True)
    combined = tape.value(x.items, weighted.part)
    return narrow(tape.memory("combine", (weighted,), combined, weighted.bytes + combined.bytes, count=_PERMUTE))


def _dispatched(tape: Tape) -> Division:
    """How the tokens on their way through the experts lie on a tensor group."""
    return Division.TENSOR if tape.kernels.folded_experts else Division.WHOLE


def _activated(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """What the down projections take: one activated projection, or a gated pair."""
    shape, tape, relu = layer.shape, layer.tape, layer.shape.activation == "relu"

    def projected(name: str, columns: int = shape.moe_ffn) -> Value:
        return _grouped(layer, f"mlp.experts.{name}", x, (shape.hidden, columns), Division.TENSOR)

    if not shape.gated_mlp:
        return ops.activation(tape, "mlp.act", projected("up"), keeps_output=relu)
    if tape.kernels.merged_projections:
        both = projected("gate_up", 2 * shape.moe_ffn)
        return ops.gated(tape, both.view(both.items // 2), both.view(both.items // 2), keeps_output=relu)
    return ops.gated(tape, projected("gate"), projected("up"), keeps_output=relu)


def _choose(layer: LayerWriter[MoeShape], logits: Value) -> Value:
    """Scores in fp32 (softmax or sigmoid keeps its output), top-k (keeps indices), weights (keeps them).

    A softmax over the chosen logits alone is part of the weights. What a sigmoid router adds to each expert's score to
    balance their load (Wang et al. 2024) is a buffer.
    """
    shape, tape, scores = layer.shape, layer.tape, logits
    if shape.router != "chosen_softmax":
        scores = tape.value(logits.items, logits.part, FP32)
        tape.memory(f"router.{shape.router}", (logits,), scores, 2 * scores.bytes, 3 * scores.bytes, saved=(scores,))
    tape.buffer_bytes += FP32 * shape.n_experts * (shape.router == "sigmoid")
    chosen = tape.value(logits.items // shape.n_experts * shape.moe_topk, logits.part, FP32)
    indices = tape.value(chosen.items, logits.part, INDEX, grad=False)
    passes = 1 + (shape.expert_groups > 1)  # limited to groups, scores are read again for the best groups
    moved = passes * scores.bytes + chosen.bytes + indices.bytes
    return tape.memory("router.topk", (scores,), chosen, moved, saved=(chosen, indices), count=passes * _TOP_K)


def _grouped(layer: LayerWriter[MoeShape], name: str, x: Value, extents: tuple[int, int], part: Division) -> Value:
    """One matmul an expert over its share of the rows of ``x`` (rows, inner); tokens spread evenly."""
    tape, (inner, columns), many = layer.tape, extents, layer.shape.n_experts
    rows, by_columns, fp8 = x.items // inner, part is Division.TENSOR, layer.tape.kernels.fp8
    out = tape.value(rows * columns, part if by_columns else _dispatched(tape))
    flops, weight = 2 * rows * inner * columns, many * inner * columns
    items = weight + many * columns * layer.shape.biases
    tape.count(items, Division.TENSOR)
    tape.expert_items += items
    kept = ops.cast_input(tape, name, x, out, weight) if fp8 else x
    moved = x.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, (max(1, rows // many), inner, columns), many, flops, 2 * flops, moved, 2 * moved,
        weight * tape.item_bytes, sharding_of(out if by_columns else x),
        precision=ops.narrow_precision(tape) if fp8 else "", reads=x.key,
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(replace(kept, part=x.part),), anchor=(out,)), operator)


def mlp(layer: AnyLayer, x: Value, width: int = 0, name: str = "mlp") -> Value:
    """The MLP of ``x``: two projections, or three where it is gated.

    The result is summed over the tensor group, its dropout not yet done.
    """
    ffn = width or layer.shape.ffn_hidden
    return layer.row(f"{name}.down", _inner(layer, layer.tape.gather(x), ffn, name), ffn)


def _inner(layer: AnyLayer, x: Value, ffn: int, name: str) -> Value:
    """What the down projection takes."""
    shape, tape, relu, kernels = layer.shape, layer.tape, layer.shape.activation == "relu", layer.tape.kernels
    if shape.gated_mlp and kernels.merged_projections:
        both = layer.column(f"{name}.gate_up", x, 2 * ffn)
        return ops.gated(tape, both.view(both.items // 2), both.view(both.items // 2), keeps_output=relu)
    first = layer.column(f"{name}.{'gate' if shape.gated_mlp else 'up'}", x, ffn)
    if shape.gated_mlp and (kernels.compiled or kernels.fused_activation):
        return ops.gated(tape, first, layer.column(f"{name}.up", x, ffn), keeps_output=relu)
    inner = ops.activation(tape, f"{name}.act", first, keeps_output=relu)
    if shape.gated_mlp:
        up = layer.column(f"{name}.up", x, ffn)
        inner = ops.multiply(tape, f"{name}.product", inner, up, remade=not relu)
    # T5 drops inside the MLP, too (Raffel et al. 2019, section 2.1)
    return layer.dropout(f"{name}.dropout", inner) if shape.positions == "relative" else inner


def block_kind(layer: AnyLayer, name: str, outputs: tuple[Value, ...], tokens: int, collectives: int = 4) -> LayerKind:
    """Sum up a block's tape: 4 collectives a forward pass (gather and scatter around attention and around the MLP).

    Tensor parallelism divides heads, key-value heads and the MLP's width.
    """
    shape = layer.shape
    width, experts = (shape.moe_ffn, shape.n_experts) if isinstance(shape, MoeShape) else (shape.ffn_hidden, 0)
    dims = SplitDims(
        sequence=tokens, heads=shape.heads, kv_heads=shape.kv_heads, hidden=shape.hidden, ffn_hidden=width,
        experts=experts,
    )  # fmt: skip
    return layer.tape.kind(
        name, outputs, dims, tensor_degrees=gcd(shape.heads, shape.kv_heads, width), tensor_collectives=collectives,
        sequence_parallel=True,
    )  # fmt: skip


def pre_norm_block(
    layer: AnyLayer, tokens: int, name: str = "block", *, causal: bool = True, window: int = 0
) -> LayerKind:
    """A block that normalises before attention and before the MLP (GPT, Llama, Mixtral, T5's encoder)."""
    x = layer.enter(tokens)
    x = layer.residual("attention", x, attend(layer, layer.norm("norm1", x), causal=causal, window=window))
    normed = layer.norm("norm2", x)
    mixed = _mixture(layer, normed) if isinstance(layer.shape, MoeShape) else mlp(layer, normed)  # type: ignore[arg-type]
    return block_kind(layer, name, (layer.residual("mlp", x, mixed),), tokens)


def _post_norm_block(layer: AnyLayer, tokens: int) -> LayerKind:
    """A block that normalises after each residual addition (BERT)."""
    x = layer.enter(tokens)
    x = layer.norm("norm1", layer.residual("attention", x, attend(layer, x)))
    x = layer.norm("norm2", layer.residual("mlp", x, mlp(layer, x)))
    return block_kind(layer, "block", (x,), tokens)


def writer(precision: str, kernels: Kernels) -> Callable[[TransformerShape], AnyLayer]:
    """What makes a layer of a shape, on a tape of its own."""
    return lambda shape: LayerWriter(shape, Tape(activation_bytes(precision), kernels))


def decoder_graph(shape: DecoderShape | MoeShape, precision: str, kernels: Kernels) -> ModelGraph:
    """Embedding, pre-norm blocks (the first ones dense, if the mixture says so), final norm with head and loss."""
    tokens, write, layers = shape.seq_len, writer(precision, kernels), []
    kinds = {"before": embedding_kind(write(shape), tokens)}
    for place, layer in enumerate(blocks("layers", "block", shape.layers)):
        dense = isinstance(shape, MoeShape) and place < shape.dense_layers
        windowed = 0 < shape.window < tokens and (place + 1) % shape.window_period != 0
        name = "dense_" * dense + "windowed_" * windowed + "block"
        if name not in kinds:
            of = DecoderShape(**{one.name: getattr(shape, one.name) for one in fields(TransformerShape)})
            kinds[name] = pre_norm_block(write(of if dense else shape), tokens, name, window=shape.window * windowed)
        layers.append(replace(layer, kind=name))
    last = write(shape)
    logits, loss = head(last, last.norm("norm", last.enter(tokens)))
    kinds["after"] = edge_kind(last, "after", (loss,), tokens, logits)
    notes = []
    if isinstance(shape, MoeShape) and shape.expert_excess:
        more = f"{shape.expert_excess:.0%} more tokens than the mean (expert_excess)."
        notes = [f"The most loaded expert is taken to have {more}"]
    elif isinstance(shape, MoeShape):
        notes = ["Tokens are taken to be spread evenly over the experts."]
    return assemble(
        shape.name,
        list(kinds.values()),
        layers,
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
        notes=tuple(notes),
    )


def encoder_graph(shape: EncoderShape, precision: str, kernels: Kernels) -> ModelGraph:
    """Embedding with norm, equal post-norm blocks, masked-language-model head and loss."""
    tokens, write = shape.seq_len, writer(precision, kernels)
    kinds = (
        embedding_kind(write(shape), tokens),
        _post_norm_block(write(shape), tokens),
        _masked_head_kind(write(shape), shape, tokens),
    )
    middle = blocks("layers", "block", shape.layers)
    return assemble(
        shape.name, kinds, middle, sequence=tokens, precision=precision, ties=ties_of(shape, "after")
    )  # fmt: skip
