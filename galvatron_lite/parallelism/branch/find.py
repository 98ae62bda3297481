"""Find branches of a model: independent sub-networks that can run at the same time, on separate devices.

No path connects layers of two branches of a region, and they share no parameters. Branches read inputs of the model or
outputs of layers before the region, and later layers may join them. Skips of a U-Net, residual connections and other
connected layers are never branches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.model.graph import Layer, ModelGraph, Passed, Role
from galvatron_lite.model.order import Order, bits, order_of


@dataclass(frozen=True, slots=True)
class Branch:
    """An independent sub-network."""

    name: str  # its first root
    layers: tuple[str, ...]  # names of its layers, in the order they run
    roots: tuple[str, ...]  # see ``roots_of``
    input_bytes: int  # bytes per sample that it reads of the model's inputs and of other layers
    output_bytes: int  # bytes per sample of its outputs that other layers read
    inside: tuple[BranchRegion, ...] = ()  # regions of branches inside it


@dataclass(frozen=True, slots=True)
class BranchRegion:
    """A region of a model that consists of branches."""

    branches: tuple[Branch, ...]  # two or more, by their first layer
    entry: tuple[str, ...]  # names of layers outside that its branches read; empty: only inputs of the model
    exit: tuple[str, ...]  # names of layers outside that read its branches; empty: the region ends the model

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of all its branches, branch by branch."""
        return tuple(layer for branch in self.branches for layer in branch.layers)


def find_regions(graph: ModelGraph) -> tuple[BranchRegion, ...]:
    """Return the regions of branches, in the order they run.

    The order of layers consists of consecutive groups, and a group of parts that no path connects (see ``order``); two
    or more such parts are branches. All layers count as readers of layers of role BEFORE, and as read by layers of role
    AFTER. Parts that share parameters are one branch; parts that share parameters with layers outside their group are
    no branches.
    """
    if not graph.tensors:
        return ()
    order = order_of(graph.to_networkx())
    bit = {name: 1 << place for place, name in enumerate(order.names)}
    ties = tuple(bit[tie.first] | bit[tie.second] for tie in graph.ties if tie.parameters)
    inner = sum(bit[layer.name] for layer in graph.layers if layer.role is Role.BLOCK)
    return tuple(_Finder(graph, order, ties).regions(inner))


@dataclass(frozen=True, slots=True)
class _Finder:
    graph: ModelGraph
    order: Order
    ties: tuple[int, ...]

    def regions(self, inside: int) -> Iterator[BranchRegion]:
        return (self._region(parts) for parts in self.order.regions(inside, self.ties))

    def _region(self, parts: Sequence[int]) -> BranchRegion:
        branches = tuple(self._branch(part) for part in parts)
        inside = {layer for branch in branches for layer in branch.layers}
        place = {layer.name: number for number, layer in enumerate(self.graph.layers)}
        batch = {layer.name for layer in self.graph.layers if layer.role is Role.BEFORE}
        read = (tensor for tensor in self.graph.tensors if not inside.isdisjoint(tensor.readers))
        entry = {tensor.producer for tensor in read if tensor.size or tensor.producer not in batch} - inside
        sent = (tensor.readers for tensor in self.graph.tensors if tensor.producer in inside)
        leaving = {reader for readers in sent for reader in readers} - inside
        return BranchRegion(branches, *(tuple(sorted(names, key=place.__getitem__)) for names in (entry, leaving)))

    def _branch(self, part: int) -> Branch:
        names = {self.order.names[place] for place in bits(part)}
        layers = tuple(layer.name for layer in self.graph.layers if layer.name in names)
        roots = roots_of(self.graph, names)
        inside = tuple(self.regions(part))
        return Branch((*roots, *layers)[0], layers, roots, *_traffic(self.graph, names), inside)


def _traffic(graph: ModelGraph, members: Collection[str]) -> tuple[int, int]:
    """Bytes per sample that enter and leave a set of layers.

    A layer that reads no other layer reads inputs of the model. Several layers may read the same: the largest counts.
    """
    readers = {reader for tensor in graph.tensors if tensor.size for reader in tensor.readers}
    entering = [
        graph.kind_of(layer).input_bytes
        for layer in graph.layers
        if layer.name in members and layer.name not in readers
    ]
    read = (
        t.size for t in graph.tensors if t.producer not in members and any(reader in members for reader in t.readers)
    )
    sent = (
        t.size for t in graph.tensors if t.producer in members and any(reader not in members for reader in t.readers)
    )
    return max(entering, default=0) + sum(read), sum(sent)


def roots_of(graph: ModelGraph, layers: Collection[str]) -> tuple[str, ...]:
    """Return the fewest module paths that contain the modules of some layers and of no others, in the order they run.

    In a graph without modules, layers count as modules of their names.
    """
    has_modules = any(layer.modules for layer in graph.layers)
    paths = {
        layer.name: layer.modules if has_modules or layer.role is not Role.BLOCK else (layer.name,)
        for layer in graph.layers
    }
    others = {
        above
        for name, layer_paths in paths.items()
        if name not in layers
        for path in layer_paths
        for above in _up(path)
    }
    inner = [path for name, layer_paths in paths.items() if name in layers for path in layer_paths]
    return tuple(dict.fromkeys(_highest(path, others) for path in inner))


def _up(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it without the model, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _highest(path: str, others: Collection[str]) -> str:
    """The outermost module around a path without modules of other layers."""
    free: Iterable[str] = (above for above in _up(path) if above not in others)
    return min(free, key=len, default=path)


def part_of(graph: ModelGraph, layers: Collection[str]) -> ModelGraph:
    """Return the subgraph of some layers.

    If no layer reads another, an empty tensor between the first and the last marks that they are no chain.
    """
    inside = tuple(layer for layer in graph.layers if layer.name in layers)
    tensors = tuple(
        replace(tensor, readers=readers)
        for tensor in graph.tensors
        if tensor.producer in layers and (readers := tuple(name for name in tensor.readers if name in layers))
    )
    if not tensors and len(inside) > 1 and graph.tensors:
        tensors = (Passed(inside[0].name, (inside[-1].name,), 0),)
    ties = tuple(tie for tie in graph.ties if {tie.first, tie.second} <= set(layers))
    kinds = {layer.kind: graph.kinds[layer.kind] for layer in inside}
    return replace(graph, layers=inside, kinds=kinds, tensors=tensors, ties=ties)


def trunk_of(graph: ModelGraph, placed: Sequence[Branch]) -> tuple[Layer, ...]:
    """Return the layers outside these branches."""
    inside = {layer for branch in placed for layer in branch.layers}
    return tuple(layer for layer in graph.layers if layer.name not in inside)
