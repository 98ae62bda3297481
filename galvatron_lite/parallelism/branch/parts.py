"""A model in parts: each branch that a plan places, and the trunk, as graphs of their own. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Passed
from galvatron_lite.parallelism.branch.find import Branch, find_regions
from galvatron_lite.plans.schema import Plan


def part_of(graph: ModelGraph, layers: Collection[str]) -> ModelGraph:
    """Some layers of a graph, with what goes between them and what they share.

    Layers that read nothing of each other stay apart: an empty tensor between them says that they are no chain.
    """
    own = tuple(layer for layer in graph.layers if layer.name in layers)
    tensors = tuple(
        replace(tensor, readers=readers)
        for tensor in graph.tensors
        if tensor.producer in layers and (readers := tuple(name for name in tensor.readers if name in layers))
    )
    if not tensors and len(own) > 1 and graph.tensors:
        tensors = (Passed(own[0].name, (own[-1].name,), 0),)
    ties = tuple(tie for tie in graph.ties if {tie.first, tie.second} <= set(layers))
    kinds = {layer.kind: graph.kinds[layer.kind] for layer in own}
    return replace(graph, layers=own, kinds=kinds, tensors=tensors, ties=ties)


def placed_branches(graph: ModelGraph, plan: Plan) -> list[Branch]:
    """The branches that a plan places, in its order.

    Raises:
        InputError: one that the model does not have, or that it places twice.
    """
    known = {branch.name: branch for region in find_regions(graph) for branch in region.branches}
    placed: list[Branch] = []
    for number, one in enumerate(plan.branches):
        if one.name not in known:
            has = f"has {', '.join(known)}" if known else "has no independent branches"
            raise InputError(f"branches.{number}.name", one.name, f"The model {graph.name} {has}.")
        if any(one.name == other.name for other in placed):
            raise InputError(f"branches.{number}.name", one.name, "It is placed already.")
        placed.append(known[one.name])
    return placed


def trunk_of(graph: ModelGraph, placed: Sequence[Branch]) -> tuple[Layer, ...]:
    """The layers outside the branches that are placed."""
    apart = {layer for branch in placed for layer in branch.layers}
    return tuple(layer for layer in graph.layers if layer.name not in apart)


def layers_of_parts(graph: ModelGraph, plan: Plan) -> list[tuple[Layer, ...]]:
    """The layers of the trunk, then those of each branch that a plan places, in its order.

    Raises:
        InputError: see ``placed_branches``.
    """
    placed = placed_branches(graph, plan)
    known = {layer.name: layer for layer in graph.layers}
    return [trunk_of(graph, placed), *(tuple(known[name] for name in branch.layers) for branch in placed)]
