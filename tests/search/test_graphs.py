"""Stages whose tensors skip layers: branch and bound finds what brute force finds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from galvatron_lite.cost.memory import MemoryTerms, worst_moment
from galvatron_lite.search.chain.chain import Chain, ChainLayer, Path
from galvatron_lite.search.chain.labels import pareto_paths
from galvatron_lite.search.chain.net import Net as GraphNet
from galvatron_lite.search.chain.net import good_net_path, net_paths

CHAIN = [(i, i + 1) for i in range(5)]
GRAPHS = {
    "chain": CHAIN,
    "skip": [*CHAIN, (0, 3), (1, 5)],
    "diamond": [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 5)],
    "encoder-decoder": [(0, 1), (1, 2), (2, 3), (2, 4), (2, 5), (3, 4), (4, 5)],
    "u-net": [*CHAIN, (0, 5), (1, 4)],
    "two parts": [(0, 1), (1, 2), (3, 4), (4, 5)],
    "two cells": [*CHAIN, (0, 2), (1, 3), (2, 4), (3, 5)],
    "every pair": [(i, j) for j in range(6) for i in range(j)],
}


def random_node(draw: random.Random, most: int) -> Node:
    count = draw.randint(1, most)
    rest, prefix, gather, kept = ([draw.randint(0, 40) for _ in range(count)] for _ in range(4))
    columns = [
        (r, q, q + k, k + q // 2, g, draw.randint(0, q + k), r + draw.randint(0, 30))
        for r, q, g, k in zip(rest, prefix, gather, kept, strict=True)
    ]
    groups = [draw.randint(0, 2) for _ in range(count)]
    names = sorted(set(groups))
    return Node(
        np.array([draw.randint(1, 100) for _ in range(count)]),
        np.array(columns),
        np.array([names.index(group) for group in groups]),
    )


def random_net(edges: list[tuple[int, int]], draw: random.Random, layers: int = 6, most: int = 3) -> Net:
    nodes = tuple(random_node(draw, most) for _ in range(layers))
    costs = {
        (i, j): np.array([[draw.randint(0, 60) for _ in range(nodes[j].groups)] for _ in range(nodes[i].groups)])
        for i, j in edges
    }
    return Net(nodes, costs, 10**6)


def as_stage(net: Net, later: list[np.ndarray] | None = None) -> GraphNet:
    """The same as the search takes it; ``later``: a second criterion of each layer, in which moves do not count."""
    layers = []
    for place, node in enumerate(net.nodes):
        shape = (net.nodes[max(place - 1, 0)].groups, node.groups)
        time = node.time[:, None] if later is None else np.column_stack((node.time, later[place]))
        move = net.edges.get((place - 1, place), np.zeros(shape, dtype=np.int64))
        layers.append(ChainLayer(time, *node.memory.T, move, node.group))
    ones = np.ones(1 if later is None else 2, dtype=np.int64)
    chain = Chain(tuple(layers), ones * np.array([1, 0][: len(ones)]), ones, net.room)
    return GraphNet(chain, {(i, j): cost for (i, j), cost in net.edges.items() if j > i + 1})


def peak(net: Net, choices: tuple[int, ...]) -> int:
    """By the evaluator's own memory model."""
    return worst_moment(
        [MemoryTerms(*node.memory[c].tolist()) for node, c in zip(net.nodes, choices, strict=True)]
    ).size


def every(net: Net) -> list[tuple[int, ...]]:
    return list(product(*(range(len(node.time)) for node in net.nodes)))


def rooms(peaks: list[int], draw: random.Random) -> list[int]:
    ordered = sorted(set(peaks))
    return sorted({ordered[0] - 1, ordered[0], draw.choice(ordered), ordered[-1]})


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    whole = random_net(GRAPHS[name], draw)
    plans = [(peak(whole, one), time_of(whole, one)) for one in every(whole)]
    for room in rooms([size for size, _ in plans], draw):
        net = Net(whole.nodes, whole.edges, room)
        best = min((time for size, time in plans if size <= room), default=None)
        found = net_paths(as_stage(net))
        assert found.complete
        assert [path.time for path in found.paths] == ([] if best is None else [(best,)])
        if best is not None:
            choices = found.paths[0].choices
            assert time_of(net, choices) == best
            assert peak(net, choices) <= room
            assert not net_paths(as_stage(net), cap=best - 1).paths
            assert net_paths(as_stage(net), cap=best).paths[0].time == (best,)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("seed", range(2))
