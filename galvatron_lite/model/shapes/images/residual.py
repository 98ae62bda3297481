"""Residual networks: ResNet, ResNeXt, wide and squeeze-and-excitation ones, their stems and shortcuts.

Sources: He et al. 2015 (arXiv:1512.03385), the stride in the 3 x 3 convolution as in ResNet v1.5; Xie et al. 2017
(ResNeXt); He et al. 2019 (arXiv:1812.01187: variants C and D); Hu et al. 2018 (SE); Bello et al. 2021
(arXiv:2103.07579: ResNet-RS); Kolesnikov et al. 2020 (BiT).
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One residual network."""

    depths: tuple[int, ...]  # blocks a stage
    basic: bool = False  # two 3 x 3 convolutions a block instead of a bottleneck
    groups: int = 1  # of the 3 x 3 convolutions
    group_width: int = 64  # channels of the first stage's bottleneck for every 64 of width and group
    stem: tuple[int, ...] = (64,)  # channels of the stem's convolutions; one: a single 7 x 7
    pool: bool = True  # whether max pooling follows the stem (else a convolution with stride)
    average_down: bool = False  # shortcuts pool before they project (variant D)
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation as a share of the block's; 0: none; negative: ECA
    blur: bool = False  # anti-aliased downsampling: the convolution keeps the extent, a fixed blur strides after it
    preactive: bool = False  # normalisation before convolution (ResNet v2)
    wide: int = 1  # factor on all widths (BiT)
    grouped_norm: bool = False  # group instead of batch normalisation (BiT)
    early: bool = False  # the first 1 x 1 convolution strides, not the 3 x 3 (the original ResNet)
    function: Activation = "relu"  # activation
    # pictures that split attention chooses among (ResNeSt, Zhang et al. 2020, arXiv:2004.08955, radix); 0: a plain 3
    # x 3 convolution
    splits: int = 0
    pool_first: bool = False  # where it halves, the mean pooling goes before it


def residual_graph(name: str, spec: Residual, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, blocks stage by stage, pooling with linear head and loss."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(residual_stem, spec=spec)
    step = _basic if spec.basic else _preactive if spec.preactive else bottleneck
    for stage, depth in enumerate(spec.depths):
        for index in range(depth):
            net.block(step, spec=spec, stage=stage, first=not index)
    return net.finish(classes, precision, _last if spec.preactive else None, spec=spec)


def _last(flow: ImageFlow, spec: Residual) -> None:
    _normed(flow, spec)


def residual_stem(flow: ImageFlow, spec: Residual) -> None:
    """One or several convolutions and a pooling window, each of which may halve the picture."""
    kernel, last = (7, len(spec.stem) - 1) if len(spec.stem) == 1 else (3, len(spec.stem) - 1)
    for index, width in enumerate(spec.stem):
        flow.convolve(width * spec.wide, kernel, 1 if index else 2)
        if index < last or not spec.preactive:
            flow.normalise().activate(spec.function)
    if spec.pool:
        flow.pool(3, 2)
    else:
        flow.unit(flow.channels, 3, 2, 1, spec.function)


def _excite(flow: ImageFlow, spec: Residual) -> None:
    if spec.squeeze:
        flow.squeeze(0 if spec.squeeze < 0 else rounded(flow.channels * spec.squeeze, 8, 0.0))


def _shortcut(x: ImageFlow, spec: Residual, out: int, stride: int) -> ImageFlow:
    if stride == 1 and x.channels == out:
        return x
    if spec.average_down and stride > 1:
        return x.pool(2, 2, maximum=False, padding=0).convolve(out).normalise()
    return x.convolve(out, 1, stride).normalise()


def _strided(flow: ImageFlow, spec: Residual, width: int, stride: int, groups: int) -> None:
    """The 3 x 3 convolution; an anti-aliased one strides in a fixed depthwise blur after it."""
    if spec.blur and stride > 1:
        flow.unit(width, 3, 1, groups, spec.function).convolve(width, 3, stride, width)
    else:
        flow.unit(width, 3, stride, groups, spec.function)


def bottleneck(flow: ImageFlow, spec: Residual, stage: int, first: bool, halves: bool = True) -> None:
    """1 x 1, 3 x 3 and 1 x 1 convolutions; the first of a later stage halves the picture unless told otherwise."""
    planes, stride = 64 * 2**stage, 2 if stage and first and halves else 1
    width = planes * spec.group_width // 64 * spec.groups
    x = flow.fork()
    flow.unit(width, 1, stride if spec.early else 1, 1, spec.function)
    if spec.splits:
        _chosen(flow, spec, width, stride)
    else:
        _strided(flow, spec, width, 1 if spec.early else stride, spec.groups)
    flow.convolve(4 * planes).normalise()
    _excite(flow, spec)
    flow.add(_shortcut(x, spec, 4 * planes, stride)).activate(spec.function)


def _chosen(flow: ImageFlow, spec: Residual, width: int, stride: int) -> None:
    """Split attention: a grouped convolution makes several pictures, whose weighted sum goes on; pooling halves."""
    if stride > 1 and spec.pool_first:
        flow.pool(3, 2, maximum=False)
    flow.unit(spec.splits * width, 3, 1, spec.groups * spec.splits, spec.function)
    hidden = max(32, rounded(width * spec.splits / 4, 8))
    flow.choose(spec.splits, hidden, spec.groups)
    if stride > 1 and not spec.pool_first:
        flow.pool(3, 2, maximum=False)


def _basic(flow: ImageFlow, spec: Residual, stage: int, first: bool) -> None:
    planes, stride = 64 * 2**stage, 2 if stage and first else 1
    x = flow.fork()
    _strided(flow, spec, planes, stride, 1)
    flow.convolve(planes, 3).normalise()
    _excite(flow, spec)
    flow.add(_shortcut(x, spec, planes, stride)).activate(spec.function)


def _preactive(flow: ImageFlow, spec: Residual, stage: int, first: bool) -> None:
    planes, stride = 64 * 2**stage * spec.wide, 2 if stage and first else 1
    x = flow.fork()
    _normed(flow, spec)
    if first:
        x.value = flow.value
        if spec.average_down and stride > 1:
            x.pool(2, 2, maximum=False, padding=0)
            x.convolve(4 * planes)
        else:
            x.convolve(4 * planes, 1, stride)
    _normed(flow.convolve(planes), spec)
    _normed(flow.convolve(planes, 3, stride), spec)
    flow.convolve(4 * planes).add(x)


def _normed(flow: ImageFlow, spec: Residual) -> None:
    if spec.grouped_norm:
        flow.group_norm()
    else:
        flow.normalise().activate(spec.function)
