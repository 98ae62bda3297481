"""Plans for few processes: legal, and of the same kind."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.model.graph import Role
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.search.space import Narrowed, strategies_for
from galvatron_lite.verify.numbers.shrink_plan import (
    Spot,
    choose_size,
    features,
    kept_spots,
    legal_for,
    reduced,
    reductions,
    small_plan,
)
from tests.equivalence.plans import write_plan
from tests.schedules import ZERO_BUBBLE

GRAPH = load_model("mixtral-8x7b")
BLOCK = GRAPH.kind_of(GRAPH.layers[1])
LEGAL = {
    devices: [one for one in strategies_for(BLOCK, devices, narrowed=Narrowed(GALVATRON.values)) if GALVATRON.says(one)]
    for devices in (1, 2, 4, 8, 16)
}

SETS = {devices: frozenset(legal) for devices, legal in LEGAL.items()}


def any_strategy(devices: int) -> st.SearchStrategy[Strategy]:
    return st.sampled_from(LEGAL[devices])


@settings(max_examples=60, deadline=None)
@given(any_strategy(16), st.sampled_from([1, 2, 4, 8]))
def test_a_smaller_strategy_uses_nothing_new(strategy: Strategy, devices: int) -> None:
    for one in reductions(strategy, devices):
        assert one.devices == devices
        assert features(one) <= features(strategy)
        assert all(getattr(strategy, name) % getattr(one, name) == 0 for name in ("data", "zero", "tensor", "context"))


@settings(max_examples=60, deadline=None)
@given(any_strategy(16))
def test_some_smaller_strategy_is_legal_and_keeps_what_there_is_room_for(strategy: Strategy) -> None:
    smaller = reduced(strategy, 8, SETS[8].__contains__)
    assert smaller is not None
    assert smaller in LEGAL[8]
    ways = sum(getattr(strategy, name) > 1 for name in ("data", "zero", "tensor", "context"))
    if ways <= 3:
        assert features(smaller) == features(strategy)


def test_what_is_legal_is_what_the_planner_offers() -> None:
    legal = legal_for([BLOCK, GRAPH.kind_of(GRAPH.layers[0])], 4)
    assert legal(parse_strategy("zero3x2 tensor2"))
    assert not legal(parse_strategy("expert4 zero3x4"))
    assert not legal(parse_strategy("tensor2"))


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("zero3x16", 4, "zero3x4"),
        ("data2 zero3x4 tensor8+sp recompute", 8, "data2 zero3x2 tensor2+sp recompute"),
        ("ulysses4 tensor2+sp", 4, "ulysses2 tensor2+sp"),
        ("spatial2x4", 4, "spatial2x2"),
        ("data4 recompute", 1, "recompute"),
        ("data3 tensor2", 6, "data3 tensor2"),
    ],
)
def test_degrees(text: str, devices: int, expected: str) -> None:
    smaller = reduced(parse_strategy(text), devices)
    assert (features(smaller), smaller.devices) == (features(parse_strategy(expected)), devices)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A legal plan of a deep model on many devices."""
    stages = draw(st.sampled_from([1, 2, 4, 8]))
    devices = draw(st.sampled_from([1, 2, 4, 8, 16]))
    schedule = draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED]))
    virtual = 2 if schedule is Schedule.INTERLEAVED and stages > 1 else 1
    chosen = draw(st.lists(any_strategy(devices), min_size=1, max_size=3))
    edge = draw(st.sampled_from([one for one in chosen if one in edges(devices)] or edges(devices)))
    names = [layer.name for layer in GRAPH.layers]
    strategies = {name: chosen[index * len(chosen) // len(names)] for index, name in enumerate(names)}
    strategies |= {"before": edge, "after": edge}
    count = stages * virtual
    parts = [names[index * len(names) // count : (index + 1) * len(names) // count] for index in range(count)]
    sizes = {"devices": stages * devices, "batch": 64 * 16, "microbatches": draw(st.sampled_from([1, 4, 16]))}
    return write_plan(parts, strategies, schedule=schedule, virtual=virtual, **sizes)


def edges(devices: int) -> list[Strategy]:
    return [one for one in LEGAL[devices] if one.expert == 1 and one.context == 1 and one.recompute == "none"]


def spots_of(plan: Plan) -> list[Spot]:
    layers = iter(GRAPH.layers)
    placed = [(number, run) for number, stage in enumerate(plan.stages) for run in stage.runs for _ in range(run.count)]
    return [
        Spot(one.name, one.kind, one.role, number, run.strategy)
        for (number, run), one in zip(placed, layers, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from([2, 4, 8]))
def test_the_small_plan_is_legal_and_of_the_same_kind(plan: Plan, processes: int) -> None:
    spots = spots_of(plan)
    strategies = list(dict.fromkeys(spot.strategy for spot in spots))
    size = choose_size(plan, strategies, processes)
    kept = kept_spots(spots, size)
    images = {one: reduced(one, size.devices, SETS[size.devices].__contains__) for one in strategies}
    chosen = {spot.name: one for spot in spots if (one := images[spot.strategy]) is not None}
    assert len(chosen) == len(spots)
    small = small_plan(plan, size, kept, [spot.name for spot in kept], chosen)
    check_runs(check_plan(small))
    assert small.devices <= processes
    assert {spot.strategy for spot in kept} == set(strategies)
    assert {spot.stage for spot in kept if spot.role is not Role.BLOCK} <= {0, len(plan.stages) - 1}
    assert (small.pipeline > 1) == (plan.pipeline > 1)
    assert (small.virtual_stages > 1, small.schedule) == (plan.virtual_stages > 1, plan.schedule)
    assert (small.microbatches > 1) == (plan.microbatches > 1)
    assert sum(run.count for stage in small.stages for run in stage.runs) == len(kept) < len(spots)


def test_pipelines_keep_all_stages_where_there_is_room() -> None:
    stages = [["before", "a"], ["b"], ["c", "after"]]
    names = [name for stage in stages for name in stage]
    plan = write_plan(stages, dict.fromkeys(names, Strategy()), devices=3, batch=8)
    assert choose_size(plan, [Strategy()], 4).stages == 3
    both = Strategy(tensor=4)
    wide = write_plan(stages, dict.fromkeys(names, both), devices=12, batch=8)
    size = choose_size(wide, [both], 4)
    assert (size.groups, size.devices) == (2, 2)


def test_zero_bubble_schedules_stay() -> None:
    layers = ("before", "a", "b", "after")
    plan = write_plan([["before", "a"], ["b", "after"]], dict.fromkeys(layers, Strategy(data=2)), devices=4, batch=8)
    for schedule in ZERO_BUBBLE:
        other = replace(plan, schedule=schedule)
        spots = [Spot(name, "k", Role.BLOCK, number // 2, Strategy(data=2)) for number, name in enumerate(layers)]
        size = choose_size(other, [Strategy(data=2)], 4)
        small = small_plan(other, size, spots, list(layers), dict.fromkeys(layers, Strategy(data=2)))
        assert check_runs(small).schedule is schedule
