"""What layers share: parameters, and the tensors that one layer makes and later layers read."""

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
    """Parameters and buffers by layer name."""

    parameters: dict[str, dict[str, nn.Parameter]]  # by their names in the model; shared ones in the first layer alone
    buffer_bytes: dict[str, int]
    ties: tuple[Tie, ...]  # parameters of one layer that a later one uses too


def find_owners(model: nn.Module, layers: Sequence[Layer]) -> Owners:
    """Assign a model's parameters and buffers to layers; those outside all modules of layers go to the first layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used = {
        layer.name: {
            names[id(parameter)]: parameter
            for path in layer.modules
            for parameter in model.get_submodule(path).parameters()
        }
        for layer in layers
    }
    inside = {name for parameters in used.values() for name in parameters}
    outside = {name: parameter for name, parameter in model.named_parameters() if name not in inside}
    used[layers[0].name] = outside | used[layers[0].name]
    owners: dict[str, str] = {}  # layer by parameter
    shared: dict[tuple[str, str], list[nn.Parameter]] = {}
    for layer, parameters in used.items():
        for name, parameter in parameters.items():
            owner = owners.setdefault(name, layer)
            if owner != layer:
                shared.setdefault((owner, layer), []).append(parameter)
    buffers = {
        layer.name: sum(buffer.nbytes for path in layer.modules for buffer in model.get_submodule(path).buffers())
        for layer in layers
    }
    buffers[layers[0].name] += sum(buffer.nbytes for buffer in model.buffers()) - sum(buffers.values())
    return Owners(
        {layer: {name: p for name, p in used[layer].items() if owners[name] == layer} for layer in used},
        buffers,
        tuple(Tie(*pair, items_of(both), items_of(both, frozen=True)) for pair, both in shared.items()),
    )


def items_of(parameters: Iterable[nn.Parameter], *, frozen: bool = False) -> int:
    """Count the items of parameters; with ``frozen`` only of those that get no gradient."""
    return sum(parameter.numel() for parameter in parameters if not (frozen and parameter.requires_grad))


_TensorId = tuple[int, int]
"""A tensor of a run: the index of the call that made it, and its index among the outputs (below 0: inputs)."""
_Edge = tuple[Node | None, int]
"""A tensor's position in the autograd graph: the node that made it, and its index among the node's outputs."""


@dataclass(slots=True)
class _Transfer:
    """A tensor that a layer makes and later layers read."""

    producer: str
    size: int  # bytes
    readers: dict[str, bool] = field(default_factory=dict)  # layers after the producer, and whether they borrow it


def passed_tensors(
    layers: Sequence[Layer],
    runs: Sequence[Observation],
    samples: Sequence[int],
    borrowing: Mapping[str, Collection[int]],
    ends: Sequence[Sequence[Tensor]],
    needs: Mapping[str, Needs],
) -> tuple[Passed, ...]:
    """Find the tensors that go from one layer to others, with bytes per sample, in the order they are made.

    Only tensors that take gradients count: all others (masks, position tables) each pipeline stage makes from the
    batch. A block counts as the producer of what it hands on. What code between layers makes of several outputs (a
    concatenation) its reader makes itself, so it reads each of these outputs; but what is made before the first block
    belongs to the layer before it. The last layer reads the loss. Left out are tensors that do not grow with the batch,
    and those that a hook takes from inside a block (a router's logits): such a model has one stage.

    Args:
        runs: one for each number of samples.
        samples: the two numbers.
        borrowing: by kind of layer, indices of inputs that its backward needs and its kind does not count as kept.
        ends: for each run, the tensors that the loss is made of, or the loss.
        needs: by layer.
    """
    small, large = (_transfers(layers, *run, borrowing, needs) for run in zip(runs, ends, strict=True))
    indices = {layer.name: index for index, layer in enumerate(layers)}
    passed = []
    for key, transfer in small.items():
        size = (large[key].size - transfer.size) // (samples[1] - samples[0]) if key in large else 0
        readers = tuple(sorted(transfer.readers, key=indices.__getitem__))
        if size > 0 and readers:
            passed.append(Passed(transfer.producer, readers, size, borrowed=any(transfer.readers.values())))
    return tuple(sorted(passed, key=lambda tensor: indices[tensor.producer]))


def _transfers(
    layers: Sequence[Layer],
    run: Observation,
    ends: Sequence[Tensor],
    borrowing: Mapping[str, Collection[int]],
    needs: Mapping[str, Needs],
) -> dict[_TensorId, _Transfer]:
    """The tensors that layers of one run made, with their readers."""
    owners = {path: layer.name for layer in layers for path in layer.modules}
    indices = {layer.name: index for index, layer in enumerate(layers)}
    borrowed = {layer.name: borrowing.get(layer.kind, ()) for layer in layers if layer.role is Role.BLOCK}
    tracker = _Tracker(indices, needs, layers[0].name)
    for number, call in enumerate(run.calls):
        owner = owners.get(call.path, tracker.running)
        # a module that runs again is part of the layer that runs now
        reader = owner if indices[owner] >= indices[tracker.running] else tracker.running
        for index, tensor in enumerate(call.inputs):
            tracker.read(tensor, reader, (number, -1 - index), index in borrowed.get(call.path, ()))
        tracker.running = reader
        for index, tensor in enumerate(tensors_of(call.output)):
            tracker.make(tensor, (number, index))
        tracker.hooked.update(_edge(tensor) for inner in call.heard for tensor in tensors_of(inner.output))
    for index, tensor in enumerate(ends):
        tracker.read(tensor, layers[-1].name, (len(run.calls), -1 - index), borrows=False)
    return tracker.transfers


@dataclass(slots=True)
class _Tracker:
    """Follows tensors from the layers that make them to those that read them; a storage identifies a tensor."""

    indices: Mapping[str, int]  # of layers
    needs: Mapping[str, Needs]  # of layers
    running: str  # name of a layer
    transfers: dict[_TensorId, _Transfer] = field(default_factory=dict)
    storages: dict[int, _TensorId] = field(default_factory=dict)
    edges: dict[_Edge, _TensorId] = field(default_factory=dict)
    hooked: set[_Edge] = field(default_factory=set)  # tensors that hooks take from inside blocks

    def make(self, tensor: Tensor, key: _TensorId) -> None:
        """Note an output of the running layer."""
        if tensor.requires_grad:
            self.storages[_storage(tensor)] = self.edges[_edge(tensor)] = key
            self.transfers[key] = _Transfer(self.running, tensor.nbytes)

    def read(self, tensor: Tensor, reader: str, key: _TensorId, borrows: bool) -> None:
        """Note that a layer reads a tensor; one that no layer made is stored under ``key``."""
        if not tensor.requires_grad:
            return
        if _storage(tensor) not in self.storages:
            sources = set(self._layer_outputs_behind(tensor))
            past_first = self.indices[self.running] or any(self.indices[self.transfers[s].producer] for s in sources)
            if sources and past_first:
                for source in sources:
                    self._add_reader(source, reader, borrows=False)
                return
            self.storages[_storage(tensor)] = key
            after = self.running in self.needs[reader].earlier
            self.transfers[key] = _Transfer(self.running if after else next(iter(self.indices)), tensor.nbytes)
        self._add_reader(self.storages[_storage(tensor)], reader, borrows)

    def _add_reader(self, key: _TensorId, reader: str, borrows: bool) -> None:
        transfer = self.transfers[key]
        if self.indices[reader] > self.indices[transfer.producer]:
            transfer.readers[reader] = transfer.readers.get(reader, False) or borrows

    def _layer_outputs_behind(self, tensor: Tensor) -> Iterator[_TensorId]:
        """The outputs of layers that code between layers made a tensor of."""
        waiting, visited = [_edge(tensor)], set[_Edge]()
        while waiting:
            edge = waiting.pop()
            if edge in self.edges:
                yield self.edges[edge]
            elif edge[0] is not None and edge not in visited and edge not in self.hooked:
                visited.add(edge)
                waiting += edge[0].next_functions


def _edge(tensor: Tensor) -> _Edge:
    return tensor.grad_fn, tensor.output_nr


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def layer_needs(flow: DataFlow, model: nn.Module, layers: Sequence[Layer], loss: int) -> dict[str, Needs]:
    """Find what each layer needs; the last one needs all that the loss is made of.

    Args:
        flow: of the model's run.
        loss: the sources of the loss, as bits of ``flow``.
    """
    groups = {layer.name: layer.modules for layer in layers}
    needs, last = needs_of(flow, model, groups), layers[-1].name
    in_loss = {name for name, bit in group_bits(flow, model, groups).items() if bit & loss}
    needs[last].earlier |= in_loss - {last}
    return needs


def tensors_between_layers(
    layers: Sequence[Layer],
    passed: Sequence[Passed],
    needs: Mapping[str, Needs],
    output_bytes: Mapping[str, int],
    forked: bool,
) -> tuple[Passed, ...]:
    """Return the tensors between layers as ``ModelGraph`` has them: empty for a chain.

    A layer may need another that no passed tensor leads from: a tensor without gradients then stands for the need. In a
    model with branches, a tensor of size 0 from the first layer names the layers that read the batch, which each
    pipeline stage has.

    Args:
        passed: tensors that take gradients, in the order they are made.
        needs: by layer.
        output_bytes: bytes per sample of each layer's output.
        forked: whether the model has branches.
    """
    indices = {layer.name: index for index, layer in enumerate(layers)}
    near = all(indices[reader] == indices[tensor.producer] + 1 for tensor in passed for reader in tensor.readers)
    if near and all(left.name in needs[right.name].earlier for left, right in pairwise(layers[1:])):
        return ()
    first, last = layers[0].name, layers[-1].name
    ungraded: dict[str, list[str]] = {}
    for producer, reader in _needs_without_tensors(layers, passed, needs):
        ungraded.setdefault(producer, []).append(reader)
    reading = [layer.name for layer in layers[1:] if layer.name != last and needs[layer.name].batch] if forked else []
    tensors = [
        *([Passed(first, tuple(reading), 0)] if reading else []),
        *passed,
        *(Passed(name, tuple(readers), output_bytes.get(name, 0)) for name, readers in ungraded.items()),
    ]
    return tuple(sorted(tensors, key=lambda tensor: indices[tensor.producer]))


def _needs_without_tensors(
    layers: Sequence[Layer], passed: Sequence[Passed], needs: Mapping[str, Needs]
) -> Iterator[tuple[str, str]]:
    """Pairs of layers of which the second needs the first, while no path of passed tensors leads from one to the other.

    The first layer of all is left out: each stage can do its work.
    """
    reached: dict[str, set[str]] = {layer.name: set() for layer in layers}  # layers from which a path leads to one
    for index, layer in enumerate(layers):
        reachable = reached[layer.name]
        for tensor in passed:
            if layer.name in tensor.readers:
                reachable |= {tensor.producer} | reached[tensor.producer]
        for other in reversed(layers[1:index]):  # the nearest first, which may need the others
            if other.name in needs[layer.name].earlier - reachable:
                yield other.name, layer.name
                reachable |= {other.name} | reached[other.name]


def ties_by_code(flow: DataFlow, model: nn.Module, layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Tie layers whose parameters are read by code outside of them to the layers that this code surrounds.

    Code that surrounds all layers, or none, belongs to the last layer.
    """
    groups = {layer.name: layer.modules for layer in layers if layer.modules}
    items = {name: parameter.numel() for name, parameter in model.named_parameters()}
    shared: dict[tuple[str, str], int] = {}  # items by owner and reader
    for parameter, holders in holders_of(model, groups).items():
        for path in flow.readers[parameter]:
            if any(at(path, module) for holder in holders for module in groups[holder]):
                continue
            near = [
                name
                for name, modules in groups.items()
                if any(at(path, module) or at(module, path) for module in modules)
            ]
            readers = near if 0 < len(near) < len(groups) else [layers[-1].name]
            for pair in product(holders, readers):
                shared[pair] = shared.get(pair, 0) + items[parameter]
    return tuple(Tie(owner, reader, size) for (owner, reader), size in shared.items() if owner != reader)
