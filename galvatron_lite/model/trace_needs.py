"""Which groups of modules (layers, candidates for layers) of a model that ran need what others made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from galvatron_lite.model.trace_flow import Flow


@dataclass(slots=True)
class Needs:
    """What a group of modules did in a run."""

    ran: bool = False  # whether any of it did
    # names of groups that what it was given is made of, directly or not; itself never
    earlier: set[str] = field(default_factory=set)
    batch: bool = False  # whether it was given the model's inputs, or what code between the groups made of them
    work: int = 0  # forward FLOPs
    busy: int = 0  # modules of it with FLOPs of their own


def needs_of(flow: Flow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, Needs]:
    """What each group of modules needs, by its name.

    A group that is given what code elsewhere made of parameters that one other group alone holds needs that one.

    Args:
        flow: of the run.
        model: that ran.
        groups: module paths by group; modules inside them belong to it, too.
    """
    homes, bits = held_by(flow.modules, groups), group_bits(flow, model, groups)
    every, given = sum(bits.values()), dict.fromkeys(groups, 0)
    found = {name: Needs() for name in groups}
    for path, name in homes.items():
        needs = found[name]
        needs.ran = needs.ran or path in flow.ran
        needs.work += flow.work[path]
        needs.busy += flow.work[path] > 0
        needs.batch = needs.batch or any(not entry & every for entry in flow.entries[path])
        given[name] |= flow.given[path]
    for name, needs in found.items():
        needs.earlier |= {other for other, bit in bits.items() if other != name and given[name] & bit}
    return found


def group_bits(flow: Flow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, int]:
    """By group of modules what tensors that it worked on are made of: its modules, and parameters that it alone has."""
    bits = dict.fromkeys(groups, 0)
    for path, name in held_by(flow.modules, groups).items():
        bits[name] |= flow.modules[path]
    for parameter, names in holders_of(model, groups).items():
        for name in names if len(names) == 1 else ():
            bits[name] |= flow.parameters[parameter]
    return bits


def holders_of(model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """The groups that hold each parameter, by its name; several hold a shared one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[str]] = {}
    for group, paths in groups.items():
        for parameter in (one for path in paths for one in model.get_submodule(path).parameters()):
            found.setdefault(names[id(parameter)], set()).add(group)
    return found


def held_by(paths: Collection[str], groups: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The group that holds each path: that of the nearest module around it; paths outside all groups are left out."""
    owner = {path: name for name, members in groups.items() for path in members}
    found: dict[str, str] = {}
    for path in paths:
        above = path
        while above and above not in owner:
            above = above.rpartition(".")[0]
        if above in owner:
            found[path] = owner[above]
    return found
