"""What a layer costs: alone, in copies, over accumulated micro-batches."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerCost, LayerPricer, ParameterSharing
from galvatron_lite.cost.layout import layout, of_layout
from galvatron_lite.cost.memory import gradients_of, terms
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes.registry import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import LayerPoint, Overlap, Profile
from galvatron_lite.units import ITEM_BYTES
from tests.factories import make_cluster, make_graph, make_kind, make_profile, random_profile

PARAMETERS = 1_000_000
BETA, ALPHA = 1e9, 1e-6


def pricer(beta: float = BETA) -> LayerPricer:
    kind = make_kind("block", PARAMETERS, tensor_degrees=4)
    points = [LayerPoint("block", 4, 1, False, Recompute.NONE, 0.4, 0.8, 400, 800, 600)]
    cluster = make_cluster(8, 0, beta, ALPHA)
    return LayerPricer(make_profile(make_graph([kind], ["block"]), points, cluster, overlap=Overlap()))


def test_context_ranks_take_shares_of_the_tokens() -> None:
    whole = pricer().price("block", Strategy(), 4, 1)
    shared = pricer().price("block", Strategy(context=4), 4, 1)
    assert shared.forward == pytest.approx(whole.forward / 4)
    assert shared.kept == pytest.approx(whole.kept / 4)
    assert layout(Strategy(context=4)) != layout(Strategy(data=4))


@pytest.mark.parametrize(
    ("strategy", "shards"), [(Strategy(zero=4, zero_stage=1), 1), (Strategy(zero=4, zero_stage=3), 4)]
)
def test_gradients_of_shared_parameters_are_summed_as_they_are_held(strategy: Strategy, shards: int) -> None:
    exchanged = 250_000
    costs = [pricer().price("block", strategy, 4, 2, ParameterSharing(exchanged=items)) for items in (0, exchanged)]
    size = exchanged / shards * 4
    seconds = 2 * (size / 2 / BETA + ALPHA)
    assert costs[1].step_exposed - costs[0].step_exposed == pytest.approx(seconds)


@pytest.mark.parametrize(("beta", "hidden"), [(BETA, True), (BETA / 100, False)])
def test_replicas_sum_gradients_behind_the_last_backward(beta: float, hidden: bool) -> None:
    cost = pricer(beta).price("block", Strategy(data=8), 8, 1)
    reduce = 2 * 7 / 8 * PARAMETERS * 4 / beta + 14 * ALPHA
    assert (reduce < cost.backward) is hidden
    assert cost.step_exposed == pytest.approx(max(0.0, reduce - cost.backward))
    assert cost.backward == pytest.approx(0.8 / 4)


def test_redistribution_of_all_pairs_of_layouts_at_once() -> None:
    every = [
        Strategy(data=4 // c // t, context=c, tensor=t) for c, t in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
    ]
    layouts, known = [layout(strategy) for strategy in every], pricer()
    matrix = known.redistributions(100, 8, layouts, layouts)
    for row, left in enumerate(every):
        assert [known.redistribution(100, 8, left, right) for right in every] == list(matrix[row])
    assert (matrix > 0).any()
    assert all(layout(of_layout(own)) == own for own in layouts)


HIDDEN, ENTRIES = 768, 50257
WEIGHTS = 12 * HIDDEN * HIDDEN
"""Of a block's matmuls; GPT-2 small."""
BIASES = 9 * HIDDEN


@pytest.fixture(scope="module")
def known() -> Profile:
    return estimate_profile(load_model("gpt2"), load_cluster("a100-40gb", 8), precision="bf16", name="gpt2")


def held(known: Profile, kind: str, strategy: Strategy) -> int:
    cost = LayerPricer(known).price(kind, strategy, 8, 1)
    return int(cost.copies)


def test_a_block_holds_one_of_each_weight(known: Profile) -> None:
    assert held(known, "block", Strategy(data=8)) == 2 * (WEIGHTS + BIASES)
    assert held(known, "block", Strategy(zero=8, zero_stage=1)) == 2 * (WEIGHTS + BIASES)
    sliced = held(known, "block", Strategy(data=4, tensor=2))
    assert WEIGHTS <= sliced <= WEIGHTS + 2 * BIASES


def test_tables_are_copied_where_a_matmul_reads_them(known: Profile) -> None:
    assert held(known, "before", Strategy(data=8)) == 0
    assert held(known, "after", Strategy(data=8)) == 2 * ENTRIES * HIDDEN
    assert held(known, "after", Strategy(data=4, tensor=2)) == ENTRIES * HIDDEN


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_new_gradient_of_a_table_is_of_its_own_precision(known: Profile, kind: str) -> None:
    pricer = LayerPricer(known)
    whole, half = (pricer.price(kind, one, 8, 1) for one in (Strategy(data=8), Strategy(data=4, tensor=2)))
    assert whole.new_gradient == 4 * ENTRIES * HIDDEN
    # the table alone is looked up before the blocks, and read by a matmul behind them
    assert whole.cast_gradient == (4 if kind == "before" else 4 + 2) * ENTRIES * HIDDEN
    assert half.new_gradient == pytest.approx(2 * ENTRIES * HIDDEN, rel=0.03)  # positions are not split


