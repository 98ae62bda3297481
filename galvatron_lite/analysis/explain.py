"""Explain a plan: where time and memory go, what each choice gains, what limits the step, and what would change it.

What a limit costs in seconds comes from planning again without it (``what_ifs``). Without these searches only the most
that it can cost is known (the seconds that are exposed), and which quicker neighbours do not fit.
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
from galvatron_lite.analysis.neighbours import run_choices, runners_up
from galvatron_lite.analysis.setting import PlanSetting
from galvatron_lite.analysis.step_time import (
    BUBBLE,
    PricedStages,
    account,
    explained_in_parts,
    memory_of,
    price_in_parts,
)
from galvatron_lite.analysis.what_ifs import (
    OutOfTimeError,
    Progress,
    Replanner,
    TimeLimit,
    price_of_memory,
    what_ifs,
    with_less,
    with_steps,
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
from galvatron_lite.search.shapes import Session
from galvatron_lite.units import format_budget, format_bytes, format_seconds

SECONDS = 120.0  # default time limit of all searches
MOST_SEARCHES = 24  # that an explanation makes, about
WORTH = 0.01  # share of a step from which what a constraint costs counts


def explain_plan(
    setting: PlanSetting,
    plan: Plan,
    *,
    what_if: bool = True,
    seconds: float | None = SECONDS,
    progress: Progress | None = None,
) -> Explanation:
    """Explain a plan.

    Args:
        setting: what the plan was searched from; its budget is the plan's.
        plan: with its prediction, priced with the setting's profile.
        what_if: search again for the price of memory, runners-up and what-ifs. If False, the price is among plans with
            the plan's pipeline and micro-batches.
        seconds: time limit of all searches; what is left over is listed as skipped. None: no limit.
        progress: called with (done, total, label).

    Raises:
        InputError: the plan has no prediction.
    """
    prediction = plan.prediction
    if prediction is None:
        raise InputError("plan", plan.model, "It has no prediction: price it first (galvatron evaluate).")
    if plan.provenance is not None:
        setting = replace(setting, tolerance=plan.provenance.tolerance, margin=plan.provenance.margin)
    budget, session = as_budget(setting.budget_at(plan.devices)), setting.session(plan.devices)
    replanner = Replanner(setting, TimeLimit(seconds, progress, MOST_SEARCHES), plan, budget)
    priced = price_in_parts(session.pricer, plan) if explained_in_parts(plan) else None
    skipped = _not_explained(plan)
    price, changes, others = _searched_again(replanner, session, skipped, what_if=what_if)

    time, runs, bound = None, tuple[RunChoice, ...](), tuple[Bound, ...]()
    if priced is None:  # then the moment of the worst memory is not known
        memory = tuple(
            StageMemory(number, (number,), stage.memory.total, budget.of(stage.device), "", "", -1, stage.memory)
            for number, stage in enumerate(plan.stages)
        )
    else:
        time, memory = account(priced), memory_of(priced, budget)

        def fits(other: Plan) -> bool:
            return all(stage.memory.total <= budget.of(stage.device) for stage in other.stages)

        runs = run_choices(priced, session.space(backend_named(setting.backend))[0], fits)
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


def _searched_again(
    replanner: Replanner, session: Session, skipped: list[str], *, what_if: bool
) -> tuple[MemoryPrice | None, tuple[WhatIf, ...], tuple[RunnerUp, ...]]:
    """The price of memory, what-ifs and runners-up; appends to ``skipped`` what is missing, and why."""
    plan, setting, in_parts = replanner.plan, replanner.setting, explained_in_parts(replanner.plan)
    price, changes, others = None, tuple[WhatIf, ...](), tuple[RunnerUp, ...]()
    if what_if or in_parts:
        try:
            price = price_of_memory(replanner, same_shape=not what_if)
        except (OutOfTimeError, InfeasibleError, InputError) as error:
            skipped.append(f"the price of memory: {error}")
    if not what_if:
        skipped.append("searches for prices, runner-ups and what-ifs (--no-what-if)")
        return (None if price is None else with_steps(price, replanner.in_same_shape())), changes, others
    assert plan.prediction is not None
    fastest = plan.prediction.step_seconds if price is None else price.step_seconds
    changes = what_ifs(replanner, plan.global_batch / fastest if fastest else inf)
    reason = "runner-ups by dimension: they are looked for among plans of stages alone"
    if in_parts:
        fixed, backend = setting.pins.at(plan.devices, plan.global_batch), backend_named(setting.backend)
        request = request_of(
            session, plan.devices, plan.global_batch, replanner.budget, fixed, setting.schedules, backend
        )
        others, reason = runners_up(session, request, replanner.clock, plan, backend.reserved)
    skipped += [reason] * bool(reason)
    if price is not None:
        price = with_steps(with_less(price, replanner), replanner)
    return price, changes, others


def _not_explained(plan: Plan) -> list[str]:
    """What is not explained of plans of this kind, and why."""
    parts = "time by part, runs of layers and bounds"
    skipped = [f"{parts}: branches on devices of their own are priced as regions"] * bool(plan.branches)
    if plan.cyclic is not None:
        skipped.append(f"{parts}: passes of delayed gradients go round, and are priced so")
    if explained_in_parts(plan) and untimed(plan):
        skipped.append(f"the moment of the worst memory: {untimed(plan)}")
    return skipped


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


def bounds(
    priced: PricedStages,
    time: TimeAccount,
    runs: Sequence[RunChoice],
    memory: Sequence[StageMemory],
    price: MemoryPrice | None,
    changes: Sequence[WhatIf],
) -> tuple[Bound, ...]:
    """Return the constraints on the step time; those that bind come first, the most expensive one first."""
    every_bound = [
        _memory_bound(memory, price, runs),
        *_link_bounds(time, changes, summary(priced.plan)),
        *_batch_bounds(time, changes),
        *_balance_bounds(priced),
    ]
    if not any(bound.binds for bound in every_bound):
        every_bound.append(_compute_bound(time, price, changes))
    return tuple(sorted(every_bound, key=lambda bound: (not bound.binds, -(bound.seconds or 0.0))))


def _memory_bound(memory: Sequence[StageMemory], price: MemoryPrice | None, runs: Sequence[RunChoice]) -> Bound:
    """Memory of the fullest group of devices, of those that a quicker plan wants more memory for, if there are any."""
    wanted = [stage for stage in memory if price is not None and stage.group in price.wanted_groups]
    full = max(wanted or memory, key=lambda stage: stage.used_bytes / max(stage.budget_bytes, 1))
    where = f"stage {', '.join(map(str, full.stages))}" if len(memory) > 1 else "every device"
    when = f", at its worst in {full.moment}" if full.moment else ""
    text = f"memory of {where}: {format_bytes(full.used_bytes)} of {format_bytes(full.budget_bytes)}{when}"
    if price is None:
        neighbours = [neighbour for run in runs for neighbour in run.neighbours]
        quicker = min(
            (neighbour for neighbour in neighbours if neighbour.added_step_seconds < 0 and not neighbour.fits),
            key=lambda neighbour: neighbour.added_step_seconds,
            default=None,
        )
        worth = "" if quicker is None else f"; {quicker.strategy} would be quicker there and does not fit"
        return Bound(Constraint.MEMORY, text + worth, None, quicker is not None)
    saved = price.step_seconds - price.then_step_seconds
    among = " with this pipeline and these micro-batches" if price.same_shape else ""
    gain = f"{format_seconds(saved)} a step" if saved > 0 else "nothing"
    worth = f"; {format_budget(price.added_bytes)} more on every device saves {gain}{among}"
    return Bound(Constraint.MEMORY, text + worth, saved, saved > 0)


def _link_bounds(time: TimeAccount, changes: Sequence[WhatIf], current: str) -> Iterator[Bound]:
    """One bound for the links of each level; ``current``: a summary of the plan."""
    parts = [part for part in time.parts if part.what is TimeClass.COMMUNICATION]
    exposed = sum(part.seconds for part in parts)
    causes = ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in parts if part.seconds > 0)
    text = f"communication that is not hidden: {format_seconds(exposed)} of the step" + (
        f" ({causes})" if causes else ""
    )
    changes = [change for change in changes if change.name.startswith("links_")]
    tried = [change for change in changes if change.gain is not None]
    if not tried:
        yield _bound_at_most(Constraint.LINK, text, exposed, time, changes)
    for number, change in enumerate(tried):
        seconds = _saved_seconds(time, change)
        other = ", by going over to another plan" if change.summary != current else ""
        gain = f"saves {format_seconds(seconds)} a step ({change.gain:+.1%} samples/s){other}"
        words = f"{change.change}: {gain if seconds > 0 else 'saves nothing'}"
        binds = seconds > WORTH * time.step_seconds
        yield Bound(Constraint.LINK, f"{text}; {words}" if number == 0 else words, seconds, binds)


def _batch_bounds(time: TimeAccount, changes: Sequence[WhatIf]) -> Iterator[Bound]:
    """A larger batch, if it was tried, or the bubble that it would fill."""
    bubble = sum(part.seconds for part in time.parts if part.name == BUBBLE)
    waits = f"waiting for other stages takes {format_seconds(bubble)} of the step" if bubble else ""
    changes = [change for change in changes if change.name == "batch_twice"]
    tried = next((change for change in changes if change.gain is not None), None)
    if tried is not None:
        seconds = _saved_seconds(time, tried)
        text = "; ".join(filter(None, (f"the batch: {tried.change} gives {tried.gain:+.1%} samples/s", waits)))
        yield Bound(Constraint.BATCH, text, seconds, seconds > WORTH * time.step_seconds)
    elif waits:
        yield _bound_at_most(Constraint.BATCH, f"the batch: {waits}", bubble, time, changes)


def _balance_bounds(priced: PricedStages) -> Iterator[Bound]:
    """How much longer the busiest group of devices works than all groups on average."""
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


def _compute_bound(time: TimeAccount, price: MemoryPrice | None, changes: Sequence[WhatIf]) -> Bound:
    """Compute, which limits the step if nothing else does; it is said not to be known if something was not tried."""
    text = f"compute: {time.seconds_of(TimeClass.COMPUTE) / time.step_seconds:.0%} of the step"
    untried = ["more memory"] * (price is None)
    if changes:
        others = [change for change in changes if change.name.startswith("links_") or change.name == "batch_twice"]
        untried += [change.change for change in others if change.gain is None]
    else:
        untried += ["quicker links", "a larger batch"]
    verdict = (
        f"; whether anything binds is not known: {_not_tried(untried)}" if untried else ", and nothing above binds"
    )
    return Bound(Constraint.COMPUTE, text + verdict, None, not untried)


def _bound_at_most(
    constraint: Constraint, text: str, seconds: float, time: TimeAccount, changes: Sequence[WhatIf]
) -> Bound:
    """A bound of which only the most that it costs is known, as no search without it was tried."""
    binds = seconds > WORTH * time.step_seconds
    tried = f"; {_not_tried([change.change for change in changes])}" if changes else ""
    return Bound(constraint, f"{text}{', the most that could be saved' if binds else ''}{tried}", seconds, binds)


def _not_tried(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} not tried"


def _saved_seconds(time: TimeAccount, change: WhatIf) -> float:
    return time.step_seconds * (1.0 - 1.0 / (1.0 + change.gain)) if change.gain is not None else 0.0
