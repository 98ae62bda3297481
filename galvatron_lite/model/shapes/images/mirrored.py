"""Networks with skip connections between layers: U-Nets, the perception network, AmoebaNet-D.

Sources: Ronneberger et al. 2015 (arXiv:1505.04597, figure 1: 572 x 572, convolutions without padding); Isensee et al.
2021 (nnU-Net; plans of BraTS as NVIDIA's DeepLearningExamples train them: patches of 192 x 160 and of 128^3, 32
channels doubled to at most 512 and 320, strided convolutions in the encoder, instance normalisation), for pictures of
one channel and three classes MLPerf's (github.com/mlcommons/training, image_segmentation); Sah and Chinara 2024
(arXiv:2412.18165), as in the reference model (``model.zoo.perception``): layers are the levels of each network's
encoder and decoder, and the convolutions of the skip connections.

AmoebaNet-D, whose cells read the outputs of the two previous cells: Real et al. 2018 (arXiv:1802.01548, figure 5 and
appendix), as GPipe (Huang et al. 2018, arXiv:1811.06965) and torchgpipe (Kim et al. 2020, arXiv:2004.09910, section 4)
train it: the outputs of a normal cell are its states 0, 3, 4 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from galvatron_lite.model.graph import DeadParameters, ModelGraph, Passed, Role, Sharding, dead_note
from galvatron_lite.model.shapes.fields import PerceptionShape, UNetShape
from galvatron_lite.model.shapes.images.flow import Extent, ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, Picture, Step, classify, compare
from galvatron_lite.model.shapes.records import FP32, Value
from galvatron_lite.model.shapes.tape import Tape, with_skips
from galvatron_lite.units import activation_bytes


@dataclass(frozen=True, slots=True)
class Levels:
    """A U-Net of two convolutions a level."""

    widths: tuple[int, ...]  # channels of each level, the lowest last
    classes: int  # of a pixel
    padded: bool = True  # whether convolutions keep the extent
    strided: bool = False  # whether a convolution halves the picture, or maximum pooling
    norm: bool = False  # whether normalisation follows each convolution
    bilinear: bool = False  # whether interpolation doubles the picture, or a transposed convolution


MEDICAL = {
    "unet_medical": (1, (572, 572), Levels((64, 128, 256, 512, 1024), 2, padded=False)),
    "nnunet_2d": (4, (192, 160), Levels((32, 64, 128, 256, 512, 512), 4, strided=True, norm=True)),
    "unet3d": (1, (128, 128, 128), Levels((32, 64, 128, 256, 320, 320), 3, strided=True, norm=True)),
    "nnunet_3d": (4, (128, 128, 128), Levels((32, 64, 128, 256, 320, 320), 4, strided=True, norm=True)),
}
"""Channels and extent of the picture, and levels, by the names of published runs."""


def medical_graph(net: NetworkBuilder, name: str) -> ModelGraph:
    """A U-Net of medical pictures."""
    net.channels, net.extent, levels = MEDICAL[name]
    return _levels_graph(net, levels, named=False)


def unet_graph(net: NetworkBuilder, shape: UNetShape) -> ModelGraph:
    """A U-Net of padded convolutions; one that interpolates has half of the channels in the lowest level."""
    widths = [shape.base * 2**level for level in range(shape.levels)]
    lowest = 2 * widths[-1] // (2 if shape.bilinear else 1)
    spec = Levels((*widths, lowest), shape.classes, norm=shape.norm, bilinear=shape.bilinear)
    return _levels_graph(net, spec, named=True)


def _levels_graph(net: NetworkBuilder, spec: Levels, named: bool) -> ModelGraph:
    """Encoder and decoder; each level of the decoder reads the encoder's picture of its size, or the middle of it."""
    net.stem(_level, spec=spec, width=spec.widths[0])
    down, readers = ["before"], {}
    for level, width in enumerate(spec.widths[1:]):
        down.append(net.block(_level_down, f"downs.{level}" * named, spec=spec, width=width))
    for level, (producer, skip) in enumerate(zip(down[-2::-1], spec.widths[-2::-1], strict=True)):
        width = max(skip // 2, spec.widths[0]) if spec.bilinear else skip
        readers[producer] = net.block(_level_up, f"ups.{level}" * named, spec=spec, skip=skip, width=width)
    graph = net.end(lambda flow: compare(flow.convolve(spec.classes, bias=True)))
    tensors = []
    for left, right in pairwise(graph.layers):
        names = dict.fromkeys((right.name, readers.get(left.name, right.name)))
        tensors.append(Passed(left.name, tuple(names), graph.kind_of(left).output_bytes))
    return replace(graph, tensors=tuple(tensors))


def _level(flow: ImageFlow, spec: Levels, width: int, stride: int = 1, middle: int = 0) -> None:
    for out, step in ((middle or width, stride), (width, 1)):
        flow.convolve(out, 3, step, bias=not spec.norm, padding=None if spec.padded else 0)
        (flow.normalise() if spec.norm else flow).activate()


def _level_down(flow: ImageFlow, spec: Levels, width: int) -> None:
    _level(flow if spec.strided else flow.pool(2, 2, padding=0), spec, width, 2 if spec.strided else 1)


def _level_up(flow: ImageFlow, spec: Levels, skip: int, width: int) -> None:
    (flow.interpolate() if spec.bilinear else flow.transpose(skip, 2, 2)).concatenate_skip(skip)
    _level(flow, spec, width, middle=flow.channels // 2 if spec.bilinear else 0)


def pooled_graph(net: NetworkBuilder, count: str, base: str) -> ModelGraph:
    """torchgpipe's U-Net (Kim et al. 2020, arXiv:2004.09910), whose skip connections begin before each pooling:
    ``count`` convolutions a level, five levels that double ``base`` channels."""
    each, side, skips = int(count), net.extent[0], list[Passed]()
    widths = [int(base) * 2**level for level in range(5)]
    net.stem(_pooled_level, widths=(widths[0],) * each, halves=True)
    down = ["before", *(net.block(_pooled_level, widths=(width,) * each, halves=True) for width in widths[1:])]
    net.block(_pooled_level, widths=(*(2 * widths[-1],) * (each - 1), widths[-1]), halves=False)
    for level in reversed(range(5)):
        name = net.block(_pooled_up, skip=widths[level], widths=(widths[level] // 2,) * each)
        size = widths[level] * (side // 2**level) ** 2 * activation_bytes(net.precision)
        skips.append(Passed(down[level], (name,), size))
    return with_skips(net.end(classify, classes=1), skips)


def _pooled_level(flow: ImageFlow, widths: Sequence[int], halves: bool) -> None:
    """Convolutions, each with dropout of channels, normalisation of each sample and leaky ReLU into new tensors, and
    maximum pooling."""
    for width in widths:
        flow.convolve(width, 3).mix("dropout", (2, 2), keeps=False).mix("norm", (3, 5)).mix("relu", (2, 3))
    if halves:
        flow.pool(2, 2, padding=0)


def _pooled_up(flow: ImageFlow, skip: int, widths: Sequence[int]) -> None:
    """Nearest-neighbour enlargement in one copy with the encoder's picture, convolutions."""
    x, flow.extent = flow.value, tuple(2 * side for side in flow.extent)
    flow.channels += skip
    flow.value = flow.tape.value(flow.channels * flow.pixels)
    flow.tape.memory("enlarge", (x,), flow.value, 2 * flow.value.bytes, count=2)
    _pooled_level(flow, widths, halves=False)


_VIEW = "before"  # the layer whose output is the bird's-eye view


@dataclass(slots=True)
class _Wiring:
    """Adds layers that read outputs of any earlier layers."""

    net: NetworkBuilder
    outputs: dict[str, Picture]  # by layer
    readers: dict[str, list[str]] = field(default_factory=dict)  # of each layer's output, in the order they run

    def layer(self, name: str, step: Step, source: str, skip_from: str = "", **settings: object) -> str:
        """Add a layer that reads the output of ``source``, and perhaps of another layer; return its name."""
        self.net.go_back(self.outputs[source])
        self.net.block(step, name, "", **settings)
        self.outputs[name] = self.net.picture
        for producer in filter(None, (source, skip_from)):
            self.readers.setdefault(producer, []).append(name)
        return name

    def tensors(self, graph: ModelGraph) -> tuple[Passed, ...]:
        """Tensors between layers; the bird's-eye view is part of the batch, which each stage has."""
        sizes = {layer.name: graph.kind_of(layer).output_bytes for layer in graph.layers} | {_VIEW: 0}
        names = (layer.name for layer in graph.layers if layer.name in self.readers)
        return tuple(Passed(name, tuple(self.readers[name]), sizes[name]) for name in names)


def perception_graph(net: NetworkBuilder, shape: PerceptionShape) -> ModelGraph:
    """The levels of the segmentation network, those of the reconstruction network, and the loss of both outputs."""
    net.begin()
    wiring = _Wiring(net, {_VIEW: net.picture})
    for name in ("segmentation", "reconstruction"):
        wiring.readers[_network(wiring, shape, name)] = ["after"]
    graph = net.end(_loss)
    layers = tuple(
        replace(layer, modules=(layer.name,)) if layer.role is Role.BLOCK else layer for layer in graph.layers
    )
    dead: tuple[DeadParameters, ...] = ()
    if not shape.chained:  # all levels of the segmentation network except the finest are computed and dropped
        lower = range(1, shape.levels)
        names = [f"segmentation.{part}.{level}" for part in ("downs", "sides") for level in lower]
        names += [f"segmentation.ups.{level - 1}" for level in lower]
        items = {layer.name: graph.kind_of(layer).parameters.total for layer in graph.layers}
        dead = tuple(DeadParameters(name, items[name]) for name in names)
    notes = (*graph.notes, *dead_note(dead, graph.parameters, "what the model returns"))
    return replace(graph, layers=layers, tensors=wiring.tensors(graph), dead=dead, notes=notes)


def _network(wiring: _Wiring, shape: PerceptionShape, name: str) -> str:
    """Add a network's encoder and decoder; the segmentation network has skip connections. Returns its last layer."""
    below, sides, skips = _VIEW, list[str](), name == "segmentation"
    for level, width in enumerate(shape.widths):
        below = wiring.layer(f"{name}.downs.{level}", _down, below, width=width, kernel=3 if level else 1)
        if skips:
            sides.append(wiring.layer(f"{name}.sides.{level}", _view_unit, below, width=width))
    below = sides[-1] if skips else below
    for index, level in enumerate(reversed(range(shape.levels))):
        half, skip_from = shape.widths[level] // 2, (sides[level - 1] if level else _VIEW) if skips else ""
        below = wiring.layer(
            f"{name}.ups.{index}", _up, below if shape.chained or not skips else sides[level], skip_from,
            more=shape.sides[level] % 2, skip=(half if level else shape.channels) * skips,
            widths=(*(half,) * skips, half if level else 1), kernel=3 if level or not skips else 1,
        )  # fmt: skip
    return below


def _view_unit(flow: ImageFlow, width: int, kernel: int = 3) -> ImageFlow:
    """Convolution with bias, batch normalisation, leaky ReLU in place."""
    return flow.convolve(width, kernel, bias=True).normalise().activate()


def _down(flow: ImageFlow, width: int, kernel: int) -> None:
    _view_unit(_view_unit(flow, width, kernel), width).pool(2, 2, padding=0)


def _up(flow: ImageFlow, more: int, skip: int, widths: Sequence[int], kernel: int) -> None:
    """Transposed convolution to twice the size (and ``more`` pixels) and half the channels, skip connection,
    convolutions."""
    flow.transpose(flow.channels // 2, 2, 2 + more).normalise().activate()
    if skip:
        flow.concatenate_skip(skip)
    for index, width in enumerate(widths):
        _view_unit(flow, width, 3 if index else kernel)


def _loss(flow: ImageFlow) -> None:
    """Differences of both networks' pictures from their targets, and of the edges of both.

    The segmentation network's picture is the reconstruction network's target. Under autocast each kind of difference
    (MSE, smooth L1) has its own copies in fp32.
    """
    tape, rebuilt = flow.tape, flow.value
    segmented = tape.value(rebuilt.items)
    targets, aim = tape.value(rebuilt.items, item_bytes=FP32, grad=False), replace(segmented, grad=False)
    height, width = flow.extent
    inner = (height - 2) * (width - 2)
    for picture, target in ((segmented, targets), (rebuilt, aim)):
        edges = [_edges(tape, value, inner) for value in (picture, target)]
        for first, second in ((picture, target), edges):
            saved = [value for _ in range(2) for value in map(tape.widened, (first, second))]
            loss, moved = tape.value(1), 4 * first.bytes
            flow.value = tape.memory(
                "loss", (first, second), loss, moved, 2 * moved, like=first, saved=tuple(saved), count=2
            )


def _edges(tape: Tape, picture: Value, inner: int) -> Value:
    """Sobel edges: sums of neighbours along both sides, slopes across them, and their length at ``inner`` pixels.

    Slopes and lengths are kept if the picture takes a gradient.
    """
    sizes = (2 * picture.items, 2 * inner, inner)
    sums, slopes, steep = (tape.value(items, Sharding.NONE, picture.item_bytes, picture.grad) for items in sizes)
    back = 16 * picture.bytes * picture.grad
    tape.memory("sums", (picture,), sums, 16 * picture.bytes, back, like=picture, count=6)
    tape.memory("slopes", (sums,), slopes, 5 * slopes.bytes, 5 * steep.bytes, count=3)
    saved = (slopes, steep) if picture.grad else ()
    return tape.memory("edges", (slopes,), steep, 3 * steep.bytes, 9 * steep.bytes * picture.grad, saved=saved)


def _narrow(flow: ImageFlow, stride: int, kernels: tuple[Extent, ...]) -> ImageFlow:
    """Convolutions at a quarter of the channels between two 1 x 1 ones; the first of them has the stride."""
    channels = flow.channels
    _unit(flow, channels // 4, (1, 1))
    for index, kernel in enumerate(kernels):
        _unit(flow, channels // 4, kernel, 1 if index else stride)
    return _unit(flow, channels, (1, 1))


def _unit(flow: ImageFlow, out: int, kernel: Extent, stride: int = 1) -> ImageFlow:
    return flow.rectify().convolve(out, kernel, stride, padding=None if kernel != (1, 1) else 0).normalise()


_OPERATIONS: dict[str, Callable[[ImageFlow, int], ImageFlow]] = {
    "none": lambda flow, _: flow,
    "conv": lambda flow, stride: _unit(flow, flow.channels, (1, 1), stride),
    "conv3": lambda flow, stride: _narrow(flow, stride, ((3, 3),)),
    "conv7": lambda flow, stride: _narrow(flow, stride, ((1, 7), (7, 1))),
    "mean": lambda flow, stride: flow.pool(3, stride, maximum=False),
    "max": lambda flow, stride: flow.pool(2, stride, padding=0),
}
_NORMAL = (
    ((1, "conv"), (1, "mean")), ((1, "none"), (0, "conv7")), ((0, "conv"), (0, "conv7")), ((2, "mean"), (2, "none")),
    ((1, "mean"), (5, "conv")),
)  # fmt: skip
_REDUCTION = (
    ((0, "max"), (0, "mean")), ((2, "none"), (1, "conv3")), ((2, "conv7"), (2, "mean")), ((3, "none"), (1, "max")),
    ((2, "mean"), (3, "conv")),
)  # fmt: skip
"""Pairs of operations whose results are summed into a new state, each with the index of its input (3 x 3 maxima are
means in torchgpipe's port)."""


def evolved_graph(net: NetworkBuilder, layers: str, filters: str) -> ModelGraph:
    """Stem, two reduction cells, three rows of normal cells with reduction cells between them, classifier.

    Every output goes to the two cells after it; the classifier takes the last one's alone.
    """
    normal, channels = [False] * (int(layers) // 3), int(filters) // 4
    net.autocast = False
    width = channels
    net.stem(lambda flow: flow.rectify().convolve(width, 3, 2).normalise())
    names, pictures = ["before"], [net.picture]
    for reduction in (True, True, *normal, True, *normal, True, *normal):
        channels *= 2 if reduction else 1
        before = pictures[-2] if len(pictures) > 1 else None
        names.append(
            net.block(_cell, f"cells.{len(net.layers)}", before=before, channels=channels, reduction=reduction)
        )
        pictures.append(net.picture)

    def classifier(flow: ImageFlow) -> None:
        """The mean of all pixels by a window of their extent."""
        _enter(flow, pictures[-2])
        compare(flow.pool(flow.extent[0], flow.extent[0], maximum=False, padding=0).linear(1000))

    graph = net.end(classifier)
    readers = [tuple(names[index + 1 : index + 3]) or ("after",) for index in range(len(names))]
    sizes = [_items(picture) * activation_bytes(net.precision) for picture in pictures]
    return replace(graph, tensors=tuple(map(Passed, names, readers, sizes)))


def _items(picture: Picture) -> int:
    channels, extent, _ = picture
    return channels * prod(extent)


def _enter(flow: ImageFlow, picture: Picture) -> ImageFlow:
    """Another picture that enters the layer."""
    return ImageFlow(flow.tape, flow.tape.enter(_items(picture), Sharding.NONE), *picture[:2])


def _cell(flow: ImageFlow, before: Picture | None, channels: int, reduction: bool) -> None:
    """Apply one cell.

    Args:
        flow: output of the previous cell.
        before: output of the cell before that; the same tensor if None.
        channels: of the cell's states.
        reduction: whether the cell halves the picture.
    """
    flow.passed = (flow.value,)
    extent = flow.extent
    skipped = _enter(flow, before) if before else flow.fork()
    states = [_unit(flow.fork(), channels, (1, 1)), _fitted(skipped, extent, channels)]
    for pair in _REDUCTION if reduction else _NORMAL:
        first, second = (
            _OPERATIONS[kind](states[source].fork(), 2 if reduction and source < 2 else 1) for source, kind in pair
        )
        states.append(first.add(second))
    chosen = (4, 5, 6) if reduction else (0, 3, 4, 6)
    out = states[chosen[0]].fork().concatenate(*(states[index] for index in chosen[1:]))
    flow.value, flow.channels, flow.extent = out.value, out.channels, out.extent


def _fitted(before: ImageFlow, extent: Extent, channels: int) -> ImageFlow:
    """The output two cells back at the cell's channels and extent; halved by two 1 x 1 convolutions side by side."""
    if before.extent != extent:
        before.rectify()
        other = before.fork().mix("shift", (2, 2), keeps=False)
        halves = [half.convolve(channels // 2, 1, 2) for half in (before.fork(), other)]
        return halves[0].concatenate(halves[1]).normalise()
    return before if before.channels == channels else _unit(before, channels, (1, 1))
