"""MixNet: inverted bottlenecks whose depthwise convolutions mix kernel sizes (Tan and Le 2019).

Source: arXiv:1907.09595, figure 5 (S and M; L is M at 1.3 of the width).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder


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
_PLAIN_ROWS = 3
"""Rows whose activation is ReLU; later ones have SiLU."""
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
    net.stem(_stem, width=rounded(spec.stem * spec.width))
    for place, (row, repeats) in enumerate(zip(spec.rows, _repeats(spec), strict=True)):
        function = "relu" if place < _PLAIN_ROWS else "silu"
        for index in range(repeats):
            net.block(_block, row=row, width=spec.width, stride=1 if index else row.stride, function=function)
    return net.finish(classes, precision, _head)


def _repeats(spec: MixNet) -> list[int]:
    """Blocks of every row: stages of two rows (the first of one) grow as a whole, the second row first."""
    counts = [max(1, round(spec.rows[0].repeats * spec.depth))]
    for first, second in zip(spec.rows[1::2], spec.rows[2::2], strict=True):
        before = first.repeats + second.repeats
        total = round(before * spec.depth)
        later = round(second.repeats / before * total)
        counts += [total - later, later]
    return counts


def _stem(flow: ImageFlow, width: int) -> None:
    flow.unit(width, 3, 2)


def _head(flow: ImageFlow) -> None:
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
