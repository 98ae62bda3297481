"""Every plan of a small space, priced one by one: the independent check of the search.

Written from the rules of the space alone; shares no code with the search beyond the pricing of a given plan and the
list of legal strategies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from galvatron_lite.cost.groups import price_stages
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape, price_stage
from galvatron_lite.cost.step import bound_seconds, shape_of, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.space import strategies_for

Layout = tuple[int, int, int, bool]


def layout(strategy: Strategy) -> Layout:
    return strategy.batch_degree, strategy.context, strategy.tensor, strategy.sequence_parallel


def allowed(profile: Profile, cuts: Sequence[int], strategies: Sequence[Strategy]) -> bool:
    """The rules of the space for one complete choice."""
    layers = profile.graph.layers
    place = {layer.name: index for index, layer in enumerate(layers)}
    if any(strategies[place[tie.first]] != strategies[place[tie.second]] for tie in profile.graph.ties):
        return False
    if len(cuts) == 2:
        edges = {layout(s)[:3] for s, layer in zip(strategies, layers, strict=True) if layer.role is not Role.BLOCK}
        return len(edges) <= 1
    ends = {layout(strategies[index]) for cut in cuts[1:-1] for index in (cut - 1, cut)}
    return len(ends) == 1


def every_plan(profile: Profile, devices: int, batch: int, schedule: Schedule) -> Iterator[tuple[float, int]]:
    """Step seconds and peak bytes of every plan of the space."""
    layers = profile.graph.layers
    pricer = LayerPricer(profile)
    node = profile.cluster.levels[0].size
    for stages in range(1, min(devices, len(layers)) + 1):
        if devices % stages:
            continue
        for count in range(1, batch + 1):
            if batch % count:
                continue
            order = schedule if stages > 1 else Schedule.ONE_F_ONE_B
            shape = Shape(devices, stages, count, batch // count, order)
            options = [
                [s for s in strategies_for(profile.graph.kind_of(layer), devices // stages, node)
                 if shape.microbatch % s.batch_degree == 0]
                for layer in layers
            ]  # fmt: skip
            for inner in combinations(range(1, len(layers)), stages - 1):
                cuts = (0, *inner, len(layers))
                yield from _priced(profile, pricer, shape, cuts, options)


def _priced(
    profile: Profile,
    pricer: LayerPricer,
    shape: Shape,
    cuts: Sequence[int],
    options: Sequence[Sequence[Strategy]],
) -> Iterator[tuple[float, int]]:
    for strategies in product(*options):
        if not allowed(profile, cuts, strategies):
            continue
        try:
            costs = [
                price_stage(pricer, shape, stage, range(cuts[stage], cuts[stage + 1]), strategies)
                for stage in range(shape.stages)
            ]
        except InputError:
            continue
        yield bound_seconds(profile, shape, costs), max(cost.memory.total for cost in costs)


def bound_of(profile: Profile, plan: Plan) -> float:
    """What the search minimises, of a whole plan."""
    strategies = strategies_of(plan, profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    return bound_seconds(profile, shape, price_stages(LayerPricer(profile), shape, sizes, strategies))
