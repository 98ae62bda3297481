"""What a layer costs under a strategy, by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer, ParameterSharing
from galvatron_lite.cost.layout import exchange_sizes
from galvatron_lite.model.graph import Operator, OperatorClass, Recompute
from galvatron_lite.parallelism.layout import layout_of, strategy_with
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint, Overlap
from tests.factories import make_cluster, make_graph, make_kind, make_profile

ITEMS = 1_000_000
BETA, ALPHA = 1e9, 1e-6


def pricer(beta: float = BETA) -> LayerPricer:
    kind = make_kind("block", ITEMS, tensor_degrees=4)
    points = [LayerPoint("block", 4, 1, False, Recompute.NONE, 0.4, 0.8, 400, 800, 600)]
    cluster = make_cluster(8, 0, beta, ALPHA)
    return LayerPricer(make_profile(make_graph([kind], ["block"]), points, cluster, overlap=Overlap()))


def test_context_ranks_take_shares_of_the_tokens() -> None:
    whole = pricer().price("block", Strategy(), 4, 1)
    shared = pricer().price("block", Strategy(context=4), 4, 1)
    assert whole is not None
    assert shared is not None
    assert shared.forward == pytest.approx(whole.forward / 4)
    assert shared.kept == pytest.approx(whole.kept / 4)
    assert layout_of(Strategy(context=4)) != layout_of(Strategy(data=4))


@pytest.mark.parametrize(
    ("strategy", "shards"), [(Strategy(zero=4, zero_stage=1), 1), (Strategy(zero=4, zero_stage=3), 4)]
)
def test_gradients_of_shared_parameters_are_summed_as_they_are_held(strategy: Strategy, shards: int) -> None:
    exchanged = 250_000
    costs = [pricer().price("block", strategy, 4, 2, ParameterSharing(exchanged=items)) for items in (0, exchanged)]
    assert costs[0] is not None
    assert costs[1] is not None
    size = exchanged / shards * 4
    seconds = 2 * (size / 2 / BETA + ALPHA)
    assert costs[1].step_exposed - costs[0].step_exposed == pytest.approx(seconds)


@pytest.mark.parametrize(("stage", "share"), [(1, 0.04), (2, 0.0), (3, 0.0)])
def test_deferred_weight_gradients_cost_time_per_matmul_and_second(stage: int, share: float) -> None:
    """0.01 s for each of two products, and a tenth of 0.2 s of gradients; ZeRO-2 and 3 reduce them with backward."""
    product = Operator("linear", OperatorClass.MATMUL, (2, 2, 2), 2, 1, 1, 1, 1, weight_bytes=16)
    kind = replace(make_kind("block", ITEMS), operators=(product, replace(product, weight_bytes=0, count=1)))
    points = [LayerPoint("block", 1, 1, False, Recompute.NONE, 0.2, 0.4, 400, 800, 600)]
    profile = make_profile(make_graph([kind], ["block"]), points, make_cluster(2, 0, BETA, ALPHA))
    overhead = HostOverhead(split_product=0.01, split_share=0.1)
    cost = LayerPricer(replace(profile, overhead=overhead)).price("block", Strategy(zero=2, zero_stage=stage), 2, 2)
    assert cost is not None
    assert cost.split_host == pytest.approx(share)
    assert cost.with_split_backward().host == cost.host + cost.split_host


@pytest.mark.parametrize(("beta", "hidden"), [(BETA, True), (BETA / 100, False)])
def test_replicas_sum_gradients_behind_the_last_backward(beta: float, hidden: bool) -> None:
    cost = pricer(beta).price("block", Strategy(data=8), 8, 1)
    assert cost is not None
    reduce = 2 * 7 / 8 * ITEMS * 4 / beta + 14 * ALPHA
    assert (reduce < cost.backward) is hidden
    assert cost.step_exposed == pytest.approx(max(0.0, reduce - cost.backward))
    assert cost.backward == pytest.approx(0.8 / 4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Strategy, Strategy]:
    """Two strategies of as many devices."""
    sizes = [draw(st.permutations([1, 2, 2, 3])) for _ in range(2)]
    made = [
        Strategy(data=own[0], zero=own[1], zero_stage=3 if own[1] > 1 else 0, context=own[2], tensor=own[3])
        for own in sizes
    ]
    return made[0], made[1]


def parts(strategy: Strategy) -> list[tuple[Fraction, Fraction]]:
    """Per rank the part of the batch's tokens (begin, end) that its boundary tensors hold, by a grid of ranks.

    Tokens are put in order of samples, then of their place in the sample.
    """
    batch, context = strategy.batch_degree, strategy.context
    grid = product(range(batch), range(context), range(strategy.tensor))
    return [(Fraction(b, batch), Fraction(c, context)) for b, c, _ in grid]


@given(pairs())
def test_devices_outside_a_run_of_exchanging_ones_need_nothing_of_it(pair: tuple[Strategy, Strategy]) -> None:
    """Each run holds the same tokens before and after."""
    left, right = (parts(strategy) for strategy in pair)
    layouts = [np.array(layout_of(strategy)) for strategy in pair]
    size = int(exchange_sizes(*layouts))
    assert pair[0].devices % size == 0
    if layout_of(pair[0]) == layout_of(pair[1]):
        assert size == 1
    for start in range(0, len(left), size):
        held = [cells(own[start : start + size], strategy) for own, strategy in zip((left, right), pair, strict=True)]
        assert held[0] == held[1]


def cells(own: list[tuple[Fraction, Fraction]], strategy: Strategy) -> set[tuple[int, int]]:
    """Twelfths of the samples, and of the tokens of each, that ranks hold."""
    wide, long = 12 // strategy.batch_degree, 12 // strategy.context
    return {(int(b * 12) + i, int(c * 12) + j) for b, c in own for i in range(wide) for j in range(long)}


def test_redistribution_of_all_pairs_of_layouts_at_once() -> None:
    every = [
        Strategy(data=4 // c // t, context=c, tensor=t) for c, t in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
    ]
    layouts, known = [layout_of(strategy) for strategy in every], pricer()
    matrix = known.redistributions(100, 8, layouts, layouts)
    for row, left in enumerate(every):
        assert [known.redistribution(100, 8, left, right) for right in every] == list(matrix[row])
    assert (matrix > 0).any()
    assert all(layout_of(strategy_with(own)) == own for own in layouts)