def test_two_criteria_equal_brute_force(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed} both")
    whole = random_net(GRAPHS[name], draw)
    later = [np.array([draw.randint(0, 50) for _ in node.time]) for node in whole.nodes]
    plans = []
    for one in every(whole):
        step = sum(int(own[choice]) for own, choice in zip(later, one, strict=True))
        plans.append((peak(whole, one), (time_of(whole, one), step)))
    for room in rooms([size for size, _ in plans], draw)[1:]:
        net = Net(whole.nodes, whole.edges, room)
        fitting = sorted({times for size, times in plans if size <= room})
        front = [a for a in fitting if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in fitting)]
        found = net_paths(as_stage(net, later))
        assert found.complete
        assert [path.time for path in found.paths] == front
        cap = sum(front[len(front) // 2])
        kept = [path.time for path in net_paths(as_stage(net, later), cap).paths]
        assert kept == [times for times in front if sum(times) <= cap]


LONG = {
    "u-net": lambda n: [*pairwise(range(n)), *((i, n - 1 - i) for i in range(n // 2 - 1))],
    "cells": lambda n: [*pairwise(range(n)), *((i, i + 2) for i in range(n - 2))],
    "encoder-decoder": lambda n: [*pairwise(range(n)), *((n // 2, i) for i in range(n // 2 + 2, n))],
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("seed", range(3))
def test_longer_ones_equal_brute_force(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed} long")
    whole = random_net(LONG[name](10), draw, 10, most=2)
    plans = [(peak(whole, one), time_of(whole, one)) for one in every(whole)]
    for room in rooms([size for size, _ in plans], draw)[1:]:
        found = net_paths(as_stage(Net(whole.nodes, whole.edges, room)))
        assert found.complete
        assert [path.time for path in found.paths] == [(min(time for size, time in plans if size <= room),)]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_out_is_bounded(seed: int) -> None:
    net = random_net(LONG["cells"](8), random.Random(seed), 8)
    best, (quick, least) = net_paths(as_stage(net)).paths[0].time[0], good_net_path(as_stage(net))
    assert quick.time[0] == time_of(net, quick.choices) >= best >= least


def test_without_skips_it_is_the_chain() -> None:
    net = random_net(CHAIN, random.Random(1))
    stage = as_stage(net)
    assert stage.skips == {}
    assert net_paths(stage) == pareto_paths(stage.chain)


def test_moves_are_counted_once_each_pass() -> None:
    net = random_net(GRAPHS["skip"], random.Random(2))
    stage = as_stage(replace(net))
    for choices in every(net)[:50]:
        own = sum(int(node.time[c]) for node, c in zip(net.nodes, choices, strict=True))
        assert Path((own + stage.moved(choices),), choices).time[0] == time_of(net, choices)


IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One layer: figures of each of its S choices.

    Attributes:
        time: (S,) picoseconds.
        memory: (S, 7) bytes, columns as ``cost.memory.MemoryTerms``.
        group: (S,): the choice's group (layout), 0, 1, ...
    """

    time: IntArray
    memory: IntArray
    group: IntArray

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.group.max()) + 1 if len(self.group) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """Layers and what goes between them.

    Attributes:
        nodes: in running order.
        edges: (i, j), i < j: (groups of i, groups of j) picoseconds.
        room: bytes.
    """

    nodes: tuple[Node, ...]
    edges: Mapping[tuple[int, int], IntArray]
    room: int


def time_of(net: Net, choices: Sequence[int]) -> int:
    """Picoseconds of a choice."""
    own = sum(int(node.time[choice]) for node, choice in zip(net.nodes, choices, strict=True))
    groups = [int(node.group[choice]) for node, choice in zip(net.nodes, choices, strict=True)]
    return own + sum(int(cost[groups[i], groups[j]]) for (i, j), cost in net.edges.items())
