"""An oracle for stages whose tensors skip layers: another method than the search's, exact, slower.

The problem. Layers l = 1..L in running order, choices s_l; an edge (i, j), i < j, costs x_ij(s_i, s_j) >= 0, which
depends on the choices' groups (layouts) only; memory as in ``cost.memory``, for all layers on the same devices:

    minimise   sum_l t_l(s_l) + sum_edges x_ij(s_i, s_j)
    subject to constraints (2) and (3) of ``frontier``

The method. Dynamic programming in running order. A label knows the groups of the layers that later layers still read
(open layers), and the memory moments of a prefix. Its states grow with the groups to the power of the open layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.tables import pareto_rows

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
