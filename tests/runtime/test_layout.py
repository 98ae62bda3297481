"""Boxes of activations: every item is held, every rank receives what it wants, once; moving them on four ranks."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.activations.layout import ActivationLayout as Layout
from galvatron_lite.runtime.activations.layout import AxisSplit, Box, BoxExchange, route
from tests.pool import WorkerPool

ROWS = 12
Pair = tuple[AxisSplit, AxisSplit, tuple[int, ...]]


@st.composite
def layouts(draw: st.DrawFn, devices: int) -> Layout:
    batch = draw(st.sampled_from([degree for degree in divisors(devices) if ROWS % degree == 0]))
    group = devices // batch
    kind = draw(st.sampled_from(["whole", "tokens", "channels", "pixels"]))
    if kind != "pixels":
        named = {"whole": "copies", "tokens": "sequence", "channels": "channels"}
        return Layout(batch, **{named[kind]: group})
    depth = draw(st.sampled_from(divisors(group)))
    height = draw(st.sampled_from(divisors(group // depth)))
    return Layout(batch, planes=depth, rows=height, columns=group // depth // height)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Two ways to split a tensor whose tokens can be shared by all and whose pixels are any."""
    devices = draw(st.sampled_from([1, 2, 3, 4, 6]))
    shape = (ROWS, 12, *draw(st.lists(st.integers(1, 7), max_size=3)))
    source, target = draw(layouts(devices)), draw(layouts(devices))
    chosen = [draw(st.sampled_from([layout.hidden(shape), layout.samples(shape)])) for layout in (source, target)]
    return chosen[0], chosen[1], shape


def painted(piece: Box, shape: tuple[int, ...]) -> numpy.ndarray:
    page = numpy.zeros(shape, dtype=int)
    if piece.items:
        page[tuple(slice(start, stop) for start, stop in piece.ranges)] = 1
    return page


@given(pairs())
def test_a_split_covers_every_item_equally_often(pair: Pair) -> None:
    split, _, shape = pair
    count = sum(painted(split.box(place, shape), shape) for place in range(split.devices))
    assert (count == split.devices // numpy.prod([axis.shares for axis in split.axes])).all()


@given(pairs())
def test_items_that_a_rank_holds_are_not_sent(pair: Pair) -> None:
    source, target, shape = pair
    ways = [route(source, target, shape, place) for place in range(source.devices)]
    for place, way in enumerate(ways):
        assert (way.held, way.wanted) == ((source.box(place, shape),), (target.box(place, shape),))
        kept = way.held[0].meet(way.wanted[0])
        assert way.receives[place] == ((kept,) if kept.items else ())
        assert way.local == all(not boxes or to == at for at, w in enumerate(ways) for to, boxes in enumerate(w.sends))
        if source == target:
            assert way.local
    sent = (boxes for place, way in enumerate(ways) for at, boxes in enumerate(way.sends) if at != place)
    total = sum(box.items for boxes in sent for box in boxes)
    missing = [painted(way.wanted[0], shape) & ~painted(way.held[0], shape) for way in ways]
    assert total == sum(int(one.sum()) for one in missing)


def test_layouts_of_strategies() -> None:
    assert Layout.of(Strategy(data=2, tensor=2)) == Layout(batch=2, copies=2)
    assert Layout.of(Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True)) == Layout(batch=2, sequence=2)
    assert Layout.of(Strategy(tensor=2, sequence_parallel=True)).full_tokens == Layout(copies=2)
    assert Layout.of(Strategy(data=2, height=2, width=3)) == Layout(batch=2, rows=2, columns=3)
    assert Layout.of(Strategy(data=2, depth=2)).full_tokens == Layout(batch=2, planes=2)
    assert Layout.of(Strategy(filters=2)) == Layout(copies=2)
    assert Layout.of(Strategy(channels=4)) == Layout(channels=4)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(InputError, match="samples"):
        Layout(batch=2).samples((3, 4))
    with pytest.raises(InputError, match="tokens"):
        Layout(sequence=2).hidden((2, 3, 4))


