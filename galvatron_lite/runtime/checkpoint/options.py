"""What an optimizer and a learning-rate scheduler hold besides tensors, kept by parameter.

The parameter groups of a rank depend on the plan (``runtime.optimizer``), so options are kept for every parameter, and
so are the schedulers' lists that have an item a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.plain import check_plain
from galvatron_lite.runtime.parameters import Owned
from galvatron_lite.runtime.pieces import Parallel, parameter_name

PER_GROUP = (
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
)  # fmt: skip
"""Entries of the state of torch's schedulers with an item for each parameter group."""
NESTED = "_schedulers"
"""Entry with the states of other schedulers."""


def options_of(parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Options of this rank's parameters, and values of their states that are no tensors.

    Raises:
        InputError: some could not be read again safely.
    """
    state = None if scheduler is None else _plain(scheduler.state_dict())
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = _plain({key: value for key, value in group.items() if key != "params"})
        groups.append({"options": options, "schedule": None if state is None else _of_group(state, number)})
    known = _owned(parallel)
    members = {
        known[id(parameter)][0]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    values = {
        f"{name}/{key}": value
        for name, one in known.values()
        for key, value in optimizer.state.get(one.updated, {}).items()
        if not isinstance(value, Tensor)
    }
    found = {"groups": groups, "members": members, "values": values, "scheduler": _shared(state)}
    check_plain(found, "optimizer")
    return found


def merged(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of all ranks as one: equal groups are listed once."""
    groups: dict[str, dict[str, Any]] = {}
    members: dict[str, str] = {}
    values: dict[str, Any] = {}
    for one in everyone:
        keys = [repr(group) for group in one["groups"]]
        groups |= dict(zip(keys, one["groups"], strict=True))
        members |= {name: keys[number] for name, number in one["members"].items()}
        values |= one["values"]
    order = {key: number for number, key in enumerate(groups)}
    numbered = {name: order[key] for name, key in members.items()}
    return {
        "groups": list(groups.values()),
        "members": numbered,
        "values": values,
        "scheduler": everyone[0]["scheduler"],
    }


def put_options(
    parallel: Parallel, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], blanks: Mapping[str, dict[str, Any]]
) -> None:
    """Give an optimizer its options, and states to be filled.

    Args:
        parallel: the model.
        optimizer: of it.
        kept: from ``merged``.
        blanks: the state of each parameter that has one, by name.
    """
    known, saved = _owned(parallel), optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    for group, there in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kept_group = kept["groups"][_group_of(group, known, kept)]
        there |= {key: _as_before(value, group.get(key)) for key, value in kept_group["options"].items()}
        for number, parameter in zip(there["params"], group["params"], strict=True):
            name = known[id(parameter)][0]
            if name in blanks:
                states[number] = dict(blanks[name])
    optimizer.load_state_dict({**saved, "state": states})
    _keep_dtypes(optimizer, known, blanks)


def put_schedule(parallel: Parallel, optimizer: torch.optim.Optimizer, scheduler: Any, kept: Mapping[str, Any]) -> None:
    """Give a scheduler its state.

    Raises:
        InputError: the checkpoint has none.
    """
    if kept["scheduler"] is None:
        remedy = "The checkpoint has no state of a scheduler. Load it without, and set the scheduler yourself."
        raise InputError("scheduler", type(scheduler).__name__, remedy)
    known = _owned(parallel)
    own = [kept["groups"][_group_of(group, known, kept)]["schedule"] for group in optimizer.param_groups]
    scheduler.load_state_dict(_joined(kept["scheduler"], own))


def check_members(parallel: Parallel, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose optimizer did not have the parameters of this one.

    Raises:
        InputError: names the first that it did not have.
    """
    known = _owned(parallel)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                shape = tuple(parameter.shape)
                raise InputError("parameter", shape, "The model does not have it. Make the optimizer over the model's.")
            name = known[id(parameter)][0]
            if name not in kept["members"]:
                remedy = "The checkpoint's optimizer did not have it. Make the optimizer over the same parameters."
                raise InputError("parameter", name, remedy)


def _owned(parallel: Parallel) -> dict[int, tuple[str, Owned]]:
    """Names and parameters of this rank, by the identity of what the optimizer updates."""
    return {
        id(one.updated): (parameter_name(parallel, one), one) for runtime in parallel.runtimes for one in runtime.owned
    }


def _group_of(group: Mapping[str, Any], parameters: Mapping[int, tuple[str, Owned]], kept: Mapping[str, Any]) -> int:
    """Which kept group a rank's group is like; the first where the rank's is empty."""
    names = (parameters[id(parameter)][0] for parameter in group["params"])
    return next((kept["members"][name] for name in names if name in kept["members"]), 0)


def _as_before(value: Any, before: Any) -> Any:
    if isinstance(before, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(before, value)
    return value


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, tuple[str, Owned]], blanks: Mapping[str, dict[str, Any]]
) -> None:
    """Undo torch's conversion of states to their parameter's dtype."""
    for parameter, state in optimizer.state.items():
        for key, blank in blanks.get(parameters[id(parameter)][0], {}).items():
            if isinstance(blank, Tensor) and state[key].dtype != blank.dtype:
                state[key] = state[key].to(blank.dtype)


def _plain(value: Any) -> Any:
    """Numbers in place of tensors of one item, as learning rates may be."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if type(value) is list else value


def _of_group(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What a scheduler holds of one group: entries by name; those of the schedulers inside by their place."""
    found: dict[str, Any] = {key: state[key][number] for key in _lists(state)}
    for place, inner in enumerate(_inner(state)):
        found[f"{NESTED}{place}"] = _of_group(inner, number)
    return found


def _shared(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a scheduler holds besides."""
    if state is None:
        return None
    found = dict(state)
    for key in _lists(state):
        found[key] = None
    if _inner(state):
        found[NESTED] = [_shared(inner) for inner in _inner(state)]
    return found


def _joined(shared: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a scheduler with these groups."""
    found = dict(shared)
    for key in [key for key in PER_GROUP if key in groups[0]]:
        found[key] = [group[key] for group in groups]
    if _inner(shared):
        found[NESTED] = [
            _joined(inner, [group[f"{NESTED}{place}"] for group in groups])
            for place, inner in enumerate(_inner(shared))
        ]
    return found


def _lists(state: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in PER_GROUP if isinstance(state.get(key), list))


def _inner(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = state.get(NESTED)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
