"""Stages whose tensors skip layers: chains with edges between layers that are not neighbours.

An edge (i, j), i + 1 < j, is what layer i makes and layer j reads: it takes x_ij(a, b) >= 0 in each pass, by their
layouts a and b. Where the layout of one end of each edge is settled, what the edge takes is part of the other end's
time, and a chain is left.

Branch and bound over layouts of single layers, best first. A node settles some; an edge between layers that may both
have several layouts takes the least of what the producer may make it, as part of its reader's time. The chain that is
left is solved exactly: its paths are no slower than any of the node, and a path that prices at what the chain says is
the node's best. Otherwise the layer whose edges were most underrated is settled, once for each of its layouts. Where
all layers that matter agree, as most do, the first chain is the answer; an encoder's output that every decoder block
reads takes one branching. With several criteria the same holds for Pareto sets: a node is done once its paths all
price at what its chain says, or are dominated by paths already met.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np

from galvatron_lite.arrays import IntArray
from galvatron_lite.search.chain.chain import Chain, ChainFront, Path
from galvatron_lite.search.chain.labels import good_path, pareto_paths
from galvatron_lite.search.chain.pareto import pareto_rows

Edge = tuple[int, int]
_MOST_NODES = 400
"""Nodes that are solved at the most; counted, not timed, so that results repeat."""


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """The layers of a stage, with what goes between them."""

    chain: Chain  # the layers, with what goes from each to the next
    # by producer and reader: (groups, groups) picoseconds in one pass
    skips: Mapping[Edge, IntArray] = field(default_factory=dict)

    def groups(self, choices: Sequence[int]) -> list[int]:
        """The layout of each layer of a path."""
        return [int(layer.group[choice]) for layer, choice in zip(self.chain.layers, choices, strict=True)]

    def moved(self, choices: Sequence[int]) -> int:
        """Picoseconds of redistribution of a path in one pass."""
        groups = self.groups(choices)
        steps = zip(self.chain.layers[1:], pairwise(groups), strict=True)
        along = sum(int(layer.move[ends]) for layer, ends in steps)
        return along + sum(int(move[groups[i], groups[j]]) for (i, j), move in self.skips.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """A net as a chain, with the layouts of some layers settled."""

    chain: Chain  # the choices that are left; times include what edges take at the least
    rows: list[IntArray]  # by layer: its choices among those of the net
    # by edge: the end that has it in its time, and what it takes by that layer's layout
    charged: dict[Edge, tuple[int, IntArray]]


def net_paths(net: Net, cap: float = np.inf, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a net within memory; arguments as of ``pareto_paths``."""
    if not net.skips:
        return pareto_paths(net.chain, cap, beam, near)

    def weighted(path: Path) -> int:
        return sum(int(weight) * time for weight, time in zip(net.chain.weights, path.time, strict=True))

    def dominated(path: Path) -> bool:
        return any(all(a <= b for a, b in zip(other.time, path.time, strict=True)) for other in best)

    best, work, dropped, solved, order = list[Path](), 0, np.inf, 0, count()
    heap = [(0, next(order), dict[int, int]())]
    while heap:
        least, _, settled = heapq.heappop(heap)
        limit = weighted(best[0]) - 1 if best and len(net.chain.weights) == 1 else cap
        if least > limit:
            continue
        if solved >= _MOST_NODES:
            dropped = min(dropped, float(least))
            continue
        solved += 1
        relaxed = _relaxed(net, settled)
        front = pareto_paths(relaxed.chain, limit, beam)
        work, dropped = work + front.work, min(dropped, front.dropped)
        priced = [_priced(net, relaxed, path) for path in front.paths]
        best += [path for path, _ in priced if weighted(path) <= cap]
        best = [best[row] for row in pareto_rows(np.array([path.time for path in best], dtype=np.int64))]
        pairs = zip(front.paths, priced, strict=True)
        unsure = [(weighted(path), missing) for path, (_, missing) in pairs if missing and not dominated(path)]
        if unsure:
            least, missing = min(unsure, key=lambda pair: pair[0])
            place = _most_underrated(missing)
            for group in np.unique(net.chain.layers[place].group):
                heapq.heappush(heap, (least, next(order), settled | {place: int(group)}))
    return ChainFront(tuple(sorted(best, key=lambda path: (path.time, path.choices))), work, dropped)


def good_net_path(net: Net) -> tuple[Path | None, float]:
    """A good path of one criterion, quickly, and a weighted time that no path beats; as ``good_path``."""
    if not net.skips:
        return good_path(net.chain)
    relaxed = _relaxed(net, {})
    path, least = good_path(relaxed.chain)
    return (None if path is None else _priced(net, relaxed, path)[0]), least


def _relaxed(net: Net, settled: Mapping[int, int]) -> _Relaxed:
    """The chain of a node; ``settled``: the layout of some layers."""
    layers = list(net.chain.layers)
    rows = [
        np.flatnonzero(layer.group == settled[place]) if place in settled else np.arange(len(layer.group))
        for place, layer in enumerate(layers)
    ]
    present = [np.unique(layer.group[row]) for layer, row in zip(layers, rows, strict=True)]
    charged = {edge: _charge(move, edge, present) for edge, move in net.skips.items()}
    for place in settled:
        layers[place] = layers[place].only(rows[place])
    for place, taken in charged.values():
        if taken.any():
            time = layers[place].time + taken[layers[place].group][:, None] * net.chain.moves
            layers[place] = replace(layers[place], time=time)
    return _Relaxed(replace(net.chain, layers=tuple(layers)), rows, charged)


def _charge(move: IntArray, edge: Edge, present: Sequence[IntArray]) -> tuple[int, IntArray]:
    """The end of an edge that has it in its time, and what it takes by layout: exact where the other is settled."""
    i, j = edge
    if len(present[j]) == 1:
        return i, move[:, int(present[j][0])]
    least: IntArray = move[present[i]].min(axis=0)
    return j, least


def _priced(net: Net, relaxed: _Relaxed, path: Path) -> tuple[Path, dict[Edge, int]]:
    """A path of a node as a path of the net, and by how much its edges were underrated."""
    choices = tuple(int(rows[choice]) for rows, choice in zip(relaxed.rows, path.choices, strict=True))
    groups, missing = net.groups(choices), dict[Edge, int]()
    for (i, j), move in net.skips.items():
        end, taken = relaxed.charged[i, j]
        more = int(move[groups[i], groups[j]] - taken[groups[end]])
        if more:
            missing[i, j] = more
    total = sum(missing.values())
    time = tuple(ticks + int(times) * total for ticks, times in zip(path.time, net.chain.moves, strict=True))
    return Path(time, choices), missing


def _most_underrated(missing: Mapping[Edge, int]) -> int:
    sums = Counter[int]()
    for edge, more in missing.items():
        sums.update(dict.fromkeys(edge, more))
    return min(sums, key=lambda place: (-sums[place], place))
