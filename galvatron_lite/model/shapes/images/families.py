"""Image networks without a shape of their own: NFNet, CSPNet and Darknet, DenseNet, RepVGG, XCiT, ConvMixer.

Networks without normalisation standardise their weights, which costs passes over weights, not pictures; they and
Darknets are listed in ``configs/networks/families.yaml``. Sources of the others: Huang et al. 2017 (arXiv:1608.06993,
table 1: DenseNet); Ding et al. 2021 (arXiv:2101.03697, tables 2 and 3: RepVGG); El-Nouby et al. 2021
(arXiv:2106.09681, table 1: XCiT); Trockman and Kolter 2022 (arXiv:2201.09792: ConvMixer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import EAGER
from galvatron_lite.model.shapes.images.flow import Activation, ImageFlow, rounded
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify
from galvatron_lite.model.shapes.records import FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFree:
    """A network without normalisation."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...] = (256, 512, 1536, 1536)  # channels a stage
    stem: tuple[tuple[int, int], ...] = ((16, 2), (32, 1), (64, 1), (128, 2))  # channels and stride of convolutions
    pool: bool = False  # the stem is one 7 x 7 convolution and max pooling
    group: int = 128  # channels a group; 0: dense
    bottleneck: float = 0.5  # inner / output channels; inner / input channels if ``regular``
    regular: bool = False  # whether blocks are those of a RegNet, which squeeze their inner channels
    convolutions: int = 2  # grouped ones a block
    head: int = 3072  # channels of the last convolution; 0: none
    squeeze: float = 0.5  # hidden channels / channels; 0: none; negative: ECA
    function: Activation = "gelu"


