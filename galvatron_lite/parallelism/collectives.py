"""Groups of processes, and collectives of equal parts by the names that the installed torch prefers.

2.13 renames those of 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Gather equal parts into one tensor, one after the other along its first dim; the work where in the background."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=async_op)


def reduce_scatter(part: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Sum over the group, and scatter equal parts along the first dim; the work where in the background."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, tensor, group=group, async_op=async_op)
