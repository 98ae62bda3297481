"""Finalists: the plan of least closed form and good plans of other shapes, compared by simulation and over scenarios.

``finalists`` collects them, ``quickest`` chooses the plan, ``alternatives_to`` lists the others as runners-up. Plans
that a user supplies (``priced_user_plans``) take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from galvatron_lite.cluster.budget import as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape, transfer_seconds
from galvatron_lite.cost.step import (
    bound_seconds,
    hidden_send_share,
    price_stages,
    shape_of,
    straggling,
    strategies_of,
)
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes
from galvatron_lite.parallelism.pipeline.schedule import Schedule
from galvatron_lite.parallelism.registry import SHAPES, SPREADING, complexity
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Alternative, Plan
from galvatron_lite.search.best_first import ANY_TIME, SolvedPlan, finished, search
from galvatron_lite.search.problem import Partition, StagePlan
from galvatron_lite.search.result import summary
from galvatron_lite.search.scenarios import Range
from galvatron_lite.search.shapes import Request, open_problem, shapes_of
from galvatron_lite.search.space import UNPINNED, Fixed
from galvatron_lite.search.tables import TICKS, ticks
from galvatron_lite.units import format_budget

USER_PLAN = "given"
"""Name of the user's plans."""
UNBOUNDED = 2**60
"""Bytes that any plan fits."""
_ROUNDING = 1e-9
_TRIES = 3
"""How often a plan is searched for less room, until one fits, and how many fewer stages a group are tried."""
_SLIGHT = 0.005
"""By what share another plan may be quicker than one that is looked for instead."""
_REACH, _FARTHEST, _FEW_LABELS = 0.03, 0.15, 20_000
"""By how much a simulated step may be below its closed form for a plan to be looked at, at least and at most, and
labels of a search for a good plan of some kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """A plan whose step has been simulated."""

    name: str  # of its shape
    solved: SolvedPlan  # what a search ended with
    plan: Plan  # with its prediction
    fits: bool  # whether that is within the budget
    range: Range | None = None  # of its step over scenarios; None: not computed

    @property
    def seconds(self) -> float:
        """Of a step, simulated."""
        return self.plan.prediction.step_seconds if self.plan.prediction else inf

    @property
    def expected(self) -> float:
        """Expected seconds of a step over all scenarios; as simulated where these were not computed."""
        return self.range.mean if self.range else self.seconds

    @property
    def complexity(self) -> tuple[int, int, int, int, int, float]:
        """How often neighbouring layers differ in strategy, strategies, kind of pipeline, complexity of strategies,
        bytes of the fullest device, seconds."""
        strategies = [run.strategy for stage in self.plan.stages for run in stage.runs]
        changes, used = sum(a != b for a, b in pairwise(strategies)), set(strategies)
        pipeline = 0 if len(self.plan.stages) == 1 else 1 if self.plan.schedule.simple else 2
        machinery = sum(map(complexity, used))
        return changes, len(used), pipeline, machinery, self.alternative.peak_memory, self.seconds

    @property
    def alternative(self) -> Alternative:
        """The finalist as a runner-up of another plan."""
        peak = self.plan.prediction.peak_memory if self.plan.prediction else 0
        ends = (self.range.least, self.range.most) if self.range else (0.0, 0.0)
        begin = f"{self.name.partition(', ')[0]}, "  # what the name says already
        text = f"{self.name}: {summary(self.plan).removeprefix(begin)}"
        return Alternative(text, self.seconds, peak, self.fits, *ends)


def finalists(
    request: Request,
    pricer: LayerPricer,
    best: SolvedPlan,
    wanted: int = 3,
    further: Sequence[SolvedPlan] = (),
    near: bool = False,
) -> tuple[Finalist, ...]:
    """What the search ended with, first, and good plans that differ materially from it and one another.

    They are the best plans of other pipeline degrees and schedules that the search has met, then well-known plans
    without a pipeline from quick searches. A shape of which no plan is met that fits has its quickest plan, marked as
    not fitting. That there are no better ones of their kind is not proven.

    Args:
        request: what was planned.
        pricer: of the profile.
        best: what the search ended with.
        wanted: how many others to look for; 0: none.
        further: plans that the user has.
        near: whether the best plans of all shapes are looked for whose closed form is so near that a simulation may
            put them first.
    """
    first = finalist(request, pricer, _name(best.problem.shape), best)
    options = [first]
    options += [finalist(request, pricer, USER_PLAN, user) for user in further if user.partition is not best.partition]
    if not first.fits:
        options += _instead(replace(request, runs=None), pricer, first)
    others = sorted(best.others, key=lambda other: other.partition.time)
    others = [other for other in others if other.partition is not best.partition]
    close = [other for other in others if other.partition.time <= best.partition.time * (1.0 + _REACH)]
    for other in dict.fromkeys([*close, *others[:wanted]]):
        _add(options, finalist(request, pricer, _name(other.problem.shape), other))
    for rival in _rival_schedules(request, pricer, first):
        _add(options, rival)
    quickest_seconds = min((option.seconds for option in options if option.fits), default=inf)
    options += _with_hidden_sends(request, pricer, best, quickest_seconds)
    for shape in _near_shapes(request, pricer, best, near):
        below = int(best.partition.time * (1.0 + _reach(shape)))
        _add(options, _good_plan(shaped(request, shape), pricer, _name(shape), below))
    if wanted > 0 and request.fixed == Fixed() and request.devices > 1:
        _add_well_known(options, request, pricer, wanted)
    return tuple(options)


def _rival_schedules(request: Request, pricer: LayerPricer, first: Finalist) -> Iterator[Finalist]:
    """Good plans of other schedules beside one that splits backward: closed forms of such schedules leave out waits
    that simulation shows, each others."""
    schedule, best = first.plan.schedule, first.solved
    if not schedule.splits_backward:
        return
    split: list[tuple[Schedule, ...]] = [
        (other,) for other in request.schedules if other.splits_backward and other is not schedule
    ]
    rest = tuple(other for other in request.schedules if not other.splits_backward)
    fixed = replace(request.fixed, pipeline=best.problem.shape.stages)
    below = int(best.partition.time * (1.0 + _REACH))
    for schedules in [*split, rest] if rest else split:
        rival = _good_plan(replace(request, fixed=fixed, schedules=schedules), pricer, "", below)
        # a slower plan of the same kind would take the place of a runner-up that differs more
        if rival and (rival.seconds < first.seconds or not rival.plan.schedule.splits_backward):
            yield rival


def _with_hidden_sends(request: Request, pricer: LayerPricer, best: SolvedPlan, seconds: float) -> Iterator[Finalist]:
    """Plans of each schedule that simulate quicker than all before them, the first than in so many seconds.

    They are those of least closed form if what compute hides of sends costs nothing. Closed forms charge senders all of
    it, which is far too much where links between nodes are slow.
    """
    if not _sends_count(request, pricer, best):
        return
    hidden = hidden_send_share(pricer.profile)
    for schedule in request.schedules:
        narrow = replace(request, hidden=hidden, schedules=(schedule,))
        solved = search(narrow, pricer, below=seconds * TICKS, effort=_FEW_LABELS)
        for other in () if solved is None else solved.others:
            plan = finished(request, pricer, other)
            result = replace(as_result(request, pricer, plan), from_user=False)
            option = Finalist(_name(other.problem.shape), result, plan, request.fits(plan))
            if option.fits and option.seconds < seconds:
                seconds = option.seconds
                yield option


def _sends_count(request: Request, pricer: LayerPricer, best: SolvedPlan) -> bool:
    """Whether what compute hides of sends is a share of the step that matters, in as many stages as the best plan has;
    if it has one, in any number."""
    batch, hidden = request.global_batch, hidden_send_share(pricer.profile)
    size = min(request.graph.crossings()[1:-1], default=0)
    degrees = [best.problem.shape.stages] if best.problem.shape.stages > 1 else request.pipelines

    def sent(stages: int) -> float:
        shape = Shape(request.devices, stages, 1, batch, DEFAULT_SCHEDULE, 1)
        sender = strategy_with(Layout(sequence=shape.stage_devices))
        bytes_sent = boundary_bytes(size, batch, sender)
        pairs = pairwise(range(stages))
        return max(2 * transfer_seconds(pricer, bytes_sent, sender, shape, pair) for pair in pairs)

    least = min((sent(stages) for stages in degrees if stages > 1), default=0.0)
    return ticks(hidden * least) > _SLIGHT * best.partition.time


def _add_well_known(options: list[Finalist], request: Request, pricer: LayerPricer, wanted: int) -> None:
    """Add well-known plans without a pipeline until there are enough finalists, and any that spread layers."""
    for name, fixed in _families(request):
        names = {option.name for option in options} - {USER_PLAN}
        # pins may go beyond the space's rules, which must leave every layer a strategy
        unlike = {(layer.kind, fixed.at_layer(layer.name)) for layer in request.graph.layers}
        looked_for = name not in names and (len(names) <= wanted or name in dict(SPREADING))
        if looked_for and all(request.space.offers(kind, request.devices, pins) for kind, pins in unlike):
            narrowed = replace(request, fixed=fixed)
            good = _good_plan(narrowed, pricer, name)
            _add(options, good or _good_plan(narrowed, pricer, name, within_budget=False))


def _families(request: Request) -> Iterator[tuple[str, Fixed]]:
    """Well-known plans without a pipeline, as pins: those of ``SHAPES``; then those that spread what some kinds of
    layers can, over as many devices of a node as they can."""
    for name, degrees in SHAPES:
        yield name, Fixed(pipeline=1, strategy=tuple(degrees.items()))
    space, layers = request.space, request.graph.layers
    offered = {layer.kind: space.strategies(layer.kind, request.devices, UNPINNED) for layer in layers}
    for name, field in SPREADING:
        most = {
            kind: max((d for d in (getattr(s, field) for s in strategies) if d <= space.node_devices), default=1)
            for kind, strategies in offered.items()
        }
        pins = tuple((layer.name, field, most[layer.kind]) for layer in layers if most[layer.kind] > 1)
        if pins:
            yield name, Fixed(pipeline=1, layers=pins)


def _reach(shape: Shape) -> float:
    """By what share a simulation may be below the closed form: the fewer micro-batches there are, the more filling and
    draining count, which the closed form is too high for."""
    return min(_REACH + (shape.stages - 1) / (2 * shape.microbatches), _FARTHEST)


def shaped(request: Request, shape: Shape) -> Request:
    """A request of plans of one shape."""
    fixed = replace(request.fixed, pipeline=shape.stages, microbatches=shape.microbatches, virtual=shape.virtual)
    return replace(request, fixed=fixed, schedules=(shape.schedule,))


def _near_shapes(request: Request, pricer: LayerPricer, best: SolvedPlan, near: bool) -> Iterator[Shape]:
    """Shapes of pipelines whose best plan a simulation may put first: those of near bounds, if they are wanted, and
    those of fewer stages a group, which the closed form knows less of where stages are uneven."""
    chosen, compute_bounds = best.problem.shape, request.compute_bounds(pricer.profile)
    for shape in shapes_of(request) if near and best.gap == 0.0 else ():
        below = int(best.partition.time * (1.0 + _reach(shape)))
        if shape.stages == 1 or shape == chosen or compute_bounds.bound(request.graph, shape) >= below:
            continue
        if open_problem(request, pricer, shape).answers.averaged < below:
            yield shape
    if chosen.schedule.virtual_stages is None and request.fixed.virtual is None:
        for virtual in range(chosen.virtual - 1, max(chosen.virtual - 1 - _TRIES, 1), -1):
            yield replace(chosen, virtual=virtual)


def _instead(request: Request, pricer: LayerPricer, over: Finalist) -> Iterator[Finalist]:
    """Plans that fit, where the search's plan holds more once its passes are in order (zero-bubble): the best of the
    other schedules, of which the search knows every byte, and a quicker one of those searched for less room."""
    split = tuple(schedule for schedule in request.schedules if schedule.splits_backward)
    others = tuple(schedule for schedule in request.schedules if not schedule.splits_backward)
    fitting = search(replace(request, schedules=others, wider=request), pricer, slack=_SLIGHT) if others else None
    if fitting is not None:
        yield finalist(request, pricer, _name(fitting.problem.shape), fitting)
    below, share = inf if fitting is None else fitting.partition.time, 1.0
    for _ in range(_TRIES):
        share *= min(bytes_on(request.budget, stage.device) / stage.memory.total for stage in over.plan.stages)
        less = replace(request, budget=as_budget(request.budget).scaled(share), schedules=split, wider=request)
        solved = search(less, pricer, below=below, slack=_SLIGHT)
        if solved is None:
            return
        over = finalist(request, pricer, _name(solved.problem.shape), solved)
        if over.fits:
            yield over
            return


def _add(options: list[Finalist], more: Finalist | None) -> None:
    if more is not None and all(traits(more.plan) != traits(option.plan) for option in options):
        options.append(more)


def traits(plan: Plan) -> tuple[object, ...]:
    """In what plans differ materially: pipeline, schedule, micro-batches, the degrees that most layers have, and how
    many of the layers recompute: none, some, most, all."""
    runs = [run for stage in plan.stages for run in stage.runs]
    layers = sum(run.count for run in runs)
    used = Counter[str]()
    for run in runs:
        used[str(run.strategy.split)] += run.count
    most = min(used, key=lambda name: (-used[name], name))
    recomputing = sum(run.count for run in runs if run.strategy != run.strategy.split)
    share = 0 if not recomputing else 3 if recomputing == layers else 1 + (2 * recomputing > layers)
    return len(plan.stages), plan.schedule, plan.virtual_stages, plan.microbatches, most, share


def slowest(options: Sequence[Finalist], tolerance: float, least: float) -> float:
    """Seconds that the plan may take at most, see ``quickest``."""
    fitting = [option for option in options if option.fits]
    best = min((option.seconds for option in fitting), default=inf)
    limit = max(best, min(best, least) / (1.0 - tolerance))
    return min([limit, *(option.seconds for option in fitting if option.name == USER_PLAN)])


def quickest(options: Sequence[Finalist], tolerance: float = 0.0, least: float = inf) -> Finalist:
    """The simplest finalist of those that fit and take, simulated, no more than the tolerance allows.

    These are, but for the tolerance, as quick as the quickest or as the least that any plan can take, whichever is
    less; none is slower than a plan of the user. Of them, those count whose expected step over scenarios is within the
    tolerance of the least. Without a tolerance: the quickest; of plans that differ by the search's rounding, the first.

    Args:
        options: the plan of least closed form first.
        tolerance: share of the step time.
        least: seconds that no plan's closed form is below.

    Raises:
        InfeasibleError: none fits: a zero-bubble plan may hold more than its schedule's limit of micro-batches once its
            passes are in order, where gradients of weights wait for more than forward keeps; and no other was found.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        peak = options[0].alternative.peak_memory
        raise InfeasibleError(
            f"The plan found needs {format_budget(peak, up=True)} a device once its passes are in order: "
            f"{options[0].alternative.summary}. Give that much, ask for another schedule, or for less recomputation.",
            peak,
        )
    best = min(fitting, key=lambda option: option.seconds)
    if not tolerance:
        first = options[0].fits and options[0].seconds * (1.0 - _ROUNDING) <= best.seconds
        return options[0] if first else best
    limit = slowest(fitting, tolerance, least)
    within = [option for option in fitting if option.seconds <= limit * (1.0 + _ROUNDING)]
    expected = min(option.expected for option in within)
    steady = [option for option in within if option.expected * (1.0 - tolerance) <= expected]
    return min(steady, key=lambda option: option.complexity)


