"""The perception network from its shape: two encoder-decoders side by side.

Sah and Chinara 2024 (arXiv:2412.18165), as the reference model (``model.zoo.perception``) has them: layers are the
levels of each network's way down and up, and the convolutions through which pictures go across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.model.dead import dead_note
from galvatron_lite.model.graph import DeadParameters, ModelGraph, Passed, Role
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, Place, Step
from galvatron_lite.model.shapes.picture_fields import PerceptionShape
from galvatron_lite.model.shapes.tape import Tape, memory_operator

_VIEW = "before"
"""What gives the bird's-eye view."""


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


def _unit(flow: ImageFlow, width: int, kernel: int = 3) -> ImageFlow:
    """Convolution with bias, batch normalisation, leaky ReLU in place."""
    return flow.convolve(width, kernel, bias=True).normalise().activate()


def _down(flow: ImageFlow, width: int, kernel: int) -> None:
    _unit(_unit(flow, width, kernel), width).pool(2, 2, padding=0)


def _side(flow: ImageFlow) -> None:
    _unit(flow, flow.channels)


def _up(flow: ImageFlow, more: int, skip: int, widths: Sequence[int], kernel: int) -> None:
    """Twice the size (and a pixel more) with half of the channels, another picture beside, convolutions."""
    flow.double(flow.channels // 2, more).normalise().activate()
    if skip:
        flow.beside(skip)
    for place, width in enumerate(widths):
        _unit(flow, width, 3 if place else kernel)


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
