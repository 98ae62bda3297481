"""Measures the host time of the runtime's machinery (ZeRO, pipelines, shared pixels ...) besides its communication.

Each figure is a difference, timed in turn: a short chain of real blocks with the machinery, minus the chain without it,
minus its collectives measured alone at the same size.

The same holds for blocking collectives of a tensor-parallel group (``measure_waiting``). Measured alone, all ranks are
ready; between the matmuls of a block, ranks arrive at different moments and, on CPUs, the threads that move the data
must first get a core.
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

from galvatron_lite.cluster.cluster import Collective, RankGroup
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
from galvatron_lite.profiler.measure_hardware import make_group, prepare
from galvatron_lite.profiler.measure_layers import (
    cut_pictures,
    differentiable,
    first_share,
    measured_grids,
    with_seed_gradients,
    with_sharded_pixels,
)
from galvatron_lite.profiler.memory import storage_bytes
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.segments import SegmentCall, fresh_input, hidden_state, input_leaf, run_with
from galvatron_lite.profiler.timing import (
    DEFAULT_RULE,
    Across,
    Lap,
    Term,
    TimingRule,
    as_single_lap,
    launched,
    time_call,
    time_difference,
    time_laps,
)

CHAIN_LAYERS = 3
_PAIR = 2  # ranks between which exchanges of pixels are measured


class BlockChain(nn.Module):
    """Equal blocks that run one after another, each on a copy of the input; ``change`` modifies each of them."""

    def __init__(self, block: nn.Module, change: Callable[[nn.Module], object] = lambda _: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(CHAIN_LAYERS))
        for layer in self.blocks:
            change(layer)

    def forward(self, call: SegmentCall, leaves: list[Tensor]) -> Tensor:
        """Return a scalar whose backward runs through all blocks."""
        outputs = [differentiable(run_with(block, call, leaf)) for block, leaf in zip(self.blocks, leaves, strict=True)]
        return with_seed_gradients([tensor for output in outputs for tensor in output], leaves[0].device)


def chain_run(
    chain: nn.Module,
    call: SegmentCall,
    watch: Callable[[Tensor], None] = lambda _: None,
    deferral: Deferral | None = None,
) -> Callable[[Lap], object]:
    """Return a run of a chain whose second lap is forward and backward, with gradients None as after ``zero_grad``.

    ``watch`` is called with the chain's scalar before backward; gradients that ``deferral`` put off follow backward.
    """
    leaf = input_leaf(call)

    def run(lap: Lap) -> None:
        chain.zero_grad(set_to_none=True)
        leaves = [fresh_input(leaf) for _ in range(CHAIN_LAYERS)]
        lap()
        seed = chain(call, leaves)
        watch(seed)
        seed.backward()
        for make_gradient in deferral.take() if deferral is not None else ():
            make_gradient()
        lap()

    return run


def _extra_seconds(
    run: Callable[[Lap], object], plain: Callable[[Lap], object], *terms: Term, device: torch.device, rule: TimingRule,
    share: float = 1.0,
) -> float:  # fmt: skip
    """Return the seconds that a layer of a chain takes longer than one of a plain chain, at least 0.

    ``share`` scales this difference, ``terms`` are added to it.
    """
    weight = share / CHAIN_LAYERS
    return max(time_difference((Term(weight, run), Term(-weight, plain), *terms), device, rule).seconds, 0.0)


_SMALL = 4096


def measure_overhead(
    block: nn.Module,
    calls: Mapping[int, SegmentCall],
    kind: LayerKind,
    batch: Any,
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> HostOverhead:
    """Measure the overhead of all machinery that this world can use.

    ``calls``: calls of the block by samples; what does not depend on samples is measured at the fewest.
    """
    call = calls[min(calls)]
    step = time_call(lambda: move_batch(slice_batch(batch, 0, batch_size(batch)), device), device, rule).seconds
    plain, bucketed = BlockChain(block), BlockChain(block)
    reducer = GradientReducer([Reduced(parameter, None) for parameter in bucketed.parameters()])  # sends nothing
    data = _extra_seconds(chain_run(bucketed, call, reducer.watch), chain_run(plain, call), device=device, rule=rule)
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
        pipeline=_pipeline_seconds(device, rule),
        spatial_exchange=_exchange_seconds(block, call, kind, device, rule),
    )


def _zero_seconds(block: nn.Module, call: SegmentCall, device: torch.device, rule: TimingRule) -> float:
    """Measure a layer under ZeRO-3, minus its two gathers of parameters and one reduction of gradients."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plain = BlockChain(block)
    sharded = BlockChain(block, lambda layer: shard_group(ZeroGroup((layer,), mesh, STAGE_3), ()))
    apply_root(sharded, mesh)
    size = storage_bytes(block.parameters())
    gather, scatter = (
        as_single_lap(prepare(kind, size, None, device)) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    collectives = Term(-2.0, gather, Across.MAX), Term(-1.0, scatter, Across.MAX)
    return _extra_seconds(chain_run(sharded, call), chain_run(plain, call), *collectives, device=device, rule=rule)


def _spatial_point(
    block: nn.Module, kind: LayerKind, samples: int, call: SegmentCall, device: torch.device, rule: TimingRule
) -> tuple[float, float]:
    """Return the bytes that a block keeps of a share of pixels, and the seconds it takes longer than on a picture of
    that size."""
    grid = next(iter(measured_grids(kind)), None)
    if grid is None:
        return 0.0, 0.0
    size = kind.kept[Recompute.NONE].total * samples * first_share(kind, grid)
    local = call.with_arguments(lambda value: cut_pictures(value, kind, grid))
    shared = chain_run(BlockChain(block, lambda layer: with_sharded_pixels(layer, call, kind, grid)), local)
    try:
        return size, _extra_seconds(shared, chain_run(BlockChain(block), local), device=device, rule=rule)
    except RuntimeError:  # some blocks do not run on a smaller picture
        return size, 0.0


def _split_point(block: nn.Module, call: SegmentCall, device: torch.device, rule: TimingRule) -> tuple[float, float]:
    """Return the seconds of a block's gradients of weights, and the seconds it takes longer if they have their own
    pass."""
    deferral, leaf = Deferral(), input_leaf(call)
    plain, split = BlockChain(block), BlockChain(block, lambda layer: defer_weights(layer, deferral))

    def both_passes(lap: Lap) -> None:
        leaves = [fresh_input(leaf) for _ in range(CHAIN_LAYERS)]
        seed = plain(call, leaves)
        lap()
        seed.backward()
        lap()

    forward, backward = (lap / CHAIN_LAYERS for lap in time_laps(both_passes, device, rule).laps)
    longer = _extra_seconds(chain_run(split, call, deferral=deferral), chain_run(plain, call), device=device, rule=rule)
    return float(weight_seconds(forward, backward)), longer


def _exchange_seconds(
    block: nn.Module, call: SegmentCall, kind: LayerKind, device: torch.device, rule: TimingRule
) -> float:
    """Measure an exchange between two ranks that share a block's pixels, minus its transfer."""
    grid = next((grid for grid in measured_grids(kind) if prod(grid) == _PAIR), None)
    world = dist.get_world_size()
    if grid is None or world % _PAIR:
        return 0.0
    image = hidden_state(call.args, call.kwargs)
    moved = exchanges(kind, strategy_on(grid), image.shape[0] * image.element_size())
    if not moved:
        return 0.0
    group = make_group(RankGroup(_PAIR, 1, world // _PAIR))
    pair = ProcessAxisGroup(group)

    def chain(axis: AxisGroup | None, rank: int) -> Callable[[Lap], object]:
        shared = BlockChain(block, lambda layer: with_sharded_pixels(layer, call, kind, grid, axis))
        return chain_run(shared, call.with_arguments(lambda value: cut_pictures(value, kind, grid, rank)))

    share = 1.0 / sum(exchange.count for exchange in moved)
    transfers = (
        Term(
            -share * exchange.count,
            as_single_lap(prepare(exchange.collective, round(exchange.size), group, device)),
            Across.MAX,
        )
        for exchange in moved
    )
    try:
        return _extra_seconds(chain(pair, pair.rank), chain(None, 0), *transfers, device=device, rule=rule, share=share)
    except RuntimeError:  # some blocks do not run on a smaller picture
        return 0.0


def _pipeline_seconds(device: torch.device, rule: TimingRule) -> float:
    """Measure a small message through the pipeline's sender and receiver, minus the bare transfer."""
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
    terms = Term(1.0, as_single_lap(through), Across.MAX), Term(-1.0, as_single_lap(bare), Across.MAX)
    return max(time_difference(terms, device, rule).seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Line:
    """The line ``fixed + slope * x`` in seconds; for the overhead of a blocking collective, x is its tensor's bytes."""

    fixed: float = 0.0
    slope: float = 0.0


def measure_waiting(
    block: nn.Module,
    plan: TensorPlan,
    calls: Sequence[SegmentCall],
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> Line:
    """Measure the overhead of a blocking collective on the largest tensor-parallel group of this world and block.

    Returns:
        Zero if the world or the block allows no tensor parallelism.
    """
    world = dist.get_world_size() if launched() and plan.collectives else 1
    degree = max(degree for degree in range(1, world + 1) if world % degree == 0 and plan.max_degree % degree == 0)
    if degree == 1:
        return Line()
    group = make_group(RankGroup(degree, 1, world // degree))
    points = [_waiting_point(block, plan, call, ProcessTensorGroup(group), device, rule) for call in calls]
    return line_through(points)


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line through the points of the smallest and the largest x, with neither figure below zero."""
    (small, few), (large, many) = min(points), max(points)
    slope = max((many - few) / (large - small), 0.0) if large > small else 0.0
    return Line(max(few - slope * small, 0.0), slope)


def _waiting_point(
    block: nn.Module,
    plan: TensorPlan,
    call: SegmentCall,
    group: ProcessTensorGroup,
    device: torch.device,
    rule: TimingRule,
) -> tuple[int, float]:
    """Return the bytes of the hidden state, and the seconds of a collective of it minus its transfer."""
    size = storage_bytes([hidden_state(call.args, call.kwargs)])

    def chain(shards: TensorGroup) -> Callable[[Lap], object]:
        return chain_run(BlockChain(block, lambda layer: shard_layer(layer, plan, shards)), call)

    # forward and backward of a block together have as many all-reduces as its forward has gathers and scatters
    weight = 1.0 / (CHAIN_LAYERS * plan.collectives)
    terms = (
        Term(weight, chain(group)),
        Term(-weight, chain(ShapeOnlyGroup(group.size))),
        Term(-1.0, as_single_lap(prepare(Collective.ALL_REDUCE, size, group.process_group, device)), Across.MAX),
    )
    return size, time_difference(terms, device, rule).seconds
