"""Networks of inverted bottlenecks: MobileNet V2 and V3, MNASNet, EfficientNet and its kin, MixNet.

Sources: Sandler et al. 2018 (arXiv:1801.04381, table 2), Howard et al. 2019 (arXiv:1905.02244, tables 1 and 2), Tan et
al. 2018 (arXiv:1807.11626, figure 7), Tan and Le 2019 and 2021 (arXiv:1905.11946, table 1; arXiv:2104.00298, table 4),
Tan and Le 2019 (MixNet: arXiv:1907.09595, figure 5), Wu et al. 2019 (FBNet), Stamoulis et al. 2019 (Single-Path NAS),
Han et al. 2020 (TinyNet).
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
    kernels: tuple[int, ...]  # of the depthwise (or fused) convolution; several share the channels
    stride: int  # of the first block
    expand: float  # inner channels / input channels
    channels: int  # out
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation / input channels of the block; 0: none
    # inverted bottleneck, ``fused`` (one dense convolution for the first two), ``plain`` (one convolution),
    # ``separable`` (no expansion)
    kind: str = "inverted"
    fixed: bool = False  # repeats do not grow with the depth factor
    of_output: bool = False  # expansion counts from the output channels
    shares: tuple[int, int] = (1, 1)  # convolutions that expand and that project, each on its share of the channels
    function: Activation | None = None  # activation; None: the network's


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
    nearest: bool = False  # repeats times depth are rounded to the nearest, not up

    def scaled(self, channels: int, fixed: bool = False) -> int:
        """Channels times width, rounded."""
        return channels if fixed else rounded(channels * self.width, 8, self.limit)

    def repeats(self, row: BlockSpec) -> int:
        """Blocks of a row times depth."""
        depth = 1.0 if row.fixed else self.depth
        return max(1, round(row.repeats * depth)) if self.nearest else ceil(row.repeats * depth)


def mobile_graph(name: str, spec: Mobile, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, rows of blocks, last convolution, head, under autocast."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(ImageFlow.unit, out=spec.scaled(spec.stem, spec.fixed_stem), kernel=3, stride=2, function=spec.function)
    for row in spec.rows:
        for index in range(spec.repeats(row)):
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
    function = row.function or spec.function
    if row.kind == "plain":
        flow.unit(out, row.kernels[0], stride, 1, function)
    elif row.kind == "fused":
        inner = rounded((out if row.of_output else enters) * row.expand)
        flow.unit(inner, row.kernels[0], stride, 1, function)
    else:
        inner = rounded(enters * row.expand) if row.expand != 1 else enters
        if row.expand != 1 or row.kind == "inverted":
            flow.mixed(inner, (1,) * row.shares[0]).normalise().activate(function)
        flow.mixed(inner, row.kernels, stride, depthwise=True).normalise().activate(function)
    if row.kind != "plain":
        if row.squeeze:
            of_inner = rounded(flow.channels * row.squeeze)
            flow.squeeze(of_inner if spec.squeeze_of_inner else max(1, round(enters * row.squeeze)))
        flow.mixed(out, (1,) * row.shares[1]).normalise()
    if stride == 1 and x.channels == flow.channels:
        flow.add(x)


_KINDS = {"ir": "inverted", "ds": "separable", "er": "fused", "cn": "plain"}
_ROW = re.compile(
    r"(ir|ds|er|cn)_r(\d+)_k([\d.]+)_s(\d)_e([\d.]+)_c(\d+)(?:_se([\d.]+))?(?:_g(\d)\.(\d))?(_silu)?(_fixed)?(_out)?"
)


def _rows(text: str) -> tuple[BlockSpec, ...]:
    """Rows in the notation of the papers' authors: ``ir_r2_k3_s2_e6_c24_se0.25`` is kind, repeats, kernel, stride,
    expansion, channels and squeeze; ``k3.5`` are two kernels, ``g1.2`` convolutions that expand and that project."""
    rows = []
    for word in text.split():
        found = _ROW.fullmatch(word)
        assert found is not None, word
        kind, repeats, kernels, stride, expand, channels, squeeze, up, down, silu, fixed, of_output = found.groups()
        rows.append(
            BlockSpec(
                int(repeats), tuple(map(int, kernels.split("."))), int(stride), float(expand), int(channels),
                float(squeeze or 0), _KINDS[kind], bool(fixed), bool(of_output), (int(up or 1), int(down or 1)),
                "silu" if silu else None,
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
_MNASNET_SMALL = _rows(
    "ds_r1_k3_s1_e1_c8 ir_r1_k3_s2_e3_c16 ir_r2_k3_s2_e6_c16 ir_r4_k5_s2_e6_c32_se0.25 ir_r3_k3_s1_e6_c32_se0.25 "
    "ir_r3_k5_s2_e6_c88_se0.25 ir_r1_k3_s1_e6_c144"
)
_FBNET_C = _rows(
    "ir_r1_k3_s1_e1_c16 ir_r1_k3_s2_e6_c24 ir_r2_k3_s1_e1_c24 ir_r1_k5_s2_e6_c32 ir_r1_k5_s1_e3_c32 "
    "ir_r1_k5_s1_e6_c32 ir_r1_k3_s1_e6_c32 ir_r1_k5_s2_e6_c64 ir_r1_k5_s1_e3_c64 ir_r2_k5_s1_e6_c64 "
    "ir_r3_k5_s1_e6_c112 ir_r1_k5_s1_e3_c112 ir_r4_k5_s2_e6_c184 ir_r1_k3_s1_e6_c352"
)
_SINGLE_PATH = _rows(
    "ds_r1_k3_s1_e1_c16 ir_r3_k3_s2_e3_c24 ir_r1_k5_s2_e6_c40 ir_r3_k3_s1_e3_c40 ir_r1_k5_s2_e6_c80 "
    "ir_r3_k3_s1_e3_c80 ir_r1_k5_s1_e6_c96 ir_r3_k5_s1_e3_c96 ir_r4_k5_s2_e6_c192 ir_r1_k3_s1_e6_c320"
)
_MIX_SMALL = _rows(
    "ds_r1_k3_s1_e1_c16 ir_r1_k3_s2_e6_c24_g2.2 ir_r1_k3_s1_e3_c24_g2.2 ir_r1_k3.5.7_s2_e6_c40_se0.5_silu "
    "ir_r3_k3.5_s1_e6_c40_se0.5_g2.2_silu ir_r1_k3.5.7_s2_e6_c80_se0.25_g1.2_silu "
    "ir_r2_k3.5_s1_e6_c80_se0.25_g1.2_silu ir_r1_k3.5.7_s1_e6_c120_se0.5_g2.2_silu "
    "ir_r2_k3.5.7.9_s1_e3_c120_se0.5_g2.2_silu ir_r1_k3.5.7.9.11_s2_e6_c200_se0.5_silu "
    "ir_r2_k3.5.7.9_s1_e6_c200_se0.5_g1.2_silu"
)
_MIX_MIDDLE = _rows(
    "ds_r1_k3_s1_e1_c24_fixed ir_r1_k3.5.7_s2_e6_c32_g2.2_fixed ir_r1_k3_s1_e3_c32_g2.2 "
    "ir_r1_k3.5.7.9_s2_e6_c40_se0.5_silu_fixed ir_r3_k3.5_s1_e6_c40_se0.5_g2.2_silu "
    "ir_r1_k3.5.7_s2_e6_c80_se0.25_silu_fixed ir_r3_k3.5.7.9_s1_e6_c80_se0.25_g2.2_silu "
    "ir_r1_k3_s1_e6_c120_se0.5_silu_fixed ir_r3_k3.5.7.9_s1_e3_c120_se0.5_g2.2_silu "
    "ir_r1_k3.5.7.9_s2_e6_c200_se0.5_silu_fixed ir_r3_k3.5.7.9_s1_e6_c200_se0.5_g1.2_silu"
)
_MIX_SCALES = {"s": (1.0, 1.0), "m": (1.0, 1.0), "l": (1.3, 1.0), "xl": (1.6, 1.2), "xxl": (2.4, 1.3)}
_TINY = {"a": (1.0, 1.2), "b": (0.75, 1.1), "c": (0.54, 0.85), "d": (0.54, 0.695), "e": (0.51, 0.6)}
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
        rows = tuple(replace(row, squeeze=0.0, kernels=(min(3, row.kernels[0]),)) for row in rows)
    return Mobile(
        rows=rows, width=factor, stem=16, head=1280 if large else 1024, fixed_stem=factor < 0.75, fixed_head=True,
        late_head=True, function="relu" if plain else "silu", squeeze_of_inner=True,
    )  # fmt: skip


def _mnasnet(squeezed: str | None, kind: str) -> Mobile:
    if kind == "small":
        return Mobile(rows=_MNASNET_SMALL, stem=8, fixed_head=True)
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


def _v2_variant(size: str) -> Mobile:
    """The small one at 0.8 of the width and 0.9 of the depth (t), or with a fused first row and a wider end (s)."""
    network = _v2("s")
    if size == "t":
        return replace(network, width=0.8, depth=0.9)
    rows = network.rows
    first, last = replace(rows[0], kind="fused"), replace(rows[-1], channels=272)
    return replace(network, rows=(first, *rows[1:-1], last), head=1792)


def _tiny(size: str) -> Mobile:
    return replace(_efficientnet(None, "b0"), width=_TINY[size][0], depth=_TINY[size][1], fixed_stem=True,
                   fixed_head=True, nearest=True)  # fmt: skip


def _mixnet(size: str) -> Mobile:
    """The authors round a stage's two rows together: up for the largest, to the nearest for the others."""
    width, depth = _MIX_SCALES[size]
    rows, stem = (_MIX_SMALL, 16) if size == "s" else (_MIX_MIDDLE, 24)
    return Mobile(rows=rows, width=width, depth=depth, stem=stem, head=1536, fixed_head=True, nearest=size != "xxl")


_NAMES: tuple[tuple[str, Callable[..., Mobile]], ...] = (
    (r"mobilenetv2_(\d{3})(d)?", _mobilenet_v2),
    (r"mobilenetv3_(large|small)(_minimal)?_(\d{3})", _mobilenet_v3),
    (r"(se)?mnasnet_(\d{3}|a1|b1|small)", _mnasnet),
    (r"efficientnet_(widese_)?(b\d|l2)a?", _efficientnet),
    (r"efficientnet_lite([0-4])", _lite),
    (r"efficientnet_(es|em|el)", _edge),
    (r"efficientnetv2_(b\d)", _v2_base),
    (r"efficientnetv2_(s|m|l|xl)", _v2),
    (r"(?:gc_)?efficientnetv2_rw_(t|s)", _v2_variant),
    (r"tinynet_([a-e])", _tiny),
    (r"mixnet_(s|m|l|xl|xxl)", _mixnet),
    (r"fbnetc_100", lambda: Mobile(rows=_FBNET_C, stem=16, head=1984, fixed_head=True)),
    (r"spnasnet_100", lambda: Mobile(rows=_SINGLE_PATH, fixed_head=True)),
)
