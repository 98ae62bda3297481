"""Models that are no chain: every solver finds what brute force finds, on skips, diamonds, decoders and U-Nets."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.memory import MemoryTerms, worst_moment
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Passed
from galvatron_lite.search.best_first import search
from galvatron_lite.search.figures import ticks
from galvatron_lite.search.graph_ilp import solve_net
from galvatron_lite.search.graph_net import net_of
from galvatron_lite.search.graph_tree import best_by_tree, elimination_order
from galvatron_lite.search.graphs import Net, Node, best_in_order, time_of
from galvatron_lite.search.pulp_adapter import Verdict
from galvatron_lite.search.shapes import open_problem, settled, shapes_of
from galvatron_lite.search.space import Fixed
from tests.search.instances import random_instance

CHAIN = [(i, i + 1) for i in range(5)]
GRAPHS = {
    "chain": CHAIN,
    "skip": [*CHAIN, (0, 3), (1, 5)],
    "diamond": [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 5)],
    "encoder-decoder": [(0, 1), (1, 2), (2, 3), (2, 4), (2, 5), (3, 4), (4, 5)],
    "u-net": [*CHAIN, (0, 5), (1, 4)],
    "two parts": [(0, 1), (1, 2), (3, 4), (4, 5)],
    "every pair": [(i, j) for j in range(6) for i in range(j)],
}


def random_node(draw: random.Random) -> Node:
    count = draw.randint(1, 4)
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


def peak(net: Net, choices: tuple[int, ...]) -> int:
    """By the evaluator's own memory model."""
    return worst_moment(
        [MemoryTerms(*node.memory[c].tolist()) for node, c in zip(net.nodes, choices, strict=True)]
    ).size


def total(net: Net, choices: tuple[int, ...]) -> int:
    return sum(int(node.memory[c, 0] + node.memory[c, 1]) for node, c in zip(net.nodes, choices, strict=True))


def every(net: Net) -> list[tuple[int, ...]]:
    return list(product(*(range(len(node.time)) for node in net.nodes)))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("seed", range(6))
def test_in_order_and_the_programme_equal_brute_force(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    whole = random_net(GRAPHS[name], draw)
    plans = [(peak(whole, one), time_of(whole, one)) for one in every(whole)]
    peaks = sorted({size for size, _ in plans})
    for room in {peaks[0] - 1, peaks[0], draw.choice(peaks), peaks[len(peaks) // 4], peaks[-1]}:
        net = Net(whole.nodes, whole.edges, room)
        best = min((time for size, time in plans if size <= room), default=None)
        found = best_in_order(net)
        verdict, own = solve_net(net)
        if best is None:
            assert found is None
            assert verdict is Verdict.INFEASIBLE
            continue
        assert found is not None
        assert own is not None
        assert verdict is Verdict.PROVEN
        assert found.time == time_of(net, found.choices) == own.time == best
        assert peak(net, found.choices) <= room
        assert peak(net, own.choices) <= room


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("seed", range(6))
def test_the_tree_equals_brute_force_for_a_sum_of_memory_and_bounds_the_rest(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    whole = random_net(GRAPHS[name], draw)
    plans = [(total(whole, one), time_of(whole, one)) for one in every(whole)]
    sizes = sorted({size for size, _ in plans})
    for room in {sizes[0] - 1, sizes[0], draw.choice(sizes), sizes[-1]}:
        net = Net(whole.nodes, whole.edges, room)
        best = min((time for size, time in plans if size <= room), default=None)
        found, exact = best_by_tree(net), best_in_order(net)
        assert (found.time if found else None) == best
        if found is not None:
            assert time_of(net, found.choices) == found.time
            assert total(net, found.choices) <= room
        assert exact is None or (found is not None and found.time <= exact.time)


def test_a_deep_u_net_has_a_narrow_tree() -> None:
    layers, draw = 24, random.Random(0)
    edges = [(i, i + 1) for i in range(layers - 1)] + [(i, layers - 1 - i) for i in range(layers // 2 - 1)]
    whole = random_net(edges, draw, layers)
    assert sorted(elimination_order(whole)) == list(range(layers))
    choices = best_by_tree(whole)
    assert choices is not None
    net = Net(whole.nodes, whole.edges, total(whole, choices.choices) * 9 // 10)
    tight = best_by_tree(net)
    assert tight is not None
    assert tight.time > choices.time
    assert total(net, tight.choices) <= net.room
    # Memory moments beside the sum do not matter where they are all zero: then the programme must agree.
    flat = [Node(node.time, node.memory * np.array([1, 1, 0, 0, 0, 0, 0]), node.group) for node in net.nodes]
    last = Node(flat[-1].time, flat[-1].memory + np.outer(flat[-1].memory[:, 1], [0, 0, 1, 0, 0, 0, 0]), flat[-1].group)
    verdict, own = solve_net(Net((*flat[:-1], last), net.edges, net.room))
    assert verdict is Verdict.PROVEN
    assert own is not None
    assert own.time == tight.time


def test_an_edge_backwards_is_an_error() -> None:
    with pytest.raises(InputError, match="running order"):
        Net((random_node(random.Random(0)),) * 2, {(1, 0): np.zeros((3, 3), dtype=np.int64)}, 1)


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_as_a_graph_has_the_search_s_optimum(seed: int) -> None:
    asked = random_instance(seed)
    request = replace(asked.request(60_000), fixed=Fixed(pipeline=1, microbatches=1))
    pricer = LayerPricer(asked.profile)
    found = search(request, pricer)
    (shape,) = shapes_of(request)
    nets = [net_of(child) for child in settled(open_problem(request, pricer, shape))]
    own = [chosen.time for net in nets if all(len(node.time) for node in net.nodes) and (chosen := best_in_order(net))]
    overhead = ticks(asked.profile.overhead.microbatch / 2) * 2
    assert (found.partition.time if found else None) == (min(own) + overhead if own else None)


def test_tensors_that_skip_layers_go_straight_to_their_readers() -> None:
    asked = random_instance(3)
    names = [layer.name for layer in asked.profile.graph.layers]
    sizes = [asked.profile.graph.kind_of(layer).output_bytes for layer in asked.profile.graph.layers]
    skips = tuple(Passed(a, (b,), size) for a, b, size in zip(names, names[1:], sizes, strict=False))
    graph = replace(asked.profile.graph, tensors=(*skips, Passed(names[0], (names[-1],), 5000)))
    profile = replace(asked.profile, graph=graph)
    request = replace(asked.request(10**6), graph=graph, fixed=Fixed(pipeline=1))
    pricer = LayerPricer(profile)
    found = search(request, pricer)
    assert found is not None
    net = net_of(found.problem)
    straight = best_in_order(net)
    assert straight is not None
    assert (0, len(names) - 1) in net.edges
    assert net.edges[0, len(names) - 1].shape == (net.nodes[0].groups, net.nodes[-1].groups)
    verdict, own = solve_net(net)
    assert (verdict, own and own.time) == (Verdict.PROVEN, straight.time)


def test_a_pipeline_is_no_single_stage() -> None:
    asked = random_instance(2)
    request = replace(asked.request(10**6), fixed=Fixed(pipeline=2))
    shape = shapes_of(request)[0]
    with pytest.raises(InputError, match="inside one stage"):
        net_of(open_problem(request, LayerPricer(asked.profile), shape))
