"""Whole parameters, buffers and gradients of a model that is split over many ranks, under the user's own names."""

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
    """The whole gradient of every parameter that has one, by name, on the CPU of every rank; all ranks must call it.

    A shared parameter is listed under each of its names.
    """
    return gather_named(held_gradients(parallel), parallel.entries)


def full_state_dict(parallel: Parallel) -> dict[str, Tensor]:
    """The user's model's ``state_dict()``: whole parameters and buffers, on the CPU of every rank.

    Buffers are those of the first rank that has them: under data parallelism, batch norms track the statistics of their
    own share of the samples, as in DistributedDataParallel. All ranks must call it.
    """
    return gather_named([*held_parameters(parallel), *held_buffers(parallel)], parallel.entries)


def load_full_state_dict(parallel: Parallel, state: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers from a whole ``state_dict``; every rank takes its shares, without communication.

    Raises:
        InputError: an entry this rank needs is missing, or has another shape.
    """
    put([*held_parameters(parallel), *held_buffers(parallel)], parallel.entries, state)
    for runtime in parallel.runtimes:
        runtime.updates.take()


@torch.no_grad()
def put(held: Sequence[LocalShard], entries: Entries, state: Mapping[str, Tensor]) -> None:
    """Set what this rank holds from a full state; errors as of ``load_full_state_dict``."""
    names: dict[str, list[str]] = {}
    for name, first in entries.names.items():
        names.setdefault(first, []).append(name)
    for one in held:
        full = entry_of(state, names.get(one.name, [one.name]), one.shape)
        one.items.copy_(cut_box(full, one.box))


def entry_of(state: Mapping[str, Tensor], names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """The entry of a full state under one of its names; ``InputError`` where it is missing or of another shape."""
    full = next((state[name] for name in names if name in state), None)
    if full is None:
        raise InputError("state", names[0], "The state has no such entry. Give the state_dict of the whole model.")
    if tuple(full.shape) != shape:
        remedy = f"{names[0]} has another shape, {shape}. Give the state_dict of the same model."
        raise InputError("state", tuple(full.shape), remedy)
    return full


def gather(held: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Full tensors, by name, on the CPU of every rank; all ranks must call it.

    Of ranks that have the same items the first one's count.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensors, sources = dict[str, Tensor](), dict[tuple[str, Box], int]()
    for rank, theirs in enumerate(everyone([(one.name, one.shape, one.tensor.dtype, one.box) for one in held])):
        for name, shape, dtype, box in theirs:
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=dtype)
            if box.items:
                sources.setdefault((name, box), rank)
    for one in held:
        if sources.get((one.name, one.box)) == dist.get_rank():
            cut_box(tensors[one.name], one.box).copy_(one.items)
    for source, places in groupby(sources, key=sources.__getitem__):
        broadcast_each([cut_box(tensors[name], box) for name, box in places], source, device)
    return tensors


def gather_named(held: Sequence[LocalShard], entries: Entries) -> dict[str, Tensor]:
    """``gather``, with each tensor under all its names, in the model's order."""
    tensors = gather(held)
    return {name: tensors[first] for name, first in entries.names.items() if first in tensors}
