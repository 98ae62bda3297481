"""Gradients that stay whole until the last micro-batch, shards larger than even ones, memory without buffers."""

import random
from dataclasses import fields, replace

import pytest

from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import gradients_of, terms
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES
from tests.factories import random_profile

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
    assert cost.transient_parameters == cost.gather_buffer == cost.full_gradients == cost.reduce_buffer == 0
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