@pytest.mark.parametrize("stage", [2, 3])
def test_what_zero_gathers_has_none(known: Profile, stage: int) -> None:
    assert held(known, "block", Strategy(zero=8, zero_stage=stage)) == 0


def test_experts_that_no_other_rank_has_are_not_gathered() -> None:
    mixture = estimate_profile(load_model("mixtral-8x7b"), load_cluster("h100", 16), precision="bf16", name="mixtral")
    experts, pricer = mixture.graph.kinds["block"].expert_parameters, LayerPricer(mixture)
    alone, shared = (pricer.price("block", Strategy(zero=d, zero_stage=3, expert=8), d, 1) for d in (8, 16))
    assert alone.copies == pytest.approx(2 * experts / 8, rel=1e-3)
    assert shared.copies == 0
    # gathered for use: all of the layer's parameters on a device, or those that are not its own experts'
    assert shared.gather - alone.gather == pytest.approx(2 * experts / 8, rel=1e-3)


def test_what_is_computed_again_works_with_its_own(known: Profile) -> None:
    strategy = Strategy(data=8, recompute=Recompute.FULL)
    bare = LayerPricer(replace(known, copied_bytes=0)).price("block", strategy, 8, 1)
    full = LayerPricer(known).price("block", strategy, 8, 1)
    assert full.copies == 0
    assert full.working - bare.working == 2 * (WEIGHTS + BIASES)


def test_many_are_priced_as_one(known: Profile) -> None:
    strategies = [Strategy(data=8), Strategy(zero=8, zero_stage=2), Strategy(data=4, tensor=2)]
    many = LayerPricer(known).price_many("block", strategies, 8, 1).copies
    assert np.array_equal(many, [held(known, "block", one) for one in strategies])


def test_whole_logits_are_worked_with_where_tokens_are_shared(known: Profile) -> None:
    """A loss on shares works with shares; where tokens are shared, logits are gathered: as much as without slices."""
    pricer, samples = LayerPricer(known), 8
    tokens = 1024 * samples
    alone = pricer.price("after", Strategy(), samples, 1)
    shares = pricer.price("after", Strategy(tensor=2), samples, 1)
    gathered = pricer.price("after", Strategy(tensor=2, context=2), 2 * samples, 1)
    # fp32 logits and their gradient, instead of those, logarithms of likelihoods and two gradients
    assert alone.working - shares.working == pytest.approx((3 - 2 / 2) * 4 * tokens * ENTRIES, rel=1e-3)
    assert gathered.working == pytest.approx(alone.working, rel=1e-3)


def test_nothing_is_cast_in_full_precision() -> None:
    whole = estimate_profile(
        load_model("gpt2", precision="fp32"), load_cluster("a100-40gb", 8), precision="fp32", name="gpt2"
    )
    assert held(whole, "block", Strategy(data=8)) == 0


PROFILE = random_profile(random.Random(1))
ITEMS = PROFILE.graph.kinds["block0"].parameters.total
WHOLE = ITEMS * ITEM_BYTES[PROFILE.reduce_precision]


def priced(profile: Profile, stage: int) -> LayerCost:
    cost = LayerPricer(profile).price("block0", Strategy(zero=4, zero_stage=stage), 8, 1)
    assert cost is not None
    return cost


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_whole_between_microbatches_only(stage: int) -> None:
    cost = priced(replace(PROFILE, accumulates=True), stage)
    assert gradients_of(cost, 2) == WHOLE
    assert gradients_of(cost, 1) == pytest.approx(WHOLE / 4, abs=1)
    assert terms(cost, 1, 2).rest - terms(cost, 1, 1).rest == cost.accumulated


@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_reduced_once_a_step(stage: int) -> None:
    each, once = (priced(replace(PROFILE, accumulates=own, hidden={"zero": 0.0}), stage) for own in (False, True))
    moved = each.backward_exposed - once.backward_exposed
    assert moved > 0
    assert once.step_exposed - each.step_exposed == pytest.approx(moved)
    assert gradients_of(each, 2) == pytest.approx(WHOLE / 4, abs=1)


def test_larger_shards() -> None:
    plain, more = (priced(replace(PROFILE, shard_share=share), 3) for share in (0.0, 0.01))
    states = ITEMS * PROFILE.optimizer.state_bytes
    assert (plain.states, more.states) == pytest.approx((0.25 * states, 0.26 * states), abs=1)


def test_no_buffers() -> None:
    cost = priced(replace(PROFILE, unbuffered=True), 3)
    assert cost.gather == cost.gathering == cost.whole_gradients == cost.reducing == 0
    assert cost.states == priced(PROFILE, 3).states


@pytest.mark.parametrize("options", [{"accumulates": True}, {"shard_share": 0.01}, {"unbuffered": True}])
def test_many_at_once_are_the_same(options: dict[str, object]) -> None:
    pricer = LayerPricer(replace(PROFILE, **options))  # type: ignore[arg-type]
    strategies = [Strategy(data=4), *(Strategy(zero=4, zero_stage=stage) for stage in (1, 2, 3))]
    costs = pricer.price_many("block0", strategies, 8, 1)
    for row, strategy in enumerate(strategies):
        own = pricer.price("block0", strategy, 8, 1)
        assert own is not None
        assert all(getattr(costs, item.name)[row] == getattr(own, item.name) for item in fields(own))
