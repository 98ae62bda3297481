"""Whole parameters, buffers and gradients of a model that is split over many ranks, under the user's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    return _named(parallel, gather(held_gradients(parallel)))


def full_state_dict(parallel: Parallel) -> dict[str, Tensor]:
    """The user's model's ``state_dict()``: whole parameters and buffers, on the CPU of every rank.

    Buffers are those of the first rank that has them: under data parallelism, batch norms track the statistics of their
    own share of the samples, as in DistributedDataParallel. All ranks must call it.
    """
    return _named(parallel, gather([*held_parameters(parallel), *held_buffers(parallel)]))


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
        aliases = names.get(one.name, [one.name])
        full = next((state[name] for name in aliases if name in state), None)
        if full is None:
            raise InputError(
                "state", aliases[0], "The state has no such entry. Give the state_dict of the whole model."
            )
        if tuple(full.shape) != one.shape:
            remedy = f"{one.name} has another shape, {one.shape}. Give the state_dict of the same model."
            raise InputError("state", tuple(full.shape), remedy)
        for chunk in one.chunks:
            cut_box(one.tensor, chunk.local).copy_(cut_box(full, chunk.whole))


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Box
    rank: int


def gather(held: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Full tensors, by name, on the CPU of every rank, piece by piece; all ranks must call it.

    Of ranks that have the same items the first one's count.
    """
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = {(one.name, chunk.whole): cut_box(one.tensor, chunk.local) for one in held for chunk in one.chunks}
    listed = [_Piece(one.name, one.shape, one.tensor.dtype, chunk.whole, rank) for one in held for chunk in one.chunks]
    pieces: dict[tuple[str, Box], _Piece] = {}
    for piece in (their for theirs in everyone(listed) for their in theirs):
        pieces.setdefault((piece.name, piece.whole), piece)
    tensors: dict[str, Tensor] = {}
    for place, piece in pieces.items():
        full = tensors.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.dtype))
        if piece.rank == rank:
            cut_box(full, piece.whole).copy_(mine[place])
    for source, several in groupby(pieces.values(), key=lambda piece: piece.rank):
        broadcast_each([cut_box(tensors[piece.name], piece.whole) for piece in several], source, device)
    return tensors


def _named(parallel: Parallel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under all its names, in the model's order."""
    return {name: tensors[first] for name, first in parallel.entries.names.items() if first in tensors}
