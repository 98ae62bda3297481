"""Networks of one path: ResNet and its kin, RegNet, ConvNeXt, VGG, AlexNet, CosmoFlow, SSD300; any image shape's graph.

Sources: He et al. 2015 (arXiv:1512.03385), the stride in the 3 x 3 convolution as in ResNet v1.5; Xie et al. 2017
(ResNeXt); He et al. 2019 (arXiv:1812.01187: variants C and D); Hu et al. 2018 (SE); Bello et al. 2021
(arXiv:2103.07579: ResNet-RS); Kolesnikov et al. 2020 (BiT); Zhang et al. 2020 (arXiv:2004.08955: ResNeSt); Radosavovic
et al. 2020 (arXiv:2003.13678); Liu et al. 2022 (ConvNeXt); Simonyan and Zisserman 2014 (arXiv:1409.1556); Krizhevsky
2014 (arXiv:1404.5997); Mathuriya et al. 2018 (arXiv:1808.04728).
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes.fields import (
    AlexNetShape,
    ConvNextShape,
    CosmoFlowShape,
    PerceptionShape,
    PictureShape,
    RegNetShape,
    ResNetShape,
    UNetShape,
    VggShape,
)
from galvatron_lite.model.shapes.images.flow import ImageFlow, rounded
from galvatron_lite.model.shapes.images.mirrored import perception_graph, unet_graph
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify, compare
from galvatron_lite.model.shapes.records import Division, ShapeCall
from galvatron_lite.model.shapes.tape import memory_operator


def picture_graph(
    shape: PictureShape, precision: str, item_bytes: int, kernels: Kernels = EAGER, *, autocast: bool = False
) -> ModelGraph:
    """The graph of any image network.

    Args:
        shape: of the network.
        precision: of activations and compute.
        item_bytes: of activations.
        kernels: which run; only ConvNeXt has a choice.
        autocast: whether parameters and pictures are fp32 and cast where they are used.
    """
    extent = (shape.image_size,) * (3 if isinstance(shape, CosmoFlowShape) else 2)
    net = NetworkBuilder(shape.name, item_bytes, shape.channels, extent, autocast=autocast)
    match shape:
        case ResNetShape():
            spec = Residual(depths=shape.depths, width=shape.width, expansion=shape.expansion)
            residual_blocks(net, spec)
            return net.end(precision, classify, classes=shape.classes)
        case ConvNextShape():
            net.kernels, net.extent = kernels, shape.extent
            return _convnext(net, shape, precision)
        case RegNetShape():
            return _regnet(net, shape, precision)
        case VggShape():
            return _vgg(net, shape, precision)
        case AlexNetShape():
            return _alexnet(net, shape, precision)
        case CosmoFlowShape():
            return _cosmoflow(net, shape, precision)
        case UNetShape():
            return unet_graph(net, shape, precision)
        case PerceptionShape():
            return perception_graph(net, shape, precision)
    raise TypeError(type(shape).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One residual network."""

    depths: tuple[int, ...]  # blocks a stage
    width: int = 64  # channels of the first stage's bottleneck; doubled from stage to stage
    expansion: int = 4  # output channels / bottleneck channels
    basic: bool = False  # two 3 x 3 convolutions a block instead of a bottleneck
    groups: int = 1  # of the 3 x 3 convolutions
    group_width: int = 64  # channels of the first stage's bottleneck for every 64 of width and group
    stem: tuple[int, ...] = (0,)  # channels of the stem's convolutions; one: a single 7 x 7; 0: ``width``
    pool: bool = True  # whether max pooling follows the stem (else a convolution with stride)
    average_down: bool = False  # shortcuts pool before they project (variant D)
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation as a share of the block's; 0: none; negative: ECA
    blur: bool = False  # anti-aliased downsampling: the convolution keeps the extent, a fixed blur strides after it
    preactive: bool = False  # normalisation before convolution (ResNet v2)
    grouped_norm: bool = False  # group instead of batch normalisation; only where ``preactive``
    radix: int = 0  # pictures that split attention weighs (ResNeSt); 0: a plain 3 x 3 convolution
    pool_first: bool = False  # where split attention halves, the mean pooling goes before it
    early: bool = False  # the first 1 x 1 convolution strides, not the 3 x 3 (the original ResNet)


