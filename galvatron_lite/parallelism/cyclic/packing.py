"""Tensors as one run of bytes, so that a message is one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: where a tensor begins, whatever its dtype."""


def packed_bytes(likes: Sequence[Tensor]) -> int:
    """Bytes of tensors like these in one message."""
    return sum(_room(like) for like in likes)


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
        start += _room(like)
    return views


def _room(like: Tensor) -> int:
    return math.ceil(like.numel() * like.element_size() / ALIGNMENT) * ALIGNMENT
