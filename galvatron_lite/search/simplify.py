"""The simplest plan within a tolerance of the best, and plans that the user has: what searches begin and end with.

The search over everything ends with a time that no plan beats. Plans whose layers change their strategy nowhere within
a stage (the layers before, among and after the blocks apart) are searched next, for one within the tolerance of that
time: without a pipeline, then with one stage a group of devices, then any. Then those with one change a stage, then
with two. These are the same exact search over a smaller space (``Request.runs``). Of the plan found, equal layers
are put in order and strategies in each other's place while it fits and stays within the tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import layout
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import bound_seconds, shape_of, straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.best_first import SolvedPlan, search
from galvatron_lite.search.problem import Partition, StagePlan, is_glued, part_of
from galvatron_lite.search.shapes import Request, open_problem
from galvatron_lite.search.tables import glue_of, ticks

SLACK = 0.5
"""Share of the tolerance that the search over everything may leave open."""
_MOST_RUNS = 3
_WORK, _TRIALS = 400_000, 150
"""Labels that a search for each number of runs may look at, and plans priced to put strategies together; counted, not
timed, so that results repeat."""


def simple(request: Request, pricer: LayerPricer, tolerance: float, start: SolvedPlan | None) -> SolvedPlan | None:
    """A plan to begin with: the best whose layers change their strategy nowhere within a stage, or ``start``."""
    narrow = replace(request, runs=1)
    return search(narrow, pricer, start=start, slack=SLACK * tolerance, effort=_WORK) or start


def simplest(request: Request, pricer: LayerPricer, result: SolvedPlan, tolerance: float) -> SolvedPlan:
    """The simplest plan that takes at most 1 / (1 - tolerance) of what the best plan takes at the least.

    Args:
        request: what was planned.
        pricer: of the profile.
        result: what the search over everything ended with.
        tolerance: share of the time.
    """
    least = result.partition.time * (1.0 - result.gap)
    limit = max(int(least / (1.0 - tolerance)), result.partition.time)
    best, most = result, most_runs(request, result)
    for runs in range(1, min(most, _MOST_RUNS) + 1):
        below = partial(
            search, pricer=pricer, below=limit + 1, slack=SLACK * tolerance, settled=tolerance, effort=_WORK
        )
        simple = result if runs == most else below(replace(_like(request, result.problem.shape), runs=runs))
        if simple is not None:
            narrower = (below(replace(narrow, runs=runs)) for narrow in _narrower(request, simple.problem.shape))
            best = next((one for one in narrower if one is not None), simple)
            break
    best = _merged(request, pricer, best, limit)
    gap = max(1.0 - least / best.partition.time, 0.0)
    return replace(best, gap=gap, others=(best, *(one for one in result.others if one is not result)), stopped=False)


def _like(request: Request, shape: Shape) -> Request:
    """The request of plans of a shape's kind: without a pipeline, or with schedules of one stage a group of devices."""
    few = tuple(schedule for schedule in request.schedules if schedule.simple)
    if shape.stages == 1:
        return replace(request, fixed=replace(request.fixed, pipeline=1))
    return replace(request, schedules=few) if shape.schedule.simple and few else request


def _narrower(request: Request, shape: Shape) -> list[Request]:
    few = tuple(schedule for schedule in request.schedules if schedule.simple)
    narrower = [replace(request, schedules=few)] if few and not shape.schedule.simple else []
    if shape.stages > 1 and request.fixed.pipeline is None and "pipeline" not in request.fixed.forbidden:
        narrower.insert(0, replace(request, fixed=replace(request.fixed, pipeline=1)))
    return narrower


def most_runs(request: Request, result: SolvedPlan) -> int:
    """Of the stages of a plan: the most runs of equal strategies among the layers of one part of the model."""
    parts = part_of(request.graph)
    runs = [
        len(list(groupby(group, lambda pair: pair[1])))
        for stage, (a, b) in zip(result.partition.stages, pairwise(result.partition.cuts), strict=True)
        for _, group in groupby(zip(parts[a:b], stage.strategies, strict=True), lambda pair: pair[0])
    ]
    return max(runs)


def _merged(request: Request, pricer: LayerPricer, result: SolvedPlan, limit: int) -> SolvedPlan:
    """The plan with as few changes of strategy, and as few strategies, as single replacements lead to."""
    trials = 0
    while trials < _TRIALS:
        own = [strategy for stage in result.partition.stages for strategy in stage.strategies]
        options = [_sorted(request, result, own), *sorted(_replacements(own), key=_changes)]
        for option in options:
            if _changes(option) >= _changes(own) or trials >= _TRIALS or not _allowed(request, result, option):
                continue
            trials += 1
            partition = _priced(request, pricer, result, option)
            if partition is not None and partition.time <= limit:
                result = replace(result, partition=partition)
                break
        else:
            return result
    return result


