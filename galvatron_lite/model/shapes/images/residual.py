"""Residual networks by their published names: ResNet and its variants, SSD300.

Sources: He et al. 2015 (arXiv:1512.03385), the stride in the 3 x 3 convolution as in ResNet v1.5; Xie et al. 2017
(ResNeXt); He et al. 2019 (arXiv:1812.01187: variants C and D); Hu et al. 2018 (SE); Bello et al. 2021
(arXiv:2103.07579: ResNet-RS); Kolesnikov et al. 2020 (BiT); Zhang et al. 2020 (arXiv:2004.08955: ResNeSt).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify

TRAINED = r"(?:_(?:in1k|in21k|in22k|in22ft1k|in21ft1k|384|miil|ra|a1h|tv|hnf|ols))*"
"""Suffixes that name only how, or by whom, weights were trained."""
_DEPTHS = {
    "10": (1, 1, 1, 1), "14": (1, 1, 1, 1), "18": (2, 2, 2, 2), "26": (2, 2, 2, 2), "34": (3, 4, 6, 3),
    "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3), "269": (3, 30, 48, 8),
    "rs50": (3, 4, 6, 3), "rs101": (3, 4, 23, 3), "rs152": (3, 8, 36, 3), "rs200": (3, 24, 36, 3),
    "rs270": (4, 29, 53, 4), "rs350": (4, 36, 72, 4), "rs420": (4, 44, 87, 4),
}  # fmt: skip
_RESNET = (
    r"(?:gluon_|tv_|ssl_|swsl_|ig_|legacy_)?(?P<attention>se|eca)?(?P<wide>wide_)?resne(?P<next>x?)t(?P<blur>aa|blur)?"
    r"(?P<depth>(?:rs)?\d+)(?:_?v?1?(?P<variant>b|c|d|s|t))?(?P<wide2>_2)?(?:_(?P<groups>\d+)x(?P<width>\d+)d)?"
)
_STEMS = {"c": (32, 32, 64), "d": (32, 32, 64), "s": (64, 64, 128), "t": (24, 32, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One residual network."""

    depths: tuple[int, ...]  # blocks a stage
    width: int = 64  # channels of the first stage's bottleneck; doubled from stage to stage
    expansion: int = 4  # output channels / bottleneck channels
    basic: bool = False  # two 3 x 3 convolutions a block instead of a bottleneck
    groups: int = 1  # of the 3 x 3 convolutions
    group_width: int = 64  # channels of the first stage's bottleneck for every 64 of width and group
    stem: tuple[int, ...] = (0,)  # channels of the stem's convolutions, a single one is 7 x 7; 0: ``width``
    pool: bool = True  # whether max pooling follows the stem, or a convolution with stride
    average_down: bool = False  # shortcuts pool before they project (variant D)
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation as a share of the block's; 0: none; negative: ECA
    blur: bool = False  # anti-aliased downsampling: the convolution keeps the extent, a fixed blur strides after it
    preactive: bool = False  # normalisation before convolution (ResNet v2)
    grouped_norm: bool = False  # group instead of batch normalisation; only where ``preactive``
    radix: int = 0  # pictures that split attention weighs (ResNeSt); 0: a plain 3 x 3 convolution
    pool_first: bool = False  # whether mean pooling that halves the picture precedes split attention
    early: bool = False  # whether the first 1 x 1 convolution has the stride, not the 3 x 3 (the original ResNet)


def residual_graph(net: NetworkBuilder, spec: Residual, classes: int = 1000) -> ModelGraph:
    """Stem, blocks stage by stage, pooling with linear head and loss."""
    _add_blocks(net, spec)
    return net.end(classify, classes=classes, prepare=(lambda flow: _prepare(flow, spec)) if spec.preactive else None)


