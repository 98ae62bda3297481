"""Stages that pose the same problem: elsewhere in a run of equal layers, or in another place of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.search.problem import Problem

Place = tuple[int, int, int]
"""A stage, its first layer and the one behind its last."""


def equals(problem: Problem, place: Place) -> Iterator[Place]:
    """Places that pose the same problem as one of them, that one included."""
    stage, start, stop = place
    runs, others = _runs(problem), _alike(problem)[stage]
    for first in range(*runs[start]) if runs[start] == runs[stop - 1] else (start,):
        last = first + stop - start
        if last <= max(runs[start][1], stop) and _ends(problem, first, last) == _ends(problem, start, stop):
            yield from ((other, first, last) for other in others)


def _ends(problem: Problem, start: int, stop: int) -> tuple[bool, bool]:
    return start > 0, stop < len(problem.graph.layers)


def _runs(problem: Problem) -> list[tuple[int, int]]:
    """By place, where the run of layers that cost the same begins and ends; of layers that share parameters, and of
    graphs with tensors that skip layers, each is one."""
    known = problem.answers.runs
    if not known:
        crossing, fixed = problem.tables[0].store.crossing, problem.tables[0].fixed
        tied = {place for group in tied_groups(problem.graph) for place in group}
        names = [
            (layer.kind, fixed.pins_of(layer.name), crossing[place], crossing[place + 1])
            for place, layer in enumerate(problem.graph.layers)
        ]
        apart = {*tied, *(place + 1 for place in tied)} if not problem.graph.tensors else {*range(len(names))}
        cuts = [place for place in range(1, len(names)) if place in apart or names[place - 1] != names[place]]
        known += [ends for ends in pairwise([0, *cuts, len(names)]) for _ in range(*ends)]
    return known


def _alike(problem: Problem) -> list[list[int]]:
    """By stage, all stages in which the same layers with boundaries at the same ends cost the same."""
    known, wire = problem.answers.alike, problem.choice.wire
    if wire not in known:
        same: dict[object, list[int]] = {}
        names = [_name(problem, stage) for stage in range(problem.shape.stages)]
        for stage, name in enumerate(names):
            same.setdefault(name, []).append(stage)
        known[wire] = [same[name] for name in names]
    return known[wire]


def _name(problem: Problem, stage: int) -> tuple[object, ...]:
    sides = [side for side in (stage, stage + 1) if 0 < side < problem.shape.stages]
    sizes = sorted(set(problem.tables[0].store.crossing[1:-1]))
    sent = tuple(problem.send(side, size) for size in sizes for side in sides)
    ends = stage > 0, stage + 1 < problem.shape.stages
    return problem.held(stage), id(problem.tables[stage]), problem.budgets[stage], ends, sent
