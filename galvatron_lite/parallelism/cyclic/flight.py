"""What goes from pass to pass within a process, and what a micro-batch leaves between its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.transfer import Slot, Value, differentiable, template_of

Place = tuple[int, int]
"""A stage, and the number of a micro-batch."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A micro-batch between the forward and the backward pass of a stage.

    Outputs are edges of the autograd graph, not tensors: nothing is kept but what autograd needs.

    Attributes:
        version: of the parameters.
        parameters: those that the graph leads to.
        inputs: where gradients of what the stage was given are put.
        outputs: of the graph.
        shapes: of the outputs, without values.
    """

    version: int
    parameters: Mapping[str, nn.Parameter]
    inputs: list[Slot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


def in_flight(version: int, parameters: Mapping[str, nn.Parameter], inputs: list[Slot], produced: Value) -> InFlight:
    """What is kept of a forward pass that produced this."""
    outputs = differentiable(produced)
    shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
    return InFlight(version, parameters, inputs, [get_gradient_edge(tensor) for tensor in outputs], shapes)


@dataclass(frozen=True, slots=True)
class Handed:
    """What a stage made for the next one, outside the graph.

    Attributes:
        template: its structure and shapes.
        tensors: its values.
    """

    template: Value
    tensors: list[Tensor]


def handed(produced: Value) -> Handed:
    """What the next stage is given of this."""
    return Handed(template_of(produced), [tensor.detach() for tensor in tensors_of(produced)])


@dataclass(slots=True)
class Returned:
    """Gradients of what a stage made, and the loss of the micro-batch.

    Attributes:
        gradients: in the order of the outputs.
        loss: of the micro-batch; a scalar in single precision.
    """

    gradients: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Desk:
    """What lies between a process's passes, by stage and number of the micro-batch that is to take it.

    Attributes:
        batches: micro-batches that were given, by number.
        handed: what stages are to be given.
        returned: gradients of what stages made.
        flights: micro-batches between their passes.
        losses: of micro-batches, as they become known, by number; scalars.
    """

    batches: dict[int, Any] = field(default_factory=dict)
    handed: dict[Place, Handed] = field(default_factory=dict)
    returned: dict[Place, Returned] = field(default_factory=dict)
    flights: dict[Place, InFlight] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
