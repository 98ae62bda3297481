"""Many strategies priced at once, overlap of communication, and moving between layouts."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.arrays import BoolArray
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import exposed_by, hidden_share, moment_of, together
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.layout import exchanging, layout, of_layout, received
from galvatron_lite.cost.memory import terms
from galvatron_lite.cost.points import LayerFigures
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.strategy import Strategies, Strategy
from galvatron_lite.profiler.schema import Overlap
from tests.cost.priced import Case, cases

RECORDED = Path(__file__).with_name("priced.json")
NAMES = [item.name for item in fields(LayerCost) if item.name != "valid"]
SUMS = ("forward_seconds", "backward_seconds", "step_seconds")


def many(case: Case) -> LayerCost:
    pricer = LayerPricer(case.profile)
    return pricer.price_many(case.kind, case.strategies, case.microbatch, case.stages, case.sharing)


def singles(case: Case) -> list[LayerCost | None]:
    pricer = LayerPricer(case.profile)
    return [pricer.price(case.kind, one, case.microbatch, case.stages, case.sharing) for one in case.strategies]


def test_figures_are_those_recorded_one_strategy_at_a_time() -> None:
    """``priced.json``: the figures that a program with a branch for each choice gave for the same cases."""
    for case, recorded in zip(cases(7, 44, 9), json.loads(RECORDED.read_text()), strict=True):
        costs = many(case)
        assert list(costs.valid) == [row is not None for row in recorded]
        for place, row in enumerate(recorded):
            if row is not None:
                assert costs.copies[place] == costs.new_gradient[place] == 0, "profiles of weights that are not cast"
                recent = ("accumulated", "copies", "frozen_copies", "new_gradient", "cast_gradient", "bucket")
                own = [getattr(costs, name)[place] for name in NAMES if name not in recent]
                assert own == pytest.approx(row, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_many_are_priced_as_each_alone_to_the_last_bit(seed: int) -> None:
    seen = 0
    for case in cases(100 + seed, 16, 40):
        costs, alone = many(case), singles(case)
        assert list(costs.valid) == [cost is not None for cost in alone]
        found = terms(costs, 2, 1)
        for place, cost in enumerate(alone):
            if cost is not None:
                seen += 1
                assert {name: getattr(costs, name)[place] for name in NAMES} | {"valid": True} == asdict(cost)
                assert [getattr(costs, name)[place] for name in SUMS] == [getattr(cost, name) for name in SUMS]
                expected = terms(cost, 2, 1)
                assert all(getattr(found, own)[place] == getattr(expected, own) for own in expected.__slots__)
    assert seen > 200


def test_micro_batches_may_differ_between_strategies() -> None:
    for case in cases(5, 12, 20):
        pricer, factors = LayerPricer(case.profile), np.arange(1, len(case.strategies) + 1)
        batches = case.microbatch * factors
        costs = pricer.price_many(case.kind, Strategies.of(case.strategies), batches, case.stages, case.sharing)
        for place, strategy in enumerate(case.strategies):
            alone = pricer.price(case.kind, strategy, int(batches[place]), case.stages, case.sharing)
            if alone is not None:
                assert {name: getattr(costs, name)[place] for name in NAMES} | {"valid": True} == asdict(alone)


def test_no_strategies_and_no_points() -> None:
    case = next(cases(1, 1, 4))
    pricer = LayerPricer(case.profile)
    assert len(pricer.price_many("block", [], 8, 1).valid) == 0
    assert not pricer.price_many("block", [Strategy(tensor=5)], 8, 1).valid.any()


GROUP = RankGroup(4)
FREE = Overlap()
SLOWED = Overlap(1.1256, 1.3)


def message(
    cause: str = "zero",
    moment: Moment = Moment.FORWARD,
    overlaps: bool = True,
    collective: Collective = Collective.REDUCE_SCATTER,
) -> Communication:
    return Communication(collective, 1.0, GROUP, moment, overlaps, 1, cause)


def figures(forward: float = 1.0, backward: float = 2.0) -> LayerFigures:
    return LayerFigures(forward, backward, 0, 0, 0)


def simulated(compute: float, communication: float, overlap: Overlap) -> float:
    """Both advance in small steps, each slowed while the other still runs."""
    left, sent, clock, tick = compute, communication, 0.0, 1e-4
    while left > 0 or sent > 0:
        both = left > 0 and sent > 0
        left -= tick / (overlap.compute_slowdown if both else 1.0)
        sent -= tick / (overlap.communication_slowdown if both else 1.0)
        clock += tick
    return clock


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_two_that_slow_one_another_down(compute: float, communication: float, a: float, b: float) -> None:
    overlap = Overlap(a, b)
    assert together(compute, communication, overlap) == pytest.approx(
        simulated(compute, communication, overlap), abs=1e-3
    )


def test_without_named_shares_a_dimension_decides() -> None:
    parts = [(message("data", Moment.STEP), 5.0), (message("tensor", overlaps=False), 0.25)]
    exposed = exposed_by(parts, figures(), {}, FREE)
    assert (exposed.forward, exposed.backward, exposed.step) == pytest.approx((0.25, 0.0, 3.0))


@pytest.mark.parametrize(("share", "left"), [(0.0, 1.5), (0.5, 0.75), (1.0, 0.5)])
def test_a_named_share_hides_and_the_rest_blocks(share: float, left: float) -> None:
    """1.5 s beside 1 s of forward: the share that may hide does so up to the compute."""
    exposed = exposed_by([(message("tensor", overlaps=False), 1.5)], figures(), {"tensor": share}, FREE)
    assert exposed.forward == pytest.approx(left)
    assert (exposed.backward, exposed.step) == (0.0, 0.0)


def test_a_share_for_one_moment_goes_before_that_of_the_cause() -> None:
    hidden = {"zero": 0.25, "zero.backward": 0.75}
    assert hidden_share(message("zero", Moment.BACKWARD), hidden) == 0.75
    assert hidden_share(message("zero", Moment.FORWARD), hidden) == 0.25
    assert hidden_share(message("data", Moment.STEP), hidden) == 1.0
    assert hidden_share(message("tensor", overlaps=False), hidden) == 0.0


def test_gradients_hide_behind_the_last_backward_and_new_parameters_behind_the_first_forward() -> None:
    scatter = message(moment=Moment.STEP)
    gather = message(moment=Moment.STEP, collective=Collective.ALL_GATHER)
    assert (moment_of(scatter), moment_of(gather)) == ("step", "gather")
    assert exposed_by([(scatter, 2.0)], figures(), {}, FREE).step == pytest.approx(0.0)
    assert exposed_by([(gather, 2.0)], figures(), {}, FREE).step == pytest.approx(1.0)
    assert exposed_by([(scatter, 3.0), (gather, 3.0)], figures(), {}, FREE).step == pytest.approx(1.0 + 2.0)
    blocked = exposed_by([(scatter, 3.0), (gather, 3.0)], figures(), {"zero.gather": 0.0}, FREE)
    assert blocked.step == pytest.approx(1.0 + 3.0)


def test_what_a_micro_batch_hides_leaves_less_room_for_the_step() -> None:
    parts = [(message(moment=Moment.BACKWARD), 1.5), (message("data", Moment.STEP), 1.0)]
    exposed = exposed_by(parts, figures(), {}, FREE)
    assert (exposed.backward, exposed.step) == pytest.approx((0.0, 0.5))


def test_the_embedding_without_compute_is_the_tail() -> None:
    exposed = exposed_by([(message("data", Moment.STEP), 0.7)], figures(0.0, 0.0), {}, SLOWED)
    assert exposed.step == pytest.approx(0.7)


def queue_tail(layers: list[tuple[float, float]]) -> float:
    """Seconds from the last backward to the last reduction: buckets go one after another, each after its layer."""
    clock = free = 0.0
    for compute, bucket in layers:
        clock += compute
        free = max(free, clock) + bucket
    return free - clock


@given(st.integers(1, 40), st.floats(0.01, 2.0), st.floats(0.01, 2.0), st.floats(0.0, 5.0))
def test_layer_by_layer_the_tail_of_a_stage_is_right_up_to_one_bucket(
    count: int, compute: float, bucket: float, embedding: float
) -> None:
    """Equal layers, then the embedding, against buckets in one queue."""
    layers = [(compute, bucket)] * count
    one = exposed_by([(message("data", Moment.STEP), bucket)], figures(backward=compute), {}, FREE).step
    tail = exposed_by([(message("data", Moment.STEP), embedding)], figures(backward=0.0), {}, FREE).step
    exact = queue_tail([*layers, (0.0, embedding)])
    assert exact - min(bucket, compute) - 1e-9 <= count * one + tail <= exact + 1e-9


EXTENTS = (12, 12, 6, 6, 6)
"""Samples, channels or tokens, planes, rows, columns: all degrees of three ranks or two divide them."""
QUARTERS = (4, 4, 4, 4, 4)


def held(strategy: Strategy, device: int, extents: tuple[int, ...]) -> BoolArray:
    """Which items of the boundary tensor a device holds: row-major over the fields, the last innermost."""
    sides = (strategy.depth, strategy.height, strategy.width)
    inner = strategy.channels if strategy.channels > 1 else strategy.filters * strategy.tensor
    order = (strategy.batch_degree, strategy.context, *sides, inner)
    place = np.unravel_index(device, order)
    tokens, token = strategy.context, int(place[1])
    if strategy.sequence_parallel:
        tokens, token = tokens * strategy.tensor, token * strategy.tensor + int(place[5])
    ways = (order[0], tokens * strategy.channels, *sides)
    index = (place[0], token * strategy.channels + (place[5] if strategy.channels > 1 else 0), *place[2:5])
    items = np.zeros(extents, dtype=np.bool_)
    items[
        tuple(
            slice(int(own) * extent // many, (int(own) + 1) * extent // many)
            for own, many, extent in zip(index, ways, extents, strict=True)
        )
    ] = True
    return items


def counted(left: Strategy, right: Strategy, extents: tuple[int, ...]) -> float:
    """Share of all items that the device which gets most gets from others: there and back, the mean."""
    pairs = [(held(left, device, extents), held(right, device, extents)) for device in range(left.devices)]
    there, back = max((b & ~a).sum() for a, b in pairs), max((a & ~b).sum() for a, b in pairs)
    return float(there + back) / 2 / prod(extents)


PICTURES = [
    Strategy(data=4), Strategy(width=4), Strategy(height=4), Strategy(height=2, width=2), Strategy(data=2, width=2),
    Strategy(data=2, height=2), Strategy(depth=2, width=2), Strategy(filters=4), Strategy(channels=4),
    Strategy(data=2, filters=2), Strategy(data=2, channels=2), Strategy(zero=4, zero_stage=3),
]  # fmt: skip
TOKENS = [
    Strategy(data=4), Strategy(context=4), Strategy(tensor=4), Strategy(tensor=4, sequence_parallel=True),
    Strategy(data=2, tensor=2), Strategy(data=2, tensor=2, sequence_parallel=True), Strategy(context=2, tensor=2),
    Strategy(data=2, context=2), Strategy(context=2, tensor=2, sequence_parallel=True),
]  # fmt: skip


def share(left: Strategy, right: Strategy) -> float:
    return float(received(np.array(layout(left)), np.array(layout(right))))


@pytest.mark.parametrize("every", [PICTURES, TOKENS])
def test_shares_are_those_of_items_counted_one_by_one(every: list[Strategy]) -> None:
    layouts = np.array([layout(strategy) for strategy in every])
    matrix = received(layouts[:, None], layouts[None, :])
    for (row, left), (column, right) in product(enumerate(every), enumerate(every)):
        assert matrix[row, column] == pytest.approx(counted(left, right, QUARTERS), abs=1e-12), f"{left} to {right}"


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (Strategy(data=4), Strategy(width=4), 3 / 16),  # a quarter of the columns of each of its own samples stays
        (Strategy(height=2), Strategy(width=2), 1 / 4),  # a quarter of the picture changes hands
        (Strategy(data=2), Strategy(filters=2), 1 / 4),  # half of all there, nothing back
        (Strategy(channels=4), Strategy(filters=4), 3 / 8),  # the other three quarters there, nothing back
        (Strategy(channels=4), Strategy(width=4), 3 / 16),
        (Strategy(data=4), Strategy(zero=4, zero_stage=2), 0.0),
    ],
)
def test_by_hand(left: Strategy, right: Strategy, expected: float) -> None:
    assert share(left, right) == share(right, left) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([1, 2, 2, 3]),
    st.permutations([1, 2, 2, 3]),
    st.sampled_from(["grids", "filters", "channels", "tokens"]),
)
def test_any_degrees(first: list[int], second: list[int], kind: str) -> None:
    """Three-sided grids against one another, or against samples and channels; shares of tokens."""
    left, right = (Strategy(data=one[0], depth=one[1], height=one[2], width=one[3]) for one in (first, second))
    if kind == "tokens":
        left, right = (Strategy(data=one[0] * one[1], context=one[2], tensor=one[3]) for one in (first, second))
    elif kind != "grids":
        right = Strategy(data=second[0] * second[1], zero=second[2], **{kind: second[3]})
    assert share(left, right) == pytest.approx(counted(left, right, EXTENTS), abs=1e-12)
    run = int(exchanging(np.array(layout(left)), np.array(layout(right))))
    assert (run == 1) is (layout(left) == layout(right))
    for start in range(0, left.devices, run):
        run_of = range(start, start + run)
        both = [np.logical_or.reduce([held(one, device, EXTENTS) for device in run_of]) for one in (left, right)]
        assert (both[0] == both[1]).all()
    assert all(layout(of_layout(layout(one))) == layout(one) for one in (left, right))
