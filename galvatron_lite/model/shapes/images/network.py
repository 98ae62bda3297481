"""Layers of an image network one after the other, equal ones of one kind, made into a ``ModelGraph``. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Role, SplitDims
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.assemble import assemble
from galvatron_lite.model.shapes.calls import Part
from galvatron_lite.model.shapes.convolution import Extent, global_pool
from galvatron_lite.model.shapes.images.flow import Flow
from galvatron_lite.model.shapes.tape import Tape

_REASON = "A convolutional block has no pair of column-split and row-split matmuls."
Step = Callable[..., object]
"""Passes a ``Flow`` through a layer's operators: ``step(flow, **settings)``."""


@dataclass(slots=True)
class Network:
    """Layers of a network as they are added; a builder, used once.

    Attributes:
        name: for people.
        item_bytes: of activations.
        channels: of the picture as it stands.
        extent: of the picture as it stands.
        kinds: of the layers so far, by what makes them equal.
        layers: between stem and head, in the order they run.
    """

    name: str
    item_bytes: int
    channels: int
    extent: Extent
    kinds: dict[tuple[object, ...], tuple[LayerKind, int, Extent]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)

    def stem(self, step: Step, **settings: object) -> None:
        """The first layer; no gradient flows to the picture that enters it."""
        self._add("before", step, settings, grad=False)

    def block(self, step: Step, **settings: object) -> None:
        """One more layer; equal to an earlier one where its step, settings and picture are."""
        kind = self._add("", step, settings, grad=True)
        self.layers.append(Layer(f"blocks.{len(self.layers)}", kind.name, Role.BLOCK))

    def _add(self, name: str, step: Step, settings: dict[str, object], *, grad: bool) -> LayerKind:
        key = (step, self.channels, self.extent, *settings.items())
        if key not in self.kinds:
            self.kinds[key] = self._made(name or f"block{len(self.kinds)}", step, settings, grad)
        kind, self.channels, self.extent = self.kinds[key]
        return kind

    def _made(self, name: str, step: Step, settings: dict[str, object], grad: bool) -> tuple[LayerKind, int, Extent]:
        tape = Tape(self.item_bytes)
        x = tape.enter(self.channels * self.extent[0] * self.extent[1], Part.WHOLE, grad=grad)
        flow = Flow(tape, x, self.channels, self.extent)
        step(flow, **settings)
        return self._kind(flow, name), flow.channels, flow.extent

    def _kind(self, flow: Flow, name: str) -> LayerKind:
        dims = SplitDims(
            in_channels=self.channels, out_channels=flow.channels, height=self.extent[0], width=self.extent[1]
        )
        block = name not in ("before", "after")
        return flow.tape.kind(name, (flow.value,), dims, tensor_reason=_REASON, recomputed=block)

    def finish(self, classes: int, precision: str, step: Step | None = None, **settings: object) -> ModelGraph:
        """The graph, closed by a head: ``step``, mean of all pixels, linear classifier and loss.

        Args:
            classes: outputs of the head.
            precision: of activations.
            step: operators before the mean (a last convolution); None: none.
            settings: of the step.
        """
        tape = Tape(self.item_bytes)
        flow = Flow(tape, tape.enter(self.channels * self.extent[0] * self.extent[1], Part.WHOLE), self.channels,
                    self.extent)  # fmt: skip
        if step is not None:
            step(flow, **settings)
        if flow.pixels > 1:
            flow.value, flow.extent = global_pool(tape, "pool", flow.value, flow.channels), (1, 1)
        logits = flow.linear(classes).value
        flow.value = ops.cross_entropy(tape, "loss", logits, tape.labels(1))
        kinds = [kind for kind, _, _ in self.kinds.values()]
        return assemble(self.name, [*kinds, self._kind(flow, "after")], self.layers, sequence=1, precision=precision)
