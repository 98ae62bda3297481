"""What layers share: parameters, tensors that pass between them, and layers that belong together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from torch import Tensor, nn
from torch.autograd.graph import Node

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.graph import Layer, Passed, Role, Tie
from galvatron_lite.model.trace.flow import DataFlow, Needs, at, group_bits, holders_of, needs_of
from galvatron_lite.model.trace.run import Observation


@dataclass(frozen=True, slots=True)
class Owners:
    """Parameters and buffers by layer."""

    # parameters by layer name and their name in the model; shared ones only in the first layer
    parameters: dict[str, dict[str, nn.Parameter]]
    buffer_bytes: dict[str, int]  # bytes of buffers by layer name
    ties: tuple[Tie, ...]  # what layers share


def find_owners(model: nn.Module, layers: Sequence[Layer]) -> Owners:
    """Owners of a model's parameters; those that no layer's modules hold belong to the first layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = {
        layer.name: {
            names[id(parameter)]: parameter
            for path in layer.modules
            for parameter in model.get_submodule(path).parameters()
        }
        for layer in layers
    }
    held = {name for parameters in everything.values() for name in parameters}
    loose = {name: parameter for name, parameter in model.named_parameters() if name not in held}
    everything[layers[0].name] = loose | everything[layers[0].name]
    first: dict[str, str] = {}
    for layer, parameters in everything.items():
        for name in parameters:
            first.setdefault(name, layer)
    owned = {layer: {n: p for n, p in held.items() if first[n] == layer} for layer, held in everything.items()}
    shared: dict[tuple[str, str], list[nn.Parameter]] = {}
    for layer, parameters in everything.items():
        for name, parameter in parameters.items():
            if first[name] != layer:
                shared.setdefault((first[name], layer), []).append(parameter)
    ties = tuple(Tie(*pair, items_of(both), items_of(both, frozen=True)) for pair, both in shared.items())
    buffers = {
        layer.name: sum(buffer.nbytes for path in layer.modules for buffer in model.get_submodule(path).buffers())
        for layer in layers
    }
    buffers[layers[0].name] += sum(buffer.nbytes for buffer in model.buffers()) - sum(buffers.values())
    return Owners(owned, buffers, ties)


def items_of(parameters: Iterable[nn.Parameter], *, frozen: bool = False) -> int:
    """Items of parameters, or of those among them that get no gradient."""
    return sum(parameter.numel() for parameter in parameters if not (frozen and parameter.requires_grad))


_Key = tuple[int, int]
"""The call that made a tensor, by its number, and the tensor's number among what that gave."""
_Edge = tuple[Node | None, int]
"""Where a tensor stands in the graph of autograd: the node that made it, and its number among what that gave."""


@dataclass(slots=True)
class _Sent:
    """A tensor on its way: the layer that made it, its bytes, the layers that read it and whether they borrow it."""

    producer: str
    size: int
    readers: dict[str, bool] = field(default_factory=dict)


def passed_between(
    layers: Sequence[Layer],
    seen: Sequence[Observation],
    samples: Sequence[int],
    borrowing: Mapping[str, Collection[int]],
    ends: Sequence[Sequence[Tensor]],
    needs: Mapping[str, Needs],
) -> tuple[Passed, ...]:
    """Tensors that go from one layer to others, per sample, in the order in which they are made.

    Only tensors that take gradients: others (masks, position tables) every pipeline stage makes from the batch. Tensors
    are told apart by their storage; what a block hands on it counts as having made. What the model's own code between
    layers makes of their outputs (a concatenation) the reader makes itself: it reads each of these outputs. But what is
    made before the first block counts as the work of the layer before it. The loss counts as read by the last layer.
    What does not grow with the batch is left out, and what is heard of inside a block (a router's logits): such a model
    has one stage.

    Args:
        seen: the model's run at each number of samples.
        samples: those numbers, two.
        borrowing: per kind of layer, places of inputs that its backward needs and its kind does not count as kept.
        ends: of each run, what the loss is made of (or the loss itself).
        needs: of each layer, which it needs.
    """
    first, second = (_sent(layers, *run, borrowing, needs) for run in zip(seen, ends, strict=True))
    place = {layer.name: number for number, layer in enumerate(layers)}
    passed = []
    for key, sent in first.items():
        size = (second[key].size - sent.size) // (samples[1] - samples[0]) if key in second else 0
        readers = tuple(sorted(sent.readers, key=place.__getitem__))
        if size > 0 and readers:
            passed.append(Passed(sent.producer, readers, size, borrowed=any(sent.readers.values())))
    return tuple(sorted(passed, key=lambda tensor: place[tensor.producer]))