def alternatives_to(options: Sequence[Finalist], chosen: Finalist, wanted: int) -> tuple[Alternative, ...]:
    """Up to ``wanted`` other finalists, quickest of those that fit first; of plans with one summary the first."""
    listed: dict[str, Alternative] = {summary(chosen.plan): chosen.alternative}
    for option in sorted(options, key=lambda option: (not option.fits, option.seconds)):
        listed.setdefault(summary(option.plan), option.alternative)
    return tuple(listed.values())[1 : 1 + max(wanted, 0)]


def _name(shape: Shape) -> str:
    if shape.stages == 1:
        return "no pipeline"
    schedule = "" if shape.schedule is DEFAULT_SCHEDULE else f", {shape.schedule}"
    return f"pipeline {shape.stages}{schedule}"


def _good_plan(
    request: Request, pricer: LayerPricer, name: str, below: float = ANY_TIME, *, within_budget: bool = True
) -> Finalist | None:
    """A good plan, quickly; None where none is met that takes less than so many picoseconds."""
    searched = request if within_budget else replace(request, budget=UNBOUNDED)
    solved = search(searched, pricer, below=below, effort=_FEW_LABELS)
    return None if solved is None else finalist(request, pricer, name or _name(solved.problem.shape), solved)


def finalist(request: Request, pricer: LayerPricer, name: str, result: SolvedPlan) -> Finalist:
    """What a search ended with, simulated."""
    plan = finished(request, pricer, result)
    return Finalist(name, result, plan, request.fits(plan))


