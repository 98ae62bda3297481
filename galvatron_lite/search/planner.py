"""The fastest plan that fits: best-first search over shapes, exact search inside each, finalists by simulation.

What is proven: no plan of the space (see ``problem`` for its rules, ``space`` for the choices) has a lesser step time
by the closed form of ``cost.schedule`` (``cost.step.bound_seconds``) than the one the search ends with, because every
shape left unsearched has a lower bound no less than that, and inside a shape ``best_first.best_partition`` and
``chain`` are exact. Times are compared in whole picoseconds. Where a chain needs more labels than ``problem`` allows,
or the search more than ``MOST_WORK``, it ends early, and knows by the bounds of what was left out how far from the best
it may be.

What is shown: the step time of ``cost.plan.price_plan``, for the plan and its runners-up alike. It comes from an event
simulation and equals the closed form without a pipeline; with one it is mostly a little less. So the plan of least
closed form and good plans of other shapes (``alternatives``) are simulated; the quickest that fits is the plan, or
within a tolerance of it the simplest. The gap says how much less than the plan's closed form that of any plan can be.
Closed forms do not bound simulated steps: a plan of another schedule may simulate quicker by more than the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.step import straggling
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.backends import Backend, backend_named, check_mode
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.plans.schema import Mode, Plan, Schedule, TrainedBy
from galvatron_lite.profiler.schema import Profile, spread_note
from galvatron_lite.search.alternatives import (
    USER_PLAN,
    Finalist,
    alternatives_to,
    finalists,
    priced_user_plans,
    quickest,
    slowest,
)
from galvatron_lite.search.best_first import ANY_TIME, MOST_WORK, NEAR_WORK, QUICK, Progress, SolvedPlan, search
from galvatron_lite.search.families.attempts import with_alike, with_reserve
from galvatron_lite.search.families.branches import branch_plans
from galvatron_lite.search.families.delayed import delayed_plans, why_not_delayed
from galvatron_lite.search.families.family import PlanTask, with_families, with_one_device
from galvatron_lite.search.pins import check_pins, schedules_for
from galvatron_lite.search.refusals import check_batch, check_layers, infeasible, skipping, suggestions, unprofiled
from galvatron_lite.search.result import provenance
from galvatron_lite.search.scenarios import ranges_of
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.simplify import CLOSE, SLACK, simplest, with_fewer_runs
from galvatron_lite.search.space import Delay, Fixed, reasons
from galvatron_lite.search.tables import TICKS


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
    candidates: Sequence[Plan] = (),
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
        certify: also solve the winning shape as an integer programme; an unequal optimum is an error. The certificate
            is kept in the plan's provenance.
        runners_up: how many other plans to report; with 0 nothing is tried either that would make a plan fit (host
            memory, other devices).
        progress: called with (shapes done, shapes in all, what is being looked at).
        session: of the profile; makes a question that is like an earlier one quicker, and changes no answer.
        stoppable: whether Ctrl-C (KeyboardInterrupt) in the search returns the best plan so far, not proven; it is
            raised where there is none yet.
        candidates: plans that the user has; the answer is none that takes longer than one of them that fits and keeps
            the pins, even where a search ends early or the plan is not in the declared space.
        effort: labels after which the search ends early; 0: quick searches of the most promising shapes alone, whose
            gap says how far from the best the plan may be.
        mode: what the plan is for; of forward passes alone its step is one pass of the whole batch.
        delay: which training rules of delayed gradients may be used besides (``families.delayed``); None: none.
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
    session = session or Session(profile, mode)
    if session.profile is not profile or session.mode is not mode:
        raise InputError("session", f"{session.profile.name}, {session.mode}", f"It is not of {profile.name}, {mode}.")
    for name, share in (("tolerance", tolerance), ("margin", margin)):
        if not 0.0 <= share < 1.0:
            raise InputError(f"--{name}", share, "Give a share from 0 to below 1: 0.01, or 1%.")
    request = request_of(session, devices, global_batch, budget, fixed or Fixed(), schedules, runner)
    if margin:
        request = replace(request, budget=as_budget(budget).scaled(1.0 - margin), margin=margin)
    task = PlanTask(
        session, request, runner, delay, certify=certify, tolerance=0.0 if certify else tolerance, progress=progress,
        stoppable=stoppable, candidates=tuple(candidates), effort=effort,
    )  # fmt: skip
    families = (branch_plans, delayed_plans) if runner.beside else ()

    def planned(task: PlanTask, explain: bool = True) -> Plan:
        in_order = partial(_in_model_order, runners_up=runners_up, explain=explain)
        alike = partial(with_alike, in_order, task, runners_up)
        return with_one_device(with_families(alike, task, runners_up, families), task)

    plan = with_reserve(planned, task) if runners_up else planned(task)
    trainer = next((trainer for trainer in TrainedBy if trainer == runner.name), TrainedBy.GALVATRON)
    source = plan.provenance and replace(
        plan.provenance, budget=bytes_on(budget, ""), budgets=dict(as_budget(budget).by_device), margin=margin,
        tolerance=task.tolerance,
    )  # fmt: skip
    return replace(plan, backend=trainer, left_out=(*plan.left_out, *why_not_delayed(task)), provenance=source)


def _in_model_order(task: PlanTask, runners_up: int, explain: bool) -> Plan:
    """The plan of a task whose stages hold the layers in the order of the model.

    Raises:
        InfeasibleError: nothing fits; ``explain``: with the smallest budget that would, and what would make one fit.
    """
    request, pricer, tolerance = task.request, task.session.pricer, task.tolerance
    check_batch(request)
    user_plans = priced_user_plans(request, pricer, task.candidates)
    solved = _solved(task, user_plans[0] if user_plans else None)
    if solved is None and not explain:
        raise InfeasibleError(f"No plan of {request.graph.name} fits.")
    if solved is None:
        error = infeasible(request, pricer)
        more = suggestions(request, task.session, task.backend.name) if runners_up else ""
        raise InfeasibleError(f"{error}\n{more}".strip(), error.smallest_budget)
    least = solved.partition.time * (1.0 - solved.gap)  # picoseconds that no closed form is below
    if tolerance and task.effort and not solved.stopped:
        solved = simplest(request, pricer, solved, tolerance)
    certificate = _certificate(solved, task.progress) if task.certify and not solved.stopped else ""
    others = replace(request, runs=1) if tolerance else request
    wanted, near = 0 if solved.stopped else runners_up, not tolerance and not solved.stopped
    options = finalists(others, pricer, solved, wanted, user_plans, near)
    options, chosen, gap = _chosen(task, options, least)
    graph, mode = task.session.profile.graph, task.session.mode
    return replace(
        chosen.plan,
        mode=mode,
        alternatives=alternatives_to(options, chosen, runners_up),
        left_out=(
            *task.backend.leaves_out(mode),
            *reasons(graph),
            *skipping(graph),
            *unprofiled(request, pricer),
        ),
        provenance=replace(
            provenance(task.session.profile, request.budget, gap, tolerance),
            certificate=certificate,
            interrupted=solved.stopped,
            least_seconds=chosen.range.least if chosen.range else 0.0,
            most_seconds=chosen.range.most if chosen.range else 0.0,
            notes=(*plan_notes(graph, replace(chosen.plan, mode=mode)), *spread_note(task.session.profile.origin)),
        ),
    )


def _solved(task: PlanTask, start: SolvedPlan | None) -> SolvedPlan | None:
    """What the search ends with, at the effort of the task; None where nothing fits."""
    request, accuracy = task.request, min(task.tolerance, CLOSE)
    looked = partial(
        search, pricer=task.session.pricer, progress=task.progress, stoppable=task.stoppable, start=start,
        slack=SLACK * accuracy, settled=accuracy,
    )  # fmt: skip
    if task.effort == 0:
        few = tuple(schedule for schedule in request.schedules if schedule.simple)
        quick = looked(replace(request, schedules=few or request.schedules), effort=QUICK, below=ANY_TIME)
        if quick is not None:
            return quick
    # A quick search that meets nothing does not show that nothing fits: an exact one goes on to the first plan.
    return looked(request, effort=min(task.effort, NEAR_WORK) if task.tolerance else task.effort)


def _chosen(
    task: PlanTask, options: tuple[Finalist, ...], least: float
) -> tuple[tuple[Finalist, ...], Finalist, float]:
    """The finalists, simplified and with their ranges if there is a tolerance; the one that is the plan; and by what
    share of its closed form that of another plan of the space may be below it.

    ``least``: picoseconds that no closed form is below, without fixed host time.
    """
    request, pricer, tolerance = task.request, task.session.pricer, task.tolerance
    fixed = pricer.profile.overhead.step * TICKS
    seconds = (least / TICKS + pricer.profile.overhead.step) * straggling(pricer.profile, request.devices)
    if tolerance:
        limit, most_ticks = slowest(options, tolerance, seconds), (least + fixed) / (1.0 - tolerance) - fixed
        options = tuple(with_fewer_runs(request, pricer, option, limit, most_ticks) for option in options)
        ranges = ranges_of(pricer, [option.plan for option in options])
        options = tuple(replace(option, range=range_) for option, range_ in zip(options, ranges, strict=True))

    def gap_of(option: Finalist) -> float:
        return max(1.0 - (least + fixed) / (option.solved.partition.time + fixed), 0.0)

    # The gap of closed forms is printed: plans with a gap within the tolerance go before others, unless these simulate
    # quicker by more than the tolerance.
    proven = [option for option in options if option.fits and (option.name == USER_PLAN or gap_of(option) <= tolerance)]
    best = min((option.seconds for option in options if option.fits), default=inf)
    near = tolerance and any(option.seconds * (1.0 - tolerance) <= best for option in proven)
    chosen = quickest(proven if near else options, tolerance, seconds)
    return options, chosen, gap_of(chosen)


def _certificate(result: SolvedPlan, progress: Progress | None) -> str:
    """The certificate of a plan's shape, without the seconds it took: plans repeat."""
    if result.from_user:
        return "not certified: the plan is one that was given"
    from galvatron_lite.search.certify.ilp import certify

    certificate = certify(result.problem, result.partition)
    if progress is not None:
        progress(1, 1, f"certified in {certificate.taken:.1f} s")
    return str(certificate)


