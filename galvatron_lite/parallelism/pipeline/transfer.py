"""Sending what a stage produces to the next stage, and its gradient back."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.parallelism.process_groups import ProcessGroups

Value = Any
"""What a layer returns: a tensor, or a tuple, list or mapping of tensors and plain values."""


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """The ranks with the same place in every group of devices, in their order.

    Forward and backward traffic have a group each: with NCCL the transfers between two ranks of one group run in order,
    and a send that waits for its receiver must not hold back the opposite direction. So has what goes back to an
    earlier group of devices to be passed forward there, and the other way round.
    """

    forward: dist.ProcessGroup  # forward, backward: to the next group of devices, and its gradients back
    backward: dist.ProcessGroup
    # forth, back: to an earlier group of devices in forward, and its gradients; None where each has one stage
    forth: dist.ProcessGroup | None = None
    back: dist.ProcessGroup | None = None

    def between(self, what: Pass, source: int, target: int) -> dist.ProcessGroup:
        """The group for what a pass sends from one group of devices to another."""
        if what is Pass.FORWARD:
            found = self.forward if source < target else self.forth
        else:
            found = self.backward if source > target else self.back
        assert found is not None, "groups of several stages are made with turns=True"
        return found


def pipeline_groups(stages: int, groups: ProcessGroups | None = None, *, turns: bool = False) -> PipelineGroups:
    """Make the groups of this rank. Every rank of the world calls this at the same time.

    Args:
        stages: groups of devices; divides the world size. Number s holds the consecutive ranks [s*n, (s+1)*n).
        groups: makes them.
        turns: whether stages go round the groups of devices more than once.

    Raises:
        LaunchError: they do not divide the world.
    """
    chains = place_groups(range(stages), stages)
    groups = ProcessGroups() if groups is None else groups
    purposes = ("pipeline forward", "pipeline backward", "pipeline forth", "pipeline back")
    made = [groups.create(chains, purpose) for purpose in purposes[: 4 if turns else 2]]
    if made[0] is None or made[1] is None:
        raise LaunchError(f"{dist.get_world_size()} processes cannot be split into {stages} equal stages.")
    return PipelineGroups(made[0], made[1], *made[2:])


def place_groups(chosen: Sequence[int], stages: int) -> list[list[int]]:
    """For every place in a stage: the world ranks with that place in the chosen stages."""
    width = dist.get_world_size() // stages
    return [[stage * width + place for stage in chosen] for place in range(width)]


class Sender:
    """One direction of traffic to another group of devices.

    Args:
        group: the ranks with this rank's place in every group of devices.
        peer: number of the other group of devices.
        device: where tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)
        self._sending: deque[list[tuple[dist.Work | None, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], room: int, announcement: Any = None) -> None:
        """Start sending a message.

        Args:
            tensors: of the message.
            room: messages that may be under way, with this one; waits for earlier ones where there are more.
            announcement: what the receiver must know before; None: it knows.
        """
        while len(self._sending) >= room:
            self._finish_oldest()
        data = [] if announcement is None else _written(announcement, self._device)
        data += [tensor.detach().contiguous() for tensor in tensors]
        self._sending.append([(dist.isend(one, self._peer, group=self._group), one) for one in data])

    def finish(self) -> None:
        """Wait for every send under way."""
        while self._sending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work, _ in self._sending.popleft():
            if work is not None:
                work.wait()


class Receiver:
    """The other end of a ``Sender``; arguments alike."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)

    def announced(self) -> Any:
        """Wait for an announcement."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, self._peer, group=self._group)
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(text, self._peer, group=self._group)
        return pickle.loads(text.cpu().numpy().tobytes())

    def receive(self, templates: Sequence[Tensor]) -> Incoming:
        """Start receiving tensors shaped like the templates."""
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=self._device) for like in templates]
        works = [dist.irecv(buffer, self._peer, group=self._group) for buffer in buffers]
        return Incoming(buffers, works)


def _written(value: object, device: torch.device) -> list[Tensor]:
    """A small value of this program's own ranks, as tensors; pickled as torch's object collectives do."""
    text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [torch.tensor([text.numel()], dtype=torch.int64, device=device), text.to(device)]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Tensors on their way."""

    buffers: list[Tensor]
    works: list[dist.Work | None]

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.buffers


def template_of(value: Value) -> Value:
    """The value with its tensors on the meta device: what a receiver must know of it."""
    return map_tensors(
        value, lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    )


class GradientSlot:
    """Where the gradient of a tensor that arrived is put.

    Attributes:
        like: the tensor's shape and dtype.
        gradient: None until backward, and where nobody used the tensor.
    """

    __slots__ = ("gradient", "like")

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.gradient: Tensor | None = None

    def taken(self, device: torch.device) -> Tensor:
        """The gradient; zeros where there is none: the sender waits for one all the same."""
        return torch.zeros_like(self.like, device=device) if self.gradient is None else self.gradient


def arrived(template: Value, tensors: list[Tensor]) -> tuple[Value, list[GradientSlot]]:
    """A value like the template that holds these tensors, and a slot for each that needs a gradient.

    Those are no leaves, so that code may change them in place, and they live no longer than autograd needs them.
    """
    source, slots = iter(tensors), list[GradientSlot]()

    def fill(like: Tensor) -> Tensor:
        tensor = next(source)
        if not like.requires_grad:
            return tensor
        slots.append(GradientSlot(like))
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)
        made: Tensor = _Arrival.apply(anchor, tensor, slots[-1])  # type: ignore[no-untyped-call]
        return made

    return map_tensors(template, fill), slots


class _Arrival(torch.autograd.Function):
    """Puts the gradient into the slot; the anchor has no data, but makes the result ask for a gradient."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tensor: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return tensor.data  # the same storage, but no view, which autograd would not let others change

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.slot.gradient = gradient
        return None, None, None


def differentiable(value: Value) -> list[Tensor]:
    """The tensors of a value through which gradients flow."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]
