"""Stage boundaries: the exact best way to cut the chain of layers into stages of any lengths.

Stages s = 0..p-1 hold layers [e_s, e_{s+1}); a stage has bottleneck parts c_sk and work once a step u_s, from its
Pareto set. With the closed form of the schedule (``cost.schedule.Form``)

    minimise   sum_k (ramp_k sum_s c_sk + rounds_k max_s c_sk) + max_s u_s
    subject to 0 = e_0 < e_1 < ... < e_p = L, and every stage within the memory of its device.

A label for (stages so far, layers so far) is (ramp, max of each part, max step); all updates are monotone, so labels
that another one equals or beats go, and so do labels whose bound reaches the limit. Asked for only where bounds
(``bounds``) leave a gap that matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron_lite.arrays import IntArray
from galvatron_lite.cost.schedule import Form
from galvatron_lite.search.bounds import StageBounds
from galvatron_lite.search.pareto import pareto_rows
from galvatron_lite.search.problem import Partition, Problem, StagePlan, step_time, weighted

_UNBOUNDED = 2**61


@dataclass(frozen=True, slots=True)
class _Label:
    figures: tuple[int, ...]
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """Labels each with each of the ways to run the stage after them."""

    labels: list[_Label]
    options: list[StagePlan]
    figures: IntArray  # (labels x options, columns)

    @classmethod
    def of(cls, labels: list[_Label], options: list[StagePlan], form: Form) -> _Joined:
        """Option by option within a label."""
        before = np.array([label.figures for label in labels], dtype=np.int64)
        parts = np.array([option.bottleneck for option in options], dtype=np.int64).reshape(len(options), -1)
        columns = [
            before[:, :1] + np.array([weighted(form.ramp, option.bottleneck) for option in options], dtype=np.int64),
            *(np.maximum(before[:, 1 + part, None], parts[:, part]) for part in range(parts.shape[1])),
            np.maximum(before[:, -1:], np.array([option.step for option in options], dtype=np.int64)),
        ]
        return cls(labels, options, np.stack(columns, axis=-1).reshape(len(labels) * len(options), -1))

    def label(self, row: int, stop: int) -> _Label:
        """One of them; its stage ends before layer ``stop``."""
        before, option = self.labels[row // len(self.options)], self.options[row % len(self.options)]
        figures = tuple(int(figure) for figure in self.figures[row])
        return _Label(figures, (*before.cuts, stop), (*before.stages, option))


def best_partition(problem: Problem, bounds: StageBounds, limit: int | None) -> tuple[Partition | None, float]:
    """The best plan of a shape of several stages that takes less than ``limit`` picoseconds; and a time that no plan
    below the limit beats.

    Args:
        problem: with everything settled.
        bounds: of it.
        limit: picoseconds; None: any plan will do.
    """
    layers, least, stages, form = len(problem.graph.layers), np.inf, problem.shape.stages, problem.form
    top = np.inf if limit is None else float(limit)
    front: dict[int, list[_Label]] = {0: [_Label((0,) * (len(problem.weights) + 1), (0,), ())]}
    for stage in range(stages):
        reached: dict[int, list[_Joined]] = {}
        for start, labels in sorted(front.items()):
            later = stages - stage - 1
            for stop in range(start + 1, layers - later + 1) if later else (layers,):
                through = bounds.through(stage, start, stop)
                if through < top:
                    others = bounds.others(stage, start, stop)
                    cap = _UNBOUNDED if limit is None else limit - others
                    options, dropped = problem.plans(stage, range(start, stop), cap)
                    # A plan with an option left out takes that option's time alone and what other layers need.
                    least = min(least, max(through, dropped + others))
                    if options:
                        reached.setdefault(stop, []).append(_Joined.of(labels, options, form))
        front = {}
        for stop, joined in reached.items():
            labels = _best(joined, stop, form, top - bounds.least_after(stage, stop))
            if labels:
                front[stop] = labels
    ends = [Partition(step_time(label.stages, form), label.cuts, label.stages) for label in front.get(layers, [])]
    found = min(ends, key=lambda plan: (plan.time, plan.cuts), default=None)
    return found, least if found is None else min(least, found.time)


def _best(joined: list[_Joined], stop: int, form: Form, limit: float) -> list[_Label]:
    """Labels that so far take less than the limit and are not beaten; a label is beaten by none that takes longer."""
    figures = np.concatenate([own.figures for own in joined])
    rounds = np.array([int(weight) for weight in form.rounds], dtype=np.int64)
    rows = np.flatnonzero(figures[:, 0] + figures[:, 1:-1] @ rounds + figures[:, -1] < limit)
    kept = rows[pareto_rows(figures[rows])] if len(rows) else rows
    starts = np.cumsum([0, *(len(own.figures) for own in joined)])
    places = np.searchsorted(starts, kept, side="right") - 1
    return [joined[place].label(row - starts[place], stop) for place, row in zip(places, kept, strict=True)]
