"""What the runtime's own machinery costs the host beside its communication, by running its very pieces.

Each figure is a difference: a short chain of real blocks with the machinery, less the same chain without, less the
collectives measured alone at the same size; as far as memory allows, of what was timed in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.batch import batch_size, move_batch, slice_batch
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from galvatron_lite.parallelism.pipeline.transfer import Receiver, Sender
from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
from galvatron_lite.profiler.measure_chain import CHAIN_LAYERS, Chain, chain_run, chain_seconds
from galvatron_lite.profiler.measure_collectives import prepare
from galvatron_lite.profiler.measure_pictures import cut_pictures, measured_grids, on_share
from galvatron_lite.profiler.memory import storage_bytes
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.segments import BlockCall
from galvatron_lite.profiler.timing import (
    DEFAULT_RULE,
    Across,
    Term,
    TimingRule,
    launched,
    time_call,
    time_difference,
    whole,
)

_SMALL = 4096


def measure_overhead(
    block: nn.Module,
    call: BlockCall,
    kind: LayerKind,
    batch: Any,
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
) -> HostOverhead:
    """Measure the overhead of every kind of machinery that this world can use.

    Args:
        block: a block of the model on ``device``; copied.
        call: what it is called with, few samples.
        kind: of the block.
        batch: the example batch.
        device: where.
        rule: how long to time each.
    """
    step = time_call(lambda: _prepare_batch(batch, device), device, rule).seconds
    plain = chain_seconds(Chain(block), call, device, rule)
    data = max(_data_seconds(block, call, device, rule) - plain, 0.0)
    spatial = _spatial_seconds(block, call, kind, device, rule)
    if not launched():
        return HostOverhead(data=data, step=step, spatial=spatial)
    zero = _zero_seconds(block, call, device, rule)
    return HostOverhead(zero=zero, data=data, step=step, pipeline=_pipeline(device, rule), spatial=spatial)


def _prepare_batch(batch: Any, device: torch.device) -> object:
    return move_batch(slice_batch(batch, 0, batch_size(batch)), device)


def _zero_seconds(block: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule) -> float:
    """Beside a layer's collectives under ZeRO-3: two gathers of its parameters, one reduction of its gradients."""
    plain, sharded = Chain(block), Chain(block)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in sharded.blocks:
        shard_group(ZeroGroup((layer,), mesh, STAGE_3), ())
    apply_root(sharded, mesh)
    size = storage_bytes(block.parameters())
    gather, scatter = (
        whole(prepare(kind, size, None, device)) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    terms = (
        Term(1.0 / CHAIN_LAYERS, chain_run(sharded, call)),
        Term(-1.0 / CHAIN_LAYERS, chain_run(plain, call)),
        Term(-2.0, gather, Across.MAX),
        Term(-1.0, scatter, Across.MAX),
    )
    return max(time_difference(terms, device, rule).seconds, 0.0)


def _data_seconds(block: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule) -> float:
    """With gradients collected in buckets, but not sent."""
    chain = Chain(block)
    reducer = GradientReducer([Reduced(parameter, None) for parameter in chain.parameters()])
    return chain_seconds(chain, call, device, rule, reducer.watch)


def _spatial_seconds(
    block: nn.Module, call: BlockCall, kind: LayerKind, device: torch.device, rule: TimingRule
) -> float:
    """How much longer a block takes on a share of its pixels than on a picture of that size."""
    grid = next(iter(measured_grids(kind)), None)
    if grid is None:
        return 0.0
    args, kwargs = (cut_pictures(given, kind, grid) for given in (call.args, call.kwargs))
    own, plain, shared = replace(call, args=args, kwargs=kwargs), Chain(block), Chain(block)
    for layer in shared.blocks:
        on_share(layer, call, kind, grid)
    terms = Term(1.0 / CHAIN_LAYERS, chain_run(shared, own)), Term(-1.0 / CHAIN_LAYERS, chain_run(plain, own))
    try:
        return max(time_difference(terms, device, rule).seconds, 0.0)
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
    terms = Term(1.0, whole(through), Across.MAX), Term(-1.0, whole(bare), Across.MAX)
    return max(time_difference(terms, device, rule).seconds, 0.0)
