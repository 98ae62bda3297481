"""The full model's state, put together from the processes' stages, and shared out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.cyclic.setup import CyclicRuntime
from galvatron_lite.runtime.parameters.full_state import gather, put
from galvatron_lite.runtime.parameters.pieces import ItemRun, LocalShard, all_of


def full_state(runtime: CyclicRuntime) -> dict[str, Tensor]:
    """The model's ``state_dict()``, after ``flush``, on the CPU of every rank; all ranks call it."""
    found = gather(_held(runtime))
    return {name: found[first] for name, first in runtime.entries.names.items() if first in found}


def load_full_state(runtime: CyclicRuntime, state: Mapping[str, Tensor]) -> None:
    """Take this process's part of a full state.

    Raises:
        InputError: an entry is missing, or has another shape.
    """
    put(_held(runtime), runtime.entries, state)


def even_out(runtime: CyclicRuntime) -> None:
    """Give every process the mean of the running statistics; the largest of counts. All ranks call it."""
    buffers = {name: buffer for part in runtime.parts.values() for name, buffer in part.buffers()}
    everyone = [{name: buffer.cpu() for name, buffer in buffers.items()}]
    if dist.get_world_size() > 1:
        (here,) = everyone
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, here)
    for name, buffer in buffers.items():
        buffer.copy_(between([one[name] for one in everyone if name in one]))


def loose_buffers(runtime: CyclicRuntime) -> dict[str, Tensor]:
    """Buffers of the model's state that no layer has, by name."""
    buffers = runtime.model.named_buffers()
    return {name: one for name, one in buffers if runtime.entries.homes.get(name) == "" and not one.is_meta}


def between(values: Sequence[Tensor]) -> Tensor:
    """One value for all: the mean of statistics, the largest of counts; theirs where they are equal."""
    first = values[0]
    if all(torch.equal(first, other) for other in values[1:]):
        return first
    stacked = torch.stack(list(values))
    return stacked.mean(0) if first.is_floating_point() or first.is_complex() else stacked.amax(0)


def _held(runtime: CyclicRuntime) -> list[LocalShard]:
    """What this process has of the state; after ``flush`` all processes of a stage have the same."""
    tensors: dict[str, Tensor] = loose_buffers(runtime)
    for stage, states in runtime.executor.states.items():
        tensors |= states.masters
        tensors |= runtime.parts[stage].buffers()
    return [
        LocalShard(name, tuple(tensor.shape), tensor.detach(), (ItemRun(all_of(tensor.shape), all_of(tensor.shape)),))
        for name, tensor in tensors.items()
        if name in runtime.entries.names
    ]
