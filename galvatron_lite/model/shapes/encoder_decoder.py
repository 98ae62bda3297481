"""Pairs of encoder and decoder stacks (T5), and vision transformers, from their shapes.

The bridge is the encoder's final norm with the decoder's embedding. From there on two tensors travel: the decoder's
hidden state and the encoder's output, which every decoder block reads and which is counted once, with the bridge.

By PyTorch's own kernels they run as transformers' T5 does: relative biases are added to the mask. Each stack's table of
buckets is held by the layer before it (``before``, ``bridge``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, ModelGraph, Passed, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderDecoderShape, VitShape
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.records import FP32, Division
from galvatron_lite.model.shapes.tape import Tape, assemble, blocks, chained
from galvatron_lite.model.shapes.transformer import (
    NOT_SPLIT,
    attend,
    block_kind,
    edge_kind,
    embed,
    head,
    many_ways,
    mlp,
    norm,
    pre_norm_block,
    ties_of,
)


def vit_graph(shape: VitShape, precision: str, item_bytes: int, kernels: Kernels = EAGER) -> ModelGraph:
    """Patches with class token and positions, equal pre-norm blocks, norm with linear head and loss.

    Blocks are those of a decoder of the same shape (attention is counted in full there too).
    """
    tokens = (shape.image_size // shape.patch) ** 2 + 1
    stack = DecoderShape(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        ffn_hidden=shape.ffn_hidden,
        vocab=shape.classes,
        seq_len=tokens,
        dropout=shape.dropout,
    )
    block = pre_norm_block(stack, tokens, item_bytes, causal=False, kernels=kernels)
    # every patch sees every other, so that plain attention has no mask
    block = replace(
        block, operators=tuple(operator for operator in block.operators if operator.name != "attention.mask")
    )
    kinds = [_patches(shape, tokens, item_bytes), block, _classifier(shape, stack, tokens, item_bytes)]
    layers = blocks("layers", "block", shape.layers)
    if kernels.autocast and item_bytes < FP32:
        # weights' half-precision copies, which autocast keeps from forward to backward whatever the batch
        kinds = [replace(kind, buffer_bytes=kind.buffer_bytes + item_bytes * kind.parameters.total) for kind in kinds]
    return assemble(shape.name, kinds, layers, sequence=tokens, precision=precision)


def _patches(shape: VitShape, tokens: int, item_bytes: int) -> LayerKind:
    tape = Tape(item_bytes)
    side = shape.image_size
    image = tape.enter(shape.channels * side * side, Division.WHOLE, grad=False)
    flow = ImageFlow(tape, image, shape.channels, (side, side))
    x = flow.convolve(shape.hidden, shape.patch, shape.patch, bias=True, padding=0).value
    tape.count(shape.hidden)
    x = ops.reshape(tape, "class_token", x, tokens * shape.hidden)
    x = ops.dropout(tape, "dropout", ops.positions(tape, "positions", x, tokens * shape.hidden), shape.dropout)
    dims = SplitDims(
        sequence=tokens, hidden=shape.hidden, in_channels=shape.channels, out_channels=shape.hidden, height=side,
        width=side,
    )  # fmt: skip
    return tape.kind("before", (x,), dims, many_ways(), NOT_SPLIT, recomputed=False)


def _classifier(shape: VitShape, stack: DecoderShape, tokens: int, item_bytes: int) -> LayerKind:
    tape = Tape(item_bytes)
    x = norm(tape, stack, "norm", tape.enter(tokens * shape.hidden))
    first = ops.reshape(tape, "class_token", x, shape.hidden)
    logits = ops.linear(tape, "head", first, shape.hidden, shape.classes, Division.WHOLE, bias=True, keeps=x)
    loss = ops.cross_entropy(tape, "loss", logits, tape.labels(1))
    dims = SplitDims(sequence=tokens, hidden=shape.hidden, vocab=shape.classes)
    return tape.kind("after", (loss,), dims, many_ways(), NOT_SPLIT, recomputed=False)


def encoder_decoder_graph(
    shape: EncoderDecoderShape, precision: str, item_bytes: int, kernels: Kernels = EAGER
) -> ModelGraph:
    """``before``, encoder blocks, ``bridge``, decoder blocks, ``after``."""
    if kernels == EAGER and shape.positions == "relative":
        kernels = replace(kernels, bias_in_mask=True)
    kinds = (
        _before_kind(shape, item_bytes, kernels),
        pre_norm_block(shape, shape.seq_len, item_bytes, "encoder_block", causal=False, kernels=kernels),
        _bridge_kind(shape, item_bytes, kernels),
        _decoder_kind(shape, item_bytes, kernels),
        _after_kind(shape, item_bytes, kernels),
    )
    encoder = blocks("encoder.layers", "encoder_block", shape.layers)
    decoder = blocks("decoder.layers", "decoder_block", shape.decoder_layers)
    bridge = [replace(encoder[0], name="bridge", kind="bridge")]
    return assemble(
        shape.name,
        kinds,
        [*encoder, *bridge, *decoder],
        sequence=shape.seq_len,
        precision=precision,
        ties=ties_of(shape, "bridge", "after"),
        notes=("The encoder's output is counted once, with the bridge.",),
        tensors=_tensors(shape, [layer.name for layer in encoder], [layer.name for layer in decoder], item_bytes),
    )


def _tensors(
    shape: EncoderDecoderShape, encoder: Sequence[str], decoder: Sequence[str], item_bytes: int
) -> list[Passed]:
    """Each stack's hidden state from layer to layer, and the encoder's output from the bridge to all decoder blocks."""
    memory = shape.seq_len * shape.hidden * item_bytes
    state = shape.decoder_seq_len * shape.hidden * item_bytes
    return [
        *chained(["before", *encoder, "bridge"], memory),
        Passed("bridge", tuple(decoder), memory, borrowed=True),
        *chained(["bridge", *decoder, "after"], state),
    ]


def _buckets(tape: Tape, shape: EncoderDecoderShape) -> None:
    if shape.positions == "relative":
        tape.count(shape.buckets * shape.heads)


def _before_kind(shape: EncoderDecoderShape, item_bytes: int, kernels: Kernels) -> LayerKind:
    tape = Tape(item_bytes, kernels)
    _buckets(tape, shape)
    x = ops.dropout(tape, "dropout", embed(tape, shape, shape.seq_len), shape.dropout)
    return edge_kind(tape, shape, "before", (x,), shape.seq_len)


def _bridge_kind(shape: EncoderDecoderShape, item_bytes: int, kernels: Kernels) -> LayerKind:
    """Keeps the encoder's output too: the decoder blocks' key and value projections read it in backward."""
    tape = Tape(item_bytes, kernels)
    _buckets(tape, shape)
    memory = norm(tape, shape, "norm", tape.enter(shape.seq_len * shape.hidden))
    memory = ops.dropout(tape, "norm.dropout", memory, shape.dropout)
    tape.keep(memory)
    embedded = embed(tape, shape, shape.decoder_seq_len, tied=shape.tied_embeddings)
    x = ops.dropout(tape, "dropout", embedded, shape.dropout)
    return edge_kind(tape, shape, "bridge", (x, memory), shape.decoder_seq_len)


def _decoder_kind(shape: EncoderDecoderShape, item_bytes: int, kernels: Kernels) -> LayerKind:
    """Self-attention, cross-attention, MLP: three regions, so six collectives a forward pass."""
    tape = Tape(item_bytes, kernels)
    tokens = shape.decoder_seq_len
    x = tape.enter(tokens * shape.hidden)
    memory = tape.borrow(shape.seq_len * shape.hidden)
    attended = attend(tape, shape, norm(tape, shape, "norm1", x), causal=True)
    x = ops.residual(tape, "attention", x, attended, shape.dropout)
    crossed = attend(tape, shape, norm(tape, shape, "norm2", x), source=memory)
    x = ops.residual(tape, "cross_attention", x, crossed, shape.dropout)
    x = ops.residual(tape, "mlp", x, mlp(tape, shape, norm(tape, shape, "norm3", x)), shape.dropout)
    return block_kind(tape, shape, "decoder_block", (x, memory), tokens, collectives=6)


def _after_kind(shape: EncoderDecoderShape, item_bytes: int, kernels: Kernels) -> LayerKind:
    tape = Tape(item_bytes, kernels)
    x = norm(tape, shape, "norm", tape.enter(shape.decoder_seq_len * shape.hidden))
    logits, loss = head(tape, shape, ops.dropout(tape, "norm.dropout", x, shape.dropout))
    return edge_kind(tape, shape, "after", (loss,), shape.decoder_seq_len, logits)