def _add_blocks(net: NetworkBuilder, spec: Residual, halving: tuple[int, ...] = (1, 2, 3)) -> None:
    """Stem and blocks; ``halving``: the stages that halve the picture."""
    net.stem(_residual_stem, spec=spec)
    step = _preactive if spec.preactive else _basic if spec.basic else _bottleneck
    for stage, depth in enumerate(spec.depths):
        for index in range(depth):
            kind = f"stage{stage}_{'block' if index else 'first'}"
            stride = 2 if stage in halving and not index else 1
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
        if stride > 1 and spec.pool_first:
            flow.pool(3, 2, maximum=False)
        flow.unit(spec.radix * width, 3, 1, spec.groups * spec.radix)
        flow.split_attention(spec.radix, max(32, rounded(width * spec.radix / 4)), spec.groups)
        if stride > 1 and not spec.pool_first:
            flow.pool(3, 2, maximum=False)
    else:
        _strided(flow, spec, width, 1 if spec.early else stride, spec.groups)
    _close(flow, x, spec, spec.expansion * planes, stride, 1)


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
    """The 3 x 3 convolution; if anti-aliased, a fixed depthwise blur after it has the stride."""
    if spec.blur and stride > 1:
        flow.unit(width, 3, 1, groups).convolve(width, 3, stride, width)
    else:
        flow.unit(width, 3, stride, groups)


def _close(flow: ImageFlow, x: ImageFlow, spec: Residual, out: int, stride: int, kernel: int) -> None:
    """The last convolution, squeeze and excitation, and the shortcut."""
    flow.convolve(out, kernel).normalise()
    if spec.squeeze:
        flow.squeeze(0 if spec.squeeze < 0 else rounded(flow.channels * spec.squeeze, 8, 0.0))
    if stride > 1 or x.channels != out:
        if spec.average_down and stride > 1:
            x.pool(2, 2, maximum=False, padding=0)
            stride = 1
        x.convolve(out, 1, stride).normalise()
    flow.add(x).activate()


_CLASSES = 81  # of SSD300: COCO's and the background
_EXTRA = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""Channels of the 1 x 1 and the 3 x 3 convolution, and stride and padding of the latter, for each further map."""
_BOXES = (4, 6, 6, 6, 4, 4)  # default boxes per pixel of each map


def detector_graph(net: NetworkBuilder) -> ModelGraph:
    """SSD300: ResNet-50 without its last stage, the third not halving the picture; more maps; heads on every map."""

    def maps(flow: ImageFlow) -> None:
        """Positions and classes of the boxes of each map, with their losses in fp32."""
        for boxes, extra in zip(_BOXES, (*_EXTRA, None), strict=True):
            for columns in (4 * boxes, _CLASSES * boxes):
                flow.fork().convolve(columns, 3, bias=True).mix("loss", (6, 6), count=4)
            if extra:
                inner, outer, stride, padding = extra
                flow.unit(inner).convolve(outer, 3, stride, padding=padding).normalise().activate()

    _add_blocks(net, Residual(depths=(3, 4, 6)), halving=(1,))
    net.block(maps)
    return net.end(classify, classes=_CLASSES)


def residual_of(name: str) -> Residual | None:
    """Return the residual network of a name; None if it is of another family."""
    if match := re.fullmatch(r"resnetv2_(50|101|152)(?:x(\d)_bit\w*|([dts]?)(_gn)?)", name):
        return Residual(
            depths=_DEPTHS[match[1]], width=64 * int(match[2] or 1), stem=_STEMS.get(match[3], (0,)), preactive=True,
            average_down=bool(match[3]), grouped_norm=bool(match[2] or match[4]),
        )  # fmt: skip
    match = re.fullmatch(r"resnest(\d+)(d|e)(?:_(\d)s(\d)x(\d+)d)?", name)
    if match and match[1] in _DEPTHS:
        return Residual(
            depths=_DEPTHS[match[1]], groups=int(match[4] or 1), group_width=int(match[5] or 64), average_down=True,
            stem=_STEMS["s" if match[2] == "e" else "d"], radix=int(match[3] or 2), pool_first=bool(match[3]),
        )  # fmt: skip
    match = re.fullmatch(_RESNET + TRAINED, name)
    if not match or match["depth"] not in _DEPTHS:
        return None
    scaled, variant = match["depth"].startswith("rs"), match["variant"] or ""
    variant = "d" if scaled else variant
    squeeze = {"se": 1 / 16, "eca": -1.0}.get(match["attention"] or "", 0.0)
    return Residual(
        depths=_DEPTHS[match["depth"]], basic=match["depth"] in ("10", "18", "34"), groups=int(match["groups"] or 1),
        group_width=128 if match["wide"] else int(match["width"] or 64), stem=_STEMS.get(variant, (64,)),
        pool=not scaled, average_down=variant in ("d", "t"), squeeze=0.25 if scaled else squeeze,
        blur=bool(match["blur"]), early=name.startswith("legacy_") and not match["next"],
    )  # fmt: skip
