"""Sending what a stage produces to the next stage, and its gradient back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.process_groups import ProcessGroups

Value = Any
"""What a layer returns: a tensor, or a tuple, list or mapping of tensors and plain values."""


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """The ranks with the same place in every stage, in the order of the stages.

    Forward and backward traffic have a group each: with NCCL the transfers of one group run in order, and a send that
    waits for its receiver must not hold back the opposite direction.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


def pipeline_groups(stages: int, groups: ProcessGroups | None = None) -> PipelineGroups:
    """Make the groups of this rank. Every rank of the world calls this at the same time.

    Args:
        stages: how many; divides the world size. Stage s holds the consecutive ranks [s*n, (s+1)*n).
        groups: makes them.
    """
    chains, groups = place_groups(range(stages), stages), groups or ProcessGroups()
    forward, backward = groups.own(chains, "pipeline forward"), groups.own(chains, "pipeline backward")
    if forward is None or backward is None:
        raise LaunchError(f"{dist.get_world_size()} processes cannot be split into {stages} equal stages.")
    return PipelineGroups(forward, backward)


def place_groups(chosen: Sequence[int], stages: int) -> list[list[int]]:
    """For every place in a stage: the world ranks with that place in the chosen stages."""
    width = dist.get_world_size() // stages
    return [[stage * width + place for stage in chosen] for place in range(width)]


class Channel:
    """One direction of traffic between this stage and a neighbour.

    Args:
        group: the ranks with this rank's place in every stage.
        peer: the neighbour's rank in that group (its stage number).
        device: where received tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send(self, tensors: list[Tensor]) -> None:
        """Start sending. At most one earlier send per tensor may still be under way, which bounds the memory kept."""
        while len(self._sending) > len(tensors):
            self._finish_oldest()
        for tensor in tensors:
            data = tensor.detach().contiguous()
            self._sending.append((dist.isend(data, self._peer, group=self._group), data))

    def receive(self, templates: list[Tensor]) -> Incoming:
        """Start receiving tensors shaped like the templates."""
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=self._device) for like in templates]
        works = [dist.irecv(buffer, self._peer, group=self._group) for buffer in buffers]
        return Incoming(buffers, works)

    def finish(self) -> None:
        """Wait for every send under way."""
        while self._sending:
            self._finish_oldest()

    def send_object(self, value: object) -> None:
        """Send something small that can be pickled."""
        dist.send_object_list([value], dst=self._peer, group=self._group, device=self._device)

    def receive_object(self) -> Any:
        """Receive what ``send_object`` sent."""
        received: list[Any] = [None]
        dist.recv_object_list(received, src=self._peer, group=self._group, device=self._device)
        return received[0]

    def _finish_oldest(self) -> None:
        work, _ = self._sending.popleft()
        if work is not None:
            work.wait()


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


class Slot:
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


def arrived(template: Value, tensors: list[Tensor]) -> tuple[Value, list[Slot]]:
    """A value like the template that holds these tensors, and a slot for each that needs a gradient.

    Those are no leaves, so that code may change them in place, and they live no longer than autograd needs them.
    """
    source, slots = iter(tensors), list[Slot]()

    def fill(like: Tensor) -> Tensor:
        tensor = next(source)
        if not like.requires_grad:
            return tensor
        slots.append(Slot(like))
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)
        made: Tensor = _Arrival.apply(anchor, tensor, slots[-1])  # type: ignore[no-untyped-call]
        return made

    return map_tensors(template, fill), slots


class _Arrival(torch.autograd.Function):
    """Puts the gradient into the slot; the anchor has no data, but makes the result ask for a gradient."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tensor: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return tensor.data  # the same storage, but no view, which autograd would not let others change

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.slot.gradient = gradient
        return None, None, None


def differentiable(value: Value) -> list[Tensor]:
    """The tensors of a value through which gradients flow."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]
