"""What is said where nothing fits: the least memory that a plan needs, and what alone would make one fit.

A search that ends with the first plan it meets answers whether anything fits a budget. The smallest budget is found by
halving the range between one that no plan fits and what a plan needs. Exact for models of few layers; for others
searches end at 3 % from one that fits, or after some work, and the error says that the budget is the least found. Where
devices of several types have budgets of their own, memory counts as a share of them.

Pins to lift, dimensions to allow again, other backends and more devices are searched, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import ANY, backend_named
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Mode, Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import ANY_TIME, finished, plain, search
from galvatron_lite.search.checks import unglued
from galvatron_lite.search.pins import typed_name
from galvatron_lite.search.result import summary
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed
from galvatron_lite.units import format_budget

_EXACT_LAYERS = 8
_SLACK = 0.03
"""Share of its memory within which the search for a leaner plan of a model with more layers ends."""
_BOUNDLESS = 2**60
_EFFORT = 150_000_000
"""Labels, by layers, after which a search gives up as if nothing fitted."""


@dataclass(frozen=True, slots=True)
class LeastMemoryPlan:
    """A plan that needs little memory."""

    plan: Plan  # priced
    budget: Budget  # the least that it fits, in the proportion of the one asked for


def infeasible(request: Request, pricer: LayerPricer) -> InfeasibleError:
    """The error for a budget that is too small: the smallest that fits, and what would have to give."""
    slack = 0.0 if len(request.graph.layers) <= _EXACT_LAYERS else _SLACK
    lean = leanest(request, pricer, slack)
    if lean is None:
        return InfeasibleError(
            f"No plan of {request.graph.name} exists on {request.devices} devices with a batch of "
            f"{request.global_batch}: no way to split its layers divides the batch and has figures in the profile. "
            + (unglued(request) or "Give another batch, other devices, or profile more tensor degrees.")
        )
    asked = as_budget(request.budget)
    before = asked.scaled(1.0 / (1.0 - request.margin)).plus(1) if request.margin else asked
    shares = " and ".join(f"{format_budget(size)} ({name})" for name, size in before.own)
    return InfeasibleError(
        f"--mem {shares or format_budget(bytes_on(before, ''))}: no plan of {request.graph.name} fits on "
        f"{request.devices} devices; {_needed(request, lean, slack)}. "
        "Use more devices (--fewest says how many) or a shorter sequence.",
        _with_margin(request, lean.budget.most),
    )


def _needed(request: Request, lean: LeastMemoryPlan, slack: float) -> str:
    about = "about " * bool(slack)
    if not as_budget(request.budget).own:
        return f"the smallest budget is {about}{format_budget(_with_margin(request, lean.budget.most), up=True)}"
    needs = [(name, _with_margin(request, size)) for name, size in lean.budget.own]
    parts = (f"{format_budget(size, up=True)} ({name})" for name, size in needs)
    return f"the smallest budgets, in about the proportion of those given, are {about}{' and '.join(parts)}"


def _with_margin(request: Request, size: int) -> int:
    return ceil(size / (1.0 - request.margin))


def leanest(request: Request, pricer: LayerPricer, slack: float = 0.0) -> LeastMemoryPlan | None:
    """A plan of the space that needs little memory; None where the space is empty.

    Args:
        request: what is asked for; of its budget only the proportion between types of devices matters.
        pricer: prices layers.
        slack: 0.0: no plan needs less; else the search ends where nothing is met below ``1 - slack`` of the memory.
    """
    asked = as_budget(request.budget)
    unit = asked.scaled(1.0) if asked.own else Budget(1)
    effort = _EFFORT // len(request.graph.layers)

    def fitting(budget: Budget, exact: bool = True) -> LeastMemoryPlan | None:
        wanted = replace(request, budget=budget if asked.own else budget.least)
        result = search(wanted, pricer, exact=exact, slack=1.0, effort=effort, below=ANY_TIME)
        if result is None:
            return None
        plan = finished(wanted, pricer, result)
        factor = max(stage.memory.total / unit.of(stage.device) for stage in plan.stages)
        if not plan.schedule.simple:  # a search counts more than is priced
            factor = min(2.0 * factor, budget.most / unit.most)
        return LeastMemoryPlan(plan, unit.scaled(factor).plus(bool(asked.own)))

    boundless = unit.scaled(_BOUNDLESS / unit.most)
    best, low = fitting(boundless), 0
    if best is None:
        return None
    while (high := best.budget.most) - low > _SLACK * high:  # by quick searches, which prove nothing
        middle = (low + high) // 2
        found = fitting(unit.scaled(middle / unit.most), exact=False)
        best, low = (best, middle) if found is None else (found, low)
    low, step = 0, max(slack, _SLACK)
    while (high := best.budget.most) - low > max(1, ceil(slack * high)):
        middle = max((low + high) // 2, int((1.0 - step) * high)) if slack or not low else (low + high) // 2
        found = fitting(unit.scaled(middle / unit.most))
        best, low = (best, middle) if found is None else (found, low)
        step = max(slack, step / 2) if found is None else min(2 * step, 0.5)
    return best


_FIRST_EFFORT = 300_000
"""Labels after which a search gives up."""


def relief(request: Request, session: Session, backend: str) -> str:
    """Sentences on what alone makes a plan fit, each with such a plan; empty where nothing of it does.

    Args:
        request: that no plan fits.
        session: of the profile.
        backend: that the request is for.
    """
    found = []
    for said, asked in _wider(request, session, backend):
        plan = _first_plan(asked, session.pricer)
        if plan:
            found.append(f"It fits {said}: {plan}.")
    for said, asked in _reserved(request, session, backend):
        plan = _first_plan(asked, session.pricer, 10 * _FIRST_EFFORT)  # the one remedy that needs no other machine
        if plan:
            found.append(f"It fits {said}: {plan}.")
            break
    for more in _larger(request, session):
        asked, own = _on(request, more, backend, session.mode)
        plan = _first_plan(asked, own.pricer)
        if plan:
            found.append(f"It fits on {asked.devices} devices: {plan}.")
            break
    return " ".join(found)


def _larger(request: Request, session: Session) -> Iterator[Profile]:
    """The profile on a cluster of half as many nodes more, of twice and of four times as many."""
    profile, cluster = session.profile, session.profile.cluster
    outer = cluster.levels[-1]
    if not cluster.alike or len(cluster.levels) < 2 or request.devices < cluster.devices:
        return
    for size in (*([outer.size * 3 // 2] * (outer.size % 2 == 0)), 2 * outer.size, 4 * outer.size):
        group = replace(cluster.groups[0], count=cluster.devices // outer.size * size)
        levels = (*cluster.levels[:-1], replace(outer, size=size))
        yield profile.on(replace(cluster, levels=levels, groups=(group,)))


def _on(request: Request, profile: Profile, backend: str, mode: Mode) -> tuple[Request, Session]:
    session = Session(profile, mode)
    space, known = session.space(backend_named(backend))
    return replace(request, devices=profile.cluster.devices, space=space, known=known), session


def _wider(request: Request, session: Session, backend: str) -> Iterator[tuple[str, Request]]:
    for said, fixed in _lifted(request.fixed):
        yield said, replace(request, fixed=fixed)
    if backend != ANY.name:
        space, known = session.space(ANY)
        yield f"with --backend {ANY.name}", replace(request, schedules=ANY.schedules, space=space, known=known)


def _reserved(request: Request, session: Session, backend: str) -> Iterator[tuple[str, Request]]:
    """The request with what the backend tries only where it is asked for (host memory)."""
    if not session.profile.cluster.device.host_bandwidth:
        return
    fixed, pinned = request.fixed, {name for name, _ in request.fixed.pinned}
    for name, usual in backend_named(backend).reserved.items():
        if name in pinned or name in fixed.forbidden or not isinstance(usual, Enum):
            continue
        for value in type(usual):
            if value is not usual:
                said = f"with --fix {typed_name(name)}={value.value}"
                yield said, replace(request, fixed=replace(fixed, strategy=(*fixed.strategy, (name, value))))


def _lifted(fixed: Fixed) -> Iterator[tuple[str, Fixed]]:
    pinned = (
        ("pp", fixed.pipeline, replace(fixed, pipeline=None)),
        ("microbatches", fixed.microbatches, replace(fixed, microbatches=None)),
        ("virtual", fixed.virtual, replace(fixed, virtual=None)),
        ("schedule", fixed.schedule, replace(fixed, schedule=None)),
    )
    for name, value, without in pinned:
        if value is not None:
            yield f"without --fix {name}", without
    for pin in fixed.strategy:
        yield (
            f"without --fix {typed_name(pin[0])}",
            replace(fixed, strategy=tuple(own for own in fixed.strategy if own != pin)),
        )
    for own in fixed.layers:
        layers, name, pinned_value = own
        plain = getattr(Strategy(), name)
        if pinned_value != plain:
            rest = tuple((layers, name, plain) if other == own else other for other in fixed.layers)
            said = getattr(plain, "value", plain)
            yield f"with --fix {layers}.{typed_name(name)}={said}", replace(fixed, layers=rest)
    for dimension in fixed.forbidden:
        rest_of = tuple(other for other in fixed.forbidden if other != dimension)
        yield f"without --forbid {dimension}", replace(fixed, forbidden=rest_of)


def _first_plan(request: Request, pricer: LayerPricer, effort: int = _FIRST_EFFORT) -> str:
    """A plan in a line, the first that a search meets; empty where none is met."""
    try:
        found = search(request, pricer, slack=1.0, effort=effort, below=ANY_TIME)
    except InputError:
        return ""
    return "" if found is None else summary(plain(request, found))
