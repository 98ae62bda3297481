"""Networks without normalisation: NFNet-F, its light kin, NF-ResNet, NF-RegNet (Brock et al. 2021).

Sources: arXiv:2102.06171 (table 1), arXiv:2101.08692. Weights are standardised before every convolution, which costs
passes over the weights, not over the picture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder


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
    net.stem(_stem, spec=spec)
    for stage, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for index in range(depth):
            strides = stage or (len(spec.strides) == 1 and not spec.pool)
            net.block(_block, spec=spec, width=width, stride=2 if strides and not index else 1,
                      wide=spec.regular and not stage and not index)  # fmt: skip
    return net.finish(classes, precision, _end, spec=spec)


def _stem(flow: ImageFlow, spec: NormFree) -> None:
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


def _block(flow: ImageFlow, spec: NormFree, width: int, stride: int, wide: bool) -> None:
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
