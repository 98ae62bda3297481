"""Vision transformers from their shapes."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, ModelGraph, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble, blocks
from galvatron_lite.model.shapes.calls import Division
from galvatron_lite.model.shapes.convolution import convolution
from galvatron_lite.model.shapes.edges import NOT_SPLIT, many_ways, norm
from galvatron_lite.model.shapes.fields import DecoderShape, VitShape
from galvatron_lite.model.shapes.tape import Tape
from galvatron_lite.model.shapes.transformer import pre_norm_block


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
    kinds: tuple[LayerKind, ...] = (
        _patches(shape, tokens, item_bytes),
        _unmasked(pre_norm_block(stack, tokens, item_bytes, causal=False, kernels=kernels)),
        _classifier(shape, stack, tokens, item_bytes),
    )
    layers = blocks("layers", "block", shape.layers)
    if kernels.autocast and item_bytes < ops.FP32:
        kinds = tuple(_copied(kind, item_bytes) for kind in kinds)
    return assemble(shape.name, kinds, layers, sequence=tokens, precision=precision)


def _copied(kind: LayerKind, item_bytes: int) -> LayerKind:
    """With the weights' half-precision copies, which autocast keeps from forward to backward whatever the batch."""
    return replace(kind, buffer_bytes=kind.buffer_bytes + item_bytes * kind.parameters.total)


def _unmasked(kind: LayerKind) -> LayerKind:
    """Without plain attention's mask: every patch sees every other."""
    return replace(kind, operators=tuple(operator for operator in kind.operators if operator.name != "attention.mask"))


def _patches(shape: VitShape, tokens: int, item_bytes: int) -> LayerKind:
    tape = Tape(item_bytes)
    side = shape.image_size
    image = tape.enter(shape.channels * side * side, Division.WHOLE, grad=False)
    x, _ = convolution(
        tape, "patches", image, (shape.channels, shape.hidden), (side, side), kernel=shape.patch, stride=shape.patch,
        padding=0, bias=True,
    )  # fmt: skip
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
