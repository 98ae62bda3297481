"""Full parameters, buffers and gradients of a split model, under the user's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.activations.layout import Box, cut_box
from galvatron_lite.runtime.parameters.pieces import (
    Entries,
    LocalShard,
    Parallel,
    held_buffers,
    held_gradients,
    held_parameters,
)
from galvatron_lite.runtime.peers import broadcast_each, everyone


def full_gradients(parallel: Parallel) -> dict[str, Tensor]:
    """The full gradients of parameters, by name, on the CPU of every rank; all ranks must call it.

    A shared parameter is listed under each of its names; parameters without a gradient are left out.
    """
    return gather_named(held_gradients(parallel), parallel.entries)


def full_state_dict(parallel: Parallel) -> dict[str, Tensor]:
    """The full model's ``state_dict()``, on the CPU of every rank; all ranks must call it.

    Buffers are those of the first rank that has them: under data parallelism, batch norms track the statistics of their
    own share of the samples, as in DistributedDataParallel.
    """
    return gather_named([*held_parameters(parallel), *held_buffers(parallel)], parallel.entries)


def load_full_state_dict(parallel: Parallel, state: Mapping[str, Tensor]) -> None:
    """Set this rank's shares of parameters and buffers from a full ``state_dict``, without communication.

    Raises:
        InputError: an entry this rank needs is missing, or has another shape.
    """
    put([*held_parameters(parallel), *held_buffers(parallel)], parallel.entries, state)
    for runtime in parallel.runtimes:
        runtime.updates.take()


@torch.no_grad()
def put(held: Sequence[LocalShard], entries: Entries, state: Mapping[str, Tensor]) -> None:
    """Set this rank's shards from a full state; errors as of ``load_full_state_dict``."""
    names: dict[str, list[str]] = {}
    for name, first in entries.names.items():
        names.setdefault(first, []).append(name)
    for shard in held:
        full = entry_of(state, names.get(shard.name, [shard.name]), shard.shape)
        shard.items.copy_(cut_box(full, shard.box))


def entry_of(state: Mapping[str, Tensor], names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """The entry of a full state under one of its names; InputError if it is missing or has another shape."""
    full = next((state[name] for name in names if name in state), None)
    if full is None:
        raise InputError("state", names[0], "The state has no such entry. Give the state_dict of the whole model.")
    if tuple(full.shape) != shape:
        remedy = f"{names[0]} has another shape, {shape}. Give the state_dict of the same model."
        raise InputError("state", tuple(full.shape), remedy)
    return full


def gather(held: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Gather full tensors, by name, on the CPU of every rank; all ranks must call it.

    Of ranks with the same items the first one sends them.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensors, sources = dict[str, Tensor](), dict[tuple[str, Box], int]()
    shards = everyone([(shard.name, shard.shape, shard.tensor.dtype, shard.box) for shard in held])
    for rank, shards_of_rank in enumerate(shards):
        for name, shape, dtype, box in shards_of_rank:
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=dtype)
            if box.items:
                sources.setdefault((name, box), rank)
    for shard in held:
        if sources.get((shard.name, shard.box)) == dist.get_rank():
            cut_box(tensors[shard.name], shard.box).copy_(shard.items)
    for source, places in groupby(sources, key=sources.__getitem__):
        broadcast_each([cut_box(tensors[name], box) for name, box in places], source, device)
    return tensors


def gather_named(held: Sequence[LocalShard], entries: Entries) -> dict[str, Tensor]:
    """Gather full tensors as ``gather``, each under all its names, in the model's order."""
    tensors = gather(held)
    return {name: tensors[first] for name, first in entries.names.items() if first in tensors}
