"""Whole tensors put together from what every rank holds, and how often each item is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.parameters.pieces import LocalShard

ShownShard = tuple[str, tuple[int, ...], list[tuple[tuple[tuple[int, int], ...], Tensor]]]
"""A name, a whole shape, and pieces: where in the whole tensor, and their values."""


def show(held: Sequence[LocalShard]) -> list[list[ShownShard]]:
    """What every rank holds, by rank; all ranks call it."""
    mine: list[ShownShard] = [
        (one.name, one.shape, [(one.box.ranges, one.items.clone())] if one.box.items else []) for one in held
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [_with_values(Tensor.numpy, one) for one in mine])
    return [[_with_values(torch.from_numpy, one) for one in rank] for rank in everyone]


def _with_values(made: Callable[[Any], Any], shown: Any) -> Any:
    """Pieces with their values as something else: arrays are sent ten times as fast as tensors."""
    name, shape, pieces = shown
    return name, shape, [(ranges, made(values)) for ranges, values in pieces]


def assemble(everyone: Iterable[Iterable[ShownShard]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole tensors, and how many ranks hold each of their items; pieces of equal items must be equal."""
    wholes: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, shape, pieces in (one for rank in everyone for one in rank):
        if name not in counts:
            counts[name] = torch.zeros(shape, dtype=torch.int64)
        count = counts[name]
        assert count.shape == shape, name
        for ranges, values in pieces:
            if name not in wholes:
                wholes[name] = torch.zeros(shape, dtype=values.dtype)
            whole = wholes[name]
            where = tuple(slice(*pair) for pair in ranges)
            assert whole[where].shape == values.shape, name
            known = whole[where].where(count[where] > 0, values)
            assert torch.equal(known, values), f"{name}: ranks hold unequal copies"
            whole[where] = values
            count[where] += 1
    return wholes, counts
