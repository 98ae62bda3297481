"""Making ranks start alike: values, and random states where they work on the same samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.plans.schema import Plan


def shares_samples(plan: Plan) -> bool:
    """Whether ranks work on the same samples, and must draw the same random numbers."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    return any(strategy.devices > strategy.batch_degree for strategy in strategies)


def share_random_state(device: torch.device) -> None:
    """Give every rank rank 0's random states: ranks that share samples must drop the same activations."""
    torch.set_rng_state(of_rank_zero(torch.get_rng_state(), device))
    if device.type != "cpu":
        torch.cuda.set_rng_state(of_rank_zero(torch.cuda.get_rng_state(device), device), device)


def of_rank_zero(state: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value of a tensor on the CPU."""
    there = state.to(device)
    dist.broadcast(there, src=0)
    return there.cpu()


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Make real parameters and buffers equal to rank 0's; those on the meta device have no values yet."""
    if dist.get_world_size() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            there = tensor.detach().to(device)
            dist.broadcast(there, src=0)
            if there.device != tensor.device:
                tensor.detach().copy_(there)


def first_seed(device: torch.device) -> int:
    """Rank 0's ``torch.initial_seed()``: ``torch.manual_seed`` before decides it."""
    box = [torch.initial_seed()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, device=device)
    return box[0]


def from_rank_zero(call: Callable[[], Any]) -> Any:
    """The call's result on rank 0, or its error, on every rank, so that no rank can differ."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = call()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]
