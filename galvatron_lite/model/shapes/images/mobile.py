"""Networks of inverted bottlenecks: MobileNet V2 and V3, MNASNet, EfficientNet and its kin; their rows and names.

Sources: Sandler et al. 2018 (arXiv:1801.04381, table 2), Howard et al. 2019 (arXiv:1905.02244, tables 1 and 2), Tan et
al. 2018 (arXiv:1807.11626, figure 7), Tan and Le 2019 and 2021 (arXiv:1905.11946, table 1; arXiv:2104.00298, table 4).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Equal blocks in a row: one line of a paper's table."""

    repeats: int  # blocks
    kernel: int  # of the depthwise (or fused) convolution
    stride: int  # of the first block
    expand: float  # inner channels / input channels
    channels: int  # out
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation / input channels of the block; 0: none
    # inverted bottleneck, ``fused`` (one dense convolution for the first two), ``plain`` (one convolution),
    # ``separable`` (no expansion)
    kind: str = "inverted"
    fixed: bool = False  # repeats do not grow with the depth factor
    of_output: bool = False  # expansion counts from the output channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Mobile:
    """One network of inverted bottlenecks."""

    rows: tuple[BlockSpec, ...]  # of its table
    width: float = 1.0  # factor on channels
    depth: float = 1.0  # factor on repeats
    stem: int = 32  # channels of the first convolution
    head: int = 1280  # channels of the last convolution
    fixed_stem: bool = False  # stem does not grow with ``width``
    fixed_head: bool = False  # nor does the head
    late_head: bool = False  # the last convolution follows the pooling (MobileNet V3)
    function: Activation = "relu"  # activation
    squeeze_of_inner: bool = False  # squeeze counts against the expanded channels (MobileNet V3)
    limit: float = 0.9  # of ``rounded``

    def scaled(self, channels: int, fixed: bool = False) -> int:
        """Channels times width, rounded."""
        return channels if fixed else rounded(channels * self.width, 8, self.limit)


