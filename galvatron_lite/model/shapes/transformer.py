"""Graphs of decoders (GPT, Llama, mixtures of experts) and encoders (BERT) from their shapes.

Blocks follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): query, key, value, up and
gate projections are split by columns, output and down projections by rows. Under sequence parallelism norms, dropout
and additions work on a shard of the tokens, while the gathered input of each column-split region is kept in full.

Mixtures follow Mixtral (Jiang et al. 2024) with grouped matmuls: each token is copied to its k experts, which keep k
times what one MLP of their width would. FLOPs count the k experts that a token visits, parameters count all. Shared
experts (DeepSeekMoE, Dai et al. 2024) are one MLP that all tokens visit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from math import gcd
from typing import TypeAlias

from galvatron_lite.model.graph import LayerKind, ModelGraph, Operator, OperatorClass, Routing, Sharding, SplitDims
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import LayerWriter, attend
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderShape, MoeShape, TransformerShape
from galvatron_lite.model.shapes.records import FP32, INDEX, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, assemble, blocks, narrow
from galvatron_lite.units import activation_bytes

AnyLayer: TypeAlias = LayerWriter[TransformerShape]
NOT_SPLIT = "nothing in it is split: every device of a tensor group does all of its work"
_DIVISIBLE = 5040  # by all numbers up to 10
_FIGURE_BYTES = 12
"""Per token, that a device sends to the others of a tensor group for a loss on shards (``parallelism.vocabulary``)."""


def divisible_degree(rows: int = _DIVISIBLE << 6) -> int:
    """A number with many small divisors, none above ``rows``: those are the degrees if shards may be uneven."""
    if rows < _DIVISIBLE:
        return 1 << (rows.bit_length() - 1)
    return _DIVISIBLE << ((rows // _DIVISIBLE).bit_length() - 1)


def embed(layer: AnyLayer, tokens: int, *, tied: bool = False) -> Value:
    """Look tokens up in the table (of another layer if ``tied``) and add learned positions: (tokens, hidden)."""
    shape, tape = layer.shape, layer.tape
    indices = tape.enter(tokens, Sharding.NONE, INDEX, grad=False)
    table = shape.entries * shape.hidden * (not tied)
    x = ops.embedding(tape, "embedding", indices, shape.hidden, table=table, sharding=_vocabulary_split(shape))
    if shape.positions == "learned":
        x = ops.positions(tape, "positions", x, shape.position_entries * shape.hidden)
    return x


def _vocabulary_split(shape: TransformerShape) -> Sharding:
    return Sharding.TENSOR if shape.splits_vocabulary else Sharding.NONE


def head(layer: AnyLayer, x: Value, bias: bool = False) -> tuple[Value, Value]:
    """Return logits, split over the vocabulary, and their cross-entropy."""
    shape, tape = layer.shape, layer.tape
    labels = tape.labels(x.items // shape.hidden)
    logits = ops.linear(
        tape, "head", tape.gather(x), shape.hidden, shape.entries, _vocabulary_split(shape), bias=bias,
        tied=shape.tied_embeddings,
    )  # fmt: skip
    return logits, ops.cross_entropy(tape, "loss", logits, labels)


def embedding_kind(layer: AnyLayer, tokens: int) -> LayerKind:
    """``before``: token table (split over the vocabulary), positions; a BERT's segment table and norm too."""
    shape, tape, x = layer.shape, layer.tape, embed(layer, tokens)
    if isinstance(shape, EncoderShape):
        segments = tape.enter(tokens, Sharding.NONE, INDEX, grad=False)
        looked_up = ops.embedding(tape, "segments", segments, shape.hidden, table=shape.segments * shape.hidden)
        x = layer.norm("norm", ops.add(tape, "segments.sum", x, looked_up))
    return edge_kind(layer, "before", (layer.dropout("dropout", x),), tokens)


