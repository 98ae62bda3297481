"""Checksums of complete tensors, independent of how they are cut: each rank adds up its items, and ranks add up.

Each item's bits, as an integer, are multiplied by an odd number that depends on its place in the complete tensor, and
summed modulo 2^64 (multiplicative hashing, Knuth, The Art of Computer Programming 3, section 6.4; a product of one
factor a dim). So a changed bit, exchanged, missing and repeated items are all seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runtime.activations.layout import Box
from galvatron_lite.runtime.parameters.pieces import LocalShard

MODULUS = 2**64
ITEMS = 2**21
"""Items that are worked on at once, so that intermediate tensors stay small."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd, one a dim, in turns."""


def sum_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Sums over the ranks modulo 2^64."""
    signed = [value % MODULUS - (MODULUS if value % MODULUS >= MODULUS // 2 else 0) for value in values]
    total = torch.tensor(signed, dtype=torch.int64, device=device)
    if dist.get_world_size() > 1 and len(signed):
        dist.all_reduce(total)
    return [int(value) % MODULUS for value in total.tolist()]


def checksum(parts: Iterable[LocalShard]) -> int:
    """The checksum in [0, 2^64) of parts of a tensor."""
    return sum(_sum(part.items, part.box) for part in parts) % MODULUS


def _sum(part: Tensor, box: Box) -> int:
    if part.dim() == 0:
        part, box = part.reshape(1), Box(((0, 1),))
    rows = max(1, ITEMS // max(1, part[0].numel()))
    factors = [_weights(span, dim, part.device) for dim, span in enumerate(box.ranges)]
    total = 0
    for start in range(0, part.shape[0], rows):
        block = _bits(part[start : start + rows])
        for weights in reversed(factors[1:]):
            block = (block * weights).sum(-1, dtype=torch.int64)
        total += int((block.long() * factors[0][start : start + rows]).sum())
    return total


def _bits(part: Tensor) -> Tensor:
    """Items as integers of their size; items of 16 bytes as a mix of two integers."""
    part = part.contiguous()
    if part.element_size() in _INTEGERS:
        return part.view(_INTEGERS[part.element_size()])
    halves = part.view(torch.int64).reshape(*part.shape, 2)
    return halves[..., 0] + halves[..., 1] * _FACTORS[1]


def _weights(span: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """The odd factors of places along a dim, as 32-bit integers (that wrap around)."""
    places = torch.arange(*span, device=device, dtype=torch.int64)
    mixed = (places * 2 + 1) * _FACTORS[dim % len(_FACTORS)]
    return ((mixed ^ (mixed >> 15)) | 1).to(torch.int32)
