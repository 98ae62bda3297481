"""Pairs of encoder and decoder: U-Nets of pictures and volumes, the perception network.

U-Net (Ronneberger et al. 2015, arXiv:1505.04597) as torchgpipe trains it (Kim et al. 2020, arXiv:2004.09910).

Sources: Ronneberger et al. 2015 (arXiv:1505.04597, figure 1: 572 x 572, convolutions without padding); Isensee et al.
2021 (nnU-Net; plans of BraTS as NVIDIA's DeepLearningExamples train them: patches of 192 x 160 and of 128^3, 32
channels doubled to at most 512 and 320, strided convolutions on the way down, instance normalisation).

Sah and Chinara 2024 (arXiv:2412.18165), as the reference model (``model.zoo.perception``) has them: layers are the
levels of each network's way down and up, and the convolutions through which pictures go across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from galvatron_lite.model.dead import dead_note
from galvatron_lite.model.graph import DeadParameters, ModelGraph, Passed, Role
from galvatron_lite.model.shapes.assemble import with_skips
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, Place, Step, compare
from galvatron_lite.model.shapes.picture_fields import PerceptionShape
from galvatron_lite.model.shapes.tape import Tape, memory_operator

LEVELS = 5  # halvings of the picture


def mirrored_graph(name: str, convolutions: int, base: int, side: int, precision: str, item_bytes: int) -> ModelGraph:
    """Levels that halve the picture and double its channels, the way back with the pictures kept on the way down."""
    net = NetworkBuilder(name, item_bytes, 3, (side, side))
    widths = [base * 2**level for level in range(LEVELS)]
    net.stem(_level, inner=base, out=base, count=convolutions, halve=True)
    kept = [("before", _pictured(net))]
    for width in widths[1:]:
        net.block(_level, inner=width, out=width, count=convolutions, halve=True)
        kept.append((net.layers[-1].name, _pictured(net)))
    net.block(_level, inner=2 * widths[-1], out=widths[-1], count=convolutions, halve=False)
    skips = []
    for width in reversed(widths):
        net.block(_climb, skip=width, out=width // 2, count=convolutions)
        producer, size = kept.pop()
        skips.append(Passed(producer, (net.layers[-1].name,), size))
    return with_skips(net.finish(1, precision), skips)


def _pictured(net: NetworkBuilder) -> int:
    """Bytes of the picture before the pooling that the last level ended with."""
    return net.channels * 4 * net.extent[0] * net.extent[1] * (net.wide or net.item_bytes)


def _level(flow: ImageFlow, inner: int, out: int, count: int, halve: bool) -> None:
    """So many convolutions, then maximum pooling; the picture before it is what the way back takes."""
    for index in range(count):
        _unit(flow, out if index == count - 1 else inner)
    if halve:
        flow.pool(2, 2, padding=0)


def _climb(flow: ImageFlow, skip: int, out: int, count: int) -> None:
    """Every pixel four times, the picture of the same extent on the way down beside it, convolutions."""
    flow.extent = (2 * flow.extent[0], 2 * flow.extent[1])
    flow.enlarge(skip)
    _level(flow, out, out, count, halve=False)


def _unit(flow: ImageFlow, out: int) -> None:
    """Convolution, dropout of whole channels, normalisation of each sample, leaky ReLU: each into a new tensor."""
    flow.convolve(out, 3).mix("dropout", (2, 2), keeps=False).mix("norm", (3, 5)).mix("relu", (2, 3))


@dataclass(frozen=True, slots=True)
class Medical:
    """One such network."""

    inputs: int  # channels of the picture
    extent: tuple[int, ...]  # pixels along its sides
    widths: tuple[int, ...]  # channels of each level, the lowest last
    classes: int  # of a pixel
    padded: bool = True  # whether convolutions keep the extent
    strided: bool = True  # whether a convolution halves the picture, else maximum pooling before it
    norm: bool = True  # whether normalisation follows every convolution


MEDICAL = {
    "unet_medical": Medical(1, (572, 572), (64, 128, 256, 512, 1024), 2, padded=False, strided=False, norm=False),
    "nnunet_2d": Medical(4, (192, 160), (32, 64, 128, 256, 512, 512), 4),
    "nnunet_3d": Medical(4, (128, 128, 128), (32, 64, 128, 256, 320, 320), 4),
}
"""By the names of published runs."""


def medical_graph(name: str, spec: Medical, precision: str, item_bytes: int) -> ModelGraph:
    """Levels down and up again; each picture on the way down goes to its neighbour on the way up."""
    net = NetworkBuilder(name, item_bytes, spec.inputs, spec.extent)
    net.stem(_medical_level, spec=spec, width=spec.widths[0], halves=False)
    kept = [("before", net.channels, net.extent)]
    for width in spec.widths[1:]:
        net.block(_medical_level, spec=spec, width=width, halves=True)
        kept.append((net.layers[-1].name, net.channels, net.extent))
    kept.pop()
    skips = []
    for producer, width, extent in reversed(kept):
        net.block(_medical_climb, spec=spec, width=width)
        skips.append(Passed(producer, (net.layers[-1].name,), width * prod(extent) * item_bytes))
    return with_skips(net.end(precision, _classes, spec=spec), skips)


def _medical_level(flow: ImageFlow, spec: Medical, width: int, halves: bool) -> None:
    if halves and not spec.strided:
        flow.pool(2, 2, padding=0)
    for index in range(2):
        _medical_unit(flow, spec, width, 2 if halves and spec.strided and not index else 1)


def _medical_unit(flow: ImageFlow, spec: Medical, width: int, stride: int = 1) -> None:
    flow.convolve(width, 3, stride, bias=not spec.norm, padding=None if spec.padded else 0)
    (flow.normalise() if spec.norm else flow).activate()


def _medical_climb(flow: ImageFlow, spec: Medical, width: int) -> None:
    """The picture at twice the size, that of the way down (its middle, where that is larger) before it."""
    flow.double(width).beside(width)
    for _ in range(2):
        _medical_unit(flow, spec, width)


def _classes(flow: ImageFlow, spec: Medical) -> None:
    compare(flow.convolve(spec.classes, bias=True))


_VIEW = "before"  # what gives the bird's-eye view


@dataclass(slots=True)
class _Wired:
    """A network whose layers read what layers of any place before them gave; a builder, used once."""

    net: NetworkBuilder  # the layers so far
    places: dict[str, Place] = field(default_factory=dict)  # what each layer gave
    readers: dict[str, list[str]] = field(default_factory=dict)  # of what each layer gave, in the order they run

    def layer(self, name: str, step: Step, source: str, beside: str = "", **settings: object) -> str:
        """A layer that reads what one gave, and what another one gave beside it. Returns its name."""
        self.net.go_on(self.places[source])
        self.net.block(step, name, **settings)
        self.places[name] = self.net.place
        for one in filter(None, (source, beside)):
            self.readers.setdefault(one, []).append(name)
        return name

    def tensors(self, graph: ModelGraph) -> tuple[Passed, ...]:
        """What goes from layer to layer; the bird's-eye view is the batch's, which every stage has."""
        made = (layer for layer in graph.layers if layer.name in self.readers)
        sizes = {layer.name: graph.kind_of(layer).output_bytes for layer in graph.layers} | {_VIEW: 0}
        return tuple(Passed(layer.name, tuple(self.readers[layer.name]), sizes[layer.name]) for layer in made)


def perception_graph(shape: PerceptionShape, precision: str, item_bytes: int) -> ModelGraph:
    """Both networks' levels, the segmentation network's first, and the loss, which reads what both give."""
    extent = (shape.image_size,) * 2
    net = NetworkBuilder(shape.name, item_bytes, shape.channels, extent, autocast=False)
    net.begin()
    wired = _Wired(net, {_VIEW: net.place})
    for last in (_segmentation(wired, shape), _reconstruction(wired, shape)):
        wired.readers[last] = ["after"]
    graph = net.end(precision, _loss)
    layers = tuple(replace(one, modules=(one.name,)) if one.role is Role.BLOCK else one for one in graph.layers)
    dead = () if shape.chained else _dropped(graph, shape)
    notes = (*graph.notes, *dead_note(dead, graph.parameters, "what the model returns"))
    return replace(graph, layers=layers, tensors=wired.tensors(graph), dead=dead, notes=notes)


def _dropped(graph: ModelGraph, shape: PerceptionShape) -> tuple[DeadParameters, ...]:
    """Levels of the segmentation network that are computed and dropped: all but the finest."""
    lower = range(1, shape.levels)
    names = [f"segmentation.{part}.{level}" for part in ("downs", "sides") for level in lower]
    names += [f"segmentation.ups.{level - 1}" for level in lower]
    items = {layer.name: graph.kind_of(layer).parameters.total for layer in graph.layers}
    return tuple(DeadParameters(name, items[name]) for name in names)


def _segmentation(wired: _Wired, shape: PerceptionShape) -> str:
    below, sides = _VIEW, list[str]()
    for level, width in enumerate(shape.widths):
        below = wired.layer(f"segmentation.downs.{level}", _down, below, width=width, kernel=3 if level else 1)
        sides.append(wired.layer(f"segmentation.sides.{level}", _side, below))
    below = sides[-1]
    for place, level in enumerate(reversed(range(shape.levels))):
        half = shape.widths[level] // 2
        below = wired.layer(
            f"segmentation.ups.{place}", _up, below if shape.chained else sides[level],
            sides[level - 1] if level else _VIEW, more=shape.sides[level] % 2,
            skip=half if level else shape.channels, widths=(half, half if level else 1), kernel=3 if level else 1,
        )  # fmt: skip
    return below


def _reconstruction(wired: _Wired, shape: PerceptionShape) -> str:
    below = _VIEW
    for level, width in enumerate(shape.widths):
        below = wired.layer(f"reconstruction.downs.{level}", _down, below, width=width, kernel=3 if level else 1)
    for place, level in enumerate(reversed(range(shape.levels))):
        widths = (shape.widths[level] // 2 if level else 1,)
        more = shape.sides[level] % 2
        below = wired.layer(f"reconstruction.ups.{place}", _up, below, more=more, skip=0, widths=widths, kernel=3)
    return below


def _view_unit(flow: ImageFlow, width: int, kernel: int = 3) -> ImageFlow:
    """Convolution with bias, batch normalisation, leaky ReLU in place."""
    return flow.convolve(width, kernel, bias=True).normalise().activate()


def _down(flow: ImageFlow, width: int, kernel: int) -> None:
    _view_unit(_view_unit(flow, width, kernel), width).pool(2, 2, padding=0)


def _side(flow: ImageFlow) -> None:
    _view_unit(flow, flow.channels)


def _up(flow: ImageFlow, more: int, skip: int, widths: Sequence[int], kernel: int) -> None:
    """Twice the size (and a pixel more) with half of the channels, another picture beside, convolutions."""
    flow.double(flow.channels // 2, more).normalise().activate()
    if skip:
        flow.beside(skip)
    for place, width in enumerate(widths):
        _view_unit(flow, width, 3 if place else kernel)


def _loss(flow: ImageFlow) -> None:
    """Differences of both networks' pictures from what they should be, and of their edges; what the first one gives is
    what the second one should."""
    tape, rebuilt = flow.tape, flow.value
    segmented = tape.value(rebuilt.items, Division.WHOLE)
    targets, aim = (replace(value, grad=False) for value in (tape.value(rebuilt.items, Division.WHOLE), segmented))
    height, width = flow.extent
    inner = (height - 2) * (width - 2)
    for given, wanted in ((segmented, targets), (rebuilt, aim)):
        steep = [_edges(tape, picture, inner) for picture in (given, wanted)]
        for one, other in ((given, wanted), steep):
            flow.value = _difference(tape, one, other)


def _edges(tape: Tape, picture: Value, inner: int) -> Value:
    """Sums of neighbours along both sides, slopes across them, the slopes' length at so many pixels; the latter two are
    kept where the picture is trained."""
    sizes = (2 * picture.items, 2 * inner, inner)
    sums, slopes, steep = (tape.value(items, Division.WHOLE, grad=picture.grad) for items in sizes)
    back = 16 * picture.bytes * picture.grad
    tape.record(ShapeCall((picture,), sums), memory_operator("sums", picture, 16 * picture.bytes, back, count=6))
    tape.record(
        ShapeCall((sums,), slopes), memory_operator("slopes", slopes, 5 * slopes.bytes, 5 * steep.bytes, count=3)
    )
    length = memory_operator("edges", steep, 3 * steep.bytes, 9 * steep.bytes * picture.grad)
    return tape.record(ShapeCall((slopes,), steep, saved=(slopes, steep) if picture.grad else ()), length)


def _difference(tape: Tape, one: Value, other: Value) -> Value:
    """Mean squared and smooth absolute difference; both pictures are kept."""
    loss = tape.value(1, Division.WHOLE)
    operator = memory_operator("loss", one, 4 * one.bytes, 8 * one.bytes, count=2)
    return tape.record(ShapeCall((one, other), loss, saved=(one, other)), operator)
