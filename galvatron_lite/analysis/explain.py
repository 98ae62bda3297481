"""Why a plan is as it is: time, memory, choices, what binds, prices and what-ifs in one explanation.

Bounds in seconds come from planning again (``what_ifs``). Without it, a bound lists what is exposed, which is the
most that could be saved, and the neighbours that would be quicker and do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from galvatron_lite.analysis.explanation import (
    Bound,
    Constants,
    Constraint,
    Explanation,
    MemoryPrice,
    RunChoice,
    RunnerUp,
    StageMemory,
    TimeAccount,
    TimeClass,
    Trust,
    WhatIf,
    expected_error,
)
from galvatron_lite.analysis.neighbours import choices, runners_up
from galvatron_lite.analysis.setting import PlanSetting
from galvatron_lite.analysis.step_time import BUBBLE, PricedStages, account, explained_in_parts, memory_of, taken_apart
from galvatron_lite.analysis.what_ifs import (
    OutOfTimeError,
    Progress,
    TimeLimit,
    in_its_shape,
    price_of_memory,
    what_ifs,
    with_less,
    with_stairs,
)
from galvatron_lite.calibration.store import DEFAULT, entry_for, load_calibration
from galvatron_lite.cluster.budget import as_budget
from galvatron_lite.cost.timeline import untimed
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.backends import backend_named
from galvatron_lite.plans.describe import headline
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.search.planner import request_of
from galvatron_lite.search.result import summary
from galvatron_lite.units import format_budget, format_bytes, format_seconds


def _trust_in(profile: Profile) -> Trust:
    origin, links, calibration = profile.origin, profile.communication_origin, load_calibration()
    estimated, expected = origin.kind is OriginKind.ESTIMATED, expected_error(profile.graph, calibration)
    residuals = [fit.residual for fit in profile.fits]
    constants, missing = list[Constants](), list[str]()
    if estimated:
        names = [entry_for(calibration, "devices", group.device.name, DEFAULT) for group in profile.cluster.types]
        for name in dict.fromkeys(f"devices/{name}" for name in names):
            if (fit := calibration.origins.get(name)) is not None:
                constants.append(Constants(name, fit.rows, fit.residual, fit.source))
        if expected.error is None:
            missing.append(f"the error of estimated step times of {expected.models}")
    else:
        missing.append("the error of a measured profile: train some steps and compare (galvatron diagnose)")
    missing.append("the error of prices and what-ifs, which are differences of two predictions")
    error = expected.error if estimated else None
    return Trust(
        layers=origin.kind.value,
        layers_source=", ".join(filter(None, (origin.source, origin.date))),
        communication=links.kind.value,
        communication_source=", ".join(filter(None, (links.source, links.date))),
        spread=origin.spread,
        links_residual=median(residuals) if residuals else None,
        constants=tuple(constants),
        error=error,
        error_of="" if error is None else f"step times of {expected.models} ({expected.source}; galvatron validate)",
        missing=tuple(missing),
    )


WORTH = 0.01  # share of a step that a constraint must cost to be called one


def bounds(
    priced: PricedStages,
    time: TimeAccount,
    runs: Sequence[RunChoice],
    memory: Sequence[StageMemory],
    price: MemoryPrice | None,
    what_ifs: Sequence[WhatIf],
) -> tuple[Bound, ...]:
    """Every constraint that is known of, those that bind first, the dearest of them first."""
    bounds_found = [
        _memory(memory, price, runs),
        *_links(time, what_ifs, summary(priced.plan)),
        *_batch(time, what_ifs),
        *_balance(priced),
    ]
    if not any(bound.binds for bound in bounds_found):
        bounds_found.append(_compute(time, price, what_ifs))
    return tuple(sorted(bounds_found, key=lambda bound: (not bound.binds, -(bound.seconds or 0.0))))


def _compute(time: TimeAccount, price: MemoryPrice | None, what_ifs: Sequence[WhatIf]) -> Bound:
    """What is left where nothing else binds; not known to bind where something else was not tried."""
    share = f"compute: {time.seconds_of(TimeClass.COMPUTE) / time.step_seconds:.0%} of the step"
    others = [one for one in what_ifs if one.name.startswith("links_") or one.name == "batch_twice"]
    left = ["more memory"] * (price is None)
    left += [one.change for one in others if one.gain is None] if what_ifs else ["quicker links", "a larger batch"]
    verdict = f"; whether anything binds is not known: {_not_tried(left)}" if left else ", and nothing above binds"
    return Bound(Constraint.COMPUTE, share + verdict, None, not left)


def _memory(memory: Sequence[StageMemory], price: MemoryPrice | None, runs: Sequence[RunChoice]) -> Bound:
    """Of the group whose memory binds: of those that a quicker plan needs more in, else of all, the fullest one."""
    wanted = [stage for stage in memory if price is not None and stage.group in price.wanted_groups]
    full = max(wanted or memory, key=lambda stage: stage.used_bytes / max(stage.budget_bytes, 1))
    where = f"stage {', '.join(map(str, full.stages))}" if len(memory) > 1 else "every device"
    when = f", at its worst in {full.moment}" if full.moment else ""
    text = f"memory of {where}: {format_bytes(full.used_bytes)} of {format_bytes(full.budget_bytes)}{when}"
    if price is None:
        every = [one for run in runs for one in run.neighbours if one.added_step_seconds < 0 and not one.fits]
        quicker = min(every, key=lambda one: one.added_step_seconds, default=None)
        worth = "" if quicker is None else f"; {quicker.strategy} would be quicker there and does not fit"
        return Bound(Constraint.MEMORY, text + worth, None, quicker is not None)
    saved = price.step_seconds - price.then_step_seconds
    among = " with this pipeline and these micro-batches" if price.same_shape else ""
    gain = f"{format_seconds(saved)} a step" if saved > 0 else "nothing"
    worth = f"; {format_budget(price.added_bytes)} more on every device saves {gain}{among}"
    return Bound(Constraint.MEMORY, text + worth, saved, saved > 0)


def _not_tried(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} not tried"


def _links(time: TimeAccount, what_ifs: Sequence[WhatIf], now: str) -> Iterator[Bound]:
    """``now``: the plan in words."""
    parts = [part for part in time.parts if part.what is TimeClass.COMMUNICATION]
    exposed = sum(part.seconds for part in parts)
    kinds = ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in parts if part.seconds > 0)
    told = f"communication that is not hidden: {format_seconds(exposed)} of the step" + (f" ({kinds})" if kinds else "")
    changes = [one for one in what_ifs if one.name.startswith("links_")]
    tried = [change for change in changes if change.gain is not None]
    if not tried:
        yield _at_most(Constraint.LINK, told, exposed, time, [change.change for change in changes])
    for place, one in enumerate(tried):
        seconds = _saved(time, one)
        text = f"{one.change}: {_gained(seconds, one, now)}"
        binds = seconds > WORTH * time.step_seconds
        yield Bound(Constraint.LINK, f"{told}; {text}" if place == 0 else text, seconds, binds)


def _batch(time: TimeAccount, what_ifs: Sequence[WhatIf]) -> Iterator[Bound]:
    bubble = sum(part.seconds for part in time.parts if part.name == BUBBLE)
    waits = f"waiting for other stages takes {format_seconds(bubble)} of the step" if bubble else ""
    changes = [one for one in what_ifs if one.name == "batch_twice"]
    for change in changes:
        if change.gain is not None:
            seconds = _saved(time, change)
            text = "; ".join(filter(None, (f"the batch: {change.change} gives {change.gain:+.1%} samples/s", waits)))
            yield Bound(Constraint.BATCH, text, seconds, seconds > WORTH * time.step_seconds)
            return
    if waits:
        yield _at_most(Constraint.BATCH, f"the batch: {waits}", bubble, time, [change.change for change in changes])


def _at_most(what: Constraint, words: str, seconds: float, time: TimeAccount, changes: Sequence[str]) -> Bound:
    """A constraint of which only what it costs at most is known, as nothing was planned anew without it."""
    binds = seconds > WORTH * time.step_seconds
    tried = f"; {_not_tried(changes)}" if changes else ""
    return Bound(what, f"{words}{', the most that could be saved' if binds else ''}{tried}", seconds, binds)


def _saved(time: TimeAccount, one: WhatIf) -> float:
    return time.step_seconds * (1.0 - 1.0 / (1.0 + one.gain)) if one.gain is not None else 0.0


def _gained(seconds: float, one: WhatIf, now: str) -> str:
    if seconds <= 0:
        return "saves nothing"
    other = ", by going over to another plan" if one.summary != now else ""
    return f"saves {format_seconds(seconds)} a step ({one.gain:+.1%} samples/s){other}"


def _balance(priced: PricedStages) -> Iterator[Bound]:
    """How much longer the busiest group works than all do on average: layers are whole, and stages are of them."""
    if priced.shape.stages == 1:
        return
    work = [
        priced.shape.microbatches * sum(cost.times.total for cost in group) + sum(cost.step for cost in group)
        for group in priced.groups
    ]
    longer = max(work) - sum(work) / len(work)
    text = (
        f"layers do not divide evenly: the devices of stage {', '.join(map(str, priced.stages_of(priced.busiest)))} "
        f"work {format_seconds(longer)} a step longer than those of all stages on average"
    )
    yield Bound(Constraint.BALANCE, text, longer, longer > WORTH * priced.prediction.step_seconds)


SECONDS = 120.0  # for new searches, where nobody says
MOST_ASKED = 24  # searches that an explanation makes, about
_NOT_WANTED = "searches for prices, runner-ups and what-ifs (--no-what-if)"


def explain_plan(
    setting: PlanSetting,
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
        what_if: whether to search again for prices, runner-ups and what-ifs; else the price is among plans of the
            plan's own pipeline and micro-batches.
        seconds: for new searches; what there is no time for is listed as skipped. None: no limit.
        progress: called with (done, in all, what is looked at).
    """
    prediction = plan.prediction
    if prediction is None:
        raise InputError("plan", plan.model, "It has no prediction: price it first (galvatron evaluate).")
    if plan.provenance is not None:
        setting = replace(setting, tolerance=plan.provenance.tolerance, margin=plan.provenance.margin)
    budget = as_budget(setting.budget_at(plan.devices))
    clock, session = TimeLimit(seconds, progress, MOST_ASKED), setting.session(plan.devices)
    backend, in_parts = backend_named(setting.backend), explained_in_parts(plan)
    priced = taken_apart(session.pricer, plan) if in_parts else None
    skipped = _not_explained(plan)

    price, changes, others = None, tuple[WhatIf, ...](), tuple[RunnerUp, ...]()
    if what_if or in_parts:
        try:
            price = price_of_memory(setting, clock, plan, budget, same_shape=not what_if)
        except (OutOfTimeError, InfeasibleError, InputError) as error:
            skipped.append(f"the price of memory: {error}")
    if what_if:
        fastest = prediction.step_seconds if price is None else price.step_seconds
        changes = what_ifs(setting, clock, plan, budget, plan.global_batch / fastest if fastest else inf)
        reason = "runner-ups by dimension: they are looked for among plans of stages alone"
        if in_parts:
            fixed = setting.pins.at(plan.devices, plan.global_batch)
            request = request_of(session, plan.devices, plan.global_batch, budget, fixed, setting.schedules, backend)
            others, reason = runners_up(session, request, clock, plan, backend.reserved)
        skipped += [reason] * bool(reason)
    else:
        skipped.append(_NOT_WANTED)
    if price is not None:
        price = with_less(price, setting, clock, plan, budget) if what_if else price
        price = with_stairs(price, setting if what_if else in_its_shape(setting, plan), clock, plan, budget)

    time, runs, bound = None, tuple[RunChoice, ...](), tuple[Bound, ...]()
    memory = tuple(
        StageMemory(number, (number,), stage.memory.total, budget.of(stage.device), "", "", -1, stage.memory)
        for number, stage in enumerate(plan.stages)
    )  # of a plan that is not taken apart no moment is known
    if priced is not None:
        time, memory = account(priced), memory_of(priced, budget)

        def fits(other: Plan) -> bool:
            return all(stage.memory.total <= budget.of(stage.device) for stage in other.stages)

        runs = choices(priced, session.space(backend)[0], fits)
        bound = bounds(priced, time, runs, memory, price, changes)
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
        runs=runs,
        memory=memory,
        bounds=bound,
        price=price,
        runners_up=others,
        what_ifs=changes,
        trust=_trust_in(session.profile),
        left_out=tuple(skipped),
        notes=plan.provenance.notes if plan.provenance else (),
    )


def _not_explained(plan: Plan) -> list[str]:
    """What is not explained of plans of its kind."""
    parts = "time by part, runs of layers and bounds"
    skipped = [f"{parts}: branches on devices of their own are priced as regions"] * bool(plan.branches)
    if plan.cyclic is not None:
        skipped.append(f"{parts}: passes of delayed gradients go round, and are priced so")
    if explained_in_parts(plan) and untimed(plan):
        skipped.append(f"the moment of the worst memory: {untimed(plan)}")
    return skipped
