"""What the messages of a process hold: from what it has to what others need, and back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.cyclic.mailbox import Lane, ProcessMailbox, lane_of
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, forward_time
from galvatron_lite.parallelism.cyclic.states import StageStates
from galvatron_lite.parallelism.pipeline.transfer import GradientSlot, Value

Place = tuple[int, int]
"""A stage, and the number of a micro-batch."""
Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Of the tensors of a micro-batch: the same at both ends of a message."""
_LOSS = torch.empty((), dtype=torch.float64, device="meta")


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


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage made for the next one, outside the graph."""

    template: Value  # its structure and shapes
    tensors: list[Tensor]  # its values


@dataclass(slots=True)
class Returned:
    """Gradients of what a stage made, and the loss of the micro-batch."""

    gradients: list[Tensor]  # in the order of the outputs
    loss: Tensor | None  # of the micro-batch; a scalar in single precision


@dataclass(frozen=True, slots=True)
class MicrobatchDesk:
    """What lies between a process's passes, by stage and number of the micro-batch that is to take it."""

    batches: dict[int, Any] = field(default_factory=dict)  # micro-batches, by number
    handed: dict[Place, StageOutput] = field(default_factory=dict)  # what stages are to be given
    returned: dict[Place, Returned] = field(default_factory=dict)  # gradients of what stages made
    flights: dict[Place, InFlight] = field(default_factory=dict)  # micro-batches between their passes
    losses: dict[int, Tensor] = field(default_factory=dict)  # of micro-batches, as they become known, by number


def reach(message: CyclicMessage, programme: CyclicProgramme) -> int:
    """Time steps at most from the pass that sends a message to the one that awaits it.

    A micro-batch is two behind the one before it. Under ``stages`` a replica that is to have an update first may need
    it in the training step after the next only.
    """
    far = programme.setting is CyclicSetting.STAGES and message.kind is MessageContent.UPDATE
    return 2 * programme.workers + 1 if far else 2


def due(message: CyclicMessage, time: int, step: int, programme: CyclicProgramme) -> int:
    """The time step after which its sender may wait until a message is taken.

    Until then the pass that awaits it need not have begun. Where that pass may belong to a later training step, its
    process need not have been given that step's batch before the sender is: whoever calls ``train_step`` may let the
    processes meet in between.
    """
    awaited, taken = time + reach(message, programme), step
    while awaited >= _first_time(programme, message.target, taken + 1):
        taken += 1
    return awaited if taken == step else max(awaited, _first_time(programme, message.source, taken))


@lru_cache(maxsize=4096)
def _first_time(programme: CyclicProgramme, process: int, step: int) -> int:
    """Time step of the first pass that a process runs once it is given the batch of a training step."""
    workers = programme.workers
    return min(
        forward_time(step, worker, stage, workers)
        for worker in range(workers)
        for stage in range(workers)
        if programme.process_of(stage, step * workers + worker) == process
    )


def _taken_by(message: CyclicMessage, programme: CyclicProgramme, step: int) -> bool:
    """Whether the pass that awaits a message is run in training step ``step`` or before; else only later ones are."""
    steps = range(message.step, step + 1)
    return any(message in one.receives for past in steps for one in programme.passes(message.target, past))


@dataclass(slots=True)
class _Done:
    """The last training step whose passes here were all run, and the programme that they were of."""

    programme: CyclicProgramme
    step: int = -1


def _see_off(mailbox: ProcessMailbox, done: _Done) -> None:
    """Wait for what others still take in training steps that this process has run: a transfer ends with its handle.

    Nobody waits for one who waits here in turn: all with as many training steps behind them have taken what they need.
    """
    if dist.is_initialized():
        with suppress(LaunchError):  # the receiver is gone, and with it the need
            mailbox.finish(lambda message: _taken_by(message, done.programme, done.step))


