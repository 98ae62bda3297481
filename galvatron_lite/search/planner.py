"""The fastest plan that fits: best-first search over shapes, exact search inside each, finalists by simulation.

What is proven: no plan of the space (see ``problem`` for its rules, ``space`` for the choices) has a lesser step time
by the closed form of ``cost.schedule`` (``cost.step.bound_seconds``) than the one the search ends with, because every
shape left unsearched has a lower bound no less than that, and inside a shape ``partition`` and ``frontier`` are exact.
Times are compared in whole picoseconds. Where a chain needs more labels than ``problem.widest`` allows, or the search
more than ``MOST_WORK``, it ends early, and knows by the bounds of what was left out how far from the best it may be.

What is shown: the step time of ``cost.plan.evaluate``, for the plan and its runner-ups alike. It comes from an event
simulation and equals the closed form without a pipeline; with one it is mostly a little less. So the plan of least
closed form and good plans of other shapes (``alternatives``) are simulated; the quickest that fits is the plan, or
within a tolerance of it the simplest. The gap says how much less than the plan's closed form that of any plan can be.
Closed forms do not bound simulated steps: a plan of another schedule may simulate quicker by more than the gap.

A run of several phases (other batches or sequences) may go from plan to plan. Its candidates are the fastest plan of
every phase by itself; each is tried in every phase, in the number of micro-batches that is fastest there and fits. A
dynamic programme over phases x candidates finds the least predicted seconds of the whole run, steps and switches
(``cost.switching``) together, exactly, among the courses in which every switch pays back within its own phase: its
steps gain more than it costs; or the plan before does not run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.step import straggling
from galvatron_lite.cost.switching import switch_cost
from galvatron_lite.errors import GalvatronError, InfeasibleError, InputError
from galvatron_lite.limits import SAMPLES, check_range
from galvatron_lite.parallelism.backends import Backend, backend_named, check_mode
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.plans.phases import (
    PHASES_VERSION,
    Phase,
    PhasedPlan,
    PlannedPhase,
    SwitchCost,
    in_order,
    same_split,
)
from galvatron_lite.plans.schema import Mode, Plan, Proof, Schedule, TrainedBy
from galvatron_lite.profiler.schema import Profile, spread_note
from galvatron_lite.search.alternatives import (
    GIVEN,
    Finalist,
    alternatives_to,
    finalists,
    priced_user_plans,
    quickest,
    ranges_of,
    slowest,
)
from galvatron_lite.search.best_first import ANY_TIME, MOST_WORK, QUICK, Progress, SolvedPlan, search
from galvatron_lite.search.families.branches import branch_plans
from galvatron_lite.search.families.delayed import delayed_plans, why_not_delayed
from galvatron_lite.search.families.family import PlanTask, seconds_of, with_alike, with_families, with_one_device
from galvatron_lite.search.pins import check_pins, schedules_for
from galvatron_lite.search.refusals import check_batch, check_layers, infeasible, skipping, suggestions, unprofiled
from galvatron_lite.search.reserve import with_reserve
from galvatron_lite.search.result import provenance
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
        certify: also solve the winning shape as an integer programme; an unequal optimum is an error. What it says is
            kept in the plan's provenance.
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
        delay: which training rules of delayed gradients may be used besides (``search.families.family``); None: none.
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
    task = PlanTask(kept, request, runner, delay, certify=certify, tolerance=0.0 if certify else tolerance)
    families = (branch_plans, delayed_plans) if runner.beside else ()

    def planned(task: PlanTask, explain: bool = True) -> Plan:
        searched = partial(_ordinary, runners_up, progress, stoppable, candidates, effort, explain)
        looked = partial(with_alike, searched, task, runners_up)
        return with_one_device(with_families(looked, task, runners_up, families), task)

    plan = with_reserve(planned, task) if runners_up else planned(task)
    trainer = next((one for one in TrainedBy if one == runner.name), TrainedBy.GALVATRON)
    source = plan.provenance and replace(
        plan.provenance, budget=bytes_on(budget, ""), budgets=dict(as_budget(budget).by_device), margin=margin,
        tolerance=task.tolerance,
    )  # fmt: skip
    return replace(plan, backend=trainer, left_out=(*plan.left_out, *why_not_delayed(task)), provenance=source)


def _ordinary(
    runners_up: int,
    progress: Progress | None,
    stoppable: bool,
    plans: Sequence[Plan],
    effort: int,
    explain: bool,
    task: PlanTask,
) -> Plan:
    kept, request, profile = task.session, task.request, task.session.profile
    check_batch(request)
    pricer, tolerance = kept.pricer, task.tolerance
    user_plans = priced_user_plans(request, pricer, plans)
    looked = partial(
        search, pricer=pricer, progress=progress, stoppable=stoppable, start=user_plans[0] if user_plans else None,
        slack=SLACK * min(tolerance, CLOSE), settled=min(tolerance, CLOSE),
    )  # fmt: skip
    few = tuple(schedule for schedule in request.schedules if schedule.simple) if effort == 0 else ()
    quick = replace(request, schedules=few or request.schedules)
    # Quick searches that meet nothing do not show that nothing fits: an exact one goes on to the first plan.
    quick_plan = looked(quick, effort=QUICK, below=ANY_TIME) if effort == 0 else None
    quick_plan = quick_plan or looked(request, effort=effort)
    if quick_plan is None and not explain:
        raise InfeasibleError(f"No plan of {request.graph.name} fits.")
    if quick_plan is None:
        error = infeasible(request, pricer)
        more = suggestions(request, kept, task.backend.name) if runners_up else ""
        raise InfeasibleError(f"{error}\n{more}".strip(), error.smallest_budget)
    ticks = quick_plan.partition.time * (1.0 - quick_plan.gap)
    least = (ticks / TICKS + pricer.profile.overhead.step) * straggling(pricer.profile, request.devices)
    if tolerance and effort and not quick_plan.stopped:
        quick_plan = simplest(request, pricer, quick_plan, tolerance)
    certificate = _certificate(quick_plan, progress) if task.certify and not quick_plan.stopped else ""
    others, wanted = replace(request, runs=1) if tolerance else request, 0 if quick_plan.stopped else runners_up
    options = finalists(others, pricer, quick_plan, wanted, user_plans, near=not tolerance and not quick_plan.stopped)
    fixed = pricer.profile.overhead.step * TICKS
    if tolerance:
        limit = slowest(options, tolerance, least)
        proven_ticks = (ticks + fixed) / (1.0 - tolerance) - fixed
        options = tuple(with_fewer_runs(request, pricer, option, limit, proven_ticks) for option in options)
        ranges = ranges_of(pricer, [option.plan for option in options])
        options = tuple(replace(option, range=range_) for option, range_ in zip(options, ranges, strict=True))

    def gap_of(option: Finalist) -> float:
        """By what share of the closed form of its step some plan of the space may be below it."""
        return max(1.0 - (ticks + fixed) / (option.solved.partition.time + fixed), 0.0)

    # what is printed is proven of closed forms, so that plans within the tolerance there go before others that simulate
    # no quicker than the tolerance
    proven = [option for option in options if option.fits and (option.name == GIVEN or gap_of(option) <= tolerance)]
    best = min((option.seconds for option in options if option.fits), default=inf)
    near = tolerance and any(option.seconds * (1.0 - tolerance) <= best for option in proven)
    chosen = quickest(proven if near else options, tolerance, least)
    gap = gap_of(chosen)
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
            provenance(profile, request.budget, gap, tolerance),
            certificate=certificate,
            interrupted=quick_plan.stopped,
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
    fixed = _run_in_mode(fixed, session.mode, backend)
    if profile.graph.undivided:  # its loss is another one with several
        fixed = replace(fixed, microbatches=fixed.microbatches or 1)
    orders = schedules_for(fixed, schedules, backend)
    space, answers = session.space(backend)
    unlike = None if profile.cluster.alike else profile.cluster
    request = Request(profile.graph, devices, global_batch, budget, fixed, orders, space, answers, unlike)
    check_layers(request)
    return request


def _run_in_mode(fixed: Fixed, mode: Mode, backend: Backend) -> Fixed:
    """What is pinned, without what the backend does not run in a mode."""
    if mode in backend.pipelines:
        return fixed
    if (fixed.pipeline or 1) > 1:
        remedy = f"Backend {backend.name} runs no pipelines in {mode.value}; --backend any prices them."
        raise InputError("--fix pipeline", fixed.pipeline, remedy)
    return replace(fixed, forbidden=tuple({*fixed.forbidden, "pipeline"}))


@dataclass(frozen=True, slots=True)
class PhaseCase:
    """A phase and what its plans are made from."""

    phase: Phase  # its steps, batch and sequence
    session: Session  # of the profile at its sequence
    budget: int | Budget  # bytes a device
    best: Plan  # the fastest plan for it alone


def choose(
    seconds: Sequence[Sequence[float]], steps: Sequence[int], switching: Callable[[int, int], float]
) -> list[int] | None:
    """The candidate of every phase, for the least seconds of the whole run; None where no course runs.

    Args:
        seconds: of a step by phase and candidate; infinite where the candidate does not run there.
        steps: of each phase.
        switching: seconds from one candidate to another.
    """

    def taken(phase: int, last: int, place: int) -> float:
        own = seconds[phase]
        if own[place] == inf or place == last:
            return steps[phase] * own[place]
        cost = switching(last, place)
        pays = steps[phase] * (own[last] - own[place]) > cost
        return cost + steps[phase] * own[place] if pays else inf

    count = len(seconds[0])
    reached = [(steps[0] * seconds[0][own], [own]) for own in range(count)]
    for phase in range(1, len(seconds)):
        ways = [
            [(total + taken(phase, last, own), [*path, own]) for last, (total, path) in enumerate(reached)]
            for own in range(count)
        ]
        reached = [min(options, key=lambda option: option[0]) for options in ways]
    total, path = min(reached, key=lambda candidate: candidate[0])
    return None if total == inf else path


def plan_phases(cases: Sequence[PhaseCase]) -> PhasedPlan:
    """The plan of every phase.

    Raises:
        InputError: phases whose profiles are not of the same layers.
        InfeasibleError: no course of plans runs all phases.
    """
    first = [layer.name for layer in cases[0].session.profile.graph.layers]
    for case in cases:
        if [layer.name for layer in case.session.profile.graph.layers] != first:
            remedy = "Its profile has other layers than that of the first phase: profile the same model."
            raise InputError(f"phase {case.phase.name}", case.session.profile.name, remedy)
    splits = list[Plan]()
    for case in cases:
        if not any(same_split(case.best, split) for split in splits):
            splits.append(case.best)
    table = [[fitted(case, split) for split in splits] for case in cases]
    seconds = [[seconds_of(plan) for plan in row] for row in table]
    steps = [case.phase.steps for case in cases]
    costs: dict[tuple[int, int], SwitchCost] = {}

    def cost(one: int, other: int) -> SwitchCost:
        if (one, other) not in costs:
            costs[one, other] = switch_cost(cases[0].session.profile, splits[one], splits[other])
        return costs[one, other]

    path = choose(seconds, steps, lambda one, other: cost(one, other).seconds)
    plans = [] if path is None else [row[option] for row, option in zip(table, path, strict=True)]
    if path is None:
        raise InfeasibleError("No course of plans runs all phases: plan each phase by itself, with --batch.")
    switches = [None, *(cost(a, b) if a != b else None for a, b in pairwise(path))]
    planned = [
        PlannedPhase(case.phase.name, 0, case.phase.steps, case.session.profile.graph.sequence, plan, switch)
        for case, plan, switch in zip(cases, plans, switches, strict=True)
        if plan is not None
    ]
    totals = [
        sum(row[option] * count for row, count in zip(seconds, steps, strict=True)) for option in range(len(splits))
    ]
    quickest = [min(range(len(row)), key=row.__getitem__) for row in seconds]
    always = sum(cost(a, b).seconds for a, b in pairwise(quickest))
    always += sum(row[option] * count for row, option, count in zip(seconds, quickest, steps, strict=True))
    return PhasedPlan(PHASES_VERSION, in_order(planned), min(totals) if min(totals) < inf else None, always)


def fitted(case: PhaseCase, split: Plan) -> Plan | None:
    """A split at a phase's batch, in the micro-batches that are fastest and fit; None where there are none."""
    if same_split(case.best, split):
        return case.best
    plans = [plan for count in divisors(case.phase.batch) if (plan := _priced(case, split, count)) is not None]
    return min(plans, key=seconds_of, default=None)


def _priced(case: PhaseCase, split: Plan, microbatches: int) -> Plan | None:
    wanted = replace(split, global_batch=case.phase.batch, microbatches=microbatches, alternatives=(), left_out=())
    profile = case.session.profile
    try:
        plan = price_plan(case.session.pricer, wanted)
    except GalvatronError:
        return None
    made_from = replace(provenance(profile, case.budget, 0.0), proof=Proof.GIVEN, notes=plan_notes(profile.graph, plan))
    plan = replace(plan, provenance=made_from)
    return plan if plan.fits else None
