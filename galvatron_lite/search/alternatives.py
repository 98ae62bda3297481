"""Finalists: the plan of least closed form and good plans of other shapes, compared by simulation and over scenarios.

Scenarios are where things are not as the cost model assumes: slow links, less that hides, other kernels, stragglers.
Nobody has measured these on a cluster that is planned for by its data sheet; how far they go is the spread that
constants fitted to published runs have (``spread_of``). Each plan is priced again by the closed form under each
scenario; what that is more or less than as assumed, its simulated time is, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cluster.budget import as_budget, bytes_on
from galvatron_lite.cluster.cluster import Level
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, price_stages, shape_of, straggling, strategies_of
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.parallelism.pipeline.schedule import Schedule
from galvatron_lite.parallelism.registry import SHAPES, SPREADING
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Alternative, Plan
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.search.best_first import ANY_TIME, SolvedPlan, finished, search
from galvatron_lite.search.problem import Partition, StagePlan
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Request, open_problem, shapes_of
from galvatron_lite.search.space import UNPINNED, Fixed
from galvatron_lite.search.tables import ticks
from galvatron_lite.units import format_budget

_OVERLAPPING = ("data", "zero")
"""Causes of communication that hides wholly where a profile says nothing."""
_INSIDE = ("nvlink", "pcie")
"""How the names of links inside a node begin."""
_HARDLY = 0.1
"""A share of what hides up to which software is documented not to overlap: no fit says so."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far what a plan is priced with may be from what a run meets."""

    links: float  # factor on the bandwidth beyond a node
    hidden: float  # factor on what compute hides
    kernels: float  # share by which kernels may be slower or quicker
    straggling: float  # relative growth of the step time with each doubling of nodes (``Profile.straggling``)


def spread_of(calibration: Calibration) -> Spread:
    """The spread of constants over link types and software stacks that were fitted to published runs, and the average
    error of step times where the software was not seen (``expected_error``).

    Links and hiding: the least fitted constant over the greatest. Stragglers: the greatest fitted one. All of entries
    that rest on rows of ``profiles/published/runs.jsonl``, as ``configs/calibration`` says of each.
    """
    fitted = {name for name, origin in calibration.origins.items() if origin.rows}
    links = [
        link.efficiency
        for name, link in calibration.links.items()
        if f"links/{name}" in fitted and not name.startswith(_INSIDE)
    ]
    stacks = [stack for name, stack in calibration.stacks.items() if f"stacks/{name}" in fitted]
    shares = [stack.hidden.get(cause, 0.0) for stack in stacks for cause in _OVERLAPPING]
    hidden = [share for share in shares if share > _HARDLY]
    return Spread(
        links=min(links, default=1.0) / max(links, default=1.0),
        hidden=min(hidden, default=1.0) / max(hidden, default=1.0),
        kernels=calibration.expected_error.get("without_family", 0.0),
        straggling=max((stack.straggling for stack in stacks), default=0.0),
    )


