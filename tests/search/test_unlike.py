"""The search on devices of two types: equal to every plan priced one by one; more layers where devices are faster."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite.cluster.budget import Budget, bytes_on
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape, StageCost
from galvatron_lite.cost.step import bound_seconds, price_stages
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import finished, search
from galvatron_lite.search.bounds import ComputeBounds
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.cost.test_unlike import unlike
from tests.factories import random_profile
from tests.search.brute import bound_of
from tests.search.instances import Few

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
NODES = [(1, (1, 1)), (2, (1, 1)), (1, (2, 1)), (1, (3, 1)), (1, (1, 2, 1)), (1, (1, 1, 1))]
"""Devices a node, and nodes of each type taking turns."""
Priced = tuple[float, tuple[tuple[str, int], ...]]
"""Seconds of a plan, and device and bytes of each of its stages."""


def two_types(draw: random.Random) -> Profile:
    """A small random model on few devices of two types that differ in everything."""
    size, nodes = draw.choice(NODES)
    blocks = draw.randint(0, 3 if size * sum(nodes) < 4 else 2)
    fast = random_profile(draw, devices=size, blocks=blocks, tied=draw.random() < 0.4)
    device, (level,) = fast.cluster.device, fast.cluster.levels
    slower = [
        replace(point, forward=point.forward * draw.uniform(0.8, 3), backward=point.backward * draw.uniform(0.8, 3))
        for point in fast.layers
    ]
    links = (replace(level, bandwidth=level.bandwidth / draw.choice([1, 5])),)
    group = replace(fast.cluster.groups[0], device=replace(device, context=device.context + draw.choice([0, 700])))
    slow = replace(fast, layers=tuple(slower), cluster=replace(fast.cluster, levels=links, groups=(group,)))
    return unlike(fast, slow, nodes)


def request_of(profile: Profile, seed: int, schedule: Schedule, budget: int | Budget, most: int = 3) -> Request:
    space = Few(profile.graph, profile.cluster.levels[0].size, ANY, seed=seed, most=most)
    devices = profile.cluster.devices
    batch = 6 if devices == 3 else 4
    return Request(profile.graph, devices, batch, budget, Fixed(), (schedule,), space, cluster=profile.cluster)


def every_plan(profile: Profile, asked: Request) -> Iterator[Priced]:
    """Every plan of the space: no stage with devices of two types, but for the one without a pipeline."""
    layers, pricer = profile.graph.layers, LayerPricer(profile)
    names = [group.device.name for group in profile.cluster.groups for _ in range(group.count)]
    for stages, count in product(range(1, asked.devices + 1), range(1, asked.global_batch + 1)):
        if asked.devices % stages or asked.global_batch % count or stages > len(layers):
            continue
        size = asked.devices // stages
        own = [{*names[at : at + size]} for at in range(0, asked.devices, size)]
        if stages > 1 and any(len(one) > 1 for one in own):
            continue
        devices = [one.pop() if len(one) == 1 else "" for one in own]
        schedule = asked.schedules[0] if stages > 1 else Schedule.ONE_F_ONE_B
        shape = Shape(asked.devices, stages, count, asked.global_batch // count, schedule)
        options = [
            [s for s in asked.space.strategies(layer.kind, size, Fixed()) if shape.microbatch % s.batch_degree == 0]
            for layer in layers
        ]
        for inner in combinations(range(1, len(layers)), stages - 1):
            cuts = (0, *inner, len(layers))
            for costs in _costs(profile, pricer, shape, cuts, options):
                held = tuple((name, cost.memory.total) for name, cost in zip(devices, costs, strict=True))
                yield bound_seconds(profile, shape, costs), held


def _costs(
    profile: Profile, pricer: LayerPricer, shape: Shape, cuts: tuple[int, ...], options: list[list[Strategy]]
) -> Iterator[list[StageCost]]:
    for strategies in product(*options):
        if _allowed(profile, cuts, strategies):
            try:
                sizes = [stop - start for start, stop in pairwise(cuts)]
                yield price_stages(pricer, shape, sizes, strategies, ordered=False)
            except InputError:
                continue


def _allowed(profile: Profile, cuts: tuple[int, ...], strategies: tuple[Strategy, ...]) -> bool:
    place = {layer.name: index for index, layer in enumerate(profile.graph.layers)}
    if any(strategies[place[tie.first]] != strategies[place[tie.second]] for tie in profile.graph.ties):
        return False
    if len(cuts) == 2:
        edges = [s for s, layer in zip(strategies, profile.graph.layers, strict=True) if layer.role is not Role.BLOCK]
        return len({layout_of(strategy).replicated("sequence") for strategy in edges}) <= 1
    return len({layout_of(strategies[index]) for cut in cuts[1:-1] for index in (cut - 1, cut)}) == 1


def fits(held: tuple[tuple[str, int], ...], budget: int | Budget) -> bool:
    return all(size <= bytes_on(budget, name) for name, size in held)


def budgets(plans: list[Priced], draw: random.Random) -> Iterator[int | Budget]:
    """The least that some plan fits, what some plan takes on all devices, and what one takes on each type."""
    peaks = [max(size for _, size in held) for _, held in plans]
    yield from {min(peaks), draw.choice(peaks)}
    for _ in range(2):
        own: dict[str, int] = {}
        for name, size in draw.choice(plans)[1]:
            own[name] = max(own.get(name, 0), size)
        whole = own.pop("", 0)
        full = {name: max(own.get(name, draw.choice(peaks)), whole) for name in ("fast", "slow")}
        yield Budget(min(full.values()), tuple(full.items()))


def check(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    profile = two_types(draw)
    plans = list(every_plan(profile, request_of(profile, seed, schedule, 0)))
    pricer = LayerPricer(profile)
    if not plans:
        assert search(request_of(profile, seed, schedule, 10**9), pricer) is None
        return
    for budget in budgets(plans, draw):
        asked = request_of(profile, seed, schedule, budget)
        best = min((seconds for seconds, held in plans if fits(held, budget)), default=None)
        found = search(asked, pricer)
        assert (found is None) == (best is None)
        if found is None:
            continue
        assert found.gap == 0.0
        plan = finished(asked, pricer, found)
        assert asked.fits(plan)
        assert fits(tuple((stage.device, stage.memory.total) for stage in plan.stages), budget)
        assert bound_of(profile, plan) == pytest.approx(best, rel=1e-9)
    least = min(max(size for _, size in held) for _, held in plans)
    assert search(request_of(profile, seed, schedule, least - 1), pricer) is None


@settings(max_examples=8, **QUIET)
@given(st.integers(0, 10**9))
def test_equals_every_plan_priced(seed: int) -> None:
    check(seed, Schedule.ONE_F_ONE_B)


@settings(max_examples=8, **QUIET)
@given(st.integers(0, 10**9), st.sampled_from([Schedule.GPIPE, Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P]))
def test_equals_every_plan_priced_with_other_schedules(seed: int, schedule: Schedule) -> None:
    check(seed, schedule)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_the_planner_names_the_least_budget_for_every_device(seed: int) -> None:
    profile = two_types(random.Random(seed))
    space = Space(profile.graph, profile.cluster.levels[0].size)
    asked = replace(request_of(profile, seed, Schedule.ONE_F_ONE_B, 0), space=space)
    least = min(max(size for _, size in held) for _, held in every_plan(profile, asked))
    question = {"devices": asked.devices, "global_batch": asked.global_batch, "schedules": asked.schedules}
    with pytest.raises(InfeasibleError) as error:
        find_plan(profile, budget=least - 1, **question)
    assert error.value.smallest_budget == least
    plan = find_plan(profile, budget=Budget(least, (("fast", least), ("slow", least))), certify=True, **question)
    assert plan.provenance.budgets == {"fast": least, "slow": least}
    assert plan.prediction.peak_memory <= least


def layers_of(plan: Plan) -> list[int]:
    return [sum(run.count for run in stage.runs) for stage in plan.stages]


def test_faster_devices_take_more_layers() -> None:
    graph = load_model("gpt2", precision="fp16")
    cluster = load_cluster("a100-v100")
    profile = estimate_profile(graph, cluster, precision="fp16", name="gpt2", samples=(1, 2, 4))
    budget = Budget(30 * 2**30, tuple((g.device.name, round(0.9 * g.device.memory)) for g in cluster.groups))
    fixed = Fixed(pipeline=2, microbatches=8, schedule=Schedule.ONE_F_ONE_B, strategy=(("tensor", 1),))
    plan = find_plan(profile, devices=16, global_batch=128, budget=budget, fixed=fixed)
    assert [stage.device for stage in plan.stages] == [group.device.name for group in cluster.groups]
    first, last = layers_of(plan)
    assert first > last
    assert plan.stages[0].memory.total <= budget.of(plan.stages[0].device)


def test_a_stage_never_has_devices_of_two_types() -> None:
    draw = random.Random(0)
    fast = random_profile(draw, devices=1, blocks=2)
    asked = request_of(unlike(fast, fast, (1, 2, 1)), 0, Schedule.ONE_F_ONE_B, 10**9)
    assert asked.pipelines == (1, 4)
    asked = request_of(unlike(fast, fast, (2, 2)), 0, Schedule.ONE_F_ONE_B, 10**9)
    assert asked.pipelines == (1, 2, 4)
    with pytest.raises(InputError, match="pipeline"):
        _ = replace(request_of(unlike(fast, fast, (3, 1)), 0, Schedule.GPIPE, 1), fixed=Fixed(pipeline=2)).pipelines


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_where_each_type_is_the_quicker_one_at_some_layers(seed: int) -> None:
    one = random_profile(random.Random(seed), devices=1, blocks=2, alike=True)
    edges = ("before", "after")
    swapped = [
        replace(p, forward=p.forward * factor, backward=p.backward * factor)
        for p in one.layers
        for factor in (0.05 if p.kind in edges else 20.0,)
    ]
    profile = unlike(one, replace(one, layers=tuple(swapped)))
    asked = replace(request_of(profile, seed, Schedule.ONE_F_ONE_B, 10**9), fixed=Fixed(pipeline=2))
    pricer, compute_bounds = LayerPricer(profile), ComputeBounds(profile)
    found = search(asked, pricer)
    seconds = [s for s, held in every_plan(profile, asked) if len(held) == 2]
    assert bound_of(profile, finished(asked, pricer, found)) == pytest.approx(min(seconds), rel=1e-9)
    assert compute_bounds.bound(profile.graph, found.problem.shape) <= found.partition.time
