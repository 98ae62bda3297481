"""Which layer holds which parameter, and which layers share some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from galvatron_lite.model.graph import Layer, Tie


@dataclass(frozen=True, slots=True)
class Owners:
    """Parameters and buffers by layer."""

    # parameters by layer name and their name in the model; shared ones only in the first layer
    parameters: dict[str, dict[str, nn.Parameter]]
    everything: dict[str, dict[str, nn.Parameter]]  # the same with shared parameters in every layer that uses them
    buffer_bytes: dict[str, int]  # bytes of buffers by layer name
    ties: tuple[Tie, ...]  # what layers share

    def used(self, layer: Layer) -> list[nn.Parameter]:
        """Every parameter a layer uses, its own or shared."""
        return list(self.everything[layer.name].values())


def find_owners(model: nn.Module, layers: Sequence[Layer]) -> Owners:
    """Owners of a model's parameters; those that no layer's modules hold belong to the first layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = {layer.name: _parameters(model, layer, names) for layer in layers}
    held = {name for parameters in everything.values() for name in parameters}
    loose = {name: parameter for name, parameter in model.named_parameters() if name not in held}
    everything[layers[0].name] = loose | everything[layers[0].name]
    first: dict[str, str] = {}
    for layer, parameters in everything.items():
        for name in parameters:
            first.setdefault(name, layer)
    owned = {layer: {n: p for n, p in held.items() if first[n] == layer} for layer, held in everything.items()}
    return Owners(owned, everything, _buffer_bytes(model, layers), _ties(everything, first))


def _parameters(model: nn.Module, layer: Layer, names: dict[int, str]) -> dict[str, nn.Parameter]:
    modules = [model.get_submodule(path) for path in layer.modules]
    return {names[id(parameter)]: parameter for module in modules for parameter in module.parameters()}


def _buffer_bytes(model: nn.Module, layers: Sequence[Layer]) -> dict[str, int]:
    total = {layer.name: 0 for layer in layers}
    for layer in layers:
        for path in layer.modules:
            total[layer.name] += sum(buffer.nbytes for buffer in model.get_submodule(path).buffers())
    total[layers[0].name] += sum(buffer.nbytes for buffer in model.buffers()) - sum(total.values())
    return total


def _ties(everything: dict[str, dict[str, nn.Parameter]], first: dict[str, str]) -> tuple[Tie, ...]:
    shared: dict[tuple[str, str], int] = {}
    for layer, parameters in everything.items():
        for name, parameter in parameters.items():
            if first[name] != layer:
                pair = (first[name], layer)
                shared[pair] = shared.get(pair, 0) + parameter.numel()
    return tuple(Tie(one, other, items) for (one, other), items in shared.items())