@cache
def _shipped_spread() -> Spread:
    return spread_of(load_calibration())


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds of a step over all scenarios."""

    least: float  # least, most: of any
    most: float
    mean: float  # the expected step, all alike


def ranges_of(pricer: LayerPricer, plans: Sequence[Plan]) -> list[Range]:
    """The range of each plan, which has its prediction."""
    others = [
        LayerPricer(profile, works=pricer.works, sizes=pricer.sizes, points=pricer.points, compute=compute)
        for profile, compute in scenarios_of(pricer.profile)
    ]
    worst = max(pricer.profile.straggling, _shipped_spread().straggling)
    straggler, ranges = replace(pricer.profile, straggling=worst), list[Range]()
    for plan in plans:
        strategies = strategies_of(plan, pricer.profile)
        shape, sizes = shape_of(plan, strategies), [sum(run.count for run in stage.runs) for stage in plan.stages]
        assumed, *varied = (
            bound_seconds(one_pricer.profile, shape, price_stages(one_pricer, shape, sizes, strategies, memory=False))
            for one_pricer in (pricer, *others)
        )
        step = plan.prediction.step_seconds if plan.prediction else assumed
        late = straggling(straggler, plan.devices) / straggling(pricer.profile, plan.devices)
        seconds = [step, *(step * other / assumed for other in varied), step * late]
        ranges.append(Range(min(seconds), max(seconds), sum(seconds) / len(seconds)))
    return ranges


def scenarios_of(profile: Profile) -> list[tuple[Profile, float]]:
    """The profile as it would be under each scenario that layers are priced anew under, with a factor on its compute.

    These are slow links, less hidden, and quick or slow kernels where these were estimated, not measured.
    """
    cluster, spread = profile.cluster, _shipped_spread()
    first = min(1, len(cluster.levels) - 1)
    node = cluster.levels[0].size if first else 1

    def slowed(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            replace(level, bandwidth=spread.links * level.bandwidth) if place >= first else level
            for place, level in enumerate(levels)
        )

    groups = tuple(replace(group, levels=slowed(group.levels)) for group in cluster.groups)
    near = [(point.group - 1) * point.stride < node for point in profile.fits]
    fits = (
        fit if inside else replace(fit, bandwidth=spread.links * fit.bandwidth)
        for fit, inside in zip(profile.fits, near, strict=True)
    )
    slow = replace(
        profile, cluster=replace(cluster, levels=slowed(cluster.levels), groups=groups), fits=tuple(fits),
        collectives=tuple(point for point in profile.collectives if (point.group - 1) * point.stride < node),
    )  # fmt: skip
    shares = {**dict.fromkeys(_OVERLAPPING, 1.0), **profile.hidden}
    shown = replace(profile, hidden={cause: spread.hidden * share for cause, share in shares.items()})
    kernels = (1.0 - spread.kernels, 1.0 + spread.kernels) if profile.origin.kind is OriginKind.ESTIMATED else ()
    return [(slow, 1.0), (shown, 1.0), *((profile, factor) for factor in kernels)]


GIVEN = "given"
"""Name of the user's own plans."""
UNBOUNDED = 2**60
_ROUNDING = 1e-9
_TRIES = 3
"""How often a plan is made for less room, until one fits, and how many fewer stages a group are tried."""
_SLIGHT = 0.005
"""By what share another plan may be quicker than one that is looked for instead."""
_REACH, _FARTHEST, _LITTLE = 0.03, 0.15, 20_000
"""By how much a simulated step may be below its closed form for a plan to be looked at, at least and at most, and
labels for each shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """A plan whose step has been simulated."""

    name: str  # of its shape
    solved: SolvedPlan  # what a search ended with
    plan: Plan  # with its prediction
    fits: bool  # whether that is within the budget
    range: Range | None = None  # of its step over scenarios; None: not asked for

    @property
    def seconds(self) -> float:
        """Of a step, simulated."""
        return self.plan.prediction.step_seconds if self.plan.prediction else float("inf")

    @property
    def complexity(self) -> tuple[int, int, int, float]:
        """How often neighbouring layers differ in strategy, strategies, bytes of the fullest device, seconds."""
        strategies = [run.strategy for stage in self.plan.stages for run in stage.runs]
        return (
            sum(a != b for a, b in pairwise(strategies)),
            len(set(strategies)),
            self.alternative.peak_memory,
            self.seconds,
        )

    @property
    def alternative(self) -> Alternative:
        """What is told of it where another one is the plan."""
        peak = self.plan.prediction.peak_memory if self.plan.prediction else 0
        ends = (self.range.least, self.range.most) if self.range else (0.0, 0.0)
        words = summary(self.plan)
        begin = f"{self.name.partition(', ')[0]}, "  # what the name says already
        return Alternative(f"{self.name}: {words.removeprefix(begin)}", self.seconds, peak, self.fits, *ends)

    @property
    def expected(self) -> float:
        """Seconds of a step over all scenarios; as simulated where they were not asked for."""
        return self.range.mean if self.range else self.seconds


def finalists(
    request: Request,
    pricer: LayerPricer,
    best: SolvedPlan,
    wanted: int = 3,
    further: Sequence[SolvedPlan] = (),
    near: bool = False,
) -> tuple[Finalist, ...]:
    """What the search found, first, and good plans that differ materially from it and one another, not proven ones.

    They are the best plans of other pipeline degrees and schedules that the search has met, then well-known plans
    without a pipeline from quick searches. A shape of which no plan is met that fits has its quickest plan, marked as
    not fitting.

    Args:
        request: what was planned.
        pricer: of the profile.
        best: what the search ended with.
        wanted: so many others are looked for; 0: none.
        further: plans that the user has.
        near: whether the best plans of all shapes are looked for whose closed form is so near that a simulation may
            put them first.
    """
    first = finalist(request, pricer, _name(best.problem.shape), best)
    beside = [one for one in further if one.partition is not best.partition]
    options = [first, *(finalist(request, pricer, GIVEN, one) for one in beside)]
    if not first.fits:
        options += _instead(request, pricer, first)
    others = sorted(best.others, key=lambda other: other.partition.time)
    others = [other for other in others if other.partition is not best.partition]
    close = [other for other in others if other.partition.time <= best.partition.time * (1.0 + _REACH)]
    for other in dict.fromkeys([*close, *others[:wanted]]):
        _add(options, finalist(request, pricer, _name(other.problem.shape), other))
    if first.plan.schedule.splits_backward:
        # closed forms of such schedules leave out waits that simulation shows, each others
        fixed = replace(request.fixed, pipeline=best.problem.shape.stages)
        below = int(best.partition.time * (1.0 + _REACH))
        for schedules in _beside(request.schedules, first.plan.schedule):
            rival = _best_of(replace(request, fixed=fixed, schedules=schedules), pricer, "", below)
            # a slower plan of the same kind would take a runner-up's place that another kind tells more in
            if rival and (rival.seconds < first.seconds or not rival.plan.schedule.splits_backward):
                _add(options, rival)
    for shape in _near_shapes(request, pricer, best, near):
        below = int(best.partition.time * (1.0 + _reach(shape)))
        _add(options, _best_of(shaped(request, shape), pricer, _name(shape), below))
    if wanted < 1:
        return tuple(options)
    for name, fixed in _families(request) if request.fixed == Fixed() and request.devices > 1 else ():
        names = {option.name for option in options} - {GIVEN}
        # pins may go beyond the space's own rules, which are to leave every layer a strategy
        unlike = {(layer.kind, fixed.at_layer(layer.name)) for layer in request.graph.layers}
        sought = len(names) <= wanted or name in dict(SPREADING)
        if sought and name not in names and all(
            request.space.offers(kind, request.devices, pinned) for kind, pinned in unlike
        ):  # fmt: skip
            narrowed = replace(request, fixed=fixed)
            _add(options, _best_of(narrowed, pricer, name) or _best_of(narrowed, pricer, name, budget=UNBOUNDED))
    return tuple(options)


def _families(request: Request) -> Iterator[tuple[str, Fixed]]:
    """Well-known plans without a pipeline, as pins: those of ``SHAPES``; then those that spread what some kinds of
    layers can, over as many devices of a node as they can."""
    for name, degrees in SHAPES:
        yield name, Fixed(pipeline=1, strategy=tuple(degrees.items()))
    space, layers = request.space, request.graph.layers
    offered = {layer.kind: space.strategies(layer.kind, request.devices, UNPINNED) for layer in layers}
    for name, degree in SPREADING:
        ways = {kind: {getattr(one, degree) for one in strategies} for kind, strategies in offered.items()}
        most = {
            kind: max((some for some in every if some <= space.node_devices), default=1) for kind, every in ways.items()
        }
        pins = tuple((layer.name, degree, most[layer.kind]) for layer in layers if most[layer.kind] > 1)
        if pins:
            yield name, Fixed(pipeline=1, layers=pins)


def _beside(schedules: Sequence[Schedule], schedule: Schedule) -> list[tuple[Schedule, ...]]:
    """Other schedules to compare one with that splits backward: those that do so too, each by itself, and the rest."""
    split: list[tuple[Schedule, ...]] = [(one,) for one in schedules if one.splits_backward and one is not schedule]
    rest = tuple(schedule for schedule in schedules if not schedule.splits_backward)
    return [*split, rest] if rest else split


def _reach(shape: Shape) -> float:
    """By what share a simulation may be below the closed form: the fewer micro-batches there are, the more filling and
    draining count, which the closed form is too high for."""
    return min(_REACH + (shape.stages - 1) / (2 * shape.microbatches), _FARTHEST)


def shaped(request: Request, shape: Shape) -> Request:
    """A request of plans of one shape."""
    fixed = replace(request.fixed, pipeline=shape.stages, microbatches=shape.microbatches, virtual=shape.virtual)
    return replace(request, fixed=fixed, schedules=(shape.schedule,))


def _near_shapes(request: Request, pricer: LayerPricer, best: SolvedPlan, near: bool) -> Iterator[Shape]:
    """Shapes of pipelines whose best plan a simulation may put first: those of near bounds, if they are asked for, and
    those of fewer stages a group, of which the closed form knows less where they are uneven."""
    own, compute_bounds = best.problem.shape, request.prices.compute_bounds(pricer.profile)
    for shape in shapes_of(request) if near and best.gap == 0.0 else ():
        below = int(best.partition.time * (1.0 + _reach(shape)))
        if shape.stages == 1 or shape == own or compute_bounds.bound(request.graph, shape) >= below:
            continue
        if open_problem(request, pricer, shape).answers.averaged < below:
            yield shape
    if own.schedule.virtual_stages is None and request.fixed.virtual is None:
        for virtual in range(own.virtual - 1, max(own.virtual - 1 - _TRIES, 1), -1):
            yield replace(own, virtual=virtual)


def _instead(request: Request, pricer: LayerPricer, over: Finalist) -> Iterator[Finalist]:
    """Plans that fit, where the one found holds more once its passes are in order (zero-bubble): the best of the other
    schedules, of which the search knows every byte, and a quicker one of those that was made for less room.
    """
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
    return min([limit, *(option.seconds for option in fitting if option.name == GIVEN)])


def quickest(options: Sequence[Finalist], tolerance: float = 0.0, least: float = inf) -> Finalist:
    """The simplest finalist of those that fit and take, simulated, no more than the tolerance allows.

    These are as quick as the quickest, or as the least that any plan can take, whichever is less, but for the
    tolerance; none is slower than a given one. Of them, those count whose expected step over scenarios is within the
    tolerance of the least. Without a tolerance: the quickest; the first, where the difference is a picosecond or so, by
    which the search rounds.

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
    """Up to ``wanted`` other finalists, quickest of those that fit first; plans that read alike are told once."""
    listed: dict[str, Alternative] = {summary(chosen.plan): chosen.alternative}
    for option in sorted(options, key=lambda option: (not option.fits, option.seconds)):
        listed.setdefault(summary(option.plan), option.alternative)
    return tuple(listed.values())[1 : 1 + max(wanted, 0)]


def _name(shape: Shape) -> str:
    if shape.stages == 1:
        return "no pipeline"
    order = "" if shape.schedule is DEFAULT_SCHEDULE else f", {shape.schedule}"
    return f"pipeline {shape.stages}{order}"


def _best_of(
    request: Request, pricer: LayerPricer, name: str, below: float = ANY_TIME, budget: int | None = None
) -> Finalist | None:
    """A good plan, soon; within another budget than that of the request where one is given."""
    limited = request if budget is None else replace(request, budget=budget)
    solved = search(limited, pricer, below=below, effort=_LITTLE)
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