def request_of(
    session: Session,
    devices: int,
    global_batch: int,
    budget: int | Budget,
    fixed: Fixed,
    schedules: Sequence[Schedule] | None,
    backend: Backend,
) -> Request:
    """The request of the arguments of ``find_plan``.

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
    fixed = _run_in_mode(fixed, session.mode, backend)
    if profile.graph.undivided:  # several micro-batches would change its loss
        fixed = replace(fixed, microbatches=fixed.microbatches or 1)
    wanted = schedules_for(fixed, schedules, backend)
    space, prices = session.space(backend)
    unlike = None if profile.cluster.alike else profile.cluster
    request = Request(profile.graph, devices, global_batch, budget, fixed, wanted, space, prices, unlike)
    check_layers(request)
    return request


def _run_in_mode(fixed: Fixed, mode: Mode, backend: Backend) -> Fixed:
    """The pins, with pipelines forbidden where the backend runs none in a mode."""
    if mode in backend.pipelines:
        return fixed
    if (fixed.pipeline or 1) > 1:
        remedy = f"Backend {backend.name} runs no pipelines in {mode.value}; --backend any prices them."
        raise InputError("--fix pipeline", fixed.pipeline, remedy)
    return replace(fixed, forbidden=tuple({*fixed.forbidden, "pipeline"}))
