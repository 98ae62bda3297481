"""Options and states of an optimizer and a learning-rate scheduler, kept by parameter.

The parameter groups of a rank depend on the plan (``runtime.optimizer``). So options are kept for every parameter, and
so are the schedulers' lists with an item for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.manifest import Manifest, TensorRecord
from galvatron_lite.runtime.checkpoint.plain import check_plain
from galvatron_lite.runtime.optimizer import PART_OF
from galvatron_lite.runtime.parameters.managed import ManagedParameter
from galvatron_lite.runtime.parameters.pieces import Parallel, full_shape, parameter_name

PER_GROUP = (
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
)  # fmt: skip
"""Entries of the state of torch's schedulers with an item for each parameter group."""
NESTED = "_schedulers"
"""Entry with the states of other schedulers."""


def options_of(parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Options of this rank's parameters, and values of their states that are no tensors."""
    state = None if scheduler is None else _numbers(scheduler.state_dict())
    groups = [
        {
            "options": _numbers({key: value for key, value in group.items() if key != "params"}),
            "schedule": None if state is None else _of_group(state, number),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    managed = _managed(parallel)
    members = {
        managed[id(parameter)][0]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    values = {
        f"{name}/{key}": value
        for name, owned in managed.values()
        for key, value in optimizer.state.get(owned.updated, {}).items()
        if not isinstance(value, Tensor)
    }
    options = {"groups": groups, "members": members, "values": values, "scheduler": _without_groups(state)}
    check_plain(options, "optimizer")
    return options


def merged(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of all ranks as one; equal groups are listed once."""
    groups: dict[str, dict[str, Any]] = {}
    members: dict[str, str] = {}
    values: dict[str, Any] = {}
    for options in everyone:
        keys = [repr(group) for group in options["groups"]]
        groups |= dict(zip(keys, options["groups"], strict=True))
        members |= {name: keys[number] for name, number in options["members"].items()}
        values |= options["values"]
    order = {key: number for number, key in enumerate(groups)}
    return {
        "groups": list(groups.values()),
        "members": {name: order[key] for name, key in members.items()},
        "values": values,
        "scheduler": everyone[0]["scheduler"],
    }


def put_options(
    parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], blanks: Mapping[str, dict[str, Any]]
) -> None:
    """Give an optimizer its options (from ``merged``), and blank states by the names of parameters."""
    managed, current = _managed(parallel), optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    for group, target in zip(optimizer.param_groups, current["param_groups"], strict=True):
        options = saved["groups"][_group_of(group, managed, saved)]["options"]
        target |= {key: _like(group.get(key), value) for key, value in options.items()}
        for number, parameter in zip(target["params"], group["params"], strict=True):
            name = managed[id(parameter)][0]
            if name in blanks:
                states[number] = dict(blanks[name])
    optimizer.load_state_dict({**current, "state": states})
    for parameter, state in optimizer.state.items():  # torch has converted states to their parameter's dtype
        for key, blank in blanks.get(managed[id(parameter)][0], {}).items():
            if isinstance(blank, Tensor) and state[key].dtype != blank.dtype:
                state[key] = state[key].to(blank.dtype)


def put_schedule(
    parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any, saved: Mapping[str, Any]
) -> None:
    """Give a scheduler its state; raises ``InputError`` if the checkpoint has none."""
    if saved["scheduler"] is None:
        remedy = "The checkpoint has no state of a scheduler. Load it without, and set the scheduler yourself."
        raise InputError("scheduler", type(scheduler).__name__, remedy)
    managed = _managed(parallel)
    groups = [saved["groups"][_group_of(group, managed, saved)]["schedule"] for group in optimizer.param_groups]
    scheduler.load_state_dict(_with_groups(saved["scheduler"], groups))


def check_members(parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for the first trained parameter that the saved optimizer did not have, or whose options were
    not those of its group.
    """
    managed = _managed(parallel)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in managed:
            shape = tuple(parameter.shape)
            raise InputError("parameter", shape, "The model does not have it. Make the optimizer over the model's.")
        name = managed[id(parameter)][0]
        if parameter.requires_grad and name not in saved["members"]:
            remedy = "The checkpoint's optimizer did not have it. Make the optimizer over the same parameters."
            raise InputError("parameter", name, remedy)
    for group in optimizer.param_groups:
        names = [name for one in group["params"] if (name := managed[id(one)][0]) in saved["members"]]
        options = [_numeric(saved["groups"][saved["members"][name]]["options"]) for name in names]
        for name, other in zip(names, options, strict=True):
            if other != options[0]:
                remedy = (
                    f"In the checkpoint's optimizer it has other options than {names[0]} ({other}, {options[0]}), with "
                    "which it shares a group now. Make the optimizer of the same groups."
                )
                raise InputError("parameter", name, remedy)


def _numeric(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that say how values are updated; flags may be those of a plan."""
    return {key: value for key, value in options.items() if not isinstance(value, (bool, NoneType)) and key != PART_OF}


def check_optimizer(manifest: Manifest, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """Raise ``InputError`` if an optimizer or scheduler of another class was saved."""
    for field, saved, target in (
        ("optimizer", manifest.optimizer, optimizer),
        ("scheduler", manifest.scheduler, scheduler),
    ):
        if target is not None and saved != type(target).__name__:
            states = "no states of one" if saved is None else f"the states of a {saved}"
            remedy = f"The checkpoint has {states}. Give the same kind, or none to load without its states."
            raise InputError(field, type(target).__name__, remedy)


def blank_states(parallel: Parallel, manifest: Manifest, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States of this rank's parameters by name: zeros to be filled for tensors, the saved values of others."""
    owned = {parameter_name(parallel, one): one for runtime in parallel.runtimes for one in runtime.owned}
    shapes = {name: full_shape(one) for name, one in owned.items()}
    states: dict[str, dict[str, Any]] = {}
    for entry, record in manifest.tensors.items():
        name, _, key = entry.rpartition("/")
        if name in owned and entry not in manifest.names:
            states.setdefault(name, {})[key] = _blank(owned[name], record, shapes[name])
    for entry, value in values.items():
        name, _, key = entry.rpartition("/")
        if name in owned:
            states.setdefault(name, {})[key] = value
    return states


def _blank(owned: ManagedParameter, record: TensorRecord, full_shape: tuple[int, ...]) -> Tensor:
    """This rank's part of a saved state; ``full_shape`` is that of the complete parameter."""
    like = owned.updated.detach()
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.shape == full_shape:
        return torch.zeros_like(like, dtype=dtype)
    if len(record.shape) == len(full_shape) > 0:
        extents = zip(record.shape, full_shape, like.shape, strict=True)
        return like.new_zeros([local if extent == full else extent for extent, full, local in extents], dtype=dtype)
    return torch.zeros(record.shape, dtype=dtype, device=like.device if record.shape else "cpu")


def _managed(parallel: Parallel) -> dict[int, tuple[str, ManagedParameter]]:
    """Names and parameters of this rank, by the identity of what the optimizer updates."""
    return {
        id(one.updated): (parameter_name(parallel, one), one) for runtime in parallel.runtimes for one in runtime.owned
    }


def _group_of(
    group: Mapping[str, Any], managed: Mapping[int, tuple[str, ManagedParameter]], saved: Mapping[str, Any]
) -> int:
    """The number of the saved group with the parameters of a rank's group; the first where the rank's is empty."""
    names = (managed[id(parameter)][0] for parameter in group["params"])
    return next((saved["members"][name] for name in names if name in saved["members"]), 0)


def _like(before: Any, value: Any) -> Any:
    if isinstance(before, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(before, value)
    return value


def _numbers(value: Any) -> Any:
    """The value with numbers in place of tensors of one item, as learning rates may be."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value) is dict:
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if type(value) is list else value


def _of_group(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A scheduler's entries of one group; those of inner schedulers under their numbers."""
    entries: dict[str, Any] = {key: state[key][number] for key in _lists(state)}
    return entries | {f"{NESTED}{place}": _of_group(inner, number) for place, inner in enumerate(_inner(state))}


def _without_groups(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    rest = {**state, **dict.fromkeys(_lists(state))}
    return {**rest, NESTED: [_without_groups(inner) for inner in _inner(state)]} if _inner(state) else rest


def _with_groups(rest: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state = dict(rest)
    for key in (key for key in PER_GROUP if key in groups[0]):
        state[key] = [group[key] for group in groups]
    if _inner(rest):
        state[NESTED] = [
            _with_groups(inner, [group[f"{NESTED}{place}"] for group in groups])
            for place, inner in enumerate(_inner(rest))
        ]
    return state


def _lists(state: Mapping[str, Any]) -> list[str]:
    return [key for key in PER_GROUP if isinstance(state.get(key), list)]


def _inner(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    schedulers = state.get(NESTED)
    return (
        [scheduler for scheduler in schedulers if isinstance(scheduler, dict)] if isinstance(schedulers, list) else []
    )
