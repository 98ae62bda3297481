"""Groups of processes, and collectives of equal parts by the names that the installed torch prefers.

2.13 renames those of 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of ``torch.distributed``."""

    process_group: dist.ProcessGroup | None = None  # the group; None for all processes

    @property
    def size(self) -> int:
        """Processes in the group."""
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        """Index of this process in the group."""
        return dist.get_rank(self.process_group)


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> object:
    """Gather equal parts into one tensor, one after the other along its first dim."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group)


def reduce_scatter(part: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> object:
    """Sum over the group, and scatter equal parts along the first dim."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, tensor, group=group)


def start_all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """``all_gather``, in the background."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work", gather(output, part, group=group, async_op=True))


def start_reduce_scatter(part: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """``reduce_scatter``, in the background."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast("dist.Work", scatter(part, tensor, group=group, async_op=True))
