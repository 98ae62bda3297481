"""Parameters that layers of different stages share (embedding and head): a copy on each stage, kept in step.

The copies start equal (the first stage's value is sent to the others) and get the same gradient: the sum of theirs.
Equal gradients and equal optimizer states keep them equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.pipeline.transfer import place_groups
from galvatron_lite.parallelism.process_groups import ProcessGroups

COPIES = "shared parameters"
"""Purpose of the process groups of copies."""


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter under several names.

    Attributes:
        names: its paths in the model, in the order of the layers that hold them.
        layers: the layer of each name.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]


def find_shared(model: nn.Module, layers: Sequence[Layer]) -> tuple[SharedParameter, ...]:
    """Parameters that more than one layer holds. Call it on the whole model, before a stage is cut out of it."""
    order = {layer.name: position for position, layer in enumerate(layers)}
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append((name, layer_of(name, layers)))
    shared = []
    for entries in holders.values():
        entries.sort(key=lambda entry: order[entry[1]])
        if len({layer for _, layer in entries}) > 1:
            shared.append(SharedParameter(tuple(n for n, _ in entries), tuple(layer for _, layer in entries)))
    return tuple(shared)


def layer_of(name: str, layers: Sequence[Layer]) -> str:
    """The layer that holds a parameter or buffer: the one with the longest module path that leads to it.

    What no layer's module holds counts to the layer before the blocks.
    """
    found = max(
        ((len(path), layer.name) for layer in layers for path in layer.modules if name.startswith(f"{path}.")),
        default=None,
    )
    if found is not None:
        return found[1]
    return next((layer.name for layer in layers if layer.role is Role.BEFORE), layers[0].name)


class SharedCopies:
    """This rank's copies of parameters that live on several stages.

    Args:
        model: the stage's model, sharded.
        shared: from ``find_shared``.
        stages: names of each stage's layers.
        strategies: of every layer, by name.
        groups: makes process groups.
        reduced: what carries a parameter's reduced gradient, where that is not the parameter itself.

    Attributes:
        counted_elsewhere: names of parameters here that another stage counts in the global gradient norm.

    Every rank of the world makes one at the same time, and then calls ``start_equal`` where values may differ.

    Raises:
        InputError: two layers that share a parameter have different strategies, so that their slices do not match.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: Sequence[SharedParameter],
        stages: Sequence[Sequence[str]],
        strategies: Mapping[str, Strategy],
        groups: ProcessGroups | None = None,
        reduced: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        check_shared(shared, strategies)
        groups, self._reduced = groups or ProcessGroups(), reduced or {}
        here = dist.get_rank() // (dist.get_world_size() // len(stages))
        self._copies: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        counted_elsewhere = []
        for parameter in shared:
            holders = holding_stages(parameter, stages)
            if len(holders) < 2:
                continue
            group = groups.own(place_groups(holders, len(stages)), COPIES)
            for name, layer in zip(parameter.names, parameter.layers, strict=True):
                if layer in stages[here] and group is not None:
                    self._copies.append((model.get_parameter(name), group))
                    if here != holders[0]:
                        counted_elsewhere.append(name)
                    break
        self.counted_elsewhere = frozenset(counted_elsewhere)

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """This rank's copies."""
        return frozenset(parameter for parameter, _ in self._copies)

    def reduce(self) -> None:
        """Sum the gradients of the copies. Call it once a step, when every other reduction is done."""
        for parameter, group in self._copies:
            carrier = self._reduced.get(parameter, parameter)
            if carrier.grad is None:
                carrier.grad = torch.zeros_like(carrier)
            dist.all_reduce(_local(carrier.grad), group=group)

    def start_equal(self) -> None:
        """Make the copies equal to the first stage's; every rank of the world calls it."""
        with torch.no_grad():
            for parameter, group in self._copies:
                dist.broadcast(_local(parameter), src=dist.get_global_rank(group, 0), group=group)


def holding_stages(shared: SharedParameter, stages: Sequence[Sequence[str]]) -> list[int]:
    """Numbers of the stages with layers that hold a shared parameter."""
    return [number for number, names in enumerate(stages) if set(names) & set(shared.layers)]


def check_shared(shared: Sequence[SharedParameter], strategies: Mapping[str, Strategy]) -> None:
    """Raise InputError where layers that share a parameter have different strategies."""
    for parameter in shared:
        first, *others = parameter.layers
        for other in others:
            if strategies[other] != strategies[first]:
                remedy = f"It shares {parameter.names[0]} with {first}: give it the same, {strategies[first]}."
                raise InputError(f"strategy of {other}", str(strategies[other]), remedy)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
