"""VGG, DenseNet, networks without normalisation, Darknets and cross-stage-partial networks.

Sources: Simonyan and Zisserman 2014 (arXiv:1409.1556, table 1), Huang et al. 2017 (arXiv:1608.06993, table 1).

Sources: arXiv:2102.06171 (table 1), arXiv:2101.08692. Weights are standardised before every convolution, which costs
passes over the weights, not over the picture.

A cross stage splits its picture by channels, passes one half through the blocks and puts both together again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder

VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions a stage by the number of layers with weights."""
DENSE = {121: (6, 12, 24, 16), 161: (6, 12, 36, 24), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32), 264: (6, 12, 64, 48)}
"""Dense layers a block by depth."""


def vgg_graph(
    name: str, depth: int, norm: bool, side: int, classes: int, precision: str, item_bytes: int
) -> ModelGraph:
    """3 x 3 convolutions and max pooling; the first fully connected layer is a 7 x 7 convolution."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_vgg_unit, width=64, norm=norm, pool=VGG[depth][0] == 1)
    for stage, count in enumerate(VGG[depth]):
        for index in range(1 if not stage else 0, count):
            net.block(_vgg_unit, width=min(512, 64 * 2**stage), norm=norm, pool=index == count - 1)
    return net.finish(classes, precision, _vgg_head)


def _vgg_unit(flow: ImageFlow, width: int, norm: bool, pool: bool) -> None:
    flow.convolve(width, 3, bias=True)
    (flow.normalise() if norm else flow).activate()
    if pool:
        flow.pool(2, 2, padding=0)


def _vgg_head(flow: ImageFlow) -> None:
    flow.convolve(4096, flow.extent[0], flow.extent[0], bias=True).activate()
    flow.linear(4096).activate()


def dense_graph(name: str, depth: int, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Blocks of layers that each add ``growth`` channels; transitions halve channels and picture."""
    growth = 48 if depth in (161, 264) else 32
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_dense_stem, width=2 * growth)
    for stage, layers in enumerate(DENSE[depth]):
        if stage:
            net.block(_transition)
        for _ in range(layers):
            net.block(_dense_layer, growth=growth)
    return net.finish(classes, precision, _dense_end)


def _dense_stem(flow: ImageFlow, width: int) -> None:
    flow.unit(width, 7, 2).pool(3, 2)


def _dense_layer(flow: ImageFlow, growth: int) -> None:
    """All channels so far are copied together with the new ones."""
    x = flow.fork()
    flow.normalise().activate().unit(4 * growth).convolve(growth, 3)
    x.concatenate(flow)
    flow.value, flow.channels = x.value, x.channels


