"""The process groups of a plan, one for each purpose and ranks, which the next plan may reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]


class ProcessGroups:
    """Creates process groups and keeps track of them.

    All ranks of the world must request the same groups in the same order, including groups that they are not in.

    Args:
        before: groups of the previous plan, which are reused.
        timeout: seconds after which collectives time out; None: that of the previous plan, or torch's default.
    """

    def __init__(self, before: ProcessGroups | None = None, timeout: float | None = None) -> None:
        self.timeout: float | None = before.timeout if before is not None and timeout is None else timeout
        self._timedelta = None if self.timeout is None else timedelta(seconds=self.timeout)
        self._groups: dict[tuple[str, Ranks], dist.ProcessGroup] = {}
        self._before = {} if before is None else dict(before._groups)

    @property
    def count(self) -> int:
        """Number of groups, including those of other ranks."""
        return len(self._groups)

    def group(self, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
        """Return the group of ranks for a purpose; ``dist.GroupMember.NON_GROUP_MEMBER`` if this rank is not in it."""
        key = purpose, tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._before[key] if key in self._before else self._new(ranks, purpose)
        return self._groups[key]

    def _new(self, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timedelta, group_desc=purpose)
        return group

    def create(self, groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
        """Create groups; return the one that this rank is in, or None."""
        created = [(ranks, self.group(ranks, purpose)) for ranks in groups]
        return next((group for ranks, group in created if dist.get_rank() in ranks), None)

    def settle(self) -> None:
        """Forget the groups of the previous plan."""
        self._before = {}

    def destroy(self, kept: ProcessGroups) -> None:
        """Destroy the groups that ``kept`` does not have. Their members must call this together, without work in
        flight."""
        rank = dist.get_rank()
        for key, group in self._groups.items():
            if key not in kept._groups and rank in key[1]:
                dist.destroy_process_group(group)
        self._groups = {}


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of ``torch.distributed``."""

    process_group: dist.ProcessGroup | None = None  # None for all processes
    # fields, because torch takes microseconds to look them up, in each call on shards
    size: int = field(init=False)  # processes in the group
    rank: int = field(init=False)  # index of this process in the group

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", dist.get_world_size(self.process_group))
        object.__setattr__(self, "rank", dist.get_rank(self.process_group))


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Concatenate equal parts along the first dim, into ``output``; return the work if ``async_op``."""
    # torch 2.13 prefers other names than 2.11
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=async_op)


def reduce_scatter(part: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Sum over the group, and scatter equal parts along the first dim, into ``part``; return the work if
    ``async_op``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, tensor, group=group, async_op=async_op)
