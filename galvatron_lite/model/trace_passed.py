"""Which layers read what another one made, as seen while the whole model ran."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.graph import Layer, Passed, Role
from galvatron_lite.model.trace_run import Observation

_Key = tuple[int, int]
"""The call that made a tensor, by its number, and the tensor's number among what that gave."""


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
) -> tuple[Passed, ...]:
    """Tensors that go from one layer to others, per sample; empty where each is read by the next layer alone.

    Only tensors that take gradients: others (masks, position tables) every pipeline stage makes from the batch. Tensors
    are told apart by their storage; what a block hands on it counts as having made. What no module gave (made by the
    model's own code between layers) counts as the work of the layer that ran before its first reader, and reads by the
    model's own code count as the next layer's. What does not grow with the batch is left out.

    Args:
        layers: of the model.
        seen: the model's run at each number of samples.
        samples: those numbers, two.
        borrowing: per kind of layer, places of inputs that its backward needs and its kind does not count as kept.
    """
    first, second = (_sent(layers, observation, borrowing) for observation in seen)
    place = {layer.name: number for number, layer in enumerate(layers)}
    found = []
    for key, sent in first.items():
        size = (second[key].size - sent.size) // (samples[1] - samples[0]) if key in second else 0
        readers = tuple(sorted(sent.readers, key=place.__getitem__))
        if size > 0 and readers:
            found.append(Passed(sent.producer, readers, size, borrowed=any(sent.readers.values())))
    if all(place[reader] == place[tensor.producer] + 1 for tensor in found for reader in tensor.readers):
        return ()
    return tuple(sorted(found, key=lambda tensor: place[tensor.producer]))


def lent(tensors: Sequence[Passed], layer: str) -> int:
    """Bytes per sample of tensors that a layer made and others borrow."""
    return sum(tensor.size for tensor in tensors if tensor.borrowed and tensor.producer == layer)


def _sent(layers: Sequence[Layer], seen: Observation, borrowing: Mapping[str, Collection[int]]) -> dict[_Key, _Sent]:
    """Tensors by the call that made them; readers are layers after it, with whether they borrow it."""
    owner = {path: layer.name for layer in layers for path in layer.modules}
    place = {layer.name: number for number, layer in enumerate(layers)}
    borrowed = {layer.name: borrowing.get(layer.kind, ()) for layer in layers if layer.role is Role.BLOCK}
    current, made, sent = layers[0].name, dict[int, _Key](), dict[_Key, _Sent]()
    for number, call in enumerate(seen.calls):
        reader = _running(owner, place, current, call.path)
        for index, tensor in enumerate(call.inputs):
            if not tensor.requires_grad:
                continue
            key = made.setdefault(_storage(tensor), (number, -1 - index))
            known = sent.setdefault(key, _Sent(current, tensor.nbytes))
            if place[reader] > place[known.producer]:
                takes = index in borrowed.get(call.path, ())
                known.readers[reader] = known.readers.get(reader, False) or takes
        current = reader
        for index, tensor in enumerate(tensors_of(call.output)):
            if tensor.requires_grad:
                made[_storage(tensor)] = (number, index)
                sent[number, index] = _Sent(current, tensor.nbytes)
    return sent


def _running(owner: Mapping[str, str], place: Mapping[str, int], current: str, path: str) -> str:
    """The layer that a module's call belongs to: its own, but a module run again is part of what runs now."""
    own = owner.get(path, current)
    return own if place[own] >= place[current] else current


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