def _transition(flow: ImageFlow) -> None:
    flow.normalise().activate().convolve(flow.channels // 2).pool(2, 2, maximum=False, padding=0)


def _dense_end(flow: ImageFlow) -> None:
    flow.normalise().activate()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFree:
    """One network without normalisation."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...] = (256, 512, 1536, 1536)  # channels a stage
    stem: tuple[int, ...] = (16, 32, 64, 128)  # convolutions' channels of the stem
    strides: tuple[int, ...] = (2, 1, 1, 2)  # of the stem
    pool: bool = False  # whether max pooling follows
    group: int = 128  # channels a group; 0: dense
    bottleneck: float = 0.5  # inner / output channels (or input, where ``regular``)
    regular: bool = False  # a RegNet's blocks: inner channels follow the input
    twice: bool = True  # two grouped convolutions a block
    head: int = 3072  # channels of the last convolution; 0: none
    squeeze: float = 0.5  # as a share of the channels; 0: none; negative: ECA
    function: Activation = "gelu"  # activation


def normfree_of(name: str) -> NormFree | None:
    """The network that a name means; None: none of this family."""
    if found := re.fullmatch(r"(?:dm_)?nfnet_f(\d)", name):
        times = int(found[1]) + 1
        return NormFree(depths=(times, 2 * times, 6 * times, 3 * times))
    if found := re.fullmatch(r"(eca_)?nfnet_l(\d)", name):
        times = int(found[2]) + 1
        return NormFree(
            depths=(times, 2 * times, 6 * times, 3 * times), group=64, bottleneck=0.25, function="silu",
            head=3072 if times > 1 else 2304, squeeze=-1.0 if found[1] else 0.25,
        )  # fmt: skip
    if found := re.fullmatch(r"nf_(se|eca)?resnet(26|50|101)", name):
        depths = {"26": (2, 2, 2, 2), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}[found[2]]
        return NormFree(
            depths=depths, widths=(256, 512, 1024, 2048), stem=(64,), strides=(2,), pool=True, group=0, twice=False,
            bottleneck=0.25, head=0, function="relu", squeeze={"se": 1 / 16, "eca": -1.0}.get(found[1] or "", 0.0),
        )  # fmt: skip
    if (found := re.fullmatch(r"nf_regnet_b([0-5])", name)) is not None:
        return _regular(int(found[1]))
    return None


def _regular(size: int) -> NormFree:
    depths = ((1, 3, 6, 6), (2, 4, 7, 7), (2, 4, 8, 8), (2, 5, 9, 9), (2, 6, 11, 11), (3, 7, 14, 14))[size]
    widths = ((48, 104, 208, 440), (48, 104, 208, 440), (56, 112, 232, 488), (56, 128, 248, 528), (64, 144, 288, 616),
              (80, 168, 336, 704))[size]  # fmt: skip
    narrow = tuple(rounded(0.75 * width) for width in widths)
    head = rounded(0.75 * (1280 * widths[-1] // 440))
    return NormFree(
        depths=depths, widths=narrow, stem=(narrow[0],), strides=(2,), group=8, bottleneck=2.25, regular=True,
        twice=False, head=head, function="relu",
    )  # fmt: skip


def normfree_graph(name: str, spec: NormFree, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, blocks, last convolution, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_free_stem, spec=spec)
    for stage, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for index in range(depth):
            strides = stage or (len(spec.strides) == 1 and not spec.pool)
            net.block(_free_block, spec=spec, width=width, stride=2 if strides and not index else 1,
                      wide=spec.regular and not stage and not index)  # fmt: skip
    return net.finish(classes, precision, _end, spec=spec)


def _free_stem(flow: ImageFlow, spec: NormFree) -> None:
    for index, (width, stride) in enumerate(zip(spec.stem, spec.strides, strict=True)):
        flow.convolve(width, 7 if spec.pool else 3, stride, bias=True)
        if index < len(spec.stem) - 1:
            flow.activate(spec.function)
    if spec.pool:
        flow.pool(3, 2)


def _end(flow: ImageFlow, spec: NormFree) -> None:
    if spec.head:
        flow.convolve(spec.head, bias=True)
    flow.activate(spec.function)


def _inner(spec: NormFree, enters: int, width: int, wide: bool) -> tuple[int, int]:
    """Inner channels and groups."""
    inner = rounded(enters * (1.0 if wide else spec.bottleneck)) if spec.regular else int(width * spec.bottleneck)
    groups = inner // spec.group if spec.group else 1
    return (spec.group * groups if spec.group else inner), groups


def _free_block(flow: ImageFlow, spec: NormFree, width: int, stride: int, wide: bool) -> None:
    x, enters = flow.fork(), flow.channels
    inner, groups = _inner(spec, enters, width, wide)
    flow.activate(spec.function).mix("beta", (2, 2), keeps=False)
    if stride > 1 or enters != width:
        x = flow.fork()
        if stride > 1:
            x.pool(2, 2, maximum=False, padding=flow.extent[0] % 2)
        x.convolve(width, bias=True)
    flow.convolve(inner, bias=True).activate(spec.function)
    flow.convolve(inner, 3, stride, groups, bias=True).activate(spec.function)
    if spec.twice:
        flow.convolve(inner, 3, 1, groups, bias=True).activate(spec.function)
    if spec.regular:
        _excite(flow, spec)
    flow.convolve(width, bias=True)
    if not spec.regular:
        _excite(flow, spec)
    flow.mix("alpha", (2, 2), keeps=False).add(x)


def _excite(flow: ImageFlow, spec: NormFree) -> None:
    if spec.squeeze:
        flow.squeeze(0 if spec.squeeze < 0 else rounded(flow.channels * spec.squeeze))
        flow.mix("gain", (2, 2), keeps=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossStage:
    """One network of this kind."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    stem: tuple[int, ...] = (32, 64)  # channels of the stem's convolutions
    stem_kernel: int = 3  # of them
    stem_stride: int = 2  # of the first of them
    inner: float = 1.0  # channels inside a block as a share of those outside
    edge: bool = False  # a block is 3 x 3 then 1 x 1 instead of 1 x 1 then 3 x 3
    cross: bool = True  # the stage splits its channels
    average_down: bool = False  # pooling and a 1 x 1 convolution halve the picture instead of a 3 x 3
    squeeze: float = 0.0  # share of squeeze-and-excitation's hidden channels; 0: none
    function: Activation = "silu"  # activation


_SCALES = {"s": (0.5, 0.5), "m": (0.75, 0.67), "l": (1.0, 1.0), "x": (1.25, 1.33)}
"""Width and depth by letter (YOLOv5's model files)."""
_DARKNETS = {"17": (1, 1, 1, 1, 1), "21": (1, 1, 1, 2, 2), "53": (1, 2, 8, 8, 4)}


def cross_of(name: str) -> CrossStage | None:
    """The network that a name means; None: none of this family."""
    if found := re.fullmatch(r"cs3(se_?)?(dark|edge)net_(focus_)?([smlx])", name):
        width, depth = _SCALES[found[4]]
        edge, focus = found[2] == "edge", bool(found[3])
        quarter = bool(found[1]) and (edge or found[4] == "l")
        return CrossStage(
            depths=tuple(int(count * depth) for count in (3, 6, 9, 3)),
            widths=tuple(rounded(channels * width) for channels in (128, 256, 512, 1024)),
            stem=(rounded(64 * width),) if focus else (rounded(32 * width), rounded(64 * width)),
            stem_kernel=6 if focus else 3, inner=1.5 if edge else 1.0, edge=edge,
            squeeze=0.25 if quarter else 1 / 16 if found[1] else 0.0,
        )  # fmt: skip
    if found := re.fullmatch(r"(se)?darknet(aa)?(17|21|53)", name):
        return CrossStage(
            depths=_DARKNETS[found[3]], widths=(64, 128, 256, 512, 1024), stem=(32,), stem_stride=1, inner=0.5,
            cross=False, average_down=bool(found[2]), squeeze=1 / 16 if found[1] else 0.0, function="relu",
        )  # fmt: skip
    return None


def cross_graph(name: str, spec: CrossStage, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, stages that halve the picture, blocks, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_cross_stem, spec=spec)
    for depth, width in zip(spec.depths, spec.widths, strict=True):
        net.block(_cross_stage if spec.cross else _dark_stage, spec=spec, width=width, depth=depth)
    return net.finish(classes, precision)


def _cross_stem(flow: ImageFlow, spec: CrossStage) -> None:
    for index, width in enumerate(spec.stem):
        flow.unit(width, spec.stem_kernel, 1 if index else spec.stem_stride, 1, spec.function)
        if spec.stem_kernel % 2 == 0:
            flow.extent = (flow.extent[0] - 1, flow.extent[1] - 1)


def _half(flow: ImageFlow, spec: CrossStage, width: int) -> None:
    if spec.average_down:
        flow.pool(2, 2, maximum=False, padding=0).unit(width, 1, 1, 1, spec.function)
    else:
        flow.unit(flow.channels if spec.cross else width, 3, 2, 1, spec.function)


def _cross_stage(flow: ImageFlow, spec: CrossStage, width: int, depth: int) -> None:
    _half(flow, spec, width)
    flow.unit(width, 1, 1, 1, spec.function)
    inside, beside = flow.split(), flow.split()
    for _ in range(depth):
        _cross_block(inside, spec, width // 2)
    inside.concatenate(beside).unit(width, 1, 1, 1, spec.function)
    flow.value, flow.channels = inside.value, inside.channels


def _dark_stage(flow: ImageFlow, spec: CrossStage, width: int, depth: int) -> None:
    _half(flow, spec, width)
    for _ in range(depth):
        _cross_block(flow, spec, width)


def _cross_block(flow: ImageFlow, spec: CrossStage, width: int) -> None:
    x, inner = flow.fork(), round(width * spec.inner)
    flow.unit(inner, 3 if spec.edge else 1, 1, 1, spec.function)
    if spec.squeeze:
        flow.squeeze(rounded(flow.channels * spec.squeeze, 8, 0.0))
    flow.unit(width, 1 if spec.edge else 3, 1, 1, spec.function).add(x)
