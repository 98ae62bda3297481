"""What a layer costs under a strategy, by hand."""

from __future__ import annotations

import pytest

from galvatron_lite.cost.layer import LayerPricer, Sharing, layout
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.profiler.schema import LayerPoint, Overlap
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
    assert layout(Strategy(context=4)) != layout(Strategy(data=4))


@pytest.mark.parametrize(
    ("strategy", "shards"), [(Strategy(zero=4, zero_stage=1), 1), (Strategy(zero=4, zero_stage=3), 4)]
)
def test_gradients_of_shared_parameters_are_summed_as_they_are_held(strategy: Strategy, shards: int) -> None:
    exchanged = 250_000
    costs = [pricer().price("block", strategy, 4, 2, Sharing(exchanged=items)) for items in (0, exchanged)]
    assert costs[0] is not None
    assert costs[1] is not None
    size = exchanged / shards * 4
    seconds = 2 * (size / 2 / BETA + ALPHA)
    assert costs[1].step_exposed - costs[0].step_exposed == pytest.approx(seconds)


@pytest.mark.parametrize(("beta", "hidden"), [(BETA, True), (BETA / 100, False)])
def test_replicas_sum_gradients_behind_the_last_backward(beta: float, hidden: bool) -> None:
    cost = pricer(beta).price("block", Strategy(data=8), 8, 1)
    assert cost is not None
    reduce = 2 * 7 / 8 * ITEMS * 4 / beta + 14 * ALPHA
    assert (reduce < cost.backward) is hidden
    assert cost.step_exposed == pytest.approx(max(0.0, reduce - cost.backward))
    assert cost.backward == pytest.approx(0.8 / 4)