def residual_graph(name: str, spec: Residual, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, blocks stage by stage, pooling with linear head and loss, under autocast."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    residual_blocks(net, spec)
    return net.end(precision, _residual_head, spec=spec, classes=classes)


def _residual_head(flow: ImageFlow, spec: Residual, classes: int) -> None:
    if spec.preactive:
        _prepare(flow, spec)
    classify(flow, classes)


def residual_blocks(net: NetworkBuilder, spec: Residual, halvings: tuple[bool, ...] = ()) -> None:
    """Stem and blocks.

    Args:
        net: where they are added.
        spec: of the network.
        halvings: whether each stage halves the picture; by default all but the first do.
    """
    net.stem(_residual_stem, spec=spec)
    step = _preactive if spec.preactive else _basic if spec.basic else _bottleneck
    for stage, depth in enumerate(spec.depths):
        halves = halvings[stage] if halvings else stage > 0
        for index in range(depth):
            kind = f"stage{stage}_{'block' if index else 'first'}"
            stride = 2 if halves and not index else 1
            net.block(step, f"stages.{stage}.{index}", kind, spec=spec, planes=spec.width * 2**stage, stride=stride)


def _residual_stem(flow: ImageFlow, spec: Residual) -> None:
    """One or several convolutions and a pooling window, the first and the last of which halve the picture."""
    kernel = 7 if len(spec.stem) == 1 else 3
    for index, width in enumerate(spec.stem):
        flow.convolve(width or spec.width, kernel, 1 if index else 2)
        if not spec.preactive or index < len(spec.stem) - 1:
            flow.normalise().activate()
    if spec.pool:
        flow.pool(3, 2)
    else:
        flow.unit(flow.channels, 3, 2)


def _bottleneck(flow: ImageFlow, spec: Residual, planes: int, stride: int) -> None:
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each normalised, added to the input."""
    x, width = flow.fork(), planes * spec.group_width // 64 * spec.groups
    flow.unit(width, 1, stride if spec.early else 1)
    if spec.radix:
        _split_attention(flow, spec, width, stride)
    else:
        _strided(flow, spec, width, 1 if spec.early else stride, spec.groups)
    _close(flow, x, spec, spec.expansion * planes, stride, 1)


def _split_attention(flow: ImageFlow, spec: Residual, width: int, stride: int) -> None:
    if stride > 1 and spec.pool_first:
        flow.pool(3, 2, maximum=False)
    flow.unit(spec.radix * width, 3, 1, spec.groups * spec.radix)
    flow.split_attention(spec.radix, max(32, rounded(width * spec.radix / 4)), spec.groups)
    if stride > 1 and not spec.pool_first:
        flow.pool(3, 2, maximum=False)


def _preactive(flow: ImageFlow, spec: Residual, planes: int, stride: int) -> None:
    x, out = flow.fork(), spec.expansion * planes
    _prepare(flow, spec)
    if stride > 1 or x.channels != out:
        x = flow.fork()
        if spec.average_down and stride > 1:
            x.pool(2, 2, maximum=False, padding=0).convolve(out)
        else:
            x.convolve(out, 1, stride)
    _prepare(flow.convolve(planes), spec)
    _prepare(flow.convolve(planes, 3, stride), spec)
    flow.convolve(out).add(x)


def _prepare(flow: ImageFlow, spec: Residual) -> None:
    if spec.grouped_norm:
        flow.group_norm()
    else:
        flow.normalise().activate()


def _basic(flow: ImageFlow, spec: Residual, planes: int, stride: int) -> None:
    x = flow.fork()
    _strided(flow, spec, planes, stride, 1)
    _close(flow, x, spec, planes, stride, 3)


def _strided(flow: ImageFlow, spec: Residual, width: int, stride: int, groups: int) -> None:
    """The 3 x 3 convolution; an anti-aliased one strides in a fixed depthwise blur after it."""
    if spec.blur and stride > 1:
        flow.unit(width, 3, 1, groups).convolve(width, 3, stride, width)
    else:
        flow.unit(width, 3, stride, groups)


def _close(flow: ImageFlow, x: ImageFlow, spec: Residual, out: int, stride: int, kernel: int) -> None:
    """The last convolution, squeeze and excitation, the shortcut."""
    flow.convolve(out, kernel).normalise()
    if spec.squeeze:
        flow.squeeze(0 if spec.squeeze < 0 else rounded(flow.channels * spec.squeeze, 8, 0.0))
    if stride > 1 or x.channels != out:
        if spec.average_down and stride > 1:
            x.pool(2, 2, maximum=False, padding=0)
            stride = 1
        x.convolve(out, 1, stride).normalise()
    flow.add(x).activate()


CLASSES = 81  # of SSD300: COCO's and the background
_EXTRA = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""Channels of the 1 x 1 and the 3 x 3 convolution, stride and padding of the latter, map after map."""
_BOXES = (4, 6, 6, 6, 4, 4)  # default boxes a place, map after map


def detector_graph(name: str, side: int, precision: str, item_bytes: int) -> ModelGraph:
    """SSD300: ResNet-50 without its last stage, the third not halving the picture; more maps; heads on every map."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    residual_blocks(net, Residual(depths=(3, 4, 6)), (False, True, False))
    net.block(_maps)
    return net.end(precision, classify, classes=CLASSES)


def _maps(flow: ImageFlow) -> None:
    _heads(flow, _BOXES[0])
    for (inner, outer, stride, padding), boxes in zip(_EXTRA, _BOXES[1:], strict=True):
        flow.unit(inner).convolve(outer, 3, stride, padding=padding).normalise().activate()
        _heads(flow, boxes)


def _heads(flow: ImageFlow, boxes: int) -> None:
    """Places and classes of the boxes of one map, with their losses in fp32."""
    for columns in (4 * boxes, CLASSES * boxes):
        flow.fork().convolve(columns, 3, bias=True).mix("loss", (6, 6), count=4)


def _regnet(net: NetworkBuilder, shape: RegNetShape, precision: str) -> ModelGraph:
    """Stem of one 3 x 3 convolution, blocks that halve the picture where the width grows, head."""
    net.stem(ImageFlow.unit, out=shape.stem, kernel=3, stride=2)
    stage, index, before = -1, 0, 0
    for width in shape.widths:
        stage, index = (stage, index + 1) if width == before else (stage + 1, 0)
        net.block(
            _regnet_block, f"trunk.{stage}.{index}", width=width, group=min(shape.group, width),
            stride=1 if index else 2, squeeze=shape.squeeze,
        )  # fmt: skip
        before = width
    return net.end(precision, classify, classes=shape.classes)


def _regnet_block(flow: ImageFlow, width: int, group: int, stride: int, squeeze: bool) -> None:
    """1 x 1, grouped 3 x 3 (with the stride) and 1 x 1 convolutions added to the input."""
    x = flow.fork()
    flow.unit(width).unit(width, 3, stride, width // group)
    if squeeze:
        flow.squeeze(round(x.channels / 4))
    flow.convolve(width).normalise()
    if stride > 1 or x.channels != width:
        x.convolve(width, 1, stride).normalise()
    flow.add(x).activate()


def _convnext(net: NetworkBuilder, shape: ConvNextShape, precision: str) -> ModelGraph:
    """Stem, stages of blocks with downsampling layers between, pooling, norm, head and loss."""
    steps = not shape.fused_norm
    net.stem(_patches, width=shape.widths[0], in_steps=steps)
    for stage, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=True)):
        if stage:
            net.block(_downsample, f"downsamples.{stage - 1}", f"downsample{stage}", width=width, in_steps=steps)
        for index in range(depth):
            net.block(
                _convnext_block, f"stages.{stage}.{index}", f"stage{stage}_block", kernel=shape.kernel, in_steps=steps
            )
    return net.end(precision, _convnext_head, classes=shape.classes)


def _patches(flow: ImageFlow, width: int, in_steps: bool) -> None:
    flow.convolve(width, 4, 4, bias=True).layer_norm(in_steps=in_steps)


def _downsample(flow: ImageFlow, width: int, in_steps: bool) -> None:
    flow.layer_norm(in_steps=in_steps).convolve(width, 2, 2, bias=True)


def _convnext_block(flow: ImageFlow, kernel: int, in_steps: bool) -> None:
    """Depthwise convolution, norm, MLP of four times the width, learned scale, residual."""
    x, width = flow.fork(), flow.channels
    flow.convolve(width, kernel, 1, width, bias=True).layer_norm(in_steps=in_steps)
    flow.linear(4 * width).activate("gelu").linear(width).scale().add(x)


def _convnext_head(flow: ImageFlow, classes: int) -> None:
    compare(flow.mean().layer_norm().linear(classes))


def _vgg(net: NetworkBuilder, shape: VggShape, precision: str) -> ModelGraph:
    """Groups of 3 x 3 convolutions with max pooling, fully connected layers with dropout behind them."""
    net.begin()
    for group, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=True)):
        net.block(_vgg_group, f"features.{group}", depth=depth, width=width)
    return net.end(precision, _vgg_head, shape=shape)


def _vgg_group(flow: ImageFlow, depth: int, width: int) -> None:
    for _ in range(depth):
        flow.convolve(width, 3, bias=True).activate()
    flow.pool(2, 2, padding=0)


def _vgg_head(flow: ImageFlow, shape: VggShape) -> None:
    flow.shrink(shape.pooled).flatten()
    for _ in range(2):
        flow.linear(shape.hidden).activate().dropout(shape.dropout)
    compare(flow.linear(shape.classes))


_ALEXNET = ((11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True))
"""Kernel, stride and padding of each convolution of an AlexNet, and whether max pooling follows it."""


def _alexnet(net: NetworkBuilder, shape: AlexNetShape, precision: str) -> ModelGraph:
    net.begin()
    for index, (width, window) in enumerate(zip(shape.widths, _ALEXNET, strict=True)):
        net.block(_alexnet_unit, f"features.{index}", width=width, window=window)
    return net.end(precision, _alexnet_head, shape=shape)


def _alexnet_unit(flow: ImageFlow, width: int, window: tuple[int, int, int, bool]) -> None:
    kernel, stride, padding, pool = window
    flow.convolve(width, kernel, stride, bias=True, padding=padding).activate()
    if pool:
        flow.pool(3, 2, padding=0)


def _alexnet_head(flow: ImageFlow, shape: AlexNetShape) -> None:
    flow.shrink(shape.pooled).flatten()
    for _ in range(2):
        flow.dropout(shape.dropout).linear(shape.hidden).activate()
    compare(flow.linear(shape.classes))


def _cosmoflow(net: NetworkBuilder, shape: CosmoFlowShape, precision: str) -> ModelGraph:
    net.begin()
    last = len(shape.widths) - 1
    for index, (width, kernel, stride) in enumerate(zip(shape.widths, shape.kernels, shape.strides, strict=True)):
        around = kernel - 1 if shape.padded and index < last else 0
        net.block(
            _voxels, f"convolutions.{index}", width=width, kernel=kernel, stride=stride, bias=shape.bias,
            around=around, pool=index < last,
        )  # fmt: skip
    return net.end(precision, _cosmoflow_head, shape=shape)


def _voxels(flow: ImageFlow, width: int, kernel: int, stride: int, bias: bool, around: int, pool: bool) -> None:
    """A convolution, padded by ``around`` voxels in all along each side; that is a copy where it is odd."""
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
