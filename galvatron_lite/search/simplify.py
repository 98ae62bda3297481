"""The simplest plan within a tolerance of the best: fewer runs of strategies, fewer strategies.

First the search is repeated for plans of at most one, two, three runs a stage below the limit (``simplest``). What that
leaves is improved run by run in finished plans (``with_fewer_runs``): any change to strategies that the plan has
already is made if the plan is then simpler, fits and is quick enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby, islice, pairwise, product

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.cost.stage import Shape, tied_groups
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.registry import choosing, complexity
from galvatron_lite.parallelism.strategy import INSIDE, Strategy
from galvatron_lite.search.alternatives import USER_PLAN, Finalist, as_result, shaped
from galvatron_lite.search.best_first import SolvedPlan, plain, search
from galvatron_lite.search.problem import part_of, parts_of
from galvatron_lite.search.shapes import Request

CLOSE = 0.01
"""How near to the best a search comes, under a larger tolerance too: the rest of it is for simpler plans."""
SLACK = 0.5
"""Share of that which the search over all plans may leave open."""
_MOST_RUNS = 3
_NEAR, _WORK = 0.5, 4_000_000
"""``SLACK`` of searches for simpler plans, and labels that each of them may look at; counted, not timed, so that
results repeat."""
_TRIED, _PRICED = 48, 1500
"""Changed plans that are priced at most, and unlike layers in all of them."""
_GROWTH = 1, 2, 4, 8
"""By how many layers runs are tried to grow."""


def simplest(request: Request, pricer: LayerPricer, result: SolvedPlan, tolerance: float) -> SolvedPlan:
    """The simplest plan that takes at most 1 / (1 - tolerance) of the least that any plan takes.

    Args:
        request: what was planned.
        pricer: of the profile.
        result: what the search over all plans ended with.
        tolerance: share of the time.
    """
    least = result.partition.time * (1.0 - result.gap)
    limit = max(int(least / (1.0 - tolerance)), result.partition.time)
    best, most = result, most_runs(request, result)
    below = partial(search, pricer=pricer, below=limit + 1, slack=_NEAR * tolerance, settled=tolerance, effort=_WORK)
    for runs in range(1, min(most, _MOST_RUNS) + 1):
        same_kind, _ = _narrower(request, result.problem.shape)
        simple = result if runs == most else below(replace(same_kind, runs=runs))
        if simple is not None:
            _, kinds = _narrower(request, simple.problem.shape)
            narrower = (below(replace(kind, runs=runs)) for kind in kinds)
            best = next((plan for plan in narrower if plan is not None), simple)
            best = _with_one_strategy(replace(request, runs=runs), best, below) or best
            break
    gap = max(1.0 - least / best.partition.time, 0.0)
    others = (best, *(other for other in result.others if other is not result))
    return replace(best, gap=gap, others=others, stopped=False)


def _with_one_strategy(
    request: Request, best: SolvedPlan, below: Callable[[Request], SolvedPlan | None]
) -> SolvedPlan | None:
    """A plan of the best one's shape whose layers all have one of its strategies, recomputation aside; None where there
    is none as good.

    ``below``: finds a plan of a request that is quick enough.
    """
    used = Counter(strategy.split for strategy in best.partition.strategies)
    narrow = shaped(request, best.problem.shape)
    for strategy, _ in used.most_common() if len(used) > 1 else ():
        pins = ((item.name, getattr(strategy, item.name)) for item in fields(strategy) if item.name not in INSIDE)
        pinned = narrow.fixed.with_pins(pins)
        if len(dict(pinned.strategy)) == len(pinned.strategy):  # no pin of the user contradicts it
            solved = below(replace(narrow, fixed=pinned))
            if solved is not None and _offers(request, solved):
                return solved
    return None


def _offers(request: Request, result: SolvedPlan) -> bool:
    """Whether every layer of a plan is offered its strategy: pins may go beyond the space's rules."""
    shape, graph = result.problem.shape, request.graph
    fixed = request.under(shape.schedule) if shape.stages > 1 else request.fixed
    choices = {
        (layer.kind, layer.name if fixed.layers else "", strategy)
        for layer, strategy in zip(graph.layers, result.partition.strategies, strict=True)
    }
    return all(
        strategy in request.space.strategies(kind, shape.stage_devices, fixed.at_layer(name))
        for kind, name, strategy in choices
    )


def _narrower(request: Request, shape: Shape) -> tuple[Request, list[Request]]:
    """The request of plans of a shape's kind (without a pipeline, or with schedules of one stage a group of devices),
    and requests of simpler kinds."""
    few = tuple(schedule for schedule in request.schedules if schedule.simple)
    unpiped = replace(request, fixed=replace(request.fixed, pipeline=1))
    if shape.stages == 1:
        return unpiped, []
    simpler = [unpiped] if request.fixed.pipeline is None and "pipeline" not in request.fixed.forbidden else []
    narrow = replace(request, schedules=few)
    if not few or shape.schedule.simple:
        return narrow if few else request, simpler
    return request, [*simpler, narrow]


