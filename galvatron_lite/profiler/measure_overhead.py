"""What the runtime's own machinery costs the host beside its communication, by running its very pieces.

Each figure is a difference: a short chain of real blocks with the machinery, less the same chain without, less the
collectives measured alone at the same size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from galvatron_lite.model.batch import batch_size, map_tensors, move_batch, slice_batch
from galvatron_lite.parallelism.base import Collective
from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from galvatron_lite.parallelism.pipeline.transfer import Channel
from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
from galvatron_lite.profiler.measure_collectives import prepare
from galvatron_lite.profiler.measure_layers import Seed, differentiable
from galvatron_lite.profiler.memory import storage_bytes
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.segments import BlockCall, hidden_state
from galvatron_lite.profiler.timing import DEFAULT_RULE, Across, Lap, TimingRule, launched, time_call, time_laps

_LAYERS = 3
_SMALL = 4096


class Chain(nn.Module):
    """Equal blocks that run one after another, each on its own copy of the input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(_LAYERS))

    def forward(self, call: BlockCall, leaves: list[Tensor]) -> Tensor:
        """A scalar whose backward runs through every block."""
        outputs = [_run(block, call, leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        seed: Tensor = Seed.apply(*(tensor for output in outputs for tensor in output))  # type: ignore[no-untyped-call]
        return seed


def measure_overhead(
    block: nn.Module, call: BlockCall, batch: Any, device: torch.device, rule: TimingRule = DEFAULT_RULE
) -> HostOverhead:
    """Measure the overhead of every kind of machinery that this world can use.

    Args:
        block: a block of the model on ``device``; copied.
        call: what it is called with, few samples.
        batch: the example batch.
        device: where.
        rule: how long to time each.
    """
    step = time_call(lambda: _prepare_batch(batch, device), device, rule).seconds
    plain = _chain_seconds(Chain(block), call, device, rule, _leave)
    data = max(_data_seconds(block, call, device, rule) - plain, 0.0)
    if not launched():
        return HostOverhead(data=data, step=step)
    zero = _zero_seconds(block, call, device, rule) - plain - _zero_communication(block, device, rule)
    return HostOverhead(zero=max(zero, 0.0), data=data, step=step, pipeline=_pipeline(device, rule))


def _run(block: nn.Module, call: BlockCall, leaf: Tensor) -> list[Tensor]:
    whole = hidden_state(call.args, call.kwargs)

    def fill(tensor: Tensor) -> Tensor:
        return leaf if tensor is whole else tensor

    return differentiable(block(*map_tensors(call.args, fill), **map_tensors(call.kwargs, fill)))


def _leave(_: Tensor) -> None:
    return None


def _prepare_batch(batch: Any, device: torch.device) -> object:
    return move_batch(slice_batch(batch, 0, batch_size(batch)), device)


def _chain_seconds(
    chain: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule, watch: Callable[[Tensor], None]
) -> float:
    """Seconds of forward and backward of one block of a chain; gradients begin as None, as after ``zero_grad``."""
    leaf = hidden_state(call.args, call.kwargs).detach()

    def once(lap: Lap) -> None:
        chain.zero_grad(set_to_none=True)
        leaves = [leaf.clone().requires_grad_() for _ in range(_LAYERS)]
        lap()
        seed = chain(call, leaves)
        watch(seed)
        seed.backward()
        lap()

    return time_laps(once, device, rule).laps[1] / _LAYERS


def _zero_seconds(block: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule) -> float:
    chain = Chain(block)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in chain.blocks:
        shard_group(ZeroGroup((layer,), mesh, STAGE_3), ())
    apply_root(chain, mesh)
    return _chain_seconds(chain, call, device, rule, _leave)


def _zero_communication(block: nn.Module, device: torch.device, rule: TimingRule) -> float:
    """Seconds of a layer's collectives under ZeRO-3: two gathers of its parameters, one reduction of its gradients."""
    size = storage_bytes(block.parameters())
    gather, scatter = (
        time_call(prepare(kind, size, None, device), device, rule, Across.MAX).seconds
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    return 2 * gather + scatter


def _data_seconds(block: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule) -> float:
    """With gradients collected in buckets, but not sent."""
    chain = Chain(block)
    reducer = GradientReducer([Reduced(parameter, None) for parameter in chain.parameters()])
    return _chain_seconds(chain, call, device, rule, reducer.watch)


def _pipeline(device: torch.device, rule: TimingRule) -> float:
    """How much longer a small message takes through the pipeline's channel than by itself."""
    group, rank = dist.group.WORLD, dist.get_rank()
    if group is None:
        return 0.0
    message = torch.zeros(_SMALL // 4, device=device)
    channel = Channel(group, 1 - rank, device) if rank < 2 else None

    def through() -> None:
        if channel is None:
            return
        if rank == 0:
            channel.send([message])
            channel.finish()
        else:
            channel.receive([message]).wait()

    bare = time_call(prepare(Collective.SEND_RECV, _SMALL, None, device), device, rule, Across.MAX).seconds
    return max(time_call(through, device, rule, Across.MAX).seconds - bare, 0.0)
