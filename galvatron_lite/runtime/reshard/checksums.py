"""Checksums of full tensors that do not depend on how the tensors are sharded: ranks add up the sums of their items.

The bits of each item, as an integer, are multiplied by an odd number that depends on the item's position in the full
tensor, and summed modulo 2^64 (multiplicative hashing, Knuth, The Art of Computer Programming 3, section 6.4; the
factor is a product over dims). This detects changed bits, and swapped, missing and repeated items.
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
"""Items that are summed at once, so that intermediate tensors are small."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd factors of the dims, used cyclically."""


def sum_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Return the sums of values over all ranks, modulo 2^64."""
    signed = [value % MODULUS - (MODULUS if value % MODULUS >= MODULUS // 2 else 0) for value in values]
    total = torch.tensor(signed, dtype=torch.int64, device=device)
    if dist.get_world_size() > 1 and len(signed):
        dist.all_reduce(total)
    return [int(value) % MODULUS for value in total.tolist()]


def checksum(shards: Iterable[LocalShard]) -> int:
    """Return the checksum in [0, 2^64) of shards of a tensor."""
    return sum(_sum(shard.items, shard.box) for shard in shards) % MODULUS


def _sum(items: Tensor, box: Box) -> int:
    if items.dim() == 0:
        items, box = items.reshape(1), Box(((0, 1),))
    rows = max(1, ITEMS // max(1, items[0].numel()))
    factors = [_weights(span, dim, items.device) for dim, span in enumerate(box.ranges)]
    total = 0
    for start in range(0, items.shape[0], rows):
        block = _bits(items[start : start + rows])
        for weights in reversed(factors[1:]):
            block = (block * weights).sum(-1, dtype=torch.int64)
        total += int((block.long() * factors[0][start : start + rows]).sum())
    return total


def _bits(items: Tensor) -> Tensor:
    """Items as integers of their size; items of 16 bytes as a combination of two integers."""
    items = items.contiguous()
    if items.element_size() in _INTEGERS:
        return items.view(_INTEGERS[items.element_size()])
    halves = items.view(torch.int64).reshape(*items.shape, 2)
    return halves[..., 0] + halves[..., 1] * _FACTORS[1]


def _weights(span: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """The odd factors of positions along a dim, as 32-bit integers that wrap around."""
    positions = torch.arange(*span, device=device, dtype=torch.int64)
    mixed = (positions * 2 + 1) * _FACTORS[dim % len(_FACTORS)]
    return ((mixed ^ (mixed >> 15)) | 1).to(torch.int32)
