"""Messages from process to process: point to point, one transfer each, never a collective.

Every kind of message has a process group for either direction between two ranks, so that a transfer never waits for one
of another kind, and those of a pair start in the same order at both ends (NCCL asks for that). A receive can be started
ahead (``expect``). Both ends know the shapes of a message's tensors.
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
"""Bytes: where a tensor begins in a message, whatever its dtype."""
_NAMES = {
    MessageContent.ACTIVATION: "activations",
    MessageContent.GRADIENT: "gradients of activations",
    MessageContent.PARTIAL: "the sum of gradients so far",
    MessageContent.UPDATE: "the gradient of all workers",
}


Lane = tuple[MessageContent, int, int]
"""Messages that keep their order: of one kind, between two ranks, in one direction."""


def lane_of(message: CyclicMessage) -> Lane:
    """The lane that a message takes."""
    return message.kind, message.source, message.target


@dataclass(frozen=True, slots=True)
class _Transfer:
    work: dist.Work | None
    buffer: Tensor
    message: CyclicMessage
    due: int = 0


class ProcessMailbox:
    """Messages between the ranks of the default process group. Every rank makes one at the same time.

    All methods but ``clear`` raise ``LaunchError`` where the other process is gone, or silent for too long.
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
        """Send copies of the tensors; returns at once. After time step ``due`` one may wait until they are taken."""
        buffer = pack(tensors, self._device)
        work = self._tried(message, SENDING, lambda group: dist.isend(buffer, message.target, group=group))
        self._sending.append(_Transfer(work, buffer, message, due))

    def clear(self, time: int) -> None:
        """Let go of the copies that were due before this time step."""
        self._finish([one for one in self._sending if one.due < time])  # gloo does not tell completion without waiting

    def finish(self, which: Callable[[CyclicMessage], bool] = lambda _message: True) -> None:
        """Wait until everything sent, or those messages of it, has arrived."""
        self._finish([one for one in self._sending if which(one.message)])

    def expect(self, message: CyclicMessage, likes: Sequence[Tensor]) -> None:
        """Start to receive tensors shaped like these, in the order in which messages of a lane are sent."""
        if message in self._expected:
            return
        buffer = torch.empty(packed_bytes(likes), dtype=torch.uint8, device=self._device)
        work = self._tried(message, AWAITING, lambda group: dist.irecv(buffer, message.source, group=group))
        self._expected[message] = _Transfer(work, buffer, message)

    def receive(self, message: CyclicMessage, likes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, shaped like these, once they are here."""
        self.expect(message, likes)
        transfer = self._expected.pop(message)
        self._wait(transfer, AWAITING)
        return unpack(transfer.buffer, likes)

    def tell(self, message: CyclicMessage, value: object) -> None:
        """Send something small that can be pickled, ahead of the message."""
        options: dict[str, Any] = {"dst": message.target, "device": self._device}
        self._tried(message, SENDING, lambda group: dist.send_object_list([value], group=group, **options))

    def hear(self, message: CyclicMessage) -> Any:
        """The value that the sender of a message sent ahead of it (``tell``)."""
        values: list[Any] = [None]
        options: dict[str, Any] = {"src": message.source, "device": self._device}
        self._tried(message, AWAITING, lambda group: dist.recv_object_list(values, group=group, **options))
        return values[0]

    def _finish(self, transfers: list[_Transfer]) -> None:
        waiting = {id(transfer) for transfer in transfers}
        self._sending = [one for one in self._sending if id(one) not in waiting]
        for transfer in transfers:
            self._wait(transfer, SENDING)

    def _wait(self, transfer: _Transfer, what: str) -> None:
        work = transfer.work
        if work is not None:
            self._tried(transfer.message, what, lambda _group: work.wait(self._timeout))

    def _tried(self, message: CyclicMessage, what: str, act: Callable[[Any], Any]) -> Any:
        """The result of a call with the message's group.

        An error closes all groups, so that whoever waits for this process stops too.
        """
        key = (message.kind, message.source < message.target)
        if key not in self._groups:
            raise LaunchError(
                "A process was lost before. Start all again and resume from the last checkpoint (load_latest)."
            )
        try:
            return act(self._groups[key])
        except RuntimeError as error:
            groups, self._groups, self._sending = self._groups, {}, []
            for group in groups.values():
                dist.destroy_process_group(group)
            step = max(message.step, 0)  # the parameters that training begins with are of step -1
            peer = message.target if what == SENDING else message.source
            why = str(error).splitlines()[0].split(". ")[0]
            raise LaunchError(
                f"Worker {message.worker}, stage {message.stage}, training step {step}: "
                f"{what.format(_NAMES[message.kind])} rank {peer}, which is gone or was silent for "
                f"{self._timeout.total_seconds():g} s ({why}). {RESUME}"
            ) from error


def packed_bytes(likes: Sequence[Tensor]) -> int:
    """Bytes of tensors like these in one message."""
    return sum(_aligned(like) for like in likes)


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of the tensors as bytes, in order."""
    buffer = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=device)
    for tensor, view in zip(tensors, unpack(buffer, tensors), strict=True):
        view.copy_(tensor.detach())
    return buffer


def unpack(buffer: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Views of what ``pack`` made of tensors with these shapes and dtypes (on any device)."""
    views, start = list[Tensor](), 0
    for like in likes:
        stop = start + like.numel() * like.element_size()
        views.append(buffer[start:stop].view(like.dtype).view(like.shape))
        start += _aligned(like)
    return views


def _aligned(like: Tensor) -> int:
    return math.ceil(like.numel() * like.element_size() / ALIGNMENT) * ALIGNMENT


# What the messages of a process hold: from what it has to what others need, and back.


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
    return any(message in pass_.receives for past in steps for pass_ in programme.passes(message.target, past))


def _see_off(mailbox: ProcessMailbox, done: list[tuple[CyclicProgramme, int]]) -> None:
    """Wait for what others still take in training steps that this process has run: a transfer ends with its handle.

    Nobody waits for one who waits here in turn: all with as many training steps behind them have taken what they need.
    ``done``: the last training step whose passes here were all run, and the programme that they were of.
    """
    ((programme, step),) = done
    if dist.is_initialized():
        with suppress(LaunchError):  # the receiver is gone, and with it the need
            mailbox.finish(lambda message: _taken_by(message, programme, step))


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
        self._done = [(programme, -1)]
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
        self._done[:] = [(programme, step)]

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
