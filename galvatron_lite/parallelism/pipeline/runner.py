"""The execution of one stage's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, stage_actions
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.transfer import (
    Channel,
    Incoming,
    PipelineGroups,
    Slot,
    Value,
    arrived,
    differentiable,
    template_of,
)
from galvatron_lite.plans.schema import Schedule


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a micro-batch leaves between its passes.

    Outputs are edges of the autograd graph, not tensors: once sent, their data is kept only if autograd needs it.
    """

    inputs: list[Slot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


@dataclass(frozen=True, slots=True)
class Luggage:
    """What the stages make of values that travel: by default nothing.

    Attributes:
        pack: plain tensors to be sent, and what the next stage must know of them beside their shapes.
        unpack: what the stage is given of tensors that arrived, and of that.
    """

    pack: Callable[[Value], tuple[Value, Any]] = lambda value: (value, None)
    unpack: Callable[[Value, Any], Value] = lambda value, _: value


@dataclass(slots=True)
class _Step:
    """The state of one training step."""

    microbatches: Sequence[Any]
    call: Callable[[Any], Any]
    shape: object
    loss: Tensor
    passes: dict[int, _InFlight] = field(default_factory=dict)
    expected: dict[Action, Incoming] = field(default_factory=dict)


class PipelineRunner:
    """Runs one stage's share of a training step.

    What travels is what ``StageModel.run`` returns, each tensor in the layout of the layer that made it, to the rank
    with the same place in the next stage; the layers that read it convert it. What a stage hands on to a later one goes
    with what it made itself, and gradients of all its readers are added on their way back.

    Args:
        stage: this stage's part of the model; its hooks are attached here, so every other hook must be in place.
        groups: from ``pipeline_groups``.
        stages: how many.
        index: this stage, 0 the first.
        schedule: order of the micro-batches.
        device: where activations live.
        luggage: how values travel.
    """

    def __init__(
        self,
        stage: StageModel,
        groups: PipelineGroups,
        stages: int,
        index: int,
        schedule: Schedule,
        device: torch.device,
        luggage: Luggage | None = None,
    ) -> None:
        stage.attach()
        self._luggage = luggage or Luggage()
        self._stage, self._stages, self._index, self._schedule = stage, stages, index, schedule
        self._device = device
        self._previous = None if stage.first else _Neighbour(groups, index - 1, device)
        self._next = None if stage.last else _Neighbour(groups, index + 1, device)
        # what the previous stage sends, by the shapes of a micro-batch; shapes that were sent on already
        self._templates: dict[object, tuple[Value, Any]] = {}
        self._announced: set[object] = set()

    def step(
        self,
        microbatches: Sequence[Any],
        call: Callable[[Any], Any],
        before_backward: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Forward and backward of every micro-batch.

        Args:
            microbatches: this rank's rows of each, in the layout of this stage's glue code; all of equal shapes.
            call: runs the model on a micro-batch and returns its loss, scaled such that the sum over micro-batches
                and batch ranks is the loss to be minimised. On other stages than the last it is left where the model
                returns.
            before_backward: called with the micro-batch's number before its backward pass.

        Returns:
            The sum of the scaled losses on the last stage, zero on the others.
        """
        shape = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(microbatches[0]))
        step = _Step(microbatches, call, shape, torch.zeros((), device=self._device))
        actions = stage_actions(self._schedule, self._stages, self._index, len(microbatches))
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if action.what is Pass.FORWARD:
                self._forward(step, action, following)
            else:
                if before_backward is not None:
                    before_backward(action.microbatch)
                self._backward(step, action, following)
        for neighbour in (self._previous, self._next):
            if neighbour is not None:
                neighbour.finish()
        return step.loss

    def _forward(self, step: _Step, action: Action, following: Action | None) -> None:
        received = self._arrived(step, action)
        template, known = self._templates[step.shape] if self._previous else (None, None)
        value, slots = arrived(template, received)
        self._expect(step, following)
        given = self._luggage.unpack(value, known) if self._previous else None
        produced = self._stage.run(lambda: step.call(step.microbatches[action.microbatch]), given)
        produced, knowledge = self._luggage.pack(produced) if self._next else (produced, None)
        outputs = differentiable(produced)
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
        step.passes[action.microbatch] = _InFlight(slots, edges, shapes)
        if self._next is None:
            step.loss += produced.detach()
        else:
            self._send(self._next, step.shape, produced, knowledge)

    def _backward(self, step: _Step, action: Action, following: Action | None) -> None:
        gradients = self._arrived(step, action)
        self._expect(step, following)
        done = step.passes.pop(action.microbatch)
        if done.outputs:
            torch.autograd.backward(done.outputs, gradients if self._next else None)
        if self._previous is not None:
            self._previous.backward.send([slot.taken(self._device) for slot in done.inputs])

    def _send(self, neighbour: _Neighbour, shape: object, produced: Value, knowledge: Any) -> None:
        if shape not in self._announced:
            neighbour.forward.send_object((template_of(produced), knowledge))
            self._announced.add(shape)
        neighbour.forward.send(list(tensors_of(produced)))

    def _arrived(self, step: _Step, action: Action) -> list[Tensor]:
        """What the neighbour sent for this pass; empty where nothing comes in."""
        self._expect(step, action)
        incoming = step.expected.pop(action, None)
        return incoming.wait() if incoming is not None else []

    def _expect(self, step: _Step, action: Action | None) -> None:
        """Start receiving what a pass needs, once its shapes are known. The pass after the current one is expected
        before the current one computes: its transfer runs meanwhile and takes one more buffer.
        """
        if action is None or action in step.expected:
            return
        if action.what is Pass.FORWARD and self._previous is not None:
            if step.shape not in self._templates:
                self._templates[step.shape] = self._previous.forward.receive_object()
            likes = list(tensors_of(self._templates[step.shape][0]))
            step.expected[action] = self._previous.forward.receive(likes)
        elif action.what is Pass.BACKWARD and self._next is not None and action.microbatch in step.passes:
            step.expected[action] = self._next.backward.receive(step.passes[action.microbatch].shapes)


class _Neighbour:
    """The channels to a neighbouring stage: activations travel forward, gradients backward."""

    def __init__(self, groups: PipelineGroups, index: int, device: torch.device) -> None:
        self.forward = Channel(groups.forward, index, device)
        self.backward = Channel(groups.backward, index, device)

    def finish(self) -> None:
        """Wait for every send under way."""
        self.forward.finish()
        self.backward.finish()
