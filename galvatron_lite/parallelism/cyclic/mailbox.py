"""Point-to-point messages between processes.

Every kind of message has a process group for each direction, so that transfers of different kinds do not wait for one
another, and those between two ranks start in the same order on both (as NCCL requires). A receive can be started early
(``expect``). Both ends know the shapes of a message's tensors.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting, forward_time
from galvatron_lite.parallelism.cyclic.stages import StageStates
from galvatron_lite.parallelism.pipeline.runner import GradientSlot, Value

SENDING, AWAITING = "could not send {} to", "waited in vain for {} from"
RESUME = "Training has stopped. Start all processes again and resume from the last checkpoint (load_latest)."
ALIGNMENT = 16
"""Alignment of tensors in a message, in bytes."""
_NAMES = {
    MessageContent.ACTIVATION: "activations",
    MessageContent.GRADIENT: "gradients of activations",
    MessageContent.PARTIAL: "the sum of gradients so far",
    MessageContent.UPDATE: "the gradient of all workers",
}


Lane = tuple[MessageContent, int, int]
"""Kind, sender and receiver of messages that keep their order."""


def lane_of(message: CyclicMessage) -> Lane:
    """Return the lane of a message."""
    return message.kind, message.source, message.target


@dataclass(frozen=True, slots=True)
class _Transfer:
    work: dist.Work | None
    buffer: Tensor
    message: CyclicMessage
    due: int = 0


class ProcessMailbox:
    """Messages between the ranks of the default process group. All ranks must create one at the same time.

    All methods but ``clear`` raise ``LaunchError`` if the other process has ended, or does not answer in time.
    """

    def __init__(self, kinds: Iterable[MessageContent], device: torch.device, timeout: float) -> None:
        self._device, self._timeout = device, timedelta(seconds=timeout)
        self._groups: dict[tuple[MessageContent, bool], Any] = {
            (kind, up): dist.new_group(
                timeout=self._timeout, group_desc=f"cyclic {kind.value} {'up' if up else 'down'}"
            )
            for kind in sorted(set(kinds))
            for up in (True, False)
        }
        self._sending: list[_Transfer] = []
        self._expected: dict[CyclicMessage, _Transfer] = {}

    def send(self, message: CyclicMessage, tensors: Sequence[Tensor], due: int = 0) -> None:
        """Start to send copies of tensors; see ``due`` for the time step ``due``."""
        buffer = pack(tensors, self._device)
        work = self._run(message, SENDING, lambda group: dist.isend(buffer, message.target, group=group))
        self._sending.append(_Transfer(work, buffer, message, due))

    def clear(self, time: int) -> None:
        """Free the copies that were due before this time step."""
        # gloo does not report completion without waiting
        self._finish([transfer for transfer in self._sending if transfer.due < time])

    def finish(self, which: Callable[[CyclicMessage], bool] = lambda _message: True) -> None:
        """Wait until all sent messages, or ``which`` of them, have been received."""
        self._finish([transfer for transfer in self._sending if which(transfer.message)])

    def expect(self, message: CyclicMessage, likes: Sequence[Tensor]) -> None:
        """Start to receive tensors shaped like ``likes``; messages of a lane must be expected in their order."""
        if message in self._expected:
            return
        buffer = torch.empty(packed_bytes(likes), dtype=torch.uint8, device=self._device)
        work = self._run(message, AWAITING, lambda group: dist.irecv(buffer, message.source, group=group))
        self._expected[message] = _Transfer(work, buffer, message)

    def receive(self, message: CyclicMessage, likes: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the tensors of a message, shaped like ``likes``."""
        self.expect(message, likes)
        transfer = self._expected.pop(message)
        self._wait(transfer, AWAITING)
        return unpack(transfer.buffer, likes)

    def send_object(self, message: CyclicMessage, value: object) -> None:
        """Send a small object that can be pickled, before the message."""
        options: dict[str, Any] = {"dst": message.target, "device": self._device}
        self._run(message, SENDING, lambda group: dist.send_object_list([value], group=group, **options))

    def receive_object(self, message: CyclicMessage) -> Any:
        """Receive the object that was sent before a message."""
        values: list[Any] = [None]
        options: dict[str, Any] = {"src": message.source, "device": self._device}
        self._run(message, AWAITING, lambda group: dist.recv_object_list(values, group=group, **options))
        return values[0]

    def _finish(self, transfers: list[_Transfer]) -> None:
        finished = {id(transfer) for transfer in transfers}
        self._sending = [transfer for transfer in self._sending if id(transfer) not in finished]
        for transfer in transfers:
            self._wait(transfer, SENDING)

    def _wait(self, transfer: _Transfer, failure: str) -> None:
        work = transfer.work
        if work is not None:
            self._run(transfer.message, failure, lambda _group: work.wait(self._timeout))

    def _run(self, message: CyclicMessage, failure: str, function: Callable[[Any], Any]) -> Any:
        """Call a function with the message's group.

        An error closes all groups, so that processes which wait for this one stop too.
        """
        key = (message.kind, message.source < message.target)
        if key not in self._groups:
            raise LaunchError(
                "A process was lost before. Start all again and resume from the last checkpoint (load_latest)."
            )
        try:
            return function(self._groups[key])
        except RuntimeError as error:
            groups, self._groups, self._sending = self._groups, {}, []
            for group in groups.values():
                dist.destroy_process_group(group)
            step = max(message.step, 0)  # initial parameters are of step -1
            peer = message.target if failure == SENDING else message.source
            cause = str(error).splitlines()[0].split(". ")[0]
            raise LaunchError(
                f"Worker {message.worker}, stage {message.stage}, training step {step}: "
                f"{failure.format(_NAMES[message.kind])} rank {peer}, which is gone or was silent for "
                f"{self._timeout.total_seconds():g} s ({cause}). {RESUME}"
            ) from error


