"""The fastest plan that fits: best-first search over shapes, exact search inside each, finalists by simulation.

What is proven: no plan of the space (see ``problem`` for its rules, ``space`` for the choices) has a lesser step time
by the closed form of ``cost.schedule`` (``cost.step.bound_seconds``) than the one the search ends with, because every
shape left unsearched has a lower bound no less than that, and inside a shape ``partition`` and ``frontier`` are exact.
Times are compared in whole picoseconds. Where a chain needs more labels than ``problem.widest`` allows, or the search
more than ``MOST_WORK``, it ends early, and knows by the bounds of what was left out how far from the best it may be.

What is shown: the step time of ``cost.plan.evaluate``, for the plan and its runner-ups alike. It comes from an event
simulation and equals the closed form without a pipeline; with one it is mostly a little less. So the plan of least
closed form, the plan of one strategy a stage of each pipeline degree and good plans of other shapes
(``alternatives``) are simulated; the quickest that fits is the plan, or within a tolerance of it the simplest. The gap
says how much less than the plan's closed form that of any plan can be; or how much less than its simulated step, where
that is the smaller one (``Provenance.simulated``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import straggling
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.backends import Backend, backend_named, check_mode
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.plans.notes import plan_notes
from galvatron_lite.plans.schema import Mode, Plan, Schedule, TrainedBy
from galvatron_lite.profiler.schema import Profile, spread_note
from galvatron_lite.search.alike import with_alike
from galvatron_lite.search.alternatives import Finalist, alternatives_to, finalists, pipelines, quickest, ranges_of
from galvatron_lite.search.best_first import MOST_WORK, Progress, SolvedPlan, search
from galvatron_lite.search.branches import branch_plans
from galvatron_lite.search.checks import check_batch, check_layers, skipping, unprofiled
from galvatron_lite.search.delayed import delayed_plans, why_not_delayed
from galvatron_lite.search.infeasible import relief
from galvatron_lite.search.pins import check_pins, schedules_for
from galvatron_lite.search.result import provenance
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.simplify import SLACK, given_plans, simple, simplest
from galvatron_lite.search.space import Fixed, reasons
from galvatron_lite.search.tables import TICKS
from galvatron_lite.search.ways import Delay, PlanTask, with_one_device, with_ways

_LEAST_AHEAD = 0.1
"""Share of the tolerance that the search over everything leaves open at least."""


def find_plan(
    profile: Profile,
    *,
    devices: int,
    global_batch: int,
    budget: int | Budget,
    fixed: Fixed | None = None,
    schedules: Sequence[Schedule] | None = None,
    backend: str | Backend = "galvatron",
    certify: bool = False,
    runners_up: int = 3,
    progress: Progress | None = None,
    session: Session | None = None,
    stoppable: bool = True,
    known: Sequence[Plan] = (),
    effort: int = MOST_WORK,
    mode: Mode = Mode.TRAINING,
    delay: Delay | None = None,
    tolerance: float = 0.0,
    margin: float = 0.0,
) -> Plan:
    """The fastest plan that fits the memory budget.

    Args:
        profile: what layers and communication cost.
        devices: world size; at most what the profile's cluster has.
        global_batch: samples a step.
        budget: bytes a device, or of each type of device.
        fixed: what is not left to the search.
        schedules: to choose from where there is a pipeline; None: all that the backend runs.
        backend: what is to run the plan, or its name (``parallelism.backends``).
        certify: also solve the winning shape as an integer programme; an unequal optimum is an error. What it says is
            kept in the plan's provenance.
        runners_up: how many other plans to report; with 0 nothing is tried either that would make a plan fit.
        progress: called with (shapes done, shapes in all, what is being looked at).
        session: of the profile; makes a question that is like an earlier one quicker, and changes no answer.
        stoppable: whether Ctrl-C (KeyboardInterrupt) in the search returns the best plan so far, not proven; it is
            raised where there is none yet.
        known: plans that the user has; the answer is none that takes longer than one of them that fits and keeps the
            pins, even where a search ends early or the plan is not in the declared space.
        effort: labels after which the search ends early; 0: quick searches of the most promising shapes alone, whose
            gap says how far from the best the plan may be.
        mode: what the plan is for; of forward passes alone its step is one pass of the whole batch.
        delay: which training rules of delayed gradients may be used besides (``search.ways``); None: none.
        tolerance: share of the step time that the plan may be from the best, so as to be the simplest (``simplify``).
        margin: share of the budget that predictions keep free.

    Raises:
        InputError: a batch or a pinned value that cannot be used, pins that contradict one another, or a known plan of
            another model, batch or number of devices.
        InfeasibleError: nothing fits; names the smallest budget that would.
    """
    runner = backend if isinstance(backend, Backend) else backend_named(backend)
    check_mode(mode, runner)
    if delay is not None and delay.only and not runner.beside:
        raise InputError("--fix schedule", DELAYED_SCHEDULE, f"Backend {runner.name} trains without delay alone.")
    kept = session or Session(profile, mode)
    if kept.profile is not profile or kept.mode is not mode:
        raise InputError("session", f"{kept.profile.name}, {kept.mode}", f"It is not of {profile.name}, {mode}.")
    for name, share in (("tolerance", tolerance), ("margin", margin)):
        if not 0.0 <= share < 1.0:
            raise InputError(f"--{name}", share, "Give a share from 0 to below 1: 0.01, or 1%.")
    request = request_of(kept, devices, global_batch, budget, fixed or Fixed(), schedules, runner)
    if margin:
        request = replace(request, budget=as_budget(budget).scaled(1.0 - margin), margin=margin)
    asked = PlanTask(
        kept, request, runner, request.budget, delay, certify=certify, tolerance=0.0 if certify else tolerance
    )
    searched = partial(_ordinary, runners_up, progress, stoppable, known, effort)
    looked = partial(with_alike, searched, asked, runners_up)
    ways = (branch_plans, delayed_plans) if runner.beside else ()
    plan = with_one_device(with_ways(looked, asked, runners_up, ways), asked)
    trainer = next((one for one in TrainedBy if one == runner.name), TrainedBy.GALVATRON)
    source = plan.provenance and replace(
        plan.provenance, budget=bytes_on(budget, ""), budgets=dict(as_budget(budget).own), margin=margin,
        tolerance=asked.tolerance,
    )  # fmt: skip
    return replace(plan, backend=trainer, left_out=(*plan.left_out, *why_not_delayed(asked)), provenance=source)


def _ordinary(
    runners_up: int,
    progress: Progress | None,
    stoppable: bool,
    plans: Sequence[Plan],
    effort: int,
    task: PlanTask,
) -> Plan:
    kept, request, profile = task.session, task.request, task.session.profile
    check_batch(request)
    pricer = kept.pricer
    given = given_plans(request, pricer, plans)
    tolerance = task.tolerance
    first = given[0] if given else None
    ahead, contenders = 0.0, tuple[Finalist, ...]()
    if tolerance and effort:
        ahead = tolerance if first is None else 0.0
        first = simple(request, pricer, tolerance, first)
    if first is not None and tolerance and effort:
        contenders = pipelines(replace(request, runs=1), pricer, first, SLACK * tolerance)
        ahead = ahead and _ahead(request, pricer, first, contenders, tolerance)
    looked = partial(
        search, request, pricer, progress, stoppable=stoppable, start=first, effort=effort, ahead=ahead,
        slack=min(SLACK * tolerance, ahead or inf), settled=tolerance,
    )  # fmt: skip
    # Quick searches that meet nothing do not show that nothing fits: an exact one goes on to the first plan.
    found = (looked(exact=False) if effort == 0 else None) or looked()
    if found is None:
        from galvatron_lite.search.infeasible import infeasible

        error = infeasible(request, pricer)
        more = relief(request, kept, task.backend.name) if runners_up else ""
        raise InfeasibleError(f"{error}\n{more}".strip(), error.smallest_budget)
    least = _closed(pricer, request, found.partition.time * (1.0 - found.gap))
    if tolerance and effort and not found.stopped:
        found = simplest(request, pricer, found, tolerance)
    certificate = _certificate(found, progress) if task.certify and not found.stopped else ""
    others = replace(request, runs=1) if tolerance else request
    options = finalists(others, pricer, found, 0 if found.stopped else runners_up, given, contenders)
    if tolerance:
        ranges = ranges_of(pricer, [option.plan for option in options])
        options = tuple(replace(option, range=own) for option, own in zip(options, ranges, strict=True))
    chosen = quickest(options, tolerance, least)
    gap, shown = _gap(options[0], chosen), max(1.0 - least / chosen.seconds, 0.0)
    simulated = tolerance > 0.0 and len(chosen.plan.stages) > 1 and shown < gap
    return replace(
        chosen.plan,
        mode=kept.mode,
        alternatives=alternatives_to(options, chosen, runners_up),
        left_out=(
            *task.backend.leaves_out(kept.mode),
            *reasons(profile.graph),
            *skipping(profile.graph),
            *unprofiled(request, pricer),
        ),
        provenance=replace(
            provenance(profile, task.budget, shown if simulated else gap, tolerance),
            simulated=simulated,
            certificate=certificate,
            interrupted=found.stopped,
            least_seconds=chosen.range.least if chosen.range else 0.0,
            most_seconds=chosen.range.most if chosen.range else 0.0,
            notes=(
                *plan_notes(profile.graph, replace(chosen.plan, mode=kept.mode)),
                *spread_note(profile.origin),
            ),
        ),
    )


def _certificate(result: SolvedPlan, progress: Progress | None) -> str:
    """What an integer programme of the same shape says, without the seconds it took: plans repeat."""
    if result.given:
        return "not certified: the plan is one that was given"
    from galvatron_lite.search.programme.ilp import certify

    certificate = certify(result.problem, result.partition)
    if progress is not None:
        progress(1, 1, f"certified in {certificate.taken:.1f} s")
    return str(certificate)


def _closed(pricer: LayerPricer, request: Request, ticks: float) -> float:
    return (ticks / TICKS + pricer.profile.overhead.step) * straggling(pricer.profile, request.devices)


def _ahead(
    request: Request, pricer: LayerPricer, first: SolvedPlan, contenders: Sequence[Finalist], tolerance: float
) -> float:
    """By what share a plan's closed form must be below that of the first, to be quicker than the best plan that was
    simulated by more than the tolerance."""
    closed = _closed(pricer, request, first.partition.time)
    quickest = min((one.seconds for one in contenders if one.fits), default=closed)
    return max(1.0 - (1.0 - tolerance) * quickest / closed, _LEAST_AHEAD * tolerance)


def _gap(proven: Finalist, chosen: Finalist) -> float:
    """Share of the closed form of the chosen plan that some plan of the space may be below it."""
    least = proven.found.partition.time * (1.0 - proven.found.gap)
    return max(1.0 - least / chosen.found.partition.time, 0.0) if chosen is not proven else proven.found.gap


def compare(profile: Profile, plans: Sequence[Plan]) -> list[Plan]:
    """The plans with their predictions, quickest first.

    Raises:
        InputError: a plan that is not for the profile's model.
    """
    priced = [evaluate(profile, plan) for plan in plans]
    return sorted(priced, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0)


def request_of(
    session: Session,
    devices: int,
    global_batch: int,
    budget: int | Budget,
    fixed: Fixed,
    schedules: Sequence[Schedule] | None,
    backend: Backend,
) -> Request:
    """What ``find_plan`` searches, of its arguments.

    Raises:
        InputError: as ``find_plan`` does.
    """
    profile = session.profile
    if not 1 <= devices <= profile.cluster.devices:
        raise InputError("--gpus", devices, f"The cluster has {profile.cluster.devices}; give 1 to that many.")
    check_range("--batch", global_batch, SAMPLES)
    if bytes_on(budget, "") < 1:
        raise InputError("--mem", bytes_on(budget, ""), "Give a positive number of bytes.")
    check_pins(profile.graph, fixed)
    fixed = _undivided(_run_in_mode(fixed, session.mode, backend), profile.graph)
    orders = schedules_for(fixed, schedules, backend)
    space, known = session.space(backend)
    unlike = None if profile.cluster.alike else profile.cluster
    request = Request(profile.graph, devices, global_batch, budget, fixed, orders, space, known, unlike)
    check_layers(request)
    return request


def _undivided(fixed: Fixed, graph: ModelGraph) -> Fixed:
    """What is pinned: one micro-batch where a model's loss is another one with several, unless they are asked for."""
    return replace(fixed, microbatches=fixed.microbatches or 1) if graph.undivided else fixed


def _run_in_mode(fixed: Fixed, mode: Mode, backend: Backend) -> Fixed:
    """What is pinned, without what the backend does not run in a mode."""
    if mode in backend.pipelines:
        return fixed
    if (fixed.pipeline or 1) > 1:
        remedy = f"Backend {backend.name} runs no pipelines in {mode.value}; --backend any prices them."
        raise InputError("--fix pipeline", fixed.pipeline, remedy)
    return replace(fixed, forbidden=tuple({*fixed.forbidden, "pipeline"}))
