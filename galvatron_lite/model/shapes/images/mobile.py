"""Networks of inverted bottlenecks: MobileNet V2 and V3, MNASNet, EfficientNet and its kin, MixNet.

Sources: Sandler et al. 2018 (arXiv:1801.04381, table 2), Howard et al. 2019 (arXiv:1905.02244, tables 1 and 2), Tan et
al. 2018 (arXiv:1807.11626, figure 7), Tan and Le 2019 and 2021 (arXiv:1905.11946, table 1; arXiv:2104.00298, table 4),
Wu et al. 2019 (FBNet), Stamoulis et al. 2019 (Single-Path NAS), Han et al. 2020 (TinyNet).

Source: arXiv:1907.09595, figure 5 (S and M; L is M at 1.3 of the width).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder


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
    head: int = 1280  # channels of the last convolution; 0: none
    fixed_stem: bool = False  # stem does not grow with ``width``
    fixed_head: bool = False  # nor does the head
    late_head: bool = False  # the last convolution follows the pooling (MobileNet V3)
    function: Activation = "relu"  # activation
    squeeze_of_inner: bool = False  # squeeze counts against the expanded channels (MobileNet V3)
    limit: float = 0.9  # of ``rounded``
    nearest: bool = False  # repeats are rounded, not rounded up

    def scaled(self, channels: int, fixed: bool = False) -> int:
        """Channels times width, rounded."""
        return channels if fixed else rounded(channels * self.width, 8, self.limit)

    def repeats(self, row: BlockSpec) -> int:
        """Blocks of a row times depth."""
        if row.fixed:
            return row.repeats
        return max(1, round(row.repeats * self.depth)) if self.nearest else ceil(row.repeats * self.depth)


def mobile_graph(name: str, spec: Mobile, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, rows of blocks, last convolution, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_stem, spec=spec)
    for row in spec.rows:
        for index in range(spec.repeats(row)):
            net.block(_STEPS[row.kind], row=row, spec=spec, stride=1 if index else row.stride)
    return net.finish(classes, precision, _head if spec.head else None, spec=spec)


def _stem(flow: ImageFlow, spec: Mobile) -> None:
    flow.unit(spec.scaled(spec.stem, spec.fixed_stem), 3, 2, 1, spec.function)


def _head(flow: ImageFlow, spec: Mobile) -> None:
    head = spec.head if spec.fixed_head else spec.scaled(spec.head)
    if spec.late_head:
        flow.pool(flow.extent[0], flow.extent[0], maximum=False, padding=0).linear(head).activate(spec.function)
    else:
        flow.unit(head, 1, 1, 1, spec.function)


def _squeeze(flow: ImageFlow, row: BlockSpec, spec: Mobile, enters: int) -> None:
    if not row.squeeze:
        return
    if spec.squeeze_of_inner:
        flow.squeeze(rounded(flow.channels * row.squeeze))
    else:
        flow.squeeze(max(1, round(enters * row.squeeze)))


def _inverted(flow: ImageFlow, row: BlockSpec, spec: Mobile, stride: int) -> None:
    x, out, enters = flow.fork(), spec.scaled(row.channels), flow.channels
    inner = rounded(enters * row.expand) if row.expand != 1 else enters
    if row.expand != 1 or row.kind == "inverted":
        flow.unit(inner, 1, 1, 1, spec.function)
    flow.unit(inner, row.kernel, stride, inner, spec.function)
    _squeeze(flow, row, spec, enters)
    flow.convolve(out).normalise()
    _close(flow, x, stride)


def _fused(flow: ImageFlow, row: BlockSpec, spec: Mobile, stride: int) -> None:
    x, enters = flow.fork(), flow.channels
    inner = rounded((spec.scaled(row.channels) if row.of_output else enters) * row.expand)
    flow.unit(inner, row.kernel, stride, 1, spec.function)
    _squeeze(flow, row, spec, enters)
    flow.convolve(spec.scaled(row.channels)).normalise()
    _close(flow, x, stride)


def _plain(flow: ImageFlow, row: BlockSpec, spec: Mobile, stride: int) -> None:
    x = flow.fork()
    flow.unit(spec.scaled(row.channels), row.kernel, stride, 1, spec.function)
    _close(flow, x, stride)


def _close(flow: ImageFlow, x: ImageFlow, stride: int) -> None:
    if stride == 1 and x.channels == flow.channels:
        flow.add(x)


_STEPS = {"inverted": _inverted, "separable": _inverted, "fused": _fused, "plain": _plain}


@dataclass(frozen=True, slots=True)
class MixRow:
    """Equal blocks in a row."""

    repeats: int  # blocks
    kernels: tuple[int, ...]  # of the depthwise convolutions, one share of the channels each
    stride: int  # of the first block
    expand: int  # inner channels / input channels
    channels: int  # out
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation / input channels
    halves: tuple[int, int] = (1, 1)  # how many convolutions expand, and how many project


_SMALL = (
    MixRow(1, (3,), 1, 1, 16), MixRow(1, (3,), 2, 6, 24, 0.0, (2, 2)), MixRow(1, (3,), 1, 3, 24, 0.0, (2, 2)),
    MixRow(1, (3, 5, 7), 2, 6, 40, 0.5), MixRow(3, (3, 5), 1, 6, 40, 0.5, (2, 2)),
    MixRow(1, (3, 5, 7), 2, 6, 80, 0.25, (1, 2)), MixRow(2, (3, 5), 1, 6, 80, 0.25, (1, 2)),
    MixRow(1, (3, 5, 7), 1, 6, 120, 0.5, (2, 2)), MixRow(2, (3, 5, 7, 9), 1, 3, 120, 0.5, (2, 2)),
    MixRow(1, (3, 5, 7, 9, 11), 2, 6, 200, 0.5), MixRow(2, (3, 5, 7, 9), 1, 6, 200, 0.5, (1, 2)),
)  # fmt: skip
_MIDDLE = (
    MixRow(1, (3,), 1, 1, 24), MixRow(1, (3, 5, 7), 2, 6, 32, 0.0, (2, 2)), MixRow(1, (3,), 1, 3, 32, 0.0, (2, 2)),
    MixRow(1, (3, 5, 7, 9), 2, 6, 40, 0.5), MixRow(3, (3, 5), 1, 6, 40, 0.5, (2, 2)),
    MixRow(1, (3, 5, 7), 2, 6, 80, 0.25), MixRow(3, (3, 5, 7, 9), 1, 6, 80, 0.25, (2, 2)),
    MixRow(1, (3,), 1, 6, 120, 0.5), MixRow(3, (3, 5, 7, 9), 1, 3, 120, 0.5, (2, 2)),
    MixRow(1, (3, 5, 7, 9), 2, 6, 200, 0.5), MixRow(3, (3, 5, 7, 9), 1, 6, 200, 0.5, (1, 2)),
)  # fmt: skip
_PLAIN_ROWS = 3  # rows whose activation is ReLU; later ones have SiLU
_SCALES = {"s": (1.0, 1.0), "m": (1.0, 1.0), "l": (1.3, 1.0), "xl": (1.6, 1.2), "xxl": (2.4, 1.3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixNet:
    """One MixNet."""

    rows: tuple[MixRow, ...]  # of its table
    stem: int  # channels of the first convolution
    width: float  # factor on channels
    depth: float  # factor on repeats


def mixnet_of(name: str) -> MixNet | None:
    """The network that a name means; None: none of this family."""
    found = re.fullmatch(r"(?:tf_)?mixnet_(s|m|l|xl|xxl)", name)
    if not found:
        return None
    width, depth = _SCALES[found[1]]
    small = found[1] == "s"
    return MixNet(rows=_SMALL if small else _MIDDLE, stem=16 if small else 24, width=width, depth=depth)


def mixnet_graph(name: str, spec: MixNet, side: int, classes: int, precision: str, item_bytes: int) -> ModelGraph:
    """Stem, rows of blocks, last convolution, head."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    net.stem(_mix_stem, width=rounded(spec.stem * spec.width))
    for place, (row, repeats) in enumerate(zip(spec.rows, _repeats(spec), strict=True)):
        function = "relu" if place < _PLAIN_ROWS else "silu"
        for index in range(repeats):
            net.block(_block, row=row, width=spec.width, stride=1 if index else row.stride, function=function)
    return net.finish(classes, precision, _mix_head)


