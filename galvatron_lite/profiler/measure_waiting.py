"""What a blocking collective in the midst of compute costs beside its transfer: waiting for the others, waking up.

A collective measured by itself finds every rank ready. Between the matmuls of a tensor-parallel block the ranks arrive
at unequal moments and, on CPUs, the threads that move the data must first get a core. The figure is a difference: a
short chain of real shards that communicate, less the same shards alone, less the collectives measured by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup, TensorGroup
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.measure_chain import CHAIN_LAYERS, Chain, chain_run
from galvatron_lite.profiler.measure_collectives import GroupShape, make_group, prepare
from galvatron_lite.profiler.memory import storage_bytes
from galvatron_lite.profiler.segments import BlockCall, hidden_state
from galvatron_lite.profiler.timing import DEFAULT_RULE, Across, Lap, Term, TimingRule, launched, time_difference, whole


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds that a blocking collective costs beside its transfer: ``fixed + per_byte * bytes of the tensor``."""

    fixed: float = 0.0
    per_byte: float = 0.0


def measure_waiting(
    block: nn.Module,
    plan: TensorPlan,
    calls: Sequence[BlockCall],
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> Waiting:
    """Measure it on the largest tensor-parallel group that this world and the block allow.

    Args:
        block: a whole block on ``device``; copied.
        plan: how it is split.
        calls: what it is called with at few and at many samples.
        device: where.
        rule: how long to time each.

    Returns:
        Zero where the world or the block allows no tensor parallelism.
    """
    degree = largest_degree(plan)
    if degree == 1:
        return Waiting()
    group = make_group(GroupShape(degree, 1, dist.get_world_size() // degree))
    points = [_point(block, plan, call, ProcessTensorGroup(group), device, rule) for call in calls]
    return line_through(points)


def largest_degree(plan: TensorPlan) -> int:
    """The largest degree that divides both the world and what the block allows."""
    world = dist.get_world_size() if launched() else 1
    legal = [degree for degree in range(1, world + 1) if world % degree == 0 and plan.max_degree % degree == 0]
    return max(legal) if plan.collectives else 1


def line_through(points: Sequence[tuple[int, float]]) -> Waiting:
    """The line through the points of the smallest and the largest tensor, neither figure below zero."""
    (small, few), (large, many) = min(points), max(points)
    per_byte = max((many - few) / (large - small), 0.0) if large > small else 0.0
    return Waiting(max(few - per_byte * small, 0.0), per_byte)


def _point(
    block: nn.Module,
    plan: TensorPlan,
    call: BlockCall,
    group: ProcessTensorGroup,
    device: torch.device,
    rule: TimingRule,
) -> tuple[int, float]:
    """Bytes of the hidden state, and seconds that one collective of it costs beside its transfer."""
    size = storage_bytes([hidden_state(call.args, call.kwargs)])

    def chain(shards: TensorGroup) -> Callable[[Lap], object]:
        made = Chain(block)
        for layer in made.blocks:
            shard_layer(layer, plan, shards)
        return chain_run(made, call)

    # forward and backward of a block together reduce as often as its forward gathers and scatters
    each = 1.0 / (CHAIN_LAYERS * plan.collectives)
    terms = (
        Term(each, chain(group)),
        Term(-each, chain(ShapeOnlyGroup(group.size))),
        Term(-1.0, whole(prepare(Collective.ALL_REDUCE, size, group.process_group, device)), Across.MAX),
    )
    return size, time_difference(terms, device, rule).seconds
