"""Moving activations between splits of four ranks: values and gradients against plain slicing of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.runtime.activations.layout import AxisSplit, Box, BoxExchange, Layout
from tests.pool import WorkerPool

TOKENS, PICTURE = (8, 12, 3), (4, 4, 5, 7)
SPLITS = {
    TOKENS: [Layout(4, 1, 4), Layout(2, 1, 4), Layout(2, 2, 4), Layout(1, 1, 4), Layout(1, 4, 4),
        Layout(2, 1, 4, context=2), Layout(1, 1, 4, context=2), Layout(1, 2, 4, context=2)],
    PICTURE: [
        Layout(4, 1, 4), Layout(2, 1, 4, (1, 2, 1)), Layout(1, 1, 4, (1, 2, 2)), Layout(1, 1, 4, (1, 1, 4)),
        Layout(1, 1, 4), Layout(1, 1, 4, channels=4), Layout(1, 1, 4, (2, 1, 2)),
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
            torch.testing.assert_close(own.grad, 2 * own.detach())


def move_rows_only() -> list[list[int]]:
    place = dist.get_rank()
    mover, whole = BoxExchange(dist.group.WORLD, place), torch.arange(8)
    source, target = Layout(2, 1, 4).samples((8,)), Layout(4, 1, 4).samples((8,))
    own = whole[place // 2 * 4 : place // 2 * 4 + 4]
    there = mover(own, source, target, (8,))
    return [there.tolist(), mover(there, target, source, (8,)).tolist()]


def move_to_few() -> list[float]:
    """Three rows of pixels on four ranks: one has none, and gets and gives nothing."""
    place, shape = dist.get_rank(), (1, 1, 3)
    whole = torch.arange(3.0).view(shape)
    source = Layout(1, 1, 4).samples(shape)
    target = AxisSplit(4, Layout(1, 1, 4, (1, 1, 4)).hidden((1, 1, 4)).axes)
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


def test_ranks_may_hold_nothing(pool: WorkerPool) -> None:
    assert pool.run(4, move_to_few) == [[0.0], [1.0], [2.0], []]
