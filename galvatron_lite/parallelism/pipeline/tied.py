"""Parameters that layers of different stages share (embedding and head), with a synchronized copy on each stage.

The copies start equal (the first stage broadcasts its value) and get the same gradient: the sum of all. Equal gradients
and equal optimizer states keep them equal.
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
from galvatron_lite.parallelism.pipeline.runner import place_groups
from galvatron_lite.parallelism.pipeline.schedule import DEFAULT_SCHEDULE
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.strategy import Strategy

COPIES = "shared parameters"
"""Purpose of the process groups of copies."""


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter under several names."""

    names: tuple[str, ...]  # its paths in the model, in the order of the layers that hold them
    layers: tuple[str, ...]  # the layer of each name

    def names_in(self, stage: Sequence[str]) -> list[str]:
        """Return its names in a stage; ``stage``: names of the stage's layers."""
        return [name for name, layer in zip(self.names, self.layers, strict=True) if layer in stage]


def find_shared(model: nn.Module, layers: Sequence[Layer]) -> tuple[SharedParameter, ...]:
    """Return parameters that more than one layer holds. Call it on the full model, before it is cut into stages."""
    order = {layer.name: position for position, layer in enumerate(layers)}
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append((name, _holder(name, layers)))
    shared = []
    for names in holders.values():
        # names through modules of no layer are aliases
        entries = [(name, layer) for name, layer in names if layer] or [(names[0][0], layer_of(names[0][0], layers))]
        entries.sort(key=lambda entry: order[entry[1]])
        if len({layer for _, layer in entries}) > 1:
            shared.append(SharedParameter(tuple(n for n, _ in entries), tuple(layer for _, layer in entries)))
    return tuple(shared)


def layer_of(name: str, layers: Sequence[Layer]) -> str:
    """Return the layer of a parameter or buffer, by the longest module path that contains it.

    Parameters outside the layers' modules belong to the layer before the blocks.
    """
    return _holder(name, layers) or next((layer.name for layer in layers if layer.role is Role.BEFORE), layers[0].name)


def _holder(name: str, layers: Sequence[Layer]) -> str:
    holders = [(len(path), layer.name) for layer in layers for path in layer.modules if name.startswith(f"{path}.")]
    return max(holders, default=(0, ""))[1]


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of a parameter on this rank, and the ranks with other copies."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None  # None: all copies are on this rank
    source: int  # index in the group of the first stage's copy


