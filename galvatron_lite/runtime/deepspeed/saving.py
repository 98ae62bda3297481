"""Checkpoints of a model that DeepSpeed trains, in the format of all plans.

DeepSpeed stores flat shards. To write a checkpoint, every rank creates a mirror: a plain copy of the model in host
memory with full parameters and optimizer states, of which each rank writes a part. Any other plan, the plain model, and
DeepSpeed with any ZeRO stage and number of devices can load it; and DeepSpeed can load their checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer, Snapshot
from galvatron_lite.runtime.checkpoint.manifest import Manifest
from galvatron_lite.runtime.checkpoint.saving import ExtraState, Resumed
from galvatron_lite.runtime.checkpoint.unsplit import unsplit
from galvatron_lite.runtime.deepspeed.library import EngineOptimizer
from galvatron_lite.runtime.parameters.full_state import entry_of
from galvatron_lite.runtime.parameters.pieces import stateful_modules

if TYPE_CHECKING:
    from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel

States = dict[str, dict[str, Tensor]]


def full_state_dict(module: nn.Module, dtypes: Mapping[str, torch.dtype], *, has_engine: bool) -> dict[str, Tensor]:
    """Return full parameters, in these dtypes, and buffers on the CPU of every rank. All ranks call it."""
    gathered: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in gathered:
            gathered[id(parameter)] = _gathered(parameter, has_engine).to("cpu", dtypes.get(name), copy=True)
        tensors[name] = gathered[id(parameter)]
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        if name not in tensors:  # a buffer: that of the first rank
            buffer = value.detach().clone()
            dist.broadcast(buffer, src=0)
            tensors[name] = buffer.cpu()
        state[name] = tensors[name]
    return state


def _gathered(parameter: nn.Parameter, has_engine: bool) -> Tensor:
    """The full parameter, from its master copy if there is one."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if has_engine and parameter.requires_grad:
        master: Tensor | None = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set parameters, master copies and buffers from a full state. All ranks call it with the full state."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    with torch.no_grad():
        for parameter in module.parameters():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            _set_parameter(parameter, entry_of(state, names[id(parameter)], shape))
        names_in_state = module.state_dict().keys()
        for name, value in module.named_buffers(remove_duplicate=False):
            if name in names_in_state:
                value.copy_(entry_of(state, [name], tuple(value.shape)))


def _set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Set this rank's shard of a parameter and of its master copy."""
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
    _set_shard(parameter, value)


def _set_shard(parameter: nn.Parameter, value: Tensor, state: str | None = None) -> None:
    """Set this rank's shard of a ZeRO-3 parameter's master copy, or of one of its states, from the full tensor.

    DeepSpeed's functions for full tensors do not support shards that are padded at the end.
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


def full_states(engine: Any, module: nn.Module) -> States:
    """Return the full states of all parameters on the CPU; empty before the first step. All ranks call it.

    Raises:
        InputError: DeepSpeed does not expose them (fp16 without ZeRO).
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
    full: States = {}
    for name, parameter in _trained(module) if states else ():
        full[name] = {key: safe_get_full_optimizer_state(parameter, key).cpu().clone() for key in sharded}
        full[name] |= {key: torch.as_tensor(value).cpu().clone() for key, value in others.items()}
    return full


