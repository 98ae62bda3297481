"""Which layers read what another one made, as seen while the whole model ran."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.graph import Layer, Passed, Role
from galvatron_lite.model.trace_needs import Needs
from galvatron_lite.model.trace_run import Observation

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
        layers: of the model.
        seen: the model's run at each number of samples.
        samples: those numbers, two.
        borrowing: per kind of layer, places of inputs that its backward needs and its kind does not count as kept.
        ends: of each run, what the loss is made of (or the loss itself).
        needs: of each layer, which it needs.
    """
    first, second = (_sent(layers, *run, borrowing, needs) for run in zip(seen, ends, strict=True))
    place = {layer.name: number for number, layer in enumerate(layers)}
    found = []
    for key, sent in first.items():
        size = (second[key].size - sent.size) // (samples[1] - samples[0]) if key in second else 0
        readers = tuple(sorted(sent.readers, key=place.__getitem__))
        if size > 0 and readers:
            found.append(Passed(sent.producer, readers, size, borrowed=any(sent.readers.values())))
    return tuple(sorted(found, key=lambda tensor: place[tensor.producer]))


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
        reader = _running(owner, place, sight.current, call.path)
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
    made: dict[int, _Key] = field(default_factory=dict)  # tensors by their storage
    edges: dict[_Edge, _Key] = field(default_factory=dict)  # tensors by their place in the graph of autograd
    sent: dict[_Key, _Sent] = field(default_factory=dict)  # who made and who read them
    heard: set[_Edge] = field(default_factory=set)  # tensors that are heard of inside blocks

    def make(self, tensor: Tensor, key: _Key) -> None:
        """The layer that runs gave a tensor."""
        if tensor.requires_grad:
            self.made[_storage(tensor)] = self.edges[_edge(tensor)] = key
            self.sent[key] = _Sent(self.current, tensor.nbytes)

    def read(self, tensor: Tensor, reader: str, key: _Key, borrows: bool) -> None:
        """A layer is given a tensor; what no layer gave gets the key."""
        if not tensor.requires_grad:
            return
        if _storage(tensor) not in self.made:
            sources = set(self._sources(tensor))
            if sources and (self.place[self.current] or any(self.place[self.sent[one].producer] for one in sources)):
                for one in sources:
                    self._note(one, reader, False)
                return
            self.made[_storage(tensor)] = key
            after = self.current in self.needs[reader].earlier
            self.sent[key] = _Sent(self.current if after else next(iter(self.place)), tensor.nbytes)
        self._note(self.made[_storage(tensor)], reader, borrows)

    def _note(self, key: _Key, reader: str, borrows: bool) -> None:
        known = self.sent[key]
        if self.place[reader] > self.place[known.producer]:
            known.readers[reader] = known.readers.get(reader, False) or borrows

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


def _running(owner: Mapping[str, str], place: Mapping[str, int], current: str, path: str) -> str:
    """The layer that a module's call belongs to: its own, but a module run again is part of what runs now."""
    own = owner.get(path, current)
    return own if place[own] >= place[current] else current


def _edge(tensor: Tensor) -> _Edge:
    return tensor.grad_fn, tensor.output_nr


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
