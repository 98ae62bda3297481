"""Moving activations between layouts of four ranks: values and gradients against plain slicing of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.runtime.layout import Layout, Rectangle
from galvatron_lite.runtime.redistribute import Mover
from tests.pool import WorkerPool

ROWS, TOKENS, WIDTH = 8, 12, 3
LAYOUTS = [Layout(4, 1, 4), Layout(2, 1, 4), Layout(2, 2, 4), Layout(1, 1, 4), Layout(1, 4, 4)]


def cut(whole: torch.Tensor, piece: Rectangle) -> torch.Tensor:
    return whole[piece.top : piece.bottom, piece.left : piece.right]


def move_everywhere(dtype: torch.dtype) -> None:
    place = dist.get_rank()
    mover = Mover(dist.group.WORLD, place)
    whole = torch.arange(ROWS * TOKENS * WIDTH).reshape(ROWS, TOKENS, WIDTH).to(dtype)
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        own = cut(whole, source.rectangle(place, ROWS, TOKENS)).clone()
        wanted = cut(whole, target.rectangle(place, ROWS, TOKENS))
        if dtype.is_floating_point:
            own.requires_grad_()
        moved = mover(own, source, target, ROWS)
        torch.testing.assert_close(moved.detach(), wanted)
        if dtype.is_floating_point and moved is not own:
            # a loss of the whole: its gradient at every place is known, whoever holds the place
            moved.backward(2 * wanted)
            assert own.grad is not None
            torch.testing.assert_close(own.grad, 2 * own.detach())


def move_rows_only() -> list[list[int]]:
    place = dist.get_rank()
    mover, whole = Mover(dist.group.WORLD, place), torch.arange(ROWS)
    source, target = Layout(2, 1, 4), Layout(4, 1, 4)
    own = whole[place // 2 * 4 : place // 2 * 4 + 4]
    there = mover(own, source, target, ROWS)
    return [there.tolist(), mover(there, target, source, ROWS).tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_pairs_of_layouts(pool: WorkerPool, dtype: torch.dtype) -> None:
    pool.run(4, move_everywhere, dtype=dtype)


def test_tensors_of_one_dim_move_too(pool: WorkerPool) -> None:
    found = pool.run(4, move_rows_only)
    assert [there for there, _ in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [back for _, back in found] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
