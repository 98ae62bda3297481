"""What goes from pass to pass within a process, and what a micro-batch leaves between its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.transfer import GradientSlot, Value, differentiable, template_of

Place = tuple[int, int]
"""A stage, and the number of a micro-batch."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A micro-batch between the forward and the backward pass of a stage.

    Outputs are edges of the autograd graph, not tensors: nothing is kept but what autograd needs.
    """

    version: int  # of the parameters
    parameters: Mapping[str, nn.Parameter]  # those that the graph leads to
    inputs: list[GradientSlot]  # where gradients of what the stage was given are put
    outputs: list[GradientEdge]  # of the graph
    shapes: list[Tensor]  # of the outputs, without values


def in_flight(
    version: int, parameters: Mapping[str, nn.Parameter], inputs: list[GradientSlot], produced: Value
) -> InFlight:
    """What is kept of a forward pass that produced this."""
    outputs = differentiable(produced)
    shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
    return InFlight(version, parameters, inputs, [get_gradient_edge(tensor) for tensor in outputs], shapes)


@dataclass(frozen=True, slots=True)
class Handed:
    """What a stage made for the next one, outside the graph."""

    template: Value  # its structure and shapes
    tensors: list[Tensor]  # its values


def handed(produced: Value) -> Handed:
    """What the next stage is given of this."""
    return Handed(template_of(produced), [tensor.detach() for tensor in tensors_of(produced)])


@dataclass(slots=True)
class Returned:
    """Gradients of what a stage made, and the loss of the micro-batch."""

    gradients: list[Tensor] = field(default_factory=list)  # in the order of the outputs
    loss: Tensor | None = None  # of the micro-batch; a scalar in single precision


@dataclass(frozen=True, slots=True)
class Desk:
    """What lies between a process's passes, by stage and number of the micro-batch that is to take it."""

    batches: dict[int, Any] = field(default_factory=dict)  # micro-batches that were given, by number
    handed: dict[Place, Handed] = field(default_factory=dict)  # what stages are to be given
    returned: dict[Place, Returned] = field(default_factory=dict)  # gradients of what stages made
    flights: dict[Place, InFlight] = field(default_factory=dict)  # micro-batches between their passes
    # of micro-batches, as they become known, by number; scalars
    losses: dict[int, Tensor] = field(default_factory=dict)