def _masked_head_kind(layer: AnyLayer, shape: EncoderShape, tokens: int) -> LayerKind:
    """``after`` of a BERT: transform, head with a bias over the vocabulary, loss; pooler and next-sentence head."""
    tape, x = layer.tape, layer.enter(tokens)
    picked = ops.reshape(tape, "predicted", x, shape.predicted * shape.hidden) if shape.predicted else x
    transformed = ops.linear(tape, "transform", picked, shape.hidden, shape.hidden, Sharding.NONE, bias=True)
    logits, loss = head(layer, layer.norm("norm", ops.activation(tape, "transform.act", transformed)), bias=True)
    if shape.head == "pretraining":
        first = ops.reshape(tape, "pooler.first", x, shape.hidden)
        pooled = ops.linear(tape, "pooler", first, shape.hidden, shape.hidden, Sharding.NONE, bias=True, keeps=x)
        pooled = ops.activation(tape, "pooler.act", pooled, keeps_output=True)
        pair = ops.linear(tape, "next_sentence", pooled, shape.hidden, 2, Sharding.NONE, bias=True)
        next_sentence = ops.cross_entropy(tape, "next_sentence.loss", pair, tape.labels(1))
        loss = ops.add(tape, "loss.sum", loss, next_sentence)
    return edge_kind(layer, "after", (loss,), tokens, logits)


def edge_kind(
    layer: AnyLayer, name: str, out: tuple[Value, ...], tokens: int, gathered: Value | None = None
) -> LayerKind:
    """Sum up the tape of an embedding (its rows are reduced once a forward pass) or of a head and its loss on shards.

    Shards of the vocabulary may be uneven, so degrees need not divide it. If the kernels compute the loss on shards
    (``parallel_loss``), the layer's other work may be sharded by tokens (Megatron's sequence parallelism covers both
    ends); else the runtime of this project computes it, and gathers logits if tokens are sharded.

    ``out`` leaves the layer; ``gathered`` are the logits of a head, None for an embedding.
    """
    shape, split, parallel = layer.shape, layer.shape.splits_vocabulary, layer.tape.kernels.parallel_loss
    sharded_logits = gathered if split and not parallel else None
    figures = _FIGURE_BYTES * sharded_logits.items // shape.entries if sharded_logits else 0
    kind = layer.tape.kind(
        name,
        out,
        SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.entries),
        recomputed=False,
        gathered=sharded_logits,
        # an embedding's rows are summed once in forward, the gradient of a head's input once in backward
        regions=(int(split and gathered is not None), int(split and gathered is None)),
        tensor_degrees=divisible_degree(shape.entries) if split else divisible_degree(),
        tensor_reason="" if split else NOT_SPLIT,
        tensor_collectives=2 if split and not gathered else 0,
        sequence_parallel=split and parallel,
        loss_bytes=figures,
        spared_bytes=FP32 * sharded_logits.items if sharded_logits else 0,
    )
    # each token has a total in fp32 beside the logits, and the largest shard of an odd vocabulary one logit more
    more = FP32 * figures // _FIGURE_BYTES * (2 + shape.entries % 2)
    kept = {
        choice: replace(split, tensor=split.tensor - more, whole=split.whole + more)
        for choice, split in kind.kept.items()
    }
    return replace(kind, kept=kept)


def ties_of(shape: TransformerShape, *users: str) -> dict[tuple[str, str], int]:
    """Items of the token table, by the layer that has it and the layer that uses it too, if embeddings are tied."""
    return {("before", user): shape.entries * shape.hidden for user in users if shape.tied_embeddings}


_TOP_K = 4  # kernels of top-k, its normalisation and the counting of rows per expert
_PERMUTE = 3  # kernels of sorting rows by expert and copying them


