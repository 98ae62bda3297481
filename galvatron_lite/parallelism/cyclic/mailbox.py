"""Messages from process to process: point to point, one transfer each, never a collective.

Every kind of message has a process group for either direction between two ranks, so that a transfer never waits for one
of another kind, and those of a pair start in the same order at both ends (NCCL asks for that). A receive can be started
ahead (``expect``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, MessageContent
from galvatron_lite.parallelism.cyclic.packing import pack, packed_bytes, unpack

SENDING, AWAITING = "could not send {} to", "waited in vain for {} from"
RESUME = "Training has stopped. Start all processes again and resume from the last checkpoint (load_latest)."


class Mailbox(Protocol):
    """Where an executor sends and receives; both ends of every message know the shapes of its tensors."""

    def send(self, message: CyclicMessage, tensors: Sequence[Tensor], due: int = 0) -> None:
        """Send copies of the tensors; returns at once. Behind time step ``due`` one may wait until they are taken."""

    def clear(self, time: int) -> None:
        """Let go of the copies that were due before this time step."""

    def expect(self, message: CyclicMessage, likes: Sequence[Tensor]) -> None:
        """Start to receive. Messages of one lane are expected in the order in which they are sent."""

    def receive(self, message: CyclicMessage, likes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, shaped like these, once they are here.

        Raises:
            LaunchError: the sender is gone, or silent for too long.
        """

    def tell(self, message: CyclicMessage, value: object) -> None:
        """Send something small that can be pickled, ahead of the message."""

    def hear(self, message: CyclicMessage) -> Any:
        """What the sender of a message told."""

    def finish(self, which: Callable[[CyclicMessage], bool] = lambda _message: True) -> None:
        """Wait until everything sent, or those messages of it, has arrived.

        Raises:
            LaunchError: a receiver is gone, or silent for too long.
        """


class Lane(NamedTuple):
    """Messages that keep their order: of one kind, between two ranks, in one direction."""

    kind: MessageContent
    source: int
    target: int


def lane_of(message: CyclicMessage) -> Lane:
    """The lane that a message takes."""
    return Lane(message.kind, message.source, message.target)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One under way."""

    work: dist.Work | None
    buffer: Tensor
    message: CyclicMessage
    due: int = 0


class ProcessMailbox:
    """Messages between the ranks of the default process group. Every rank makes one at the same time.

    Args:
        kinds: of messages that will be sent.
        device: where received tensors live.
        timeout: seconds after which a message that does not come is an error.
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
        """See ``Mailbox``."""
        buffer = pack(tensors, self._device)
        try:
            work = dist.isend(buffer, message.target, group=self._group(message))
        except RuntimeError as error:
            raise self._lost(message, SENDING, message.target, error) from error
        self._sending.append(_Transfer(work, buffer, message, due))

    def clear(self, time: int) -> None:
        """See ``Mailbox``. Without waiting, gloo does not tell whether a transfer is complete."""
        taken = [one for one in self._sending if one.due < time]
        self._sending = [one for one in self._sending if one.due >= time]
        for transfer in taken:
            self._wait(transfer, SENDING, transfer.message.target)

    def expect(self, message: CyclicMessage, likes: Sequence[Tensor]) -> None:
        """See ``Mailbox``."""
        if message in self._expected:
            return
        buffer = torch.empty(packed_bytes(likes), dtype=torch.uint8, device=self._device)
        try:
            work = dist.irecv(buffer, message.source, group=self._group(message))
        except RuntimeError as error:
            raise self._lost(message, AWAITING, message.source, error) from error
        self._expected[message] = _Transfer(work, buffer, message)

    def receive(self, message: CyclicMessage, likes: Sequence[Tensor]) -> list[Tensor]:
        """See ``Mailbox``."""
        self.expect(message, likes)
        transfer = self._expected.pop(message)
        self._wait(transfer, AWAITING, message.source)
        return unpack(transfer.buffer, likes)

    def tell(self, message: CyclicMessage, value: object) -> None:
        """See ``Mailbox``."""
        try:
            dist.send_object_list([value], dst=message.target, group=self._group(message), device=self._device)
        except RuntimeError as error:
            raise self._lost(message, SENDING, message.target, error) from error

    def hear(self, message: CyclicMessage) -> Any:
        """See ``Mailbox``."""
        received: list[Any] = [None]
        try:
            dist.recv_object_list(received, src=message.source, group=self._group(message), device=self._device)
        except RuntimeError as error:
            raise self._lost(message, AWAITING, message.source, error) from error
        return received[0]

    def finish(self, which: Callable[[CyclicMessage], bool] = lambda _message: True) -> None:
        """See ``Mailbox``."""
        awaited = [one for one in self._sending if which(one.message)]
        self._sending = [one for one in self._sending if not which(one.message)]
        for transfer in awaited:
            self._wait(transfer, SENDING, transfer.message.target)

    def _wait(self, transfer: _Transfer, what: str, peer: int) -> None:
        try:
            if transfer.work is not None:
                transfer.work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(transfer.message, what, peer, error) from error

    def _lost(self, message: CyclicMessage, what: str, peer: int, error: RuntimeError) -> LaunchError:
        """Close all groups, so that whoever waits for this process stops too; the error to be raised."""
        groups, self._groups, self._sending = self._groups, {}, []
        for group in groups.values():
            dist.destroy_process_group(group)
        why = str(error).splitlines()[0].split(". ")[0]
        return LaunchError(
            f"{_operation(message, what)} rank {peer}, which is gone or was silent for "
            f"{self._timeout.total_seconds():g} s ({why}). {RESUME}"
        )

    def _group(self, message: CyclicMessage) -> Any:
        key = (message.kind, message.source < message.target)
        if key not in self._groups:
            raise LaunchError(
                "A process was lost before. Start all again and resume from the last checkpoint (load_latest)."
            )
        return self._groups[key]


def _operation(message: CyclicMessage, what: str) -> str:
    """What was to be done with a message, to be told in an error."""
    step = max(message.step, 0)  # the parameters that training begins with are of step -1
    place = f"Worker {message.worker}, stage {message.stage}, training step {step}"
    return f"{place}: {what.format(_NAMES[message.kind])}"


_NAMES = {
    MessageContent.ACTIVATION: "activations",
    MessageContent.GRADIENT: "gradients of activations",
    MessageContent.PARTIAL: "the sum of gradients so far",
    MessageContent.UPDATE: "the gradient of all workers",
    MessageContent.WEIGHTS: "parameters",
    MessageContent.STATES: "parameters, gradients and optimizer states",
}
