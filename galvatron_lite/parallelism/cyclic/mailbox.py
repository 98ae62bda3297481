"""Messages from process to process: point to point, one transfer each, never a collective.

Every kind of message has a process group for either direction between two ranks, so that a transfer never waits for one
of another kind, and those of a pair start in the same order at both ends (NCCL asks for that). A receive can be started
ahead (``expect``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.packing import pack, packed_bytes, unpack
from galvatron_lite.parallelism.cyclic.programme import Kind, Message

REACH = 4
"""Sends of a lane that may be under way. Every message is awaited at most two time steps after it was sent, so one that
is so much older has been asked for by a pass that depends on nothing sent since: waiting for it ends."""
RESUME = "Training has stopped. Start all processes again and resume from the last checkpoint."


class Mailbox(Protocol):
    """Where an executor sends and receives; both ends of every message know the shapes of its tensors."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send copies of the tensors; returns at once."""

    def expect(self, message: Message, likes: Sequence[Tensor]) -> None:
        """Start to receive. Messages of one lane are expected in the order in which they are sent."""

    def receive(self, message: Message, likes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, shaped like these, once they are here.

        Raises:
            LaunchError: the sender is gone, or silent for too long.
        """

    def tell(self, message: Message, value: object) -> None:
        """Send something small that can be pickled, ahead of the message."""

    def hear(self, message: Message) -> Any:
        """What the sender of a message told."""

    def finish(self) -> None:
        """Wait until everything sent has arrived."""


class Lane(NamedTuple):
    """Messages that keep their order: of one kind, between two ranks, in one direction."""

    kind: Kind
    source: int
    target: int


def lane_of(message: Message) -> Lane:
    """The lane that a message takes."""
    return Lane(message.kind, message.source, message.target)


@dataclass(slots=True)
class _Transfer:
    """One under way."""

    work: dist.Work | None
    buffer: Tensor
    message: Message


@dataclass(slots=True)
class _Traffic:
    sending: deque[_Transfer] = field(default_factory=deque)
    expected: dict[Message, _Transfer] = field(default_factory=dict)


class ProcessMailbox:
    """Messages between the ranks of the default process group. Every rank makes one at the same time.

    Args:
        kinds: of messages that will be sent.
        device: where received tensors live.
        timeout: seconds after which a message that does not come is an error.
    """

    def __init__(self, kinds: Iterable[Kind], device: torch.device, timeout: float) -> None:
        self._device, self._timeout = device, timedelta(seconds=timeout)
        self._groups: dict[tuple[Kind, bool], Any] = {
            (kind, up): dist.new_group(
                timeout=self._timeout, group_desc=f"cyclic {kind.value} {'up' if up else 'down'}"
            )
            for kind in sorted(set(kinds))
            for up in (True, False)
        }
        self._lanes: dict[Lane, _Traffic] = {}

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """See ``Mailbox``."""
        sending = self._traffic(message).sending
        while len(sending) >= REACH:
            self._wait(sending.popleft(), "was not taken by", message.target)
        buffer = pack(tensors, self._device)
        try:
            work = dist.isend(buffer, message.target, group=self._group(message))
        except RuntimeError as error:
            raise self._lost(message, "could not be sent to", message.target, error) from error
        sending.append(_Transfer(work, buffer, message))

    def expect(self, message: Message, likes: Sequence[Tensor]) -> None:
        """See ``Mailbox``."""
        expected = self._traffic(message).expected
        if message in expected:
            return
        buffer = torch.empty(packed_bytes(likes), dtype=torch.uint8, device=self._device)
        try:
            work = dist.irecv(buffer, message.source, group=self._group(message))
        except RuntimeError as error:
            raise self._lost(message, "did not arrive from", message.source, error) from error
        expected[message] = _Transfer(work, buffer, message)

    def receive(self, message: Message, likes: Sequence[Tensor]) -> list[Tensor]:
        """See ``Mailbox``."""
        self.expect(message, likes)
        transfer = self._traffic(message).expected.pop(message)
        self._wait(transfer, "did not arrive from", message.source)
        return unpack(transfer.buffer, likes)

    def tell(self, message: Message, value: object) -> None:
        """See ``Mailbox``."""
        dist.send_object_list([value], dst=message.target, group=self._group(message), device=self._device)

    def hear(self, message: Message) -> Any:
        """See ``Mailbox``."""
        received: list[Any] = [None]
        try:
            dist.recv_object_list(received, src=message.source, group=self._group(message), device=self._device)
        except RuntimeError as error:
            raise self._lost(message, "did not arrive from", message.source, error) from error
        return received[0]

    def finish(self) -> None:
        """See ``Mailbox``."""
        for traffic in self._lanes.values():
            while traffic.sending:
                transfer = traffic.sending.popleft()
                self._wait(transfer, "was not taken by", transfer.message.target)

    def _wait(self, transfer: _Transfer, what: str, peer: int) -> None:
        try:
            if transfer.work is not None:
                transfer.work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(transfer.message, what, peer, error) from error

    def _lost(self, message: Message, what: str, peer: int, error: RuntimeError) -> LaunchError:
        """Close all groups, so that whoever waits for this process stops too; the error to be raised."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            dist.destroy_process_group(group)
        return LaunchError(
            f"{_told(message)} {what} rank {peer}: silent for {self._timeout.total_seconds():g} s, or gone "
            f"({str(error).splitlines()[0]}). {RESUME}"
        )

    def _group(self, message: Message) -> Any:
        key = (message.kind, message.source < message.target)
        if key not in self._groups:
            raise LaunchError(
                "A process was lost before. Start all processes again and resume from the last checkpoint."
            )
        return self._groups[key]

    def _traffic(self, message: Message) -> _Traffic:
        return self._lanes.setdefault(lane_of(message), _Traffic())


def _told(message: Message) -> str:
    """A message, to be named in an error."""
    return f"Worker {message.worker}, stage {message.stage}, training step {message.step}: the {_NAMES[message.kind]}"


_NAMES = {
    Kind.ACTIVATION: "activations",
    Kind.GRADIENT: "gradients of activations",
    Kind.PARTIAL: "gradient sum of the workers so far",
    Kind.UPDATE: "gradient of all workers",
    Kind.WEIGHTS: "parameters",
    Kind.STATES: "parameters, gradient sum and optimizer states",
}
