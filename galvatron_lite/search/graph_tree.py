"""Choices on any graph over a tree decomposition, with one sum of memory: labels (time, memory).

Layers are eliminated one by one in the order of a decomposition that networkx finds by least fill-in
(``treewidth_min_fill_in``; Bodlaender and Koster 2010, "Treewidth computations I"). Eliminating a layer joins all that
depends on its choice and keeps, for every combination of groups of the layers left in its bag, the Pareto set of
(time, memory). So time and labels grow with the groups to the power of the width, not of the layers: a U-Net of any
depth has width 3 at the most, where running order would have all its skips open at once.

Memory is sum_l y_l with y = rest + prefix: the devices hold that at the end of forward, so that what is found is no
slower than any choice that fits (``cost.memory``), and is the answer where it fits itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.graphs import Chosen, Net
from galvatron_lite.search.pareto import pareto_rows

IntArray = NDArray[np.int64]
Groups = tuple[int, ...]
_ALL, _EITHER = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """Pareto-best ways: (n, 2) time and memory, and for each what it is made of: choice of a layer, or earlier ways.

    Attributes:
        figures: (n, 2).
        origin: (n, ...): see ``layer``.
        parts: the fronts that it comes from.
        layer: whose choices ``origin`` holds; ``_ALL``: a row in each part; ``_EITHER``: which part, and its row.
    """

    figures: IntArray
    origin: IntArray
    parts: tuple[_Front, ...] = ()
    layer: int = _ALL

    def choices(self, row: int) -> dict[int, int]:
        """The choice of every layer that a way covers."""
        if self.layer >= 0:
            return {self.layer: int(self.origin[row, 0])}
        if self.layer == _EITHER:
            return self.parts[int(self.origin[row, 0])].choices(int(self.origin[row, 1]))
        found: dict[int, int] = {}
        for part, own in zip(self.parts, self.origin[row], strict=True):
            found |= part.choices(int(own))
        return found


@dataclass(frozen=True, slots=True)
class _Factor:
    """What depends on the groups of some layers: a front for every combination of them."""

    scope: tuple[int, ...]
    fronts: Mapping[Groups, _Front]


def best_by_tree(net: Net) -> Chosen | None:
    """The quickest choice whose sum of memory (rest and prefix of all layers) is within the room; None without one."""
    factors = [_own(net, place) for place in range(len(net.nodes))]
    factors += [_edge(pair, cost) for pair, cost in net.edges.items()]
    for place in elimination_order(net):
        near = [factor for factor in factors if place in factor.scope]
        factors = [factor for factor in factors if place not in factor.scope]
        factors.append(_eliminated(net, place, near))
    whole = _joined([factor.fronts.get(()) for factor in factors], net.room)
    if whole is None:
        return None
    row = int(np.argmin(whole.figures[:, 0]))
    found = whole.choices(row)
    return Chosen(int(whole.figures[row, 0]), tuple(found[place] for place in range(len(net.nodes))))


def elimination_order(net: Net) -> list[int]:
    """Layers in an order that keeps bags small: leaves of the decomposition's tree first, then what is left."""
    import networkx
    from networkx.algorithms.approximation import treewidth_min_fill_in

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_nodes_from(range(len(net.nodes)))
    graph.add_edges_from(net.edges)
    tree = treewidth_min_fill_in(graph)[1]
    order: list[int] = []
    for part in sorted(sorted(map(sorted, part)) for part in networkx.connected_components(tree)):
        root = frozenset(part[0])
        parents = dict(networkx.dfs_predecessors(tree, root))
        for bag in networkx.dfs_postorder_nodes(tree, root):
            order += sorted(bag - parents.get(bag, frozenset()))
    return order


def _own(net: Net, place: int) -> _Factor:
    """The layer's own choices, by their group."""
    node = net.nodes[place]
    figures = np.column_stack((node.time, node.memory[:, 0] + node.memory[:, 1]))
    fronts: dict[Groups, _Front] = {}
    for group in np.unique(node.group).tolist():
        rows = np.flatnonzero((node.group == group) & (figures[:, 1] <= net.room))
        kept = rows[pareto_rows(figures[rows])]
        if len(kept):
            fronts[(group,)] = _Front(figures[kept], kept[:, None], layer=place)
    return _Factor((place,), fronts)


def _edge(pair: tuple[int, int], cost: IntArray) -> _Factor:
    """What going from one layer to another takes."""
    groups = product(range(cost.shape[0]), range(cost.shape[1]))
    return _Factor(
        pair, {(a, b): _Front(np.array([[int(cost[a, b]), 0]]), np.zeros((1, 0), dtype=np.int64)) for a, b in groups}
    )


def _eliminated(net: Net, place: int, near: Sequence[_Factor]) -> _Factor:
    """All that depends on one layer, joined, for every combination of groups of the other layers it depends on."""
    scope = tuple(sorted({other for factor in near for other in factor.scope} - {place}))
    fronts = {}
    for groups in product(*(range(net.nodes[other].groups) for other in scope)):
        known = dict(zip(scope, groups, strict=True))
        options = [_joined(_at(near, known | {place: own}), net.room) for own in range(net.nodes[place].groups)]
        best = _best_of([option for option in options if option is not None])
        if best is not None:
            fronts[groups] = best
    return _Factor(scope, fronts)


def _at(near: Sequence[_Factor], known: Mapping[int, int]) -> list[_Front | None]:
    return [factor.fronts.get(tuple(known[other] for other in factor.scope)) for factor in near]


def _joined(parts: Sequence[_Front | None], room: int) -> _Front | None:
    """Every way of each part together, those that fit and are not beaten; None where there is none."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    figures, origin = np.zeros((1, 2), dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
    for part in found:
        left = np.repeat(np.arange(len(figures)), len(part.figures))
        right = np.tile(np.arange(len(part.figures)), len(figures))
        figures = figures[left] + part.figures[right]
        origin = np.column_stack((origin[left], right))
        rows = np.flatnonzero(figures[:, 1] <= room)
        rows = rows[pareto_rows(figures[rows])]
        figures, origin = figures[rows], origin[rows]
    return _Front(figures, origin, tuple(found)) if len(figures) else None


def _best_of(options: Sequence[_Front]) -> _Front | None:
    """The Pareto set of several fronts together."""
    if not options:
        return None
    which = np.concatenate([np.full(len(option.figures), place) for place, option in enumerate(options)])
    rows = np.concatenate([np.arange(len(option.figures)) for option in options])
    figures = np.concatenate([option.figures for option in options])
    kept = pareto_rows(figures)
    return _Front(figures[kept], np.column_stack((which[kept], rows[kept])), tuple(options), _EITHER)
