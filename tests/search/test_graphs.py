"""Stages whose tensors skip layers: branch and bound, brute force, and a label programme agree."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from galvatron_lite.cost.memory import MemoryTerms, worst_moment
from galvatron_lite.search.chain import Chain, ChainLayer, Path
from galvatron_lite.search.chain_labels import Net as GraphNet
from galvatron_lite.search.chain_labels import good_way, net_paths, pareto_paths
from galvatron_lite.search.tables import pareto_rows

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


def random_node(draw: random.Random) -> Node:
    count = draw.randint(1, 3)
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


def random_net(edges: list[tuple[int, int]], draw: random.Random, layers: int = 6) -> Net:
    nodes = tuple(random_node(draw) for _ in range(layers))
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
        found, oracle = net_paths(as_stage(net)), best_in_order(net)
        assert found.complete
        assert (oracle.time if oracle else None) == best
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
def test_longer_ones_equal_a_label_programme(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed} long")
    whole = random_net(LONG[name](10), draw, 10)
    free = best_in_order(whole)
    tight = Net(whole.nodes, whole.edges, peak(whole, free.choices) * 9 // 10)
    for net in (whole, tight):
        oracle, found = best_in_order(net), net_paths(as_stage(net))
        assert found.complete
        assert [path.time[0] for path in found.paths] == ([] if oracle is None else [oracle.time])


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_out_is_bounded(seed: int) -> None:
    net = random_net(LONG["cells"](8), random.Random(seed), 8)
    best, (quick, least) = net_paths(as_stage(net)).paths[0].time[0], good_way(as_stage(net))
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """One choice a layer.

    Attributes:
        time: picoseconds.
        choices: place of the choice in each layer.
    """

    time: int
    choices: tuple[int, ...]


def time_of(net: Net, choices: Sequence[int]) -> int:
    """Picoseconds of a choice."""
    own = sum(int(node.time[choice]) for node, choice in zip(net.nodes, choices, strict=True))
    groups = [int(node.group[choice]) for node, choice in zip(net.nodes, choices, strict=True)]
    return own + sum(int(cost[groups[i], groups[j]]) for (i, j), cost in net.edges.items())


@dataclass(slots=True, eq=False)
class _Labels:
    """Prefixes of choices: figures as in ``frontier``, one row each.

    Attributes:
        figures: (n, 5) time, worst moment, moment that waits for the next layer, start of later moments, updated.
        state: (n,) choice of the last layer.
        open: (n, open layers) groups of the layers that later ones read.
        parent: (n,) row in the labels of the layer before.
    """

    figures: IntArray
    state: IntArray
    open: IntArray
    parent: IntArray

    def take(self, rows: IntArray) -> _Labels:
        """Some of the labels."""
        return _Labels(self.figures[rows], self.state[rows], self.open[rows], self.parent[rows])


def best_in_order(net: Net) -> Chosen | None:
    """The quickest choice that fits, by dynamic programming in running order; None where nothing fits."""
    opens = _opens(net)
    labels = _Labels(
        np.zeros((1, 5), dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros((1, 0), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )  # fmt: skip
    history: list[_Labels] = []
    for place in range(len(net.nodes)):
        before = opens[place - 1] if place else []
        labels = _kept(net, place, _extended(net, place, labels, before), [*before, place], opens[place])
        history.append(labels)
    if not len(labels.state):
        return None
    row = int(np.argmin(labels.figures[:, 0]))
    best = int(labels.figures[row, 0])
    return Chosen(best, _traced(history, row))


def _opens(net: Net) -> list[list[int]]:
    """Per layer, the layers up to it that later ones read."""
    last = {i: max(b for a, b in net.edges if a == i) for i, _ in net.edges}
    return [[i for i in range(place + 1) if last.get(i, 0) > place] for place in range(len(net.nodes))]


def _extended(net: Net, place: int, labels: _Labels, before: Sequence[int]) -> _Labels:
    """Every label with every choice of one more layer, whose group joins the open ones."""
    node, count = net.nodes[place], len(labels.state)
    state, parent = np.repeat(np.arange(len(node.time)), count), np.tile(np.arange(count), len(node.time))
    time, worst, waiting, start, updated = labels.figures[parent].T
    rest, prefix, peak, middle, _, pending, later = node.memory[state].T
    beside = net.nodes[place - 1].memory[labels.state, 4][parent] if place else np.zeros(len(parent), dtype=np.int64)
    group, opened = node.group[state], labels.open[parent]
    moved = sum(net.edges[i, place][opened[:, at], group] for at, i in enumerate(before) if (i, place) in net.edges)
    own = start + middle + beside
    worst = np.maximum.reduce((worst, waiting + pending if place else own, start + peak + beside, own))
    figures = (time + node.time[state] + moved, worst + rest, own + rest, start + rest + prefix, updated + later)
    return _Labels(np.column_stack(figures), state, np.column_stack((opened, group)), parent)


def _kept(net: Net, place: int, labels: _Labels, known: Sequence[int], opens: Sequence[int]) -> _Labels:
    """Without labels that do not fit or are no better than another one of the same open groups."""
    least = sum(int(node.memory[:, 0].min()) for node in net.nodes[place + 1 :])
    fits = (labels.figures[:, 1] + least <= net.room) & (labels.figures[:, 4] <= net.room)
    labels = labels.take(np.flatnonzero(fits))
    labels.open = labels.open[:, [at for at, i in enumerate(known) if i in opens]]
    if not len(labels.state):
        return labels
    keys = np.column_stack((labels.figures, net.nodes[place].memory[labels.state, 4]))
    _, alike = np.unique(labels.open, axis=0, return_inverse=True)
    order = np.argsort(alike.ravel(), kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(alike.ravel()[order])) + 1)
    return labels.take(np.concatenate([group[pareto_rows(keys[group])] for group in groups]))


def _traced(history: Sequence[_Labels], row: int) -> tuple[int, ...]:
    choices = []
    for labels in reversed(history):
        choices.append(int(labels.state[row]))
        row = int(labels.parent[row])
    return tuple(reversed(choices))
