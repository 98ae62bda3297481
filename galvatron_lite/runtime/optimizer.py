"""Parameter groups that any torch optimizer can take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

PART_OF = "part_of"
"""Option of groups that were cut: the number of the group in the list that was given."""
Groups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def split_groups(groups: Groups) -> list[dict[str, Any]]:
    """The same groups, cut so that each holds plain tensors of one device, or DTensors of one mesh.

    Optimizers that work on many tensors at once (foreach, fused) refuse mixtures. One group at least: a stage may have
    no parameters, and an optimizer refuses an empty list. Where the groups are not those given any more, ``PART_OF``
    says which of them each is a part of.
    """
    cut: list[tuple[int, dict[str, Any]]] = []
    given = [group if isinstance(group, Mapping) else {"params": [group]} for group in groups]
    plain = [group for group in given if set(group) == {"params"}]
    merged = [{"params": [p for group in plain for p in group["params"]]}] if plain else []
    wanted = [*merged, *(group for group in given if set(group) != {"params"})]
    for number, group in enumerate(wanted):
        options = {key: value for key, value in group.items() if key != "params"}
        alike: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            alike.setdefault((mesh, parameter.device.type), []).append(parameter)
        cut += [(number, {"params": parameters, **options}) for parameters in alike.values()]
    if [number for number, _ in cut] != [*range(len(wanted))]:
        cut = [(number, {**group, PART_OF: number}) for number, group in cut]
    return [group for _, group in cut] or [{"params": []}]


def fused_on_host(
    groups: list[dict[str, Any]], factory: Callable[..., Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The same groups; those in host memory ask for the fused update, where the optimizer has one and nothing else was
    asked for: it passes over the states once, where its other ways do so once an operator.
    """
    if "fused" not in inspect.signature(factory).parameters or {"fused", "foreach"} & set(options):
        return groups
    return [
        {**group, "fused": True} if all(p.device.type == "cpu" for p in group["params"]) and group["params"] else group
        for group in groups
    ]