def lent(tensors: Sequence[Passed], layer: str) -> int:
    """Bytes per sample of tensors that a layer made and others borrow."""
    return sum(tensor.size for tensor in tensors if tensor.borrowed and tensor.producer == layer)


def _sent(
    layers: Sequence[Layer],
    seen: Observation,
    ends: Sequence[Tensor],
    borrowing: Mapping[str, Collection[int]],
    needs: Mapping[str, Needs],
) -> dict[_Key, _Sent]:
    """Tensors by the call that made them; readers are layers after it, with whether they borrow it."""
    owner = {path: layer.name for layer in layers for path in layer.modules}
    place = {layer.name: number for number, layer in enumerate(layers)}
    borrowed = {layer.name: borrowing.get(layer.kind, ()) for layer in layers if layer.role is Role.BLOCK}
    sight = _Sight(place, needs, layers[0].name)
    for number, call in enumerate(seen.calls):
        home = owner.get(call.path, sight.current)  # a module that runs again is part of what runs now
        reader = home if place[home] >= place[sight.current] else sight.current
        for index, tensor in enumerate(call.inputs):
            sight.read(tensor, reader, (number, -1 - index), index in borrowed.get(call.path, ()))
        sight.current = reader
        for index, tensor in enumerate(tensors_of(call.output)):
            sight.make(tensor, (number, index))
        sight.heard.update(_edge(tensor) for inner in call.heard for tensor in tensors_of(inner.output))
    for index, tensor in enumerate(ends):
        sight.read(tensor, layers[-1].name, (len(seen.calls), -1 - index), False)
    return sight.sent


@dataclass(slots=True)
class _Sight:
    """What was seen of a run so far."""

    place: Mapping[str, int]  # of each layer
    needs: Mapping[str, Needs]  # of each layer
    current: str  # the layer that runs
    storages: dict[int, _Key] = field(default_factory=dict)  # tensors by their storage
    edges: dict[_Edge, _Key] = field(default_factory=dict)  # tensors by their place in the graph of autograd
    sent: dict[_Key, _Sent] = field(default_factory=dict)  # who made and who read them
    heard: set[_Edge] = field(default_factory=set)  # tensors that are heard of inside blocks

    def make(self, tensor: Tensor, key: _Key) -> None:
        """The layer that runs gave a tensor."""
        if tensor.requires_grad:
            self.storages[_storage(tensor)] = self.edges[_edge(tensor)] = key
            self.sent[key] = _Sent(self.current, tensor.nbytes)

    def read(self, tensor: Tensor, reader: str, key: _Key, borrows: bool) -> None:
        """A layer is given a tensor; what no layer gave gets the key."""
        if not tensor.requires_grad:
            return
        if _storage(tensor) not in self.storages:
            sources = set(self._sources(tensor))
            if sources and (
                self.place[self.current] or any(self.place[self.sent[source].producer] for source in sources)
            ):
                for source in sources:
                    self._note(source, reader, False)
                return
            self.storages[_storage(tensor)] = key
            after = self.current in self.needs[reader].earlier
            self.sent[key] = _Sent(self.current if after else next(iter(self.place)), tensor.nbytes)
        self._note(self.storages[_storage(tensor)], reader, borrows)

    def _note(self, key: _Key, reader: str, borrows: bool) -> None:
        sent = self.sent[key]
        if self.place[reader] > self.place[sent.producer]:
            sent.readers[reader] = sent.readers.get(reader, False) or borrows

    def _sources(self, tensor: Tensor) -> Iterator[_Key]:
        """The outputs of layers that code between layers made a tensor of."""
        waiting, met = [_edge(tensor)], set[_Edge]()
        while waiting:
            edge = waiting.pop()
            if edge in self.edges:
                yield self.edges[edge]
            elif edge[0] is not None and edge not in met and edge not in self.heard:
                met.add(edge)
                waiting += edge[0].next_functions


