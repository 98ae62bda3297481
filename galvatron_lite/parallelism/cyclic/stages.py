"""The stages of one user's model, for a process that runs several of them: each is a copy of its modules' structure.

Copies share parameters and buffers with the model. A stage's parameters are put into its copy before every pass, at the
version that the pass uses (``bind``), so that what another micro-batch still needs is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.pipeline.flow import LayerFlow
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.tied import find_shared

Holder = tuple[nn.Module, str]
"""A module, and the name of its attribute."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """One stage."""

    number: int  # from 0
    cut: StageModel  # runs it
    holders: Mapping[str, tuple[Holder, ...]]  # by each of its parameters' name in the model: all modules that hold it

    @property
    def model(self) -> nn.Module:
        """The structure that the stage runs in."""
        return self.cut.model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that its modules hold now, by their names in the model."""
        return dict(self.model.named_parameters())

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the stage's modules hold these parameters, by their names in the model."""
        for name, parameter in parameters.items():
            for module, attribute in self.holders[name]:
                setattr(module, attribute, parameter)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the stage's own layers, by their names in the model."""
        paths = [path for layer in self.cut.layers for path in layer.modules]
        for name, buffer in self.model.named_buffers():
            if any(name.startswith(f"{path}.") for path in paths):
                yield name, buffer


def cut_stages(
    model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]], flow: LayerFlow | None
) -> tuple[StagePart, ...]:
    """Every stage of a model, which stays as it is.

    Raises:
        InputError: two stages share a parameter, or the model cannot be cut there.
    """
    device = next((one.device for one in model.parameters()), None)
    return tuple(stage_of(structure_of(model), layers, names, number, flow, device) for number in range(len(names)))


def stage_of(
    model: nn.Module,
    layers: Sequence[Layer],
    names: Sequence[Sequence[str]],
    number: int,
    flow: LayerFlow | None,
    device: torch.device | None = None,
) -> StagePart:
    """One stage, in place: the model gives up the others' parameters; arguments and errors as of ``cut_stages``."""
    check_untied(model, layers, names)
    cut = StageModel(model, layers, names[number], device, flow)
    cut.attach()
    by_parameter: dict[int, list[Holder]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            by_parameter.setdefault(id(parameter), []).append((module, attribute))
    holders = {name: tuple(by_parameter[id(parameter)]) for name, parameter in model.named_parameters()}
    return StagePart(number, cut, holders)


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of a model's modules that share its parameters and buffers."""
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


def check_untied(model: nn.Module, layers: Sequence[Layer], names: Sequence[Sequence[str]]) -> None:
    """Raise InputError where layers of several stages share a parameter."""
    stage_of_layer = {layer: number for number, stage in enumerate(names) for layer in stage}
    for shared in find_shared(model, layers):
        if len({stage_of_layer[layer] for layer in shared.layers}) > 1:
            remedy = (
                f"{' and '.join(shared.layers)} share it, in different stages, whose parameters are of different "
                "versions under cyclic data parallelism. Untie it, or put these layers into one stage."
            )
            raise InputError("parameter", shared.names[0], remedy)