def _changes(strategies: Sequence[Strategy]) -> tuple[int, int]:
    return sum(a != b for a, b in pairwise(strategies)), len(set(strategies))


def _sorted(request: Request, result: SolvedPlan, strategies: Sequence[Strategy]) -> list[Strategy]:
    """With equal layers in one stage in the order of their strategies: the one used most first."""
    used, cuts = Counter(strategies), result.partition.cuts
    stages = [stage for stage, (a, b) in enumerate(pairwise(cuts)) for _ in range(a, b)]
    places = zip(stages, (layer.kind for layer in request.graph.layers), strategies, strict=True)
    runs = groupby(places, key=lambda place: place[:2])
    return [one for _, run in runs for *_, one in sorted(run, key=lambda place: (-used[place[2]], place[2]))]


def _replacements(strategies: Sequence[Strategy]) -> Iterator[list[Strategy]]:
    """With one strategy in the place of another, everywhere and in single runs."""
    kinds = list(dict.fromkeys(strategies))
    for a in kinds:
        for b in kinds:
            if a != b:
                yield [b if one == a else one for one in strategies]
    runs = [(strategy, len(list(group))) for strategy, group in groupby(strategies)]
    start = 0
    for number, (_, count) in enumerate(runs):
        for other in {runs[beside][0] for beside in (number - 1, number + 1) if 0 <= beside < len(runs)}:
            yield [*strategies[:start], *([other] * count), *strategies[start + count :]]
        start += count


def _allowed(request: Request, result: SolvedPlan, strategies: Sequence[Strategy]) -> bool:
    """Whether every layer is offered its strategy, and the rules of ``problem`` hold."""
    graph, shape = request.graph, result.problem.shape
    fixed = request.under(shape.schedule) if shape.stages > 1 else request.fixed
    layers = list(zip(graph.layers, strategies, strict=True))
    for kind, name, strategy in {(layer.kind, layer.name if fixed.layers else "", one) for layer, one in layers}:
        offered = request.space.strategies(kind, shape.stage_devices, fixed.at_layer(name))
        if strategy not in offered or shape.microbatch % strategy.batch_degree:
            return False
    if any(len({strategies[place] for place in group}) > 1 for group in tied_groups(graph)):
        return False
    if shape.virtual > 1:
        parts = list(zip(part_of(graph), layers, strict=True))
        kinds = {
            (part, replace(one, recompute=Recompute.NONE) if layer.role is Role.BLOCK else one)
            for part, (layer, one) in parts
        }
        return len(kinds) == len({part for part, _ in kinds})
    if shape.stages > 1:
        inner = result.partition.cuts[1:-1]
        return len({layout(strategies[place]) for cut in inner for place in (cut - 1, cut)}) == 1
    edges = {glue_of(layout(one)) for layer, one in layers if layer.role is not Role.BLOCK}
    return len(edges) < 2 or not is_glued(graph)


def _priced(
    request: Request, pricer: LayerPricer, result: SolvedPlan, strategies: Sequence[Strategy]
) -> Partition | None:
    """The plan with other strategies; None where it does not fit, or where the profile has no figures for them."""
    shape, cuts = result.problem.shape, result.partition.cuts
    sizes = [b - a for a, b in pairwise(cuts)]
    costs = price_stages(pricer, shape, sizes, list(strategies), ordered=False)
    budgets = result.problem.budgets
    if any(cost.memory.total > min(budgets) for cost in costs):
        return None
    seconds = bound_seconds(pricer.profile, shape, costs) / straggling(pricer.profile, request.devices)
    stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(cuts))
    return Partition(ticks(seconds - pricer.profile.overhead.step), cuts, stages)


def given_plans(request: Request, pricer: LayerPricer, plans: Sequence[Plan]) -> tuple[SolvedPlan, ...]:
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
        sorted((_as_result(request, pricer, plan) for plan in wanted), key=lambda solved: solved.partition.time)
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
    return all(backend.runs(own) and fixed.allows(own) and fixed.allows_in(layer.name, own) for layer, own in pairs)


def _as_result(request: Request, pricer: LayerPricer, plan: Plan) -> SolvedPlan:
    strategies = strategies_of(plan, pricer.profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    seconds = bound_seconds(pricer.profile, shape, price_stages(pricer, shape, sizes, strategies))
    work = seconds / straggling(pricer.profile, plan.devices) - pricer.profile.overhead.step
    cuts = (0, *accumulate(sizes))
    stages = tuple(StagePlan((), 0, tuple(strategies[a:b])) for a, b in pairwise(cuts))
    return SolvedPlan(open_problem(request, pricer, shape), Partition(ticks(work), cuts, stages), given=True)
