"""Stage boundaries: the exact best way to cut the chain of layers into stages of any lengths.

Symbols: stages 0..p-1 hold layers [e_s, e_{s+1}); a stage has bottleneck parts c_sk and work once a step u_s, from its
Pareto set. With the closed form of the schedule (``cost.schedule.Form``)

    minimise   sum_k (ramp_k sum_s c_sk + rounds_k max_s c_sk) + max_s u_s
    subject to 0 = e_0 < e_1 < ... < e_p = L, and every stage within the memory of its device.

A label for (stages so far, layers so far) is (ramp, max of each part, max step); all updates are monotone, so labels
that another one equals or beats go, and so do labels whose bound (``relax``) reaches the best plan known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from galvatron_lite.arrays import IntArray
from galvatron_lite.cost.schedule import Form
from galvatron_lite.search.chains.pareto import pareto_rows
from galvatron_lite.search.problem import Problem, StagePlan

_BEAM, _UNBOUNDED = 32, 2**61


class StageBounds(Protocol):
    """Bounds of one shape of plan with several stages (``relax.Relaxed``, ``refine.Refined``)."""

    def through(self, stage: int, start: int, stop: int) -> float:
        """A time that no plan with these layers in a stage beats."""

    def least_after(self, stage: int, place: int) -> float:
        """Least r of the layers from a place on, in the stages after one, rounded down."""

    def others(self, stage: int, start: int, stop: int) -> int:
        """Least r of the layers outside a stage, rounded down."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A whole plan of one shape."""

    time: int  # picoseconds a step, without fixed host time
    cuts: tuple[int, ...]  # (0, ..., L)
    stages: tuple[StagePlan, ...]  # how each is run


@dataclass(frozen=True, slots=True)
class _Label:
    figures: tuple[int, ...]
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]


def step_time(stages: tuple[StagePlan, ...], form: Form) -> int:
    """Picoseconds of a step; see the module."""
    slowest = [max(parts) for parts in zip(*(stage.bottleneck for stage in stages), strict=True)]
    ramp = sum(_weighted(form.ramp, stage.bottleneck) for stage in stages)
    return ramp + _weighted(form.rounds, slowest) + max(stage.step for stage in stages)


