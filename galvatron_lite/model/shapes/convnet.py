"""Convolutional networks from their shapes: ResNet with bottleneck blocks, ConvNeXt.

Blocks of one stage are one kind; the first of a stage, which halves the picture, is a kind of its own. Tensor
parallelism is not offered: Megatron's column and row pairs do not exist here.
"""

from __future__ import annotations

from collections.abc import Callable

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Role, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble
from galvatron_lite.model.shapes.calls import Division, Value
from galvatron_lite.model.shapes.convolution import (
    Extent,
    batch_norm,
    convolution,
    enter_image,
    global_pool,
    handed_on,
    max_pool,
    relu,
)
from galvatron_lite.model.shapes.fields import ConvNextShape, ResNetShape
from galvatron_lite.model.shapes.norms import layer_norm_in_steps
from galvatron_lite.model.shapes.tape import Tape

Norm = Callable[[Tape, str, Value, int], Value]
"""A normalisation over so many channels."""
_REASON = "A convolutional block has no pair of column-split and row-split matmuls."


def _dims(channels: tuple[int, int], extent: Extent) -> SplitDims:
    return SplitDims(in_channels=channels[0], out_channels=channels[1], height=extent[0], width=extent[1])


def _enter(tape: Tape, channels: int, extent: Extent) -> Value:
    return tape.enter(channels * extent[0] * extent[1], Division.WHOLE)


def _finish(tape: Tape, name: str, out: Value, channels: tuple[int, int], extent: Extent) -> LayerKind:
    block = name not in ("before", "after")
    if tape.kernels.autocast and tape.item_bytes < ops.FP32:
        tape.buffer_bytes += tape.item_bytes * tape.weights[Division.WHOLE]  # weights' copies, kept until backward
    kind = tape.kind(name, (out,), _dims(channels, extent), tensor_reason=_REASON, recomputed=block)
    return handed_on(kind, out, tape)[0]


def _classifier(tape: Tape, x: Value, channels: int, classes: int, extent: Extent) -> LayerKind:
    logits = ops.linear(tape, "head", x, channels, classes, Division.WHOLE, bias=True)
    loss = ops.cross_entropy(tape, "loss", logits, tape.labels(1))
    return _finish(tape, "after", loss, (channels, classes), extent)