def _repeats(spec: MixNet) -> list[int]:
    """Blocks of every row: stages of two rows (the first of one) grow as a whole, the second row first."""
    counts = [max(1, round(spec.rows[0].repeats * spec.depth))]
    for first, second in zip(spec.rows[1::2], spec.rows[2::2], strict=True):
        before = first.repeats + second.repeats
        total = round(before * spec.depth)
        later = round(second.repeats / before * total)
        counts += [total - later, later]
    return counts


def _mix_stem(flow: ImageFlow, width: int) -> None:
    flow.unit(width, 3, 2)


def _mix_head(flow: ImageFlow) -> None:
    flow.unit(1536)


def _block(flow: ImageFlow, row: MixRow, width: float, stride: int, function: Activation) -> None:
    x, enters, out = flow.fork(), flow.channels, rounded(row.channels * width)
    if row.expand > 1:
        flow.mixed(enters * row.expand, (1,) * row.halves[0]).normalise().activate(function)
    flow.mixed(flow.channels, row.kernels, stride, depthwise=True).normalise().activate(function)
    if row.squeeze:
        flow.squeeze(max(1, round(enters * row.squeeze)))
    flow.mixed(out, (1,) * row.halves[1]).normalise()
    if stride == 1 and enters == out:
        flow.add(x)
