"""How one device's part of a parameter lies in the whole parameter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from galvatron_lite.parallelism.shares import share


class Placement(StrEnum):
    """What a device holds of a parameter, and of its gradient.

    SHARDED: a slice; the gradient of the slice is complete. REPLICATED: all of it; the gradient is complete and the
    same on every device. PARTIAL: all of it; the gradient must be summed over the tensor group.
    """

    SHARDED = "sharded"
    REPLICATED = "replicated"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """One device's part of a parameter."""

    placement: Placement  # what the device holds
    shape: tuple[int, ...]  # of the whole parameter
    degree: int = 1  # devices that share it
    rank: int = 0  # index of this device among them
    dim: int = 0  # along which it is split (``SHARDED`` only)
    # lengths along ``dim`` of the fused parts, each split by itself, the first ranks holding one more where it does
    # not divide (``SHARDED`` only)
    parts: tuple[int, ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, length) in the whole parameter of each part's local slice, along ``dim``."""
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
    """A device's part of a whole tensor (parameter, gradient or optimizer state); a new tensor where it is sliced."""
    if shard.placement is not Placement.SHARDED:
        return full
    return torch.cat([full.narrow(shard.dim, start, length) for start, length in shard.ranges], shard.dim)
