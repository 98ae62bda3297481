"""Messages from process to process: point to point, one transfer each, never a collective.

Every kind of message has a process group for either direction between two ranks, so that a transfer never waits for one
of another kind, and those of a pair start in the same order at both ends (NCCL asks for that). A receive can be started
ahead (``expect``). Both ends know the shapes of a message's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, MessageContent

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
        self._tried(
            message,
            SENDING,
            lambda group: dist.send_object_list([value], dst=message.target, group=group, device=self._device),
        )

    def hear(self, message: CyclicMessage) -> Any:
        """The value that the sender of a message sent ahead of it (``tell``)."""
        box: list[Any] = [None]
        self._tried(
            message,
            AWAITING,
            lambda group: dist.recv_object_list(box, src=message.source, group=group, device=self._device),
        )
        return box[0]

    def _finish(self, transfers: list[_Transfer]) -> None:
        waiting = {id(one) for one in transfers}
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
