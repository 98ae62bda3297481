"""Why a plan is as it is: everything that is known of it, put together. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from galvatron_lite.cluster.budget import Budget, as_budget
from galvatron_lite.cost.timeline import untimed
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.explainer.asking import Clock, OutOfTimeError, Progress
from galvatron_lite.explainer.bounds import bounds
from galvatron_lite.explainer.choices import choices
from galvatron_lite.explainer.memory import memory_of
from galvatron_lite.explainer.price import in_its_shape, price_of_memory, with_less, with_stairs
from galvatron_lite.explainer.priced import Priced, explained_in_parts, taken_apart
from galvatron_lite.explainer.runners_up import runners_up
from galvatron_lite.explainer.schema import Explanation, MemoryPrice, RunnerUp, StageMemory, WhatIf
from galvatron_lite.explainer.time import account
from galvatron_lite.explainer.trust import trust_in
from galvatron_lite.explainer.what_ifs import what_ifs
from galvatron_lite.parallelism.backends import Backend, backend_named
from galvatron_lite.plans.describe import headline
from galvatron_lite.plans.schema import Plan, Prediction
from galvatron_lite.questions.setting import Setting
from galvatron_lite.search.planner import request_of
from galvatron_lite.search.shapes import Request

SECONDS = 120.0
"""For planning anew, where nobody says."""
MOST_ASKED = 24
"""Searches that an explanation makes, about."""
_NOT_WANTED = "prices by planning anew, runner-ups and what-ifs: not asked for (--no-what-if)"


@dataclass(slots=True)
class _Anew:
    """What planning anew told."""

    price: MemoryPrice | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    left_out: tuple[str, ...] = ()


def explain_plan(
    setting: Setting,
    plan: Plan,
    *,
    what_if: bool = True,
    seconds: float | None = SECONDS,
    progress: Progress | None = None,
) -> Explanation:
    """Why a plan is as it is.

    Args:
        setting: what the plan was chosen from; its budget is the plan's.
        plan: with its prediction, priced with the setting's profile.
        what_if: whether to plan anew for prices, runner-ups and what-ifs; else the price is among plans of the plan's
            own pipeline and micro-batches.
        seconds: for planning anew; what there was no time for is said. None: no end.
        progress: called with (done, in all, what is looked at).

    Raises:
        InputError: the plan does not fit the profile's model.
    """
    if plan.provenance is not None:
        setting = replace(setting, tolerance=plan.provenance.tolerance, margin=plan.provenance.margin)
    budget = as_budget(setting.budget_at(plan.devices))
    clock = Clock(seconds, progress, MOST_ASKED)
    priced = taken_apart(setting.session(plan.devices).pricer, plan) if explained_in_parts(plan) else None
    anew = _anew(setting, plan, budget, clock, what_if=what_if)
    return _put_together(setting, plan, budget, priced, anew)


def _put_together(setting: Setting, plan: Plan, budget: Budget, priced: Priced | None, anew: _Anew) -> Explanation:
    prediction = _prediction(plan)
    session, backend = setting.session(plan.devices), backend_named(setting.backend)
    time = memory = runs = bound = None
    if priced is not None:
        time, memory = account(priced), memory_of(priced, budget)
        runs = choices(priced, session.space(backend)[0], lambda other: _fits(other, budget))
        bound = bounds(priced, time, runs, memory, anew.price, anew.what_ifs)
    price = anew.price
    return Explanation(
        model=plan.model,
        headline=headline(plan),
        profile=session.profile.name,
        devices=plan.devices,
        batch=plan.global_batch,
        microbatches=plan.microbatches,
        step_seconds=prediction.step_seconds,
        samples_per_second=prediction.samples_per_second,
        best_step_seconds=None if price is None or price.same_shape else price.step_seconds,
        time=time,
        runs=runs or (),
        memory=memory or _plain_memory(plan, budget),
        bounds=bound or (),
        price=price,
        runners_up=anew.runners_up,
        what_ifs=anew.what_ifs,
        trust=trust_in(session.profile),
        left_out=(*_unsaid(plan), *anew.left_out),
        notes=plan.provenance.notes if plan.provenance else (),
    )


def _prediction(plan: Plan) -> Prediction:
    if plan.prediction is None:
        raise InputError("plan", plan.model, "It has no prediction: price it first (galvatron evaluate).")
    return plan.prediction


def _fits(plan: Plan, budget: Budget) -> bool:
    return all(stage.memory.total <= budget.of(stage.device) for stage in plan.stages)


def _plain_memory(plan: Plan, budget: Budget) -> tuple[StageMemory, ...]:
    """Memory of the stages of a plan that is not taken apart: no moment is known."""
    return tuple(
        StageMemory(number, (number,), stage.memory.total, budget.of(stage.device), "", "", -1, stage.memory)
        for number, stage in enumerate(plan.stages)
    )


def _unsaid(plan: Plan) -> list[str]:
    """What is not said of plans of its kind."""
    said = []
    if plan.branches:
        said.append("time by part, runs of layers and bounds: branches on devices of their own are priced as regions")
    if plan.cyclic is not None:
        said.append("time by part, runs of layers and bounds: passes of delayed gradients go round, and are priced so")
    if explained_in_parts(plan) and untimed(plan):
        said.append(f"the moment of the worst memory: {untimed(plan)}")
    return said


def _anew(setting: Setting, plan: Plan, budget: Budget, clock: Clock, *, what_if: bool) -> _Anew:
    """What planning anew tells, as far as the time goes."""
    if not what_if:
        told = _Anew(left_out=(_NOT_WANTED,))
        if explained_in_parts(plan):
            told.price, left = _price(setting, plan, budget, clock, same_shape=True)
            told.left_out += left
            if told.price is not None:
                told.price = with_stairs(told.price, in_its_shape(setting, plan), clock, plan, budget)
        return told
    told = _Anew()
    told.price, left = _price(setting, plan, budget, clock, same_shape=False)
    rate = _rate(plan, told.price)
    told.what_ifs = what_ifs(setting, clock, plan, budget, rate)
    said = ""
    if explained_in_parts(plan):
        session, backend = setting.session(plan.devices), backend_named(setting.backend)
        request = _request(setting, plan, budget, backend)
        told.runners_up, said = runners_up(session, request, clock, plan)
    else:
        said = "runner-ups by dimension: they are looked for among plans of stages alone"
    if told.price is not None:
        told.price = with_stairs(with_less(told.price, setting, clock, plan, budget), setting, clock, plan, budget)
    told.left_out = (*left, *filter(None, (said,)))
    return told


def _request(setting: Setting, plan: Plan, budget: Budget, backend: Backend) -> Request:
    session = setting.session(plan.devices)
    fixed = setting.pins.at(plan.devices, plan.global_batch)
    return request_of(session, plan.devices, plan.global_batch, budget, fixed, setting.schedules, backend)


def _rate(plan: Plan, price: MemoryPrice | None) -> float:
    """Samples a second of the fastest plan now, or of the plan where that is not known."""
    seconds = _prediction(plan).step_seconds if price is None else price.step_seconds
    return plan.global_batch / seconds if seconds else inf


def _price(
    setting: Setting, plan: Plan, budget: Budget, clock: Clock, *, same_shape: bool
) -> tuple[MemoryPrice | None, tuple[str, ...]]:
    """The price of memory, or why there is none."""
    try:
        return price_of_memory(setting, clock, plan, budget, same_shape=same_shape), ()
    except (OutOfTimeError, InfeasibleError, InputError) as error:
        return None, (f"the price of memory: {error}",)
