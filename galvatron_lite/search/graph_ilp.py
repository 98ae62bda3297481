"""Choices on any graph as an integer programme: x[l, s] in {0, 1} a choice, f[i, j, a, b] >= 0 groups of an edge."""

from __future__ import annotations

import numpy as np

from galvatron_lite.search.graphs import Chosen, Net, time_of
from galvatron_lite.search.pulp_adapter import Programme, Verdict, solve

_SCALE = 1e4
Terms = dict[int, float]


def solve_net(net: Net, seconds: float = 60.0) -> tuple[Verdict, Chosen | None]:
    """The quickest choice that fits by a solver, and how sure it is; see ``graphs``."""
    programme = Programme()
    own = [[programme.variable(binary=True) for _ in node.time] for node in net.nodes]
    unit = max(float(sum(int(node.time.max()) for node in net.nodes if len(node.time))) / _SCALE, 1.0)
    for node, numbers in zip(net.nodes, own, strict=True):
        programme.equal.append((dict.fromkeys(numbers, 1.0), 1.0))
        programme.objective.update(
            {number: float(time) / unit for number, time in zip(numbers, node.time, strict=True)}
        )
    for i, j in net.edges:
        _add_edge(programme, net, own, (i, j), unit)
    _add_memory(programme, net, own)
    answer = solve(programme, seconds)
    if not answer.values:
        return answer.verdict, None
    choices = tuple(max(range(len(numbers)), key=lambda row: answer.values[numbers[row]]) for numbers in own)
    return answer.verdict, Chosen(time_of(net, choices), choices)


def _add_edge(programme: Programme, net: Net, own: list[list[int]], pair: tuple[int, int], unit: float) -> None:
    """The flow between the groups of two layers, and what it costs."""
    cost = net.edges[pair]
    flow = {ends: programme.variable(binary=False) for ends in np.ndindex(*cost.shape)}
    programme.objective.update({number: float(cost[ends]) / unit for ends, number in flow.items()})
    for side, place in enumerate(pair):
        for group in range(cost.shape[side]):
            through = {number: 1.0 for ends, number in flow.items() if ends[side] == group}
            held = {n: -1.0 for n, of in zip(own[place], net.nodes[place].group, strict=True) if of == group}
            programme.equal.append((through | held, 0.0))


def _add_memory(programme: Programme, net: Net, own: list[list[int]]) -> None:
    """Every moment within the room."""

    def column(place: int, number: int) -> Terms:
        return {n: float(v) for n, v in zip(own[place], net.nodes[place].memory[:, number], strict=True)}

    places = range(len(net.nodes))
    start: Terms = {}
    for place in places:
        start |= column(place, 0)
    everything: Terms = {}
    for place in places:
        everything |= column(place, 6)
    _within(programme, [everything], net.room)
    for place in places:
        beside = column(place - 1, 4) if place else {}
        peak = np.maximum(net.nodes[place].memory[:, 2], net.nodes[place].memory[:, 3])
        _within(programme, [start, beside, {n: float(v) for n, v in zip(own[place], peak, strict=True)}], net.room)
        if place + 1 < len(net.nodes):
            _within(programme, [start, beside, column(place, 3), column(place + 1, 5)], net.room)
        start = _sum([start, column(place, 1)])


def _within(programme: Programme, terms: list[Terms], room: int) -> None:
    unit = max(room, 1) / _SCALE
    programme.at_most.append(({n: value / unit for n, value in _sum(terms).items()}, room / unit))


def _sum(terms: list[Terms]) -> Terms:
    total: Terms = {}
    for term in terms:
        for number, value in term.items():
            total[number] = total.get(number, 0.0) + value
    return total
