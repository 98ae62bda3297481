"""The part of a parameter that one device holds, and its place in the full parameter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from galvatron_lite.parallelism.shares import share


class Placement(StrEnum):
    """What a device holds of a parameter and of its gradient.

    SHARDED: a slice, and its complete gradient. REPLICATED: the full parameter, and its complete gradient, the same on
    all devices. PARTIAL: the full parameter, and a gradient to be summed over the tensor group.
    """

    SHARDED = "sharded"
    REPLICATED = "replicated"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of a parameter on one device."""

    placement: Placement
    shape: tuple[int, ...]  # of the full parameter
    degree: int = 1  # devices that share it
    rank: int = 0  # index of this device among them
    dim: int = 0  # along which it is split (``SHARDED`` only)
    parts: tuple[int, ...] = ()  # lengths along ``dim`` of fused parts, each split by ``share`` (``SHARDED`` only)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of the local slice of each part, along ``dim`` of the full parameter."""
        starts = [sum(self.parts[:index]) for index in range(len(self.parts))]
        shares = [share(extent, self.degree, self.rank) for extent in self.parts]
        return tuple((start + offset, length) for start, (offset, length) in zip(starts, shares, strict=True))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this device holds."""
        if self.placement is not Placement.SHARDED:
            return self.shape
        local = list(self.shape)
        local[self.dim] = sum(length for _, length in self.ranges)
        return tuple(local)


def slice_full(full: Tensor, shard: ParameterShard) -> Tensor:
    """Return a device's part of a full tensor (parameter, gradient or optimizer state), copied if it is a slice."""
    if shard.placement is not Placement.SHARDED:
        return full
    return torch.cat([full.narrow(shard.dim, start, length) for start, length in shard.ranges], shard.dim)