def mobile_graph(name: str, spec: Mobile, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, rows of blocks, last convolution, head, under autocast."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(ImageFlow.unit, out=spec.scaled(spec.stem, spec.fixed_stem), kernel=3, stride=2, function=spec.function)
    for row in spec.rows:
        for index in range(row.repeats if row.fixed else ceil(row.repeats * spec.depth)):
            net.block(_block, row=row, spec=spec, stride=1 if index else row.stride)
    return net.end(precision, _head, spec=spec, classes=classes)


def _head(flow: ImageFlow, spec: Mobile, classes: int) -> None:
    head = spec.scaled(spec.head, spec.fixed_head)
    if spec.late_head:
        flow.pool(flow.extent[0], flow.extent[0], maximum=False, padding=0).linear(head).activate(spec.function)
    else:
        flow.unit(head, function=spec.function)
    classify(flow, classes)


def _block(flow: ImageFlow, row: BlockSpec, spec: Mobile, stride: int) -> None:
    x, out, enters = flow.fork(), spec.scaled(row.channels), flow.channels
    if row.kind == "plain":
        flow.unit(out, row.kernel, stride, 1, spec.function)
    elif row.kind == "fused":
        inner = rounded((out if row.of_output else enters) * row.expand)
        flow.unit(inner, row.kernel, stride, 1, spec.function)
    else:
        inner = rounded(enters * row.expand) if row.expand != 1 else enters
        if row.expand != 1 or row.kind == "inverted":
            flow.unit(inner, function=spec.function)
        flow.unit(inner, row.kernel, stride, inner, spec.function)
    if row.kind != "plain":
        if row.squeeze:
            of_inner = rounded(flow.channels * row.squeeze)
            flow.squeeze(of_inner if spec.squeeze_of_inner else max(1, round(enters * row.squeeze)))
        flow.convolve(out).normalise()
    if stride == 1 and x.channels == flow.channels:
        flow.add(x)


_KINDS = {"ir": "inverted", "ds": "separable", "er": "fused", "cn": "plain"}
_ROW = re.compile(r"(ir|ds|er|cn)_r(\d+)_k(\d)_s(\d)_e([\d.]+)_c(\d+)(?:_se([\d.]+))?(_fixed)?(_out)?")


def _rows(text: str) -> tuple[BlockSpec, ...]:
    """Rows in the notation of the papers' authors: ``ir_r2_k3_s2_e6_c24_se0.25`` is kind, repeats, kernel, stride,
    expansion, channels and squeeze."""
    rows = []
    for word in text.split():
        found = _ROW.fullmatch(word)
        assert found is not None, word
        kind, repeats, kernel, stride, expand, channels, squeeze, fixed, of_output = found.groups()
        rows.append(
            BlockSpec(
                int(repeats), int(kernel), int(stride), float(expand), int(channels), float(squeeze or 0),
                _KINDS[kind], bool(fixed), bool(of_output),
            )
        )  # fmt: skip
    return tuple(rows)


_MOBILENET_V2 = _rows(
    "ds_r1_k3_s1_e1_c16_fixed ir_r2_k3_s2_e6_c24 ir_r3_k3_s2_e6_c32 ir_r4_k3_s2_e6_c64 ir_r3_k3_s1_e6_c96 "
    "ir_r3_k3_s2_e6_c160 ir_r1_k3_s1_e6_c320_fixed"
)
_V3_LARGE = _rows(
    "ds_r1_k3_s1_e1_c16 ir_r1_k3_s2_e4_c24 ir_r1_k3_s1_e3_c24 ir_r3_k5_s2_e3_c40_se0.25 ir_r1_k3_s2_e6_c80 "
    "ir_r1_k3_s1_e2.5_c80 ir_r2_k3_s1_e2.3_c80 ir_r2_k3_s1_e6_c112_se0.25 ir_r3_k5_s2_e6_c160_se0.25 "
    "cn_r1_k1_s1_e1_c960"
)
_V3_SMALL = _rows(
    "ds_r1_k3_s2_e1_c16_se0.25 ir_r1_k3_s2_e4.5_c24 ir_r1_k3_s1_e3.67_c24 ir_r1_k5_s2_e4_c40_se0.25 "
    "ir_r2_k5_s1_e6_c40_se0.25 ir_r2_k5_s1_e3_c48_se0.25 ir_r3_k5_s2_e6_c96_se0.25 cn_r1_k1_s1_e1_c576"
)
_MNASNET_A1 = _rows(
    "ds_r1_k3_s1_e1_c16 ir_r2_k3_s2_e6_c24 ir_r3_k5_s2_e3_c40_se0.25 ir_r4_k3_s2_e6_c80 ir_r2_k3_s1_e6_c112_se0.25 "
    "ir_r3_k5_s2_e6_c160_se0.25 ir_r1_k3_s1_e6_c320"
)
_MNASNET_B1 = _rows(
    "ds_r1_k3_s1_e1_c16 ir_r3_k3_s2_e3_c24 ir_r3_k5_s2_e3_c40 ir_r3_k5_s2_e6_c80 ir_r2_k3_s1_e6_c96 "
    "ir_r4_k5_s2_e6_c192 ir_r1_k3_s1_e6_c320"
)
_EFFICIENTNET = _rows(
    "ds_r1_k3_s1_e1_c16_se0.25 ir_r2_k3_s2_e6_c24_se0.25 ir_r2_k5_s2_e6_c40_se0.25 ir_r3_k3_s2_e6_c80_se0.25 "
    "ir_r3_k5_s1_e6_c112_se0.25 ir_r4_k5_s2_e6_c192_se0.25 ir_r1_k3_s1_e6_c320_se0.25"
)
_EDGE = _rows(
    "er_r1_k3_s1_e4_c24_out er_r2_k3_s2_e8_c32 er_r4_k3_s2_e8_c48 ir_r5_k5_s2_e8_c96 ir_r4_k5_s1_e8_c144 "
    "ir_r2_k5_s2_e8_c192"
)
_V2_BASE = _rows(
    "cn_r1_k3_s1_e1_c16 er_r2_k3_s2_e4_c32 er_r2_k3_s2_e4_c48 ir_r3_k3_s2_e4_c96_se0.25 ir_r5_k3_s1_e6_c112_se0.25 "
    "ir_r8_k3_s2_e6_c192_se0.25"
)
_V2_SIZES = {
    "s": "2_24 4_48 4_64 6_128 9_160 15_256",
    "m": "3_24 5_48 5_80 7_160 14_176 18_304 5_512",
    "l": "4_32 7_64 7_96 10_192 19_224 25_384 7_640",
    "xl": "4_32 8_64 8_96 16_192 24_256 32_512 8_640",
}
"""Repeats and channels of each stage of the larger EfficientNetV2."""
_V2_STAGES = ("cn k3_s1_e1", "er k3_s2_e4", "er k3_s2_e4", "ir k3_s2_e4", "ir k3_s1_e6", "ir k3_s2_e6", "ir k3_s1_e6")
_SCALES = {
    "b0": (1.0, 1.0), "b1": (1.0, 1.1), "b2": (1.1, 1.2), "b3": (1.2, 1.4), "b4": (1.4, 1.8), "b5": (1.6, 2.2),
    "b6": (1.8, 2.6), "b7": (2.0, 3.1), "b8": (2.2, 3.6), "l2": (4.3, 5.3),
}  # fmt: skip
"""Width and depth of EfficientNet by its letter (the authors' ``efficientnet_builder``)."""
_TRAINING = r"(?:_(?:ap|ns|in1k|in21k|in21ft1k|in22k|in22ft1k|miil|475|ra|jft)(?:_\w+)?)*"


def mobile_of(name: str) -> Mobile | None:
    """The network of a name, suffixes of how it was trained apart; None: none of these families."""
    for pattern, make in _NAMES:
        if found := re.fullmatch(f"(?:tf_)?{pattern}{_TRAINING}", name):
            return make(*found.groups())
    return None


def _mobilenet_v2(width: str, deep: str | None) -> Mobile:
    factor, depth = int(width) / 100, {"110": 1.2, "120": 1.4}.get(width, 1.0) if deep else 1.0
    return Mobile(
        rows=_MOBILENET_V2, width=factor, depth=depth, fixed_stem=bool(deep), fixed_head=factor < 1 or bool(deep),
        function="relu6",
    )  # fmt: skip


def _mobilenet_v3(size: str, plain: str | None, width: str) -> Mobile:
    large, factor = size == "large", int(width) / 100
    rows = _V3_LARGE if large else _V3_SMALL
    if plain:
        rows = tuple(replace(row, squeeze=0.0, kernel=min(3, row.kernel)) for row in rows)
    return Mobile(
        rows=rows, width=factor, stem=16, head=1280 if large else 1024, fixed_stem=factor < 0.75, fixed_head=True,
        late_head=True, function="relu" if plain else "silu", squeeze_of_inner=True,
    )  # fmt: skip


def _mnasnet(squeezed: str | None, kind: str) -> Mobile:
    rows = _MNASNET_A1 if squeezed or kind == "a1" else _MNASNET_B1
    return Mobile(rows=rows, width=int(kind) / 100 if kind.isdigit() else 1.0, fixed_head=True)


def _efficientnet(wide: str | None, scale: str) -> Mobile:
    """``wide``: squeeze-and-excitation sized by the expanded channels (NVIDIA DeepLearningExamples)."""
    width, depth = _SCALES[scale]
    return Mobile(rows=_EFFICIENTNET, width=width, depth=depth, function="silu", squeeze_of_inner=bool(wide))


def _lite(size: str) -> Mobile:
    width, depth = _SCALES[f"b{size}"]
    last = len(_EFFICIENTNET) - 1
    rows = tuple(replace(row, squeeze=0.0, fixed=index in (0, last)) for index, row in enumerate(_EFFICIENTNET))
    return Mobile(rows=rows, width=width, depth=depth, fixed_stem=True, fixed_head=True, function="relu6")


def _edge(size: str) -> Mobile:
    width, depth = {"es": (1.0, 1.0), "em": (1.0, 1.1), "el": (1.2, 1.4)}[size]
    return Mobile(rows=_EDGE, width=width, depth=depth)


def _v2_base(scale: str) -> Mobile:
    width, depth = _SCALES[scale]
    return Mobile(rows=_V2_BASE, width=width, depth=depth, function="silu", limit=0.0)


def _v2(size: str) -> Mobile:
    words = []
    for stage, pair in zip(_V2_STAGES, _V2_SIZES[size].split(), strict=False):
        (kind, settings), (repeats, channels) = stage.split(), pair.split("_")
        words.append(f"{kind}_r{repeats}_{settings}_c{channels}" + "_se0.25" * (kind == "ir"))
    return Mobile(rows=_rows(" ".join(words)), stem=32 if "l" in size else 24, function="silu")


_NAMES: tuple[tuple[str, Callable[..., Mobile]], ...] = (
    (r"mobilenetv2_(\d{3})(d)?", _mobilenet_v2),
    (r"mobilenetv3_(large|small)(_minimal)?_(\d{3})", _mobilenet_v3),
    (r"(se)?mnasnet_(\d{3}|a1|b1)", _mnasnet),
    (r"efficientnet_(widese_)?(b\d|l2)a?", _efficientnet),
    (r"efficientnet_lite([0-4])", _lite),
    (r"efficientnet_(es|em|el)", _edge),
    (r"efficientnetv2_(b\d)", _v2_base),
    (r"efficientnetv2_(s|m|l|xl)", _v2),
)
