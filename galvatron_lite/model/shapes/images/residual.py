"""Residual networks: ResNet, ResNeXt, wide and squeeze-and-excitation ones; RegNet; RepVGG; SSD300 over ResNet-50.

Sources: He et al. 2015 (arXiv:1512.03385), the stride in the 3 x 3 convolution as in ResNet v1.5; Xie et al. 2017
(ResNeXt); He et al. 2019 (arXiv:1812.01187: variants C and D); Hu et al. 2018 (SE); Bello et al. 2021
(arXiv:2103.07579: ResNet-RS); Kolesnikov et al. 2020 (BiT).

Source: Ding et al. 2021 (arXiv:2101.03697, tables 2 and 3).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import log

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


Line = tuple[int, float, float, int, int]
"""First width, slope, quantisation step, channels a group, blocks (table 8 and 9 of the paper's appendix)."""

LINES: dict[str, Line] = {
    "x_002": (24, 36.44, 2.49, 8, 13),
    "x_004": (24, 24.48, 2.54, 16, 22),
    "x_006": (48, 36.97, 2.24, 24, 16),
    "x_008": (56, 35.73, 2.28, 16, 16),
    "x_016": (80, 34.01, 2.25, 24, 18),
    "x_032": (88, 26.31, 2.25, 48, 25),
    "x_040": (96, 38.65, 2.43, 40, 23),
    "x_064": (184, 60.83, 2.07, 56, 17),
    "x_080": (80, 49.56, 2.88, 120, 23),
    "x_120": (168, 73.36, 2.37, 112, 19),
    "x_160": (216, 55.59, 2.1, 128, 22),
    "x_320": (320, 69.86, 2.0, 168, 23),
    "y_002": (24, 36.44, 2.49, 8, 13),
    "y_004": (48, 27.89, 2.09, 8, 16),
    "y_006": (48, 32.54, 2.32, 16, 15),
    "y_008": (56, 38.84, 2.4, 16, 14),
    "y_016": (48, 20.71, 2.65, 24, 27),
    "y_032": (80, 42.63, 2.66, 24, 21),
    "y_040": (96, 31.41, 2.24, 64, 22),
    "y_064": (112, 33.22, 2.27, 72, 25),
    "y_080": (192, 76.82, 2.19, 56, 17),
    "y_120": (168, 73.36, 2.37, 112, 19),
    "y_160": (200, 106.23, 2.48, 112, 18),
    "y_320": (232, 115.89, 2.53, 232, 20),
}


def widths_of(line: Line) -> list[int]:
    """Channels of every block, each a multiple of the group's (equations 2 to 4)."""
    start, slope, step, group, blocks = line
    powers = (round(log((start + slope * index) / start) / log(step)) for index in range(blocks))
    widths = [round(start * step**power / 8) * 8 for power in powers]
    return [max(1, round(width / min(group, width))) * min(group, width) for width in widths]


def regular_graph(name: str, key: str, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem of one 3 x 3 convolution, blocks that halve the picture where the width grows, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_regular_stem)
    group, before = LINES[key][3], 0
    for width in widths_of(LINES[key]):
        stride = 2 if width != before else 1
        net.block(regular_block, width=width, group=min(group, width), stride=stride, squeeze=key.startswith("y"))
        before = width
    return net.finish(classes, precision)


def _regular_stem(flow: ImageFlow) -> None:
    flow.unit(32, 3, 2)


def regular_block(flow: ImageFlow, width: int, group: int, stride: int, squeeze: bool) -> None:
    """1 x 1, grouped 3 x 3 (with the stride) and 1 x 1 convolutions added to the input."""
    x, enters = flow.fork(), flow.channels
    flow.unit(width).unit(width, 3, stride, width // group)
    if squeeze:
        flow.squeeze(round(enters / 4))
    flow.convolve(width).normalise()
    if stride > 1 or enters != width:
        x.convolve(width, 1, stride).normalise()
    flow.add(x).activate()


_WIDTHS = {
    "a0": (0.75, 2.5), "a1": (1.0, 2.5), "a2": (1.5, 2.75), "b0": (1.0, 2.5), "b1": (2.0, 4.0), "b2": (2.5, 5.0),
    "b3": (3.0, 5.0),
}  # fmt: skip
"""Factors on the channels of the first three stages and of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """One RepVGG."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    groups: int = 1  # of the convolutions of every second block


def branched_of(name: str) -> Branched | None:
    """The network that a name means; None: none of this family."""
    found = re.fullmatch(r"repvgg_([ab]\d)(?:g(\d))?", name)
    if not found or found[1] not in _WIDTHS:
        return None
    factor, last = _WIDTHS[found[1]]
    widths = (*(int(64 * 2**stage * factor) for stage in range(3)), int(512 * last))
    depths = (2, 4, 14, 1) if found[1].startswith("a") else (4, 6, 16, 1)
    return Branched(depths=depths, widths=widths, groups=int(found[2] or 1))


def branched_graph(name: str, spec: Branched, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, blocks stage by stage, the first of each halving the picture, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_branched_block, width=min(64, spec.widths[0]), stride=2, groups=1)
    place = 0
    for depth, width in zip(spec.depths, spec.widths, strict=True):
        for index in range(depth):
            place += 1
            net.block(_branched_block, width=width, stride=1 if index else 2, groups=1 if place % 2 else spec.groups)
    return net.finish(classes, precision)


def _branched_block(flow: ImageFlow, width: int, stride: int, groups: int) -> None:
    x = flow.fork()
    narrow = flow.fork().convolve(width, 1, stride, groups).normalise()
    flow.convolve(width, 3, stride, groups).normalise().add(narrow)
    if stride == 1 and x.channels == width:
        flow.add(x.normalise())
    flow.activate()


CLASSES = 81  # COCO's classes and the background
_EXTRA = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""Channels of the 1 x 1 and the 3 x 3 convolution, stride and padding of the latter, map after map."""
_BOXES = (4, 6, 6, 6, 4, 4)  # default boxes a place, map after map


def detector_graph(name: str, side: int, precision: str, item_bytes: int) -> ModelGraph:
    """ResNet-50 without its last stage, the third one not halving the picture; further maps; heads on every map."""
    spec = Residual(depths=(3, 4, 6))
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(residual_stem, spec=spec)
    for stage, depth in enumerate(spec.depths):
        for index in range(depth):
            net.block(bottleneck, spec=spec, stage=stage, first=not index, halves=stage == 1)
    net.block(_maps)
    return net.finish(CLASSES, precision)


def _maps(flow: ImageFlow) -> None:
    _heads(flow, _BOXES[0])
    for (inner, outer, stride, padding), boxes in zip(_EXTRA, _BOXES[1:], strict=True):
        flow.unit(inner).convolve(outer, 3, stride, padding=padding).normalise().activate()
        _heads(flow, boxes)


def _heads(flow: ImageFlow, boxes: int) -> None:
    """Places and classes of the boxes of one map, with their losses in fp32."""
    for columns in (4 * boxes, CLASSES * boxes):
        head = flow.fork().convolve(columns, 3, bias=True)
        head.mix("loss", (6, 6), count=4)