class SharedCopies:
    """This rank's copies of parameters on several stages.

    All ranks of the world must create it together, and then call ``start_equal`` if values may differ.

    Args:
        models: the sharded models of this rank's stages, by index of the stage.
        shared: of ``find_shared``.
        stages: names of each stage's layers.
        strategies: of all layers, by name.
        groups: creates process groups.
        reduced: the tensor with a parameter's reduced gradient, if it is not the parameter.
        held: the tensor with a parameter's values, if it is not the parameter.
        pipeline: the stages on groups of devices; one each by default.

    Attributes:
        counted_elsewhere: names of parameters here that another stage counts in the global gradient norm.
        first_names: the names that one process has for parameters here, by the names that they have here.

    Raises:
        InputError: two layers that share a parameter have different strategies, so that their slices do not match.
    """

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        shared: Sequence[SharedParameter],
        stages: Sequence[Sequence[str]],
        strategies: Mapping[str, Strategy],
        groups: ProcessGroups | None = None,
        reduced: Mapping[nn.Parameter, nn.Parameter] | None = None,
        held: Mapping[nn.Parameter, nn.Parameter] | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        check_shared(shared, strategies)
        groups, self._reduced, self._held = groups or ProcessGroups(), reduced or {}, held or {}
        pipeline = pipeline or Pipeline(DEFAULT_SCHEDULE, len(stages))
        self._copies: list[_Copies] = []
        counted_elsewhere: list[str] = []
        self.first_names: dict[str, str] = {}
        for parameter in shared:
            holders = holding_stages(parameter, stages)
            if len(holders) < 2:
                continue
            places = holding_groups(holders, pipeline)
            group = groups.create(place_groups(places, pipeline.groups), COPIES) if len(places) > 1 else None
            here = {stage: parameter.names_in(stages[stage])[0] for stage in holders if stage in models}
            self.first_names |= dict.fromkeys(here.values(), parameter.names[0])
            counted_elsewhere += [name for stage, name in here.items() if stage != holders[0]]
            if here:
                copies = dict.fromkeys(models[stage].get_parameter(name) for stage, name in here.items())
                self._copies.append(_Copies(tuple(copies), group, places.index(pipeline.group_of(holders[0]))))
        self.counted_elsewhere = frozenset(counted_elsewhere)

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """This rank's copies."""
        return frozenset(parameter for copies in self._copies for parameter in copies.parameters)

    def reduce(self) -> None:
        """Sum the gradients of the copies. Call it once a step, after all other reductions."""
        for copies in self._copies:
            if not any(parameter.requires_grad for parameter in copies.parameters):
                continue  # a gradient of zeros would let the optimizer decay it
            carriers = [self._reduced.get(parameter, parameter) for parameter in copies.parameters]
            for carrier in carriers:
                if carrier.grad is None:
                    carrier.grad = torch.zeros_like(carrier)
            first, *others = [_local(carrier.grad) for carrier in carriers if carrier.grad is not None]
            for other in others:
                first += other
            if copies.group is not None:
                dist.all_reduce(first, group=copies.group)
            for other in others:
                other.copy_(first)

    def start_equal(self) -> None:
        """Make the copies equal to the first stage's. All ranks of the world must call it."""
        with torch.no_grad():
            for copies in self._copies:
                first, *others = (_local(self._held.get(parameter, parameter)) for parameter in copies.parameters)
                if copies.group is not None:
                    dist.broadcast(first, src=dist.get_global_rank(copies.group, copies.source), group=copies.group)
                for other in others:
                    other.copy_(first)


def shared_before(
    models: Mapping[int, nn.Module], stage: int, shared: Sequence[SharedParameter], stages: Sequence[Sequence[str]]
) -> dict[str, nn.Parameter]:
    """Return parameters that a stage shares with earlier stages of this rank, by name; ZeRO's shards are copies
    instead.

    ``models``: sharded models of earlier stages by index; ``stages``: names of each stage's layers.
    """
    parameters: dict[str, nn.Parameter] = {}
    for item in shared:
        holders = [number for number in holding_stages(item, stages) if number in models]
        if holders:
            parameter = models[holders[0]].get_parameter(item.names_in(stages[holders[0]])[0])
            if not isinstance(parameter, DTensor):
                parameters |= dict.fromkeys(item.names_in(stages[stage]), parameter)
    return parameters


def untie(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace parameters of modules by copies, by name, since splitting changes parameters in place."""
    copies = {
        id(parameter): nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        for parameter in parameters.values()
    }
    tie(model, {name: copies[id(parameter)] for name, parameter in parameters.items()})


def tie(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace parameters of modules, by name."""
    for name, parameter in parameters.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, parameter)


def holding_groups(holders: Sequence[int], pipeline: Pipeline) -> list[int]:
    """Return the groups of devices of stages, in order."""
    return sorted({pipeline.group_of(stage) for stage in holders})


def holding_stages(shared: SharedParameter, stages: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of the stages with layers that hold a shared parameter."""
    return [number for number, names in enumerate(stages) if set(names) & set(shared.layers)]


def check_shared(shared: Sequence[SharedParameter], strategies: Mapping[str, Strategy]) -> None:
    """Check that layers that share a parameter have the same strategy.

    Raises:
        InputError: they do not.
    """
    for parameter in shared:
        first, *others = parameter.layers
        for other in others:
            if strategies[other] != strategies[first]:
                remedy = f"It shares {parameter.names[0]} with {first}: give it the same, {strategies[first]}."
                raise InputError(f"strategy of {other}", str(strategies[other]), remedy)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
