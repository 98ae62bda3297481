"""Changing the parameters and states of an optimizer to those of another plan, in place.

Each group of the user is divided into groups of plain tensors and of the tensors of each mesh (``runtime.optimizer``),
and another plan divides it differently. The groups of the optimizer stay the same objects and get other parameters;
groups that are not needed stay empty, and missing groups are added at the end. Schedulers store a value for each group
by its index.
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
"""The state of an optimizer: entries by parameter."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of the state of a parameter, without the items of sharded tensors."""

    dtype: torch.dtype | None = None  # of a tensor with the shape of the parameter; None: any other value
    value: Any = None  # of other entries, which are equal on all ranks: a number, or a tensor of one item
    on_device: bool = False  # whether the tensor of one item is on the device of the parameter


@dataclass(frozen=True, slots=True)
class OptimizerReport:
    """The optimizer of a rank, as reported to the other ranks."""

    options: dict[int, Options] = field(default_factory=dict)  # of each group of the user, by number
    groups: dict[str, int] = field(default_factory=dict)  # number of the user's group, by parameter
    states: dict[str, dict[str, StateEntry]] = field(default_factory=dict)  # by parameter
    trained: dict[str, bool] = field(default_factory=dict)  # whether a parameter requires gradients


def report_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerReport:
    """Return the report of this rank's optimizer; raise ``InputError`` for a state that cannot be sharded anew."""
    report = OptimizerReport(trained={name: parameter.requires_grad for parameter, name in names.items()})
    for index, group in enumerate(optimizer.param_groups):
        number = group.get(PART_OF, index)
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


def merged(reports: Sequence[OptimizerReport]) -> OptimizerReport:
    """Merge the reports of all ranks; the first rank that has an entry counts."""
    all_ranks = OptimizerReport()
    for report in reversed(reports):
        all_ranks.options.update(report.options)
        all_ranks.groups.update(report.groups)
        all_ranks.states.update(report.states)
        all_ranks.trained.update(report.trained)
    return all_ranks


def blank_states(report: OptimizerReport, names: Mapping[nn.Parameter, str]) -> States:
    """Return the states of this rank's parameters under the new plan; sharded tensors are not initialized."""
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
    """The new groups of an optimizer."""

    parameters: list[list[nn.Parameter]]  # of each existing group
    # options with parameters of each additional group, and the index of an existing group with the same options (None:
    # this rank has none)
    added: list[tuple[Options, int | None]]
    mixed: list[int] = field(default_factory=list)  # groups with tensors of several meshes, updated one by one


def regroup(
    optimizer: torch.optim.Optimizer, report: OptimizerReport, names: Mapping[nn.Parameter, str], scheduler: Any
) -> Regrouping:
    """Assign the parameters of the new plan to groups.

    If the optimizer has a scheduler that was not passed, no groups are added: tensors of several meshes share a group,
    and torch's optimizers update them one by one.
    """
    fixed = scheduler is None and any("initial_lr" in options for options in report.options.values())
    numbers = [group.get(PART_OF, index) for index, group in enumerate(optimizer.param_groups)]
    regrouping = Regrouping([[] for _ in numbers], [])
    for number in sorted(report.options):
        members = [parameter for parameter, name in names.items() if report.groups.get(name) == number]
        groups = [group["params"] for group in split_groups(members)] if members else []
        existing = [index for index, other in enumerate(numbers) if other == number]
        if fixed and existing and len(groups) > len(existing):
            regrouping.mixed.append(existing[-1])
            rest = [parameter for group in groups[len(existing) - 1 :] for parameter in group]
            groups = [*groups[: len(existing) - 1], rest]
        for index, parameters in zip(existing, groups, strict=False):
            regrouping.parameters[index] = parameters
        options = {**report.options[number], PART_OF: number}
        for parameters in groups[len(existing) :]:
            regrouping.added.append(({**options, "params": parameters}, existing[0] if existing else None))
    if regrouping.added and fixed:
        remedy = "The optimizer gets more groups under the plan, which it must know: switch(..., scheduler=scheduler)."
        raise InputError("scheduler", None, remedy)
    return regrouping


def apply(optimizer: torch.optim.Optimizer, regrouping: Regrouping, states: States, scheduler: Any) -> None:
    """Set the groups and states of an optimizer; its groups, their lists and its state stay the same objects."""
    count = len(optimizer.param_groups)
    for group, parameters in zip(optimizer.param_groups, regrouping.parameters, strict=True):
        group["params"][:] = parameters
    for index in regrouping.mixed:
        flags = {"foreach", "fused"} & optimizer.param_groups[index].keys()
        optimizer.param_groups[index].update(dict.fromkeys(flags, False))
    optimizer.param_groups.extend(options for options, _ in regrouping.added)
    optimizer.state.clear()
    optimizer.state.update(states)
    sources = [index or 0 for _, index in regrouping.added]
    for each in _schedulers(scheduler):
        for name in PER_GROUP:
            values = vars(each).get(name)
            if isinstance(values, list) and len(values) == count:
                values += [values[source] for source in sources]


def _schedulers(scheduler: Any) -> list[Any]:
    """A scheduler and all schedulers nested in it."""
    if scheduler is None:
        return []
    return [scheduler, *(inner for nested in vars(scheduler).get(NESTED, []) for inner in _schedulers(nested))]
