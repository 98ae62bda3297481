"""Saving and loading the options of an optimizer and its learning-rate scheduler.

The parameter groups of a rank depend on the plan (``runtime.optimizer``), so options are saved by parameter, and so are
the lists of schedulers with an item for each group.
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
"""Entry of the state of a scheduler that combines others: their states."""


def options_of(parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the options of this rank's parameters, and the values in their states that are no tensors."""
    state = None if scheduler is None else _numbers(scheduler.state_dict())
    names = _names(parallel)
    groups, members = [], dict[str, int]()
    for number, group in enumerate(optimizer.param_groups):
        options = _numbers({key: value for key, value in group.items() if key != "params"})
        groups.append({"options": options, "schedule": None if state is None else _of_group(state, number)})
        members |= {names[id(parameter)]: number for parameter in group["params"]}
    values = {
        f"{names[id(parameter)]}/{key}": value
        for parameter, parameter_state in optimizer.state.items()
        for key, value in parameter_state.items()
        if not isinstance(value, Tensor) and id(parameter) in names
    }
    saved = {"groups": groups, "members": members, "values": values, "scheduler": _without_groups(state)}
    check_plain(saved, "optimizer")
    return saved


def merged(rank_options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the options of all ranks; equal groups become one."""
    groups: dict[str, dict[str, Any]] = {}
    members: dict[str, str] = {}
    values: dict[str, Any] = {}
    for options in rank_options:
        keys = [repr(group) for group in options["groups"]]
        groups |= dict(zip(keys, options["groups"], strict=True))
        members |= {name: keys[number] for name, number in options["members"].items()}
        values |= options["values"]
    order = {key: number for number, key in enumerate(groups)}
    return {
        "groups": list(groups.values()),
        "members": {name: order[key] for name, key in members.items()},
        "values": values,
        "scheduler": rank_options[0]["scheduler"],
    }


def put_options(
    parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], blanks: Mapping[str, dict[str, Any]]
) -> None:
    """Set the options of an optimizer to those of ``merged``, and its states to ``blanks``, by parameter name."""
    names, current = _names(parallel), optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    for group, target in zip(optimizer.param_groups, current["param_groups"], strict=True):
        options = _saved_group(group, names, saved)["options"]
        target |= {key: _like(group.get(key), value) for key, value in options.items()}
        for number, parameter in zip(target["params"], group["params"], strict=True):
            name = names[id(parameter)]
            if name in blanks:
                states[number] = dict(blanks[name])
    optimizer.load_state_dict({**current, "state": states})
    for parameter, state in optimizer.state.items():  # torch has converted states to the dtype of their parameter
        for key, blank in blanks.get(names[id(parameter)], {}).items():
            if isinstance(blank, Tensor) and state[key].dtype != blank.dtype:
                state[key] = state[key].to(blank.dtype)


def put_schedule(
    parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any, saved: Mapping[str, Any]
) -> None:
    """Set the state of a scheduler; raise ``InputError`` if the checkpoint has none."""
    if saved["scheduler"] is None:
        remedy = "The checkpoint has no state of a scheduler. Load it without, and set the scheduler yourself."
        raise InputError("scheduler", type(scheduler).__name__, remedy)
    names = _names(parallel)
    groups = [_saved_group(group, names, saved)["schedule"] for group in optimizer.param_groups]
    scheduler.load_state_dict(_with_groups(saved["scheduler"], groups))


def check_members(parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ``InputError`` if the saved optimizer did not have a parameter that is trained, or had several options for
    the parameters of a group.
    """
    names = _names(parallel)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in names:
            shape = tuple(parameter.shape)
            raise InputError("parameter", shape, "The model does not have it. Make the optimizer over the model's.")
        name = names[id(parameter)]
        if parameter.requires_grad and name not in saved["members"]:
            remedy = "The checkpoint's optimizer did not have it. Make the optimizer over the same parameters."
            raise InputError("parameter", name, remedy)
    for group in optimizer.param_groups:
        members = [name for parameter in group["params"] if (name := names[id(parameter)]) in saved["members"]]
        options = [_numeric(saved["groups"][saved["members"][name]]["options"]) for name in members]
        for name, other in zip(members, options, strict=True):
            if other != options[0]:
                remedy = (
                    f"In the checkpoint's optimizer it has other options than {members[0]} ({other}, {options[0]}), "
                    "with which it shares a group now. Make the optimizer of the same groups."
                )
                raise InputError("parameter", name, remedy)


def _numeric(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that affect the values of updates; flags may differ between plans."""
    return {key: value for key, value in options.items() if not isinstance(value, (bool, NoneType)) and key != PART_OF}


def check_optimizer(manifest: Manifest, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """Raise ``InputError`` if the saved optimizer or scheduler has another class."""
    for field, saved, target in (
        ("optimizer", manifest.optimizer, optimizer),
        ("scheduler", manifest.scheduler, scheduler),
    ):
        if target is not None and saved != type(target).__name__:
            states = "no states of one" if saved is None else f"the states of a {saved}"
            remedy = f"The checkpoint has {states}. Give the same kind, or none to load without its states."
            raise InputError(field, type(target).__name__, remedy)


def blank_states(parallel: Parallel, manifest: Manifest, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of this rank's parameters by name, with zeros for tensors and saved values for the others."""
    parameters = {parameter_name(parallel, one): one for runtime in parallel.runtimes for one in runtime.owned}
    states: dict[str, dict[str, Any]] = {}
    for entry, record in manifest.tensors.items():
        name, _, key = entry.rpartition("/")
        if name in parameters and entry not in manifest.names:
            states.setdefault(name, {})[key] = _blank(parameters[name], record)
    for entry, value in values.items():
        name, _, key = entry.rpartition("/")
        if name in parameters:
            states.setdefault(name, {})[key] = value
    return states


def _blank(parameter: ManagedParameter, record: TensorRecord) -> Tensor:
    """Zeros of the shape of this rank's shard of a saved state."""
    like, full = parameter.updated.detach(), full_shape(parameter)
    dtype: torch.dtype = getattr(torch, record.dtype)
    if record.shape == full:
        return torch.zeros_like(like, dtype=dtype)
    if len(record.shape) == len(full) > 0:
        extents = zip(record.shape, full, like.shape, strict=True)
        return like.new_zeros(
            [local if extent == complete else extent for extent, complete, local in extents], dtype=dtype
        )
    return torch.zeros(record.shape, dtype=dtype, device=like.device if record.shape else "cpu")


def _names(parallel: Parallel) -> dict[int, str]:
    """The names of this rank's parameters, by the identity of the tensors that the optimizer updates."""
    return {id(one.updated): parameter_name(parallel, one) for runtime in parallel.runtimes for one in runtime.owned}


def _saved_group(group: Mapping[str, Any], names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved group with the parameters of a rank's group; the first saved group if the rank's is empty."""
    members = (names[id(parameter)] for parameter in group["params"])
    number = next((saved["members"][name] for name in members if name in saved["members"]), 0)
    saved_group: dict[str, Any] = saved["groups"][number]
    return saved_group


def _like(before: Any, value: Any) -> Any:
    if isinstance(before, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(before, value)
    return value


def _numbers(value: Any) -> Any:
    """Replace tensors of one item by numbers; learning rates may be such tensors."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value) is dict:
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if type(value) is list else value


def _of_group(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The items of one group in a scheduler's state; those of nested schedulers under their numbers."""
    entries: dict[str, Any] = {key: state[key][number] for key in _lists(state)}
    return entries | {f"{NESTED}{index}": _of_group(inner, number) for index, inner in enumerate(_nested(state))}


def _without_groups(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    rest = {**state, **dict.fromkeys(_lists(state))}
    nested = [_without_groups(inner) for inner in _nested(state)]
    return {**rest, NESTED: nested} if nested else rest


def _with_groups(rest: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state = dict(rest)
    for key in (key for key in PER_GROUP if key in groups[0]):
        state[key] = [group[key] for group in groups]
    nested = enumerate(_nested(rest))
    if states := [_with_groups(inner, [group[f"{NESTED}{index}"] for group in groups]) for index, inner in nested]:
        state[NESTED] = states
    return state


def _lists(state: Mapping[str, Any]) -> list[str]:
    return [key for key in PER_GROUP if isinstance(state.get(key), list)]


def _nested(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    schedulers = state.get(NESTED)
    return [state for state in schedulers if isinstance(state, dict)] if isinstance(schedulers, list) else []
