"""States of the optimizer that DeepSpeed keeps in flat shards, as whole tensors by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.deepspeed.state import set_shard

States = dict[str, dict[str, Tensor]]


def whole_states(engine: Any, module: nn.Module) -> States:
    """Every state of every parameter that has one, on the CPU; none before the first step. All ranks call it.

    Raises:
        InputError: DeepSpeed keeps them in a way that shows no whole tensors (fp16 without ZeRO).
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = engine.basic_optimizer
    if engine.optimizer is inner:
        return {
            name: {key: torch.as_tensor(value).cpu().clone() for key, value in inner.state[parameter].items()}
            for name, parameter in _trained(module)
            if parameter in inner.state
        }
    flats = _flats(engine.optimizer)
    states: Mapping[str, Any] = next((inner.state[flat] for flat in flats if inner.state.get(flat)), {})
    sharded, others = _kinds(states)
    found: States = {}
    for name, parameter in _trained(module) if states else ():
        own = {key: safe_get_full_optimizer_state(parameter, key).cpu().clone() for key in sharded}
        found[name] = own | {key: torch.as_tensor(value).cpu().clone() for key, value in others.items()}
    return found


def put_states(engine: Any, module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Set this rank's shards of whole states; of all parameters, or of none."""
    inner = engine.basic_optimizer
    if not states:
        return
    if engine.optimizer is inner:
        for name, parameter in _trained(module):
            inner.state[parameter] = {key: torch.as_tensor(value).clone() for key, value in states[name].items()}
        return
    flats, example = _flats(engine.optimizer), next(iter(states.values()))
    sharded, others = _kinds(example)
    for flat in flats:
        blank = {key: torch.zeros_like(flat, requires_grad=False) for key in sharded}
        inner.state[flat] = blank | {key: torch.as_tensor(value).clone() for key, value in others.items()}
    _link(engine.optimizer, flats, inner.state)
    for name, parameter in _trained(module):
        for key in sharded:
            _set(parameter, states[name][key], key)


def _set(parameter: nn.Parameter, value: Tensor, key: str) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state

    if hasattr(parameter, "ds_id"):
        set_shard(parameter, value, key)
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _kinds(states: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of the states that are shaped like parameters, and the others (counts of steps)."""
    sharded = [key for key, value in states.items() if isinstance(value, Tensor) and value.dim() > 0]
    return sharded, {key: value for key, value in states.items() if key not in sharded}


def _flats(optimizer: Any) -> Sequence[Tensor]:
    """The flat float32 shards that the optimizer updates: attributes of DeepSpeed's optimizers without underscore, by
    the names that its stages give them. There is no function for them.
    """
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        flats: Sequence[Tensor] | None = getattr(optimizer, name, None)
        if flats is not None:
            return flats
    remedy = "Its states are not to be had. Plan with ZeRO (--fix zero_stage=1), or save full_state_dict() alone."
    raise InputError("optimizer", type(optimizer).__name__, remedy)


def _link(optimizer: Any, flats: Sequence[Tensor], states: Mapping[Tensor, Any]) -> None:
    """Let parameters of stages 1 and 2 know the states of their flat shards, as DeepSpeed does in the first step."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", None)
    for group, flat in zip(groups or (), flats, strict=False):
        lazy_init_hp_params_optimizer_state(group, flat, states)
