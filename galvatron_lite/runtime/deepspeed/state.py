"""Whole parameters of a model that DeepSpeed has split, under the user's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError


def full_state_dict(module: nn.Module, dtypes: Mapping[str, torch.dtype], *, bound: bool) -> dict[str, Tensor]:
    """Whole parameters and buffers on the CPU of every rank; all ranks call it.

    Args:
        module: the user's model.
        dtypes: of every entry before training.
        bound: whether an engine has it, which may keep master copies.
    """
    known: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            known[id(parameter)] = gather_parameter(parameter, bound=bound).to("cpu", dtypes.get(name), copy=True)
        found[name] = known[id(parameter)]
    return {name: found[name] if name in found else _of_first(value) for name, value in module.state_dict().items()}


def gather_parameter(parameter: nn.Parameter, *, bound: bool) -> Tensor:
    """A parameter put together from its shards; the master copy where there is one. All ranks call it."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if bound and parameter.requires_grad:
        master: Tensor | None = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set parameters, master copies and buffers from a whole state; every rank gives all of it.

    Raises:
        InputError: an entry is missing, or has another shape.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    with torch.no_grad():
        for parameter in module.parameters():
            _set(parameter, _entry(state, names[id(parameter)], tuple(getattr(parameter, "ds_shape", parameter.shape))))
        parameters = {name for group in names.values() for name in group}
        for name, value in module.state_dict().items():
            if name not in parameters:
                value.copy_(_entry(state, [name], tuple(value.shape)))


def _entry(state: Mapping[str, Tensor], names: list[str], shape: tuple[int, ...]) -> Tensor:
    name = next((name for name in names if name in state), None)
    if name is None:
        raise InputError("state", names[0], "The state has no such entry. Give the state_dict of the whole model.")
    if tuple(state[name].shape) != shape:
        remedy = f"{name} has another shape. Give the state_dict of the same model."
        raise InputError("state", tuple(state[name].shape), remedy)
    return state[name]


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    """A parameter, whatever part of it is here, and its master copy."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param

    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
        if hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))
        return
    with GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.copy_(value)
    set_shard(parameter, value)


def set_shard(parameter: nn.Parameter, value: Tensor, state: str | None = None) -> None:
    """This rank's shard of a ZeRO-3 parameter's master copy, or of one of its optimizer states, from the whole.

    DeepSpeed's own function of the whole cannot set shards that are padded at the end.
    """
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    if not hasattr(parameter, "_z3_optimizer") or not parameter.requires_grad:
        return
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    flat = value.reshape(-1)[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    shard = torch.zeros(size, dtype=torch.float32, device=parameter.device)
    shard[: flat.numel()] = flat
    if state is None:
        safe_set_local_fp32_param(parameter, shard)
    else:
        safe_set_local_optimizer_state(parameter, shard, state)


def _of_first(value: Tensor) -> Tensor:
    """A tensor of rank 0."""
    there = value.detach().clone()
    dist.broadcast(there, src=0)
    return there.cpu()
