"""Shares, slices of parameters, and shapes without a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, slice_full
from tests.pool import WorkerPool


@given(st.integers(1, 500), st.integers(1, 16))
def test_shares_cover_everything_evenly(extent: int, degree: int) -> None:
    shares = [share(extent, degree, rank) for rank in range(degree)]
    assert [index for start, length in shares for index in range(start, start + length)] == list(range(extent))
    lengths = [length for _, length in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_fused_parts_are_sliced_one_by_one() -> None:
    # query 0..3, key 4..5, value 6..7: the second of two devices has the second half of each
    shard = ParameterShard(Placement.SHARDED, (8,), degree=2, rank=1, dim=0, parts=(4, 2, 2))
    assert slice_full(torch.arange(8), shard).tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_without_a_group(device: str) -> None:
    group = ShapeOnlyGroup(4, rank=3)
    tensor = torch.arange(2 * 8 * 3.0, device=device).reshape(2, 8, 3)
    assert group.all_reduce(tensor).shape == (2, 8, 3)
    assert group.all_gather(tensor, 1).shape == (2, 32, 3)
    scattered = group.reduce_scatter(tensor, 1)
    assert scattered.shape == (2, 2, 3)
    assert device == "meta" or torch.equal(scattered, tensor[:, 6:])
    with pytest.raises(InputError, match="divisible by the tensor-parallel degree 4"):
        group.reduce_scatter(tensor, 2)


def collectives() -> list[Any]:
    group = ProcessTensorGroup()
    mine = torch.arange(8.0).reshape(2, 4) + 10 * group.rank
    results = [group.all_reduce(mine)]
    results += [group.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [group.reduce_scatter(mine, dim) for dim in (0, 1)]
    # strided tensors, too
    return [*results, group.all_reduce(mine.t()), group.all_gather(mine.t(), 1), group.reduce_scatter(mine.t(), 1)]


def test_collectives(pool: WorkerPool) -> None:
    first = torch.arange(8.0).reshape(2, 4)
    second, total = first + 10, 2 * first + 10
    for rank, results in enumerate(pool.run(2, collectives)):
        expected = [total, torch.cat([first, second], 0), *[torch.cat([first, second], 1)] * 2]
        expected += [total.chunk(2, 0)[rank], total.chunk(2, 1)[rank]]
        expected += [total.t(), torch.cat([first.t(), second.t()], 1), total.t().chunk(2, 1)[rank]]
        torch.testing.assert_close(results, expected)
