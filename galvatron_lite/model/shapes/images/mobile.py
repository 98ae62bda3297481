"""Networks of inverted bottlenecks: MobileNet V2 and V3, MNASNet, EfficientNet and its variants, MixNet.

Their tables, names and sources are in ``configs/networks/mobile.yaml``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import ceil

from galvatron_lite.files import read_data
from galvatron_lite.folders import config_folder
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Consecutive equal blocks: one row of a paper's table."""

    repeats: int  # blocks
    kernels: tuple[int, ...]  # of the depthwise (or fused) convolution, each on its part of the channels
    stride: int  # of the first block
    expand: float  # inner channels / input channels
    channels: int  # out
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation / input channels of the block; 0: none
    # inverted bottleneck, ``fused`` (one dense convolution for the first two), ``plain`` (one convolution),
    # ``separable`` (no expansion)
    kind: str = "inverted"
    fixed: bool = False  # whether repeats do not grow with the depth factor
    of_output: bool = False  # whether expansion is relative to the output channels
    shares: tuple[int, int] = (1, 1)  # convolutions that expand and that project, each on its part of the channels
    function: Activation | None = None  # activation; None: the network's


@dataclass(frozen=True, slots=True, kw_only=True)
class Mobile:
    """One network of inverted bottlenecks."""

    rows: tuple[BlockSpec, ...]  # of its table
    width: float = 1.0  # factor on channels
    depth: float = 1.0  # factor on repeats
    stem: int = 32  # channels of the first convolution
    head: int = 1280  # channels of the last convolution
    fixed_stem: bool = False  # whether the stem does not grow with ``width``
    fixed_head: bool = False  # whether the head does not grow with ``width``
    late_head: bool = False  # whether the last convolution follows the pooling (MobileNet V3)
    function: Activation = "relu"
    squeeze_of_inner: bool = False  # whether squeeze is relative to the expanded channels (MobileNet V3)
    limit: float = 0.9  # of ``rounded``
    nearest: bool = False  # whether repeats times depth are rounded to the nearest number, not up

    def scaled(self, channels: int, fixed: bool = False) -> int:
        """Channels times width, rounded."""
        return channels if fixed else rounded(channels * self.width, 8, self.limit)

    def repeats(self, row: BlockSpec) -> int:
        """Blocks of a row times depth."""
        depth = 1.0 if row.fixed else self.depth
        return max(1, round(row.repeats * depth)) if self.nearest else ceil(row.repeats * depth)


def mobile_graph(net: NetworkBuilder, spec: Mobile) -> ModelGraph:
    """Stem, rows of blocks, last convolution, head."""
    net.stem(ImageFlow.unit, out=spec.scaled(spec.stem, spec.fixed_stem), kernel=3, stride=2, function=spec.function)
    for row in spec.rows:
        for index in range(spec.repeats(row)):
            net.block(_block, row=row, spec=spec, stride=1 if index else row.stride)

    def last(flow: ImageFlow) -> None:
        head = spec.scaled(spec.head, spec.fixed_head)
        if spec.late_head:
            flow.pool(flow.extent[0], flow.extent[0], maximum=False, padding=0).linear(head).activate(spec.function)
        else:
            flow.unit(head, function=spec.function)

    return net.end(classify, prepare=last)


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
    """Parse rows in the papers' notation: ``ir_r2_k3_s2_e6_c24_se0.25`` is kind, repeats, kernel, stride,
    expansion, channels and squeeze; ``k3.5`` are two kernels, ``g1.2`` convolutions that expand and that project."""
    rows = []
    for word in text.split():
        match = _ROW.fullmatch(word)
        assert match is not None, word
        kind, repeats, kernels, stride, expand, channels, squeeze, up, down, silu, fixed, of_output = match.groups()
        rows.append(
            BlockSpec(
                int(repeats), tuple(map(int, kernels.split("."))), int(stride), float(expand), int(channels),
                float(squeeze or 0), _KINDS[kind], bool(fixed), bool(of_output), (int(up or 1), int(down or 1)),
                "silu" if silu else None,
            )
        )  # fmt: skip
    return tuple(rows)


@cache
def mobile_networks() -> dict[str, Mobile]:
    """Return the networks by their published names."""
    data = read_data(config_folder("networks") / "mobile.yaml")
    tables = {name: _rows(text) for name, text in data["tables"].items()}
    return {name: Mobile(rows=tables[fields.pop("table")], **fields) for name, fields in data["networks"].items()}