def _mixture(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """Routed experts, plus shared experts."""
    routed = _experts(layer, x)
    if not layer.shape.shared_ffn:
        return routed
    return ops.add(layer.tape, "mlp.shared_sum", routed, mlp(layer, x, layer.shape.shared_ffn, "mlp.shared"))


def _experts(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """Router, dispatch, experts, combination.

    Keeps the router's input, the fp32 probabilities, the chosen indices and weights, and what each expert keeps. The
    router is not split.
    """
    shape, tape = layer.shape, layer.tape
    logits = ops.linear(tape, "router", x, shape.hidden, shape.n_experts, Sharding.NONE, bias=shape.biases)
    weights = _choose(layer, logits)
    # copies of tokens, sorted by expert
    copies = tape.value(round(x.items * shape.moe_topk * shape.capacity), _dispatched(tape))
    tape.dispatched_bytes += copies.bytes
    tape.routing = Routing(
        shape.moe_topk, tape.kernels.unique_dispatch, shape.expert_groups, shape.chosen_groups, shape.expert_excess
    )
    source = x if tape.kernels.folded_experts else replace(x, sharding=Sharding.NONE)
    tape.memory("dispatch", (source,), copies, x.bytes + copies.bytes, count=_PERMUTE)
    inner = _expert_activations(layer, copies)
    down = _grouped(layer, "mlp.experts.down", inner, (shape.moe_ffn, shape.hidden), Sharding.SEQUENCE)
    if shape.biases:  # times the weights, added to each expert's rows, joined (Megatron-Core, ``_apply_bias``)
        moved, back = 6 * down.bytes, 8 * down.bytes
        down = tape.memory("mlp.experts.bias", (down,), tape.like(down), moved, back, count=4, fusible=True)
    weighted, factors = tape.like(down), (down, weights)
    moved, back = 2 * down.bytes + weights.bytes, 3 * down.bytes
    tape.memory("mlp.weight", factors, weighted, moved, back, saved=factors, fusible=True)
    combined = tape.value(x.items, weighted.sharding)
    return narrow(tape.memory("combine", (weighted,), combined, weighted.bytes + combined.bytes, count=_PERMUTE))


def _dispatched(tape: Tape) -> Sharding:
    """How a tensor group shards the tokens on their way through the experts."""
    return Sharding.TENSOR if tape.kernels.folded_experts else Sharding.NONE


def _expert_activations(layer: LayerWriter[MoeShape], x: Value) -> Value:
    """The input of the down projections: one activated projection, or a gated pair."""
    shape, tape, relu = layer.shape, layer.tape, layer.shape.activation == "relu"

    def projected(name: str, columns: int = shape.moe_ffn) -> Value:
        return _grouped(layer, f"mlp.experts.{name}", x, (shape.hidden, columns), Sharding.TENSOR)

    if not shape.gated_mlp:
        return ops.activation(tape, "mlp.act", projected("up"), keeps_output=relu)
    if tape.kernels.merged_projections:
        both = _clamped(layer, projected("gate_up", 2 * shape.moe_ffn), 2)
        return ops.gated(tape, both.view(both.items // 2), both.view(both.items // 2), keeps_output=relu)
    gate, up = (_clamped(layer, projected(name), 0) for name in ("gate", "up"))
    return ops.gated(tape, gate, up, keeps_output=relu)


def _clamped(layer: LayerWriter[MoeShape], x: Value, joins: int) -> Value:
    """A projection's output between bounds, which keeps it; ``joins``: passes that join gate and up again."""
    if not layer.shape.clamped:
        return x
    moved, back = (2 + joins) * x.bytes, (11 + 2 * joins) * x.bytes // 2  # backward makes masks (``clamp_backward``)
    return layer.tape.memory("mlp.clamp", (x,), layer.tape.like(x), moved, back, saved=(x,), count=3, fusible=True)


def _choose(layer: LayerWriter[MoeShape], logits: Value) -> Value:
    """Scores in fp32, whose softmax or sigmoid keeps its output; top-k, which keeps indices; weights, which are kept.

    A softmax over the chosen logits only is part of the weights. A sigmoid router has a buffer with a correction of
    each expert's score that balances loads (Wang et al. 2024).
    """
    shape, tape, scores = layer.shape, layer.tape, logits
    if shape.router != "chosen_softmax":
        scores = tape.like(logits, FP32)
        tape.memory(f"router.{shape.router}", (logits,), scores, 2 * scores.bytes, 3 * scores.bytes, saved=(scores,))
    tape.buffer_bytes += FP32 * shape.n_experts * (shape.router == "sigmoid")
    chosen = tape.value(logits.items // shape.n_experts * shape.moe_topk, logits.sharding, FP32)
    indices = tape.value(chosen.items, logits.sharding, INDEX, grad=False)
    passes = 1 + (shape.expert_groups > 1)  # scores are read once more for the best groups
    moved = passes * scores.bytes + chosen.bytes + indices.bytes
    return tape.memory("router.topk", (scores,), chosen, moved, saved=(chosen, indices), count=passes * _TOP_K)


def _grouped(layer: LayerWriter[MoeShape], name: str, x: Value, extents: tuple[int, int], split: Sharding) -> Value:
    """One matmul per expert over its even share of the rows of ``x`` (rows, inner)."""
    tape, (inner, columns), experts = layer.tape, extents, layer.shape.n_experts
    rows, by_columns, fp8 = x.items // inner, split is Sharding.TENSOR, layer.tape.kernels.fp8
    out = tape.value(rows * columns, split if by_columns else _dispatched(tape))
    flops, weight = 2 * rows * inner * columns, experts * inner * columns
    items = weight + experts * columns * layer.shape.biases
    tape.count(items, Sharding.TENSOR)
    tape.expert_items += items
    kept = ops.cast_input(tape, name, x, out, weight) if fp8 else x
    moved = x.bytes + out.bytes
    operator = Operator(
        name, OperatorClass.MATMUL, (max(1, rows // experts), inner, columns), experts, flops, 2 * flops,
        moved, 2 * moved, weight * tape.item_bytes, (out if by_columns else x).sharding,
        precision=ops.narrow_precision(tape) if fp8 else "", reads=x.key,
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(replace(kept, sharding=x.sharding),), anchor=(out,)), operator)


def mlp(layer: AnyLayer, x: Value, width: int = 0, name: str = "mlp") -> Value:
    """Two projections, or three if the MLP is gated; summed over the tensor group, before dropout."""
    ffn = width or layer.shape.ffn_hidden
    return layer.row(f"{name}.down", _mlp_activations(layer, layer.tape.gather(x), ffn, name), ffn)


def _mlp_activations(layer: AnyLayer, x: Value, ffn: int, name: str) -> Value:
    """The input of the down projection."""
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
    # T5 has dropout inside the MLP, too (Raffel et al. 2019, section 2.1)
    return layer.dropout(f"{name}.dropout", inner) if shape.positions == "relative" else inner


def block_kind(layer: AnyLayer, name: str, outputs: tuple[Value, ...], tokens: int, collectives: int = 4) -> LayerKind:
    """Sum up a block's tape: by default 4 collectives a forward pass (gather and scatter around attention and MLP).

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
    """Return a function that begins a layer of a shape, on a new tape."""
    return lambda shape: LayerWriter(shape, Tape(activation_bytes(precision), kernels))


def decoder_graph(shape: DecoderShape | MoeShape, precision: str, kernels: Kernels) -> ModelGraph:
    """Embedding, pre-norm blocks (the first ``dense_layers`` of a mixture without experts), norm with head and loss."""
    tokens, write, layers = shape.seq_len, writer(precision, kernels), []
    kinds = {"before": embedding_kind(write(shape), tokens)}
    without_experts = DecoderShape(**{field.name: getattr(shape, field.name) for field in fields(TransformerShape)})
    for index, layer in enumerate(blocks("layers", "block", shape.layers)):
        dense = isinstance(shape, MoeShape) and index < shape.dense_layers
        windowed = 0 < shape.window < tokens and (index + 1) % shape.window_period != 0
        name = "dense_" * dense + "windowed_" * windowed + "block"
        if name not in kinds:
            block = write(without_experts if dense else shape)
            kinds[name] = pre_norm_block(block, tokens, name, window=shape.window * windowed)
        layers.append(replace(layer, kind=name))
    last = write(shape)
    logits, loss = head(last, last.norm("norm", last.enter(tokens)))
    kinds["after"] = edge_kind(last, "after", (loss,), tokens, logits)
    notes: tuple[str, ...] = ()
    if isinstance(shape, MoeShape):
        more = f"The most loaded expert is taken to have {shape.expert_excess:.0%} more tokens than the mean"
        notes = (
            f"{more} (expert_excess)." if shape.expert_excess else
            "Tokens are taken to be spread evenly over the experts.",
        )  # fmt: skip
    return assemble(
        shape.name,
        list(kinds.values()),
        layers,
        sequence=tokens,
        precision=precision,
        ties=ties_of(shape, "after"),
        notes=notes,
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
