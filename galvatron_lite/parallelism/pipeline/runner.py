"""Runs the stages of one rank in the order of the table.

Why not the schedules of ``torch.distributed.pipelining`` (read in torch 2.13): they keep a receive buffer for every
micro-batch of the step instead of those in flight, so 1F1B loses its memory bound; they learn shapes by running the
first micro-batch forward and backward once more, through the hooks that count micro-batches and reduce gradients; they
refuse 1F1B with fewer micro-batches than stages; and they split a batch only where it is made of tensors of equal rows.
The order of work is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.deferral import Deferral, Later
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.stage import StageModel, check_known
from galvatron_lite.parallelism.pipeline.table import Pipeline, rank_schedule
from galvatron_lite.parallelism.pipeline.transfer import (
    GradientSlot,
    P2PChannel,
    PipelineGroups,
    Value,
    arrived,
    differentiable,
)

Call = Callable[[int, Any], Any]
"""``call(chunk, microbatch)`` runs a stage's model."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of a rank's stages, and how values travel between stages: by default as they are."""

    stage: StageModel  # its part of the model
    # plain tensors to be sent, and a header: what the next stage must know of them beside their shapes
    pack: Callable[[Value], tuple[Value, Any]] = lambda value: (value, None)
    # the stage's input from tensors that arrived, and their header
    unpack: Callable[[Value, Any], Value] = lambda value, _: value
    deferral: Deferral | None = None  # keeps what makes the gradients of weights; None: they are made in backward


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a micro-batch leaves between its passes.

    Outputs are edges of the autograd graph, not tensors: once sent, their data is kept only if autograd needs it.
    """

    inputs: list[GradientSlot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


class PipelineRunner:
    """Runs a rank's share of a training step.

    What travels is what ``StageModel.run`` returns, each tensor in the layout of the layer that made it, to the rank
    with the same place in the group of devices that runs the next stage; the layers that read it convert it. What a
    stage hands on to a later one goes with what it made itself, and gradients of all its readers are added on their way
    back.

    Attributes:
        pipeline: how stages are spread, and the order of their passes.

    Args:
        chunks: the rank's stages, in the order of the model; their hooks are attached here, so every other hook must be
            in place.
        groups: from ``pipeline_groups``.
        pipeline: the attribute.
        index: number of this rank's group of devices, 0 the first.
        device: where activations live.
    """

    def __init__(
        self, chunks: Sequence[Chunk], groups: PipelineGroups, pipeline: Pipeline, index: int, device: torch.device
    ) -> None:
        for chunk in chunks:
            chunk.stage.attach()
        self.pipeline, self._chunks, self._index, self._device = pipeline, tuple(chunks), index, device
        self._channel = P2PChannel(groups, index, device)

    def step(
        self,
        microbatches: Sequence[Sequence[Any]],
        call: Call,
        before_pass: Callable[[Action, bool], None] | None = None,
        begun: Callable[[], None] | None = None,
    ) -> Tensor:
        """All passes of every micro-batch.

        Args:
            microbatches: by stage of this rank: this rank's rows of each, in the layout of the stage's glue code; all
                of equal shapes.
            call: runs the model of a stage on a micro-batch and returns its loss, scaled such that the sum over
                micro-batches and batch ranks is the loss to be minimised. On other stages than the last it is left
                where the model returns.
            before_pass: called with every pass before it, and whether it is the stage's last of this kind.
            begun: called when what a pass needs of other stages is there; not in passes of weights.

        Returns:
            The sum of the scaled losses where the last stage is, zero elsewhere.
        """
        actions = self._begin(microbatches, call, begun)
        last = {(action.what, action.chunk): action for action in actions}
        run = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward, Pass.WEIGHT: self._weight}
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if before_pass is not None:
                before_pass(action, last[action.what, action.chunk] == action)
            run[action.what](action, following)
        self._end()
        return self._loss

    def outputs(self, microbatches: Sequence[Sequence[Any]], call: Call) -> list[Any]:
        """Forward passes alone, without gradients.

        Args:
            microbatches: see ``step``.
            call: runs the model of a stage on a micro-batch; what it returns on the last stage is the output.

        Returns:
            By micro-batch the output of the last stage; nothing elsewhere.

        Raises:
            InputError: an output is made of what an earlier stage has.
        """
        with torch.no_grad():
            actions = self._begin(microbatches, call, forward_only=True)
            for action, following in zip(actions, (*actions[1:], None), strict=True):
                self._forward(action, following)
            outputs = self._outputs
            self._end()
        return outputs

    def _begin(
        self,
        microbatches: Sequence[Sequence[Any]],
        call: Call,
        begun: Callable[[], None] | None = None,
        *,
        forward_only: bool = False,
    ) -> tuple[Action, ...]:
        schedule = rank_schedule(self.pipeline, len(microbatches[0]), self._index, forward_only=forward_only)
        self._microbatches, self._call, self._begun = microbatches, call, begun or (lambda: None)
        self._loss, self._outputs = torch.zeros((), device=self._device), list[Any]()
        self._later: dict[tuple[int, int], list[Later]] = {}
        self._in_flight = in_flight = dict[tuple[int, int], _InFlight]()
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for part in microbatches for tensor in tensors_of(part[0]))

        def gradients(action: Action) -> list[Tensor] | None:
            done = in_flight.get((action.chunk, action.microbatch))
            return None if done is None else done.shapes

        self._channel.begin(schedule, (torch.is_grad_enabled(), shapes), gradients)
        return schedule.actions

    def _end(self) -> None:
        self._channel.finish()
        self._microbatches, self._outputs = (), []
        del self._call, self._begun

    def _forward(self, action: Action, following: Action | None) -> None:
        chunk = self._chunks[action.chunk]
        tensors, received, slots = self._channel.arrived(action), None, list[GradientSlot]()
        self._begun()
        if not chunk.stage.first:
            template, header = self._channel.template(action)
            value, slots = arrived(template, tensors)
            received = chunk.unpack(value, header)
        self._channel.foresee(following)
        part = self._microbatches[action.chunk][action.microbatch]
        produced = chunk.stage.run(lambda: self._call(action.chunk, part), received)
        header = None
        if not chunk.stage.last:
            produced, header = chunk.pack(produced)
        if torch.is_grad_enabled():
            outputs = differentiable(produced)
            edges = [get_gradient_edge(tensor) for tensor in outputs]
            shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
            self._in_flight[action.chunk, action.microbatch] = _InFlight(slots, edges, shapes)
        if not chunk.stage.last:
            self._channel.send(action, produced, header)
        elif torch.is_grad_enabled():
            self._loss += produced.detach()
        else:
            check_known("the model's outputs", produced)
            self._outputs.append(produced)

    def _backward(self, action: Action, following: Action | None) -> None:
        chunk, key = self._chunks[action.chunk], (action.chunk, action.microbatch)
        gradients = self._channel.arrived(action)
        self._begun()
        self._channel.foresee(following)
        done = self._in_flight.pop(key)
        if done.outputs:
            torch.autograd.backward(done.outputs, None if chunk.stage.last else gradients)
        if chunk.deferral is not None:
            self._later[key] = chunk.deferral.take()
        if not chunk.stage.first:
            self._channel.send(action, [slot.taken(self._device) for slot in done.inputs])

    def _weight(self, action: Action, following: Action | None) -> None:
        self._channel.foresee(following)
        tasks = self._later.pop((action.chunk, action.microbatch))
        while tasks:
            tasks.pop(0)()
