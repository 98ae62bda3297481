"""Finalists: the plan of least closed form and good plans of other shapes, compared by simulation and over scenarios.

Scenarios are where things are not as the cost model assumes: slow links, less that hides, other kernels. Nobody has
measured these on a cluster that is planned for by its data sheet. Each plan is priced again by the closed form under
each scenario; what that is more or less than as assumed, its simulated time is, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from operator import mul

from galvatron_lite.cluster.budget import as_budget, bytes_on
from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, shape_of, strategies_of
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.registry import SHAPES
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, Alternative, Plan
from galvatron_lite.profiler.schema import LayerPoint, OriginKind, Profile
from galvatron_lite.search.best_first import MOST_WORK, SolvedPlan, finished, search
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Request, open_problem, shapes_of
from galvatron_lite.search.space import Fixed
from galvatron_lite.units import format_budget

LINKS, HIDDEN, KERNELS = 0.5, 0.6, 0.1
"""Factors on the bandwidth beyond a node and on what compute hides, and by how much kernels are quicker or slower: the
average error of estimated step times of published runs is about as much."""
_OVERLAPPING = ("data", "zero")
"""Causes of communication that hides wholly where a profile says nothing."""


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds of a step over all scenarios."""

    least: float  # least, most: of any
    most: float
    mean: float  # the expected step, all alike


def ranges_of(pricer: LayerPricer, plans: Sequence[Plan]) -> list[Range]:
    """The range of each plan, which has its prediction."""
    profile = pricer.profile
    others = [LayerPricer(other) for other in scenarios_of(profile)]
    found = []
    for plan in plans:
        strategies = strategies_of(plan, profile)
        shape = shape_of(plan, strategies)
        assumed = _closed_seconds(pricer, plan, shape, strategies)
        step = plan.prediction.step_seconds if plan.prediction else assumed
        seconds = [step, *(step * _closed_seconds(other, plan, shape, strategies) / assumed for other in others)]
        found.append(Range(min(seconds), max(seconds), sum(seconds) / len(seconds)))
    return found


def _closed_seconds(pricer: LayerPricer, plan: Plan, shape: Shape, strategies: Sequence[Strategy]) -> float:
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    return bound_seconds(pricer.profile, shape, price_stages(pricer, shape, sizes, strategies, memory=False))


def scenarios_of(profile: Profile) -> list[Profile]:
    """The profile as it would be under each scenario; kernels that were measured are as they are."""
    found = [_slow_links(profile), _less_hidden(profile)]
    if profile.origin.kind is OriginKind.ESTIMATED:
        found += [_kernels(profile, 1.0 - KERNELS), _kernels(profile, 1.0 + KERNELS)]
    return found


def _slow_links(profile: Profile) -> Profile:
    cluster = profile.cluster
    inside = list(accumulate((level.size for level in cluster.levels), mul))
    first = min(1, len(inside) - 1)
    node = inside[0] if first else 1
    levels = [
        replace(level, bandwidth=LINKS * level.bandwidth) if place >= first else level
        for place, level in enumerate(cluster.levels)
    ]
    groups = tuple(
        replace(group, levels=tuple(
            replace(level, bandwidth=LINKS * level.bandwidth) if place >= first else level
            for place, level in enumerate(group.levels)
        ))
        for group in cluster.groups
    )  # fmt: skip
    far = [fit for fit in profile.fits if (fit.group - 1) * fit.stride >= node]
    fits = tuple(replace(fit, bandwidth=LINKS * fit.bandwidth) if fit in far else fit for fit in profile.fits)
    near = tuple(point for point in profile.collectives if (point.group - 1) * point.stride < node)
    slow = replace(cluster, levels=tuple(levels), groups=groups)
    return replace(profile, cluster=slow, fits=fits, collectives=near)


def _less_hidden(profile: Profile) -> Profile:
    shares = {**dict.fromkeys(_OVERLAPPING, 1.0), **profile.hidden}
    return replace(profile, hidden={cause: HIDDEN * share for cause, share in shares.items()})


def _kernels(profile: Profile, factor: float) -> Profile:
    def scaled(points: Sequence[LayerPoint]) -> tuple[LayerPoint, ...]:
        return tuple(replace(one, forward=factor * one.forward, backward=factor * one.backward) for one in points)

    types = tuple(replace(one, layers=scaled(one.layers)) for one in profile.types)
    return replace(profile, layers=scaled(profile.layers), types=types)