def packed_bytes(likes: Sequence[Tensor]) -> int:
    """Return the bytes of a message with tensors like ``likes``."""
    return sum(_aligned(like) for like in likes)


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy tensors into a buffer of bytes, in order."""
    buffer = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=device)
    for tensor, view in zip(tensors, unpack(buffer, tensors), strict=True):
        view.copy_(tensor.detach())
    return buffer


def unpack(buffer: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensors in a buffer of ``pack``, shaped like ``likes`` (on any device)."""
    views, start = list[Tensor](), 0
    for like in likes:
        stop = start + like.numel() * like.element_size()
        views.append(buffer[start:stop].view(like.dtype).view(like.shape))
        start += _aligned(like)
    return views


def _aligned(like: Tensor) -> int:
    return math.ceil(like.numel() * like.element_size() / ALIGNMENT) * ALIGNMENT


# The contents of messages


Place = tuple[int, int]
"""A stage, and the number of a micro-batch."""
Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of a micro-batch's tensors, the same at both ends of a message."""
_LOSS = torch.empty((), dtype=torch.float64, device="meta")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A micro-batch between forward and backward of a stage.

    Outputs are edges of the autograd graph instead of tensors, so that only what autograd needs stays in memory.
    """

    version: int  # of the parameters
    parameters: Mapping[str, nn.Parameter]  # leaves of the graph
    inputs: list[GradientSlot]  # that collect the gradients of the stage's inputs
    outputs: list[GradientEdge]
    shapes: list[Tensor]  # of the outputs, without values


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage for the next one, outside the graph."""

    template: Value  # structure and shapes
    tensors: list[Tensor]  # values


@dataclass(slots=True)
class Returned:
    """The gradients of a stage's outputs, and the loss of the micro-batch."""

    gradients: list[Tensor]  # in the order of the outputs
    loss: Tensor | None  # of the micro-batch; a scalar in single precision


@dataclass(frozen=True, slots=True)
class MicrobatchDesk:
    """What the passes of a process leave for later passes, by the stage and number of the micro-batch that takes it."""

    batches: dict[int, Any] = field(default_factory=dict)  # micro-batches, by number
    handed: dict[Place, StageOutput] = field(default_factory=dict)  # inputs of stages
    returned: dict[Place, Returned] = field(default_factory=dict)  # gradients of the outputs of stages
    flights: dict[Place, InFlight] = field(default_factory=dict)  # between forward and backward
    losses: dict[int, Tensor] = field(default_factory=dict)  # by number of the micro-batch


def reach(message: CyclicMessage, programme: CyclicProgramme) -> int:
    """Return the most time steps from the pass that sends a message to the pass that receives it.

    Micro-batches follow one another every two time steps. Under ``stages`` the first replica that receives an update
    may need it only in the training step after the next.
    """
    far = programme.setting is CyclicSetting.STAGES and message.kind is MessageContent.UPDATE
    return 2 * programme.workers + 1 if far else 2


