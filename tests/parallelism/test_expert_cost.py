"""Parameters and bytes of experts spread over devices, against closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import Routing, SplitDims, TensorSplit
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.expert.cost import ExpertDimension, rank_load, reached
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.space import strategies_for
from tests.factories import make_kind
from tests.parallelism.test_states_cost import work

EXPERTS, DENSE, NORMS, COPIES = 6400, 800, 40, 2 * 1000
KIND = replace(
    make_kind("block", 0, tensor_degrees=8), parameters=TensorSplit(EXPERTS + DENSE, 0, NORMS),
    expert_parameters=EXPERTS, dispatched_bytes=COPIES, dims=SplitDims(experts=8),
)  # fmt: skip


def test_experts_are_divided_and_the_rest_is_not() -> None:
    done = work(Strategy(data=8, expert=8), KIND)
    assert done.parameters == done.state_items == done.gradient_items == EXPERTS / 8 + DENSE + NORMS


def test_tokens_go_out_and_back_in_both_passes() -> None:
    # A device sends and takes back top-k copies of each of its tokens: 4 all-to-alls a micro-batch.
    done = work(Strategy(data=8, expert=4), KIND, samples=64)
    exchanges = [one for one in done.communications if one.collective is Collective.ALL_TO_ALL]
    assert [(one.moment, one.count) for one in exchanges] == [(Moment.FORWARD, 2), (Moment.BACKWARD, 2)]
    assert {(one.size, one.group) for one in exchanges} == {(COPIES * 64 / 8, RankGroup(4, 1, 2))}


def test_experts_are_summed_over_fewer_replicas() -> None:
    done = work(Strategy(data=16, expert=4, tensor=2), KIND)
    sums = [(one.size, one.group) for one in done.communications if one.moment is Moment.STEP]
    assert sums == [
        ((DENSE / 2 + NORMS) * 2, RankGroup(16, 2, 2)),
        (EXPERTS / 8 * 2, RankGroup(4, 8, 8)),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_are_sharded_over_fewer_ranks(stage: int) -> None:
    done = work(Strategy(zero=8, zero_stage=stage, expert=4), KIND)
    assert done.state_items == (DENSE + NORMS) / 8 + EXPERTS / 4 / 2
    assert done.state_items * 8 == DENSE + NORMS + EXPERTS
    groups = {one.group for one in done.communications if one.collective is Collective.ALL_GATHER}
    assert groups == {RankGroup(8, 1, 1), RankGroup(2, 4, 4)}


def test_experts_may_be_spread_over_the_tensor_group() -> None:
    done = work(Strategy(data=4, tensor=2, expert=8), KIND)
    assert done.parameters == EXPERTS / 8 + DENSE / 2 + NORMS


def test_shared_tokens_are_sent_once() -> None:
    plain, shared = (work(Strategy(data=4, tensor=2, sequence_parallel=on, expert=4), KIND) for on in (False, True))
    sizes = [next(o.size for o in done.communications if o.cause == "expert") for done in (plain, shared)]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(("expert", "near"), [(4, 2), (8, 1)])
def test_slices_of_an_expert_gather_the_copies_of_shared_tokens(expert: int, near: int) -> None:
    # The MLP's own gather and scatter of tokens give way to those of copies; attention's pair stays.
    done = work(Strategy(data=4, tensor=2, sequence_parallel=True, expert=expert), KIND)
    pairs = [one for one in done.communications if one.moment is Moment.FORWARD and one.cause == "tensor"]
    hidden = [one for one in pairs if one.size == 1000 * 64 / 4]
    copies = [one for one in pairs if one.size == COPIES * 64 / 4]
    assert [one.count for one in hidden] == [1, 1]
    assert [one.group.size for one in copies] == [near] * 2 if near > 1 else copies == []
    assert len(pairs) == len(hidden) + len(copies)


def test_experts_are_spread_over_what_divides_them() -> None:
    counted = replace(KIND, dims=replace(KIND.dims, experts=8))
    assert {one.expert for one in strategies_for(counted, 12)} == {1, 2, 4}
    assert {one.expert for one in strategies_for(make_kind("block", 10), 12)} == {1}


def test_a_mixture_of_unknown_size_is_refused() -> None:
    assert "experts" in ExpertDimension().reason(replace(KIND, dims=replace(KIND.dims, experts=0)))
    assert ExpertDimension().reason(make_kind("block", 10)) == ""


def test_copies_that_a_rank_is_sent_once() -> None:
    # Of 2 copies to 4 ranks both go to the same one in a quarter of all cases: 1.75 of 2 are sent.
    assert reached(4, Routing(2)) == pytest.approx(1.75)
    done = work(Strategy(data=4, expert=4), replace(KIND, routing=Routing(2, unique=True)), samples=64)
    exchange = next(one for one in done.communications if one.cause == "expert")
    assert exchange.size == pytest.approx(COPIES * 64 / 4 * 1.75 / 2)
    assert exchange.group == RankGroup(4, 1, 1)


@given(places=st.integers(1, 6), copies=st.integers(1, 5))
def test_places_reached_are_those_of_all_ways_to_send(places: int, copies: int) -> None:
    ways = list(product(range(places), repeat=copies))
    assert reached(places, Routing(copies)) == pytest.approx(sum(len(set(way)) for way in ways) / len(ways))


@pytest.mark.parametrize("places", [1, 2, 4, 8])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_places_reached_through_chosen_groups_are_those_of_all_ways_to_choose(places: int, chosen: int) -> None:
    # 4 groups of 2 experts each, 3 copies; places hold 8 / places consecutive experts.
    counts = [
        len({expert * places // 8 for expert in experts})
        for groups in combinations(range(4), chosen)
        for experts in product([2 * group + side for group in groups for side in range(2)], repeat=3)
    ]
    found = reached(places, Routing(3, groups=4, chosen_groups=chosen))
    assert found == pytest.approx(sum(counts) / len(counts))
    assert found <= max(chosen, places * chosen / 4)


def test_the_most_loaded_rank_sets_the_pace_of_exchanges() -> None:
    # Loads of 8 experts drawn with the deviation that puts the largest 50 % above the mean, as the form says.
    uneven = replace(KIND, routing=Routing(2, excess=0.5))
    assert rank_load(uneven, 1) == 1
    assert rank_load(uneven, 8) == pytest.approx(1.5)
    assert list(rank_load(uneven, np.array([8, 1, 4]))) == [rank_load(uneven, degree) for degree in (8, 1, 4)]
    draws = np.random.default_rng(0).normal(1, 0.5 / np.sqrt(2 * np.log(64)), (4000, 64))
    ranks = draws.reshape(4000, 16, 4).mean(-1).max(-1).mean()
    many = replace(KIND, dims=SplitDims(experts=64), routing=Routing(2, excess=0.5))
    assert rank_load(many, 16) - 1 == pytest.approx(ranks - 1, rel=0.35)  # sqrt(2 ln n) is above the mean largest of n
    exchange = next(one for one in work(Strategy(data=4, expert=4), uneven).communications if one.cause == "expert")
    assert exchange.load == rank_load(uneven, 4)
    assert exchange.size == COPIES * 64 / 4


def test_copies_that_a_node_is_sent_once() -> None:
    # The factory's context has nodes of 8 devices: 32 ranks lie on 4 nodes, of which 8 copies reach 3.6.
    done = work(Strategy(data=32, expert=32), replace(KIND, routing=Routing(8, unique=True)), samples=64)
    exchange = next(one for one in done.communications if one.cause == "expert")
    assert exchange.group == RankGroup(4, 8, 8)
    assert exchange.size == pytest.approx(COPIES * 64 / 32 * 4 * (1 - 0.75**8) / 8)


def test_slices_of_an_expert_may_be_fewer_than_those_of_attention() -> None:
    done = work(Strategy(data=4, tensor=2, expert=4, expert_tensor=1), KIND)
    assert done.parameters == EXPERTS / 4 + DENSE / 2 + NORMS
    assert next(one for one in done.communications if one.cause == "expert").group == RankGroup(4, 1, 2)