UNBOUNDED = 2**60
_ROUNDING = 1e-9
_TRIES = 3
"""How often a plan is made for less room, until one fits, and how many fewer stages a group are tried."""
_REACH, _FARTHEST, _WORK, _LITTLE = 0.03, 0.15, 400_000, 20_000
"""By how much a simulated step may be below its closed form for a plan to be looked at, at least and at most, and
labels for each degree, and for each shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """A plan whose step has been simulated."""

    name: str  # of its shape
    found: SolvedPlan  # what a search ended with
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
        own = [run.strategy for stage in self.plan.stages for run in stage.runs]
        return sum(a != b for a, b in pairwise(own)), len(set(own)), self.alternative.peak_memory, self.seconds

    @property
    def alternative(self) -> Alternative:
        """What is told of it where another one is the plan."""
        peak = self.plan.prediction.peak_memory if self.plan.prediction else 0
        ends = (self.range.least, self.range.most) if self.range else (0.0, 0.0)
        words = summary(self.plan)
        begin = f"{self.name.partition(', ')[0]}, "  # what the name says already
        return Alternative(f"{self.name}: {words.removeprefix(begin)}", self.seconds, peak, self.fits, *ends)


def finalists(
    request: Request,
    pricer: LayerPricer,
    best: SolvedPlan,
    wanted: int = 3,
    further: Sequence[SolvedPlan] = (),
    simple: Sequence[Finalist] = (),
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
        simple: plans that were simulated before the search.
    """
    first = _finalist(request, pricer, _name(best.problem.shape), best)
    beside = [one for one in further if one.partition is not best.partition]
    options = [first, *(_finalist(request, pricer, "given", one) for one in beside)]
    if not first.fits:
        options += _instead(request, pricer, first)
    options += [
        one for one in simple if one.plan.stages != first.plan.stages or one.plan.schedule != first.plan.schedule
    ]
    if all(one.found.problem.shape != best.problem.shape for one in simple):
        options += _fewer_stages(request, pricer, first)
    if request.runs is None and not best.stopped:
        for one in _near(request, pricer, best):
            _add(options, one)
    if wanted < 1:
        return tuple(options)
    others = [other for other in best.others if other.partition is not best.partition]
    for other in sorted(others, key=lambda other: other.partition.time)[:wanted]:
        _add(options, _finalist(request, pricer, _name(other.problem.shape), other))
    for name, fixed in _others(request):
        if len({option.name for option in options} - {"given"}) > wanted:
            break
        if name not in {option.name for option in options}:
            _add(options, _best_of(replace(request, fixed=fixed), pricer, name))
    return tuple(options)


def pipelines(request: Request, pricer: LayerPricer, best: SolvedPlan, slack: float) -> tuple[Finalist, ...]:
    """For each pipeline degree the plan of least closed form, where that is near the best plan's, the same with fewer
    stages a group, and beside a zero-bubble one the best of other schedules; all simulated, for which of them is
    quickest the closed form does not tell.

    Args:
        request: what is planned.
        pricer: of the profile.
        best: the plan of least closed form over all degrees.
        slack: see ``search``.
    """
    options = list[Finalist]()
    for degree in request.pipelines if len(request.pipelines) > 1 else ():
        own = replace(request, fixed=replace(request.fixed, pipeline=degree))
        below = int(best.partition.time * (1.0 + _REACH))
        found = _searched(own, pricer, below=below, slack=slack, effort=_WORK) if degree > 1 else None
        if found is None:
            continue
        first = _finalist(request, pricer, _name(found.problem.shape), found)
        options += [first, *_fewer_stages(request, pricer, first)]
        others = tuple(schedule for schedule in request.schedules if not schedule.splits_backward)
        if first.plan.schedule.splits_backward and others:
            # its closed form leaves out waits that simulation shows, which those of the others have
            found = _searched(replace(own, schedules=others), pricer, below=below, slack=slack, effort=_WORK)
            if found is not None:
                second = _finalist(request, pricer, _name(found.problem.shape), found)
                options += [second, *_fewer_stages(request, pricer, second)]
    return tuple(options)


def _near(request: Request, pricer: LayerPricer, best: SolvedPlan) -> Iterator[Finalist]:
    """The best plans of other shapes of pipelines whose closed form is so near that a simulation may put them first.

    The fewer micro-batches there are, the more filling and draining count, which the closed form is too high for.
    """
    for shape in shapes_of(request) if best.gap == 0.0 else ():
        if shape.stages == 1 or shape == best.problem.shape:
            continue
        reach = min(_REACH + (shape.stages - 1) / (2 * shape.microbatches), _FARTHEST)
        below = int(best.partition.time * (1.0 + reach))
        known = open_problem(request, pricer, shape).answers
        if max(known.glanced, known.averaged) < below:
            fixed = replace(
                request.fixed, pipeline=shape.stages, microbatches=shape.microbatches, virtual=shape.virtual
            )
            narrow = replace(request, fixed=fixed, schedules=(shape.schedule,))
            found = _searched(narrow, pricer, below=below, effort=_LITTLE)
            if found is not None:
                yield _finalist(request, pricer, _name(shape), found)


def _fewer_stages(request: Request, pricer: LayerPricer, first: Finalist) -> Iterator[Finalist]:
    """Plans like one, with fewer stages a group, that are quicker: the closed form knows less of uneven ones, which
    waits show in simulation."""
    shape = first.found.problem.shape
    if shape.schedule.virtual_stages is not None or request.fixed.virtual is not None:
        return
    below = int(first.found.partition.time * (1.0 + _REACH))
    for virtual in range(shape.virtual - 1, max(shape.virtual - 1 - _TRIES, 1), -1):
        fixed = replace(request.fixed, pipeline=shape.stages, microbatches=shape.microbatches, virtual=virtual)
        narrow = replace(request, fixed=fixed, schedules=(shape.schedule,))
        found = _searched(narrow, pricer, below=below)
        if found is not None:
            fewer = _finalist(request, pricer, f"{_name(shape)} of {virtual} stages each", found)
            if fewer.seconds < first.seconds:
                yield fewer


