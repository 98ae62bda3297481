"""VGG, AlexNet, RegNet, U-Net and CosmoFlow from their shapes, layer by layer as the reference models have them.

Sources: Simonyan and Zisserman 2014 (arXiv:1409.1556), Krizhevsky 2014 (arXiv:1404.5997), Radosavovic et al. 2020
(arXiv:2003.13678), Ronneberger et al. 2015 (arXiv:1505.04597), Mathuriya et al. 2018 (arXiv:1808.04728).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, Passed
from galvatron_lite.model.shapes.calls import Division, ShapeCall
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify, compare
from galvatron_lite.model.shapes.images.perception import perception_graph
from galvatron_lite.model.shapes.images.regular import regular_block
from galvatron_lite.model.shapes.picture_fields import (
    AlexNetShape,
    CosmoFlowShape,
    PerceptionShape,
    PictureShape,
    RegNetShape,
    UNetShape,
    VggShape,
)
from galvatron_lite.model.shapes.tape import memory_operator


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
_POOLED = (0, 1, 4)
"""Those that max pooling follows."""


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