def _weighted(weights: Sequence[float], values: Sequence[int]) -> int:
    return sum(int(weight) * value for weight, value in zip(weights, values, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """Labels each with each of the ways to run the stage after them; ``figures``: (labels x options, columns)."""

    labels: list[_Label]
    options: list[StagePlan]
    figures: IntArray

    def label(self, row: int, stop: int) -> _Label:
        """One of them; its stage ends before layer ``stop``."""
        before, option = self.labels[row // len(self.options)], self.options[row % len(self.options)]
        figures = tuple(int(figure) for figure in self.figures[row])
        return _Label(figures, (*before.cuts, stop), (*before.stages, option))


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """What is known of one shape."""

    plan: Partition | None  # a plan that takes less than the limit; None if none was met
    least: float  # no plan of the shape that takes less than the limit takes less than this (picoseconds)


def best_partition(problem: Problem, bounds: StageBounds | None, limit: int | None) -> ShapeResult:
    """The best plan of one shape that takes less than ``limit`` picoseconds, as far as can be told in time.

    Args:
        problem: with everything settled.
        bounds: of it; not needed with one stage.
        limit: picoseconds; None: any plan will do.
    """
    if problem.shape.stages == 1 or bounds is None:
        return _one_stage(problem, limit)
    return _search(problem, bounds, limit)


def quick_plan(problem: Problem, cuts: tuple[int, ...], limit: int | None) -> Partition | None:
    """A good plan, soon, with these boundaries; None where none is met that takes less than the limit."""
    cap = None if limit is None else limit - 1
    stages = [problem.good(stage, range(*ends), cap, _BEAM)[0] for stage, ends in enumerate(pairwise(cuts))]
    found = tuple(stage for stage in stages if stage is not None)
    if len(found) < len(stages):
        return None
    time = step_time(found, problem.form)
    return Partition(time, cuts, found) if limit is None or time < limit else None


def _one_stage(problem: Problem, limit: int | None) -> ShapeResult:
    """The plan of one stage."""
    layers = len(problem.graph.layers)
    stage, least = problem.quickest(0, range(layers), None if limit is None else limit - 1)
    if stage is None:
        return ShapeResult(None, least)
    return ShapeResult(Partition(step_time((stage,), problem.form), (0, layers), (stage,)), least)


def _search(problem: Problem, bounds: StageBounds, limit: int | None) -> ShapeResult:
    layers, least = len(problem.graph.layers), float("inf")
    stages, form = problem.shape.stages, problem.form
    top = float("inf") if limit is None else float(limit)
    parts = len(problem.weights) - 1
    front: dict[int, list[_Label]] = {0: [_Label((0,) * (parts + 2), (0,), ())]}
    for stage in range(stages):
        reached: dict[int, list[_Joined]] = {}
        for start, labels in sorted(front.items()):
            for stop in _stops(start, layers, stages - stage - 1):
                through = bounds.through(stage, start, stop)
                if through < top:
                    others = bounds.others(stage, start, stop)
                    cap = _UNBOUNDED if limit is None else limit - others
                    options, dropped = problem.plans(stage, range(start, stop), cap)
                    # A plan with an option left out takes that option's time alone and what other layers need.
                    least = min(least, max(through, dropped + others))
                    if options:
                        reached.setdefault(stop, []).append(_joined(labels, options, form))
        best = {
            stop: _best(joined, stop, form, top - bounds.least_after(stage, stop)) for stop, joined in reached.items()
        }
        front = {stop: labels for stop, labels in best.items() if labels}
    ends = [Partition(step_time(label.stages, form), label.cuts, label.stages) for label in front.get(layers, [])]
    found = min(ends, key=lambda plan: (plan.time, plan.cuts), default=None)
    return ShapeResult(found, least if found is None else min(least, found.time))


def _stops(start: int, layers: int, later: int) -> range:
    """Where a stage may end: a layer at least for each later stage; the last stage takes all that is left."""
    return range(start + 1, layers - later + 1) if later else range(layers, layers + 1)


def _joined(labels: list[_Label], options: list[StagePlan], form: Form) -> _Joined:
    """Every label with every option, option by option within a label."""
    before = np.array([label.figures for label in labels], dtype=np.int64)
    parts = np.array([option.bottleneck for option in options], dtype=np.int64).reshape(len(options), -1)
    steps = np.array([option.step for option in options], dtype=np.int64)
    ramp = np.array([_weighted(form.ramp, option.bottleneck) for option in options], dtype=np.int64)
    columns = [
        before[:, :1] + ramp,
        *(np.maximum(before[:, 1 + part, None], parts[:, part]) for part in range(parts.shape[1])),
        np.maximum(before[:, -1:], steps),
    ]
    return _Joined(labels, options, np.stack(columns, axis=-1).reshape(len(labels) * len(options), -1))


def _best(joined: list[_Joined], stop: int, form: Form, limit: float) -> list[_Label]:
    """Labels that so far take less than the limit and are not beaten; a label is beaten by none that takes longer."""
    figures = np.concatenate([one.figures for one in joined])
    rounds = np.array([int(weight) for weight in form.rounds], dtype=np.int64)
    rows = np.flatnonzero(figures[:, 0] + figures[:, 1:-1] @ rounds + figures[:, -1] < limit)
    kept = rows[pareto_rows(figures[rows])] if len(rows) else rows
    starts = np.cumsum([0, *(len(one.figures) for one in joined)])
    places = np.searchsorted(starts, kept, side="right") - 1
    return [joined[place].label(row - starts[place], stop) for place, row in zip(places, kept, strict=True)]
