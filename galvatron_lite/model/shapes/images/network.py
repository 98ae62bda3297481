"""Builds the ``ModelGraph`` of an image network layer by layer; equal layers share a kind.

Tensor parallelism is not offered: convolutional blocks have no pair of column-split and row-split matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Recompute, Role, Sharding, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.images.flow import Extent, ImageFlow
from galvatron_lite.model.shapes.records import FP32, Value
from galvatron_lite.model.shapes.tape import Tape, assemble
from galvatron_lite.model.sides import SIDES
from galvatron_lite.units import activation_bytes

NOT_SPLIT = "A convolutional block has no pair of column-split and row-split matmuls."
Step = Callable[..., object]
"""Applies a layer's operators to an ``ImageFlow``: ``step(flow, **settings)``."""
Picture = tuple[int, Extent, bool]
"""A picture between layers: channels, extent, and whether it is part of the batch, so that it takes no gradient."""


@dataclass(slots=True)
class NetworkBuilder:
    """Collects the layers of a network; used once."""

    name: str  # for people
    precision: str  # of activations and compute
    channels: int  # of the current picture
    extent: Extent  # of the current picture
    kernels: Kernels = EAGER
    autocast: bool = True  # whether pictures and weights are fp32 and cast to a lower precision where they are used
    # kind and output picture of the layers so far, by what makes layers equal
    kinds: dict[tuple[object, ...], tuple[LayerKind, int, Extent, bool]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)  # between stem and head, in the order they run
    held: bool = False  # whether the layer that made the current picture keeps it for backward
    of_batch: bool = False  # whether the current picture is part of the batch, so that it takes no gradient

    def begin(self) -> None:
        """Begin with an empty stem: the first block takes the picture of the batch."""
        self.stem(lambda _: None)
        self.of_batch = True

    def stem(self, step: Step, **settings: object) -> None:
        """Add the first layer; no gradient flows to its input."""
        self._add("before", step, settings, grad=False)

    def block(self, step: Step, name: str = "", kind: str = "", **settings: object) -> str:
        """Add a layer and return its name; layers of equal step, settings and input share a kind."""
        added = self._add(kind, step, settings, grad=not self.of_batch)
        self.of_batch = False
        self.layers.append(Layer(name or f"blocks.{len(self.layers)}", added.name, Role.BLOCK))
        return self.layers[-1].name

    @property
    def picture(self) -> Picture:
        """The current picture."""
        return self.channels, self.extent, self.of_batch

    def go_back(self, picture: Picture) -> None:
        """Let the next layer take an earlier picture; if that is kept, it counts with the next layer."""
        self.channels, self.extent, self.of_batch = picture
        self.held = False

    def _add(self, name: str, step: Step, settings: dict[str, object], *, grad: bool) -> LayerKind:
        key = (name, step, grad, self.channels, self.extent, self.held, *settings.items())
        if key not in self.kinds:
            flow = self._enter(grad)
            step(flow, **settings)
            kind, held = without_output(self._kind(flow, name or f"block{len(self.kinds)}"), flow.value, flow.tape)
            self.kinds[key] = kind, flow.channels, flow.extent, held
        kind, self.channels, self.extent, self.held = self.kinds[key]
        return kind

    def _enter(self, grad: bool) -> ImageFlow:
        """The picture that enters a layer; under autocast the network's input is cast from fp32."""
        tape = Tape(activation_bytes(self.precision), self.kernels)
        x = tape.enter(self.channels * prod(self.extent), Sharding.NONE, grad=grad)
        if self.held:
            tape.keep(x)
        if not grad and self.autocast and tape.item_bytes < FP32:
            tape.keep(tape.value(x.items, item_bytes=FP32, grad=False))
        return ImageFlow(tape, x, self.channels, self.extent)

    def _kind(self, flow: ImageFlow, name: str) -> LayerKind:
        tape = flow.tape
        sides = dict(zip(SIDES[-len(self.extent) :], self.extent, strict=True))
        dims = SplitDims(in_channels=self.channels, out_channels=flow.channels, **sides)
        if (self.autocast or self.kernels.autocast) and tape.item_bytes < FP32:
            # copies of weights in half precision, kept from forward to backward whatever the batch
            tape.buffer_bytes += tape.item_bytes * tape.weights[Sharding.NONE]
        recomputed = name not in ("before", "after")
        return tape.kind(name, (flow.value, *flow.passed), dims, tensor_reason=NOT_SPLIT, recomputed=recomputed)

    def end(self, step: Step, **settings: object) -> ModelGraph:
        """Add the last layer, which ends in a loss, and return the graph."""
        flow = self._enter(grad=True)
        step(flow, **settings)
        kinds = [*(kind for kind, *_ in self.kinds.values()), self._kind(flow, "after")]
        return assemble(self.name, kinds, self.layers, sequence=1, precision=self.precision)


def without_output(kind: LayerKind, output: Value, tape: Tape) -> tuple[LayerKind, bool]:
    """Move a layer's output from what it keeps to its working memory; return the kind, and whether it kept the output.

    An activation in place at a layer's end keeps its output, which the next layer's first convolution keeps too: the
    tensor counts once, with the layer that it enters (``Tape.keep``). Selective recomputation that would keep more than
    none is not offered (see ``Tape``).
    """
    if not any(value.key == output.key for call, _ in tape.records for value in call.saved):
        return kind, False
    none = kind.kept[Recompute.NONE]
    left = replace(none, whole=none.whole - output.held)
    kept = {choice: size for choice, size in kind.kept.items() if size.total <= left.total or choice is Recompute.FULL}
    working, forward = (replace(live, whole=live.whole + output.held) for live in (kind.working, kind.forward_working))
    return replace(kind, kept=kept | {Recompute.NONE: left}, working=working, forward_working=forward), True


def classify(flow: ImageFlow, classes: int = 1000, prepare: Step | None = None) -> None:
    """Apply ``prepare``, the mean over all pixels, a linear classifier and cross-entropy."""
    if prepare:
        prepare(flow)
    if flow.pixels > 1:
        flow.mean()
    compare(flow.linear(classes))


def compare(flow: ImageFlow) -> None:
    """Cross-entropy of the values at each pixel."""
    flow.value = ops.cross_entropy(flow.tape, "loss", flow.value, flow.tape.labels(flow.pixels))