def priced_user_plans(request: Request, pricer: LayerPricer, plans: Sequence[Plan]) -> tuple[SolvedPlan, ...]:
    """The plans that fit the budget and keep the pins, as what a search might have ended with, quickest first.

    They need not be in the declared space: what its rules leave out is priced all the same.

    Raises:
        InputError: a plan of other devices or another batch, of another model, or that cannot be run on it.
    """
    for plan in plans:
        for name in ("devices", "global_batch"):
            if getattr(plan, name) != getattr(request, name):
                raise InputError(f"known plan, {name}", getattr(plan, name), f"Asked is {getattr(request, name)}.")
        if plan.cyclic is not None:
            raise InputError("known plan, cyclic", plan.cyclic.rule.value, "The search finds such plans itself.")
    wanted = (plan for plan in plans if _keeps(request, pricer, plan) and request.fits(price_plan(pricer, plan)))
    return tuple(
        sorted((as_result(request, pricer, plan) for plan in wanted), key=lambda solved: solved.partition.time)
    )


def _keeps(request: Request, pricer: LayerPricer, plan: Plan) -> bool:
    fixed, backend = request.fixed, request.space.backend
    pins = (
        (fixed.pipeline, plan.pipeline),
        (fixed.microbatches, plan.microbatches),
        (fixed.schedule if plan.pipeline > 1 else None, plan.schedule),
        (fixed.virtual if plan.pipeline > 1 else None, plan.virtual_stages),
    )
    if any(pin is not None and pin != value for pin, value in pins):
        return False
    if plan.pipeline > 1 and ("pipeline" in fixed.forbidden or plan.schedule not in request.schedules):
        return False
    pairs = zip(request.graph.layers, strategies_of(plan, pricer.profile), strict=True)
    return all(
        backend.runs(strategy) and fixed.allows(strategy) and fixed.allows_in(layer.name, strategy)
        for layer, strategy in pairs
    )


def as_result(request: Request, pricer: LayerPricer, plan: Plan) -> SolvedPlan:
    """A plan as what a search might have ended with."""
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    seconds = bound_seconds(pricer.profile, shape, price_stages(pricer, shape, sizes, strategies))
    work = seconds / straggling(pricer.profile, plan.devices) - pricer.profile.overhead.step
    cuts = (0, *accumulate(sizes))
    stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(cuts))
    return SolvedPlan(open_problem(request, pricer, shape), Partition(ticks(work), cuts, stages), from_user=True)
