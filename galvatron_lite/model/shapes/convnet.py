"""Convolutional networks from their shapes.

Blocks of one stage are one kind; the first of a stage, which halves the picture, is a kind of its own. Tensor
parallelism is not offered: Megatron's column and row pairs do not exist here.

Sources: Simonyan and Zisserman 2014 (arXiv:1409.1556), Krizhevsky 2014 (arXiv:1404.5997), Radosavovic et al. 2020
(arXiv:2003.13678), Ronneberger et al. 2015 (arXiv:1505.04597), Mathuriya et al. 2018 (arXiv:1808.04728).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Passed, Role, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
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
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.mirrored import perception_graph
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify, compare
from galvatron_lite.model.shapes.images.residual import regular_block
from galvatron_lite.model.shapes.ops import layer_norm_in_steps
from galvatron_lite.model.shapes.picture_fields import (
    AlexNetShape,
    CosmoFlowShape,
    PerceptionShape,
    PictureShape,
    RegNetShape,
    UNetShape,
    VggShape,
)
from galvatron_lite.model.shapes.tape import Tape, memory_operator

Norm = Callable[[Tape, str, Value, int], Value]  # A normalisation over so many channels
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


def picture_graph(shape: PictureShape, precision: str, item_bytes: int) -> ModelGraph:
    """The graph of any of these networks."""
    match shape:
        case VggShape():
            return _vgg(shape, precision, item_bytes)
        case AlexNetShape():
            return _alexnet(shape, precision, item_bytes)
        case RegNetShape():
            return _regnet(shape, precision, item_bytes)
        case UNetShape():
            return _unet(shape, precision, item_bytes)
        case CosmoFlowShape():
            return _cosmoflow(shape, precision, item_bytes)
        case PerceptionShape():
            return perception_graph(shape, precision, item_bytes)
    raise InputError("arch", type(shape).__name__, "No rule knows this family.")


def _network(shape: PictureShape, item_bytes: int, sides: int = 2) -> NetworkBuilder:
    return NetworkBuilder(shape.name, item_bytes, shape.channels, (shape.image_size,) * sides, autocast=False)


def _vgg(shape: VggShape, precision: str, item_bytes: int) -> ModelGraph:
    net = _network(shape, item_bytes)
    net.begin()
    for group, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=False)):
        net.block(_group, f"features.{group}", depth=depth, width=width)
    return net.end(precision, _vgg_head, shape=shape)


def _group(flow: ImageFlow, depth: int, width: int) -> None:
    for _ in range(depth):
        flow.convolve(width, 3, bias=True).activate()
    flow.pool(2, 2, padding=0)


def _vgg_head(flow: ImageFlow, shape: VggShape) -> None:
    flow.shrink(shape.pooled).flatten()
    for _ in range(2):
        flow.linear(shape.hidden).activate().dropout(shape.dropout)
    compare(flow.linear(shape.classes))


_WINDOWS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
"""Kernel, stride and padding of each convolution of an AlexNet."""
_POOLED = (0, 1, 4)  # those that max pooling follows


def _alexnet(shape: AlexNetShape, precision: str, item_bytes: int) -> ModelGraph:
    net = _network(shape, item_bytes)
    net.begin()
    for index, (width, window) in enumerate(zip(shape.widths, _WINDOWS, strict=True)):
        net.block(_alex_unit, f"features.{index}", width=width, window=window, pool=index in _POOLED)
    return net.end(precision, _alex_head, shape=shape)


def _alex_unit(flow: ImageFlow, width: int, window: tuple[int, int, int], pool: bool) -> None:
    kernel, stride, padding = window
    flow.convolve(width, kernel, stride, bias=True, padding=padding).activate()
    if pool:
        flow.pool(3, 2, padding=0)


def _alex_head(flow: ImageFlow, shape: AlexNetShape) -> None:
    flow.shrink(shape.pooled).flatten()
    for _ in range(2):
        flow.dropout(shape.dropout).linear(shape.hidden).activate()
    compare(flow.linear(shape.classes))


def _regnet(shape: RegNetShape, precision: str, item_bytes: int) -> ModelGraph:
    net, stage, place, before = _network(shape, item_bytes), -1, 0, 0
    net.stem(_regnet_stem, width=shape.stem)
    for width in shape.widths:
        stage, place = (stage, place + 1) if width == before else (stage + 1, 0)
        net.block(
            regular_block, f"trunk.{stage}.{place}", width=width, group=min(shape.group, width),
            stride=1 if place else 2, squeeze=shape.squeeze,
        )  # fmt: skip
        before = width
    return net.end(precision, classify, classes=shape.classes)


def _regnet_stem(flow: ImageFlow, width: int) -> None:
    flow.unit(width, 3, 2)


def _unet(shape: UNetShape, precision: str, item_bytes: int) -> ModelGraph:
    """Down and up again; every level's picture on the way down goes to its neighbour on the way up."""
    net, less = _network(shape, item_bytes), 2 if shape.bilinear else 1
    widths = [shape.base * 2**level for level in range(shape.levels + 1)]
    net.stem(_double, width=widths[0], middle=widths[0], norm=shape.norm)
    kept = [("before", net.channels)]
    for level, width in enumerate(widths[1:]):
        lowest = level == shape.levels - 1
        net.block(_down, f"downs.{level}", width=width // (less if lowest else 1), norm=shape.norm)
        kept.append((net.layers[-1].name, net.channels))
    kept.pop()
    beyond = {}
    for level, width in enumerate(reversed(widths[1:])):
        producer, channels = kept.pop()
        name, out = f"ups.{level}", max(width // 2 // less, shape.base)
        net.block(_up, name, skip=channels, width=out, norm=shape.norm, bilinear=shape.bilinear)
        beyond[producer] = name
    return _skipping(net.end(precision, _unet_head, classes=shape.classes), beyond)


def _skipping(graph: ModelGraph, beyond: Mapping[str, str]) -> ModelGraph:
    """The chain, in which what goes from a layer to the next one may go to one beyond, too."""
    tensors = []
    for left, right in pairwise(graph.layers):
        readers = dict.fromkeys((right.name, beyond.get(left.name, right.name)))
        tensors.append(Passed(left.name, tuple(readers), graph.kind_of(left).output_bytes))
    return replace(graph, tensors=tuple(tensors))


def _double(flow: ImageFlow, width: int, middle: int, norm: bool) -> None:
    for out in (middle, width):
        flow.convolve(out, 3, bias=not norm)
        (flow.normalise() if norm else flow).activate()


def _down(flow: ImageFlow, width: int, norm: bool) -> None:
    _double(flow.pool(2, 2, padding=0), width, width, norm)


def _up(flow: ImageFlow, skip: int, width: int, norm: bool, bilinear: bool) -> None:
    flow.double(0 if bilinear else flow.channels // 2).beside(skip)
    _double(flow, width, flow.channels // 2 if bilinear else width, norm)


def _unet_head(flow: ImageFlow, classes: int) -> None:
    compare(flow.convolve(classes, bias=True))


def _cosmoflow(shape: CosmoFlowShape, precision: str, item_bytes: int) -> ModelGraph:
    net, last = _network(shape, item_bytes, 3), len(shape.widths) - 1
    net.begin()
    for index, (width, kernel, stride) in enumerate(zip(shape.widths, shape.kernels, shape.strides, strict=True)):
        net.block(
            _voxels, f"convolutions.{index}", width=width, kernel=kernel, stride=stride, bias=shape.bias,
            padded=shape.padded and index < last, pool=index < last,
        )  # fmt: skip
    return net.end(precision, _cosmoflow_head, shape=shape)


def _voxels(flow: ImageFlow, width: int, kernel: int, stride: int, bias: bool, padded: bool, pool: bool) -> None:
    """A convolution, padded around by kernel - 1 in all where asked for; that is a copy where it is odd."""
    around = kernel - 1 if padded else 0
    if around % 2:
        flow.surround(around)
    flow.convolve(width, kernel, stride, bias=bias, padding=0 if around % 2 else around // 2).activate()
    if pool:
        flow.pool(2, 2, maximum=False, padding=0)


def _cosmoflow_head(flow: ImageFlow, shape: CosmoFlowShape) -> None:
    """Fully connected layers with leaky ReLU, mean squared error."""
    flow.flatten()
    for width in shape.hidden:
        flow.linear(width, bias=shape.bias).activate()
    found = flow.linear(shape.classes, bias=shape.bias).value
    targets = flow.tape.value(shape.classes, Division.WHOLE, grad=False)
    loss = flow.tape.value(1, Division.WHOLE)
    operator = memory_operator("loss", found, found.bytes + targets.bytes, 3 * found.bytes)
    flow.value = flow.tape.record(ShapeCall((found, targets), loss, saved=(found, targets)), operator)
