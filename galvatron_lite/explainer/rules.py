"""The rules between layers that the runtime relies on, and searched plans keep (``search.problem``). No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.cost.layout import layout
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.tables import glue_of


def keeps_rules(graph: ModelGraph, stages: Sequence[range], strategies: Sequence[Strategy]) -> bool:
    """Whether the layers at the model's ends, or at the boundaries of stages, are laid out alike as they must be.

    Args:
        graph: the model.
        stages: places of the layers of each.
        strategies: of every layer.
    """
    if len(stages) > 1:
        cuts = [inside.start for inside in stages[1:]]
        return len({layout(strategies[place]) for cut in cuts for place in (cut - 1, cut)}) <= 1
    edges = [one for layer, one in zip(graph.layers, strategies, strict=True) if layer.role is not Role.BLOCK]
    return not is_glued(graph) or len({glue_of(layout(one)) for one in edges}) <= 1
