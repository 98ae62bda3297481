"""Layers of an image network one after the other, equal ones of one kind, made into a ``ModelGraph``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Role, SplitDims
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble
from galvatron_lite.model.shapes.calls import Division
from galvatron_lite.model.shapes.convolution import Extent, global_pool, handed_on
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.tape import Tape
from galvatron_lite.model.sides import SIDES

_REASON = "A convolutional block has no pair of column-split and row-split matmuls."
Step = Callable[..., object]
"""Passes a ``ImageFlow`` through a layer's operators: ``step(flow, **settings)``."""
_Picture = tuple[int, Extent, int, bool]
"""Channels, extent, bytes of an item, and whether it is kept already."""
Place = tuple[int, Extent, int, bool]
"""A picture on its way: channels, extent, bytes of an item, and whether it is the batch's."""


def _nothing(_: ImageFlow) -> None:
    """No operator."""


@dataclass(slots=True)
class NetworkBuilder:
    """Layers of a network as they are added; a builder, used once."""

    name: str  # for people
    item_bytes: int  # of activations
    channels: int  # of the picture as it stands
    extent: Extent  # of the picture as it stands
    # of the layers so far, by what makes them equal
    kinds: dict[tuple[object, ...], tuple[LayerKind, _Picture]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)  # between stem and head, in the order they run
    wide: int = 0  # bytes of an item of the picture as it stands
    held: bool = False  # whether the picture as it stands is kept for the backward pass of the layer that made it
    # below fp32 pictures come and weights stay in fp32, and are cast; else all is in one precision
    autocast: bool = True
    given: bool = False  # whether the picture as it stands is the batch's, which takes no gradient

    def begin(self) -> None:
        """Nothing before the blocks: the first of them takes the batch's picture."""
        self._add("before", _nothing, {}, grad=False)
        self.given = True

    def stem(self, step: Step, **settings: object) -> None:
        """The first layer; no gradient flows to the picture that enters it."""
        self._add("before", step, settings, grad=False)

    def block(self, step: Step, at: str = "", **settings: object) -> None:
        """One more layer; equal to an earlier one where its step, settings and picture are."""
        kind = self._add("", step, settings, grad=not self.given)
        self.given = False
        self.layers.append(Layer(at or f"blocks.{len(self.layers)}", kind.name, Role.BLOCK))

    @property
    def place(self) -> Place:
        """The picture as it stands, to go on from later."""
        return self.channels, self.extent, self.wide, self.given

    def go_on(self, place: Place) -> None:
        """Let the next layer take a picture of before, which counts there where it is kept."""
        self.channels, self.extent, self.wide, self.given = place
        self.held = False

    def _add(self, name: str, step: Step, settings: dict[str, object], *, grad: bool) -> LayerKind:
        key = (step, grad, self.channels, self.extent, self.wide, self.held, *settings.items())
        if key not in self.kinds:
            self.kinds[key] = self._build(name or f"block{len(self.kinds)}", step, settings, grad)
        kind, picture = self.kinds[key]
        self.channels, self.extent, self.wide, self.held = picture
        return kind

    def _build(self, name: str, step: Step, settings: dict[str, object], grad: bool) -> tuple[LayerKind, _Picture]:
        flow = self._enter(grad)
        step(flow, **settings)
        kind, held = handed_on(self._kind(flow, name), flow.value, flow.tape)
        return kind, (flow.channels, flow.extent, flow.value.item_bytes, held)

    def _enter(self, grad: bool) -> ImageFlow:
        """The picture at the beginning of a layer; under mixed precision the network's own is cast from fp32."""
        tape = Tape(self.item_bytes)
        items = self.channels * prod(self.extent)
        x = tape.enter(items, Division.WHOLE, self.wide, grad=grad)
        if self.held:
            tape.keep(x)
        if not grad and self.autocast and self.item_bytes < ops.FP32:
            tape.keep(tape.value(items, Division.WHOLE, ops.FP32, grad=False))
        return ImageFlow(tape, x, self.channels, self.extent)

    def _kind(self, flow: ImageFlow, name: str) -> LayerKind:
        named = dict(zip(SIDES[-len(self.extent) :], self.extent, strict=True))
        dims = SplitDims(in_channels=self.channels, out_channels=flow.channels, **named)
        block, tape = name not in ("before", "after"), flow.tape
        if self.autocast and self.item_bytes < ops.FP32:
            # mixed precision keeps the weights' half-precision copies from forward to backward, whatever the batch
            tape.buffer_bytes += self.item_bytes * tape.weights[Division.WHOLE]
        return tape.kind(name, (flow.value,), dims, tensor_reason=_REASON, recomputed=block)

    def finish(self, classes: int, precision: str, step: Step | None = None, **settings: object) -> ModelGraph:
        """The graph, closed by a head: ``step``, mean of all pixels, linear classifier and loss."""

        def head(flow: ImageFlow) -> None:
            if step is not None:
                step(flow, **settings)
            classify(flow, classes)

        return self.end(precision, head)

    def end(self, precision: str, step: Step, **settings: object) -> ModelGraph:
        """The graph, closed by a step that ends in a loss."""
        flow = self._enter(grad=True)
        step(flow, **settings)
        kinds = [kind for kind, _ in self.kinds.values()]
        return assemble(self.name, [*kinds, self._kind(flow, "after")], self.layers, sequence=1, precision=precision)


def classify(flow: ImageFlow, classes: int) -> None:
    """Mean of all pixels, linear classifier, cross-entropy."""
    if flow.pixels > 1:
        flow.value = global_pool(flow.tape, "pool", flow.value, flow.channels)
        flow.extent = (1,) * len(flow.extent)
    flow.linear(classes)
    compare(flow)


def compare(flow: ImageFlow) -> None:
    """Cross-entropy of what stands at every pixel."""
    flow.value = ops.cross_entropy(flow.tape, "loss", flow.value, flow.tape.labels(flow.pixels))
