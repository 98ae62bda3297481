"""Independent sub-networks of a model: branches that could run at the same time, each on devices of its own.

Between layers of two branches of a region there is no path, and they share no parameters. Branches read the model's
inputs or what layers before the region made, and may be joined behind it. A U-Net's skips, residual connections and
everything else that a path connects are never branches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.model.graph import Layer, ModelGraph, Passed, Role
from galvatron_lite.model.order import Order, bits, order_of


@dataclass(frozen=True, slots=True)
class Branch:
    """An independent sub-network."""

    name: str  # the first of its roots
    layers: tuple[str, ...]  # names of its layers, in the order they run
    # the fewest module paths that hold its layers' modules and no other layer's, in the order they run
    roots: tuple[str, ...]
    input_bytes: int  # bytes per sample that it reads of the model's inputs and of other layers
    output_bytes: int  # bytes per sample that it makes and other layers read
    inside: tuple[BranchRegion, ...] = ()  # regions inside it, whose branches are parts of this one


@dataclass(frozen=True, slots=True)
class BranchRegion:
    """Where a model falls into branches."""

    branches: tuple[Branch, ...]  # two or more, by their first layer
    # names of layers outside it that its branches read; empty where they read the model's inputs alone
    entry: tuple[str, ...]
    exit: tuple[str, ...]  # names of layers outside it that read its branches; empty where they end the model

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of all its branches, branch by branch."""
        return tuple(layer for branch in self.branches for layer in branch.layers)


def find_regions(graph: ModelGraph) -> tuple[BranchRegion, ...]:
    """Where a model falls into branches, in the order they run; empty where it does not.

    The layers' order falls into groups, one after the other, and a group into parts that no path connects (see
    ``order``); two or more such parts are branches. A layer of role BEFORE counts as read by, and one of role AFTER as
    reading, every layer. Parts that share parameters are one branch; those that share some with layers outside their
    group are none.
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
        entry = {one.producer for one in read if one.size or one.producer not in batch} - inside
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

    A layer that reads nothing others made reads the model's inputs, which several such may share: the largest counts.
    """
    heard = {reader for tensor in graph.tensors if tensor.size for reader in tensor.readers}
    entering = [
        graph.kind_of(layer).input_bytes for layer in graph.layers if layer.name in members and layer.name not in heard
    ]
    read = (
        t.size for t in graph.tensors if t.producer not in members and any(reader in members for reader in t.readers)
    )
    sent = (
        t.size for t in graph.tensors if t.producer in members and any(reader not in members for reader in t.readers)
    )
    return max(entering, default=0) + sum(read), sum(sent)


def roots_of(graph: ModelGraph, layers: Collection[str]) -> tuple[str, ...]:
    """The fewest module paths that hold the modules of some layers and of no other, in the order they run.

    Where no layer of the graph tells its modules, layers count as modules of their names.
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
    held = [path for name, layer_paths in paths.items() if name in layers for path in layer_paths]
    return tuple(dict.fromkeys(_highest(path, others) for path in held))


def _up(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, the innermost first; the model's own is left out."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _highest(path: str, others: Collection[str]) -> str:
    """The outermost module around a path that holds no other layer's modules."""
    free: Iterable[str] = (above for above in _up(path) if above not in others)
    return min(free, key=len, default=path)


def part_of(graph: ModelGraph, layers: Collection[str]) -> ModelGraph:
    """Some layers of a graph, with what goes between them and what they share.

    Layers that read nothing of each other stay apart: an empty tensor between them says that they are no chain.
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
    """The layers outside the branches that are placed."""
    apart = {layer for branch in placed for layer in branch.layers}
    return tuple(layer for layer in graph.layers if layer.name not in apart)
