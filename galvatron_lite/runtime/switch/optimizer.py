"""An optimizer's parameters and states under another plan; the optimizer and its groups stay the same objects.

A group that the user made (a number of the list they gave) may be cut into several, of plain tensors and of each mesh
(``runtime.optimizer``). Under another plan it is cut otherwise: its groups are filled anew, those that are not needed
stay empty, and what is missing is added at the end. Schedulers hold a value for each group by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.optimizer import PART_OF, split_groups

Options = dict[str, Any]
PER_GROUP = (
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "default_min_lr"
)  # fmt: skip
"""Lists of torch's schedulers that hold a value for each group of the optimizer."""
NESTED = "_schedulers"
"""List of schedulers in those that run several."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a parameter's state, as others are told of it."""

    dtype: torch.dtype | None = None  # of a tensor of the parameter's shape; None of any other entry
    value: Any = None  # of an entry that is the same whole thing everywhere: a number, a tensor of one item
    on_device: bool = False  # whether such a tensor lies on the parameter's device


@dataclass(frozen=True, slots=True)
class Described:
    """What a rank tells of its optimizer."""

    options: dict[int, Options] = field(default_factory=dict)  # of the user's groups, by number
    groups: dict[str, int] = field(default_factory=dict)  # of each parameter's name: the number of its group
    states: dict[str, dict[str, StateEntry]] = field(default_factory=dict)  # of each parameter's name: its entries
    trained: dict[str, bool] = field(default_factory=dict)  # of each parameter's name: whether it asks for gradients


def describe(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Described:
    """What the others must know of this rank's optimizer.

    Args:
        optimizer: over parameters of this rank.
        names: of the parameters.

    Raises:
        InputError: it has parameters of others, or states that cannot be cut.
    """
    told = Described(trained={name: one.requires_grad for one, name in names.items()})
    for place, group in enumerate(optimizer.param_groups):
        number = group.get(PART_OF, place)
        told.options.setdefault(number, {key: value for key, value in group.items() if key != "params"})
        for parameter in group["params"]:
            if parameter not in names:
                remedy = "Its parameters must be those of the model: make it with parallel.optimizer(...)."
                raise InputError("optimizer", type(optimizer).__name__, remedy)
            told.groups[names[parameter]] = number
    for parameter, name in names.items():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            told.states[name] = {key: _entry(key, value, parameter) for key, value in state.items()}
    return told


def _entry(key: str, value: Any, parameter: Tensor) -> StateEntry:
    if not isinstance(value, Tensor):
        return StateEntry(value=value)
    if value.shape == parameter.shape:
        return StateEntry(value.dtype)
    if value.numel() == 1:
        return StateEntry(value=value.detach().cpu(), on_device=value.device == parameter.device)
    remedy = (
        "Entries of the parameter's shape, and of one item, can be cut anew; use an optimizer that has no others, such "
        "as AdamW or SGD, or save and load."
    )
    raise InputError(f"optimizer state {key}", tuple(value.shape), remedy)


def merged(everyone: Sequence[Described]) -> Described:
    """What all ranks told together; the first that knows something counts."""
    whole = Described()
    for told in reversed(everyone):
        whole.options.update(told.options)
        whole.groups.update(told.groups)
        whole.states.update(told.states)
        whole.trained.update(told.trained)
    return whole


@dataclass(frozen=True, slots=True)
class States:
    """States by parameter, to be looked at as an optimizer's."""

    state: Mapping[Tensor, dict[str, Any]] = field(default_factory=dict)


def blank_states(described: Described, names: Mapping[nn.Parameter, str]) -> States:
    """The states of this rank's parameters under the other plan; tensors of a parameter's shape without values."""
    return States({
        parameter: {key: _blank(entry, parameter) for key, entry in described.states[name].items()}
        for parameter, name in names.items()
        if name in described.states
    })  # fmt: skip


def _blank(entry: StateEntry, parameter: nn.Parameter) -> Any:
    if entry.dtype is not None:
        return _empty_like(parameter.detach(), entry.dtype)
    if isinstance(entry.value, Tensor):
        return entry.value.to(parameter.device if entry.on_device else "cpu", copy=True)
    return entry.value


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, dtype=dtype)
    local = torch.empty_like(tensor.to_local(), dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@dataclass(frozen=True, slots=True)
class Regrouping:
    """How an optimizer's groups are filled."""

    filled: list[list[nn.Parameter]]  # of each group that there is: its parameters
    # options and parameters of further groups, and the number of a group of the same user's group (None where this
    # rank has none)
    added: list[tuple[Options, int | None]]
    mixed: list[int] = field(default_factory=list)  # groups that get unlike tensors, which are updated one by one


def regroup(
    optimizer: torch.optim.Optimizer, described: Described, names: Mapping[nn.Parameter, str], scheduler: Any
) -> Regrouping:
    """Which group each parameter of the other plan goes to.

    Where there is a scheduler that was not given, there are not more groups than before: unlike tensors go into one,
    which torch's optimizers then update one by one.

    Raises:
        InputError: this rank had no group of the user's group.
    """
    fixed = scheduler is None and any("initial_lr" in options for options in described.options.values())
    known = [group.get(PART_OF, place) for place, group in enumerate(optimizer.param_groups)]
    filled: list[list[nn.Parameter]] = [[] for _ in known]
    added: list[tuple[Options, int | None]] = []
    mixed: list[int] = []
    for number in sorted(described.options):
        members = [parameter for parameter, name in names.items() if described.groups.get(name) == number]
        cut = [group["params"] for group in split_groups(members)] if members else []
        free = [place for place, own in enumerate(known) if own == number]
        if fixed and free and len(cut) > len(free):
            mixed.append(free[-1])
            cut = [*cut[: len(free) - 1], [one for rest in cut[len(free) - 1 :] for one in rest]]
        for place, parameters in zip(free, cut, strict=False):
            filled[place] = parameters
        options = {**described.options[number], PART_OF: number}
        added += [({**options, "params": more}, free[0] if free else None) for more in cut[len(free) :]]
    if added and fixed:
        raise _unknown_scheduler()
    return Regrouping(filled, added, mixed)


def _unknown_scheduler() -> InputError:
    remedy = "The optimizer gets more groups under the plan, which it must know: switch(..., scheduler=scheduler)."
    return InputError("scheduler", None, remedy)


def apply(optimizer: torch.optim.Optimizer, regrouping: Regrouping, states: States, scheduler: Any) -> None:
    """Make the optimizer work on other parameters; its groups, their lists and its state stay the same objects."""
    count = len(optimizer.param_groups)
    for group, parameters in zip(optimizer.param_groups, regrouping.filled, strict=True):
        group["params"][:] = parameters
    for place in regrouping.mixed:
        told = {"foreach", "fused"} & optimizer.param_groups[place].keys()
        optimizer.param_groups[place].update(dict.fromkeys(told, False))
    optimizer.param_groups.extend(options for options, _ in regrouping.added)
    optimizer.state.clear()
    optimizer.state.update(states.state)
    for one in _schedulers(scheduler):
        _grow(one, count, [place or 0 for _, place in regrouping.added])


def _schedulers(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    inner = vars(scheduler).get(NESTED, [])
    return [scheduler, *(deeper for one in inner for deeper in _schedulers(one))]


def _grow(scheduler: Any, count: int, leaders: Sequence[int]) -> None:
    """A scheduler's values for further groups are those of the groups they belong to."""
    for name in PER_GROUP:
        values = vars(scheduler).get(name)
        if isinstance(values, list) and len(values) == count:
            values += [values[leader] for leader in leaders]