def _instead(request: Request, pricer: LayerPricer, over: Finalist) -> Iterator[Finalist]:
    """Plans that fit, where the one found holds more once its passes are in order (zero-bubble): the best of the other
    schedules, of which the search knows every byte, and one of its own that was made for less room.
    """
    others = tuple(schedule for schedule in request.schedules if not schedule.splits_backward)
    known = _searched(replace(request, schedules=others), pricer) if others else None
    if known is not None:
        yield _finalist(request, pricer, _name(known.problem.shape), known)
    share = 1.0
    for _ in range(_TRIES):
        share *= min(bytes_on(request.budget, stage.device) / stage.memory.total for stage in over.plan.stages)
        found = _searched(replace(request, budget=as_budget(request.budget).scaled(share)), pricer)
        if found is None:
            return
        over = _finalist(request, pricer, _name(found.problem.shape), found)
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
        used[str(replace(run.strategy, recompute=Recompute.NONE))] += run.count
    most = min(used, key=lambda name: (-used[name], name))
    recomputing = sum(run.count for run in runs if run.strategy.recompute is not Recompute.NONE)
    share = 0 if not recomputing else 3 if recomputing == layers else 1 + (2 * recomputing > layers)
    return len(plan.stages), plan.schedule, plan.virtual_stages, plan.microbatches, most, share


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
        raise _overfull(options[0])
    best = min(fitting, key=lambda option: option.seconds)
    if not tolerance:
        first = options[0].fits and options[0].seconds * (1.0 - _ROUNDING) <= best.seconds
        return options[0] if first else best
    limit = max(best.seconds, min(best.seconds, least) / (1.0 - tolerance))
    limit = min([limit, *(option.seconds for option in fitting if option.name == "given")])
    within = [option for option in fitting if option.seconds <= limit * (1.0 + _ROUNDING)]
    expected = min(_expected(option) for option in within)
    steady = [option for option in within if _expected(option) * (1.0 - tolerance) <= expected]
    return min(steady, key=lambda option: option.complexity)


def _expected(option: Finalist) -> float:
    return option.range.mean if option.range else option.seconds


def _overfull(option: Finalist) -> InfeasibleError:
    peak = option.alternative.peak_memory
    return InfeasibleError(
        f"The plan found needs {format_budget(peak, up=True)} a device once its passes are in order: "
        f"{option.alternative.summary}. Give that much, ask for another schedule, or for less recomputation.",
        peak,
    )


def alternatives_to(options: Sequence[Finalist], chosen: Finalist, wanted: int) -> tuple[Alternative, ...]:
    """Up to ``wanted`` other finalists, quickest of those that fit first; plans that read alike are told once."""
    told: dict[str, Alternative] = {summary(chosen.plan): chosen.alternative}
    for option in sorted(options, key=lambda option: (not option.fits, option.seconds)):
        told.setdefault(summary(option.plan), option.alternative)
    return tuple(told.values())[1 : 1 + max(wanted, 0)]


def _others(request: Request) -> Iterator[tuple[str, Fixed]]:
    """Well-known plans without a pipeline, within the declared space."""
    for name, fields in SHAPES if request.fixed == Fixed() and request.devices > 1 else ():
        fixed = Fixed(pipeline=1, strategy=tuple(fields.items()))
        if _declared(request, fixed, request.devices):
            yield name, fixed


def _declared(request: Request, fixed: Fixed, devices: int) -> bool:
    """Whether the space's own rules leave every layer a strategy; pins by name may go beyond them."""
    return all(
        request.space.offers(kind, devices, fixed) for kind in sorted({one.kind for one in request.graph.layers})
    )


def _name(shape: Shape) -> str:
    if shape.stages == 1:
        return "no pipeline"
    order = "" if shape.schedule is DEFAULT_SCHEDULE else f", {shape.schedule}"
    return f"pipeline {shape.stages}{order}"


def _best_of(request: Request, pricer: LayerPricer, name: str) -> Finalist | None:
    for budget in (request.budget, UNBOUNDED):
        found = _searched(replace(request, budget=budget), pricer, exact=False)
        if found is not None:
            return _finalist(request, pricer, name, found)
    return None


def _searched(
    request: Request,
    pricer: LayerPricer,
    *,
    exact: bool = True,
    below: int | None = None,
    slack: float = 0.0,
    effort: int = MOST_WORK,
) -> SolvedPlan | None:
    """What a search ends with; None where nothing fits, or the pins leave no plan of this shape."""
    try:
        return search(request, pricer, exact=exact, below=below, slack=slack, effort=effort)
    except InputError:
        return None


def _finalist(request: Request, pricer: LayerPricer, name: str, result: SolvedPlan) -> Finalist:
    plan = finished(request, pricer, result)
    return Finalist(name, result, plan, request.fits(plan))
