"""Networks of inverted bottlenecks: MobileNet V2 and V3, MNASNet, EfficientNet and its kin.

Sources: Sandler et al. 2018 (arXiv:1801.04381, table 2), Howard et al. 2019 (arXiv:1905.02244, tables 1 and 2), Tan et
al. 2018 (arXiv:1807.11626, figure 7), Tan and Le 2019 and 2021 (arXiv:1905.11946, table 1; arXiv:2104.00298, table 4),
Wu et al. 2019 (FBNet), Stamoulis et al. 2019 (Single-Path NAS), Han et al. 2020 (TinyNet).
"""

from __future__ import annotations

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