def normfree_graph(net: NetworkBuilder, spec: NormFree) -> ModelGraph:
    """Stem, blocks stage by stage, head."""

    def stem(flow: ImageFlow) -> None:
        for index, (width, stride) in enumerate(spec.stem):
            if index:
                flow.activate(spec.function)
            flow.convolve(width, 7 if spec.pool else 3, stride, bias=True)
        if spec.pool:
            flow.pool(3, 2)

    def end(flow: ImageFlow) -> None:
        if spec.head:
            flow.convolve(spec.head, bias=True)
        flow.activate(spec.function)

    net.stem(stem)
    for stage, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for index in range(depth):
            stride = 2 if not index and (stage or spec.regular) else 1
            inner = int(width * spec.bottleneck)
            if spec.regular:
                inner = rounded(net.channels * (spec.bottleneck if stage or index else 1.0))
            group = spec.group or inner
            net.block(_normfree_block, spec=spec, width=width, inner=inner // group * group, stride=stride)
    return net.end(classify, prepare=end)


def _normfree_block(flow: ImageFlow, spec: NormFree, width: int, inner: int, stride: int) -> None:
    """Activation before each convolution, products with constants (beta, gain, alpha) instead of norms."""

    def gate() -> None:
        if spec.squeeze:
            flow.squeeze(0 if spec.squeeze < 0 else rounded(flow.channels * spec.squeeze))
            flow.mix("gain", (2, 2), keeps=False)

    x, enters = flow.fork(), flow.channels
    flow.activate(spec.function).mix("beta", (2, 2), keeps=False)
    if stride > 1 or enters != width:
        x = flow.fork()
        if stride > 1:
            x.pool(2, 2, maximum=False, padding=flow.extent[0] % 2)
        x.convolve(width, bias=True)
    flow.convolve(inner, bias=True).activate(spec.function)
    for index in range(spec.convolutions):
        groups = inner // spec.group if spec.group else 1
        flow.convolve(inner, 3, 1 if index else stride, groups, bias=True).activate(spec.function)
    if spec.regular:
        gate()
    flow.convolve(width, bias=True)
    if not spec.regular:
        gate()
    flow.mix("alpha", (2, 2), keeps=False).add(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossStage:
    """A Darknet, or a CSPNet, whose stages pass one half of the channels through the blocks."""

    depths: tuple[int, ...]  # blocks a stage
    widths: tuple[int, ...]  # channels a stage
    stem: tuple[int, ...]  # channels of the stem's convolutions
    stem_kernel: int = 3
    stem_stride: int = 2  # of the first of them
    inner: float = 1.0  # channels inside a block / outside
    edge: bool = False  # a block is 3 x 3 then 1 x 1 instead of 1 x 1 then 3 x 3
    cross: bool = True  # whether stages split their channels (CSPNet), or pass all on after mean pooling (Darknet)
    squeeze: float = 0.0  # hidden channels of squeeze-and-excitation / channels; 0: none
    function: Activation = "silu"


def cross_stage_graph(net: NetworkBuilder, spec: CrossStage) -> ModelGraph:
    """Stem, stages, head."""

    def stem(flow: ImageFlow) -> None:
        padding = (spec.stem_kernel - 1) // 2
        for index, width in enumerate(spec.stem):
            flow.convolve(width, spec.stem_kernel, 1 if index else spec.stem_stride, padding=padding)
            flow.normalise().activate(spec.function)

    def stage(flow: ImageFlow, width: int, depth: int) -> None:
        if not spec.cross:
            flow.pool(2, 2, maximum=False, padding=0).unit(width, function=spec.function)
            return blocks(flow, width, depth)
        flow.unit(flow.channels, 3, 2, function=spec.function).unit(width, function=spec.function)
        inside, beside = flow.view(width // 2), flow.view(width // 2)
        blocks(inside, width // 2, depth)
        inside.concatenate(beside).unit(width, function=spec.function)
        flow.value, flow.channels = inside.value, inside.channels
        return None

    def blocks(flow: ImageFlow, width: int, depth: int) -> None:
        for _ in range(depth):
            x = flow.fork()
            flow.unit(round(width * spec.inner), 3 if spec.edge else 1, function=spec.function)
            if spec.squeeze:
                flow.squeeze(rounded(flow.channels * spec.squeeze, 8, 0.0))
            flow.unit(width, 1 if spec.edge else 3, function=spec.function).add(x)

    net.stem(stem)
    for depth, width in zip(spec.depths, spec.widths, strict=True):
        net.block(stage, width=width, depth=depth)
    return net.end(classify)


_DENSE = {"121": (6, 12, 24, 16), "161": (6, 12, 36, 24), "169": (6, 12, 32, 32), "201": (6, 12, 48, 32),
          "264": (6, 12, 64, 48)}  # fmt: skip
"""Layers a block by depth."""


def dense_graph(net: NetworkBuilder, depth: str) -> ModelGraph:
    """A DenseNet: blocks of layers that each add channels to a copy of all before, and transitions between blocks."""
    growth = 48 if depth in ("161", "264") else 32

    def transition(flow: ImageFlow) -> None:
        flow.normalise().activate().convolve(flow.channels // 2).pool(2, 2, maximum=False, padding=0)

    def layer(flow: ImageFlow) -> None:
        """New channels are concatenated to the input."""
        x = flow.fork()
        flow.normalise().activate().unit(4 * growth).convolve(growth, 3)
        x.concatenate(flow)
        flow.value, flow.channels = x.value, x.channels

    net.stem(lambda flow: flow.unit(2 * growth, 7, 2).pool(3, 2))
    for stage, layers in enumerate(_DENSE[depth]):
        if stage:
            net.block(transition)
        for _ in range(layers):
            net.block(layer)
    return net.end(classify, prepare=lambda flow: flow.normalise().activate())


_BRANCHED = {"a0": (0.75, 2.5), "a1": (1.0, 2.5), "a2": (1.5, 2.75), "b0": (1.0, 2.5), "b1": (2.0, 4.0),
             "b2": (2.5, 5.0), "b3": (3.0, 5.0)}  # fmt: skip
"""Factors of RepVGG on the channels of the first three stages and of the last one."""


def branched_graph(net: NetworkBuilder, size: str) -> ModelGraph:
    """A RepVGG in training: each block is the sum of a 3 x 3 convolution, a 1 x 1 convolution and its input."""
    factor, last = _BRANCHED[size]
    widths = (int(64 * factor), int(128 * factor), int(256 * factor), int(512 * last))

    def block(flow: ImageFlow, width: int, stride: int) -> None:
        x, narrow = flow.fork(), flow.fork().convolve(width, 1, stride).normalise()
        flow.convolve(width, 3, stride).normalise().add(narrow)
        if stride == 1 and x.channels == width:
            flow.add(x.normalise())
        flow.activate()

    net.stem(block, width=min(64, widths[0]), stride=2)
    for depth, width in zip((2, 4, 14, 1) if size < "b" else (4, 6, 16, 1), widths, strict=True):
        for index in range(depth):
            net.block(block, width=width, stride=1 if index else 2)
    return net.end(classify)


def conv_mixer_graph(net: NetworkBuilder, size: str, depth: str, kernel: str, patch: str) -> ModelGraph:
    """Depthwise and pointwise convolutions over patches."""
    width, each = int(size), int(patch or 7)
    function: Activation = "relu" if size == "768" else "gelu"
    sides = 7 if size == "768" else int(kernel or 9)

    def block(flow: ImageFlow) -> None:
        x = flow.fork()
        flow.convolve(width, sides, 1, width, bias=True).activate(function).normalise().add(x)
        flow.convolve(width, bias=True).activate(function).normalise()

    net.stem(lambda flow: flow.convolve(width, each, each, bias=True).activate(function).normalise())
    for _ in range(int(depth)):
        net.block(block)
    return net.end(classify)


_XCIT = {"nano": (128, 4), "tiny": (192, 4), "small": (384, 8), "medium": (512, 8), "large": (768, 16)}
"""Width and heads."""


def xcit_graph(net: NetworkBuilder, size: str, depth: str, patch: str) -> ModelGraph:
    """An XCiT: blocks, then two layers in which only the class token attends."""
    width, heads = _XCIT[size]

    def stem(flow: ImageFlow) -> None:
        """3 x 3 convolutions that halve the picture, and positions from 64 waves."""
        for left in reversed(range(3 if patch == "8" else 4)):
            flow.convolve(width // 2**left, 3, 2).normalise()
            if left:
                flow.activate("gelu")
        flow.tape.count(65 * width)
        flow.mix("positions", (3, 1), keeps=False)

    def block(flow: ImageFlow) -> None:
        """Attention between channels, 3 x 3 depthwise convolutions and an MLP, each scaled and added to its input."""
        x = flow.fork()
        _scaled_sum(flow.layer_norm().linear(3 * width).covary(heads).linear(width), x)
        x = flow.fork()
        flow.layer_norm().mix("permute", (2, 2), keeps=False).convolve(width, 3, 1, width, bias=True).activate("gelu")
        _scaled_sum(flow.normalise().convolve(width, 3, 1, width, bias=True).mix("permute", (2, 2), keeps=False), x)
        x = flow.fork()
        _scaled_sum(flow.layer_norm().linear(4 * width).activate("gelu").linear(width), x)

    def class_layer(flow: ImageFlow) -> None:
        """Keys and values of all tokens; the cost of the class token's query, projection and MLP is left out."""
        x = flow.fork()
        flow.layer_norm()
        flow.fork().linear(2 * width).mix("attend", (2, 4))
        flow.tape.count(10 * width * width + 9 * width)
        flow.add(x)

    net.kernels = replace(EAGER, autocast=net.autocast)
    net.stem(stem)
    for step in (block,) * int(depth) + (class_layer,) * 2:
        net.block(step)
    return net.end(classify, prepare=ImageFlow.layer_norm)


def _scaled_sum(flow: ImageFlow, x: ImageFlow) -> None:
    """Scale and residual sum, which autocast runs in fp32, so that the next norm does not cast its input.

    More passes at half precision, forward: product 1, sum 3, norm -2; backward: product 8, sum of both gradients of
    ``x`` 3, norm -2.
    """
    flow.scale().add(x)
    if flow.value.item_bytes < FP32:
        flow.mix("widen", (2, 9), count=0, keeps=False)
