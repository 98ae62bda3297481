"""Graphs of image networks from their shapes; RegNet, ConvNeXt, VGG, AlexNet and CosmoFlow are defined here.

Sources: Radosavovic et al. 2020 (arXiv:2003.13678); Liu et al. 2022 (ConvNeXt); Simonyan and Zisserman 2014
(arXiv:1409.1556); Krizhevsky 2014 (arXiv:1404.5997); Mathuriya et al. 2018 (arXiv:1808.04728).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

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
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.mirrored import perception_graph, unet_graph
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify, compare
from galvatron_lite.model.shapes.images.residual import Residual, residual_graph


def picture_graph(
    shape: PictureShape, precision: str, kernels: Kernels = EAGER, *, autocast: bool = False
) -> ModelGraph:
    """Compute the graph of an image network.

    Args:
        shape: of the network.
        precision: of activations and compute.
        kernels: that run; only ConvNeXt has a choice.
        autocast: whether parameters and pictures are fp32 and cast where they are used.
    """
    extent = (shape.image_size,) * (3 if isinstance(shape, CosmoFlowShape) else 2)
    net = NetworkBuilder(shape.name, precision, shape.channels, extent, autocast=autocast)
    if isinstance(shape, ResNetShape):
        spec = Residual(depths=shape.depths, width=shape.width, expansion=shape.expansion)
        return residual_graph(net, spec, shape.classes)
    if isinstance(shape, ConvNextShape):
        net.kernels, net.extent = kernels, shape.extent
    return _GRAPHS[type(shape)](net, shape)


def _regnet(net: NetworkBuilder, shape: RegNetShape) -> ModelGraph:
    """Stem of one 3 x 3 convolution, blocks that halve the picture where the width grows, head."""

    def block(flow: ImageFlow, width: int, stride: int) -> None:
        """1 x 1, grouped 3 x 3 (with the stride) and 1 x 1 convolutions added to the input."""
        x = flow.fork()
        flow.unit(width).unit(width, 3, stride, width // min(shape.group, width))
        if shape.squeeze:
            flow.squeeze(round(x.channels / 4))
        flow.convolve(width).normalise()
        if stride > 1 or x.channels != width:
            x.convolve(width, 1, stride).normalise()
        flow.add(x).activate()

    net.stem(ImageFlow.unit, out=shape.stem, kernel=3, stride=2)
    for stage, (width, same) in enumerate(groupby(shape.widths)):
        for index, _ in enumerate(same):
            net.block(block, f"trunk.{stage}.{index}", width=width, stride=1 if index else 2)
    return net.end(classify, classes=shape.classes)


def _convnext(net: NetworkBuilder, shape: ConvNextShape) -> ModelGraph:
    """Stem, stages of blocks with downsampling layers between, pooling, norm, head and loss."""
    steps = not shape.fused_norm

    def downsample(flow: ImageFlow, width: int) -> None:
        flow.layer_norm(in_steps=steps).convolve(width, 2, 2, bias=True)

    def block(flow: ImageFlow) -> None:
        """Depthwise convolution, norm, MLP of four times the width, learned scale, residual."""
        x, width = flow.fork(), flow.channels
        flow.convolve(width, shape.kernel, 1, width, bias=True).layer_norm(in_steps=steps)
        flow.linear(4 * width).activate("gelu").linear(width).scale().add(x)

    net.stem(lambda flow: flow.convolve(shape.widths[0], 4, 4, bias=True).layer_norm(in_steps=steps))
    for stage, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=True)):
        if stage:
            net.block(downsample, f"downsamples.{stage - 1}", f"downsample{stage}", width=width)
        for index in range(depth):
            net.block(block, f"stages.{stage}.{index}", f"stage{stage}_block")
    return net.end(lambda flow: compare(flow.mean().layer_norm().linear(shape.classes)))


def _convolutions(
    flow: ImageFlow, width: int, depth: int = 1, kernel: int = 3, stride: int = 1, padding: int | None = None,
    bias: bool = True, around: int = 0, pool: tuple[int, int] | None = None, maximum: bool = True,
) -> None:  # fmt: skip
    """Convolutions with activations, after a copy with ``around`` more pixels, and pooling of (kernel, stride)."""
    if around:
        flow.pad(around)
    for _ in range(depth):
        flow.convolve(width, kernel, stride, bias=bias, padding=padding).activate()
    if pool:
        flow.pool(*pool, maximum=maximum, padding=0)


def _vgg(net: NetworkBuilder, shape: VggShape) -> ModelGraph:
    """Groups of 3 x 3 convolutions with max pooling, fully connected layers with dropout."""
    net.begin()
    for group, (depth, width) in enumerate(zip(shape.depths, shape.widths, strict=True)):
        net.block(_convolutions, f"features.{group}", depth=depth, width=width, pool=(2, 2))
    return net.end(_fully_connected, shape=shape)


def _fully_connected(flow: ImageFlow, shape: VggShape | AlexNetShape) -> None:
    """Two hidden layers and a classifier; dropout follows each hidden layer of a VGG, and precedes those of an
    AlexNet."""
    flow.adaptive_mean(shape.pooled).flatten()
    for _ in range(2):
        if isinstance(shape, VggShape):
            flow.linear(shape.hidden).activate().dropout(shape.dropout)
        else:
            flow.dropout(shape.dropout).linear(shape.hidden).activate()
    compare(flow.linear(shape.classes))


ALEXNET = ((11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True))
"""Kernel, stride and padding of each convolution of an AlexNet, and whether max pooling follows."""


def _alexnet(net: NetworkBuilder, shape: AlexNetShape) -> ModelGraph:
    net.begin()
    for index, (width, (kernel, stride, padding, pooled)) in enumerate(zip(shape.widths, ALEXNET, strict=True)):
        net.block(
            _convolutions, f"features.{index}", width=width, kernel=kernel, stride=stride, padding=padding,
            pool=(3, 2) if pooled else None,
        )  # fmt: skip
    return net.end(_fully_connected, shape=shape)


def _cosmoflow(net: NetworkBuilder, shape: CosmoFlowShape) -> ModelGraph:
    """Convolutions with mean pooling; padding that differs between both ends of a side is a copy."""
    net.begin()
    last = len(shape.widths) - 1
    for index, (width, kernel, stride) in enumerate(zip(shape.widths, shape.kernels, shape.strides, strict=True)):
        around = kernel - 1 if shape.padded and index < last else 0
        net.block(
            _convolutions, f"convolutions.{index}", width=width, kernel=kernel, stride=stride, bias=shape.bias,
            around=around if around % 2 else 0, padding=0 if around % 2 else around // 2,
            pool=(2, 2) if index < last else None, maximum=False,
        )  # fmt: skip
    return net.end(_cosmoflow_head, shape=shape)


def _cosmoflow_head(flow: ImageFlow, shape: CosmoFlowShape) -> None:
    """Fully connected layers with leaky ReLU, mean squared error."""
    flow.flatten()
    for width in shape.hidden:
        flow.linear(width, bias=shape.bias).activate()
    prediction = flow.linear(shape.classes, bias=shape.bias).value
    targets = flow.tape.value(shape.classes, grad=False)
    loss = flow.tape.value(1)
    pair, moved = (prediction, targets), prediction.bytes + targets.bytes
    flow.value = flow.tape.memory("loss", pair, loss, moved, 3 * prediction.bytes, like=prediction, saved=pair)


_GRAPHS: dict[type[PictureShape], Callable[[NetworkBuilder, Any], ModelGraph]] = {
    RegNetShape: _regnet, ConvNextShape: _convnext, VggShape: _vgg, AlexNetShape: _alexnet, CosmoFlowShape: _cosmoflow,
    UNetShape: unet_graph, PerceptionShape: perception_graph,
}  # fmt: skip
