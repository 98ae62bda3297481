"""Memory of tensors that are given back before the tensors themselves are gone, and taken again.

Tensors of an old plan may be held a while longer by cycles of hooks, and by whoever may want to go back to that plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Sized = list[tuple[torch.UntypedStorage, int]]
"""Storages without memory, and how many bytes each had."""


def release(tensors: Iterable[Tensor]) -> Sized:
    """Give back the memory of tensors; those whose memory belongs to someone else (a mapped file) keep it."""
    released: Sized = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            released.append((storage, storage.nbytes()))
            storage.resize_(0)
    return released


def allocate(released: Sized) -> None:
    """Give the memory again, without what was in it; paddings are zeros."""
    for storage, size in released:
        if storage.nbytes() == 0:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = [one.untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