def test_an_early_and_a_late_piece_of_the_tokens() -> None:
    """Ranks that share tokens take them from both ends; a tensor group splits each rank's again."""
    shape = (8, 16, 3)
    tokens = [
        [box.ranges[1] for box in Layout.of(strategy).hidden(shape).boxes(place, shape)]
        for strategy in (Strategy(data=2, context=2), Strategy(context=2, tensor=2, sequence_parallel=True))
        for place in range(4)
    ]
    early, late = [(0, 4), (12, 16)], [(4, 8), (8, 12)]
    assert tokens == [early, late, early, late, early[:1], early[1:], late[:1], late[1:]]
    uneven = (8, 18, 3)
    assert Layout.of(Strategy(context=2)).hidden(uneven).box(1, uneven) == Box(((0, 8), (9, 18), (0, 3)))
    with pytest.raises(InputError, match="context=1"):
        Layout.of(Strategy(context=2)).hidden(shape).box(0, shape)


TOKENS, PICTURE = (8, 12, 3), (4, 4, 5, 7)
SPLITS = {
    TOKENS: [Layout(batch=4), Layout(batch=2, copies=2), Layout(batch=2, sequence=2), Layout(copies=4),
        Layout(sequence=4), Layout(batch=2, tokens=2), Layout(tokens=2, copies=2), Layout(tokens=2, sequence=2)],
    PICTURE: [
        Layout(batch=4), Layout(batch=2, rows=2), Layout(rows=2, columns=2), Layout(columns=4),
        Layout(copies=4), Layout(channels=4), Layout(planes=2, columns=2),
    ],
}  # fmt: skip


def cut(whole: torch.Tensor, pieces: tuple[Box, ...]) -> torch.Tensor:
    """Boxes along the tokens, one behind the other."""
    return torch.cat([whole[tuple(slice(start, stop) for start, stop in piece.ranges)] for piece in pieces], 1)


def move_everywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    place = dist.get_rank()
    mover = BoxExchange(dist.group.WORLD, place)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    splits = [layout.hidden(shape) for layout in SPLITS[shape]]
    for source, target in itertools.product(splits, splits):
        own = cut(whole, source.boxes(place, shape)).clone()
        wanted = cut(whole, target.boxes(place, shape))
        if dtype.is_floating_point:
            own.requires_grad_()
        moved = mover(own, source, target, shape)
        torch.testing.assert_close(moved.detach(), wanted)
        if dtype.is_floating_point and moved is not own:
            # a loss of the whole: its gradient of every item is known, whoever holds it; moved may be changed in place
            moved.mul_(1.0).backward(2 * wanted)
            assert own.grad is not None
            torch.testing.assert_close(own.grad, 2 * own.detach())


def move_rows_only() -> list[list[int]]:
    place = dist.get_rank()
    mover, whole = BoxExchange(dist.group.WORLD, place), torch.arange(8)
    source, target = Layout(batch=2, copies=2).samples((8,)), Layout(batch=4).samples((8,))
    own = whole[place // 2 * 4 : place // 2 * 4 + 4]
    there = mover(own, source, target, (8,))
    return [there.tolist(), mover(there, target, source, (8,)).tolist()]


def move_to_few() -> list[float]:
    """Three rows of pixels on four ranks: one has none, and gets and gives nothing."""
    place, shape = dist.get_rank(), (1, 1, 3)
    whole = torch.arange(3.0).view(shape)
    source = Layout(copies=4).samples(shape)
    target = AxisSplit(4, Layout(columns=4).hidden((1, 1, 4)).axes)
    there = BoxExchange(dist.group.WORLD, place)(whole, source, target, shape)
    back = BoxExchange(dist.group.WORLD, place)(there, target, source, shape)
    assert torch.equal(back, whole)
    values: list[float] = there.flatten().tolist()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", list(SPLITS))
def test_all_pairs_of_layouts(pool: WorkerPool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool.run(4, move_everywhere, shape=shape, dtype=dtype)


def test_tensors_of_one_dim_move_too(pool: WorkerPool) -> None:
    found = pool.run(4, move_rows_only)
    assert [there for there, _ in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [back for _, back in found] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_ranks_may_hold_no_items(pool: WorkerPool) -> None:
    assert pool.run(4, move_to_few) == [[0.0], [1.0], [2.0], []]
