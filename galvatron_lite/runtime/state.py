"""Whole parameters and gradients of a model that is split over many ranks, under the user's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.channel.apply import gather_running
from galvatron_lite.parallelism.cuts.line import ProcessLine
from galvatron_lite.parallelism.tensor.shards import gather_full, slice_full
from galvatron_lite.runtime.setup import StageRuntime
from galvatron_lite.runtime.sharding import Owned


class Parallel(Protocol):
    """A model that is split over the launched world: a ``ParallelModel``."""

    module: nn.Module
    runtime: StageRuntime


def full_gradients(parallel: Parallel) -> dict[str, Tensor]:
    """The whole gradient of every parameter that has one, by name, on the CPU of every rank; all ranks must call it.

    A shared parameter is listed under each of its names.
    """
    found: dict[str, Tensor] = {}
    for one in parallel.runtime.owned:
        if one.parameter.grad is not None:
            found |= dict.fromkeys(one.names, _whole(one.parameter.grad, one))
    return _from_all_stages(parallel, found)


def full_state_dict(parallel: Parallel) -> dict[str, Tensor]:
    """The user's model's ``state_dict()``: whole parameters and buffers, on the CPU of every rank.

    Buffers are those of each stage's first rank: under data parallelism, batch norms track the statistics of their own
    share of the samples, as in DistributedDataParallel. All ranks must call it.
    """
    found: dict[str, Tensor] = {}
    for one in parallel.runtime.owned:
        found |= dict.fromkeys(one.names, _whole(one.parameter.detach(), one))
    _gather_running(parallel)
    state: dict[str, Any] = parallel.module.state_dict()
    found |= {name: _first(parallel, value) for name, value in state.items() if name not in found}
    return _from_all_stages(parallel, found)


def load_full_state_dict(parallel: Parallel, state: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers from a whole ``state_dict``; every rank takes its shards, without communication.

    Raises:
        InputError: an entry this rank needs is missing, or has another shape.
    """
    with torch.no_grad():
        for one in parallel.runtime.owned:
            full = _entry(state, one.names)
            part = full if one.shard is None else slice_full(full, one.shard)
            _copy_part(one, part)
        owned = {name for one in parallel.runtime.owned for name in one.names}
        for name, value in parallel.module.state_dict().items():
            if name not in owned:
                value.copy_(_entry(state, (name,)))


def _whole(tensor: Tensor, one: Owned) -> Tensor:
    """A parameter or gradient of a stage, put together from ZeRO's and then tensor parallelism's parts."""
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if one.shard is not None and one.slices is not None:
        local = gather_full(local, one.shard, one.slices)
    return local.detach().cpu().clone()


def _gather_running(parallel: Parallel) -> None:
    """Running statistics of which ranks keep those of their own channels."""
    for placed in parallel.runtime.stage:
        group = parallel.runtime.meshes.groups(placed.strategy).slices
        for path in placed.layer.modules if group is not None else ():
            gather_running(parallel.module.get_submodule(path), ProcessLine(group))


def _first(parallel: Parallel, value: Tensor) -> Tensor:
    """A tensor of the stage's first rank."""
    meshes, there = parallel.runtime.meshes, value.detach().clone()
    group = parallel.runtime.traffic.mover.group
    if group is not None:
        dist.broadcast(there, src=meshes.stage_first, group=group)
    return there.cpu()


def _from_all_stages(parallel: Parallel, found: dict[str, Tensor]) -> dict[str, Tensor]:
    group = parallel.runtime.meshes.pipeline
    if group is None:
        return found
    everyone: list[dict[str, Tensor]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, found, group=group)
    return {name: tensor for stage in everyone for name, tensor in stage.items()}


def _entry(state: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    for name in names:
        if name in state:
            return state[name]
    raise InputError("state", names[0], "The state has no such entry. Give the state_dict of the whole model.")


def _copy_part(one: Owned, part: Tensor) -> None:
    parameter: Tensor = one.parameter
    if tuple(part.shape) != tuple(parameter.shape):
        remedy = f"{one.names[0]} has another shape. Give the state_dict of the same model."
        raise InputError("state", tuple(part.shape), remedy)
    part = part.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        # every rank has the whole and keeps its own part
        part = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(part)
