"""The arithmetic of rectangles: every place is held, and moving gives every rank what it wants, once."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.runtime.layout import Layout, Rectangle, layout_of, route

ROWS, TOKENS = 16, 48


@st.composite
def layouts(draw: st.DrawFn, devices: int) -> Layout:
    batch = draw(
        st.sampled_from([degree for degree in range(1, devices + 1) if devices % degree == 0 == ROWS % degree])
    )
    return Layout(batch, draw(st.sampled_from([1, devices // batch])), devices)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    devices = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return draw(layouts(devices)), draw(layouts(devices))


def painted(piece: Rectangle) -> numpy.ndarray:
    page = numpy.zeros((ROWS, TOKENS), dtype=int)
    page[piece.top : piece.bottom, piece.left : piece.right] = 1
    return page


@given(pairs())
def test_a_layout_covers_every_place_equally_often(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    count = sum(painted(layout.rectangle(place, ROWS, TOKENS)) for place in range(layout.devices))
    assert (count == layout.devices // (layout.batch * layout.sequence)).all()


@given(pairs())
def test_every_rank_receives_what_it_wants_once(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    ways = [route(source, target, ROWS, TOKENS, place) for place in range(source.devices)]
    for place, way in enumerate(ways):
        assert way.wanted == target.rectangle(place, ROWS, TOKENS)
        numpy.testing.assert_array_equal(sum(painted(piece) for piece in way.receives), painted(way.wanted))
        for sender, piece in enumerate(way.receives):
            assert ways[sender].sends[place] == piece
            held = painted(ways[sender].held)
            assert not piece.items or (held[piece.top : piece.bottom, piece.left : piece.right] == 1).all()


@given(pairs())
def test_nothing_travels_that_is_at_hand(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    for place in range(source.devices):
        way = route(source, target, ROWS, TOKENS, place)
        assert way.receives[place] == way.held.meet(way.wanted) or not way.held.meet(way.wanted).items
        assert not way.local or all(not piece.items for rank, piece in enumerate(way.receives) if rank != place)


def test_strategies_have_layouts() -> None:
    assert layout_of(Strategy(data=2, zero=2, zero_stage=3, tensor=2)) == Layout(4, 1, 8)
    assert layout_of(Strategy(data=2, tensor=4, sequence_parallel=True)) == Layout(2, 4, 8)


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(InputError, match=r"samples: 6.*divisible by 4"):
        Layout(4, 1, 4).rectangle(0, 6, 1)
    with pytest.raises(InputError, match=r"tokens: 7.*divisible by 2"):
        Layout(1, 2, 2).rectangle(0, 6, 7)
    with pytest.raises(InputError, match="layout"):
        Layout(2, 2, 8)