def resnet_graph(shape: ResNetShape, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, bottleneck blocks stage by stage, pooling with linear head and loss (He et al. 2015; v1.5)."""
    stem, extent = _resnet_stem(shape, item_bytes)
    kinds, layers, channels = [stem], [], shape.width
    for stage, depth in enumerate(shape.depths):
        middle = shape.width * 2**stage
        for index in range(min(depth, 2)):
            name = f"stage{stage}_{'block' if index else 'first'}"
            kind, extent = _bottleneck(
                item_bytes, name, (channels, middle, middle * shape.expansion), extent,
                stride=2 if stage and not index else 1, project=not index,
            )  # fmt: skip
            kinds.append(kind)
            channels = middle * shape.expansion
        layers += _stage_layers(stage, depth)
    tape = Tape(item_bytes)
    last = _enter(tape, channels, extent)
    tape.keep(last)  # the last block's ReLU needs it
    pooled = global_pool(tape, "pool", last, channels)
    kinds.append(_classifier(tape, pooled, channels, shape.classes, extent))
    return assemble(shape.name, kinds, layers, sequence=1, precision=precision)


def _stage_layers(stage: int, depth: int) -> list[Layer]:
    kinds = [f"stage{stage}_first"] + [f"stage{stage}_block"] * (depth - 1)
    return [Layer(f"stages.{stage}.{index}", kind, Role.BLOCK) for index, kind in enumerate(kinds)]


def _resnet_stem(shape: ResNetShape, item_bytes: int) -> tuple[LayerKind, Extent]:
    tape, whole = Tape(item_bytes), (shape.image_size, shape.image_size)
    channels = (shape.channels, shape.width)
    image = enter_image(tape, shape.channels, whole)
    x, extent = convolution(tape, "conv", image, channels, whole, kernel=7, stride=2)
    x = relu(tape, "relu", batch_norm(tape, "norm", x, shape.width))
    x, extent = max_pool(tape, "pool", x, shape.width, extent, kernel=3, stride=2)
    return _finish(tape, "before", x, channels, whole), extent


def _bottleneck(
    item_bytes: int, name: str, channels: tuple[int, int, int], extent: Extent, *, stride: int, project: bool
) -> tuple[LayerKind, Extent]:
    """1 x 1, 3 x 3 (with the stride), 1 x 1 convolutions, each normalised; a projection where the shape changes."""
    tape = Tape(item_bytes)
    inner, middle, outer = channels
    x = _enter(tape, inner, extent)
    y, _ = convolution(tape, "conv1", x, (inner, middle), extent, kernel=1)
    y = relu(tape, "relu1", batch_norm(tape, "norm1", y, middle))
    y, after = convolution(tape, "conv2", y, (middle, middle), extent, kernel=3, stride=stride)
    y = relu(tape, "relu2", batch_norm(tape, "norm2", y, middle))
    y, _ = convolution(tape, "conv3", y, (middle, outer), after, kernel=1)
    y = batch_norm(tape, "norm3", y, outer)
    if project:
        x, _ = convolution(tape, "project", x, (inner, outer), extent, kernel=1, stride=stride)
        x = batch_norm(tape, "project.norm", x, outer)
    out = relu(tape, "relu3", ops.add(tape, "residual", y, x))
    return _finish(tape, name, out, (inner, outer), extent), after


def convnext_graph(shape: ConvNextShape, precision: str, item_bytes: int, kernels: Kernels = EAGER) -> ModelGraph:
    """Stem, stages of blocks with downsampling layers between, pooling, norm, head and loss (Liu et al. 2022)."""
    whole = (shape.image_height or shape.image_size, shape.image_width or shape.image_size)
    norm = ops.layer_norm if shape.fused_norm else layer_norm_in_steps
    stem, extent = _shrink(
        Tape(item_bytes, kernels), "before", (shape.channels, shape.widths[0]), whole, kernel=4, norm=norm, stem=True
    )
    kinds, layers = [stem], []
    for stage, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=True)):
        if stage:
            channels = (shape.widths[stage - 1], width)
            kind, extent = _shrink(
                Tape(item_bytes, kernels), f"downsample{stage}", channels, extent, kernel=2, norm=norm, stem=False
            )
            kinds.append(kind)
            layers.append(Layer(f"downsamples.{stage - 1}", kind.name, Role.BLOCK))
        kinds.append(_convnext_block(shape, Tape(item_bytes, kernels), f"stage{stage}_block", width, extent))
        layers += [Layer(f"stages.{stage}.{index}", f"stage{stage}_block", Role.BLOCK) for index in range(depth)]
    tape, width = Tape(item_bytes, kernels), shape.widths[-1]
    pooled = global_pool(tape, "pool", _enter(tape, width, extent), width)
    kinds.append(_classifier(tape, ops.layer_norm(tape, "norm", pooled, width), width, shape.classes, extent))
    return assemble(shape.name, kinds, layers, sequence=1, precision=precision)


def _shrink(
    tape: Tape, name: str, channels: tuple[int, int], extent: Extent, *, kernel: int, norm: Norm, stem: bool
) -> tuple[LayerKind, Extent]:
    """A convolution whose stride is its kernel; the norm follows it in the stem and goes before it elsewhere."""
    x = enter_image(tape, channels[0], extent) if stem else _enter(tape, channels[0], extent)
    if not stem:
        x = norm(tape, "norm", x, channels[0])
    x, after = convolution(tape, "conv", x, channels, extent, kernel=kernel, stride=kernel, padding=0, bias=True)
    if stem:
        x = norm(tape, "norm", x, channels[1])
    return _finish(tape, name, x, channels, extent), after


def _convnext_block(shape: ConvNextShape, tape: Tape, name: str, width: int, extent: Extent) -> LayerKind:
    """Depthwise convolution, norm, MLP of four times the width, learned scale, residual."""
    x = _enter(tape, width, extent)
    y, _ = convolution(tape, "conv", x, (width, width), extent, kernel=shape.kernel, groups=width, bias=True)
    y = (ops.layer_norm if shape.fused_norm else layer_norm_in_steps)(tape, "norm", y, width)
    y = ops.linear(tape, "mlp.up", y, width, 4 * width, Division.WHOLE, bias=True)
    y = ops.linear(tape, "mlp.down", ops.activation(tape, "mlp.act", y), 4 * width, width, Division.WHOLE, bias=True)
    out = ops.add(tape, "residual", x, ops.scale(tape, "scale", y, width))
    return _finish(tape, name, out, (width, width), extent)
