"""The branches of a model that a plan places, and which layers that leaves."""

from __future__ import annotations

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph
from galvatron_lite.parallelism.branch.find import Branch, find_regions
from galvatron_lite.parallelism.branch.parts import trunk_of
from galvatron_lite.plans.schema import Plan


def placed_branches(graph: ModelGraph, plan: Plan) -> list[Branch]:
    """The branches that a plan places, in its order."""
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


def layers_of_parts(graph: ModelGraph, plan: Plan) -> list[tuple[Layer, ...]]:
    """The layers of the trunk, then those of each branch that a plan places, in its order."""
    placed = placed_branches(graph, plan)
    known = {layer.name: layer for layer in graph.layers}
    return [trunk_of(graph, placed), *(tuple(known[name] for name in branch.layers) for branch in placed)]
