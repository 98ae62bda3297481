"""Stages whose tensors skip layers (branches, skip connections, decoders): exact search on chains, layouts settled.

The problem. The chain of ``frontier``, and edges (i, j), i + 1 < j: a tensor that layer i makes goes straight to layer
j, which takes x_ij(a, b) >= 0 in each pass, by their layouts a and b. Memory does not depend on edges. So where the
layout of one end of each edge is settled, what it takes is part of the other end's own time, and a chain is left.

The method. Branch and bound over layouts of single layers, best first. A node settles some; an edge between layers
that may both have several layouts takes the least of what the producer may make it, as part of its reader's time. The
chain that is left is solved exactly: its paths are no slower than any of the node, and a path that prices at what the
chain says is the node's best. Otherwise the layer whose edges were most underrated is settled, once for each of its
layouts. Where all layers that matter agree, as most do, the first chain is the answer; an encoder's output that every
decoder block reads takes one branching.

With several criteria the same holds for Pareto sets: a node whose paths all price at what its chain says, or are
beaten by ways known, is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.chain import Chain, ChainFront, Path
from galvatron_lite.search.chain_bounds import PriceHint
from galvatron_lite.search.chain_labels import good_path, pareto_paths
from galvatron_lite.search.pareto import pareto_rows

IntArray = NDArray[np.int64]
Pair = tuple[int, int]
Settled = Mapping[int, int]
_MOST = 400
"""Nodes that are looked into at the most, counted, so that results repeat."""


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """A stage."""

    chain: Chain  # its layers, with what goes from each to the next
    # by places of producer and reader, (groups, groups) picoseconds in one pass
    skips: Mapping[Pair, IntArray] = field(default_factory=dict)

    def groups(self, choices: Sequence[int]) -> list[int]:
        """The layout of each layer of a path."""
        return [int(layer.group[choice]) for layer, choice in zip(self.chain.layers, choices, strict=True)]

    def moved(self, choices: Sequence[int]) -> int:
        """Picoseconds of redistribution of a path in one pass."""
        own = self.groups(choices)
        steps = zip(self.chain.layers[1:], pairwise(own), strict=True)
        along = sum(int(layer.move[ends]) for layer, ends in steps)
        return along + sum(int(move[own[i], own[j]]) for (i, j), move in self.skips.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """A net as a chain, with the layouts of some layers settled."""

    chain: Chain  # the layers that are left; times hold what edges take at the least
    rows: list[IntArray]  # per layer, its choices among those of the net
    # by edge, which end has it in its time, and what each of that layer's layouts takes
    charged: dict[Pair, tuple[int, IntArray]]


def net_paths(net: Net, cap: int | None = None, beam: int | None = None, near: float = 0.0) -> ChainFront:
    """The Pareto set of a net within memory, as ``chain.pareto_paths`` has it of a chain."""
    return _Walk(net, cap, beam).run() if net.skips else pareto_paths(net.chain, cap, beam, near)


def good_way(net: Net, like: PriceHint | None = None) -> tuple[Path | None, float]:
    """A good path of one criterion, soon, and a weighted time that no path beats, as ``chain.good_path``."""
    relaxed = _relaxed(net, {})
    path, least = good_path(relaxed.chain, like=like)
    return (None if path is None else _priced(net, relaxed, path)[0]), least


@dataclass(slots=True, eq=False)
class _Walk:
    net: Net  # the problem
    cap: int | None  # on the weighted time
    beam: int | None  # labels of a layer
    best: list[Path] = field(default_factory=list)  # Pareto-best paths met
    work: int = 0  # labels looked at
    dropped: float = np.inf  # a weighted time that no path left out beats

    def run(self) -> ChainFront:
        """Looks into the nodes, the most promising first."""
        order, looked = count(1), 0
        heap: list[tuple[int, int, dict[int, int]]] = [(0, 0, {})]
        while heap:
            least, _, settled = heapq.heappop(heap)
            limit = self._limit()
            if limit is not None and least > limit:
                continue
            if looked >= _MOST:
                self.dropped = min(self.dropped, float(least))
                continue
            looked += 1
            for bound, child in self._look(settled, limit):
                heapq.heappush(heap, (bound, next(order), child))
        paths = sorted(self.best, key=lambda path: (path.time, path.choices))
        return ChainFront(tuple(paths), self.work, self.dropped)

    def _limit(self) -> int | None:
        if len(self.net.chain.weights) > 1 or not self.best:
            return self.cap
        return self.best[0].time[0] * int(self.net.chain.weights[0]) - 1

    def _look(self, settled: dict[int, int], limit: int | None) -> list[tuple[int, dict[int, int]]]:
        """Notes the paths of a node; what is to be looked into if those are not all."""
        relaxed = _relaxed(self.net, settled)
        front = pareto_paths(relaxed.chain, limit, self.beam)
        self.work += front.work
        self.dropped = min(self.dropped, front.dropped)
        priced = [_priced(self.net, relaxed, path) for path in front.paths]
        self._note([path for path, _ in priced])
        unsure = [
            (self._weighted(told), under)
            for told, (_, under) in zip(front.paths, priced, strict=True)
            if under and not self._beaten(told)
        ]
        if not unsure:
            return []
        least, under = min(unsure, key=lambda one: one[0])
        place = _most_underrated(under)
        groups = np.unique(self.net.chain.layers[place].group)
        return [(least, settled | {place: int(group)}) for group in groups]

    def _note(self, paths: Sequence[Path]) -> None:
        every = self.best + [path for path in paths if self.cap is None or self._weighted(path) <= self.cap]
        if every:
            rows = pareto_rows(np.array([path.time for path in every], dtype=np.int64))
            self.best = [every[row] for row in rows]

    def _beaten(self, path: Path) -> bool:
        return any(all(a <= b for a, b in zip(known.time, path.time, strict=True)) for known in self.best)

    def _weighted(self, path: Path) -> int:
        return sum(int(weight) * time for weight, time in zip(self.net.chain.weights, path.time, strict=True))


def _relaxed(net: Net, settled: Settled) -> _Relaxed:
    layers = net.chain.layers
    free = np.arange(0)
    rows = [
        np.flatnonzero(layer.group == settled[place]) if place in settled else free
        for place, layer in enumerate(layers)
    ]
    rows = [own if place in settled else np.arange(len(layers[place].group)) for place, own in enumerate(rows)]
    present = [np.unique(layer.group[own]) for layer, own in zip(layers, rows, strict=True)]
    charged = {pair: _charge(move, pair, present) for pair, move in net.skips.items()}
    extra: dict[int, IntArray] = {}
    for end, taken in charged.values():
        extra[end] = extra[end] + taken if end in extra else taken
    own = [
        layer if len(kept) == len(layer.group) else layer.only(kept) for layer, kept in zip(layers, rows, strict=True)
    ]
    for place, taken in extra.items():
        if taken.any():
            time = own[place].time + taken[own[place].group][:, None] * net.chain.moves
            own[place] = replace(own[place], time=time)
    return _Relaxed(replace(net.chain, layers=tuple(own)), rows, charged)


def _charge(move: IntArray, pair: Pair, present: Sequence[IntArray]) -> tuple[int, IntArray]:
    """Which end of an edge has what it takes in its time, and that by its layout: exact where the other is settled."""
    i, j = pair
    if len(present[j]) == 1:
        return i, move[:, int(present[j][0])]
    least: IntArray = move[present[i]].min(axis=0)
    return j, least


def _priced(net: Net, relaxed: _Relaxed, path: Path) -> tuple[Path, dict[Pair, int]]:
    """A path of a node as the net has it, and by how much edges were underrated."""
    choices = tuple(int(rows[choice]) for rows, choice in zip(relaxed.rows, path.choices, strict=True))
    own, under = net.groups(choices), {}
    for (i, j), move in net.skips.items():
        end, taken = relaxed.charged[i, j]
        missing = int(move[own[i], own[j]] - taken[own[end]])
        if missing:
            under[i, j] = missing
    more = sum(under.values())
    time = tuple(told + int(times) * more for told, times in zip(path.time, net.chain.moves, strict=True))
    return Path(time, choices), under


def _most_underrated(under: Mapping[Pair, int]) -> int:
    sums: dict[int, int] = {}
    for pair, missing in under.items():
        for place in pair:
            sums[place] = sums.get(place, 0) + missing
    return min(sums, key=lambda place: (-sums[place], place))