class MessageExchange:
    """Sends what is on a process's desk, and puts there what arrives.

    The structure of an activation is told ahead of the first message of a lane that holds one of its kind. When it is
    given up, or the interpreter exits, what others need for the training steps done is delivered first.
    """

    def __init__(
        self,
        programme: CyclicProgramme,
        desk: MicrobatchDesk,
        states: Mapping[int, StageStates],
        mailbox: ProcessMailbox,
    ) -> None:
        self._programme, self._desk, self._states, self._mailbox = programme, desk, states, mailbox
        self._templates: dict[tuple[Lane, Shape], Value] = {}
        self._done = _Done(programme)
        weakref.finalize(self, _see_off, mailbox, self._done)

    def expect(self, messages: Sequence[CyclicMessage]) -> None:
        """Start to receive those messages whose shapes are known by now."""
        for message in messages:
            likes = self._likes(message)
            if likes is None:
                return  # nor what comes behind it
            self._mailbox.expect(message, likes)

    def receive(self, messages: Sequence[CyclicMessage]) -> None:
        """Put what messages hold where passes look for it."""
        for message in messages:
            if message.kind is MessageContent.ACTIVATION and self._key(message) not in self._templates:
                self._templates[self._key(message)] = self._mailbox.hear(message)
            self._put(message, self._mailbox.receive(message, self._likes(message) or []))

    def send(self, messages: Sequence[CyclicMessage], time: int, step: int) -> None:
        """Send what messages are to hold, in this time step of a training step."""
        for message in messages:
            self._mailbox.send(message, self._payload(message), due(message, time, step, self._programme))

    def clear(self, time: int) -> None:
        """Let go of what was sent and is taken, in this time step."""
        self._mailbox.clear(time)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._mailbox.finish()

    def done(self, programme: CyclicProgramme, step: int) -> None:
        """All passes of a training step, and of those before, have been run here."""
        self._done.programme, self._done.step = programme, step

    def _number(self, message: CyclicMessage) -> int:
        return message.step * self._programme.workers + message.worker

    def _key(self, message: CyclicMessage) -> tuple[Lane, Shape]:
        tensors = tensors_of(self._desk.batches[self._number(message)])
        return lane_of(message), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def _likes(self, message: CyclicMessage) -> list[Tensor] | None:
        """Tensors shaped like those of a message that is to come; None where they are not known yet."""
        if message.kind is MessageContent.ACTIVATION:
            key = self._key(message) if self._number(message) in self._desk.batches else None
            return list(tensors_of(self._templates[key])) if key in self._templates else None
        if message.kind is MessageContent.GRADIENT:
            flight = self._desk.flights.get((message.stage - 1, self._number(message)))
            return None if flight is None else [*flight.shapes, _LOSS]
        return self._states[message.stage].gradient_likes()

    def _put(self, message: CyclicMessage, tensors: list[Tensor]) -> None:
        stage, number = message.stage, self._number(message)
        if message.kind is MessageContent.ACTIVATION:
            # several views would keep one another alive
            alone = tensors if len(tensors) == 1 else [tensor.clone() for tensor in tensors]
            self._desk.handed[stage + 1, number] = StageOutput(self._templates[self._key(message)], alone)
        elif message.kind is MessageContent.GRADIENT:
            *gradients, loss = tensors
            self._desk.returned[stage - 1, number] = Returned(gradients, loss)
            self._desk.losses[number] = loss
        else:
            states = self._states[stage]
            held = states.sums if message.kind is MessageContent.PARTIAL else states.updates
            held[message.step] = StageStates.arrived(tensors)

    def _payload(self, message: CyclicMessage) -> list[Tensor]:
        stage, number = message.stage, self._number(message)
        if message.kind is MessageContent.ACTIVATION:
            handed = self._desk.handed.pop((stage + 1, number))
            if self._key(message) not in self._templates:
                self._templates[self._key(message)] = handed.template
                self._mailbox.tell(message, handed.template)
            return handed.tensors
        if message.kind is MessageContent.GRADIENT:
            returned = self._desk.returned.pop((stage - 1, number))
            assert returned.loss is not None
            return [*returned.gradients, returned.loss.double()]
        states = self._states[stage]
        if message.kind is MessageContent.PARTIAL:
            return states.sent(states.sums.pop(message.step))
        return states.sent(states.updates[message.step])
