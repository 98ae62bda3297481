"""What devices exchange between layouts, against boxes of whole items counted one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.arrays import BoolArray
from galvatron_lite.cost.layout import exchange_sizes, received_shares
from galvatron_lite.parallelism.layout import layout_of, strategy_with
from galvatron_lite.parallelism.strategy import Strategy

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
    return float(received_shares(np.array(layout_of(left)), np.array(layout_of(right))))


@pytest.mark.parametrize("every", [PICTURES, TOKENS])
def test_shares_are_those_of_items_counted_one_by_one(every: list[Strategy]) -> None:
    layouts = np.array([layout_of(strategy) for strategy in every])
    matrix = received_shares(layouts[:, None], layouts[None, :])
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
def test_redistribution_computed_by_hand(left: Strategy, right: Strategy, expected: float) -> None:
    assert share(left, right) == share(right, left) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.permutations([1, 2, 2, 3]), st.permutations([1, 2, 2, 3]), st.booleans(), st.booleans())
def test_any_degrees_of_two_layouts(first: list[int], second: list[int], grid: bool, channels: bool) -> None:
    """Three-sided grids against one another, or against samples and channels."""
    left = Strategy(data=first[0], depth=first[1], height=first[2], width=first[3])
    right = Strategy(data=second[0], depth=second[1], height=second[2], width=second[3])
    if not grid:
        right = Strategy(data=second[0] * second[1], zero=second[2], filters=second[3])
        right = replace(right, filters=1, channels=second[3]) if channels else right
    assert share(left, right) == pytest.approx(counted(left, right, EXTENTS), abs=1e-12)
    run = int(exchange_sizes(np.array(layout_of(left)), np.array(layout_of(right))))
    assert (run == 1) is (layout_of(left) == layout_of(right))
    for start in range(0, left.devices, run):
        run_of = range(start, start + run)
        both = [np.logical_or.reduce([held(one, device, EXTENTS) for device in run_of]) for one in (left, right)]
        assert (both[0] == both[1]).all()
    assert all(layout_of(strategy_with(layout_of(one))) == layout_of(one) for one in (left, right))
