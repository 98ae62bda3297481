"""Our search over Hetu-Galvatron's space, by its formulas."""

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.peers.hetu.plan import HetuPlan, from_plan
from galvatron_lite.peers.hetu.profile import to_profile
from studies.hetu.compare import How, bench_for, choose, compare
from studies.hetu.formulas import price
from studies.hetu.recorded import RecordedSearch
from studies.hetu.search import PeerSearch, beside, front_of

from .cases import FOLDER, FOUND, SEARCHES, found

FIGURES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def searching(search: RecordedSearch) -> PeerSearch:
    model, hardware = search.profiles(FOLDER)
    return PeerSearch(search, model, hardware, LayerPricer(to_profile(model, hardware, search.rules.engine)))


@given(FIGURES, st.integers(0, 6), st.integers(0, 60))
@settings(max_examples=60)
def test_a_front_holds_the_best_of_every_combination(figures: list[tuple[int, int]], layers: int, room: int) -> None:
    memory, seconds = [one[0] for one in figures], [float(one[1]) for one in figures]
    front = front_of(memory, seconds, layers, 60)
    ways = [
        (sum(memory[place] for place in way), sum(seconds[place] for place in way))
        for way in combinations_with_replacement(range(len(figures)), layers)
    ]
    fitting = [time for size, time in ways if size <= room]
    place = front.best(room)
    assert (place >= 0) == bool(fitting)
    if fitting:
        assert front.seconds[place] == min(fitting)
        assert front.counts[place].sum() == layers
        assert front.counts[place] @ np.array(memory) == front.memory[place]


@given(FIGURES, FIGURES, st.integers(0, 40))
@settings(max_examples=40)
def test_fronts_of_two_types(first: list[tuple[int, int]], second: list[tuple[int, int]], room: int) -> None:
    fronts = [front_of([one[0] for one in f], [float(one[1]) for one in f], 2, 60) for f in (first, second)]
    total = beside(*fronts, 60)
    ways = [
        sum(one[1] for one in way)
        for way in product(first, first, second, second)
        if sum(one[0] for one in way) <= room
    ]
    place = total.best(room)
    assert (place >= 0) == bool(ways)
    if ways:
        assert total.seconds[place] == min(ways)


@pytest.mark.parametrize("place", [place for place, one in enumerate(FOUND) if one.model == "llama2-7b"][::9])
def test_it_finds_no_worse_than_their_engine(place: int) -> None:
    search = FOUND[place]
    best = searching(search).best(search.usable)
    assert best[1] <= search.seconds * (1 + 1e-9)
    cost = price(*search.profiles(FOLDER), best[0], search.rules)
    assert max(cost.memory) <= search.usable


@pytest.mark.parametrize(
    "search", [one for one in SEARCHES if one.status == "infeasible"][::3], ids=lambda one: one.name
)
def test_it_agrees_that_nothing_fits(search: RecordedSearch) -> None:
    assert searching(search).best(search.usable) is None


def test_it_equals_brute_force_on_a_few_layers() -> None:
    search, model, hardware = found("llama2-7b")
    few = replace(model, types=(replace(model.types[0], layers=2),))
    asked = replace(search, off=("pp",), chunks=2)
    peer = PeerSearch(asked, few, hardware, LayerPricer(to_profile(few, hardware)))
    for room in (9000, 12000, 16384):
        best = peer.best(room)
        every = [
            HetuPlan(8, 1, 64, 2, (2,), layers, edges)
            for layers in product(peer._strategies(1, 2, 8), repeat=2)
            for edges in peer._strategies(1, 2, 8, edges=True)
        ]
        priced = [price(few, hardware, plan, asked.rules) for plan in every]
        fitting = [cost.seconds for cost in priced if max(cost.memory) <= room]
        assert (best is None) == (not fitting)
        if best is not None:
            assert best[1] == pytest.approx(min(fitting), rel=1e-12)


def test_both_plans_by_both_models() -> None:
    search = next(one for one in FOUND if one.off == ("ckpt", "fsdp", "sp") and one.budget_gb == 20)
    case = compare(search, FOLDER)
    assert case.ours is not None
    assert case.chosen is not None
    assert case.theirs.their_seconds == pytest.approx(search.seconds, rel=1e-9)
    assert case.ours.seconds <= case.theirs.seconds


@pytest.mark.parametrize("place", [place for place, one in enumerate(FOUND) if not one.modified][:4:3])
def test_the_plan_is_no_slower_and_fits_by_both_models(place: int) -> None:
    search = FOUND[place]
    bench = bench_for(search, FOLDER)
    theirs = bench.of(search.hetu_plan())
    plan = choose(bench, theirs)
    assert plan.how is not How.THEIRS
    assert theirs.their_seconds is not None
    assert plan.their_seconds is not None
    assert plan.their_memory is not None
    assert plan.seconds <= theirs.seconds * (1 + 1e-9)
    assert plan.their_seconds <= theirs.their_seconds * (1 + 1e-9)
    assert max(plan.memory, plan.their_memory) <= search.usable
    # what their files say of the plan is what was priced
    again = price(bench.peer.model, bench.peer.hardware, from_plan(plan.plan), search.rules)
    assert (again.seconds, max(again.memory)) == (plan.their_seconds, plan.their_memory)


def test_uneven_splits_have_no_price_by_theirs() -> None:
    search = next(one for one in FOUND if one.hetu_plan().pipeline == 2)
    bench, plan = bench_for(search, FOLDER), search.hetu_plan()
    assert bench.of(plan).their_seconds is not None
    uneven = bench.of(replace(plan, division=(15, 17))).plan
    assert bench.priced(uneven).their_seconds is None
