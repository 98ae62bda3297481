"""The quickest plan that chooses otherwise in a dimension, and what it loses. No torch here.

Quick searches of the same space, each with one thing pinned otherwise, so they are not proven; what a plan's own file
says of its runner-ups comes from such searches too (``search.alternatives``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from galvatron_lite.errors import InputError
from galvatron_lite.explainer.asking import Clock, OutOfTimeError, peak_of, seconds_of
from galvatron_lite.explainer.neighbours import AXES, Axis
from galvatron_lite.explainer.schema import RunnerUp
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.search.alternatives import UNBOUNDED
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.result import summary
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, microbatch_counts

Pinned = tuple[str, str, str, Fixed]
"""Dimension, what the plan chooses, what is chosen instead, and the pins for it."""


def runners_up(session: Session, request: Request, clock: Clock, plan: Plan) -> tuple[tuple[RunnerUp, ...], str]:
    """The quickest plan met in each dimension, and what was not looked at, for people; empty: nothing.

    Args:
        session: of the profile.
        request: what the plan is chosen from; nothing is pinned in it.
        clock: time for it.
        plan: with its prediction.
    """
    found: dict[str, RunnerUp] = {}
    pins = list(_others(request, plan))
    for number, pinned in enumerate(pins):
        try:
            clock.begin(f"another {pinned[0]}")
        except OutOfTimeError as error:
            left = ", ".join(dict.fromkeys(f"{name} {instead}" for name, _, instead, _ in pins[number:]))
            return tuple(found.values()), f"runner-ups of {left}: {error}"
        other = _best(session, request, plan, pinned)
        if other is not None and (pinned[0] not in found or _rank(other) < _rank(found[pinned[0]])):
            found[pinned[0]] = other
    return tuple(found.values()), ""


def _rank(other: RunnerUp) -> tuple[bool, float]:
    return not other.fits, other.step_seconds


def _best(session: Session, request: Request, plan: Plan, pinned: Pinned) -> RunnerUp | None:
    name, chosen, instead, fixed = pinned
    try:
        fitting = search(replace(request, fixed=fixed), session.pricer, exact=False)
        other = fitting or search(replace(request, fixed=fixed, budget=UNBOUNDED), session.pricer, exact=False)
    except InputError:
        return None
    if other is None:
        return None
    done = finished(request, session.pricer, other)
    added, fits = seconds_of(done) - seconds_of(plan), fitting is not None
    return RunnerUp(name, chosen, instead, summary(done), seconds_of(done), added, peak_of(done), fits)


def _others(request: Request, plan: Plan) -> Iterator[Pinned]:
    """What is chosen otherwise, dimension by dimension."""
    degrees, here = request.pipelines, plan.pipeline
    for degree in _beside(degrees, here):
        yield "pipeline", str(here), str(degree), Fixed(pipeline=degree)
    for count in _beside(microbatch_counts(request.global_batch, Fixed()), plan.microbatches):
        yield "micro-batches", str(plan.microbatches), str(count), Fixed(pipeline=here, microbatches=count)
    if here > 1:
        for schedule in request.schedules:
            if schedule is not plan.schedule and schedule is not Schedule.CYCLIC:
                yield "schedule", plan.schedule.value, schedule.value, Fixed(pipeline=here, schedule=schedule)
    most = most_used(plan)
    for axis in AXES:
        yield from _along(axis, request, plan, most)


def _beside(values: tuple[int, ...], here: int) -> tuple[int, ...]:
    """The values next to one."""
    return (*[one for one in values if one < here][-1:], *[one for one in values if one > here][:1])


def most_used(plan: Plan) -> Strategy:
    """The strategy of most layers."""
    used = Counter[Strategy]()
    for run in (run for stage in plan.stages for run in stage.runs):
        used[run.strategy] += run.count
    return min(used, key=lambda strategy: (-used[strategy], str(strategy)))


def _along(axis: Axis, request: Request, plan: Plan, most: Strategy) -> Iterator[Pinned]:
    devices = request.devices // plan.pipeline
    for chosen, instead, pins in _values(axis, most, plan, devices):
        free = Fixed(pipeline=plan.pipeline if axis.degree is None else None)
        kinds = sorted({layer.kind for layer in request.graph.layers})
        offering = [kind for kind in kinds if request.space.offers(kind, devices, replace(free, strategy=pins))]
        if len(offering) == len(kinds):
            yield axis.name, chosen, instead, replace(free, strategy=pins)
        elif offering:
            own = tuple((layer.name, *pin) for layer in request.graph.layers if layer.kind in offering for pin in pins)
            yield axis.name, chosen, instead, replace(free, layers=own)


def _values(
    axis: Axis, most: Strategy, plan: Plan, devices: int
) -> Iterator[tuple[str, str, tuple[tuple[str, object], ...]]]:
    """What most layers do in a dimension, what they might do, and the fields of ``Strategy`` that say so."""
    if axis.name == "recompute":
        used = {run.strategy.recompute for stage in plan.stages for run in stage.runs}
        here = "some layers" if len(used) > 1 else most.recompute.value
        for choice in (Recompute.NONE, Recompute.FULL):
            if used != {choice}:
                yield here, choice.value, (("recompute", choice),)
    elif axis.name == "zero":
        for stage in range(4):
            if stage != most.zero_stage:
                yield f"stage {most.zero_stage}", f"stage {stage}", (("zero_stage", stage),)
    elif axis.name == "offload":
        if axis.used(most):
            yield most.offload.value, "none", (("offload", Offload.NONE),)
    elif axis.name in ("tensor", "context"):
        degree = getattr(most, axis.name)
        for other in _beside(divisors(devices), degree):
            yield str(degree), str(other), ((axis.name, other),)
    elif axis.used(most) and len(axis.own) == 1:
        yield "yes", "no", ((axis.own[0], getattr(Strategy(), axis.own[0])),)
