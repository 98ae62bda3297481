"""Stages of equally many blocks, where the user wants no others (``Fixed.even``)."""

from __future__ import annotations

import numpy as np

from galvatron_lite.arrays import FloatArray
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.search.problem import Problem


def even_cuts(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """Boundaries (0, ..., L) of stages with equally many blocks; empty where their number does not divide."""
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    if not blocks or len(blocks) % stages:
        return ()
    inner = blocks[:: len(blocks) // stages][1:]
    return (0, *inner, len(graph.layers))


def offered(problem: Problem, stage: int, bounds: FloatArray) -> FloatArray:
    """(L + 1, L + 1) bounds of the layers i..j-1 of a stage, infinite where it may not have just these."""
    if not problem.tables[stage].fixed.even or problem.shape.stages == 1:
        return bounds
    cuts, only = even_cuts(problem.graph, problem.shape.stages), np.full_like(bounds, np.inf)
    if cuts:
        ends = cuts[stage], cuts[stage + 1]
        only[ends] = bounds[ends]
    return only
