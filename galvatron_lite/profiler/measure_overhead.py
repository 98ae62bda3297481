"""What the runtime's own machinery costs the host beside its communication, by running its very pieces.

Each figure is a difference: a short chain of real blocks with the machinery, less the same chain without, less the
collectives measured alone at the same size; as far as memory allows, of what was timed in turn.

A blocking collective in the midst of compute costs more than its transfer: measured by itself it finds every rank
ready. Between the matmuls of a tensor-parallel block the ranks arrive at unequal moments and, on CPUs, the threads that
move the data must first get a core. That figure is a difference, too: a short chain of real shards that communicate,
less the same shards alone, less the collectives measured by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.batch import batch_size, move_batch, slice_batch
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from galvatron_lite.parallelism.pipeline.cost import weight_products, weight_seconds
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.runner import Receiver, Sender
from galvatron_lite.parallelism.sharded.groups import AxisGroup, ProcessAxisGroup
from galvatron_lite.parallelism.spatial.cost import exchanges, strategy_on
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup, TensorGroup
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
from galvatron_lite.profiler.measure_hardware import GroupShape, make_group, prepare
from galvatron_lite.profiler.measure_layers import (
    cut_pictures,
    differentiable,
    measured_grids,
    on_share,
    seeded,
    share_on,
)
from galvatron_lite.profiler.memory import storage_bytes
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.segments import SegmentCall, entering, hidden_state, leaf_of, run_on
from galvatron_lite.profiler.timing import (
    DEFAULT_RULE,
    Across,
    Lap,
    Term,
    TimingRule,
    launched,
    single_part,
    time_call,
    time_difference,
    time_laps,
)

CHAIN_LAYERS = 3
_PAIR = 2  # ranks between which exchanges of pixels are measured


class BlockChain(nn.Module):
    """Equal blocks that run one after another, each on its own copy of the input; ``change`` changes each of them."""

    def __init__(self, block: nn.Module, change: Callable[[nn.Module], object] = lambda _: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(CHAIN_LAYERS))
        for layer in self.blocks:
            change(layer)

    def forward(self, call: SegmentCall, leaves: list[Tensor]) -> Tensor:
        """A scalar whose backward runs through every block."""
        outputs = [differentiable(run_on(block, call, leaf)) for block, leaf in zip(self.blocks, leaves, strict=True)]
        return seeded([tensor for output in outputs for tensor in output], leaves[0].device)


def chain_run(
    chain: nn.Module,
    call: SegmentCall,
    watch: Callable[[Tensor], None] = lambda _: None,
    deferral: Deferral | None = None,
) -> Callable[[Lap], object]:
    """Forward and backward of a chain, as the second of two parts; gradients begin as None, as after ``zero_grad``.

    ``watch`` sees the chain's scalar before backward; what ``deferral`` was left follows backward.
    """
    leaf = leaf_of(call)

    def once(lap: Lap) -> None:
        chain.zero_grad(set_to_none=True)
        leaves = [entering(leaf) for _ in range(CHAIN_LAYERS)]
        lap()
        seed = chain(call, leaves)
        watch(seed)
        seed.backward()
        for make_gradient in deferral.take() if deferral is not None else ():
            make_gradient()
        lap()

    return once


def _longer(
    run: Callable[[Lap], object], plain: Callable[[Lap], object], *less: Term, device: torch.device, rule: TimingRule,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Seconds by which a layer of a chain takes longer than one of a plain chain, less other times; at least 0.

    ``share``: of the difference, what counts.
    """
    each = share / CHAIN_LAYERS
    return max(time_difference((Term(each, run), Term(-each, plain), *less), device, rule).seconds, 0.0)


_SMALL = 4096