def most_runs(request: Request, result: SolvedPlan) -> int:
    """Of the stages of a plan: the most runs of equal strategies among the layers of one part of the model."""
    parts = part_of(request.graph)
    runs = [
        len(list(groupby(group, lambda pair: pair[1])))
        for stage, (a, b) in zip(result.partition.stages, pairwise(result.partition.cuts), strict=True)
        for _, group in groupby(zip(parts[a:b], stage.strategies, strict=True), lambda pair: pair[0])
    ]
    return max(runs)


def with_fewer_runs(request: Request, pricer: LayerPricer, option: Finalist, limit: float, proven: float) -> Finalist:
    """A finalist, or a simpler plan of its shape and stages that fits.

    Args:
        request: what was planned.
        pricer: of the profile.
        option: the finalist.
        limit: seconds that the plan may take at most, simulated.
        proven: picoseconds of closed form that it may take at most, if the finalist does not take more.
    """
    proven = max(proven, option.solved.partition.time)
    left, simpler = min(_TRIED, max(_PRICED // len(request.graph.kinds), 1)), option
    while simpler.fits and simpler.name != USER_PLAN and simpler.seconds <= limit:
        option = simpler
        for candidate in islice(_simpler(request, option), left):
            left -= 1
            plan = price_plan(pricer, plain(request, candidate))
            if request.fits(plan) and plan.prediction is not None and plan.prediction.step_seconds <= limit:
                solved = as_result(request, pricer, plan)
                if solved.partition.time <= proven:
                    simpler = Finalist(option.name, solved, plan, fits=True)
                    break
        if simpler is option:
            break
    return simpler


def _simpler(request: Request, option: Finalist) -> Iterator[SolvedPlan]:
    """Simpler plans than a finalist's, the simplest first, without their times."""
    graph, partition = request.graph, option.solved.partition
    cuts, strategies = partition.cuts, partition.strategies
    tied = tied_groups(graph)  # layers that share parameters have one strategy
    before, changed = _simplicity(cuts, strategies), dict[tuple[Strategy, ...], tuple[int, int, int]]()
    for new in map(tuple, _changes(graph, cuts, strategies)):
        if _simplicity(cuts, new) < before and all(len({new[place] for place in group}) == 1 for group in tied):
            changed[new] = _simplicity(cuts, new)
    for new in sorted(changed, key=changed.__getitem__):
        ends = zip(partition.stages, pairwise(cuts), strict=True)
        stages = tuple(replace(stage, strategies=new[a:b]) for stage, (a, b) in ends)
        simpler = replace(option.solved, partition=replace(partition, stages=stages))
        if _offers(request, simpler):
            yield simpler


def _simplicity(cuts: Sequence[int], strategies: Sequence[Strategy]) -> tuple[int, int, int]:
    """How often strategies change within stages, how many there are, and their ``complexity``."""
    pairs = (pair for first, last in pairwise(cuts) for pair in pairwise(strategies[first:last]))
    changes = sum(a is not b and a != b for a, b in pairs)  # most are one object
    used = set(strategies)
    return changes, len(used), sum(map(complexity, used))


def _changes(graph: ModelGraph, cuts: Sequence[int], strategies: Sequence[Strategy]) -> Iterator[list[Strategy]]:
    """Plans with simplified strategies, one or all of them; and with other strategies of the blocks, of those that
    blocks have: another one for all blocks of a strategy, for one run of layers, or for a run that grows into the next
    or the one before."""
    used = dict.fromkeys(strategies)
    for dimension in choosing():
        simpler = {strategy: dimension.simplified(strategy) for strategy in used}
        for among, step in product([[*used], *([one] for one in used)], range(max(map(len, simpler.values())))):
            lower = {strategy: simpler[strategy][step] for strategy in among if step < len(simpler[strategy])}
            yield [lower.get(strategy, strategy) for strategy in strategies]
    blocks = parts_of(graph)[1]
    pool = dict.fromkeys(strategies[blocks.start : blocks.stop])
    runs = list[range]()
    for place in blocks:
        joins = runs and place not in cuts and strategies[place] == strategies[place - 1]
        runs[-1:] = [range(runs[-1].start, place + 1)] if joins else [*runs[-1:], range(place, place + 1)]

    def changed(places: range, new: Strategy, only: Strategy | None = None) -> list[Strategy]:
        return [
            new if place in places and only in (None, strategy) else strategy
            for place, strategy in enumerate(strategies)
        ]

    for new in pool:
        yield from (changed(blocks, new, old) for old in pool if old != new)
        for before, run, after in zip([range(0), *runs], runs, [*runs[1:], range(0)], strict=False):
            if strategies[run.start] == new:
                continue
            yield changed(run, new)
            for more in _GROWTH:
                if more < len(after) and run.stop == after.start and run.stop not in cuts:
                    yield changed(range(run.start, run.stop + more), new)
                if more < len(before) and before.stop == run.start and run.start not in cuts:
                    yield changed(range(run.start - more, run.stop), new)
