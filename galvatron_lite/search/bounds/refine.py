"""Bounds of a pipeline made exact where it matters: in the stages of the cut that looks best.

With theta_s(i, j) a bound on the time that stage s of layers i..j-1 needs alone and R_s(i, j) one on what it delays the
step by where it is not the slowest (``relax``), every plan with that stage takes at least

    theta_s(i, j) + pre_s(i) + post_s(j),

pre_s(i) the least sum of R of the s stages before it over layers 0..i-1, post_s(j) that of the stages after it. A cut
takes at least the greatest of that over its stages, and the least over all cuts bounds the plan. The cut with the least
bound is looked at: one of its stages is solved exactly (``frontier``), which raises its figure for that range of layers
and all equal ones; then the cut with the least bound is another one, or the same with a higher bound; and so on, until
the bound reaches the limit, or all of the cut's figures are exact. What solves its stages is then a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.search.bounds.alike import Place, equals
from galvatron_lite.search.bounds.relax import Relaxed
from galvatron_lite.search.partition import Partition, step_time
from galvatron_lite.search.problem import HEAVY, Problem, StagePlan

FloatArray = NDArray[np.float64]
_TINY = 1e-9
_MOST = 96
"""Stages that are solved at most for one bound."""


@dataclass(frozen=True, eq=False)
class Refined:
    """Bounds of one shape of plan with several stages; as ``relax.Relaxed``, but sharper."""

    theta: tuple[FloatArray, ...]  # per stage (L + 1, L + 1): picoseconds that layers i..j-1 need alone, at the least
    ramp: tuple[FloatArray, ...]  # the same of what they delay the step by
    timed: frozenset[Place] = field(default=frozenset())  # timed, ramped: places whose theta and ramp are exact
    ramped: frozenset[Place] = field(default=frozenset())

    @cached_property
    def pre(self) -> tuple[FloatArray, ...]:
        """Per stage (L + 1,): the least ramp of the stages before it, if they end there."""
        start = np.full(len(self.ramp[0]), np.inf)
        start[0] = 0.0
        sums = [start]
        for ramp in self.ramp[:-1]:
            sums.append((sums[-1][:, None] + ramp).min(axis=0))
        return tuple(sums)

    @cached_property
    def post(self) -> tuple[FloatArray, ...]:
        """Per stage (L + 1,): the least ramp of the stages after it, if they start there."""
        end = np.full(len(self.ramp[0]), np.inf)
        end[-1] = 0.0
        sums = [end]
        for ramp in reversed(self.ramp[1:]):
            sums.append((sums[-1][None, :] + ramp).min(axis=1))
        return tuple(reversed(sums))

    @cached_property
    def excess(self) -> tuple[FloatArray, ...]:
        """Per stage (L + 1, L + 1): a time that no plan with those layers in it beats."""
        around = zip(self.theta, self.pre, self.post, strict=True)
        return tuple(theta + before[:, None] + after[None, :] for theta, before, after in around)

    @cached_property
    def _ahead(self) -> tuple[FloatArray, ...]:
        best = [self.excess[0][0]]
        for stage in self.excess[1:]:
            best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
        return tuple(best)

    @cached_property
    def _behind(self) -> tuple[FloatArray, ...]:
        best = [self.excess[-1][:, -1]]
        for stage in reversed(self.excess[:-1]):
            best.append(np.maximum(best[-1][None, :], stage).min(axis=1))
        return tuple(reversed(best))

    @property
    def bound(self) -> float:
        """A time that no plan beats."""
        return float(self._ahead[-1][-1]) * (1 - _TINY)

    def through(self, stage: int, start: int, stop: int) -> float:
        """A time that no plan with these layers in a stage beats."""
        before = self._ahead[stage - 1][start] if stage else (0.0 if start == 0 else np.inf)
        after = self._behind[stage + 1][stop] if stage + 1 < len(self.theta) else 0.0
        return max(float(before), float(self.excess[stage][start, stop]), float(after)) * (1 - _TINY)

    def least_after(self, stage: int, place: int) -> float:
        """Least ramp of the layers from a place on, in the stages after one, rounded down."""
        return float(self.post[stage][place]) * (1 - _TINY) - 1.0

    def others(self, stage: int, start: int, stop: int) -> int:
        """Least ramp of the layers outside a stage, rounded down; what no plan can have comes to nothing."""
        total = float(self.pre[stage][start] + self.post[stage][stop])
        return max(int(total * (1 - _TINY)) - 1, 0) if np.isfinite(total) else 0

    def cuts(self) -> list[int]:
        """The boundaries of a partition that reaches the bound: (0, ..., L)."""
        stop = len(self.theta[0]) - 1
        cuts = [stop]
        for stage in range(len(self.theta) - 1, 0, -1):
            stop = int(np.argmin(np.maximum(self._ahead[stage - 1], self.excess[stage][:, stop])))
            cuts.append(stop)
        return [0, *reversed(cuts)]

    def with_theta(self, places: Sequence[Place], value: float) -> Refined:
        """With the theta of some places."""
        return replace(self, theta=_set(self.theta, places, value), timed=self.timed | set(places))

    def with_ramp(self, places: Sequence[Place], value: float) -> Refined:
        """With the ramp of some places."""
        return replace(self, ramp=_set(self.ramp, places, value), ramped=self.ramped | set(places))

    def within(self, limit: float) -> Refined:
        """Without places that no plan below a limit has; infinite bounds where no plan is left."""
        if self.bound >= limit:
            never = tuple(np.full_like(own, np.inf) for own in self.theta[:1]) * len(self.theta)
            return replace(self, theta=never, ramp=never)
        over = [own * (1 - _TINY) >= limit for own in self.excess]
        new = [bool((gone & np.isfinite(theta)).any()) for gone, theta in zip(over, self.theta, strict=True)]
        if not any(new):
            return self
        theta, ramp = (
            tuple(
                np.where(gone, np.inf, own) if more else own for gone, own, more in zip(over, every, new, strict=True)
            )
            for every in (self.theta, self.ramp)
        )
        return replace(self, theta=theta, ramp=ramp)

    def opened(self, layers: Iterable[int]) -> Refined:
        """The same bounds where what was exact may be higher for stages with some of these layers."""
        layers = list(layers)
        if not layers:
            return self
        timed, ramped = (
            frozenset(own for own in known if not any(own[1] <= layer < own[2] for layer in layers))
            for known in (self.timed, self.ramped)
        )
        return replace(self, timed=timed, ramped=ramped)


def _set(every: tuple[FloatArray, ...], places: Sequence[Place], value: float) -> tuple[FloatArray, ...]:
    """Greater of the old and the new value at some places; arrays that stages share stay shared if they agree."""
    by_stage: dict[int, list[tuple[int, int]]] = {}
    for stage, start, stop in places:
        by_stage.setdefault(stage, []).append((start, stop))
    known: dict[tuple[int, tuple[tuple[int, int], ...]], FloatArray] = {}
    changed = list(every)
    for stage, ranges in by_stage.items():
        key = (id(every[stage]), tuple(ranges))
        if key not in known:
            known[key] = every[stage].copy()
            rows, columns = np.array(ranges).T
            known[key][rows, columns] = np.maximum(known[key][rows, columns], value)
        changed[stage] = known[key]
    return tuple(changed)


def opened(bounds: Relaxed) -> Refined:
    """The bounds to begin with."""
    known: dict[tuple[int, float], FloatArray] = {}
    ramps = []
    for total, sent in zip(bounds.ramps, bounds.sent, strict=True):
        key = (id(total), sent)
        if key not in known:
            empty = np.tri(len(total), dtype=bool)
            known[key] = np.where(empty, np.inf, total[None, :] - total[:, None] + sent)
        ramps.append(known[key])
    return Refined(bounds.theta, tuple(ramps))


def refined(problem: Problem, bounds: Refined, limit: int | None) -> tuple[Refined, Partition | None]:
    """Sharper bounds, and a plan that takes less than the limit if one was met on the way; bounds are below that."""
    best: Partition | None = None
    for _ in range(_MOST):
        if limit is not None:
            bounds = bounds.within(float(limit))
        if not np.isfinite(bounds.bound):
            break
        cuts = bounds.cuts()
        stages = [(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
        todo = [own for own in stages if own not in bounds.timed]
        if todo:
            own = max(todo, key=lambda own: float(bounds.excess[own[0]][own[1], own[2]]))
            bounds = _timed(problem, bounds, own, limit)
            continue
        todo = [own for own in stages if own not in bounds.ramped]
        if limit is not None and todo:
            bounds = _ramped(problem, bounds, todo[0], limit)
            continue
        plan = _plan(problem, tuple(cuts), stages, limit)
        if plan is None:
            break
        best, limit = plan, plan.time
    return bounds, best


def _timed(problem: Problem, bounds: Refined, place: Place, limit: int | None) -> Refined:
    stage, start, stop = place
    cap = None if limit is None else limit - 1 - bounds.others(*place)
    return bounds.with_theta(list(equals(problem, place)), problem.quickest(stage, range(start, stop), cap)[1])


def _ramped(problem: Problem, bounds: Refined, place: Place, limit: int) -> Refined:
    stage, start, stop = place
    cap = limit - bounds.others(*place)
    least = (problem.lightest(stage, range(start, stop))[1] - cap) / HEAVY
    return bounds.with_ramp(list(equals(problem, place)), least)


def _plan(problem: Problem, cuts: tuple[int, ...], stages: Sequence[Place], limit: int | None) -> Partition | None:
    """The quickest ways to run the stages, or those that delay others least where that makes the step quicker."""
    chosen: list[StagePlan] = []
    for stage, start, stop in stages:
        quick = problem.met(stage, range(start, stop))
        if quick is None:
            return None
        chosen.append(quick)
    for place, (stage, start, stop) in enumerate(stages):
        light = problem.lightest(stage, range(start, stop))[0]
        other = chosen if light is None else [*chosen[:place], light, *chosen[place + 1 :]]
        if step_time(tuple(other), problem.form) < step_time(tuple(chosen), problem.form):
            chosen = other
    time = step_time(tuple(chosen), problem.form)
    return Partition(time, cuts, tuple(chosen)) if limit is None or time < limit else None