def measure_overhead(
    block: nn.Module,
    calls: Mapping[int, SegmentCall],
    kind: LayerKind,
    batch: Any,
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> HostOverhead:
    """Measure the overhead of every kind of machinery that this world can use.

    ``calls``: of the block by their samples; what does not depend on samples is measured at the fewest.
    """
    call = calls[min(calls)]
    step = time_call(lambda: move_batch(slice_batch(batch, 0, batch_size(batch)), device), device, rule).seconds
    plain, watched = BlockChain(block), BlockChain(block)  # of which one collects gradients in buckets, but sends none
    reducer = GradientReducer([Reduced(parameter, None) for parameter in watched.parameters()])
    data = _longer(chain_run(watched, call, reducer.watch), chain_run(plain, call), device=device, rule=rule)
    spatial = line_through([_spatial_point(block, kind, *item, device, rule) for item in calls.items()])
    split = line_through([_split_point(block, item, device, rule) for item in calls.values()])
    overhead = HostOverhead(
        data=data,
        step=step,
        spatial=spatial.fixed,
        spatial_per_byte=spatial.slope,
        split_product=split.fixed / max(weight_products(kind), 1),
        split_share=min(split.slope, 1.0),
    )
    if not launched():
        return overhead
    return replace(
        overhead,
        zero=_zero_seconds(block, call, device, rule),
        pipeline=_pipeline(device, rule),
        spatial_exchange=_exchange_seconds(block, call, kind, device, rule),
    )


def _zero_seconds(block: nn.Module, call: SegmentCall, device: torch.device, rule: TimingRule) -> float:
    """Beside a layer's collectives under ZeRO-3: two gathers of its parameters, one reduction of its gradients."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plain = BlockChain(block)
    sharded = BlockChain(block, lambda layer: shard_group(ZeroGroup((layer,), mesh, STAGE_3), ()))
    apply_root(sharded, mesh)
    size = storage_bytes(block.parameters())
    gather, scatter = (
        single_part(prepare(kind, size, None, device)) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    collectives = Term(-2.0, gather, Across.MAX), Term(-1.0, scatter, Across.MAX)
    return _longer(chain_run(sharded, call), chain_run(plain, call), *collectives, device=device, rule=rule)


def _spatial_point(
    block: nn.Module, kind: LayerKind, samples: int, call: SegmentCall, device: torch.device, rule: TimingRule
) -> tuple[float, float]:
    """Bytes that a block keeps of a share of its pixels, and by how much longer it takes than on a picture of that
    size."""
    grid = next(iter(measured_grids(kind)), None)
    if grid is None:
        return 0.0, 0.0
    size = kind.kept[Recompute.NONE].total * samples * share_on(kind, grid)
    local = call.with_arguments(lambda value: cut_pictures(value, kind, grid))
    shared = chain_run(BlockChain(block, lambda layer: on_share(layer, call, kind, grid)), local)
    try:
        return size, _longer(shared, chain_run(BlockChain(block), local), device=device, rule=rule)
    except RuntimeError:  # what needs its picture whole does not run on a smaller one
        return size, 0.0


def _split_point(block: nn.Module, call: SegmentCall, device: torch.device, rule: TimingRule) -> tuple[float, float]:
    """Seconds of a block's gradients of weights, and by how much longer the block takes where they have a pass of
    their own."""
    deferral, leaf = Deferral(), leaf_of(call)
    plain, split = BlockChain(block), BlockChain(block, lambda layer: defer_weights(layer, deferral))

    def both_passes(lap: Lap) -> None:
        leaves = [entering(leaf) for _ in range(CHAIN_LAYERS)]
        seed = plain(call, leaves)
        lap()
        seed.backward()
        lap()

    forward, backward = (lap / CHAIN_LAYERS for lap in time_laps(both_passes, device, rule).laps)
    longer = _longer(chain_run(split, call, deferral=deferral), chain_run(plain, call), device=device, rule=rule)
    return float(weight_seconds(forward, backward)), longer


def _exchange_seconds(
    block: nn.Module, call: SegmentCall, kind: LayerKind, device: torch.device, rule: TimingRule
) -> float:
    """How long an exchange of pairs of ranks that share a block's pixels keeps them beside its transfer."""
    grid = next((grid for grid in measured_grids(kind) if prod(grid) == _PAIR), None)
    world = dist.get_world_size()
    if grid is None or world % _PAIR:
        return 0.0
    image = hidden_state(call.args, call.kwargs)
    moved = exchanges(kind, strategy_on(grid), image.shape[0] * image.element_size())
    if not moved:
        return 0.0
    group = make_group(GroupShape(_PAIR, 1, world // _PAIR))
    pair = ProcessAxisGroup(group)

    def chain(axis: AxisGroup | None, rank: int) -> Callable[[Lap], object]:
        shared = BlockChain(block, lambda layer: on_share(layer, call, kind, grid, axis))
        return chain_run(shared, call.with_arguments(lambda value: cut_pictures(value, kind, grid, rank)))

    each = 1.0 / sum(one.count for one in moved)
    transfers = (
        Term(-each * one.count, single_part(prepare(one.collective, round(one.size), group, device)), Across.MAX)
        for one in moved
    )
    try:
        return _longer(chain(pair, pair.rank), chain(None, 0), *transfers, device=device, rule=rule, share=each)
    except RuntimeError:  # what needs its picture whole does not run on a smaller one
        return 0.0


def _pipeline(device: torch.device, rule: TimingRule) -> float:
    """How much longer a small message takes through the pipeline's post than by itself."""
    group, rank = dist.group.WORLD, dist.get_rank()
    if group is None:
        return 0.0
    message = torch.zeros(_SMALL // 4, device=device)
    sender = Sender(group, 1, device) if rank == 0 else None
    receiver = Receiver(group, 0, device) if rank == 1 else None

    def through() -> None:
        if sender is not None:
            sender.send([message], 1)
            sender.finish()
        elif receiver is not None:
            receiver.receive([message]).wait()

    bare = prepare(Collective.SEND_RECV, _SMALL, None, device)
    terms = Term(1.0, single_part(through), Across.MAX), Term(-1.0, single_part(bare), Across.MAX)
    return max(time_difference(terms, device, rule).seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds ``fixed + slope * x``; of a blocking collective beside its transfer, x is its tensor's bytes."""

    fixed: float = 0.0
    slope: float = 0.0


def measure_waiting(
    block: nn.Module,
    plan: TensorPlan,
    calls: Sequence[SegmentCall],
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> Line:
    """Measure it on the largest tensor-parallel group that this world and the block allow.

    Returns:
        Zero where the world or the block allows no tensor parallelism.
    """
    world = dist.get_world_size() if launched() and plan.collectives else 1
    degree = max(degree for degree in range(1, world + 1) if world % degree == 0 and plan.max_degree % degree == 0)
    if degree == 1:
        return Line()
    group = make_group(GroupShape(degree, 1, world // degree))
    points = [_point(block, plan, call, ProcessTensorGroup(group), device, rule) for call in calls]
    return line_through(points)


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The line through the points of the smallest and the largest x, neither figure below zero."""
    (small, few), (large, many) = min(points), max(points)
    slope = max((many - few) / (large - small), 0.0) if large > small else 0.0
    return Line(max(few - slope * small, 0.0), slope)


def _point(
    block: nn.Module,
    plan: TensorPlan,
    call: SegmentCall,
    group: ProcessTensorGroup,
    device: torch.device,
    rule: TimingRule,
) -> tuple[int, float]:
    """Bytes of the hidden state, and seconds that one collective of it costs beside its transfer."""
    size = storage_bytes([hidden_state(call.args, call.kwargs)])

    def chain(shards: TensorGroup) -> Callable[[Lap], object]:
        return chain_run(BlockChain(block, lambda layer: shard_layer(layer, plan, shards)), call)

    # forward and backward of a block together reduce as often as its forward gathers and scatters
    each = 1.0 / (CHAIN_LAYERS * plan.collectives)
    terms = (
        Term(each, chain(group)),
        Term(-each, chain(ShapeOnlyGroup(group.size))),
        Term(-1.0, single_part(prepare(Collective.ALL_REDUCE, size, group.process_group, device)), Across.MAX),
    )
    return size, time_difference(terms, device, rule).seconds
