"""Branches of layer graphs: by hand, and of random graphs against the definition, every subset tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.model.graph import Layer, ModelGraph, Passed, Role, Tie
from galvatron_lite.parallelism.branch.find import Branch, BranchRegion, find_regions, roots_of
from tests.factories import make_graph, make_kind
from tests.processor_time import least, process_seconds

Pairs = Sequence[tuple[int, int]]


def graph_of(count: int, edges: Pairs, ties: Pairs = (), before: bool = False) -> ModelGraph:
    """Layers l0, l1, ... of which one makes a tensor of 10 bytes for each it has an edge to."""
    order = ["before" if before and place == 0 else "a" for place in range(count)]
    graph = make_graph([make_kind("a", 1, boundary=70), make_kind("before", 1, boundary=70)], order)
    tensors = tuple(Passed(f"l{one}", (f"l{other}",), 10) for one, other in edges)
    return replace(graph, tensors=tensors, ties=tuple(Tie(f"l{one}", f"l{other}", 1) for one, other in ties))


def found(graph: ModelGraph) -> list[list[list[int]]]:
    """The branches of every outer region, as numbers of layers."""
    return [[numbers(branch) for branch in region.branches] for region in find_regions(graph)]


def numbers(branch: Branch) -> list[int]:
    return [int(name[1:]) for name in branch.layers]


def test_two_networks_that_read_the_inputs_are_branches() -> None:
    graph = graph_of(4, [(0, 1), (2, 3)])
    assert found(graph) == [[[0, 1], [2, 3]]]
    region = find_regions(graph)[0]
    assert (region.entry, region.exit) == ((), ())
    assert [(branch.input_bytes, branch.output_bytes) for branch in region.branches] == [(70, 0), (70, 0)]


def test_heads_of_a_trunk_and_towers_that_are_joined() -> None:
    graph = graph_of(7, [(0, 1), (1, 2), (1, 3), (3, 4), (2, 5), (4, 5), (5, 6)], before=True)
    region = find_regions(graph)[0]
    assert found(graph) == [[[2], [3, 4]]]
    assert (region.entry, region.exit) == (("l1",), ("l5",))
    assert [(branch.input_bytes, branch.output_bytes) for branch in region.branches] == [(10, 10), (10, 10)]
    assert region.layers == ("l2", "l3", "l4")


def test_layers_before_and_after_the_blocks_are_no_branches() -> None:
    graph = graph_of(4, [(1, 2)], before=True)  # the layer before the blocks gives nothing that trains
    assert found(graph) == [[[1, 2], [3]]]
    kinds = [make_kind(name, 1) for name in ("before", "a", "after")]
    chain_ = make_graph(kinds, ["before", "a", "a", "after"])
    assert found(replace(chain_, tensors=(Passed("l1", ("l2",), 5),))) == []


def test_roots_are_the_fewest_modules() -> None:
    names = ["stem", "left.down.0", "left.down.1", "left.up", "right.a", "right.b", "head"]
    layers = tuple(Layer(name, "a", Role.BLOCK, (name,)) for name in names)
    graph = replace(make_graph([make_kind("a", 1)], ["a"]), layers=layers)
    assert roots_of(graph, names[1:4]) == ("left",)
    assert roots_of(graph, [*names[1:3], "right.b"]) == ("left.down", "right.b")
    assert roots_of(graph, ["stem"]) == ("stem",)
    assert roots_of(graph, names) == ("stem", "left", "right", "head")


# --- random graphs against the definition ---------------------------------------------------------------------------

COUNT = 7


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    count = draw(st.integers(1, COUNT))
    pairs = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    ties = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    return graph_of(count, edges, draw(st.sampled_from([ties, []])))


def reach(graph: ModelGraph) -> set[tuple[str, str]]:
    return set(networkx.transitive_closure(graph.to_networkx()).edges)


def subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    every = chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    return (frozenset(one) for one in every)


def groups(names: Sequence[str], paths: set[tuple[str, str]]) -> list[frozenset[str]]:
    """What lies between neighbouring sets whose every element reaches everything outside of them."""
    first = [one for one in subsets(names) if all((a, b) in paths for a in one for b in set(names) - one)]
    first.sort(key=len)
    return [later - earlier for earlier, later in pairwise(first)]


def parts(group: frozenset[str], bound: set[tuple[str, str]]) -> set[frozenset[str]]:
    """The smallest sets that nothing binds to what is outside of them."""
    closed = [one for one in subsets(sorted(group)) if one and not any((a in one) != (b in one) for a, b in bound)]
    return {one for one in closed if not any(other < one for other in closed)}


def expected(names: Sequence[str], graph: ModelGraph) -> list[set[frozenset[str]]]:
    """Outer regions by the definition, each as its branches."""
    paths, ties = reach(graph), {(tie.first, tie.second) for tie in graph.ties}
    regions = []
    for group in groups(names, paths):
        inner = {(a, b) for a, b in paths | ties if a in group and b in group}
        kept = {one for one in parts(group, inner) if not any((a in one) != (b in one) for a, b in ties)}
        apart = parts(group, {(a, b) for a, b in paths if a in group and b in group})
        if len(kept) > 1:
            regions.append(kept)
        elif len(apart) > 1:
            regions += [region for one in sorted(apart, key=min) for region in expected(sorted(one), graph)]
    return regions


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_regions_of_random_graphs_are_those_of_the_definition(graph: ModelGraph) -> None:
    regions = [{frozenset(branch.layers) for branch in region.branches} for region in find_regions(graph)]
    wanted = expected([layer.name for layer in graph.layers], graph) if graph.tensors else []
    assert sorted(map(sorted, map(_listed, regions))) == sorted(map(sorted, map(_listed, wanted)))


def _listed(region: set[frozenset[str]]) -> list[list[str]]:
    return [sorted(branch) for branch in region]


def every_region(regions: Sequence[BranchRegion]) -> Iterator[BranchRegion]:
    for region in regions:
        yield region
        yield from every_region([inner for branch in region.branches for inner in branch.inside])


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_no_path_and_no_shared_parameter_between_branches(graph: ModelGraph) -> None:
    paths, ties = reach(graph), {(tie.first, tie.second) for tie in graph.ties}
    for region in every_region(find_regions(graph)):
        assert len(region.branches) > 1
        for one, other in combinations(region.branches, 2):
            pairs = {(a, b) for a in one.layers for b in other.layers}
            assert not (pairs | {(b, a) for a, b in pairs}) & (paths | ties)
        for branch in region.branches:
            assert not any((a in branch.layers) != (b in branch.layers) for a, b in ties)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_in_which_layers_are_listed_does_not_matter(graph: ModelGraph, rng: object) -> None:
    layers = list(graph.layers)
    rng.shuffle(layers)  # type: ignore[attr-defined]
    one, other = (
        {frozenset(frozenset(b.layers) for b in region.branches) for region in find_regions(g)}
        for g in (graph, replace(graph, layers=tuple(layers)))
    )
    assert one == other


def test_a_thousand_layers_are_searched_quickly() -> None:
    count = 1000
    graph = graph_of(count, [(place, place + 2) for place in range(count - 2)])

    def find() -> None:
        assert [len(branch) for branch in found(graph)[0]] == [count // 2, count // 2]

    assert least(lambda: process_seconds(find), 1.0) < 1.0


def test_a_cycle_is_an_error() -> None:
    with pytest.raises(networkx.NetworkXUnfeasible):
        find_regions(graph_of(2, [(0, 1), (1, 0)]))
