"""The process groups of one plan: made once for each purpose and ranks, and handed on to the plan that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]


class ProcessGroups:
    """Makes process groups, and knows which it made.

    Every rank of the world asks for the same groups in the same order, those it is no member of too.

    Args:
        before: groups of the plan before this one; what both need is made once.
        timeout: seconds after which their collectives are given up; None: that of the plan before, or else torch's own.
    """

    def __init__(self, before: ProcessGroups | None = None, timeout: float | None = None) -> None:
        self.timeout: float | None = before.timeout if before is not None and timeout is None else timeout
        self._patience = None if self.timeout is None else timedelta(seconds=self.timeout)
        self._made: dict[tuple[str, Ranks], dist.ProcessGroup] = {}
        self._before = {} if before is None else dict(before._made)

    @property
    def count(self) -> int:
        """How many there are, those of other ranks included."""
        return len(self._made)

    def group(self, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
        """The group of these ranks for a purpose; ``dist.GroupMember.NON_GROUP_MEMBER`` where this rank is none."""
        key = purpose, tuple(ranks)
        if key not in self._made:
            existing = self._before.get(key)
            self._made[key] = self._new(ranks, purpose) if existing is None else existing
        return self._made[key]

    def _new(self, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._patience, group_desc=purpose)
        return group

    def create(self, groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
        """Make every group; the one this rank is in, or None."""
        created = [(ranks, self.group(ranks, purpose)) for ranks in groups]
        return next((group for ranks, group in created if dist.get_rank() in ranks), None)

    def settle(self) -> None:
        """Forget the groups of the plan before."""
        self._before = {}

    def destroy(self, kept: ProcessGroups) -> None:
        """Destroy the groups that another plan does not have; its members call it together, with no work under way."""
        rank = dist.get_rank()
        for key, group in self._made.items():
            if key not in kept._made and rank in key[1]:
                dist.destroy_process_group(group)
        self._made = {}


# Groups of processes, and collectives of equal parts by the names that the installed torch prefers.
#
# 2.13 renames those of 2.11.


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of ``torch.distributed``."""

    process_group: dist.ProcessGroup | None = None  # the group; None for all processes

    # looked up once: torch takes microseconds for each, which count in every call on shards
    size: int = field(init=False)  # processes in the group
    rank: int = field(init=False)  # index of this process in the group

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", dist.get_world_size(self.process_group))
        object.__setattr__(self, "rank", dist.get_rank(self.process_group))


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Gather equal parts into one tensor, one after the other along its first dim; the work where in the background."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=async_op)


def reduce_scatter(part: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Sum over the group, and scatter equal parts along the first dim; the work where in the background."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, tensor, group=group, async_op=async_op)
