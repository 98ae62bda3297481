"""The execution of the stages of one rank, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.carry import check_known
from galvatron_lite.parallelism.pipeline.deferral import Deferral, Later
from galvatron_lite.parallelism.pipeline.post import P2PChannel, StepMail
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.table import Pipeline, RankSchedule, programme_of
from galvatron_lite.parallelism.pipeline.transfer import GradientSlot, PipelineGroups, Value, arrived, differentiable

Call = Callable[[int, Any], Any]
"""``call(chunk, microbatch)`` runs a stage's model."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a micro-batch leaves between its passes.

    Outputs are edges of the autograd graph, not tensors: once sent, their data is kept only if autograd needs it.
    """

    inputs: list[GradientSlot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


@dataclass(frozen=True, slots=True)
class Luggage:
    """What the stages make of values that travel: by default nothing."""

    # plain tensors to be sent, and what the next stage must know of them beside their shapes
    pack: Callable[[Value], tuple[Value, Any]] = lambda value: (value, None)
    # what the stage is given of tensors that arrived, and of that
    unpack: Callable[[Value, Any], Value] = lambda value, _: value


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of a rank's stages."""

    stage: StageModel  # its part of the model
    luggage: Luggage = Luggage()  # how values travel
    deferral: Deferral | None = None  # keeps what makes the gradients of weights; None: they are made in backward


@dataclass(slots=True)
class _Step:
    """The state of one step."""

    microbatches: Sequence[Sequence[Any]]
    call: Call
    loss: Tensor
    begun: Callable[[], None] = lambda: None
    passes: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    later: dict[tuple[int, int], list[Later]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


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
        self._post = P2PChannel(groups, index, device)

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
        programme = programme_of(self.pipeline, len(microbatches[0]), self._index)
        step, box = self._begin(programme, microbatches, call)
        step.begun = begun or step.begun
        last = {(action.what, action.chunk): action for action in programme.actions}
        run = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward, Pass.WEIGHT: self._weight}
        for action, following in _pairs(programme.actions):
            if before_pass is not None:
                before_pass(action, last[action.what, action.chunk] == action)
            run[action.what](step, box, action, following)
        self._post.finish()
        return step.loss

    def outputs(self, microbatches: Sequence[Sequence[Any]], call: Call) -> list[Any]:
        """Forward passes alone, without gradients.

        Args:
            microbatches: see ``step``.
            call: runs the model of a stage on a micro-batch; what it returns on the last stage is the output.

        Returns:
            By micro-batch what the last stage made; nothing elsewhere.

        Raises:
            InputError: an output is made of what an earlier stage has.
        """
        programme = programme_of(self.pipeline, len(microbatches[0]), self._index, forward_only=True)
        with torch.no_grad():
            step, box = self._begin(programme, microbatches, call)
            for action, following in _pairs(programme.actions):
                self._forward(step, box, action, following)
            self._post.finish()
        return step.outputs

    def _begin(
        self, programme: RankSchedule, microbatches: Sequence[Sequence[Any]], call: Call
    ) -> tuple[_Step, StepMail]:
        step = _Step(microbatches, call, torch.zeros((), device=self._device))

        def gradients(action: Action) -> list[Tensor] | None:
            done = step.passes.get((action.chunk, action.microbatch))
            return None if done is None else done.shapes

        return step, StepMail(programme, _kind(microbatches), gradients)

    def _forward(self, step: _Step, box: StepMail, action: Action, following: Action | None) -> None:
        chunk, number = self._chunks[action.chunk], action.microbatch
        received, given, slots = self._post.arrived(box, action), None, list[GradientSlot]()
        step.begun()
        if not chunk.stage.first:
            template, known = self._post.template(box, action)
            value, slots = arrived(template, received)
            given = chunk.luggage.unpack(value, known)
        self._post.foresee(box, following)
        part = step.microbatches[action.chunk][number]
        produced = chunk.stage.run(lambda: step.call(action.chunk, part), given)
        if not torch.is_grad_enabled():
            self._hand_on(step, box, action, produced)
            return
        produced, knowledge = (produced, None) if chunk.stage.last else chunk.luggage.pack(produced)
        outputs = differentiable(produced)
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
        step.passes[action.chunk, number] = _InFlight(slots, edges, shapes)
        if chunk.stage.last:
            step.loss += produced.detach()
        else:
            self._post.send(box, action, produced, knowledge)

    def _hand_on(self, step: _Step, box: StepMail, action: Action, produced: Any) -> None:
        chunk = self._chunks[action.chunk]
        if chunk.stage.last:
            check_known("the model's outputs", produced)
            step.outputs.append(produced)
        else:
            self._post.send(box, action, *chunk.luggage.pack(produced))

    def _backward(self, step: _Step, box: StepMail, action: Action, following: Action | None) -> None:
        chunk, key = self._chunks[action.chunk], (action.chunk, action.microbatch)
        gradients = self._post.arrived(box, action)
        step.begun()
        self._post.foresee(box, following)
        done = step.passes.pop(key)
        if done.outputs:
            torch.autograd.backward(done.outputs, None if chunk.stage.last else gradients)
        if chunk.deferral is not None:
            step.later[key] = chunk.deferral.take()
        if not chunk.stage.first:
            self._post.send(box, action, [slot.taken(self._device) for slot in done.inputs])

    def _weight(self, step: _Step, box: StepMail, action: Action, following: Action | None) -> None:
        self._post.foresee(box, following)
        tasks = step.later.pop((action.chunk, action.microbatch))
        while tasks:
            tasks.pop(0)()


def _pairs(actions: Sequence[Action]) -> zip[tuple[Action, Action | None]]:
    """Every action with the one after it."""
    return zip(actions, (*actions[1:], None), strict=True)


def _kind(microbatches: Sequence[Sequence[Any]]) -> Hashable:
    """What the shapes of values that travel depend on, and whether they ask for gradients."""
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for own in microbatches for tensor in tensors_of(own[0]))
    return torch.is_grad_enabled(), shapes
