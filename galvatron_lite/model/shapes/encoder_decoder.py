"""Pairs of encoder and decoder stacks (T5), and vision transformers, from their shapes.

The layer between the stacks, ``bridge``, is the encoder's final norm with the decoder's embedding. It passes two
tensors on: the decoder's hidden state and the encoder's output, which all decoder blocks read and which counts once.

With PyTorch's kernels a T5 runs as in transformers: relative biases are added to the mask. The layer before each stack
(``before``, ``bridge``) has its table of buckets.
"""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, ModelGraph, Passed, Sharding, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.attention import LayerWriter, attend
from galvatron_lite.model.shapes.fields import DecoderShape, EncoderDecoderShape, VitShape
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.records import FP32
from galvatron_lite.model.shapes.tape import Tape, assemble, blocks, chained
from galvatron_lite.model.shapes.transformer import (
    NOT_SPLIT,
    block_kind,
    divisible_degree,
    edge_kind,
    embed,
    head,
    mlp,
    pre_norm_block,
    ties_of,
)
from galvatron_lite.units import activation_bytes


def vit_graph(shape: VitShape, precision: str, kernels: Kernels) -> ModelGraph:
    """Patches with class token and positions, equal pre-norm blocks, norm with linear head and loss.

    Blocks are those of a decoder of the same shape (attention is counted in full there too).
    """
    tokens, item_bytes = (shape.image_size // shape.patch) ** 2 + 1, activation_bytes(precision)
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
    block = pre_norm_block(LayerWriter(stack, Tape(item_bytes, kernels)), tokens, causal=False)
    # attention sees all patches, so plain attention has no mask
    operators = tuple(operator for operator in block.operators if operator.name != "attention.mask")
    first, last = LayerWriter(stack, Tape(item_bytes)), LayerWriter(stack, Tape(item_bytes))
    kinds = [_patches(first, shape, tokens), replace(block, operators=operators), _classifier(last, tokens)]
    if kernels.autocast and item_bytes < FP32:
        # autocast keeps copies of weights in half precision from forward to backward, whatever the batch
        kinds = [replace(kind, buffer_bytes=kind.buffer_bytes + item_bytes * kind.parameters.total) for kind in kinds]
    layers = blocks("layers", "block", shape.layers)
    return assemble(shape.name, kinds, layers, sequence=tokens, precision=precision)


def _patches(layer: LayerWriter[DecoderShape], shape: VitShape, tokens: int) -> LayerKind:
    tape, side, channels = layer.tape, shape.image_size, shape.channels
    image = tape.enter(channels * side * side, Sharding.NONE, grad=False)
    flow = ImageFlow(tape, image, channels, (side, side))
    x = flow.convolve(shape.hidden, shape.patch, shape.patch, bias=True, padding=0).value
    tape.count(shape.hidden)
    x = ops.reshape(tape, "class_token", x, tokens * shape.hidden)
    x = layer.dropout("dropout", ops.positions(tape, "positions", x, tokens * shape.hidden))
    dims = SplitDims(
        sequence=tokens, hidden=shape.hidden, in_channels=channels, out_channels=shape.hidden, height=side, width=side
    )  # fmt: skip
    return tape.kind("before", (x,), dims, recomputed=False, tensor_degrees=divisible_degree(), tensor_reason=NOT_SPLIT)


def _classifier(layer: LayerWriter[DecoderShape], tokens: int) -> LayerKind:
    tape, hidden, classes = layer.tape, layer.shape.hidden, layer.shape.vocab
    x = layer.norm("norm", layer.enter(tokens))
    first = ops.reshape(tape, "class_token", x, hidden)
    logits = ops.linear(tape, "head", first, hidden, classes, Sharding.NONE, bias=True, keeps=x)
    loss = ops.cross_entropy(tape, "loss", logits, tape.labels(1))
    dims = SplitDims(sequence=tokens, hidden=hidden, vocab=classes)
    return tape.kind(
        "after", (loss,), dims, recomputed=False, tensor_degrees=divisible_degree(), tensor_reason=NOT_SPLIT
    )


Stacks = LayerWriter[EncoderDecoderShape]


def encoder_decoder_graph(shape: EncoderDecoderShape, precision: str, kernels: Kernels) -> ModelGraph:
    """``before``, encoder blocks, ``bridge`` between the stacks, decoder blocks, ``after``."""
    if kernels == EAGER and shape.positions == "relative":
        kernels = replace(kernels, bias_in_mask=True)

    def write() -> Stacks:
        return LayerWriter(shape, Tape(activation_bytes(precision), kernels))

    first, last = write(), write()
    _count_buckets(first)
    entering = first.dropout("dropout", embed(first, shape.seq_len))
    leaving = last.norm("norm", last.enter(shape.decoder_seq_len))
    logits, loss = head(last, last.dropout("norm.dropout", leaving))
    kinds = (
        edge_kind(first, "before", (entering,), shape.seq_len),
        pre_norm_block(write(), shape.seq_len, "encoder_block", causal=False),
        _bridge_kind(write()),
        _decoder_kind(write()),
        edge_kind(last, "after", (loss,), shape.decoder_seq_len, logits),
    )
    encoder = blocks("encoder.layers", "encoder_block", shape.layers)
    decoder = blocks("decoder.layers", "decoder_block", shape.decoder_layers)
    bridge = replace(encoder[0], name="bridge", kind="bridge")
    upper = [layer.name for layer in decoder]
    # each stack's hidden state from layer to layer, and the encoder's output from the bridge to all decoder blocks
    memory, state = (tokens * shape.hidden * activation_bytes(precision) for tokens in (shape.seq_len,
                     shape.decoder_seq_len))  # fmt: skip
    tensors = [
        *chained(["before", *(layer.name for layer in encoder), "bridge"], memory),
        Passed("bridge", tuple(upper), memory, borrowed=True),
        *chained(["bridge", *upper, "after"], state),
    ]
    return assemble(
        shape.name,
        kinds,
        [*encoder, bridge, *decoder],
        sequence=shape.seq_len,
        precision=precision,
        ties=ties_of(shape, "bridge", "after"),
        notes=("The encoder's output is counted once, with the bridge.",),
        tensors=tensors,
    )


def _count_buckets(layer: Stacks) -> None:
    if layer.shape.positions == "relative":
        layer.tape.count(layer.shape.buckets * layer.shape.heads)


def _bridge_kind(layer: Stacks) -> LayerKind:
    """The encoder's last norm and the decoder's embedding.

    Keeps the encoder's output, which the decoder blocks' key and value projections read in backward.
    """
    _count_buckets(layer)
    tokens = layer.shape.decoder_seq_len
    memory = layer.dropout("norm.dropout", layer.norm("norm", layer.enter(layer.shape.seq_len)))
    layer.tape.keep(memory)
    x = layer.dropout("dropout", embed(layer, tokens, tied=layer.shape.tied_embeddings))
    return edge_kind(layer, "bridge", (x, memory), tokens)


def _decoder_kind(layer: Stacks) -> LayerKind:
    """Self-attention, cross-attention, MLP: three regions, so six collectives a forward pass."""
    tokens = layer.shape.decoder_seq_len
    x, memory = layer.enter(tokens), layer.tape.borrow(layer.shape.seq_len * layer.shape.hidden)
    x = layer.residual("attention", x, attend(layer, layer.norm("norm1", x), causal=True))
    x = layer.residual("cross_attention", x, attend(layer, layer.norm("norm2", x), source=memory))
    x = layer.residual("mlp", x, mlp(layer, layer.norm("norm3", x)))
    return block_kind(layer, "decoder_block", (x, memory), tokens, collectives=6)
