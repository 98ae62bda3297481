"""What communication costs between the ranks of this world, by kind, message size and shape of group.

All groups of one shape that fit side by side in the world run at the same moment, as they do in training; the slowest
rank's time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.parallelism.collectives import all_gather, reduce_scatter
from galvatron_lite.profiler.schema import CollectivePoint
from galvatron_lite.profiler.timing import DEFAULT_RULE, Across, TimingRule, time_call

SIZES = tuple(4096 * 4**power for power in range(8))
"""Message sizes in bytes, 4 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """``size`` ranks that lie ``stride`` apart; ``siblings`` such groups make up the world."""

    size: int
    stride: int
    siblings: int


def group_shapes(world: int) -> list[GroupShape]:
    """Every shape whose groups tile a world, near ones first."""
    shapes = []
    for size in _divisors(world):
        if size > 1:
            shapes += [GroupShape(size, stride, world // size) for stride in _divisors(world // size)]
    return shapes


def ranks_of(shape: GroupShape, world: int) -> list[list[int]]:
    """The ranks of every group of one shape in a world."""
    span = shape.size * shape.stride
    starts = [block + offset for block in range(0, world, span) for offset in range(shape.stride)]
    return [[start + index * shape.stride for index in range(shape.size)] for start in starts]


def make_group(shape: GroupShape) -> dist.ProcessGroup | None:
    """This rank's group of a shape; every rank of the world must call it. None: the whole world."""
    world = dist.get_world_size()
    if shape.size == world:
        return None
    groups: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(ranks_of(shape, world))  # type: ignore[no-untyped-call]
    return groups[0]


def measure_collective(
    collective: Collective,
    shape: GroupShape,
    group: dist.ProcessGroup | None,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    rule: TimingRule = DEFAULT_RULE,
) -> list[CollectivePoint]:
    """Points of one kind of communication on one shape of group, smallest message first.

    Stops growing the message once one call takes a third of the time that the rule grants a point.
    """
    points = []
    for size in sizes:
        call = prepare(collective, size, group, device)
        seconds = time_call(call, device, rule, Across.MAX).seconds
        points.append(CollectivePoint(collective, shape.size, shape.stride, shape.siblings, size, seconds))
        if seconds > rule.seconds / 3:
            break
    return points


def prepare(
    collective: Collective, size: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """A call that communicates ``size`` bytes (see ``CollectivePoint.size``) in float32 over preallocated zeros."""
    ranks = dist.get_world_size(group)
    items = max(size // 4 // ranks, 1)
    whole, part = torch.zeros(items * ranks, device=device), torch.zeros(items, device=device)
    if collective is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, group=group)
    if collective is Collective.ALL_GATHER:
        return lambda: all_gather(whole, part, group)
    if collective is Collective.REDUCE_SCATTER:
        return lambda: reduce_scatter(part, whole, group)
    if collective is Collective.ALL_TO_ALL:
        out = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(out, whole, group=group)
    if collective is Collective.BROADCAST:
        return lambda: dist.broadcast(whole, group=group, group_src=0)
    return lambda: _send_or_receive(whole, group)


def _send_or_receive(tensor: Tensor, group: dist.ProcessGroup | None) -> object:
    """Rank 0 of the group sends to rank 1; the others have nothing to do."""
    rank = dist.get_rank(group)
    if rank == 0:
        return dist.send(tensor, group=group, group_dst=1)
    return dist.recv(tensor, group=group, group_src=0) if rank == 1 else None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
