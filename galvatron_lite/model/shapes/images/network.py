"""Layers of an image network one after the other, equal ones of one kind, made into a ``ModelGraph``.

Tensor parallelism is not offered: convolutional blocks have no pair of column-split and row-split matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Passed, Recompute, Role, SplitDims
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.images.flow import Extent, ImageFlow
from galvatron_lite.model.shapes.records import FP32, Division, Value
from galvatron_lite.model.shapes.tape import Tape, assemble
from galvatron_lite.model.sides import SIDES
from galvatron_lite.units import activation_bytes

NOT_SPLIT = "A convolutional block has no pair of column-split and row-split matmuls."
Step = Callable[..., object]
"""Passes an ``ImageFlow`` through a layer's operators: ``step(flow, **settings)``."""
Place = tuple[int, Extent, bool]
"""A picture between layers: channels, extent, and whether it is the batch's, which takes no gradient."""


@dataclass(slots=True)
class NetworkBuilder:
    """Layers of a network as they are added; used once."""

    name: str  # for people
    precision: str  # of activations and compute
    channels: int  # of the current picture
    extent: Extent  # of the current picture
    kernels: Kernels = EAGER
    # below fp32 pictures come and weights stay in fp32, and are cast; else all is in one precision
    autocast: bool = True
    # of the layers so far, by what makes them equal: the kind, and the picture after it
    kinds: dict[tuple[object, ...], tuple[LayerKind, int, Extent, bool]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)  # between stem and head, in the order they run
    held: bool = False  # whether the current picture is kept for the backward pass of the layer that made it
    of_batch: bool = False  # whether the current picture is the batch's, which takes no gradient

    def begin(self) -> None:
        """Nothing before the blocks: the first of them takes the batch's picture."""
        self.stem(lambda _: None)
        self.of_batch = True

    def stem(self, step: Step, **settings: object) -> None:
        """The first layer; no gradient flows to the picture that enters it."""
        self._add("before", step, settings, grad=False)

    def block(self, step: Step, at: str = "", kind: str = "", **settings: object) -> str:
        """One more layer; equal to an earlier one where its step, settings and picture are. Returns its name."""
        added = self._add(kind, step, settings, grad=not self.of_batch)
        self.of_batch = False
        self.layers.append(Layer(at or f"blocks.{len(self.layers)}", added.name, Role.BLOCK))
        return self.layers[-1].name

    @property
    def place(self) -> Place:
        """The current picture, to go on from later."""
        return self.channels, self.extent, self.of_batch

    def go_on(self, place: Place) -> None:
        """Let the next layer take an earlier picture, which counts there where it is kept."""
        self.channels, self.extent, self.of_batch = place
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
        """The picture at the beginning of a layer; under autocast the network's input is cast from fp32."""
        tape = Tape(activation_bytes(self.precision), self.kernels)
        x = tape.enter(self.channels * prod(self.extent), Division.WHOLE, grad=grad)
        if self.held:
            tape.keep(x)
        if not grad and self.autocast and tape.item_bytes < FP32:
            tape.keep(tape.value(x.items, Division.WHOLE, FP32, grad=False))
        return ImageFlow(tape, x, self.channels, self.extent)

    def _kind(self, flow: ImageFlow, name: str) -> LayerKind:
        tape = flow.tape
        sides = dict(zip(SIDES[-len(self.extent) :], self.extent, strict=True))
        dims = SplitDims(in_channels=self.channels, out_channels=flow.channels, **sides)
        if (self.autocast or self.kernels.autocast) and tape.item_bytes < FP32:
            # weights' copies in half precision, kept from forward to backward whatever the batch
            tape.buffer_bytes += tape.item_bytes * tape.weights[Division.WHOLE]
        recomputed = name not in ("before", "after")
        return tape.kind(name, (flow.value, *flow.passed), dims, tensor_reason=NOT_SPLIT, recomputed=recomputed)

    def end(self, step: Step, **settings: object) -> ModelGraph:
        """The graph, closed by a step that ends in a loss."""
        flow = self._enter(grad=True)
        step(flow, **settings)
        kinds = [*(kind for kind, *_ in self.kinds.values()), self._kind(flow, "after")]
        return assemble(self.name, kinds, self.layers, sequence=1, precision=self.precision)


def without_output(kind: LayerKind, output: Value, tape: Tape) -> tuple[LayerKind, bool]:
    """A kind without its output among what it keeps, and whether it kept it.

    An activation in place at a layer's end keeps its output, which the next layer's first convolution keeps too: one
    tensor, counted with the layer that it enters (``Tape.keep``). While the layer itself computes it is there as well.
    Selective recomputation that would keep more is left out (see ``Tape``).
    """
    if not any(value.key == output.key for call, _ in tape.records for value in call.saved):
        return kind, False
    none = kind.kept[Recompute.NONE]
    left = replace(none, whole=none.whole - output.held)
    kept = {choice: size for choice, size in kind.kept.items() if size.total <= left.total or choice is Recompute.FULL}
    working, forward = (replace(live, whole=live.whole + output.held) for live in (kind.working, kind.forward_working))
    return replace(kind, kept=kept | {Recompute.NONE: left}, working=working, forward_working=forward), True


def skipping(graph: ModelGraph, readers: Mapping[str, str]) -> ModelGraph:
    """The chain, in which some layers' outputs go to a reader further on beside the next layer."""
    tensors = []
    for left, right in pairwise(graph.layers):
        names = dict.fromkeys((right.name, readers.get(left.name, right.name)))
        tensors.append(Passed(left.name, tuple(names), graph.kind_of(left).output_bytes))
    return replace(graph, tensors=tuple(tensors))


def classify(flow: ImageFlow, classes: int = 1000, prepare: Step | None = None) -> None:
    """What comes before the classifier, mean of all pixels, linear classifier, cross-entropy."""
    if prepare:
        prepare(flow)
    if flow.pixels > 1:
        flow.mean()
    compare(flow.linear(classes))


def compare(flow: ImageFlow) -> None:
    """Cross-entropy of the values at every pixel."""
    flow.value = ops.cross_entropy(flow.tape, "loss", flow.value, flow.tape.labels(flow.pixels))