def due(message: CyclicMessage, time: int, step: int, programme: CyclicProgramme) -> int:
    """Return the time step after which the sender of a message may wait until it has been received.

    Before, the receiving pass may not have begun. If that pass may belong to a later training step, its process may not
    have the batch of that step before the sender has, as processes may synchronise between calls of ``train_step``.
    """
    latest, receiving_step = time + reach(message, programme), step
    while latest >= _first_time(programme, message.target, receiving_step + 1):
        receiving_step += 1
    return latest if receiving_step == step else max(latest, _first_time(programme, message.source, receiving_step))


@lru_cache(maxsize=4096)
def _first_time(programme: CyclicProgramme, process: int, step: int) -> int:
    """Time step of the first pass for which a process needs the batch of a training step."""
    workers = programme.workers
    return min(
        forward_time(step, worker, stage, workers)
        for worker in range(workers)
        for stage in range(workers)
        if programme.process_of(stage, step * workers + worker) == process
    )


def _is_received_by(message: CyclicMessage, programme: CyclicProgramme, step: int) -> bool:
    """Whether the pass that receives a message runs in training step ``step`` or before."""
    steps = range(message.step, step + 1)
    return any(message in pass_.receives for past in steps for pass_ in programme.passes(message.target, past))


def _finish_sends(mailbox: ProcessMailbox, done: list[tuple[CyclicProgramme, int]]) -> None:
    """Wait for messages that others receive in training steps this process has run: a transfer ends with its handle.

    Processes do not wait for one another here in a circle: each has received what it needs for the steps it has run.
    ``done`` has the programme, and the last training step whose passes have all run here.
    """
    ((programme, step),) = done
    if dist.is_initialized():
        with suppress(LaunchError):  # the receiver has ended, and needs nothing
            mailbox.finish(lambda message: _is_received_by(message, programme, step))


class MessageExchange:
    """Sends messages from a process's desk, and puts received ones on it.

    The structure of activations is sent before the first message of a lane with tensors of their shapes. When the
    object is freed, or the interpreter exits, messages that others need for finished training steps are delivered.
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
        self._done = [(programme, -1)]
        weakref.finalize(self, _finish_sends, mailbox, self._done)

    def expect(self, messages: Sequence[CyclicMessage]) -> None:
        """Start to receive messages, up to the first whose shapes are not known yet."""
        for message in messages:
            likes = self._likes(message)
            if likes is None:
                return
            self._mailbox.expect(message, likes)

    def receive(self, messages: Sequence[CyclicMessage]) -> None:
        """Receive messages and put their contents on the desk."""
        for message in messages:
            if message.kind is MessageContent.ACTIVATION and self._key(message) not in self._templates:
                self._templates[self._key(message)] = self._mailbox.receive_object(message)
            self._put(message, self._mailbox.receive(message, self._likes(message) or []))

    def send(self, messages: Sequence[CyclicMessage], time: int, step: int) -> None:
        """Send messages from the desk, in a time step of a training step."""
        for message in messages:
            self._mailbox.send(message, self._payload(message), due(message, time, step, self._programme))

    def clear(self, time: int) -> None:
        """See ``ProcessMailbox.clear``."""
        self._mailbox.clear(time)

    def finish(self) -> None:
        """Wait until all sent messages have been received."""
        self._mailbox.finish()

    def done(self, programme: CyclicProgramme, step: int) -> None:
        """Note that all passes of a training step, and of those before, have run here."""
        self._done[:] = [(programme, step)]

    def _number(self, message: CyclicMessage) -> int:
        return message.step * self._programme.workers + message.worker

    def _key(self, message: CyclicMessage) -> tuple[Lane, Shape]:
        tensors = tensors_of(self._desk.batches[self._number(message)])
        return lane_of(message), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def _likes(self, message: CyclicMessage) -> list[Tensor] | None:
        """Tensors shaped like those of a message to receive; None if they are not known yet."""
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
            # views of one buffer would keep one another alive
            separate = tensors if len(tensors) == 1 else [tensor.clone() for tensor in tensors]
            self._desk.handed[stage + 1, number] = StageOutput(self._templates[self._key(message)], separate)
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
                self._mailbox.send_object(message, handed.template)
            return handed.tensors
        if message.kind is MessageContent.GRADIENT:
            returned = self._desk.returned.pop((stage - 1, number))
            assert returned.loss is not None
            return [*returned.gradients, returned.loss.double()]
        states = self._states[stage]
        if message.kind is MessageContent.PARTIAL:
            return states.sent(states.sums.pop(message.step))
        return states.sent(states.updates[message.step])
