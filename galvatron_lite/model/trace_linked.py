"""Tensors between layers and what no gradient tells of them: dependences without one, and who reads the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product

from torch import nn

from galvatron_lite.model.discover_blocks import at
from galvatron_lite.model.graph import Layer, Passed, Tie
from galvatron_lite.model.trace_flow import Flow
from galvatron_lite.model.trace_needs import Needs, group_bits, holders_of, needs_of


def layer_needs(flow: Flow, model: nn.Module, layers: Sequence[Layer], loss: int) -> dict[str, Needs]:
    """What each layer needs; the last one all that the loss is made of.

    Args:
        flow: of a run.
        model: that ran.
        layers: of it.
        loss: what the flow says the loss is made of.
    """
    groups = {layer.name: layer.modules for layer in layers}
    found, last = needs_of(flow, model, groups), layers[-1].name
    made = {name for name, bit in group_bits(flow, model, groups).items() if bit & loss}
    found[last].earlier |= made - {last}
    return found


def linked(
    layers: Sequence[Layer],
    tensors: Sequence[Passed],
    needs: Mapping[str, Needs],
    given: Mapping[str, int],
    forked: bool,
) -> tuple[Passed, ...]:
    """Tensors that go between layers, those without gradients among them where a layer needs another through no other;
    empty where each layer reads what the one before it made, and nothing else does.

    Of a model with branches a tensor of size 0 says which layers read the batch, which every pipeline stage has.

    Args:
        layers: of the model.
        tensors: that take gradients, in the order in which they are made.
        needs: of each layer.
        given: bytes per sample that each layer gives.
        forked: whether the model has branches.
    """
    place = {layer.name: number for number, layer in enumerate(layers)}
    near = all(place[reader] == place[tensor.producer] + 1 for tensor in tensors for reader in tensor.readers)
    if near and all(one.name in needs[other.name].earlier for one, other in pairwise(layers[1:])):
        return ()
    first, last = layers[0].name, layers[-1].name
    more: dict[str, list[str]] = {}
    for producer, reader in _lacking(layers, tensors, needs):
        more.setdefault(producer, []).append(reader)
    reading = [layer.name for layer in layers[1:] if layer.name != last and needs[layer.name].batch] if forked else []
    found = [
        *([Passed(first, tuple(reading), 0)] if reading else []),
        *tensors,
        *(Passed(name, tuple(readers), given.get(name, 0)) for name, readers in more.items()),
    ]
    return tuple(sorted(found, key=lambda tensor: place[tensor.producer]))


def _lacking(
    layers: Sequence[Layer], tensors: Sequence[Passed], needs: Mapping[str, Needs]
) -> Iterator[tuple[str, str]]:
    """Pairs of a layer that is needed and one that needs it, which no tensors between them tell."""
    first = layers[0].name
    reached: dict[str, set[str]] = {layer.name: set() for layer in layers}
    for number, layer in enumerate(layers):
        own = reached[layer.name]
        for tensor in tensors:
            if layer.name in tensor.readers:
                own |= {tensor.producer} | reached[tensor.producer]
        for other in reversed(layers[:number]):  # the nearest first: it may have needed the others
            if other.name != first and other.name in needs[layer.name].earlier - own:
                yield other.name, layer.name
                own |= {other.name} | reached[other.name]


def read_elsewhere(flow: Flow, model: nn.Module, layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Layers whose parameters code outside of them reads, each with the layers around which that code stands.

    Where these are all layers, or none, it is the last one.
    """
    groups = {layer.name: layer.modules for layer in layers if layer.modules}
    items = {name: parameter.numel() for name, parameter in model.named_parameters()}
    found: dict[tuple[str, str], int] = {}
    for parameter, holders in holders_of(model, groups).items():
        for path in flow.readers[parameter]:
            near = [name for name, modules in groups.items() if any(at(path, one) or at(one, path) for one in modules)]
            users = near if 0 < len(near) < len(groups) else [layers[-1].name]
            for pair in () if _inside(path, holders, groups) else product(holders, users):
                found[pair] = found.get(pair, 0) + items[parameter]
    return tuple(Tie(one, other, size) for (one, other), size in found.items() if one != other)


def _inside(path: str, holders: Collection[str], groups: Mapping[str, Collection[str]]) -> bool:
    return any(at(path, module) for holder in holders for module in groups[holder])