def put_states(engine: Any, module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Set this rank's shards of optimizer states from the full states of all parameters; do nothing without states."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

    inner = engine.basic_optimizer
    if not states:
        return
    if engine.optimizer is inner:
        for name, parameter in _trained(module):
            inner.state[parameter] = {key: torch.as_tensor(value).clone() for key, value in states[name].items()}
        return
    flats = _flats(engine.optimizer)
    sharded, others = _kinds(next(iter(states.values())))
    for flat in flats:
        blank = {key: torch.zeros_like(flat, requires_grad=False) for key in sharded}
        inner.state[flat] = blank | {key: torch.as_tensor(value).clone() for key, value in others.items()}
    # under ZeRO stages 1 and 2, link the parameters to the states of their flat shards, as DeepSpeed's first step does
    groups = getattr(engine.optimizer, "bit16_groups", None) or getattr(engine.optimizer, "bf16_groups", None)
    for group, flat in zip(groups or (), flats, strict=False):
        lazy_init_hp_params_optimizer_state(group, flat, inner.state)
    for name, parameter in _trained(module):
        for key in sharded:
            if hasattr(parameter, "ds_id"):
                _set_shard(parameter, states[name][key], key)
            else:
                safe_set_full_optimizer_state(parameter, states[name][key].to(parameter.device), key)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _kinds(states: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of the states that are sharded like parameters, and the values of the others (step counts)."""
    sharded = [key for key, value in states.items() if isinstance(value, Tensor) and value.dim() > 0]
    return sharded, {key: value for key, value in states.items() if key not in sharded}


def _flats(optimizer: Any) -> Sequence[Tensor]:
    """The flat float32 shards that the optimizer updates; the name of their attribute depends on the ZeRO stage."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        flats: Sequence[Tensor] | None = getattr(optimizer, name, None)
        if flats is not None:
            return flats
    remedy = (
        "DeepSpeed does not expose this optimizer state. Plan with ZeRO (--fix zero_stage=1), or save "
        "full_state_dict() alone."
    )
    raise InputError("optimizer", type(optimizer).__name__, remedy)


class DeepSpeedSaver(Checkpointer):
    """Saves and loads a model that DeepSpeed trains, from a copy of the user's model on the meta device (``pristine``).

    The loss scale of fp16 is not saved.
    """

    def __init__(self, parallel: DeepSpeedModel, pristine: nn.Module) -> None:
        self._model, self._pristine = parallel, pristine
        self._mirror = unsplit(pristine)  # gets the model of each save and load
        self._mirror.plan = parallel.plan
        super().__init__(self._mirror)

    def _snapshot(self, state: ExtraState, step: int, asynchronous: bool) -> Snapshot:
        inner = self._fill_mirror(state.optimizer)
        if inner is not None:
            parameters = dict(self._mirror.module.named_parameters())
            for name, values in full_states(self._model.engine, self._model.module).items():
                inner.state[parameters[name]] = values
        return super()._snapshot(replace(state, optimizer=inner), step, asynchronous)

    def _load(self, folder: Path, manifest: Manifest, state: ExtraState) -> Resumed:
        inner = self._fill_mirror(state.optimizer)
        resumed = super()._load(folder, manifest, replace(state, optimizer=inner))
        self._load_mirror(inner, resumed)
        return resumed

    def _fill_mirror(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """Fill the mirror with the current values, and return an equal optimizer over it, without states."""
        values, memo = self._model.full_state_dict(), dict[int, Any]()
        for name, parameter in self._pristine.named_parameters():
            memo[id(parameter)] = nn.Parameter(values[name], parameter.requires_grad)
        for name, buffer in self._pristine.named_buffers():
            memo[id(buffer)] = values.get(name, torch.empty_like(buffer, device="cpu"))
        module = copy.deepcopy(self._pristine, memo)
        plain, mirror = unsplit(module), self._mirror
        mirror.module, mirror.entries, mirror.runtimes = module, plain.entries, plain.runtimes
        for path, stateful in stateful_modules(mirror).items():
            stateful.set_extra_state(self._model.module.get_submodule(path).get_extra_state())
        if optimizer is None:
            return None
        if not isinstance(optimizer, EngineOptimizer) or optimizer.factory is None:
            remedy = "Make it with parallel.optimizer(factory, **options): one like it is made to save its states."
            raise InputError("optimizer", type(optimizer).__name__, remedy)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        inner: torch.optim.Optimizer = optimizer.factory([{"params": trained}], **optimizer.options)
        for group, current in zip(inner.param_groups, optimizer.param_groups, strict=True):
            group |= {key: value for key, value in current.items() if key in group and key != "params"}
        return inner

    def _load_mirror(self, inner: torch.optim.Optimizer | None, resumed: Resumed) -> None:
        """Load the mirror into DeepSpeed."""
        model, module = self._model, self._mirror.module
        model.resume_at(resumed.step)
        model.load_full_state_dict(module.state_dict())
        for path, stateful in stateful_modules(self._mirror).items():
            model.module.get_submodule(path).set_extra_state(stateful.get_extra_state())
        if inner is None:
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        states = {names[id(parameter)]: state for parameter, state in inner.state.items()}
        put_states(model.engine, model.module, states)
        for group, target in zip(inner.param_groups, model.engine.basic_optimizer.param_groups, strict=True):
            target |= {key: value for key, value in group.items() if key != "params"}