def _edge(tensor: Tensor) -> _Edge:
    return tensor.grad_fn, tensor.output_nr


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def layer_needs(flow: DataFlow, model: nn.Module, layers: Sequence[Layer], loss: int) -> dict[str, Needs]:
    """What each layer needs; the last one all that the loss is made of.

    Args:
        flow: of a run.
        loss: what the flow says the loss is made of.
    """
    groups = {layer.name: layer.modules for layer in layers}
    needs, last = needs_of(flow, model, groups), layers[-1].name
    in_loss = {name for name, bit in group_bits(flow, model, groups).items() if bit & loss}
    needs[last].earlier |= in_loss - {last}
    return needs


def linked(
    layers: Sequence[Layer],
    tensors: Sequence[Passed],
    needs: Mapping[str, Needs],
    output_bytes: Mapping[str, int],
    forked: bool,
) -> tuple[Passed, ...]:
    """Tensors that go between layers, those without gradients among them where a layer needs another through no other;
    empty where each layer reads what the one before it made, and nothing else does.

    Of a model with branches a tensor of size 0 says which layers read the batch, which every pipeline stage has.

    Args:
        tensors: that take gradients, in the order in which they are made.
        needs: of each layer.
        output_bytes: bytes per sample that each layer gives.
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
    links = [
        *([Passed(first, tuple(reading), 0)] if reading else []),
        *tensors,
        *(Passed(name, tuple(readers), output_bytes.get(name, 0)) for name, readers in more.items()),
    ]
    return tuple(sorted(links, key=lambda tensor: place[tensor.producer]))


def _lacking(
    layers: Sequence[Layer], tensors: Sequence[Passed], needs: Mapping[str, Needs]
) -> Iterator[tuple[str, str]]:
    """Pairs of a layer that is needed and one that needs it, which no tensors between them tell."""
    first = layers[0].name
    reached: dict[str, set[str]] = {layer.name: set() for layer in layers}
    for number, layer in enumerate(layers):
        reachable = reached[layer.name]
        for tensor in tensors:
            if layer.name in tensor.readers:
                reachable |= {tensor.producer} | reached[tensor.producer]
        for other in reversed(layers[:number]):  # the nearest first: it may have needed the others
            if other.name != first and other.name in needs[layer.name].earlier - reachable:
                yield other.name, layer.name
                reachable |= {other.name} | reached[other.name]


def read_elsewhere(flow: DataFlow, model: nn.Module, layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Layers whose parameters code outside of them reads, each with the layers around which that code stands.

    Where these are all layers, or none, it is the last one.
    """
    groups = {layer.name: layer.modules for layer in layers if layer.modules}
    items = {name: parameter.numel() for name, parameter in model.named_parameters()}
    readers: dict[tuple[str, str], int] = {}
    for parameter, holders in holders_of(model, groups).items():
        for path in flow.readers[parameter]:
            near = [
                name
                for name, modules in groups.items()
                if any(at(path, module) or at(module, path) for module in modules)
            ]
            users = near if 0 < len(near) < len(groups) else [layers[-1].name]
            inside = any(at(path, module) for holder in holders for module in groups[holder])
            for pair in () if inside else product(holders, users):
                readers[pair] = readers.get(pair, 0) + items[parameter]
    return tuple(Tie(one, other, size) for (one, other), size in readers.items() if one != other)
