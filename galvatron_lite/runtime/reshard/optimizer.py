"""An optimizer's parameters and states under another plan; the optimizer and its groups stay the same objects.

A group that the user made (numbered in the order of their list) may be cut into several, of plain tensors and of each
mesh (``runtime.optimizer``). Another plan cuts it otherwise: groups are filled anew, those that are not needed stay
empty, and missing ones are added at the end. Schedulers hold a value for each group by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.checkpoint.optimizer import NESTED, PER_GROUP
from galvatron_lite.runtime.optimizer import PART_OF, split_groups

Options = dict[str, Any]
States = dict[Tensor, dict[str, Any]]
"""By parameter, as an optimizer has them."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a parameter's state, as the other ranks need to know it."""

    dtype: torch.dtype | None = None  # of a tensor of the parameter's shape; None of any other entry
    value: Any = None  # of an entry that is the same everywhere: a number, a tensor of one item
    on_device: bool = False  # whether such a tensor is on the parameter's device


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """What a rank tells the others of its optimizer."""

    options: dict[int, Options] = field(default_factory=dict)  # of the user's groups, by number
    groups: dict[str, int] = field(default_factory=dict)  # number of the user's group, by parameter
    states: dict[str, dict[str, StateEntry]] = field(default_factory=dict)  # by parameter
    trained: dict[str, bool] = field(default_factory=dict)  # whether it requires gradients, by parameter


def report_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerReport:
    """What the others must know of this rank's optimizer; ``names`` are those of the rank's parameters."""
    report = OptimizerReport(trained={name: parameter.requires_grad for parameter, name in names.items()})
    for place, group in enumerate(optimizer.param_groups):
        number = group.get(PART_OF, place)
        report.options.setdefault(number, {key: value for key, value in group.items() if key != "params"})
        for parameter in group["params"]:
            if parameter not in names:
                remedy = "Its parameters must be those of the model: make it with parallel.optimizer(...)."
                raise InputError("optimizer", type(optimizer).__name__, remedy)
            report.groups[names[parameter]] = number
    for parameter, name in names.items():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            report.states[name] = {key: _entry(key, value, parameter) for key, value in state.items()}
    return report


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


def merged(everyone: Sequence[OptimizerReport]) -> OptimizerReport:
    """The reports of all ranks as one; the first rank that has an entry counts."""
    all_ranks = OptimizerReport()
    for report in reversed(everyone):
        all_ranks.options.update(report.options)
        all_ranks.groups.update(report.groups)
        all_ranks.states.update(report.states)
        all_ranks.trained.update(report.trained)
    return all_ranks


def blank_states(report: OptimizerReport, names: Mapping[nn.Parameter, str]) -> States:
    """The states of this rank's parameters under the other plan; tensors of a parameter's shape without values."""
    return {
        parameter: {key: _blank(entry, parameter) for key, entry in report.states[name].items()}
        for parameter, name in names.items()
        if name in report.states
    }


def _blank(entry: StateEntry, parameter: nn.Parameter) -> Any:
    if entry.dtype is None:
        value = entry.value
        if isinstance(value, Tensor):
            return value.to(parameter.device if entry.on_device else "cpu", copy=True)
        return value
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, dtype=entry.dtype)
    local = torch.empty_like(tensor.to_local(), dtype=entry.dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@dataclass(frozen=True, slots=True)
class Regrouping:
    """How an optimizer's groups are filled."""

    filled: list[list[nn.Parameter]]  # parameters of each present group
    # options and parameters of further groups, and the number of a present group of the same user's group (None where
    # this rank has none)
    added: list[tuple[Options, int | None]]
    mixed: list[int] = field(default_factory=list)  # groups that get unlike tensors, which are updated one by one


def regroup(
    optimizer: torch.optim.Optimizer, report: OptimizerReport, names: Mapping[nn.Parameter, str], scheduler: Any
) -> Regrouping:
    """Which group each parameter of the other plan goes to.

    Where a scheduler exists that was not given, no groups are added: unlike tensors go into one group, which torch's
    optimizers then update one by one.
    """
    fixed = scheduler is None and any("initial_lr" in options for options in report.options.values())
    numbers = [group.get(PART_OF, place) for place, group in enumerate(optimizer.param_groups)]
    regrouping = Regrouping([[] for _ in numbers], [])
    for number in sorted(report.options):
        members = [parameter for parameter, name in names.items() if report.groups.get(name) == number]
        parts = [group["params"] for group in split_groups(members)] if members else []
        free = [place for place, other in enumerate(numbers) if other == number]
        if fixed and free and len(parts) > len(free):
            regrouping.mixed.append(free[-1])
            rest = [parameter for part in parts[len(free) - 1 :] for parameter in part]
            parts = [*parts[: len(free) - 1], rest]
        for place, parameters in zip(free, parts, strict=False):
            regrouping.filled[place] = parameters
        options = {**report.options[number], PART_OF: number}
        for parameters in parts[len(free) :]:
            regrouping.added.append(({**options, "params": parameters}, free[0] if free else None))
    if regrouping.added and fixed:
        remedy = "The optimizer gets more groups under the plan, which it must know: switch(..., scheduler=scheduler)."
        raise InputError("scheduler", None, remedy)
    return regrouping


def apply(optimizer: torch.optim.Optimizer, regrouping: Regrouping, states: States, scheduler: Any) -> None:
    """Make the optimizer update other parameters; its groups, their lists and its state stay the same objects."""
    count = len(optimizer.param_groups)
    for group, parameters in zip(optimizer.param_groups, regrouping.filled, strict=True):
        group["params"][:] = parameters
    for place in regrouping.mixed:
        flags = {"foreach", "fused"} & optimizer.param_groups[place].keys()
        optimizer.param_groups[place].update(dict.fromkeys(flags, False))
    optimizer.param_groups.extend(options for options, _ in regrouping.added)
    optimizer.state.clear()
    optimizer.state.update(states)
    leaders = [place or 0 for _, place in regrouping.added]
    for one in _schedulers(scheduler):
        for name in PER_GROUP:
            values = vars(one).get(name)
            if isinstance(values, list) and len(values) == count:
                values += [values[leader] for leader in leaders]


def _schedulers(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    return [scheduler, *(inner for one in vars(scheduler).get(NESTED, []) for inner in _schedulers(one))]
